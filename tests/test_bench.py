"""experiments/bench: its script on virtual devices, its table, and what experiments say of speed."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from experiments.shared import speed
from jzero.targets._target import TARGETS, find_target

pytest.importorskip("matplotlib")


SCRIPT = pathlib.Path(__file__).parents[1] / "experiments" / "bench" / "run.py"
ENVIRONMENT = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "allow"}  # The script is a user's.


@pytest.mark.slow
def test_it_runs_on_virtual_devices(tmp_path):
    command = [sys.executable, SCRIPT, "--ways", "stage 3", "--seconds", "0.1", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "the speeds compare nothing" in done.stdout
    (path,) = tmp_path.glob("*.json")
    (found,) = json.loads(path.read_text())
    assert found["num_devices"] == 8
    assert found["at_rest_bytes"]["device"] < found["peak_bytes"]
    assert found["mfu"] is None
    assert path.with_suffix(".png").stat().st_size > 0


def test_speed_is_a_share_of_a_known_peak():
    for name in TARGETS:
        target = find_target("test", name)
        assert speed.peak_flops(target.name) == target.bf16_flops
    assert speed.peak_flops(jax.devices()[0].device_kind) is None
    assert speed.flops_per_token(1000, layers=2, dim=8, context=4) == 6 * 1000 + 12 * 2 * 8 * 4
    said = speed.Meter(6000.0, 8, jax.devices()).said(1234.5)
    assert said.startswith("1,234 tokens/s")
    assert "MFU" not in said
