"""GPT-2 in Flax Linen: biases, q, k and v apart, a tied table, the layers scanned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.rivals.annotations import Unannotated
from experiments.rivals.models.training import State, cross_entropy, make_step, new_state


class Block(nn.Module):
    heads: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        rows, dim = self.annotate.rows, x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = (
            rows(nn.Dense(dim, dtype=self.dtype, name=name)(h)).reshape(
                *x.shape[:2], self.heads, -1
            )
            for name in ("query", "key", "value")
        )
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x += rows(nn.Dense(dim, dtype=self.dtype, name="out")(out.reshape(x.shape)))
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(rows(nn.Dense(4 * dim, dtype=self.dtype, name="up")(h)))
        return rows(x + nn.Dense(dim, dtype=self.dtype, name="down")(h)), None


class Transformer(nn.Module):
    layers: int
    dim: int
    heads: int
    vocab: int
    context: int
    dtype: Any
    annotate: Unannotated

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        linen = self.annotate.linen
        embed = linen(nn.Embed, self.dtype)(self.vocab, self.dim, dtype=self.dtype, name="tokens")
        places = linen(nn.Embed, self.dtype)(
            self.context, self.dim, dtype=self.dtype, name="positions"
        )
        x = embed(tokens) + places(jnp.arange(tokens.shape[1])[None])
        block = nn.remat(linen(Block, self.dtype), prevent_cse=False)
        scanned = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = scanned(self.heads, self.dtype, self.annotate, name="blocks")(
            self.annotate.rows(x), None
        )
        x = linen(nn.LayerNorm)(dtype=self.dtype, name="norm")(x)
        return self.annotate.rows(embed.attend(x))


@dataclasses.dataclass(frozen=True)
class FlaxGPT:
    layers: int
    dim: int
    heads: int
    vocab: int = 32_768
    context: int = 1024
    dtype: Any = jnp.bfloat16
    annotate: Unannotated = Unannotated()

    @property
    def model(self) -> Transformer:
        return Transformer(
            self.layers, self.dim, self.heads, self.vocab, self.context, self.dtype, self.annotate
        )

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def init(self, key: jax.Array) -> State:
        tokens = jnp.zeros((1, self.context), jnp.int32)
        return new_state(self.model.init(key, tokens)["params"])

    def step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        return make_step(self.loss, self.annotate)(state, batch)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        tokens = self.annotate.rows(tokens)
        logits: Any = self.model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])
