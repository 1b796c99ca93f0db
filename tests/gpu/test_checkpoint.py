"""What one tier saves another restores, bit for bit, and trains on with."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jzero
import small
import zoo
from gpu import training

NAME = "masters"
POLICIES: dict[str, Any] = {
    "device": jzero.NoOffload(),
    "pinned_host": jzero.PinnedHost(),
    "host": jzero.HostCPU(),
    "half": jzero.HostCPU(ratio=0.5),
}


# Every tier saves and restores once; tests/test_checkpoint.py has all pairs, on CPUs.
@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise([*POLICIES, "device"])))
def test_tiers(tmp_path: Path, first: str, second: str):
    pytest.importorskip("llvmlite")
    entry = training.get(NAME)

    def new_step(tier: str) -> Any:
        return small.shard_train_step(entry.step, memory=POLICIES[tier])

    train_step = new_step(first)
    state = training.trained(NAME, train_step, 2)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(2, state)
    wanted = zoo.to_host(train_step.unshard(state))
    train_step = new_step(second)
    train_step.plan(jax.eval_shape(entry.init), *entry.batches(1)[0])
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        restored = checkpointer.restore(jax.eval_shape(entry.init))
    found = zoo.to_host(train_step.unshard(restored))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)
    tier = training.tiers(restored)
    assert tier["params"] == {"device"}
    assert tier["opt_state"] == ({"device", "host"} if second == "half" else {second})
    _, metrics = train_step(restored, *entry.batches(3)[2])
    assert np.isfinite(metrics["loss"])
