"""A state in shards is evaluated, and generates, as on one device, on all GPUs that there are."""

from typing import Any

import jax
import numpy as np
import pytest

import jzero
import test_eval_step as small_gpt
import zoo

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("offload", [jzero.NoOffload(), jzero.HostCPU(), jzero.PinnedHost(2**20)])
def test_as_on_one_device(offload: Any):
    if isinstance(offload, jzero.HostCPU):
        pytest.importorskip("llvmlite")
    train_step, state = small_gpt.trained({"data": jax.device_count()}, offload=offload)
    before, key = [x.sharding.memory_kind for x in jax.tree.leaves(state)], jax.random.key(0)
    eval_step = jzero.shard_eval_step(small_gpt.evaluate, like=train_step)
    whole = zoo.to_host(state)
    for rows in (8 * jax.device_count(), 13):
        tokens = small_gpt.tokens_of(rows)
        small_gpt.same(
            eval_step(state, tokens, key), jax.jit(small_gpt.evaluate)(whole, tokens, key)
        )
    assert [x.sharding.memory_kind for x in jax.tree.leaves(state)] == before


@pytest.mark.parametrize("gather", [None, "per_pass", "once_per_step"])
def test_generates_the_same_tokens(gather: str | None):
    train_step, (params, _) = small_gpt.trained({"data": jax.device_count()})
    eval_step = jzero.shard_eval_step(
        small_gpt.generate, like=train_step, comm=jzero.Comm(gather=gather)
    )
    inputs = small_gpt.tokens_of(6, 3), jax.random.key(1)
    tokens, _ = eval_step(params, *inputs)
    wanted, _ = jax.jit(small_gpt.generate)(zoo.to_host(params), *inputs)
    np.testing.assert_array_equal(tokens, wanted)
