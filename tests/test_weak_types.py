# SPDX-License-Identifier: Apache-2.0
"""Weakly typed leaves of a state (Python's 0, 0.0, 1.0) train what `jax.jit` trains, by one program."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import zoo

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
TX = optax.adam(1e-2)


def step_with(change):
    """A step whose state has one leaf more, which becomes `change(leaf, loss, params)`."""

    def step(state, x):
        params, opt_state, leaf = state

        def loss_fn(p):
            return jnp.mean(jax.nn.relu(x @ p["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        new = change(leaf, loss, params)
        return (optax.apply_updates(params, updates), opt_state, new), {"loss": loss, "leaf": new}

    return step


def state_with(leaf):
    w = jnp.asarray(np.random.default_rng(1).normal(size=(64, 8)), jnp.float32)
    return {"w": w}, TX.init({"w": w}), leaf


def num_programs(train_step):
    return len(set(map(id, train_step._programs.built.values())))


def body(total, loss, params):
    return jax.lax.fori_loop(0, 3, lambda i, c: c + loss, total)


# The leaf, and what becomes of it.
CASES = {
    "counter": (0, lambda c, loss, p: c + 1),
    "ema": (1.0, lambda c, loss, p: jnp.minimum(0.9 * c, 0.5)),
    "int_total": (0, lambda c, loss, p: c + loss),
    "bf16_total": (0.0, lambda c, loss, p: c + loss.astype(jnp.bfloat16)),
    "bool_count": (0, lambda c, loss, p: c + jnp.sum(p["w"] > 0)),
    "where": (0, lambda c, loss, p: jnp.where(loss > 0, c + 1, jnp.int32(7))),
    "float_later": (0, lambda c, loss, p: c * 1.0 + 0.5),
    "weak_vector": (jnp.full((8,), 0.0), lambda c, loss, p: c + p["w"].sum(0)),
    "loop": (0.0, body),
}  # fmt: skip
# Those that come back with another type at the second call, and the dtype of it.
TWO_DTYPES = {"int_total": "float32", "bf16_total": "bfloat16", "float_later": "float32"}


def same_training(train_step, step, state, num_steps=3):
    expected, reference = state, jax.jit(step)
    for i in range(num_steps):
        state, metrics = train_step(state, X)
        expected, expected_metrics = reference(expected, X)
        ours, theirs = (
            jax.tree.leaves((state, metrics)),
            jax.tree.leaves((expected, expected_metrics)),
        )
        assert [x.dtype for x in ours] == [x.dtype for x in theirs]
        zoo.assert_trees_close(
            zoo.to_host((state, metrics)), zoo.to_host((expected, expected_metrics)), zoo.FP32, f"step {i}"
        )  # fmt: skip
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_program_trains_what_jit_trains(name):
    leaf, change = CASES[name]
    step = step_with(change)
    train_step = jzero.shard_train_step(step, stage=3)
    state = same_training(train_step, step, state_with(leaf))
    assert num_programs(train_step) == 1
    if name in TWO_DTYPES:
        assert state[2].dtype == TWO_DTYPES[name]


@pytest.mark.slow
def test_what_promotion_would_change_is_compiled_twice():
    """A weak 0.1 leaves a product in bfloat16; as float32 it would not."""
    step = step_with(lambda c, loss, p: (jnp.bfloat16(3.3) * c).astype(jnp.float32))
    train_step = jzero.shard_train_step(step)
    same_training(train_step, step, state_with(0.1))
    assert num_programs(train_step) == 2


@pytest.mark.parametrize("change", [
    lambda c, loss, p: jnp.float32(2) ** (c + 1),  # 1 + 1 in ints, then in floats
    lambda c, loss, p: c // 2 + loss,
])  # fmt: skip
def test_a_dtype_that_promotion_would_change_is_refused(change):
    with pytest.raises(
        jzero.StateError, match=r"state\[2\] int32\[\] became float32\[\].*initialise"
    ):
        jzero.shard_train_step(step_with(change))(state_with(1), X)


@pytest.mark.parametrize(("leaf", "change"), [
    (0.0, lambda c, loss, p: c + loss),
    (0, lambda c, loss, p: c + loss),
    ({"loss": 0, "num": 0}, lambda c, loss, p: {"loss": c["loss"] + loss, "num": c["num"] + 1}),
])  # fmt: skip
def test_state_arguments(leaf, change):
    def step(params, opt_state, total, x):
        (params, opt_state, total), metrics = step_with(change)((params, opt_state, total), x)
        return params, opt_state, total, metrics

    train_step: Any = jzero.shard_train_step(step, state=(0, 1, 2))
    state, expected = state_with(leaf), state_with(leaf)
    for _ in range(3):
        *state, metrics = train_step(*state, X)
        *expected, expected_metrics = jax.jit(step)(*expected, X)
        zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    assert num_programs(train_step) == 1


def test_a_dtype_of_an_argument_that_promotion_would_change_is_refused():
    def step(w, num, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, num // 2 + loss

    train_step: Any = jzero.shard_train_step(step, state=(0, 1))
    with pytest.raises(jzero.StateError, match=r"num int32\[\] became float32\[\]"):
        train_step(jnp.ones((64, 8)), 1, X)


class Level(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("number", [
    np.float64(0.1), np.complex128(0.1), np.bool_(True), np.int64(3), Level.ONE, 0.1, True,
])  # fmt: skip
def test_numbers_of_numpy_are_not_weak(number):
    """Though `np.float64` is a `float`, and `np.complex128` a `complex`."""

    def step(state, x, scale):
        w, kept = state
        return (w, kept), {
            "update": scale * x.astype(jnp.bfloat16),
            "of_kept": kept * x.astype(jnp.bfloat16),
        }

    state = state_with(number)[0]["w"], number
    (_, kept), metrics = jzero.shard_train_step(step)(state, X, number)
    (_, expected), expected_metrics = jax.jit(step)(state, X, number)
    assert (kept.dtype, kept.weak_type) == (expected.dtype, expected.weak_type)
    for name, theirs in expected_metrics.items():
        assert metrics[name].dtype == theirs.dtype
        np.testing.assert_array_equal(metrics[name], theirs)


def test_shapes_are_promoted():
    step = step_with(lambda c, loss, p: c + loss)
    train_step = jzero.shard_train_step(step)
    state = state_with(0)
    assert str(train_step.plan(state, X).leaves[-1].dtype) == "float32"
    assert train_step.describe(state, X).to_dict()["leaves"][-1]["dtype"] == "float32"
    placed = train_step.shard(state, X)
    same_training(train_step, step, state)
    assert train_step(placed, X)[0][2].dtype == jnp.float32
    assert num_programs(train_step) == 1


def test_a_step_with_collectives_of_its_own():
    def step(state, x):
        w, total = state
        loss, grad = jax.lax.pmean(jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w), "batch")
        return (w - 0.1 * grad, total + loss), loss

    train_step = jzero.shard_train_step(step, axes=jzero.Axes(axis_name="batch"))
    state: Any = jnp.ones((64, 8)), 0.0
    for _ in range(2):
        state, loss = train_step(state, X)
    assert state[1].dtype == jnp.float32
    assert state[1] > loss


@pytest.mark.slow
def test_what_is_weak_in_an_initialiser():
    train_step = jzero.shard_train_step(step_with(lambda c, loss, p: c + loss))
    state = train_step.init(lambda: state_with(0))
    for _ in range(2):
        state, metrics = train_step(state, X)
    assert metrics["leaf"] > metrics["loss"] > 0
    assert num_programs(train_step) == 1


@pytest.mark.slow
def test_a_weak_leaf_in_its_place_is_donated():
    step = step_with(lambda c, loss, p: c + loss)
    train_step = jzero.shard_train_step(step)
    state = train_step.init(lambda: state_with(jnp.full((64, 64), 0.0)))
    state, (old, *_) = train_step(state, X)[0], (state[2],)
    assert old.weak_type
    assert old.is_deleted()
    assert state[2].addressable_shards[0].data.shape == (8, 64)
