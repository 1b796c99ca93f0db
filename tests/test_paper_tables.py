"""The paper's printed figures against the estimate and small programs, and the page against its scripts."""

import importlib
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import gpu_compiler
import jzero

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "paper_tables"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Scripts of an experiment import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def module(name):
    return importlib.import_module(name)


def test_every_digit_of_table_1():
    cells = module("theory").table_1()
    assert len(cells) == 54
    prints = module("paper").as_table_1_prints
    assert [prints(cell.found) for cell in cells] == [cell.printed for cell in cells]


@pytest.mark.slow
def test_every_digit_of_table_2():
    cells, paper = module("theory").table_2(), module("paper")
    assert len(cells) == 20
    for cell in cells:
        degree = cell.devices // 64
        assert paper.as_table_2_prints(cell.found, degree) == cell.printed
        if measured := paper.TABLE_2_MEASURED[degree].get(cell.stage):
            assert float(measured[:-1]) < cell.found


def test_what_was_trained_on_eight_devices_lies_below_theory():
    for cell in module("theory").eight_devices("32GiB"):
        assert float(cell.printed[:-1]) <= cell.found


def test_figure_1():
    rows = module("theory").figure_1()
    assert [module("paper").rounded(row["total"], 1) for row in rows] == [
        row["printed"] for row in rows
    ]
    assert [sum(row["roles"].values()) for row in rows] == [row["total"] for row in rows]


def test_rounding_of_the_paper():
    paper = module("paper")
    cases = {41.25: "41.3", 257.75: "257", 1.875: "1.88", 0.1171875: "0.12", 2.0: "2", 62.5: "62.5"}
    assert {number: paper.as_table_1_prints(number) for number in cases} == cases


def test_every_statement_of_zero_infinity_holds_in_its_formula():
    found = module("infinity").statements()
    assert len(found) == 5
    for x in found:
        assert x.efficiency >= x.statement.efficiency
        assert 0.3 * x.statement.bandwidth < x.bandwidth <= x.statement.bandwidth
    # Over 50 % at a batch of one; four times that bandwidth for optimizer state gives the same.
    assert [round(x.efficiency, 3) for x in found] == [0.506, 0.506, 0.916, 0.584, 0.737]
    parameters, state = found[:2]
    assert state.bandwidth == pytest.approx(4 * parameters.bandwidth)


def test_with_nothing_hidden_a_step_s_efficiency_is_the_formula():
    """ZeRO-Infinity, section 4, for the bytes that jzero moves: two fetches and a gradient, 6 bytes and 8
    operations."""
    formulas = module("formulas")
    memory = jzero.Memory(params=jzero.PinnedHost(), optimizer="host")
    found = jzero.estimate(
        "1B", devices=1, memory=memory, workload=jzero.Workload(tokens=4096),
        rates=jzero.Rates(peak="989TFLOP/s", pcie="55GB/s"),
    ).time  # fmt: skip
    assert found is not None
    expected = formulas.efficiency(8 * 4096 / 6, 55e9, 989e12)
    assert found.efficiency_in_turn == pytest.approx(expected)
    # As the paper counts, a third fetch for the computation that runs again: 8 bytes.
    assert formulas.intensity_of_parameters(4, 1024) == 8 * 4096 / 8


