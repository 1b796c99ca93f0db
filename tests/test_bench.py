"""experiments/bench: its script on virtual devices, its table, and what experiments say of speed."""

import importlib.util
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


def run_module():
    spec = importlib.util.spec_from_file_location("bench_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_table_keeps_its_numbers_in_80_columns():
    environment = {
        "date": "2026-11-22", "cpu": "192 x INTEL(R) XEON(R) PLATINUM 8480CL", "jax": "0.12.0.1",
        "devices": "64 x NVIDIA H100 80GB HBM3", "jzero files": "0123456+",
    }  # fmt: skip
    model = {
        "parameters": 184_811_520, "layers": 12, "dim": 1024, "vocab": 32768, "context": 1024,
        "compute": "bfloat16", "remat": True, "rows_per_device": 8,
    }  # fmt: skip
    results = [
        {
            "way": way, "num_devices": 64, "platform": "gpu", "model": model, "mfu": 0.4321,
            "tokens_per_second": 12_345_678.0, "first_step_seconds": 123.45, "environment": environment,
            "at_rest_bytes": {"device": 2**33, "host": 2**35}, "peak_bytes": 79 * 2**30,
            "peak_bytes_by": "the runtime's count",
        }
        for way in ("jax.jit", "PinnedHost")
    ]  # fmt: skip
    lines = run_module().table([*results, {"way": "HostCPU", "error": "no llvmlite " * 20}])
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == [
        "PinnedHost", "64", "12,345,678", "192,901", "43.2%", "123.5", "s", "8G", "32G", "79G",
    ]  # fmt: skip
    assert lines[3].split()[:2] == ["HostCPU", "failed"]
    assert not any("virtual" in line for line in lines)


def test_speed_is_a_share_of_a_known_peak():
    for name in TARGETS:
        target = find_target("test", name)
        assert speed.peak_flops(target.name) == target.bf16_flops
    assert speed.peak_flops(jax.devices()[0].device_kind) is None
    assert speed.flops_per_token(1000, layers=2, dim=8, context=4) == 6 * 1000 + 12 * 2 * 8 * 4
    said = speed.Meter(6000.0, 8, jax.devices()).said(1234.5)
    assert said.startswith("1,234 tokens/s")
    assert "MFU" not in said
