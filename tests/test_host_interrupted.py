"""Ctrl-C in the middle of a step with state on the host: at every line of what runs there."""

import ast
import concurrent.futures
import functools
import linecache
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from host_updates import compiler  # noqa: F401
from interrupting import interruption
from jzero.offload import _host_updates
from test_offload import BATCH, gradient, momentum

pytestmark = pytest.mark.usefixtures("compiler")

FILES = (
    "_host_step.py",
    "_host_updates.py",
    "_memory_updates.py",
    "_executor.py",
    "_stream.py",
    "_host_engine.py",
    "_host_update.py",
    "_loops.py",  # And _xla_loops.py.
    "_memory_run.py",
    "_pinned.py",
)
# Between these lines and the one before Python asks for no signals: the first is in a `finally`, and that of
# a `with` comes again when its block is left (Python 3.12 and newer).
ATOMIC = re.compile(r"\s*(self\._running = False|with .*)$")


class Interrupted:
    """Runs a function, and raises KeyboardInterrupt at the n-th line in `FILES`, from 0.

    Attributes:
      lines: how many there were.
      where: the one that was interrupted.
    """

    def __init__(self, at: int):
        self._at, self.lines, self.where = at, 0, ""

    def __call__(self, run: Callable[[], Any]) -> BaseException | None:
        return interruption(run, self._called)

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(FILES) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not ATOMIC.match(linecache.getline(name, number)):
            self.lines += 1
            if self.lines > self._at:
                self.where, self._at = f"{name}:{number}", sys.maxsize
                raise KeyboardInterrupt
        return self._line


def average(state: Any, x: Any) -> Any:
    """The host makes nothing for the devices."""
    w, ema = state
    w = w - 0.1 * gradient(w, x)
    return w, 0.9 * ema + 0.1 * w


def layers(state: Any, x: Any) -> Any:
    """Slices of two layers, and a leaf that is updated whole, while the devices compute."""
    (stack, w), moments = state

    def loss(params: Any) -> Any:
        stack, w = params
        x_, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        return jnp.mean((x_ @ w) ** 2)

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)((stack, w)))
    return jax.tree.map(lambda w, m: w - 0.1 * m, (stack, w), moments), moments


def states(train_step: Any) -> Iterator[Any]:
    w = jnp.linspace(-1, 1, 64 * 24).reshape(64, 24)
    while True:
        yield train_step(train_step((w, w / 2), BATCH), BATCH)


def states_of_layers(train_step: Any) -> Iterator[Any]:
    params = jnp.ones((2, 64, 64)) / 8, jnp.linspace(-1, 1, 64 * 24).reshape(64, 24)
    while True:
        state = params, jax.tree.map(jnp.zeros_like, params)
        yield train_step(train_step(state, BATCH), BATCH)


def no_lock_is_left() -> bool:
    """Whether steps in other threads can update."""

    def acquire() -> bool:
        free = _host_updates.UPDATING.acquire(blocking=False)
        if free:
            _host_updates.UPDATING.release()
        return free

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(acquire).result()


def interrupted_everywhere(train_step: Any, new: Iterator[Any], stride: int = 1) -> None:
    """Asserts that the state is as it was, or consumed, whichever line is interrupted, or each `stride`th."""
    waits = any(
        getattr(x, "storage", None) and x.storage.pending for x in jax.tree.leaves(next(new))
    )
    expected = [np.asarray(x) for x in jax.tree.leaves(train_step.flush(next(new)))]
    held, at, consumed = None, 0, 0
    while True:
        state, interrupted = next(new), Interrupted(at)
        # Who holds an exception, as a notebook does, holds all that its traceback refers to.
        held = interrupted(functools.partial(train_step, state, BATCH))
        if held is None:
            break
        at += stride
        lost = any(x.is_deleted() for x in jax.tree.leaves(state))
        consumed += lost
        if lost and waits:
            continue  # What is left of it lacks the gradients that waited.
        found = state if lost else train_step.flush(state)
        for x, y in zip(jax.tree.leaves(found), expected, strict=True):
            if not x.is_deleted():
                np.testing.assert_array_equal(np.asarray(x), y, err_msg=interrupted.where)
    assert 0 < consumed < at
    assert no_lock_is_left()
    for x, y in zip(jax.tree.leaves(train_step.flush(next(new))), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.slow(but=["XLA-False-average"])
@pytest.mark.parametrize("step_fn", [momentum, average])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_step_that_is_interrupted_leaves_its_state_or_none_of_it(step_fn, delayed):
    policy = jzero.HostCPU(delayed_update=delayed, delay_after=0 if delayed else None)
    train_step = small.shard_train_step(step_fn, mesh=small.mesh(data=2), memory=policy)
    interrupted_everywhere(train_step, states(train_step))


@pytest.mark.slow(but=["XLA-17"])
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_layers_that_are_interrupted_are_as_they_were_or_lost(stride):
    """A leaf that is there has not been touched, though others may be lost."""
    train_step = small.shard_train_step(
        layers,
        mesh=small.mesh(data=2),
        memory=jzero.Memory(optimizer=jzero.HostCPU(), params=jzero.PinnedHost(device_bytes=50000)),
    )
    interrupted_everywhere(train_step, states_of_layers(train_step), stride)


COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp
GUARDS = re.compile(r"(UPDATING|BUFFERS|_?[Ll]ock|\w+Threads)\b")


def written_in(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """What runs in the frame of these statements: nothing of functions and generators in them."""
    todo: list[ast.AST] = [*nodes]
    while todo:
        node = todo.pop()
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)):
            yield node
            todo += ast.iter_child_nodes(node)


@pytest.mark.slow
def test_no_comprehension_where_a_lock_is_held():
    """See [Note: locks and comprehensions]."""
    package = pathlib.Path(jzero.__file__).parent
    blocks = [
        (path, node)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.With)
        and any(GUARDS.search(ast.unparse(item.context_expr)) for item in node.items)
    ]
    assert len(blocks) > 5
    assert not [
        f"{path.name}:{found.lineno}"
        for path, block in blocks
        for found in written_in(block.body)
        if isinstance(found, COMPREHENSIONS)
    ]
