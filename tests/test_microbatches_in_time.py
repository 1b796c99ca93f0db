"""Microbatches of partitioned steps: an axis in time, which becomes loops."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import engines
import partition_steps as steps
import small
from jzero import StepError
from jzero.ir._layout import Partial, replicated
from jzero.segments import _partitioned
from jzero.segments._partitioned import Partitioned
from jzero.sharding.partition._time import TimeAxis, step_over_time
from jzero.sharding.passes import _waits
from jzero.tracing import _jaxpr

TX = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def _partitions(monkeypatch):
    monkeypatch.setenv(_partitioned.SWITCH, "1")
    with jax.enable_x64(True):
        yield


def mesh(num=8):
    return jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])


def train(made, num_steps=3, rows=None, **options):
    """Trains by the partitioner, beside one device; returns the sharded step, and the program that runs it."""
    init, step, batch = made
    batch = batch if rows is None else jax.tree.map(lambda x: x[:rows], batch)
    options = {"mesh": mesh(), **options}
    train_step = small.shard_train_step(step, **options)
    state = expected = init()
    run = jax.jit(step)
    for _ in range(num_steps):
        expected, wanted = run(expected, batch)
        state, found = train_step(state, batch)
        assert_close(found, wanted)
    assert engines.why_not(train_step) == []
    assert_close(train_step.unshard(state), expected)
    program = train_step._programs.of(train_step._programs.bind((init(), batch), {}))
    found = _partitioned.of_step(program.step)
    assert isinstance(found, Partitioned)
    return train_step, found


def assert_close(actual, expected):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(
                x, y, rtol=1e-9, atol=1e-11, err_msg=jax.tree_util.keystr(path)
            )


def loops(found):
    """The loops over microbatches of a partitioned step."""
    jaxpr = found.programs["microbatches"].jaxpr
    return [eqn for eqn in jaxpr.eqns if _jaxpr.in_scope(eqn, "jzero.microbatches") and eqn.primitive.name == "scan"]


def counts(eqn):
    """How often each collective stands in a loop, those inside included."""
    found: dict[str, int] = {}
    for each in _waits.inside(eqn):
        if each.primitive in _jaxpr.COLLECTIVES:
            found[each.primitive.name] = found.get(each.primitive.name, 0) + 1
    return found


# -- parity --------------------------------------------------------------------------------------------
MADE = {
    "mlp": steps.mlp, "gpt": steps.gpt, "gpt unrolled": functools.partial(steps.gpt, scan=False),
    "gpt tied": functools.partial(steps.gpt, tied=True), "lstm": steps.lstm, "moe": steps.moe,
    "clip": steps.clip, "muon": steps.muon,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MADE if name != "muon"])
@pytest.mark.parametrize("options", [{}, {"reduce": "once"}, {"stage": 1}], ids=str)
def test_it_trains_as_one_device(name, options):
    train(MADE[name](), accumulate=2, **options)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_on_fewer_devices(num, accumulate):
    train(steps.gpt(), mesh=mesh(num), accumulate=accumulate)
    train(steps.clip(), mesh=mesh(num), accumulate=accumulate)


@pytest.mark.parametrize("rows", [16, 13, 5])
def test_rows_that_the_microbatches_do_not_divide(rows):
    init, step, _ = steps.mlp(16)
    batch = {"x": steps.rows(rows, 32), "y": steps.rows(rows, 10)}
    train((init, step, batch), mesh=mesh(4), accumulate=3)


def test_two_axes_and_parameters_sharded_over_one_of_them():
    axes = jax.make_mesh((2, 4), ("node", "local"))
    for options in ({}, {"param_axes": "local"}, {"param_axes": "local", "reduce": "once"}):
        train(steps.gpt(), mesh=axes, accumulate=2, **options)
