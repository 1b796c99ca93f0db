"""Microbatches: how often what is reduced and gathered, ragged weights, memory, and what is counted."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import programs
import small

MODEL = programs.Model(remat=True)
STATE = programs.abstract_state(MODEL, optax.sgd(1e-3))
PSI = programs.num_params(STATE)
TOKENS = programs.tokens(64)
K = 4


def elements(stage, mesh=None, state=STATE, **options):
    """`{op: elements per step, in units of Psi}`, scalars aside."""
    mesh = mesh or AbstractMesh((8,), ("data",))
    train_step = small.shard_train_step(programs.train_step, stage=stage, mesh=mesh, **options)
    found = train_step.describe(state, TOKENS)
    totals: dict[Any, float] = {}
    for c in found.traffic:
        if c.elements > 1:
            key = (c.op, ",".join(c.axes)) if len(mesh.axis_names) > 1 else c.op
            totals[key] = totals.get(key, 0) + c.total_elements / PSI
    return totals


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        (0, {}, {"all-reduce": 1}),
        (1, {}, {"reduce-scatter": 1, "all-gather": 1}),
        (2, {}, {"reduce-scatter": K, "all-gather": 1}),
        (3, {}, {"reduce-scatter": K, "all-gather": 2 * K}),
        (3, {"reduce": "once"}, {"reduce-scatter": 1, "all-gather": 2 * K}),
        (3, {"gather": "keep"}, {"reduce-scatter": K, "all-gather": K}),
        (3, {"gather": "once_per_step"}, {"reduce-scatter": K, "all-gather": 1}),
        (3, {"gather": "once_per_step", "reduce": "once"}, {"reduce-scatter": 1, "all-gather": 1}),
    ],
)
def test_traffic_of_every_policy(stage, options, expected):
    assert elements(stage, accumulate=K, **options) == expected


def test_what_is_gathered_once_per_step_is_cast_before():
    state = programs.abstract_state(programs.Model(dtype=jnp.bfloat16), optax.sgd(1e-3))
    train_step = small.shard_train_step(
        programs.train_step,
        gather="once_per_step",
        accumulate=K,
        mesh=AbstractMesh((8,), ("data",)),
    )
    found = train_step.describe(state, TOKENS)
    assert found.elements("all-gather", "bfloat16") == PSI
    assert found.elements("all-gather", "float32") == 0


@pytest.mark.parametrize("axes", [{}, {"optimizer_axes": "local"}])
def test_microbatches_add_up_in_the_dtype_of_the_gradient(axes):
    """Bfloat16 gradients of float32 parameters are cast before they are added up, as the step casts them."""
    mesh = AbstractMesh((2, 4), ("node", "local"))
    state = programs.abstract_state(programs.Model(dtype=jnp.bfloat16))
    train_step = small.shard_train_step(
        programs.train_step, stage=2, mesh=mesh, accumulate=K, **axes
    )
    text = str(train_step.program(state, TOKENS, after="partition"))
    sums = re.findall(r":(\w+)\[\d[\d,]*\] = psum\[axes=\('microbatch',\)", text)
    assert sums
    assert set(sums) == {"f32"}


def test_bfloat16_gradients_of_many_microbatches_add_up_in_float32():
    """256 + 1 is 256 in bfloat16: after a microbatch with a large gradient, all others would be lost."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(x @ w))(w)

    w, x = jnp.zeros(8, jnp.bfloat16), jnp.ones((64, 8), jnp.bfloat16).at[0].set(256)
    train_step = small.shard_train_step(step, mesh=small.mesh(data=1), accumulate=64)
    assert jnp.array_equal(train_step(w, x), jnp.full_like(w, -(256 + 63)))


def test_accumulators_are_reported():
    def report(stage, **options):
        train_step = small.shard_train_step(
            programs.train_step, stage=stage, accumulate=K, **options
        )
        return train_step.describe(STATE, TOKENS)

    loss = 4
    assert report(1).accumulator_bytes == 4 * PSI + loss
    assert report(3).accumulator_bytes == 4 * PSI // 8 + loss
    assert report(3, accumulate_dtype=jnp.bfloat16).accumulator_bytes == 2 * PSI // 8 + 2
    once, each = (" ".join(str(report(stage)).split()) for stage in (1, 3))
    assert "microbatches: 4 on each device; gradients are reduced once per step" in once
    assert "for each microbatch, and accumulated in 3.3 KiB on each device" in each


