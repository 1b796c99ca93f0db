"""The model that is measured: a GPT in bfloat16 with float32 masters, its layers recomputed."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import gpt, speed

TX = jzero.master_weights(optax.adamw(1e-3))


class GPT(gpt.GPT):
    """A size, with what a benchmark of it needs."""

    @property
    def flops_per_token(self) -> int:
        return speed.flops_per_token(self.num_params, self.layers, self.dim, self.context)

    @property
    def window(self) -> int:
        """Bytes for `Memory(params=...)`: of four layers and two tables, so that fetches run ahead."""
        return 2 * (4 * 12 * self.dim**2 + 2 * self.vocab * self.dim)

    def init(self) -> gpt.State:
        return self.state(TX, _weights)

    def init_params(self) -> Any:
        return self.init()["params"]

    def batch(self, rows: int) -> jax.Array:
        """Random tokens, with the one after the last; the same in every step, so that losses fall."""
        shape = (rows, self.context + 1)
        return jax.random.randint(jax.random.key(0), shape, 0, self.vocab, jnp.int32)

    def decode(self, params: Any, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """After one token of each row, int32 [rows], the likeliest ones up to `context`.

        Returns:
          Tokens, int32 [context, rows], and the mean over rows of their logits, float32 [context].
        """

        def turn(carry: Any, t: jax.Array) -> Any:
            tokens, cache = carry
            x = (params["embed"][tokens] + params["positions"][t][None])[:, None]

            def layer(x: jax.Array, given: Any) -> Any:
                weights, old = given
                new: list[jax.Array] = []

                def attend(q: jax.Array, *kv: jax.Array) -> jax.Array:
                    for a, b in zip(old, kv, strict=True):
                        new.append(jax.lax.dynamic_update_slice_in_dim(a, b, t, 1))
                    seen = (jnp.arange(self.context) <= t)[None, None, None]
                    attention, (keys, values) = jax.nn.dot_product_attention, new
                    return attention(q, keys, values, mask=seen, implementation="xla")

                scales = 1 + weights["scales"][:, None, None]
                return gpt.block(x, weights, scales, self.heads, attend=attend), tuple(new)

            x, cache = jax.lax.scan(layer, x, (params["blocks"], cache))
            logits = (jax.nn.standardize(x[:, 0]) @ params["embed"].T).astype(jnp.float32)
            tokens = logits.argmax(-1).astype(jnp.int32)
            return (tokens, cache), (tokens, logits.max(-1).mean())

        shape = self.layers, len(first), self.context, self.heads, self.dim // self.heads
        empty = (jnp.zeros(shape, self.dtype),) * 2
        return jax.lax.scan(turn, (first, empty), jnp.arange(self.context))[1]


def of_size(layers: int, dim: int, vocab: int, context: int, unrolled: bool) -> GPT:
    """Heads have 64 dims, or 128 from 2048 on.

    `unrolled`: each layer's weights are leaves of their own, so that its gradient can leave when it is made.
    """
    heads = max(1, dim // (128 if dim >= 2048 else 64))
    return GPT(layers, dim, heads, vocab, context, scan=not unrolled)


def _weights(shape: tuple[int, ...]) -> jax.Array:
    """Pseudorandom in +-0.03: a hash of the index, which needs no memory beside what it makes."""
    bits = jnp.full(shape, 1, jnp.uint32)
    for dim in range(len(shape)):
        bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim)) * jnp.uint32(0x9E3779B1)
        bits = bits ^ (bits >> 15)
    return (0.06 * (bits.astype(jnp.float32) * 2.0**-32 - 0.5)).astype(jnp.bfloat16)
