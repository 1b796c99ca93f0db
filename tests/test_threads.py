"""Two threads and one state: each gets what is right or an error with a name, and the state is not lost."""

import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from jzero.offload.memory._file_storage import FileStorage
from test_host_interrupted import layers

pytest.importorskip("llvmlite")

X = np.linspace(0, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
PARAMS = dict(offload_params=jzero.PinnedHost(device_bytes=50_000))
TIERS: dict[str, Callable[[pathlib.Path], dict[str, Any]]] = {
    "devices": lambda folder: {},
    "pinned": lambda folder: dict(offload=jzero.PinnedHost(device_bytes=2**15)),
    "host": lambda folder: dict(offload=jzero.HostCPU()),
    "parameters on hosts": lambda folder: dict(offload=jzero.HostCPU(), **PARAMS),
    "files": lambda folder: dict(offload=jzero.NVMe(folder, host_bytes=2**16)),
    "in place": lambda folder: dict(offload=jzero.NVMe(folder, host_bytes=2**16, in_place=True)),
    "gradients in files": lambda folder: dict(
        offload=jzero.NVMe(folder, host_bytes=2**16, gradients=True), **PARAMS
    ),
}


def new_state() -> Any:
    params = (
        np.ones((2, 64, 64), np.float32) / 8,
        np.linspace(-1, 1, 64 * 24, dtype=np.float32).reshape(64, 24),
    )
    return params, jax.tree.map(np.zeros_like, params)


def total(state: Any, x: Any) -> Any:
    return sum(jnp.sum(leaf * jnp.mean(x)) for leaf in jax.tree.leaves(state))


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def sharded(tier: str, folder: pathlib.Path) -> Any:
    return small.shard_train_step(layers, mesh=small.mesh(data=2), **TIERS[tier](folder))


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What two threads return, or raise."""
    barrier, found = threading.Barrier(len(calls)), list[Any]()

    def run(call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.slow(but=["devices"])
@pytest.mark.parametrize("tier", TIERS)
def test_two_threads_that_step_one_state(tier, tmp_path):
    rounds = 12
    train_step, alone = sharded(tier, tmp_path / "two"), sharded(tier, tmp_path / "one")
    state, expected = (step.shard(new_state(), X) for step in (train_step, alone))
    refused = 0
    for _ in range(rounds):
        expected = alone(expected, X)
        found = together([functools.partial(train_step, state, X)] * 2)
        errors = [x for x in found if isinstance(x, Exception)]
        assert len(errors) == 1, errors
        (state,) = [x for x in found if not isinstance(x, Exception)]
        (error,) = errors
        assert isinstance(error, jzero.StateError), error
        refused += "in another thread" in str(error)
    assert refused
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_leaf_that_is_consumed_while_it_is_asked_for():
    """It has given None for its files, and a step failed without a name."""

    class Store:
        @property
        def newest(self) -> int:
            leaf.delete()  # As a step of another thread does.
            return 0

    store: Any = Store()
    leaf = FileStorage.__new__(FileStorage)
    leaf._store, leaf._step = store, 0
    assert leaf.store is store


@pytest.mark.slow(but=["host"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_state_that_another_thread_trains_is_evaluated_or_refused(tier, tmp_path):
    """Training goes on, whoever evaluates."""
    steps = 25
    train_step = sharded(tier, tmp_path)
    evaluate = jzero.shard_eval_step(total, like=train_step)
    state, right = train_step.shard(new_state(), X), set[float]()
    for _ in range(steps):
        right.add(float(evaluate(state[0], X)))
        state = train_step(state, X)
    right.add(float(evaluate(state[0], X)))
    now, found, over = [train_step.shard(new_state(), X)], list[Any](), threading.Event()

    def train() -> None:
        try:
            for _ in range(steps):
                now[0] = train_step(now[0], X)
        finally:
            over.set()

    def look() -> None:
        while not over.wait(0.001):
            try:
                found.append(float(evaluate(now[0][0], X)))
            except Exception as error:
                found.append(error)

    assert together([train, look]) == [None, None]
    errors = [x for x in found if isinstance(x, Exception)]
    assert all(isinstance(error, jzero.StateError) for error in errors), errors
    assert {x for x in found if not isinstance(x, Exception)} <= right
    np.testing.assert_array_equal(np.asarray(now[0][0][1]), np.asarray(state[0][1]))


@pytest.mark.slow
def test_a_step_is_in_the_way_of_an_evaluation_and_waits_for_one(monkeypatch):
    """In an order of which nothing is left to chance."""
    train_step = sharded("devices", pathlib.Path())
    evaluate = jzero.shard_eval_step(total, like=train_step)
    state = train_step.shard(new_state(), X)
    value = evaluate(state[0], X)
    program = train_step._programs.of(train_step._programs.bind((state, X), {}))
    whole: Any = type(program.step)
    original, calls = whole.__call__, list[Any]()

    def within(act: Callable[[], Any]) -> None:
        """Has another thread call something in the middle of the next program."""

        def call(self: Any, *args: Any) -> Any:
            monkeypatch.setattr(whole, "__call__", original)
            thread = threading.Thread(target=lambda: calls.append(caught(act)))
            thread.start()
            thread.join(1)
            calls.append(thread)
            return original(self, *args)

        monkeypatch.setattr(whole, "__call__", call)

    within(lambda: evaluate(state[0], X))
    new = train_step(state, X)
    assert isinstance(calls[0], jzero.StateError)
    assert (
        "shard_eval_step: a call of shard_train_step in another thread is consuming 2 of 2 leaves"
        in str(calls[0])
    )
    assert "Evaluate between two steps, in the thread that trains, or evaluate a copy" in str(
        calls[0]
    )
    calls.clear()
    state = train_step.shard(new_state(), X)
    within(lambda: train_step(state, X))
    assert evaluate(state[0], X) == value
    thread: Any = calls[0]
    thread.join()
    for x, y in zip(jax.tree.leaves(calls[1]), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    state = train_step.shard(new_state(), X)
    here = list[Any]()

    def call(self: Any, *args: Any) -> Any:
        monkeypatch.setattr(whole, "__call__", original)
        here.append(caught(lambda: train_step(state, X)))  # as a signal's handler does
        return original(self, *args)

    monkeypatch.setattr(whole, "__call__", call)
    assert evaluate(state[0], X) == value
    assert "a call of shard_eval_step which this call interrupts is reading" in str(here[0])


def test_a_step_that_ended_while_a_call_placed_its_state(monkeypatch):
    train_step = sharded("devices", pathlib.Path())
    state = train_step.shard(new_state(), X)
    original = type(train_step._placement).inputs

    def inputs(self: Any, call: Any) -> Any:
        found = original(self, call)
        monkeypatch.setattr(type(self), "inputs", original)
        together([lambda: train_step(state, X)])
        return found

    monkeypatch.setattr(type(train_step._placement), "inputs", inputs)
    with pytest.raises(
        jzero.StateError, match="in another thread has meanwhile consumed 4 of 4 leaves"
    ):
        train_step(state, X)


def caught(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except jzero.StateError as error:
        return error
