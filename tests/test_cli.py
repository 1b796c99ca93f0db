"""`python -m jzero estimate` and `inspect`."""

import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jzero
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
    assert any("3 Psi" in row and row.split("│")[-2].strip() == "343.6B" for row in rows)


def test_the_readme_shows_what_is_printed():
    page = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    text = output(*SMALL, "--memory", "80GB", how=command)
    printed = [line.replace("┃", "│").split("│") for line in text.splitlines() if line[0] in "┃│"]
    rows = ["|".join(f" {cell.strip()} " if cell else "" for cell in row) for row in printed]
    assert len(rows) == 5
    assert [row for row in rows if row not in page] == []


def test_one_stage():
    text = output(*SMALL, "--stage", "2", "--accumulate", "4", "--memory", "32GB")
    for part in ("at stage 2 over 64 devices", "optimizer state", "sums 4 microbatches",
                 "reduce-scatter", "30,000,000,000", "fits into 32GB: 14.03B."):  # fmt: skip
        assert part in text


def test_json_has_the_numbers_of_estimate():
    arguments = ("--mesh", "node=8,local=8", "--stage", "3", "--param-axes", "local")
    dtypes = ("--accumulate", "2", "--reduce-dtype", "float32")
    found = json.loads(
        output("estimate", "--params", "1T", *arguments, *dtypes, "--memory", "80GB", "--json")
    )
    expected = jzero.estimate(
        "1T", mesh={"node": 8, "local": 8}, param_axes="local", accumulate=2, reduce_dtype="float32"
    )
    (stage,) = found["stages"]
    assert found["num_params"] == 10**12
    assert found["axes"] == {"node": 8, "local": 8}
    assert stage["total"] == expected.total
    assert stage["at_rest"] == expected.at_rest
    assert [tuple(row.values()) for row in stage["memory"]] == list(expected.memory)
    assert [row["bytes"] for row in stage["traffic"]] == [c.nbytes for c in expected.traffic]
    assert stage["elements_moved"] == expected.elements_moved
    assert stage["largest_model"] == expected.largest_model("80GB")


def test_json_of_all_stages():
    stages = json.loads(output(*SMALL, "--json"))["stages"]
    assert [row["stage"] for row in stages] == [0, 1, 2, 3]
    assert "largest_model" not in stages[0]


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (("host",), jzero.HostCPU()),
        (("host", "--ratio", "0.75", "--delayed"), jzero.HostCPU(ratio=0.75, delayed_update=True)),
        (("pinned",), jzero.PinnedHost()),
        (("pinned", "--device-bytes", "256MiB"), jzero.PinnedHost(2**28)),
    ],
    ids=str,
)
def test_offload_as_json(flags, policy):
    found = json.loads(output(*SMALL, "--stage", "2", "--offload", *flags, "--json"))
    expected = jzero.estimate("7.5B", devices=64, stage=2, offload=policy)
    (stage,) = found["stages"]
    assert [tuple(row.values()) for row in stage["memory"]] == list(expected.memory)
    assert [tuple(row.values()) for row in stage["crossings"]] == list(expected.crossings)
    assert (stage["total"], stage["on_host"]) == (expected.total, expected.on_host)


def test_offload_of_all_stages():
    """Nothing is cut off, and a column stands for everything on the hosts."""
    text = output(*SMALL, "--offload", "host", "--delayed", "--accumulate", "2", "--memory", "80GB")
    header, *rows = [
        line.replace("┃", "│").split("│") for line in text.splitlines() if line[0] in "┃│"
    ]
    titles = [cell.strip() for cell in header]
    assert titles[5:10] == ["renewed parameter", "total", "on its host", "to host", "to device"]
    assert "arriving gradient" not in titles
    assert [cell.strip() for cell in rows[-1][7:10]] == ["2.2 GiB", "223.5 MiB", "223.5 MiB"]
    assert "…" not in text
    assert "To host, to device: what crosses in a step." in text


def test_offload_of_one_stage():
    text = output(*SMALL, "--stage", "3", "--offload", "pinned", "--device-bytes", "256MiB")
    for part in ("visiting optimizer state", "256.0 MiB", "on its host", "to device", "96-bit"):
        assert part in text


