"""The model that is compiled: a GPT of the paper's family at any size, in bfloat16 with float32 masters.

A step is plain JAX for one device. Layers are scanned; `recompute` says what the backward pass computes
again, and `attention` whether all scores of a layer exist at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero

tx = jzero.master_weights(optax.adamw(1e-4))
RECOMPUTE: dict[str, Any] = {
    "nothing": None,
    # Keeps what products with weights return; scores and elementwise operations are computed again.
    "all but products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "blocks": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class GPT:
    """One model; `str` of it names its compiled programs.

    Attributes:
      layers: each of 12 dim^2 parameters.
      dim: the paper's hidden size.
      heads: of attention.
      vocab: rows of the embedding, which is tied to the logits.
      context: tokens of a sequence.
      recompute: a key of `RECOMPUTE`.
      attention: 'whole' scores, or those of 128 queries at a time.
    """

    layers: int
    dim: int
    heads: int
    vocab: int = 51_200
    context: int = 1024
    recompute: str = "blocks"
    attention: str = "whole"

    def __str__(self) -> str:
        return (
            f"{self.layers}x{self.dim}, {self.heads} heads, vocab {self.vocab}, context {self.context}, "
            f"recompute {self.recompute}, attention {self.attention}"
        )

    @property
    def shapes(self) -> dict[str, Any]:
        """Of the parameters; those of the blocks are stacked."""
        n, d = self.layers, self.dim
        return {
            "embed": (self.vocab, d),
            "positions": (self.context, d),
            "blocks": {
                "scales": (n, 2, d),
                "qkv": (n, d, 3 * d),
                "project": (n, d, d),
                "up": (n, d, 4 * d),
                "down": (n, 4 * d, d),
            },
        }

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state()["params"]))

    def state(self) -> dict[str, Any]:
        """Shapes and dtypes of the train state; nothing is allocated."""
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            self.shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        return {"params": params, "opt_state": jax.eval_shape(tx.init, params)}

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        """So many sequences, with the token after the last."""
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def step(self, state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, grads = jax.value_and_grad(self._loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    def _loss(self, params: dict[str, Any], batch: jax.Array) -> jax.Array:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        block: Any = self._block
        if self.recompute != "nothing":
            block = jax.checkpoint(block, prevent_cse=False, policy=RECOMPUTE[self.recompute])
        x = params["embed"][tokens] + params["positions"][None]
        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = (jax.nn.standardize(x) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def _block(self, x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        scales = weights["scales"][:, None, None]
        qkv = jax.nn.standardize(x) * scales[0] @ weights["qkv"]
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in jnp.split(qkv, 3, axis=-1))
        attend = {"whole": _attend, "in parts": _attend_in_parts}[self.attention]
        x = x + attend(q, k, v).reshape(x.shape) @ weights["project"]
        hidden = jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"])
        return x + hidden @ weights["down"], None


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _attend_in_parts(q: jax.Array, k: jax.Array, v: jax.Array, part: int = 128) -> jax.Array:
    """The same, with the scores of `part` queries at a time, computed again in the backward pass.

    What a fused kernel ("flash attention") does for memory; none is compiled without cuDNN.
    """
    length = q.shape[1]

    @jax.checkpoint
    def of_part(carry: None, start: jax.Array) -> tuple[None, jax.Array]:
        queries = jax.lax.dynamic_slice_in_dim(q, start, part, axis=1)
        mask = jnp.arange(length)[None] <= (start + jnp.arange(part))[:, None]
        return carry, jax.nn.dot_product_attention(
            queries, k, v, mask=mask[None, None], implementation="xla"
        )

    _, parts = jax.lax.scan(of_part, None, jnp.arange(0, length, part))
    return jnp.moveaxis(parts, 0, 1).reshape(q.shape)
