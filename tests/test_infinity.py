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
def test_a_process_grows_by_gradients_alone(tmp_path):
    """Where parameters and optimizer state are in files; 2 bytes each. With state in memory, by 12 more."""
    result, _ = run("host_memory", "--layers", "64", "192", out=tmp_path)
    grows = [row["bytes more for each parameter"] for row in result["rows"]]
    in_memory, state_in_files, both_in_files = grows
    assert both_in_files < 3.5
    assert state_in_files < 5.5
    assert in_memory - state_in_files > 8


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
    shown = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert "\n".join(rows) in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_what_an_iteration_costs(tmp_path):
    options = ("--rounds", "1", "--devices", "1", "--layers", "6", "--profile")
    result, text = run("overhead", *options, out=tmp_path)
    assert set(result["1 devices"]["host_ms"]) >= {"and parameters on the host, 6 layers"}
    assert "cumtime" in text


@pytest.mark.slow
def test_losses_are_those_of_one_device(tmp_path):
    result, _ = run("convergence", "--steps", "2", "--devices", "2", out=tmp_path)
    assert result["rows"]["and parameters on the host"]["largest_difference"] < 1e-5


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


@pytest.mark.slow
def test_a_step_with_files_in_time(tmp_path):
    options = ("--files", "--devices", "2", "--layers", "2", "--dim", "64", "--rows", "1")
    result, _ = run("timeline", *options, "--path", tmp_path, out=tmp_path / "out")
    shown = {name for name, milliseconds in result["summary"].items() if milliseconds}
    files = {"parameters read from files", "tiles read from files", "tiles written to files"}
    assert files | {"iterations of the loops", "host updates"} <= shown


@pytest.mark.slow
def test_a_step_in_time(tmp_path):
    options = ("--devices", "2", "--layers", "2", "--dim", "64", "--rows", "1")
    result, _ = run("timeline", *options, out=tmp_path)
    shown = {name for name, milliseconds in result["summary"].items() if milliseconds}
    assert {"fetches of parameters", "iterations of the loops", "stores of gradients"} <= shown
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 0
