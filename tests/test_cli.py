"""The command line: what it prints, what it says of wrong arguments, and how wide that is."""

import contextlib
import importlib.metadata
import io
import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jzero
from jzero.checkpoint import _lock
from jzero.cli._main import main

SMALL = ("estimate", "--params", "7.5B", "--devices", "64")


def run(*arguments):
    """In this process: to start one takes a second."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
            if isinstance(ended.code, str):  # As the interpreter does.
                print(ended.code, file=err)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def cells(text):
    """The rows of all tables in a text."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def command(*arguments, start=("-m", "jzero")):
    return subprocess.run(
        [sys.executable, *start, *arguments], capture_output=True, text=True, check=False
    )


def output(*arguments, how=run):
    done = how(*arguments)
    # What XLA's compiler for GPUs says when JAX is imported where there is no GPU.
    chatter = ("cudart_stub", "absl::InitializeLog")
    said = [line for line in done.stderr.splitlines() if not any(c in line for c in chatter)]
    assert (done.returncode, said) == (0, [])
    return done.stdout


def test_all_stages():
    """ZeRO, Table 1: 120, 31.4, 16.6 and 1.88 GB."""
    rows = output(*SMALL, "--memory", "80GiB").splitlines()
    for text in ("= 120 GB", "= 31.41 GB", "= 16.64 GB", "= 1.875 GB"):
        assert [text in row for row in rows].count(True) == 1
    assert any(row[-2:] == ["3 Psi", "343.59B"] for row in cells("\n".join(rows)))


def test_the_guide_shows_what_is_printed():
    page = (pathlib.Path(__file__).parents[1] / "docs/guide/planning.md").read_text()
    rows = [row for row in cells(output(*SMALL, "--memory", "80GB")) if row[0].isdigit()]
    assert len(rows) == 4
    assert [row for row in rows if f"| {' | '.join(row)} |" not in page] == []


def test_json_has_the_numbers_of_estimate():
    arguments = ("--mesh", "node=8,local=8", "--stage", "3", "--param-axes", "local")
    dtypes = ("--microbatches", "2", "--reduce-dtype", "float32")
    found = json.loads(
        output("estimate", "--params", "1T", *arguments, *dtypes, "--memory", "80GB", "--json")
    )
    expected = jzero.estimate(
        "1T",
        devices={"node": 8, "local": 8},
        axes=jzero.Axes(params="local"),
        microbatches=2,
        comm=jzero.Comm(reduce_dtype="float32"),
    )
    (stage,) = found["stages"]
    assert found["num_params"] == 10**12
    assert found["axes"] == {"node": 8, "local": 8}
    assert stage["total"] == expected.total
    assert stage["at_rest"] == expected.at_rest
    assert [tuple(row.values()) for row in stage["memory"]] == list(expected.memory)
    assert stage["traffic"] == expected.to_dict()["traffic"]
    assert stage["elements_moved"] == expected.elements_moved
    assert stage["largest_model"] == expected.largest_model("80GB")


@pytest.mark.parametrize("width", [80, 50])
@pytest.mark.parametrize("stage", [(), ("--stage", "3")])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width, stage, monkeypatch):
    flags = "--offload host --delayed --microbatches 2 --memory 80GB".split()
    arguments = (*SMALL, *flags, *stage)
    whole = output(*arguments)
    monkeypatch.setenv("COLUMNS", str(width))
    text = output(*arguments)
    assert max(map(len, text.splitlines())) <= width < max(map(len, whole.splitlines()))
    number = r"(?<!')\b[\d,.]*\d(?: (?:[KMGT]i?)?B\b|[BT]\b| Psi)?"
    assert set(re.findall(number, whole)) == set(re.findall(number, text))


INFINITY = ("--offload", "host", "--offload-params", "2GiB", "--stage", "3")
TIMED = ("--tokens", "8K", "--peak", "989TFLOP/s", "--pcie", "55GB/s")


