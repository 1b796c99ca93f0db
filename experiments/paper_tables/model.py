"""The model that is compiled: a GPT of the paper's family at any size, in bfloat16 with float32 masters.

A step is plain JAX for one device. Layers are scanned; `recompute` says what the backward pass computes
again, and `attention` whether all scores of a layer exist at once. `model_parallel` is Megatron's layout: the
matrices before attention's and the MLP's middle are cut by columns, those behind by rows, the embedding by
its rows.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jzero
from experiments.shared import gpt
from experiments.shared.gpt import attend as _attend

tx = jzero.master_weights(optax.adamw(1e-4))
RECOMPUTE: dict[str, Any] = {
    "nothing": None,
    # Keeps what products with weights return; scores and elementwise operations are computed again.
    "all but products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "blocks": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class GPT(gpt.GPT):
    """One model; `str` of it names its compiled programs.

    Attributes:
      recompute: a key of `RECOMPUTE`.
      attention: 'whole' scores, or those of 128 queries at a time.
      model_parallel: whether activations are cut over the axis 'model', as `AUTO_SPECS` cuts the weights.
      kept_in_parts: whether a layer's input, which the backward pass computes it again of, is cut there, too,
        along the sequence (ZeRO-R's P_a).
    """

    vocab: int = 51_200
    recompute: str = "blocks"
    attention: str = "whole"
    model_parallel: bool = False
    kept_in_parts: bool = False

    def __str__(self) -> str:
        return (
            f"{self.layers}x{self.dim}, {self.heads} heads, vocab {self.vocab}, context {self.context}, "
            f"recompute {self.recompute}, attention {self.attention}"
            + (", model parallel" if self.model_parallel else "")
            + (", kept in parts" if self.kept_in_parts else "")
        )

    def abstract_state(self) -> gpt.State:
        """Shapes and dtypes of the train state; nothing is allocated."""
        return jax.eval_shape(lambda: self.state(tx, partial(jnp.zeros, dtype=jnp.bfloat16)))

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        """So many sequences, with the token after the last."""
        return jax.ShapeDtypeStruct((rows, self.context + 1), jnp.int32)

    def rematerialized(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        if self.recompute == "nothing":
            return layer
        return jax.checkpoint(layer, prevent_cse=False, policy=RECOMPUTE[self.recompute])

    def block(
        self, x: jax.Array, weights: Any, constrain: gpt.Constrain = gpt.unchanged,
        gathered: Callable[[Any], Any] = gpt.unchanged,
    ) -> jax.Array:  # fmt: skip
        weights = gathered(weights)
        attend = {"whole": _attend, "in parts": _attend_in_parts}[self.attention]
        scales = weights["scales"][:, None, None]
        if self.model_parallel:
            keep = 1 if self.kept_in_parts else None
            return _block_in_parts(x, weights, scales, self.heads, attend, keep)
        return gpt.block(x, weights, scales, self.heads, attend=attend, constrain=constrain)


# Of stacked matrices [layers, rows, columns], and of the embedding; optimizer state has the same paths.
AUTO_SPECS = {
    r"\['(qkv|up)'\]": P(None, None, "model"),
    r"\['(project|down)'\]": P(None, "model", None),
    r"\['embed'\]": P("model", None),
}


def _block_in_parts(
    x: jax.Array, weights: Any, scales: jax.Array, heads: int, attend: Callable[..., jax.Array],
    keep: int | None,
) -> jax.Array:  # fmt: skip
    """`gpt.block` over the axis 'model': a head's queries, keys and values are columns of one device.

    What it returns is cut along dim `keep`.
    """

    def along(a: jax.Array, dim: int | None) -> jax.Array:
        spec = P(*("model" if d == dim else None for d in range(a.ndim)))
        return jax.lax.with_sharding_constraint(a, spec)

    qkv = (jax.nn.standardize(x) * scales[0] @ weights["qkv"]).reshape(*x.shape[:2], heads, 3, -1)
    q, k, v = (along(qkv[:, :, :, i], 2) for i in range(3))
    x = x + along(along(attend(q, k, v).reshape(x.shape), 2) @ weights["project"], None)
    hidden = along(jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"]), 2)
    return along(x + along(hidden @ weights["down"], None), keep)


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
