"""Parameters and activations on the host: `jax.jit`'s training, in memory that depth does not change."""

from typing import Any

import jax
import numpy as np
import pytest

import jzero
import test_infer_from_host as inference
import test_offload_params as deep
from gpu import memory_worker, training
from jzero.sharding.analysis import _residuals

SCANNED = "transformer_scan_remat"
HOST: dict[str, Any] = {"offload_params": jzero.PinnedHost(2**20), "offload": jzero.HostCPU()}
LAYER_MAJOR: dict[str, Any] = {
    "offload_activations": jzero.PinnedHost(), "accumulate": 2, "layer_major": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _whatever_its_size(monkeypatch: pytest.MonkeyPatch):
    """Small activations leave, too."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)


def test_trains_as_jit_layer_by_layer():
    """In microbatches; test_checks.py has the whole batch."""
    pytest.importorskip("llvmlite")
    train_step = training.check(SCANNED, **HOST, **LAYER_MAJOR)
    state = training.trained(SCANNED, train_step, 1)
    assert training.tiers(state) == {"params": {"pinned_host"}, "opt_state": {"host"}}


def test_all_of_the_state_in_buckets():
    """It trains alike, too, and after steps it rests where it did before them."""
    policy = jzero.PinnedHost(2**14)
    _, state = deep.check(True, axes={"data": jax.device_count()}, offload=policy)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.nbytes >= 1024}
    assert kinds == {"pinned_host"}


def measured(num_layers: int) -> dict[str, int]:
    pytest.importorskip("llvmlite")
    return memory_worker.measured("layers", str(num_layers))


FEW, MANY = 8, 32


def test_nothing_is_on_the_device_at_rest():
    assert measured(FEW)["at_rest"] < 2**20


def test_the_peak_at_any_depth():
    """By the allocator's count, temporaries of programs included."""
    few = measured(FEW)
    if few["peak"] is None:
        pytest.skip("this backend does not count bytes in use")
    many = measured(MANY)
    # 24 layers more, of bfloat16: a quarter of their weights would be seen.
    assert many["peak"] - few["peak"] < 2 * (many["params"] - few["params"]) / 4


def test_decodes_as_on_one_device():
    """Each iteration of the loop over tokens fetches all weights."""
    with jax.enable_x64(True):
        params = inference.new_params()
        args = inference.tokens_of(16, inference.GIVEN), jax.random.key(0)
        num = jax.device_count()
        eval_step, placed, _ = inference.smallest(inference.greedy, params, num, *args)
        assert inference.nested_in(eval_step, *(placed, *args))
        wanted = jax.jit(inference.greedy)(params, *args)
        inference.same(eval_step(placed, *args), wanted)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(placed) if np.ndim(x)}
        assert kinds == {"pinned_host"}
