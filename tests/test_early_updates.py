"""The host updates layers while earlier ones compute: in which order, and what a failure leaves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
import test_offload_params
import zoo
from jzero.offload import _host_updates
from jzero.offload._early_plan import EarlyPlan
from jzero.offload._layer_schedule import ITERATION, STRETCH
from jzero.offload.execute._executor import Execution
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.schedule._ops import Run, Send, flat
from test_offload_params import batch, make_step, new_state

pytest.importorskip("llvmlite")

LAYERS, STEPS = 4, 3
# Beside a large eps updates are proportional to gradients, and so are their rounding errors.
ADAM = optax.adamw(0.1, eps=0.1, weight_decay=0.1)
OPTIMIZERS = {
    "adamw": ADAM,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.lion(optax.cosine_decay_schedule(1e-2, 10)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "masters": jzero.master_weights(ADAM),
    # Factored moments of a layer need all of its elements.
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), ADAM),
    "clipped block by block": optax.chain(optax.clip(0.01), ADAM),
    "if finite": optax.apply_if_finite(ADAM, 3),
}


def sharded(scan, tx, axes, **options):
    options = {"device_bytes": 9000, "offload": jzero.HostCPU()} | options
    return test_offload_params.sharded(scan, tx, axes, LAYERS, **options)


def early(train_step, state, x=None):
    """The plan of early updates."""
    call = train_step._programs.bind((state, batch(0) if x is None else x), {})
    return train_step._programs.of(call).step.updates.early


@functools.cache
def one_device(name):
    tx = OPTIMIZERS[name]
    state, step, found = new_state(True, LAYERS, tx), jax.jit(make_step(True, tx)), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        found.append(jax.device_get((state, metrics)))
    return found


@pytest.mark.slow(but=["factored"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_what_one_device_trains(name):
    # Of several devices the means of factored moments would need others.
    train_step, state = sharded(True, OPTIMIZERS[name], {"data": 1 if name == "factored" else 4})
    for i, expected in enumerate(one_device(name)):
        state, metrics = train_step(state, batch(i))
        zoo.assert_trees_close(zoo.to_host((state, metrics)), expected, zoo.FP32, f"step {i}")
    assert bool(early(train_step, state).buckets) == (name not in {"factored", "if finite"})


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_early_and_late_updates_have_the_same_bits(scan, monkeypatch):
    """The first step's begin when the backward pass is over, and so do all of who plans none."""
    axes, options = {"node": 2, "local": 4}, {"param_axes": "local", "optimizer_axes": "local"}

    def trained():
        train_step, state = sharded(scan, ADAM, axes, **options)
        for i in range(STEPS):
            state, metrics = train_step(state, batch(i))
        return jax.tree.leaves(zoo.to_host((state, metrics))), early(train_step, state)

    found, plan = trained()
    monkeypatch.setattr(_host_updates, "plan_early", lambda *_: EarlyPlan((), {}))
    expected, none = trained()
    assert plan.buckets
    assert not none.buckets
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_weight_that_earlier_layers_read_is_updated_after_them():
    """The first layer's backward pass reads the last layer's weight, whose gradient is there long before."""

    def loss_fn(params, x):
        y = jax.checkpoint(lambda x, w, v: jnp.tanh(x @ w) @ v)(
            x, params["first"], jax.lax.stop_gradient(params["last"])
        )
        return jnp.mean((jnp.tanh(y @ params["second"]) @ params["last"]) ** 2)

    def step(state, x):
        params, means = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        means = jax.tree.map(lambda m, g: 0.9 * m + g, means, grads)
        return (jax.tree.map(lambda w, m: w - m, params, means), means), loss

    def init():
        params = {
            name: jax.random.normal(jax.random.key(i), (16, 16)) / 4
            for i, name in enumerate(("first", "second", "last"))
        }
        return params, jax.tree.map(jnp.zeros_like, params)

    train_step = small.shard_train_step(
        step, mesh=small.mesh(data=1), offload=jzero.HostCPU(),
        offload_params=jzero.PinnedHost(device_bytes=2**11),
    )  # fmt: skip
    state, (expected, _) = train_step.init(init), jax.jit(step)(init(), batch(0))
    expected, _ = jax.jit(step)(expected, batch(1))
    for i in range(2):  # In the first step no update is early.
        state, _ = train_step(state, batch(i))
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    assert early(train_step, state).buckets


