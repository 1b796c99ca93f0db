"""A second start of a training finds all of its programs in JAX's persistent compilation cache."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


def start(folder, seed):
    """What each of several trainings found there; Python's sets have another order for every seed."""
    script = pathlib.Path(__file__).with_name("second_start.py")
    environment = {"JAX_COMPILATION_CACHE_DIR": str(folder), "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    first, second = (start(tmp_path, seed) for seed in (1, 2))
    assert all(counts["misses"] > 0 for counts in first.values()), first
    for name, counts in second.items():
        assert counts == {"hits": sum(first[name].values()), "misses": 0}, name