def test_tiers_of_one_stage_as_json():
    """Flags are arguments of `estimate`."""
    more = "--offload-activations --layers 65 --width 3072 --microbatches 4 --layer-major --tile-bytes 64MiB"
    more += " --interconnect 350GB/s --host-update 4GB/s"
    (stage,) = json.loads(output(*SMALL, *INFINITY, *TIMED, *more.split(), "--json"))["stages"]
    expected = jzero.estimate(
        "7.5B",
        devices=64,
        memory=jzero.Memory(
            optimizer=jzero.HostCPU(),
            params=jzero.PinnedHost(2**31),
            activations=jzero.PinnedHost(),
        ),
        workload=jzero.Workload(layers=65, width=3072, tokens="8K"),
        microbatches=jzero.Microbatches(4, order="layer"),
        rates=jzero.Rates(
            peak="989TFLOP/s", pcie="55GB/s", interconnect="350GB/s", host_update="4GB/s"
        ),
        comm=jzero.Comm(tile_bytes=2**26),
    )
    for name, value in expected.to_dict().items():
        if name in stage:
            assert stage[name] == json.loads(json.dumps(value)), name
    assert {"time", "transfers", "memory"} <= stage.keys()


def test_the_time_of_one_stage():
    text = " ".join(output(*SMALL, *INFINITY, *TIMED, "--no-recompute").split())
    for part in ("streamed parameter", "forward pass 121 ms 4.26 ms", "backward pass 243 ms",
                 "The forward pass hides its traffic with 281 or more tokens on each device."):  # fmt: skip
        assert part in text, part


def test_the_time_of_all_stages():
    rates = (*TIMED[:4], "--interconnect", "350GB/s")
    header, *rows = [row for row in cells(output(*SMALL, *rates)) if len(row) in (8, 9)]
    assert header[-2:] == ["step", "compute"]
    work, speeds = (
        jzero.Workload(tokens=8000),
        jzero.Rates(peak="989TFLOP/s", interconnect="350GB/s"),
    )
    times = [
        jzero.estimate("7.5B", devices=64, stage=stage, workload=work, rates=speeds).time
        for stage in range(4)
    ]  # fmt: skip
    assert [row[-1] for row in rows] == [f"{time.efficiency:.0%}" for time in times if time]


def test_stages_that_refuse_an_option_are_left_out_and_named():
    """Of all stages, those for which it is meant; what none of them takes is an error as ever."""
    text = " ".join(output(*SMALL, "--reduce-dtype", "int8").split())
    found = json.loads(output(*SMALL, "--reduce-dtype", "int8", "--json"))
    assert [row["stage"] for row in found["stages"]] == [1, 2, 3]
    why = "--stage 0 and --reduce-dtype int8 in blocks of 256. At stage 0 gradients are replicated,"
    assert f"Not at stage 0: {why}" in text
    assert found["refused"]["0"].startswith(why)
    found = json.loads(output(*SMALL, "--gather", "keep", "--json"))
    assert [row["stage"] for row in found["stages"]] == [3]
    assert list(found["refused"]) == ["0", "1", "2"]
    assert "refused" not in json.loads(output(*SMALL, "--json"))


def test_all_stages_beside_a_divided_model():
    text = " ".join(output(*SMALL, "--model-parallel", "8").split())
    assert "data axes: 'data' of size 64; 512 devices in all, 8 for each part of the batch;" in text


