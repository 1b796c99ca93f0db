"""The training script of experiments/train_lm, with optimizer state on the host."""

import csv
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("llvmlite")

SCRIPT = [sys.executable, pathlib.Path(__file__).parent / "small_training.py", "train_linen"]
ENVIRONMENT = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "allow"}  # The script is a user's.
DELAYED = ["--offload", "host", "--delayed", "--delay-after", "1"]


def train(*options, status: int = 0) -> str:
    command = [*SCRIPT, "--steps", "4", "--devices", "4", *options]
    done = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def losses_of(folder: pathlib.Path) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["loss_nats_per_byte"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_delayed_updates_are_flushed_when_saved(tmp_path):
    plain, delayed, checkpoints = tmp_path / "plain", tmp_path / "delayed", tmp_path / "checkpoints"
    train("--out", plain)
    command = [*DELAYED, "--save-every", "2", "--checkpoints", checkpoints, "--out", delayed]
    told = train(*command)
    assert "The host updates them in place:" in told
    assert re.search(r"the first step took [\d.]+ s with compiling it; then [\d,]+ tokens/s", told)
    expected, found = losses_of(plain), losses_of(delayed)
    # Steps 1 and 3 are delayed, and the save after step 1 flushes: only step 3 computes with parameters
    # that lack an update, that of step 2.
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-5)
    assert abs(found[3] - expected[3]) > 1e-3
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4"}
    assert "going on after step 4" in train(*command)
