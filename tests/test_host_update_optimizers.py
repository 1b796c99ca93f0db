"""Every optimizer that optax exports updates state on the host as under `jax.jit`, to a few ULPs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import host_updates
from host_updates import Problem, problem
from jzero.offload._host_update import HostUpdate
from jzero.offload._roads import XLA
from optimizers import ENTRIES

# Some of optax's optimizers are deprecated, some call what is.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

NUM_STEPS = 3
# Each step starts from the same state. XLA fuses a product into the sum that follows it and rounds once where
# the kernel rounds twice; most optimizers stay below 2.
KERNEL_ULPS = 16
# XLA against itself: it fuses a part of the update otherwise than the whole, and orthogonalising a matrix
# (Muon) multiplies that.
XLA_ULPS = 512


@pytest.fixture(autouse=True)
def optax_promotions():
    """optax itself relies on JAX's default promotions."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", ENTRIES)
def test_updates_as_xla_does(name: str):
    assert_same(problem(ENTRIES[name], jnp.float32), name)


@pytest.mark.parametrize("name", ENTRIES)
def test_bfloat16_comes_in_and_goes_out(name: str):
    assert_same(problem(ENTRIES[name], jnp.bfloat16, jnp.bfloat16), name)


@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, None)])
@pytest.mark.parametrize("name", ["adamw", "adam(bfloat16 moment)", "lion", "lamb", "rmsprop"])
def test_either_alone(name: str, dtypes: tuple[Any, Any]):
    assert_same(problem(ENTRIES[name], *dtypes), name)


def assert_same(given: Problem, title: str) -> None:
    rng = np.random.default_rng(0)
    state = [host_updates.on_host(leaf) for leaf in given.state]
    update = HostUpdate(given.update, state, given.inputs)
    outputs = update.make_outputs()
    for step in range(NUM_STEPS):
        inputs = [host_updates.random(rng, aval) for aval in given.inputs]
        expected = host_updates.reference(given.update, update.state, inputs)
        update(inputs, outputs)
        for road, got, want in zip(update.roads, [*update.state, *outputs], expected, strict=True):
            error, limit = host_updates.ulps(got, want), XLA_ULPS if road.by == XLA else KERNEL_ULPS
            assert error <= limit, (title, step, road, error)