@pytest.mark.parametrize("flags", [("--accumulate", "2"), ("--offload", "host", "--delayed")])
def test_plot(tmp_path, flags):
    file = tmp_path / "out.png"
    output(*SMALL, "--memory", "80GB", *flags, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; from jzero.cli._main import main; main()"
    done = command(*SMALL, "--plot", "out.png", start=("-c", code))
    assert done.returncode == 2
    assert "matplotlib is not installed. " in done.stderr
    assert "pip install 'jzero[plot]', or drop --plot." in done.stderr
    assert command(*SMALL, start=("-c", code)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "required: command"),
        (("estimate",), "required: --params"),
        (
            ("estimate", "--params", "7.5X"),
            "2 arguments fail:\n  - num_params='7.5X' is not a whole",
        ),
        (("estimate", "--params", "1B"), "devices=None is not an int from 1"),
        ((*SMALL, "--devices", "0"), "devices=0 is not an int from 1"),
        ((*SMALL, "--devices", "x"), "argument --devices: invalid int value: 'x'"),
        ((*SMALL, "--mesh", "node8"), "'node8' is not of the form node=8,local=8"),
        ((*SMALL, "--stage", "4"), "argument --stage: invalid choice: 4"),
        ((*SMALL, "--optimizer", "adamm"), "argument --optimizer: invalid choice: 'adamm'"),
        ((*SMALL, "--gather", "keep"), "stage=0 and gather='keep'. Below stage 3"),
        (
            (*SMALL, "--offload", "pinned", "--ratio", "0.5", "--delayed"),
            "estimate: --ratio and --delayed with --offload pinned. --device-bytes is for --offload pinned;",
        ),
        (
            (*SMALL, "--device-bytes", "1GiB"),
            "estimate: --device-bytes with no offload. --device-bytes",
        ),
        ((*SMALL, "--offload", "nvme"), "argument --offload: invalid choice: 'nvme'"),
        (
            (*SMALL, "--offload", "pinned", "--device-bytes", "1G"),
            "'1G' is not a whole number from 1",
        ),
        ((*SMALL, "--offload", "host", "--ratio", "auto"), "HostCPU(ratio='auto'). It is measured"),
        (
            (*SMALL, "--offload", "host", "--ratio", "half"),
            "HostCPU: ratio='half'. It is the share",
        ),
        ((*SMALL, "--offload", "host", "--ratio", "0"), "HostCPU: ratio=0.0. It is the share"),
        ((*SMALL, "--memory", "80G"), "memory='80G'. The memory of a device is"),
        ((*SMALL, "--plot", "out.xyz"), "plot='out.xyz'. Its suffix is one of"),
        ((*SMALL, "--plot", "/no/such/folder/x.png"), "cannot be written: No such file"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, text):
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


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
    train_step = jzero.shard_train_step(step_fn, min_shard_bytes=0)
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
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
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
    assert "│ w    │      │ float64 │    500 │       500 │ 3.9 KiB │" in text
    assert "│ name │      │  string │" in text
    assert (
        "3 of 3 leaves are whole.\nIt has no seal: a flipped bit in what describes its leaves"
        in text
    )
    assert "2 leaves have no checksums, as Orbax alone writes them" in text


def test_verify_names_what_is_damaged(damaged):
    done = run("inspect", str(damaged), "--verify")
    assert done.returncode == 1
    assert "Every chunk was read: 1 of 3 leaves are whole." in done.stdout
    message = done.stderr[done.stderr.index("python -m jzero inspect") :].splitlines()
    assert message[0] == f"python -m jzero inspect {damaged}/state: 2 leaves fail:"
    assert [line.split(": ")[0] for line in message[1:3]] == ["  - mu", "  - w"]
    assert message[3].startswith("Its files are damaged, incomplete, or not those of a checkpoint.")
    found = run("inspect", str(damaged), "--verify", "--json")
    assert found.returncode == 1
    assert list(json.loads(found.stdout)["verified"]["damaged"]) == ["mu", "w"]
    assert run("inspect", str(damaged)).returncode == 0


def test_verify_finds_what_is_cut(damaged):
    for file in damaged.rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = run("inspect", str(damaged), "--verify")
    assert done.returncode == 1
    assert "Its files are damaged, incomplete" in done.stderr


def test_damaged_notes(steps, tmp_path):
    path = shutil.copytree(steps / "3", tmp_path / "3")
    (path / "_CHECKPOINT_METADATA").write_text("{")
    done = command("inspect", str(path))
    assert done.returncode == 1
    assert "_CHECKPOINT_METADATA has 1 of" in done.stderr
    (path / "_JZERO_SEAL").unlink()  # as jzero wrote steps before it sealed them
    done = command("inspect", str(path))
    assert done.returncode == 1
    assert "_CHECKPOINT_METADATA: it is not JSON: Expecting property name" in done.stderr


def test_inspect_of_no_checkpoint(tmp_path):
    done = run("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "python -m jzero inspect: there is no directory" in done.stderr
    assert "Traceback" not in done.stderr
