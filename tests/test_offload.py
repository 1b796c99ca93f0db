"""Optimizer state in the hosts' memory: the same training, in turns that fit on the devices."""

import functools
from typing import Any

import jax
import pytest

import jzero
import optimizers
import parity
import small
import test_optimizers
import zoo
from optimizers import ENTRIES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
optax_promotions = test_optimizers.optax_promotions


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("optax_promotions")
def test_optimizers_train_as_on_one_device(name: str):
    entry = ENTRIES[name]
    mesh = jax.make_mesh((8,), ("data",))
    train_step = small.shard_train_step(
        optimizers.make_step(entry), mesh=mesh, offload=jzero.PinnedHost(device_bytes=1100)
    )
    batches = optimizers.make_batches(entry.poisoned)
    state: Any = train_step.shard(optimizers.make_state(entry), batches[0])
    expected = test_optimizers.one_device(name)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        state, metrics = train_step(state, batch)
        test_optimizers.assert_same((state, metrics), wanted, f"{name}, step {i}")
