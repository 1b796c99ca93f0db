"""XLA's compiler for NVIDIA GPUs, which `make test-newest` installs and `make test` does not."""

import importlib.util

import pytest


def skip_without_it() -> None:
    """Skips the test, or the module if called there."""
    if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        pytest.skip("needs jzero[preflight]; make test-newest has it", allow_module_level=True)