# -- the order -------------------------------------------------------------------------------------


def is_part(op: Any) -> bool:
    return isinstance(op, Run) and op.program in (ITERATION, STRETCH)


@pytest.fixture
def log(monkeypatch):
    """What is dispatched, and which updates begin: `(part, iteration)` and the names of leaves."""
    events: list[Any] = []
    run, start = Execution._run, HostUpdate.start

    def logged_run(self, slot):
        parts = [op for op, _ in flat(self._program.ops) if is_part(op)]
        if is_part(slot.run):
            place = slot.place if slot.run.program == ITERATION else None
            events.append((parts.index(slot.run), place))
        return run(self, slot)

    def logged_start(self, *args):
        events.append(self._names)
        return start(self, *args)

    monkeypatch.setattr(Execution, "_run", logged_run)
    monkeypatch.setattr(HostUpdate, "start", logged_start)
    return events


def updates_of(log, name):
    """Where in the log an update of such a leaf begins."""
    return [
        i
        for i, event in enumerate(log)
        if isinstance(event, list) and any(name in x for x in event)
    ]


# -- what a failure leaves -------------------------------------------------------------------------


def check_lost(train_step, state, before):
    """By name: a leaf that is there is as it was, and no step takes the others."""
    lost = 0
    for leaf, old in zip(jax.tree.leaves(state), before, strict=True):
        if leaf.is_deleted():
            lost += 1
        else:
            np.testing.assert_array_equal(np.asarray(leaf), old)
    if lost:
        with pytest.raises(jzero.StateError, match="already donated"):
            train_step(state, batch(2))
    return lost


def failing_at(at, error):
    """Raises where an iteration of the backward loop is started."""
    run = Execution._run

    def failing(self, visit):
        is_backward = any(isinstance(x.op, Send) for x in visit.after)
        if visit.run.program == ITERATION and is_backward and visit.place == at:
            raise error("planted")
        return run(self, visit)

    return failing


@pytest.mark.slow
@pytest.mark.parametrize(("at", "error"), [(3, RuntimeError), (0, KeyboardInterrupt)])
def test_an_iteration_that_fails(at, error, monkeypatch):
    train_step, state = sharded(True, ADAM, {"data": 4})
    state, _ = train_step(state, batch(0))
    before = [np.asarray(x).copy() for x in jax.tree.leaves(state)]
    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_run", failing_at(at, error))
        with pytest.raises(error, match="planted"):
            train_step(state, batch(1))
    # The head with its moments is updated before the layers.
    lost = check_lost(train_step, state, before)
    assert lost >= 3 if at > 1 else lost == 12
    again = train_step.init(lambda: new_state(True, LAYERS, ADAM))
    for i in range(STEPS):
        again, metrics = train_step(again, batch(i))
    expected = one_device("adamw")[-1]
    zoo.assert_trees_close(zoo.to_host((again, metrics)), expected, zoo.FP32, "again")


@pytest.mark.slow
def test_the_first_step_that_fails_to_compile_leaves_the_state(monkeypatch):
    train_step, state = sharded(True, ADAM, {"data": 4})
    before = [np.asarray(x).copy() for x in jax.tree.leaves(state)]
    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_run", failing_at(0, MemoryError))
        with pytest.raises(MemoryError, match="planted"):
            train_step(state, batch(0))
    assert not check_lost(train_step, state, before)
    train_step(state, batch(0))
