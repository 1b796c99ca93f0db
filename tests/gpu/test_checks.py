"""What jzero takes for granted on a GPU; `make one-gpu` runs the same, each in a process of its own."""

import jax
import pytest

from experiments.offload.one_gpu import checks
from jzero.sharding.plan import _host_memory

BY_KERNELS = (
    "saved", "looked_at", "trains_host", "trains_layers", "trains_activations", "trains_half", "trains_late",
    "trains_nvme",
)  # fmt: skip


@pytest.mark.parametrize("name", checks.CHECKS)
def test_check(name: str):
    if name in BY_KERNELS:
        pytest.importorskip("llvmlite")
    if name in ("reversed_scan", "trains_activations") and checks.ON_GPU:
        if jax.__version_info__ < _host_memory.RIGHT_SINCE:
            pytest.skip("XLA reads residuals of a scan where they are not; jzero refuses them")
    said = checks.CHECKS[name]()  # It asserts by itself, and may say what it found.
    assert said is None or said
    print(said)