@pytest.mark.parametrize("devices", [1, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_estimates_are_the_papers_formulas(stage, devices):
    """Model states and volume of ZeRO; ZeRO-Offload's bytes on the host and across its link."""
    formulas = module("formulas")
    for optimizer, k in (("adam", 12), ("momentum", 8), ("sgd", 4)):
        found = jzero.estimate("7.5B", devices=devices, stage=stage, optimizer=optimizer)
        # Each of three roles is rounded up to bytes.
        assert 0 <= found.total - formulas.model_states(7.5e9, stage, devices, k) < 3
        assert found.elements_moved == formulas.volume(stage) * 7.5e9 * (devices > 1)
        hosted = jzero.estimate(
            "7.5B", devices=devices, stage=stage, optimizer=optimizer, memory="host"
        )
        shards = devices if stage else 1
        state, crossing = formulas.offloaded(7.5e9, shards, k)
        assert 0 <= hosted.hosted_bytes - state < 1
        assert [c.direction for c in hosted.transfers] == ["to host", "to device"]
        assert all(0 <= c.nbytes - crossing < 1 for c in hosted.transfers)


def test_models_are_as_large_as_the_paper_s():
    sizes = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
    for name, gpt in module("measured").MODELS.items():
        assert abs(gpt.num_params / sizes[name] - 1) < 0.003


def test_bytes_at_rest_are_within_a_percent_of_the_paper_s():
    tables, measured = module("tables"), module("measured")
    cells = measured.table_1(module("compiled").Compiled())
    assert len(cells) == 54
    for cell in cells:
        assert abs(cell.at_rest / tables.at_rest_in_theory(cell) - 1) < 0.01, cell


def test_traffic_is_as_described():
    rows = module("measured").traffic(module("compiled").Compiled())
    # XLA gathers one small gradient of delayed reductions in bfloat16, before its cast to float32.
    assert {row.name: row.more for row in rows if row.more} == {
        "stage 1, k=4": -65536,
        "stage 3, k=4, once_per_step, reduce once": -65536,
        "stage 1, k=4, all over local": -65536,
    }


def test_what_is_not_compiled_is_not_guessed(tmp_path):
    compiled = module("compiled").Compiled(tmp_path / "none.json")
    with pytest.raises(LookupError, match="not compiled yet: 65x3072, 24 heads.* data=1 .*make"):
        module("measured").table_1(compiled)


def test_one_program_of_each_table(tmp_path):
    """A small model through the code that compiles the tables; what is compiled is not compiled again."""
    gpu_compiler.skip_without_it()
    measured, compiled = module("measured"), module("compiled")
    gpt = module("model").GPT(4, 256, 2, vocab=512, context=256)
    store = compiled.Compiled(tmp_path / "compiled.json", allowed=True)
    program = compiled.Program(gpt, measured.HYBRID, 3, shards=jzero.Axes(params="local"))
    record = store(program)
    assert record["params"] == gpt.num_params
    assert record["moved"] == record["described"]
    # 2 bytes over the devices of a node, 12 over all; and the optimizer's counter.
    assert record["at_rest"] == gpt.num_params * 2 // 8 + gpt.num_params * 12 // 16 + 4
    assert record["peak"] == record["arguments"] + record["within"]
    again = compiled.Compiled(tmp_path / "compiled.json")
    assert again(program) == record

    # As if a peak grew by so much with every layer: a line is found in three programs.
    asked = []

    def peaks(program):
        asked.append(program.gpt.layers)
        n = program.gpt.layers
        return {"peak": 3 * 10**9 + n * 10**9, "params": n, "at_rest": 0}

    assert measured.largest(peaks, 8, 3).gpt.layers == 29
    assert len(asked) < 8


@pytest.mark.slow
def test_attention_in_parts_is_attention():
    model = module("model")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 256, 2, 8)) for key in keys)
    whole, parts = model._attend(q, k, v), model._attend_in_parts(q, k, v)
    assert jnp.allclose(whole, parts, atol=1e-5)


def test_the_page_shows_what_the_scripts_compute():
    page = (FOLDER / "README.md").read_text()
    sections = module("tables").sections(module("compiled").Compiled())
    sections |= module("infinity").sections()
    for heading, table in sections.items():
        assert table in page.partition(f"### {heading}\n")[2], heading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "numbers", "pictures"),
    [
        ("infinity", ("statements", "efficiency", "hides_from_tokens"), ["infinity.png"]),
        ("tables", ("table_1_gb",), ["figure-1.png", "table-1.png"]),
    ],
)
def test_the_commands(script, numbers, pictures, tmp_path):
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (written,) = tmp_path.glob(f"*-{script}.json")
    committed = max((FOLDER / "results").glob(f"*-{script}.json"))
    found, expected = (json.loads(file.read_text()) for file in (written, committed))
    assert {name: found[name] for name in numbers} == {name: expected[name] for name in numbers}
    paths = sorted(tmp_path.glob("*.png"))
    assert [path.name[11:] for path in paths] == pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
