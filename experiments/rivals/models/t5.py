"""T5 1.1 in Flax Linen: an encoder and a decoder, both scanned, each with a bias by relative position."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, cross_entropy, make_step, new_state


def buckets(length: int, causal: bool, num: int = 32, farthest: int = 128) -> jax.Array:
    """[queries, keys]: small distances have a bucket each, larger ones share, up to `farthest`."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    start = jnp.zeros_like(distance)
    if not causal:
        num //= 2
        start = jnp.where(distance > 0, num, 0)
        distance = -jnp.abs(distance)
    distance = jnp.maximum(-distance, 0)
    exact = num // 2
    far = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(farthest / exact) * (num - exact)
    shared = jnp.minimum(exact + far.astype(jnp.int32), num - 1)
    return start + jnp.where(distance < exact, distance, shared)


class PositionBias(nn.Module):
    heads: int
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        table = nn.Embed(32, self.heads, dtype=self.dtype, name="table")
        return table(buckets(length, self.causal)).transpose(2, 0, 1)[None]


class Attention(nn.Module):
    heads: int
    head_size: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(
        self, x: jax.Array, others: jax.Array, bias: jax.Array | None, causal: bool
    ) -> jax.Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        rows, width = self.annotate.rows, self.heads * self.head_size
        q, k, v = (
            rows(dense(width, name=name)(of)).reshape(*of.shape[:2], self.heads, -1)
            for name, of in (("query", x), ("key", others), ("value", others))
        )
        out = jax.nn.dot_product_attention(
            q, k, v, bias, is_causal=causal, scale=1.0, implementation="xla"
        )
        return rows(dense(x.shape[-1], name="out")(out.reshape(*x.shape[:2], width)))


class Layer(nn.Module):
    """Of the encoder; with `encoded` of the decoder."""

    heads: int
    head_size: int
    hidden: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(
        self, x: jax.Array, bias: jax.Array, encoded: jax.Array | None
    ) -> tuple[jax.Array, None]:
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        attend = functools.partial(Attention, self.heads, self.head_size, self.dtype, self.annotate)
        rows = self.annotate.rows
        h = norm()(x)
        x += attend(name="attention")(h, h, bias, encoded is not None)
        if encoded is not None:
            x += attend(name="cross_attention")(norm()(x), encoded, None, False)
        h = norm()(x)
        gate = nn.gelu(rows(dense(self.hidden, name="gate")(h)))
        h = gate * rows(dense(self.hidden, name="up")(h))
        return rows(x + dense(x.shape[-1], name="down")(h)), None


class Transformer(nn.Module):
    layers: int
    dim: int
    heads: int
    head_size: int
    hidden: int
    vocab: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        linen = self.annotate.linen
        embed = linen(nn.Embed, self.dtype)(self.vocab, self.dim, dtype=self.dtype, name="tokens")
        encoded = self.stack("encoder", embed(inputs), None)
        decoded = self.stack("decoder", embed(targets), encoded)
        head = linen(nn.Dense, self.dtype)(
            self.vocab, use_bias=False, dtype=self.dtype, name="head"
        )
        return self.annotate.rows(head(decoded))

    def stack(self, name: str, x: jax.Array, encoded: jax.Array | None) -> jax.Array:
        linen = self.annotate.linen
        bias = linen(PositionBias, self.dtype)(
            self.heads, encoded is not None, self.dtype, name=f"{name}_bias"
        )(x.shape[1])
        layer = nn.remat(linen(Layer, self.dtype), prevent_cse=False)
        layers = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers,
            in_axes=(nn.broadcast, nn.broadcast),
        )(self.heads, self.head_size, self.hidden, self.dtype, self.annotate, name=name)  # fmt: skip
        x, _ = layers(self.annotate.rows(x), bias, encoded)
        return linen(nn.RMSNorm)(dtype=self.dtype, name=f"{name}_norm")(x)


@dataclasses.dataclass(frozen=True)
class T5:
    layers: int
    dim: int
    heads: int
    head_size: int
    hidden: int
    vocab: int = 32_128
    context: int = 1024
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def model(self) -> Transformer:
        sizes = (self.layers, self.dim, self.heads, self.head_size, self.hidden, self.vocab)
        return Transformer(*sizes, self.dtype, self.annotate)

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        tokens = jax.ShapeDtypeStruct((rows, self.context), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    def init(self, key: jax.Array) -> State:
        tokens = jnp.zeros((1, self.context), jnp.int32)
        return new_state(self.model.init(key, tokens, tokens)["params"])

    def step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
        return make_step(self.loss, self.annotate)(state, batch)

    def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        batch = self.annotate.rows(batch)
        shifted = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))
        logits: Any = self.model.apply({"params": params}, batch["inputs"], shifted)
        return cross_entropy(logits, batch["targets"])
