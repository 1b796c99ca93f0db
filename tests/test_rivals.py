"""experiments/rivals: each of its models, trained in every way that it compares, trains as on one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from experiments.rivals.models import training
from experiments.rivals.zoo import RIVALS, TINY, rival
from jzero._compare import to_host

STEPS, DEVICES = 2, 4


@pytest.fixture(autouse=True)
def _large_updates(monkeypatch: pytest.MonkeyPatch):
    """Of 0.1, and not of the direction of gradients that are only rounding (keys' biases have such)."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, eps=1e-2))
    monkeypatch.setattr(training, "tx", tx)


def new_batch(shapes: Any, seed: int) -> Any:
    generator = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        if np.issubdtype(x.dtype, np.integer):
            return generator.integers(0, 8, x.shape, x.dtype)
        return generator.standard_normal(x.shape, x.dtype)

    return jax.tree.map(leaf, shapes)


@pytest.mark.alternating
@pytest.mark.parametrize("name", TINY)
def test_every_rival_trains_as_one_device(name: str):
    row = TINY[name]
    model = dataclasses.replace(row.model, dtype=jnp.float32)
    init = jax.jit(model.init)
    batches = [new_batch(model.batch(row.rows * DEVICES), seed) for seed in range(STEPS)]
    expected = trained(jax.jit(model.step), init(jax.random.key(0)), batches)
    mesh = jax.make_mesh(
        (DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )
    for way in RIVALS:
        given = rival(way, row, model, mesh, min_shard_bytes=0)
        state = init(jax.random.key(0))
        if way != "jzero":
            shardings = jax.tree.map(lambda leaf: leaf.sharding, (given.state, given.batch))
            state = jax.device_put(state, shardings[0])
            batches = [jax.device_put(batch, shardings[1]) for batch in batches]
        found = trained(given.step, state, batches)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), found, expected)


def trained(step: Any, state: Any, batches: Any) -> Any:
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    return to_host((state, losses))
