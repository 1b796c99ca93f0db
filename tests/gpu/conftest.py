"""Tests of what only a GPU can show: skipped where JAX runs on none.

make test-gpu                                                      # where there is a GPU
JZERO_TEST_GPU=cpu JAX_PLATFORMS=cpu python -m pytest tests/gpu    # the same code on the CPU, to try it first

What the CPU cannot tell (bytes in use, above all) is skipped there.
"""

import os

import jax
import pytest

# Subprocesses of these tests share the GPU with them.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(autouse=True, scope="session")
def _on_a_gpu():
    if os.environ.get("JZERO_TEST_GPU") != "cpu" and jax.devices()[0].platform != "gpu":
        pytest.skip("needs a GPU, and JZERO_TEST_GPU=1 in the environment: make test-gpu")


@pytest.fixture(autouse=True)
def _whole_float32():
    """GPUs multiply float32 matrices in TF32, with 10 bits, unless they are told not to."""
    with jax.default_matmul_precision("highest"):
        yield
