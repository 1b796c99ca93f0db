"""The train step of the models, as anyone would write it for one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.rivals.annotations import Unannotated

State = dict[str, Any]
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def new_state(params: Any, **others: Any) -> State:
    return {"params": params, "opt_state": tx.init(params), **others}


def updated(state: State, grads: Any, annotate: Unannotated, **others: Any) -> State:
    grads = annotate.gradients(grads)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, **others}


def make_step(
    loss_fn: Callable[[Any, Any], jax.Array], annotate: Unannotated, microbatches: int = 1
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """`step(state, batch) -> (state, loss)`; with microbatches, the gradients are a mean of theirs."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, grads = accumulated(jax.value_and_grad(loss_fn), annotate, microbatches)(
            state["params"], batch
        )
        return updated(state, grads, annotate), loss

    return step


def accumulated(
    value_and_grad: Callable[[Any, Any], Any], annotate: Unannotated, num: int
) -> Callable[[Any, Any], Any]:
    """The mean over `num` microbatches, one after the other."""
    if num == 1:
        return value_and_grad

    def run(params: Any, batch: Any) -> Any:
        # Row i goes to microbatch i % num: every microbatch has rows of every shard.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1), annotate.rows(batch)
        )

        def add(total: Any, part: Any) -> tuple[Any, None]:
            loss, grads = value_and_grad(params, annotate.rows(part))
            return jax.tree.map(jnp.add, total, (loss, annotate.gradients(grads))), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, (jnp.float32(0), annotate.gradients(zeros)), parts)
        return jax.tree.map(lambda x: x / num, total)

    return run


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
