"""XLA's compilers for NVIDIA GPUs and TPUs, which `make test-newest` installs and `make test` does not."""

import importlib.util
import os

import pytest


def skip_without_it() -> None:
    """Skips the test, or the module if called there."""
    if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        pytest.skip("needs jzero[preflight]; make test-newest has it", allow_module_level=True)


def skip_without_that_for_tpus() -> None:
    """The same for TPUs. Tests that run side by side each load it; none of them asks what machine this is."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs jzero[preflight-tpu]; make test-newest has it", allow_module_level=True)
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