@pytest.mark.parametrize("flags", [("--microbatches", "2"), ("--offload", "host", "--delayed")])
def test_plot(tmp_path, flags):
    file = tmp_path / "out.png"
    output(*SMALL, "--memory", "80GB", *flags, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--version", "x", "estimat"), "jzero: there is no x. There are estimate, "),
        (("estimat", "--params", "7B"), "jzero: there is no estimat. Did you mean estimate?"),
        (("estimate", "--params", "1B"), "one of the arguments --devices --mesh is required"),
        ((*SMALL, "--foo"), "jzero estimate: there is no --foo. See"),
        ((*SMALL, "x"), "unrecognized arguments: x"),
        (("estimate", "--param", "7B", "--device=8"),
         "jzero estimate: there is no --param. Did you mean --params? And there is no --device. Did you mean "
         "--devices? See jzero estimate --help."),
        (("--params", "7B"), "jzero: there is no --params. See jzero --help."),
        (("--versio",), "jzero: there is no --versio. Did you mean --version?"),
        (("inspect", "x", "--step", "3"), "jzero inspect: there is no --step. See"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_usage(arguments, text):
    """What is mistyped is named before what is missing."""
    done = run(*arguments)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
    assert "usage" not in done.stderr
    assert done.stderr.endswith(" --help.\n")


def test_what_is_missing_is_shown_by_an_example():
    assert run("estimate").stderr.splitlines() == [
        "jzero estimate: one of the arguments --params --config is required",
        "example:",
        "  jzero estimate --params 7.5B --devices 64 --memory 80GB",
        "See jzero estimate --help.",
    ]


def test_help():
    """Without a command, too, though that is an error."""
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", output("--help"))
    assert output("help") == done.stderr
    assert output("help", "inspect") == output("inspect", "--help")


def test_a_value_that_looks_like_a_flag_is_none():
    """A negative number, and what comes after two dashes."""
    assert "--param-bytes -1.0 is not" in run(*SMALL, "--param-bytes", "-1").stderr
    assert "there is no directory" in run("inspect", "--", "--verifi").stderr


LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip


def test_the_model_of_a_configuration(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B))
    flags = ("estimate", "--config", str(file), "--devices", "8")
    found = json.loads(output(*flags, "--offload-activations", "--tokens", "8K", "--json"))
    expected = jzero.estimate(
        LLAMA_7B,
        devices=8,
        memory=jzero.Memory(activations=jzero.PinnedHost()),
        workload=jzero.Workload(tokens=8000),
    )
    assert found["num_params"] == expected.num_params == 6_738_415_616
    assert found["stages"][3]["total"] == expected.total
    assert found["model"] == expected.to_dict()["model"]
    text = (
        "llama: 6,738,415,616 parameters. Gathered for compute, a layer (1 of 32) takes 386.0 MiB, and the "
        "largest leaf, embed_tokens.weight [32000,4096], 250.0 MiB."
    )
    for shown in (output(*flags), output(*flags, "--stage", "3"), str(expected)):
        assert text in " ".join(shown.split())
    text = output(*flags, "--stage", "1")
    assert "llama: 6,738,415,616 parameters.\n" in text
    assert "Gathered" not in text


def test_a_configuration_that_is_no_file(tmp_path):
    """A folder that has it, a name on the hub; the flag is named as it was typed."""
    (tmp_path / "config.json").touch()
    done = run("estimate", "--config", str(tmp_path), "--devices", "8")
    said = " ".join(done.stderr.split())
    assert said.startswith(
        f"jzero estimate: configuration '{tmp_path}' cannot be read: Is a directory."
    )
    assert said.endswith(f"Write '{tmp_path}/config.json'.")
    done = run("estimate", "--config", "hf://meta-llama/Llama-2-7b", "--devices", "8")
    assert "It is a file, and nothing is fetched." in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("estimate", "--params", "7.5X", "--devices", "8"),
         "--params: '7.5X' is not a number such as 350M, 7.5B or 1e9"),
        ((*SMALL, "--config", "x"), "--config: not allowed with argument --params"),
        ((*SMALL, "--devices", "0"), "--devices: '0' is not a whole number from 1"),
        ((*SMALL[:3], "--mesh", "node8"), "--mesh: 'node8' is not of the form node=8,local=8"),
        ((*SMALL[:3], "--mesh", "node=8,node=8"), "--mesh: 'node=8,node=8' names an axis twice"),
        ((*SMALL, "--optimizer", "adamm"), "--optimizer: invalid choice: 'adamm'"),
        ((*SMALL, "--offload", "pinned", "--device-bytes", "1G"),
         "--device-bytes: '1G' is not a number of bytes such as 80GiB or 80GB"),
        ((*SMALL, "--memory", "80"), "--memory: 80 of what? Write 80GiB, 80GB or 80B See"),
        ((*SMALL, "--accumulator-dtype", "float32"),
         "--accumulator-dtype float32 and --microbatches 1. It is about several microbatches."),
        ((*SMALL, "--offload", "pinned", "--ratio", "0.5", "--delayed"),
         "--ratio and --delayed with --offload pinned. --device-bytes is for --offload pinned;"),
        ((*SMALL, "--offload", "host", "--ratio", "auto"), "--offload host --ratio auto. It is measured"),
        ((*SMALL, "--offload-params", "2GiB", "--stage", "2"),
         "--offload-params 2147483648B, and parameters are replicated. Each device fetches its "
         "own shard of the parameters, and gathers. Use --stage 3, or drop --offload-params."),
        ((*SMALL, "--layer-major", "--microbatches", "2"),
         "--layer-major without --offload-params. It is for layers that come from the host one after the "
         "other. Drop it, or use --offload-params 2GiB."),
        ((*SMALL, "--layers", "8"), "--layers 8 without --offload-activations. They determine only what a "
         "loop saves on the host for its backward loop. Drop --layers, or use --offload-activations."),
        ((*SMALL, "--pcie", "55Gb/s"), "--pcie: '55Gb/s' is not a number of bytes per second such as 55GB/s"),
        ((*SMALL, "--disk-memory", "1TB"), "--disk-memory without --memory. Both bound the largest model."),
        ((*SMALL, "--in-place"), "--in-place with no offload. --device-bytes is for --offload pinned;"),
        ((*SMALL, *INFINITY, "--memory", "80GB"), "--memory 80GB with all model states on the hosts."),
        ((*SMALL, "--plot", "out.xyz"), "--plot out.xyz. Its suffix is one of"),
        ((*SMALL, "--plot", "/no/such/folder/x.png"), "cannot be written: No such file"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_told_in_flags_and_without_the_usage(arguments, text):
    done = run(*arguments)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert said.startswith(
        f"jzero estimate: {text}" if "cannot" not in text else "jzero estimate: "
    )
    assert text in said
    assert "usage" not in done.stderr
    assert done.stdout == ""


def test_versions():
    versions = jzero.__version__, jax.__version__, jaxlib.__version__
    assert " ".join(output("--version").split()) == "jzero {}, jax {}, jaxlib {}".format(*versions)


def test_the_version_of_what_is_not_installed():
    """A checkout on the path; without site-packages nothing is installed."""
    path = pathlib.Path(jzero.__file__).with_name("_version.py")
    code = f"import runpy; print(runpy.run_path({str(path)!r})['__version__'])"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True)
    assert done.stdout == "0+unknown\n", done.stderr


