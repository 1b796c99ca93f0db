"""A step with parameters on the hosts that fails: its state is as it was, or lost by name, never half new."""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
import zoo
from interrupting import interruption
from jzero.offload._host_updates import HostUpdates
from test_offload_params import CLIPPED, UPDATES, batch, new_state, sharded

# Two parts of parameters on a device at a time, of 4 (scanned) or 7 that a step has.
LAYERS, DEVICE_BYTES = 3, 13000
# What updates leaf by leaf may begin in the backward pass; a clipped update waits for the norm of all.
MOMENTUM = optax.sgd(0.1, momentum=0.9)
SHAPES = [(True, "on the host"), (False, "on the host"), (True, "in buckets"), (False, "in buckets"),
          (True, "on the devices"), (False, "on the devices")]  # fmt: skip


@pytest.fixture
def waits(monkeypatch):
    """Nothing begins as if the norm decided what it did in the last step; see test_speculative_updates.py."""
    monkeypatch.setattr(HostUpdates, "old_share", 0)


def prepared(train_step, state, *args):
    """How to make a state that one step has made, what it is, and what the next step makes of it."""
    state, _ = train_step(state, *args)
    before = zoo.to_host(state)

    def again():
        return train_step.shard(before)

    return again, before, zoo.to_host(train_step(again(), *args))


def survives(train_step, state, args, before, expected) -> bool:
    """Whether a state outlived a step that failed: then it is as it was, and trains as if nothing had been.

    Else it is lost, and says so.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        with pytest.raises(jzero.StateError, match="already donated: .* Use the state that"):
            train_step(state, *args)
        return False
    small.assert_same(zoo.to_host(state), before)
    small.assert_same(zoo.to_host(train_step(state, *args)), expected)
    return True


class Interrupted:
    """Runs a function, and raises KeyboardInterrupt in its n-th call of what is in jzero/offload, from 0.

    Each part of a step, each iteration of a loop, and each bucket of the update is some of these calls.
    """

    FILES = re.compile(r".*/jzero/offload/(execute/)?_[a-z_]+\.py")

    def __init__(self, at: int):
        self._at, self.calls, self.where = at, 0, ""

    def __call__(self, run: Callable[[], Any]) -> bool:
        return interruption(run, self._called) is not None

    def _called(self, frame: Any, event: str, arg: Any) -> None:
        if self.FILES.fullmatch(frame.f_code.co_filename):
            self.calls += 1
            if self.calls > self._at:
                self._at = sys.maxsize
                self.where = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
                raise KeyboardInterrupt


@pytest.mark.slow(but=["True-on the host-momentum-11"])
@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("scan", "update", "tx"),
    [
        *[(*shape, CLIPPED) for shape in SHAPES],
        (True, "on the host", MOMENTUM),
        (False, "on the host", MOMENTUM),
    ],
    ids=lambda x: ("momentum" if x is MOMENTUM else "") if isinstance(x, tuple) else str(x),
)
def test_ctrl_c_in_any_call(scan, update, tx, stride):
    train_step, state = sharded(
        scan, tx, {"data": 2}, LAYERS, DEVICE_BYTES, offload=UPDATES[update]
    )
    again, before, expected = prepared(train_step, state, batch(0))
    outcomes: list[bool] = []
    while True:
        state, interrupted = again(), Interrupted(stride * len(outcomes))
        if not interrupted(functools.partial(train_step, state, batch(0))):
            break
        outcomes.append(survives(train_step, state, [batch(0)], before, expected))
        assert outcomes == sorted(outcomes, reverse=True), interrupted.where  # once lost, lost
    assert 50 < stride * sum(outcomes) < stride * len(outcomes)


class Alarm:
    """A callback of each layer, in both passes, which fails in one of them."""

    def __init__(self) -> None:
        self.armed: tuple[str, int] | None = None

    def __call__(self, name: str, layer: Any, x: Any) -> Any:
        if (name, int(layer)) == self.armed:
            raise ArithmeticError(f"no luck in the {name} pass")
        return np.asarray(x)

    def passes(self, layer: jax.Array, x: jax.Array) -> jax.Array:
        """x, if the alarm is not armed."""

        def call(name: str, layer: jax.Array, x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(
                functools.partial(self, name), shape, layer, x, vmap_method="sequential"
            )

        nothing = np.zeros((), jax.dtypes.float0)
        passes = jax.custom_vjp(functools.partial(call, "forward"))
        passes.defvjp(
            lambda layer, x: (call("forward", layer, x), layer),
            lambda layer, g: (nothing, call("backward", layer, g)),
        )
        return passes(layer, x)


def watched_step(alarm, scan, tx):
    def loss_fn(params, x):
        def layer(x, w):
            i, w = w
            y = alarm.passes(i, jnp.tanh((x * w["scale"][None]) @ w["up"]))
            return x + y @ w["down"]

        layers = params["layers"]
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, (jnp.arange(LAYERS), layers))
        else:
            for i, w in enumerate(layers):
                x = layer(x, (jnp.int32(i), w))
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return step


@pytest.mark.slow
@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("tx", [CLIPPED, MOMENTUM], ids=["clipped", "momentum"])
@pytest.mark.parametrize(("scan", "update"), SHAPES)
def test_callbacks_that_fail(scan, update, tx):
    """In each layer of each pass. An update that waits for the norm of all gradients has not begun."""
    alarm = Alarm()
    train_step = jzero.shard_train_step(
        watched_step(alarm, scan, tx),
        stage=3,
        mesh=small.mesh(data=2),
        axes=jzero.Axes(min_shard_bytes=1024),
        memory=jzero.Memory(
            optimizer=UPDATES[update], params=jzero.PinnedHost(device_bytes=DEVICE_BYTES)
        ),
    )
    state = train_step.init(lambda: new_state(scan, LAYERS, tx))
    again, before, expected = prepared(train_step, state, batch(0))
    for name in ("forward", "backward"):
        for layer in range(LAYERS):
            state, alarm.armed = again(), (name, layer)
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"no luck in the {name} pass"):
                jax.block_until_ready(train_step(state, batch(0)))
            alarm.armed = None
            as_before = survives(train_step, state, [batch(0)], before, expected)
            assert as_before or tx is MOMENTUM, (name, layer)


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_a_batch_that_is_refused(update):
    train_step, state = sharded(True, CLIPPED, {"data": 2}, LAYERS, offload=UPDATES[update])
    again, before, expected = prepared(train_step, state, batch(0))
    state = again()
    with pytest.raises(TypeError, match="incompatible shapes"):
        train_step(state, batch(0)[:, :5])
    with pytest.raises(jzero.BatchError):
        train_step(state, {"x": object()})
    assert survives(train_step, state, [batch(0)], before, expected)
