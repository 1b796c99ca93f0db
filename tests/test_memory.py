"""Bytes at rest are exact; gathered parameters are freed; one device runs the user's own program."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jzero
import programs
import small
from jzero.segments import _partitioned
from jzero.testing import assert_same_training


def real_state(model):
    shapes = programs.abstract_state(model)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_at_rest_are_the_formula(stage, num_devices):
    mesh = small.mesh(data=num_devices)
    train_step = small.shard_train_step(programs.train_step, stage=stage, mesh=mesh)
    state = train_step.shard(real_state(programs.Model()), programs.tokens())
    psi = programs.num_params(state)
    counters = 2 * 4  # step and count, int32 scalars
    parameters = 4 * psi // (num_devices if stage == 3 else 1)
    moments = 2 * 4 * psi // (num_devices if stage >= 1 else 1)
    plan = train_step.plan(state, programs.tokens())
    assert plan.nbytes_at_rest("parameter") == parameters
    assert plan.nbytes_at_rest("optimizer state") == moments + counters
    for device in mesh.devices.flat:
        on_device = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert on_device == parameters + moments + counters == plan.nbytes_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_peak_memory_grows_with_one_layer_not_with_all(remat, monkeypatch):
    """At stage 3, the temporary bytes of a scanned model do not hold the gathered stack."""
    # Gradients of up to 4 MiB in all layers may be reduced together.
    monkeypatch.setattr(programs, "WIDTH", 256)
    monkeypatch.setattr(programs, "HIDDEN", 1024)

    one_token = jax.ShapeDtypeStruct((8, 1), jnp.int32)  # on each device: weights dominate

    def temporary_bytes(depth):
        model = programs.Model(depth=depth, remat=remat)
        train_step = small.shard_train_step(programs.train_step, stage=3)
        compiled = train_step.lower(programs.abstract_state(model), one_token).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    layer = 4 * 2 * programs.WIDTH * programs.HIDDEN
    activations = 4 * 8 * (programs.WIDTH + programs.HIDDEN)
    growth = (temporary_bytes(38) - temporary_bytes(6)) / 32
    # Of each layer, its gradient's shard is kept and little else. Were the stack gathered, or its full
    # gradient kept, each layer would cost its whole size.
    assert growth < 2 * layer / 8 + activations < layer


@pytest.mark.slow
def test_one_device_runs_the_users_own_program():
    mesh = small.mesh(data=1)
    state, tokens = programs.abstract_state(programs.Model()), programs.tokens()
    ours = small.shard_train_step(programs.train_step, stage=3, mesh=mesh).lower(state, tokens)
    plain = jax.jit(programs.train_step, donate_argnums=0).lower(state, tokens)

    def operations(lowered):
        text = lowered.compile().as_text()
        return Counter(re.findall(r"= \S+ ([a-z][a-z\-]+)\(", text))

    assert operations(ours) == operations(plain)
    costs: list[Any] = [lowered.compile().cost_analysis() for lowered in (ours, plain)]
    flops = [cost["flops"] for cost in costs]
    assert flops[0] == flops[1]


@pytest.mark.slow(but=["2-7-600", "2-7-1048576"])
@pytest.mark.parametrize("at_once", [1, 600, 2**20])
@pytest.mark.parametrize("rows", [7, 12])
@pytest.mark.parametrize("stage", [1, 2])
def test_new_parameters_go_into_the_old_ones_in_slices(stage, rows, at_once, monkeypatch):
    """Of any number of rows, the last slice with what is left; padded columns are dropped."""
    monkeypatch.setattr(_partitioned, "GATHERED_AT_ONCE", at_once)

    def step_fn(state, x):
        def loss_fn(w):
            return jnp.mean((x @ w["even"]) ** 2) + jnp.mean((x[:, :5] @ w["padded"]) ** 2)

        w, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(w)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, w, moments), moments), loss

    def init_fn():
        even, padded = jax.random.split(jax.random.key(0))
        w = {
            "even": jax.random.normal(even, (rows, 24)),
            "padded": jax.random.normal(padded, (5, 27)),
        }
        return w, jax.tree.map(jnp.zeros_like, w)

    batches = [jax.random.normal(jax.random.key(i), (16, rows)) for i in range(3)]
    assert_same_training(step_fn, init_fn, batches, stage=stage, axes=jzero.Axes(min_shard_bytes=0))
    train_step = small.shard_train_step(step_fn, stage=stage)
    report = train_step.describe(jax.eval_shape(init_fn), batches[0])
    gathers = [c for c in report.traffic if c.op == "all-gather"]
    assert sum(c.total_elements for c in gathers) == rows * 24 + 5 * 32
    assert (sum(c.times for c in gathers) > 2) == (at_once < 2**20)
