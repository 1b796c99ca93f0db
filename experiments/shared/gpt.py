"""The GPT that experiments compile and train: plain JAX for one device, its layers a loop or unrolled."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
Constrain = Callable[[jax.Array], jax.Array]


def unchanged(x: Any) -> Any:
    return x


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, [rows, context, heads, dim / heads] each; all scores exist at once."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def block(
    x: jax.Array, weights: dict[str, jax.Array], scales: Any, heads: int, *,
    norm: Callable[[jax.Array], jax.Array] = jax.nn.standardize,
    attend: Callable[..., jax.Array] = attend, constrain: Constrain = unchanged,
) -> jax.Array:  # fmt: skip
    """A pre-LN block without biases, [rows, context, dim] -> the same; `scales` are of its two norms."""
    qkv = constrain(norm(x) * scales[0] @ weights["qkv"])
    q, k, v = (a.reshape(*a.shape[:-1], heads, -1) for a in jnp.split(qkv, 3, axis=-1))
    x = x + constrain(attend(q, k, v).reshape(x.shape) @ weights["project"])
    hidden = jax.nn.gelu(norm(x) * scales[1] @ weights["up"])
    return constrain(x + constrain(hidden) @ weights["down"])


def make_step(
    loss_fn: Callable[[Any, jax.Array], jax.Array], tx: optax.GradientTransformation
) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """`step(state, tokens) -> (state, loss)`, as anyone would write it for one device."""

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return step


@dataclasses.dataclass(frozen=True)
class GPT:
    """A size, and how the layers are written; learned positions, the embedding is also the output layer.

    Attributes:
      layers: each of 12 dim^2 parameters.
      dim: of the residual stream.
      heads: of attention.
      vocab: rows of the embedding.
      context: tokens of a sequence.
      scan: layers are one loop over stacked weights; else each layer's are leaves of their own.
      remat: the backward pass computes each block again.
      dtype: in which it computes; parameters may rest in another.
    """

    layers: int
    dim: int
    heads: int
    vocab: int = 32_768
    context: int = 1024
    scan: bool = True
    remat: bool = True
    dtype: Any = jnp.bfloat16

    @property
    def shapes(self) -> dict[str, Any]:
        """Of the parameters."""
        d = self.dim
        block = {
            "scales": (2, d),
            "qkv": (d, 3 * d),
            "project": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
        }
        stacked = {name: (self.layers, *shape) for name, shape in block.items()}
        return {
            "embed": (self.vocab, d),
            "positions": (self.context, d),
            "blocks": stacked if self.scan else [block] * self.layers,
        }

    @property
    def num_params(self) -> int:
        return sum(map(math.prod, jax.tree.leaves(self.shapes, is_leaf=_is_shape)))

    def state(
        self, tx: optax.GradientTransformation, make: Callable[[Any], jax.Array] = jnp.zeros
    ) -> State:
        """Parameters that `make` makes of their shapes, and the optimizer's state."""
        params = jax.tree.map(make, self.shapes, is_leaf=_is_shape)
        return {"params": params, "opt_state": tx.init(params)}

    def loss(
        self, params: Any, tokens: jax.Array, constrain: Constrain = unchanged,
        gathered: Callable[[Any], Any] = unchanged,
    ) -> jax.Array:  # fmt: skip
        """Mean cross entropy, of int32 [rows, context + 1].

        For an expert, `constrain` shards activations, and `gathered` replicates weights where they are used.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        embed, positions = (params[name].astype(self.dtype) for name in ("embed", "positions"))
        x = constrain(gathered(embed)[inputs] + gathered(positions)[None])
        layer = self.rematerialized(
            lambda x, weights: (self.block(x, weights, constrain, gathered), None)
        )
        if self.scan:
            x, _ = jax.lax.scan(layer, x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x, _ = layer(x, weights)
        logits = constrain((jax.nn.standardize(x) @ gathered(embed).T).astype(jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def rematerialized(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(layer, prevent_cse=not self.scan) if self.remat else layer

    def block(
        self, x: jax.Array, weights: Any, constrain: Constrain = unchanged,
        gathered: Callable[[Any], Any] = unchanged,
    ) -> jax.Array:  # fmt: skip
        weights = gathered(jax.tree.map(lambda w: w.astype(self.dtype), weights))
        scales = 1 + weights["scales"][:, None, None]
        return block(x, weights, scales, self.heads, constrain=constrain)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)
