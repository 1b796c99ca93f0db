"""experiments/rivals: each of its models, trained in every way that it compares, trains as on one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
from experiments.rivals.models import training
from experiments.rivals.zoo import (
    GPT,
    RIVALS,
    T5,
    DiT,
    DroplessMoE,
    FlaxGPT,
    Llama,
    Mamba,
    MoE,
    Row,
    UNet,
    rival,
)
from jzero._compare import to_host

STEPS, DEVICES = 2, 4
TINY: dict[str, Row] = {
    "Flax GPT": Row(FlaxGPT(2, 16, 2, 32, 8)),
    "Llama": Row(Llama(2, 16, 4, 2, 32, 32, 8)),
    "our GPT": Row(GPT(2, 16, 2, 32, 8)),
    "T5": Row(T5(2, 16, 2, 8, 32, 32, 8)),
    "MoE": Row(MoE(2, 16, 2, 32, 4, vocab=32, context=8)),
    "MoE without dropped tokens": Row(DroplessMoE(2, 16, 2, 32, 4, vocab=32, context=8)),
    "Mamba": Row(Mamba(2, 16, 4, 32, 8)),
    "DiT": Row(DiT(2, 16, 2, image=8, classes=8), scanned=False),
    "UNet": Row(UNet((8, 16), 1, (False, True), image=8), scanned=False),
    "Llama, loss in chunks": Row(Llama(2, 16, 4, 2, 32, 32, 8, loss_chunks=2)),
    "Llama, accumulate=4": Row(Llama(2, 16, 4, 2, 32, 32, 8), rows=4, microbatches=4),
    "Llama, stage 2": Row(Llama(2, 16, 4, 2, 32, 32, 8), stage=2),
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_rival_trains_as_one_device(name: str):
    row = TINY[name]
    model = dataclasses.replace(row.model, dtype=jnp.float32)
    init = jax.jit(model.init)
    batches = [new_batch(model.batch(row.rows * DEVICES), seed) for seed in range(STEPS)]
    expected = trained(jax.jit(model.step), init(jax.random.key(0)), batches)
    mesh = small.auto_mesh(data=DEVICES)
    for way in RIVALS:
        given = rival(way, row, model, mesh, axes=jzero.Axes(min_shard_bytes=0))
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
