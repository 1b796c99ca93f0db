"""A GPT whose activations can be pinned to the devices by hand, and its train step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
Constrain = Callable[[jax.Array], jax.Array]


class Size(NamedTuple):
    """The model's numbers; `num_layers * 12 * dim**2` parameters in the blocks."""

    num_layers: int
    dim: int
    num_heads: int
    vocab_size: int = 32_768
    context: int = 1024


class Style(NamedTuple):
    """How the layers are written."""

    scan: bool
    remat: bool

    def __str__(self) -> str:
        return ("scanned" if self.scan else "unrolled") + (" + remat" if self.remat else "")


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def init(size: Size) -> State:
    layers, dim = size.num_layers, size.dim
    shapes = {
        "embed": (size.vocab_size, dim),
        "positions": (size.context, dim),
        "blocks": {  # stacked along dim 0, one slice per layer
            "scales": (layers, 2, dim),
            "qkv": (layers, dim, 3 * dim),
            "project": (layers, dim, dim),
            "up": (layers, dim, 4 * dim),
            "down": (layers, 4 * dim, dim),
        },
    }
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return {"params": params, "opt_state": tx.init(params)}


def unstacked(state: State, size: Size) -> State:
    """The state of an unrolled model: a leaf for every layer's weights."""

    def split(tree: dict[str, Any]) -> dict[str, Any]:
        layers = [jax.tree.map(lambda w, i=i: w[i], tree["blocks"]) for i in range(size.num_layers)]
        return tree | {"blocks": layers}

    params = split(state["params"])
    return {"params": params, "opt_state": tx.init(params)}


def make_block(size: Size, constrain: Constrain) -> Callable[..., Any]:
    def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        scales = 1 + weights["scales"]
        qkv = constrain(jax.nn.standardize(x) * scales[0] @ weights["qkv"])
        q, k, v = (a.reshape(*a.shape[:-1], size.num_heads, -1) for a in jnp.split(qkv, 3, -1))
        attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + constrain(attention.reshape(x.shape) @ weights["project"])
        hidden = jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"])
        return constrain(x + constrain(hidden) @ weights["down"]), None

    return block


def make_step(size: Size, style: Style, constrain: Constrain = lambda x: x) -> Callable[..., Any]:
    """`step(state, tokens) -> (state, loss)`; `constrain` says where activations lie, for an expert."""
    block = make_block(size, constrain)
    block = jax.checkpoint(block, prevent_cse=not style.scan) if style.remat else block

    def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        embed, positions = (params[name].astype(jnp.bfloat16) for name in ("embed", "positions"))
        x = constrain(embed[inputs] + positions)
        if style.scan:
            x, _ = jax.lax.scan(block, x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x, _ = block(x, weights)
        logits = constrain((jax.nn.standardize(x) @ embed.T).astype(jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return step
