"""Parameters to safetensors files and back: to the bit, in bounded memory, and nothing half done."""

import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jzero
from jzero.cli._main import main
from jzero.weights import _export, _safetensors, _sources

ROWS = 257  # no number of devices divides them


def run(*arguments) -> None:
    main([str(argument) for argument in arguments])


def new_params(dtype=jnp.float32) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (ROWS, 15), dtype),
        "layers": [jax.random.normal(keys[1], (15, 7), dtype), jnp.ones((3,), dtype)],
        "scale": jax.random.normal(keys[2], (), dtype),
    }


def make_step(tx):
    def step_fn(state, batch):
        def loss_fn(p):
            x = jnp.tanh(batch @ p["embed"].astype(jnp.float32))
            x = x @ p["layers"][0].astype(jnp.float32) * p["scale"].astype(jnp.float32)
            return jnp.mean(x**2) + p["layers"][1].astype(jnp.float32).sum() ** 2

        grads = jax.grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return step_fn


def save(directory: pathlib.Path, tx, dtype=jnp.float32) -> dict[str, Any]:
    """A step at stage 3 on 8 devices, saved; the state on the host."""
    train_step = jzero.shard_train_step(make_step(tx), stage=3, axes=jzero.Axes(min_shard_bytes=0))
    params = new_params(dtype)
    state = train_step.shard({"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)})
    state = train_step(state, jnp.ones((8, ROWS)))
    assert isinstance(state["params"]["embed"], jzero.LeafArray)
    with jzero.Checkpointer(directory, train_step) as checkpointer:
        checkpointer.save(1, state)
    return train_step.unshard(state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("saved")
    return path, save(path, optax.adam(1e-2))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[pathlib.Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("mixed")
    return path, save(path, jzero.master_weights(optax.adam(1e-2)), jnp.bfloat16)


def tensors(params: dict[str, Any]) -> dict[str, np.ndarray]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in paths
    }


def assert_same(actual, expected) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert (x.dtype, x.shape) == (expected[name].dtype, expected[name].shape)
        assert x.tobytes() == expected[name].tobytes()


def test_masters_are_exported_where_parameters_are_rounded(mixed, tmp_path):
    path, state = mixed
    for flags in ([], ["--dtype", "bf16"]):
        run("export", path, tmp_path / "out.safetensors", "--overwrite", *flags)
        assert_same(load_file(tmp_path / "out.safetensors"), tensors(state["params"]))
    run("export", path, tmp_path / "wide.safetensors", "--dtype", "float32")
    masters = tensors(state["opt_state"].masters)
    assert_same(load_file(tmp_path / "wide.safetensors"), masters)
    assert np.any(masters["embed"] != np.asarray(state["params"]["embed"], np.float32))


def test_several_files_and_an_index(saved, tmp_path, capsys):
    """As Hugging Face has them; and an older export under the same name goes."""
    path, state = saved
    run("export", path, tmp_path / "out.safetensors")
    run("export", path, tmp_path / "out.safetensors", "--max-file-size", "400B", "--overwrite")
    names = [f"out-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    written = [*names, "out.safetensors.index.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == written
    assert [pathlib.Path(line.split(": ")[0]).name for line in
            capsys.readouterr().out.splitlines()[3:]] == written  # fmt: skip
    index = json.loads((tmp_path / written[-1]).read_text())
    expected = tensors(state["params"])
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in expected.values())}
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, expected)
    assert sum(len(load_file(tmp_path / name)) for name in names) == len(expected)


@pytest.mark.slow
def test_back_into_a_state(saved, tmp_path):
    """What `import` writes has checksums, and `restore` and plain Orbax read it."""
    path, state = saved
    run("export", path, tmp_path / "out.safetensors", "--max-file-size", "400B")
    run("import", tmp_path / "out.safetensors.index.json", tmp_path / "back")
    run("export", tmp_path / "back", tmp_path / "again.safetensors")
    assert_same(load_file(tmp_path / "again.safetensors"), tensors(state["params"]))

    def step_fn(state, batch):
        loss = lambda p: jnp.mean((batch @ p["embed"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda x, g: x - g, state, {"params": jax.grad(loss)(state["params"])})

    train_step = jzero.shard_train_step(step_fn, axes=jzero.Axes(min_shard_bytes=0))
    restored = jzero.restore(tmp_path / "back", train_step, {"params": new_params()})
    assert isinstance(restored["params"]["embed"], jzero.LeafArray)
    assert_same(tensors(train_step.unshard(restored)["params"]), tensors(state["params"]))
    plain = ocp.StandardCheckpointer().restore(tmp_path / "back")
    assert_same(tensors(plain["params"]), tensors(state["params"]))


def test_every_dtype_both_ways(tmp_path):
    """Against the safetensors library, as reader and as writer; also tensors of no elements."""
    rng = np.random.default_rng(0)
    made = {
        name: np.frombuffer(rng.bytes(15 * dtype.itemsize), dtype).reshape(3, 5)
        for name, dtype in _safetensors.DTYPES.items()
        if name != "BOOL"
    }
    made |= {"BOOL": rng.random((3, 5)) > 0.5, "none": np.zeros((0, 4), np.float32)}
    save_file(made, tmp_path / "made.safetensors")
    run("import", tmp_path / "made.safetensors", tmp_path / "back", "--prefix", "")
    run("export", tmp_path / "back", tmp_path / "out.safetensors")
    read = _safetensors.read_header("test", _sources.find("test", tmp_path / "out.safetensors"))
    assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in read)
    # Its NumPy interface cannot read float8.
    found = {
        name: np.frombuffer(t["data"], _safetensors.DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in safetensors.deserialize((tmp_path / "out.safetensors").read_bytes())
    }
    assert_same(found, made)


def test_relative_paths(saved, tmp_path, monkeypatch):
    path, state = saved
    monkeypatch.chdir(path)
    run("export", "1", tmp_path / "out.safetensors")
    monkeypatch.chdir(tmp_path)
    run("import", "out.safetensors", "back")
    run("export", "back", "again.safetensors")
    assert_same(load_file("again.safetensors"), tensors(state["params"]))
    run("export", "back", "half.safetensors", "--dtype", "bf16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"])
    assert_same(load_file("half.safetensors"), tensors(half))
    with safe_open("half.safetensors", "np") as file:
        assert file.metadata() == {"format": "flax"}


PEAK = """
    import sys
    import jax
    from jzero.cli._main import main

    def peak():  # Of this process; what getrusage says began with its parent's.
        (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    main(["inspect", sys.argv[1]])  # Now imports, devices and threads are there.
    before = peak()
    main(sys.argv[2:])
    print(peak() - before)
"""


def peak(*arguments) -> int:
    """Bytes that a command needs in addition to those of `inspect`, its first argument."""
    code = [sys.executable, "-c", textwrap.dedent(PEAK), *map(str, arguments)]
    done = subprocess.run(code, check=True, capture_output=True, text=True, timeout=300)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """Of 8 leaves of 32 MiB, and one of 256: at most 64 MiB are read at a time, and Orbax has buffers."""
    part = np.random.default_rng(0).integers(0, 256, (2**13, 2**10)).astype(np.float32)
    state = {"whole": np.concatenate([part] * 8), **{str(i): part for i in range(8)}}
    save_file(state, tmp_path / "in.safetensors")
    ocp.PyTreeCheckpointer().save(tmp_path / "small", {"params": np.ones(3)})
    back, out = tmp_path / "back", tmp_path / "out.safetensors"
    grown = {
        "import": peak(tmp_path / "small", "import", tmp_path / "in.safetensors", back),
        "export": peak(back, "export", back, out, "--dtype", "bf16"),
        "verify": peak(back, "inspect", back, "--verify"),
    }
    print({name: f"{nbytes / 2**20:.0f} MiB" for name, nbytes in grown.items()})
    assert max(grown.values()) < 320 * 2**20  # of 512
    np.testing.assert_array_equal(load_file(out)["whole"][-(2**13) :], part)


def fails(capsys, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    said = capsys.readouterr().err + str(caught.value.code)
    return (caught.value.code if isinstance(caught.value.code, int) else 1), said


def test_no_parameters(tmp_path, capsys):
    ocp.PyTreeCheckpointer().save(tmp_path / "other", {"weights": {"w": np.ones(3)}, "step": 1})
    for flags, what in (
        ([], "no parameters"),
        (["--select", "zzz"], "nothing that --select 'zzz' finds"),
    ):
        status, said = fails(
            capsys, "export", tmp_path / "other", tmp_path / "out.safetensors", *flags
        )
        assert status == 1
        assert f"{what} among its leaves, which are under: step, weights. " in said
        assert "Say which they are with" in said


def test_what_safetensors_cannot_hold(tmp_path, capsys):
    state = {"params": {"a": "text", "b": np.ones(2, np.complex64), "c": np.ones(2)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "ck", state)
    status, said = fails(capsys, "export", tmp_path / "ck", tmp_path / "out.safetensors")
    assert status == 1
    assert "2 leaves fail:\n  - params/a is a string, not a dtype of safetensors\n" in said
    assert "  - params/b is complex64, not a dtype of safetensors\n" in said
    assert "Leave some out with --select REGEX." in said


def test_values_beyond_the_largest(tmp_path, capsys):
    beyond, infinite = np.array([1e5, 1], np.float32), np.array([np.inf, 1], np.float32)
    state = {"params": {"a": beyond, "b": infinite}}
    ocp.PyTreeCheckpointer().save(tmp_path / "ck", state)
    out = tmp_path / "out.safetensors"
    status, said = fails(capsys, "export", tmp_path / "ck", out, "--dtype", "fp16")
    assert status == 1
    assert "params/a has values beyond the largest. " in said
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    run("export", tmp_path / "ck", out, "--dtype", "bf16")
    assert np.isinf(load_file(out)["b"][0])


def test_nothing_is_overwritten(saved, tmp_path, capsys):
    path, _ = saved
    out = tmp_path / "out.safetensors"
    run("export", path, out, "--max-file-size", "400B")
    status, said = fails(capsys, "export", path, out)
    assert status == 2
    assert "out.safetensors.index.json already. Files are only overwritten when asked." in said
    status, said = fails(capsys, "import", f"{out}.index.json", tmp_path)
    assert status == 2
    assert "already. A checkpoint is a new directory. Name another, or remove it." in said


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("out.bin",), 2, "the output is 'out.bin'. Its suffix is .safetensors. Write out.safe"),
        (
            ("o.safetensors", "--max-file-size", "5X"),
            2,
            "--max-file-size: '5X' is not a number of bytes",
        ),
        (("o.safetensors", "--select", "("), 2, "--select (: missing ), unterminated subpattern"),
        (("o.safetensors", "--dtype", "int8"), 2, "--dtype: invalid choice: 'int8'"),
        (("/no/such/o.safetensors",), 1, "cannot be written: No such file or directory. "),
    ],
)
def test_wrong_arguments(arguments, status, text, saved, capsys):
    code, said = fails(capsys, "export", saved[0], *arguments)
    assert code == status
    assert text in said


def test_a_size_that_is_none(saved):
    with pytest.raises(jzero.OptionError, match="max_file_size='5X'. It is a whole number from 1"):
        _export.export_weights(saved[0], "o.safetensors", max_file_size="5X")


def test_damaged_checkpoint_leaves_nothing(tmp_path, capsys):
    save(tmp_path / "ck", optax.sgd(1e-2))
    largest = max((tmp_path / "ck").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    for at in range(len(data) // 40, len(data), len(data) // 40):
        data[at] ^= 1
    largest.write_bytes(data)
    (tmp_path / "out").mkdir()
    status, said = fails(capsys, "export", tmp_path / "ck", tmp_path / "out" / "out.safetensors")
    assert status == 1
    assert "export" in said
    assert "Its files are damaged" in said
    assert list((tmp_path / "out").iterdir()) == []


def test_index_that_does_not_fit(tmp_path, capsys):
    index = tmp_path / "in.safetensors.index.json"
    save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "1.safetensors")
    cases: list[tuple[str, str]] = [
        ("{", "it is not JSON"),
        ("[]", "it is [], not an object"),
        ("{}", "weight_map is missing. Its entries have the names and types that they had"),
        (
            '{"weight_map": {}}',
            "its weight_map has no tensors. An index has a weight_map: for each",
        ),
        ('{"weight_map": {"a": 1}}', "weight_map.a is 1, not a text"),
        (
            '{"weight_map": {"a": "../1.safetensors"}}',
            "'a' is in '../1.safetensors'. An index has a",
        ),
        ('{"weight_map": {"a": ".."}}', "'a' is in '..'. An index has"),
        ('{"weight_map": {"a": ""}}', "'a' is in ''. An index has"),
        ('{"weight_map": {"a": "2.safetensors"}}', "2.safetensors cannot be read: No such file"),
    ]
    for text, expected in cases:
        index.write_text(text)
        status, said = fails(capsys, "import", index, tmp_path / "ck")
        assert (status, expected in said) == (1, True), said
    index.write_text('{"weight_map": {"a": "1.safetensors", "c": "1.safetensors"}}')
    _, said = fails(capsys, "import", index, tmp_path / "ck")
    assert "2 tensors fail:\n  - c is not in 1.safetensors\n" in said
    assert "  - b in 1.safetensors is not in the index\n" in said
    index.unlink()
    _, said = fails(capsys, "import", index, tmp_path / "ck")
    assert "it cannot be read: No such file or directory" in said


def test_import_that_cannot_be_written(tmp_path, capsys):
    save_file({"a": np.ones(2)}, tmp_path / "in.safetensors")
    status, said = fails(capsys, "import", tmp_path / "in.safetensors", "/proc/ck")
    assert status == 1
    assert "/proc/ck: could not be written: " in said


def test_masters_of_what_cannot_be_told(tmp_path, capsys):
    """Two trees of leaves could be what the masters belong to, and neither is called params."""
    state = {
        "net": {"w": jnp.ones((4, 4), jnp.bfloat16)},
        "average": {"w": jnp.ones((4, 4), jnp.bfloat16)},
        "tx": {"masters": {"w": jnp.ones((4, 4))}, "inner": {"count": jnp.int32(0)}},
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "steps", state)
    arguments = "export", tmp_path / "steps", tmp_path / "a.safetensors", "--select", "^net/"
    status, said = fails(capsys, *arguments, "--dtype", "fp32")
    assert status == 1
    assert "under tx/masters/ are masters of no leaves, or of several" in said
    run(*arguments)


def test_averages_beside_parameters_are_left_out_and_named(tmp_path, capsys):
    """What has a parameter's name and shape, and is in its tree, is a copy."""

    def step_fn(state, batch):
        w, ema = state["net"]["w"], state["net"]["ema"]["w"]
        w = w - jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return {"net": {"w": w, "ema": {"w": 0.9 * ema + 0.1 * w}}}

    train_step = jzero.shard_train_step(step_fn, stage=3, axes=jzero.Axes(min_shard_bytes=0))
    state = train_step.shard({"net": {"w": jnp.ones((8, 4)), "ema": {"w": jnp.ones((8, 4))}}})
    with jzero.Checkpointer(tmp_path / "ck", train_step) as checkpointer:
        checkpointer.save(1, train_step(state, jnp.ones((8, 8))))
    run("export", tmp_path / "ck", tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == {"net.w"}
    assert "Not exported, as no parameters: 1 leaf (net/ema/w)." in capsys.readouterr().out
