"""Small transformers, and their training by `jax.jit` alone: what every stage and tier must equal."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
import parity
import small
import zoo

NUM_STEPS = 5


def _masters() -> zoo.Program:
    """bfloat16 parameters with float32 masters; gradients are rounded once, when they are complete."""
    full = zoo.get("transformer_scan_remat")

    def init() -> Any:
        state = full.init()
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)
        tx = jzero.master_weights(state.tx)
        return state.replace(params=params, tx=tx, opt_state=tx.init(params))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(_loss, argnums=1)(state, state.params, tokens)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return zoo.Program(init=init, batches=full.batches, step=step, rounded_to="bfloat16")


@functools.cache
def get(name: str) -> zoo.Program:
    return _masters() if name == "masters" else zoo.get(name)


def new_state(name: str) -> Any:
    """A state with buffers of its own, which a donation may consume."""
    return parity.compiled_init(get(name).init)()


@functools.cache
def by_jit(name: str) -> list[tuple[Any, Any]]:
    """(state, metrics) after each step."""
    entry, state, found = get(name), new_state(name), []
    step = jax.jit(entry.step)
    for batch in entry.batches(NUM_STEPS):
        state, metrics = step(state, *batch)
        found.append(zoo.to_host((state, metrics)))
    return found


def _loss(state: Any, params: Any, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    logits = state.apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def check(name: str, **options: Any) -> jzero.ShardedStep:
    """Trains with jzero; metrics after each step and every leaf after the last are `jax.jit`'s."""
    entry = get(name)
    train_step = small.shard_train_step(entry.step, **options)
    batches = entry.batches(NUM_STEPS)
    state = train_step.shard(new_state(name), *batches[0])
    for i, (batch, (_, wanted)) in enumerate(zip(batches, by_jit(name), strict=True)):
        state, metrics = train_step(state, *batch)
        where = f"step {i}, metrics"
        zoo.assert_trees_close(zoo.to_host(metrics), wanted, entry.tolerance, where)
    found = zoo.to_host(train_step.unshard(state))
    zoo.assert_trees_close(found, by_jit(name)[-1][0], entry.tolerance, "state")
    return train_step


def trained(name: str, train_step: jzero.ShardedStep, num_steps: int = NUM_STEPS) -> Any:
    """The state after some steps."""
    batches = get(name).batches(num_steps)
    state = train_step.shard(new_state(name), *batches[0])
    for batch in batches:
        state, _ = train_step(state, *batch)
    return state


def tiers(state: Any) -> dict[str, set[str]]:
    """In which memories the leaves of parameters and of the optimizer rest, scalars aside."""

    def of(leaf: Any) -> str:
        return (
            "host" if getattr(leaf, "where", "") == "in host memory" else leaf.sharding.memory_kind
        )

    def kinds(tree: Any) -> set[str]:
        return {of(leaf) for leaf in jax.tree.leaves(tree) if np.ndim(leaf)}

    return {"params": kinds(state.params), "opt_state": kinds(state.opt_state)}
