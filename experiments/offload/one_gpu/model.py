"""The model that is measured: a GPT in bfloat16 with float32 masters, its layers in a loop and recomputed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jzero

State = tuple[Any, Any]
TX = jzero.master_weights(optax.adamw(1e-3))


class GPT(NamedTuple):
    """A size; `12 * layers * dim**2` parameters, and the table.

    Attributes:
      layers: how many.
      dim: of the residual stream; heads have 64 dims, or 128 from 2048 on.
      vocab: rows of the embedding, which is tied to the logits.
      context: tokens of a sequence.
      unrolled: each layer's weights are leaves of their own, so that its gradient can leave when it is made.
    """

    layers: int
    dim: int
    vocab: int = 32_768
    context: int = 1024
    unrolled: bool = False

    @property
    def heads(self) -> int:
        return max(1, self.dim // (128 if self.dim >= 2048 else 64))

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.init)[0]))

    @property
    def flops_per_token(self) -> float:
        """6 per parameter, and 12 * layers * context * dim for attention; recomputation does not count.

        As in PaLM's appendix B: the causal half of the scores is counted like the other.
        """
        return 6 * self.num_params + 12 * self.layers * self.context * self.dim

    def init(self) -> State:
        params = self._params()
        return params, TX.init(params)

    def _params(self) -> Any:
        d = self.dim
        blocks = {"scales": (2, d), "qkv": (d, 3 * d), "project": (d, d), "up": (d, 4 * d),
                  "down": (4 * d, d)}  # fmt: skip

        def made(shapes: Any) -> Any:
            return jax.tree.map(_weights, shapes, is_leaf=lambda x: isinstance(x, tuple))

        stacked = {name: (self.layers, *shape) for name, shape in blocks.items()}
        return made({
            "embed": (self.vocab, d),
            "positions": (self.context, d),
            "blocks": [blocks] * self.layers if self.unrolled else stacked,
        })  # fmt: skip

    def batch(self, rows: int) -> jax.Array:
        """Random tokens, with the one after the last; the same in every step, so that losses fall."""
        return jax.random.randint(
            jax.random.key(0), (rows, self.context + 1), 0, self.vocab, jnp.int32
        )

    def step(self, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(self._loss)(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        block = jax.checkpoint(self._block, prevent_cse=self.unrolled)
        x = params["embed"][tokens[:, :-1]] + params["positions"][None]
        if self.unrolled:
            for weights in params["blocks"]:
                x, _ = block(x, weights)
        else:
            x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = (jax.nn.standardize(x) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _block(self, x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        scales = 1 + weights["scales"][:, None, None]
        qkv = jax.nn.standardize(x) * scales[0] @ weights["qkv"]
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in jnp.split(qkv, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x = x + y.reshape(x.shape) @ weights["project"]
        hidden = jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"])
        return x + hidden @ weights["down"], None


def _weights(shape: tuple[int, ...]) -> jax.Array:
    """Pseudorandom in +-0.03: a hash of the index, which needs no memory beside what it makes."""
    bits = jnp.full(shape, 1, jnp.uint32)
    for dim in range(len(shape)):
        bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim)) * jnp.uint32(0x9E3779B1)
        bits = bits ^ (bits >> 15)
    return (0.06 * (bits.astype(jnp.float32) * 2.0**-32 - 0.5)).astype(jnp.bfloat16)