# -- losses normalised by a count ----------------------------------------------------------------


def masked_step(take_mean, reduced=lambda tree: tree, total=lambda x: x):
    def step(state, batch):
        def loss_fn(params):
            errors = jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["v"])
            return take_mean(errors, batch["mask"])

        loss, grads = reduced(jax.value_and_grad(loss_fn)(state))
        correct = total(jnp.sum(batch["mask"] > 0))
        new_state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new_state, {"loss": loss, "tokens": correct}

    return step


def masked_step_of_a_device(take_mean):
    """The same, as written for `jax.pmap(..., axis_name="batch")`."""
    reduce, total = (functools.partial(f, axis_name="batch") for f in (jax.lax.pmean, jax.lax.psum))
    return masked_step(take_mean, reduce, total)


def plain_mean(values, mask):
    return jnp.sum(values * mask) / jnp.sum(mask)


def ragged_batches():
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = rng.integers(1, 12, size=(64, 1))
        mask = np.arange(12) < lengths
        yield {
            "x": rng.normal(size=(64, 12, 16)).astype(np.float32),
            "mask": mask.astype(np.float32),
        }


def weights():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (16, 32)), "v": jax.random.normal(keys[1], (32,))}


def trained(step):
    state, history = weights(), []
    for batch in ragged_batches():
        state, metrics = step(state, batch)
        history.append(jax.tree.map(np.asarray, metrics))
    return jax.tree.map(np.asarray, state), history


def test_to_a_step_of_a_device_each_microbatch_is_one():
    """What divides by its own count means something else on another number of devices."""
    step = masked_step_of_a_device(plain_mean)
    found = []
    for num_devices, k in ((4, 1), (2, 2), (1, 4)):
        mesh = small.mesh(data=num_devices)
        sharded = small.shard_train_step(
            step, axes=jzero.Axes(axis_name="batch"), mesh=mesh, microbatches=k
        )
        found.append(trained(sharded)[1][-1]["loss"])
        told = "each microbatch is a device" in str(
            sharded.describe(weights(), next(ragged_batches()))
        )
        assert told == (k > 1)
    np.testing.assert_allclose(found[1:], found[0], rtol=1e-5)


def test_a_count_needs_a_loop_of_its_own_and_little_else():
    sharded = small.shard_train_step(masked_step(plain_mean), stage=3, microbatches=4)
    found = sharded.describe(weights(), next(ragged_batches()))
    assert found.plan.reductions == "whole batch"
    psi = 16 * 32 + 32
    assert found.elements("reduce-scatter") == 4 * psi
    assert found.elements("all-reduce") == 3  # the weights' total, the count of tokens, the loss
    assert found.loops.num == 2
    assert found.loops.repeats == 1  # The loop that counts computes no loss.


# -- what comes from the rows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.at[jnp.array([0, 9])].get(mode="fill", fill_value=1),
        lambda s: s.at[jnp.array([0, 9])].get(mode="fill"),
        lambda s: jax.lax.div(s, jnp.full_like(s, 2)),
    ],
    ids=["filled with 1", "filled", "quotient"],
)
def test_what_is_no_sum_of_its_terms(read):
    """A loop reads a sum of the batch otherwise than linearly."""

    def step(w, x):
        def body(carry, scale):
            return carry, read(jnp.sum((x * scale > 0.3).astype(jnp.int32), 0))

        _, found = jax.lax.scan(body, 0, jnp.arange(1.0, 4.0))
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), found

    w, x = np.ones((4, 3), np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
    found = small.shard_train_step(step, microbatches=2)(w, x)
    for a, b in zip(found, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    "step", [lambda w, x: (w, 3), lambda w, x: (w, x)], ids=["constant", "batch"]
)
def test_a_step_without_operations(step):
    w, x = jnp.ones((16, 4)), jnp.arange(64.0).reshape(16, 4)
    found = small.shard_train_step(step, microbatches=2)(w, x)
    small.assert_same(jax.device_get(found), jax.device_get(jax.jit(step)(w, x)))
