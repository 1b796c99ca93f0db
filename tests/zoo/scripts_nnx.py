"""Train steps of Flax's NNX examples, as `jzero.from_nnx` takes them: objects wherever they stand, mutated.

The reference is the script itself: its own step, its objects, one call after the other, on one device.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jzero
from jzero._compare import to_host

from ._program import Program
from .core import CLASSES, VOCAB_SIZE, adamw


def of_objects(
    train_step: Callable[..., Any], make: Callable[[], Mapping[str, Any]],
    batches: Callable[[int], list[tuple[Any, ...]]],
) -> Program:  # fmt: skip
    """An entry of a step whose arguments are `make()`, by name in the step's order, and a batch's."""
    names = [name for name in inspect.signature(train_step).parameters if name not in make()]

    def alone(batches):
        objects, trained = make(), []
        for batch in batches:
            metrics = train_step(**objects, **dict(zip(names, batch, strict=False)))
            trained.append(to_host((nnx.state(tuple(objects.values())), metrics)))
        return trained

    step, _ = jzero.from_nnx(train_step, **make())
    init = lambda: jzero.from_nnx(train_step, **make())[1]  # noqa: E731
    return Program(init=init, batches=batches, step=step, alone=alone)


def optimizer_of(model, tx=None):
    return nnx.Optimizer(model, tx or adamw(), wrt=nnx.Param)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.linear = nnx.Linear(8 * 16, CLASSES, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.silu(self.norm(self.dropout(self.conv(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))


class Gemma(nnx.Module):
    """Rotary attention with grouped heads, RMS norms, a gated unit, the embedding as the head."""

    def __init__(self, rngs: nnx.Rngs):
        width, heads, size = 16, 4, 8
        init = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(VOCAB_SIZE, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.query = nnx.Param(init(rngs.params(), (width, heads, size)))
        self.keys_and_values = nnx.Param(init(rngs.params(), (2, width, size)))
        self.out = nnx.Param(init(rngs.params(), (heads, size, width)))
        self.gate, self.up = (nnx.Linear(width, 32, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(32, width, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, tokens, positions, attention_mask, rngs):
        x = self.embed(tokens) * 4.0
        h = self.norms[0](x)
        q = rotated(jnp.einsum("btd,dhs->bths", h, self.query[...]), positions)
        k, v = jnp.einsum("btd,cds->cbts", h, self.keys_and_values[...])
        k = rotated(k[:, :, None], positions)[:, :, 0]
        logits = jnp.einsum("bths,bus->bhtu", q, k) / 8**0.5
        weights = jax.nn.softmax(jnp.where(attention_mask[:, None], logits, -1e9))
        x = x + jnp.einsum("bhtu,bus,hsd->btd", weights, v, self.out[...])
        h = self.norms[1](x)
        x = x + self.dropout(self.down(nnx.gelu(self.gate(h)) * self.up(h)), rngs=rngs)
        return 5.0 * jnp.tanh(self.embed.attend(self.norms[2](x)) / 5.0)


def rotated(x, positions):
    """x [b, t, h, s] by the angles of its positions [b, t]."""
    angles = jnp.einsum("bt,s->bts", positions, 100.0 ** (-jnp.arange(4) / 4.0))[:, :, None]
    first, second = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