def test_the_command_is_installed_with_the_package():
    """As `jzero`; the environments of the tests may be older than that, so its declaration is read."""
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())[
        "project"
    ]
    entry = importlib.metadata.EntryPoint("jzero", project["scripts"]["jzero"], "console_scripts")
    assert entry.load() is main


def test_the_command_where_it_is_not_on_the_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jzero", "estimate"])
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit):
        runpy.run_module("jzero", run_name="__main__")
    assert err.getvalue().startswith("python -m jzero estimate: ")


def test_every_command_has_an_example_that_runs(steps, tmp_path, monkeypatch):
    shutil.copytree(steps, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / _lock.NAME).write_text("{}")  # of somebody who is gone
    (tmp_path / "ds_config.json").write_text(
        '{"train_batch_size": 64, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}'
    )
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (\w+)", output("--help"), re.MULTILINE)
    assert len(commands) == 8
    for name in commands:
        (example,) = re.findall(r"^example:\n  jzero (.*)", output(name, "--help"), re.MULTILINE)
        assert example.startswith(name)
        if name != "preflight":  # tests/test_cli_preflight.py
            assert output(*example.split())


class Position:
    """A data iterator."""

    def get_state(self):
        return {"next": 3}


def step_fn(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - grads, "mu": state["mu"] + grads, "count": state["count"] + 1}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Steps 1 and 3 of a padded state, with a data iterator."""
    path = tmp_path_factory.mktemp("steps")
    train_step = jzero.shard_train_step(step_fn, axes=jzero.Axes(min_shard_bytes=0))
    w = jax.random.normal(jax.random.key(0), (101, 67))
    state = {"w": w, "mu": w, "count": jnp.int32(0)}
    state = train_step(state, jnp.ones((8, 101)))
    with jzero.Checkpointer(path, train_step) as checkpointer:
        for step in (1, 3):
            checkpointer.save(step, state, Position())
    return path


@pytest.fixture
def damaged(steps, tmp_path):
    """The last step with bits flipped in the file that holds most."""
    path = shutil.copytree(steps / "3", tmp_path / "3")
    largest = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    for at in range(len(data) // 8, len(data), len(data) // 8):
        data[at] ^= 1
    largest.write_bytes(data)
    return path


def test_inspect_lists_the_leaves_of_the_latest_step(steps):
    text = output("inspect", str(steps))
    assert f"{steps}/3/state\nThe latest of the steps 1, 3.\nWritten 20" in text
    assert "by PyTreeCheckpointHandler, with a data iterator.\n" in text
    version = re.escape(jzero.__version__)
    summary = (
        rf"Saved by jzero {version} from a step at stage 3 \(mesh axes: 'data' of size 8\)\.\n"
        r"3 leaves, 13,535 elements, 6,767 of them parameters: 52\.9 KiB\."
    )
    assert re.search(summary, text), text
    assert text.index("optimizer state") < text.index("\nleaf ") < text.index("\nmu")
    rows = cells(text)
    for row in (
        ["count", "optimizer state", "int32", "scalar", "scalar", "4 B"],
        ["mu", "optimizer state", "float32", "101,67", "13,67", "26.4 KiB"],
        ["w", "parameter", "float32", "101,67", "13,67", "26.4 KiB"],
        ["parameter", "float32", "1", "6,767", "26.4 KiB"],
    ):
        assert row in rows


def test_inspect_as_json(steps):
    found = json.loads(output("inspect", str(steps), "--json", "--verify"))
    assert found["directory"] == str(steps / "3" / "state")
    assert (found["step"], found["steps"], found["has_data_iterator"]) == (3, [1, 3], True)
    assert [leaf["name"] for leaf in found["leaves"]] == ["count", "mu", "w"]
    assert found["leaves"][2] == {
        "name": "w", "role": "parameter", "dtype": "float32", "shape": [101, 67], "nbytes": 27068,
        "chunk_shape": [13, 67],
    }  # fmt: skip
    assert [(row["role"], row["nbytes"]) for row in found["totals"]] == [
        ("optimizer state", 4), ("optimizer state", 27068), ("parameter", 27068),
    ]  # fmt: skip
    assert found["saved"] == {"version": jzero.__version__, "stage": 3, "axes": {"data": 8}}
    assert found["verified"] == {"damaged": {}, "unchecked": [], "sealed": True}
    one = json.loads(output("inspect", str(steps / "1"), "--json"))
    assert (one["step"], one["steps"]) == (1, [])
    assert "verified" not in one


def test_inspect_of_plain_orbax(tmp_path):
    """No roles, 64 bits, and no checksums."""
    tree = {"w": np.arange(500.0), "step": 3, "name": "x"}
    ocp.PyTreeCheckpointer().save(tmp_path / "plain", tree)
    text = output("inspect", str(tmp_path / "plain"), "--verify")
    assert "without a data iterator" in text
    assert "Saved by" not in text
    assert "\n3 leaves, 502 elements: 3.9 KiB.\n" in text
    assert json.loads(output("inspect", str(tmp_path / "plain"), "--json"))["saved"] is None
    assert ["w", "float64", "500", "500", "3.9 KiB"] in cells(text)
    assert ["name", "string", "scalar", "scalar", "0 B"] in cells(text)
    assert (
        "3 of 3 leaves are whole.\nIt has no manifest: a flipped bit in the description of its leaves"
        in text
    )
    assert "2 leaves have no checksums, as Orbax alone writes them" in text


@pytest.mark.parametrize("noted", [3, {}, {"version": "1", "stage": True, "axes": {}},
                                   {"version": "1", "stage": 1, "axes": [2]}], ids=str)  # fmt: skip
def test_notes_of_others_under_the_same_name(noted, steps, tmp_path):
    """Nothing goes by them: the checkpoint is shown, and can be restored."""
    path = shutil.copytree(steps / "3", tmp_path / "3")
    (path / "_JZERO_SEAL").unlink()
    notes = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    notes["custom_metadata"]["jzero"] = noted
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(notes))
    assert "Saved by" not in output("inspect", str(path))


def test_what_a_step_notes_is_shown_in_one_line(steps, tmp_path):
    """Without what a terminal would obey."""
    path = shutil.copytree(steps / "3", tmp_path / "3")
    (path / "_JZERO_SEAL").unlink()
    notes = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    notes["custom_metadata"]["jzero"]["version"] = "\x1b[2J" + "9" * 1000
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(notes))
    text = output("inspect", str(path)).partition("Saved by ")[2]
    assert " ".join(text.split()).startswith("jzero \\x1b[2J999")
    assert "9" * 201 not in text


def test_verify_names_what_is_damaged(damaged):
    done = run("inspect", str(damaged), "--verify")
    assert done.returncode == 1
    assert "Every chunk was read: 1 of 3 leaves are whole." in done.stdout
    message = done.stderr[done.stderr.index("jzero inspect") :].splitlines()
    assert message[0] == f"jzero inspect {damaged}/state: 2 leaves fail:"
    assert [line.split(": ")[0] for line in message[1:3]] == ["  - mu", "  - w"]
    assert message[3].startswith("Its files are damaged, incomplete, or not those of a checkpoint.")
    found = run("inspect", str(damaged), "--verify", "--json")
    assert found.returncode == 1
    assert list(json.loads(found.stdout)["verified"]["damaged"]) == ["mu", "w"]
    assert run("inspect", str(damaged)).returncode == 0


@pytest.mark.parametrize(("path", "text"), [
    ("runs/x", "there is no directory {runs}/x. A checkpoint is a directory. "
               "Correct the path; {runs} has a."),
    ("runs", "{runs} is no checkpoint, nor a directory of steps. A checkpoint of Orbax has a file _METADATA, "
             "or one item that has. Correct the path; {runs} has a."),
    ("runs/a/3/state/d", "It is inside of the step {steps}/3: name that."),
    ("runs/a/3/_JZERO_SEAL", "_JZERO_SEAL is a file. A checkpoint is a directory. It is inside of the step"),
    ("empty", "Correct the path; {root}/empty is empty."),
    ("files/a.txt", "A checkpoint is a directory. Correct the path; {root}/files has a.txt."),
])  # fmt: skip
def test_a_path_without_a_checkpoint(path, text, steps, tmp_path):
    """What is around it is named."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").touch()
    (tmp_path / "runs" / "a").symlink_to(steps)
    done = run("inspect", str(tmp_path / path))
    assert done.returncode == 1
    assert done.stderr.startswith("jzero inspect: ")
    names = {"root": tmp_path, "runs": tmp_path / "runs", "steps": tmp_path / "runs" / "a"}
    assert text.format(**names) in done.stderr


def test_unlock_of_a_step(steps):
    done = run("unlock", str(steps / "3"))
    assert done.returncode == 1
    assert (
        f"It is in the step {steps}/3, and not the directory of steps: name {steps}." in done.stderr
    )
    assert (
        "Correct the path, if it is not the directory of steps." in run("unlock", str(steps)).stderr
    )


@pytest.mark.slow
def test_verify_fails_where_the_latest_step_is_not_whole(steps, tmp_path):
    """What it reads then is an older one; and a warning is said in the command's name."""
    path = shutil.copytree(steps, tmp_path / "steps")
    (path / "3" / "state" / "_METADATA").unlink()
    done = command("inspect", str(path), "--verify")
    assert done.returncode == 1
    assert "has incomplete steps: 3. The latest complete one" in " ".join(done.stderr.split())
    assert done.stderr.startswith("python -m jzero inspect: Checkpointer ")
