"""experiments/infinity: its scripts, with toys on two virtual devices."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("llvmlite")


FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "infinity"
ENVIRONMENT = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "allow"}  # The scripts are a user's.


def run(script, *options, out):
    command = [sys.executable, FOLDER / f"{script}.py", *options, "--out", out]
    done = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.json")
    return json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_parameters_take_a_window_at_every_depth(tmp_path):
    result, text = run("memory", "--live", "--depths", "2", "6", out=tmp_path)
    rows = result["found"]["and parameters on the host"]
    few, many = rows["2"], rows["6"]
    assert few["parameter_bytes"] == many["parameter_bytes"]
    kept = 4 * 64 * 128 * 4  # the inputs of four layers: a sequence on each device
    assert many["total_bytes"] - few["total_bytes"] < 1.1 * kept
    assert "| stage 3 |" in text


@pytest.mark.slow
def test_a_disk_against_itself(tmp_path):
    sizes = {"params": 2**20, "tile-mib": 1, "host-mib": 4, "transfers-mib": 16, "rounds": 1}
    options = [x for name, size in sizes.items() for x in (f"--{name}", size)]
    result, text = run("disk", "--path", tmp_path / "disk", *options, out=tmp_path / "out")
    assert not list((tmp_path / "disk").iterdir())
    assert result["GB of a step, read and written"] == 0.025
    assert "| sweep, AdamW, 2 + 2 threads |" in text
    assert len(result["systems"]) == 3 + 2 * 3
    _, shown = run("disk", "--show", out=tmp_path / "out")
    assert shown in text


@pytest.mark.slow(but=["against_deepspeed", "host_memory"])
@pytest.mark.parametrize("script", ["disk", "against_deepspeed", "kills", "host_memory"])
def test_the_page_has_the_last_result(script):
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--show"]
    shown = subprocess.check_output(command, env=ENVIRONMENT, text=True)
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert "\n".join(rows) in (FOLDER / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("files", [False, True])
def test_a_step_in_time(files, tmp_path):
    sizes = ("--devices", "2", "--layers", "2", "--dim", "64", "--rows", "1")
    result, _ = run(
        "timeline", *["--files"] * files, *sizes, "--path", tmp_path, out=tmp_path / "out"
    )
    shown = {name for name, milliseconds in result["summary"].items() if milliseconds}
    both = {"fetches of parameters", "stores of gradients"}
    read = {"parameters read from files", "tiles read from files", "tiles written to files"}
    assert {"iterations of the loops", *(read if files else both)} <= shown
    (picture,) = (tmp_path / "out").glob("*.png")
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_the_largest_models_are_those_of_the_page(tmp_path):
    """And the paper's terabytes are 20 bytes of each parameter, digit by digit."""
    result, text = run("largest", out=tmp_path)
    page = (FOLDER / "README.md").read_text()
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == len(result["tables"]) == 4
    assert all(table in page for table in tables)
    assert all(row[2] == row[3] for row in result["tables"]["models"][1:])
    fits = [row[1] for row in result["tables"]["one node"][1:]]
    assert fits == ["2B", "15.1B", "32B", "93.8B", "93.8B", "371B", "733B", "1T", "1.75T"]
