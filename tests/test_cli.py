"""`python -m jzero estimate`, run as a command."""

import json
import pathlib
import subprocess
import sys

import pytest

import jzero

SMALL = ("estimate", "--params", "7.5B", "--devices", "64")


def run(*arguments, command=("-m", "jzero")):
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, check=False
    )


def output(*arguments):
    done = run(*arguments)
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
    text = output(*SMALL, "--memory", "80GB")
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


def test_plot(tmp_path):
    file = tmp_path / "out.png"
    output(*SMALL, "--memory", "80GB", "--accumulate", "2", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; from jzero._cli import main; main()"
    done = run(*SMALL, "--plot", "out.png", command=("-c", code))
    assert done.returncode == 2
    assert "matplotlib is not installed. " in done.stderr
    assert "pip install 'jzero[plot]', or drop --plot." in done.stderr
    assert run(*SMALL, command=("-c", code)).returncode == 0


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
