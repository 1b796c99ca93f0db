"""Checkpoints go from every tier to every other one, and to other numbers of devices; training goes on."""

import functools
import itertools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
import zoo
from jzero.checkpoint._writing import Writing
from test_offload_params import CLIPPED, batch, make_step, new_state

LAYERS = 2
FOLDER = tempfile.TemporaryDirectory()
STATE = {
    "on devices": jzero.NoOffload(),
    "pinned": jzero.PinnedHost(device_bytes=2**14),
    "on the host": jzero.HostCPU(),
    "in files": jzero.NVMe(FOLDER.name, host_bytes=2**16),
}
PARAMS = {"on devices": jzero.NoOffload(), "pinned": jzero.PinnedHost(device_bytes=2**14)}
TIERS = [*itertools.product(STATE, PARAMS)]


def named(tiers: tuple[str, str]) -> str:
    return "state {}, params {}".format(*tiers)


@functools.cache
def steps(tiers: tuple[str, str], num: int) -> tuple[Any, Any]:
    """A train step on so many devices, and an evaluation of its states."""
    state, params = tiers
    train_step = small.shard_train_step(
        make_step(True, CLIPPED),
        mesh=small.mesh(data=num),
        memory=jzero.Memory(optimizer=STATE[state], params=PARAMS[params]),
    )
    return train_step, jzero.shard_eval_step(evaluate, like=train_step)


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh((x * w["scale"][None]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, state["params"]["layers"])
    return jnp.mean((x @ state["params"]["head"]) ** 2)


def tier_of(leaf: jax.Array) -> str:
    if isinstance(leaf, jzero.LeafArray):
        return "on the host" if leaf.where == "in host memory" else "in files"
    return {"device": "on devices", "pinned_host": "pinned"}[str(leaf.sharding.memory_kind)]


def make() -> Any:
    return new_state(True, LAYERS, CLIPPED)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By tiers and devices: where the state of one step is saved, and what it is."""

    @functools.cache
    def saved(tiers: tuple[str, str], num: int) -> tuple[Path, Any]:
        train_step, _ = steps(tiers, num)
        state, _ = train_step(train_step.init(make), batch(0))
        folder = tmp_path_factory.mktemp("saved")
        with jzero.Checkpointer(folder, train_step, asynchronous=False) as checkpointer:
            assert checkpointer.save(1, state)
        return folder, zoo.to_host(state)

    return saved


@pytest.fixture(scope="module")
def one_device():
    """The state of one step by `jax.jit`, and what the next makes of it."""
    step = jax.jit(make_step(True, CLIPPED))
    state, _ = step(make(), batch(0))
    return jax.device_get(state), jax.device_get(step(state, batch(1)))


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 1), (1, 8)])
@pytest.mark.parametrize("target", TIERS, ids=named)
@pytest.mark.parametrize("source", TIERS, ids=named)
def test_training_goes_on_in_another_tier(source, target, before, after, saved, one_device):
    folder, state = saved(source, before)
    trained, (expected, metrics) = one_device
    train_step, eval_step = steps(target, after)
    with jzero.Checkpointer(folder, train_step) as checkpointer:
        restored = checkpointer.restore(jax.eval_shape(make), batch(1))
    for name, tier in (("opt_state", target[0]), ("params", target[1])):
        assert {tier_of(x) for x in jax.tree.leaves(restored[name])} == {tier}
    small.assert_same(zoo.to_host(restored), state)
    np.testing.assert_allclose(
        eval_step(restored, batch(2)), evaluate(trained, batch(2)), rtol=1e-5
    )
    placed = train_step.shard(state, batch(1))
    went_on = zoo.to_host(train_step(restored, batch(1)))
    small.assert_same(went_on, zoo.to_host(train_step(placed, batch(1))))
    zoo.assert_trees_close(went_on, (expected, metrics), zoo.FP32, "the step after")


@pytest.mark.parametrize("source", [("on the host", "on devices"), ("pinned", "pinned")], ids=named)
def test_the_next_step_changes_nothing_of_what_is_still_written(source, tmp_path, monkeypatch):
    stepped, write = threading.Event(), Writing.write

    def late(self: Writing, copied: Callable[[], Any]) -> None:
        def waits() -> None:
            copied()
            assert stepped.wait(60)

        write(self, waits)

    monkeypatch.setattr(Writing, "write", late)
    train_step, _ = steps(source, 8)
    state, _ = train_step(train_step.init(make), batch(0))
    expected = zoo.to_host(state)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        assert checkpointer.save(1, state)
        jax.block_until_ready(train_step(state, batch(1)))
        stepped.set()
    restored = jzero.restore(tmp_path / "1", train_step, jax.eval_shape(make))
    small.assert_same(zoo.to_host(restored), expected)
