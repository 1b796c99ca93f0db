"""A process forked from one that uses JAX: every call of jzero in it is refused, none hangs."""

import multiprocessing
import os
import select
import signal
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small

# JAX and Python warn of every fork, as they should.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")
SECONDS = 60.0
W, X = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)


def sgd(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


train_step = small.shard_train_step(sgd)
steps = jzero.Checkpointer(tempfile.mkdtemp(), train_step)
CALLS: dict[str, Callable[[], object]] = {
    "shard_train_step": lambda: train_step(W, X),
    "init": lambda: train_step.init(lambda: W),
    "shard": lambda: train_step.shard(W),
    "flush": lambda: train_step.flush(W),
    "unshard": lambda: train_step.unshard(W),
    "describe": lambda: train_step.describe(W, X),
    "plan": lambda: train_step.plan(W, X),
    "lower": lambda: train_step.lower(W, X),
    "Checkpointer.save": lambda: steps.save(2, W),
    "Checkpointer.restore": lambda: steps.restore(W),
    "restore": lambda: jzero.restore("steps", train_step, W),
}


def told() -> str:
    """What each call is told, a line each."""
    lines = []
    for call in CALLS.values():
        try:
            lines.append(f"returned {call()!r:.20}")
        except jzero.ProcessError as error:
            lines.append(str(error))
    return "\n".join(lines)


def told_and_closed() -> str:
    steps.close()
    return told()


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child, which is killed if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], SECONDS)[0], "the child hangs"
        return os.read(reader, 2**16).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def check_refused(lines: list[str]) -> None:
    for who, line in zip(CALLS, lines, strict=True):
        assert line.startswith(f"{who}: process ")
        assert "was forked from one that had already used JAX's devices" in line
        assert "none of the threads of JAX's backends" in line
        assert "multiprocessing.get_context('spawn')" in line


@pytest.mark.slow
def test_every_call_in_a_forked_child_is_refused():
    steps.save(1, W)
    steps.wait()
    check_refused(in_a_fork(told_and_closed).splitlines())
    assert steps.save(2, W)  # The child has not given up what its parent alone may do.
    steps.close()
    assert float(train_step(W, X)[0, 0]) < 1  # The parent goes on.


def test_child_of_a_forked_child_is_refused():
    jax.devices()
    check_refused(in_a_fork(lambda: in_a_fork(told)).splitlines())


def test_forked_data_loader_may_make_batches():
    jax.devices()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        batch = pool.apply_async(np.ones, ((16, 16), np.float32)).get(SECONDS)
    assert train_step(W, batch).shape == (16, 16)
