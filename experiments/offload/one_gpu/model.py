"""The model that is measured: a GPT in bfloat16 with float32 masters, its layers recomputed."""

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import gpt

TX = jzero.master_weights(optax.adamw(1e-3))


class GPT(gpt.GPT):
    """A size, with what a benchmark of it needs."""

    @property
    def flops_per_token(self) -> float:
        """6 per parameter, and 12 * layers * context * dim for attention; recomputation does not count.

        As in PaLM's appendix B: the causal half of the scores is counted like the other.
        """
        return 6 * self.num_params + 12 * self.layers * self.context * self.dim

    def init(self) -> gpt.State:
        return self.state(TX, _weights)

    def batch(self, rows: int) -> jax.Array:
        """Random tokens, with the one after the last; the same in every step, so that losses fall."""
        return jax.random.randint(
            jax.random.key(0), (rows, self.context + 1), 0, self.vocab, jnp.int32
        )


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
