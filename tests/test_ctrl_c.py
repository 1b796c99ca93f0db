"""Ctrl-C at any line of jzero: a state is as it was, or every use of what is left of it is refused."""

import functools
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from test_host_interrupted import Interrupted as InterruptedInFiles
from test_host_interrupted import no_lock_is_left

FOLDER = str(pathlib.Path(jzero.__file__).parent)
X = np.linspace(0, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
POLICIES = [
    jzero.NoOffload(),
    jzero.PinnedHost(device_bytes=2**15),
    jzero.HostCPU(),
    jzero.HostCPU(delayed_update=True, delay_after=0),
]


class Interrupted(InterruptedInFiles):
    """The same, at a line of any file of jzero."""

    def _called(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None


def step_fn(state, x):
    w, m, b = state
    dw, db = jax.grad(lambda w, b: jnp.mean((x @ w + b[None]) ** 2), (0, 1))(w, b)
    m = 0.9 * m + dw
    return w - 0.1 * m, m, b - 0.1 * db


def new_state():
    w = np.linspace(-1, 1, 64 * 27, dtype=np.float32).reshape(64, 27)
    return w, w / 2, np.linspace(0, 1, 27, dtype=np.float32)


def sharded(policy):
    return small.shard_train_step(step_fn, mesh=small.mesh(data=2), memory=policy)


def whole(train_step, state):
    return [np.asarray(x) for x in train_step.unshard(train_step.flush(state))]


def check_what_is_left(train_step, state, expected, where):
    """The state is exactly as it was, or refused."""
    consumed = sum(x.is_deleted() for x in state if hasattr(x, "is_deleted"))
    if not consumed:
        new = whole(train_step, train_step(state, X))
        for x, y in zip(new, expected, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=where)
        return "whole"
    for use in (
        lambda state: train_step(state, X),
        train_step.shard,
        train_step.unshard,
        train_step.flush,
    ):
        with pytest.raises(jzero.StateError, match="restore the last checkpoint"):
            use(state)
    return "consumed"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_interrupted_step(policy):
    every = 7  # With 1, every line.
    train_step = sharded(policy)

    def before():
        return train_step(train_step(new_state(), X), X)

    expected = whole(train_step, train_step(before(), X))
    found: Counter[str] = Counter()
    at = 0
    while True:
        state, interrupted = before(), Interrupted(at)
        if interrupted(functools.partial(train_step, state, X)) is None:
            break
        found[check_what_is_left(train_step, state, expected, interrupted.where)] += 1
        at += every
    assert found["whole"]
    assert found["consumed"]
    assert no_lock_is_left()


@pytest.mark.slow(but=[1])
@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[2]], ids=str)
@pytest.mark.parametrize("act", ["first step", "init", "shard"])
def test_interrupted_before_the_first_step(policy, act):
    """While programs are built and states placed: everything can be called again."""
    train_step = sharded(policy)
    expected = whole(train_step, train_step(new_state(), X))
    acts = {
        "first step": lambda step: step(new_state(), X),
        "init": lambda step: step.init(lambda: jax.tree.map(jnp.asarray, new_state())),
        "shard": lambda step: step.shard(new_state()),
    }
    for _ in range(2):  # The first one fills caches, and has more lines.
        counting = Interrupted(sys.maxsize)
        counting(functools.partial(acts[act], sharded(policy)))
    for at in random.Random(0).sample(range(counting.lines), 4):
        train_step, interrupted = sharded(policy), Interrupted(at)
        assert interrupted(functools.partial(acts[act], train_step)) is not None
        state = new_state() if act == "first step" else acts[act](train_step)
        new = whole(train_step, train_step(state, X))
        for x, y in zip(new, expected, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=interrupted.where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "stride"),
    [("update", 9), ("save", 41)] + [(act, 1) for act in ("update", "save")],
)
def test_interrupted_where_threads_are_given_work(act, stride):
    """No lock is left that the next update, save or the end of the process would wait for."""
    program = pathlib.Path(__file__).with_name("handing_over.py")
    seconds = 120 if stride > 1 else 600
    found = subprocess.run(
        [sys.executable, program, act, str(stride)], capture_output=True, text=True, timeout=seconds
    )
    ended = time.time()
    assert found.returncode == 0, found.stderr
    num, done = found.stdout.split()
    assert int(num) > 5
    assert ended - float(done) < 10  # 6 s of a busy machine, after 800 saves; a hang has no end.


# A file that was just opened, and reads whose loop has ended.
@pytest.mark.slow(but=["restore-20"])
@pytest.mark.filterwarnings("ignore:.*(unclosed file|Exception ignored)")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", ["save", "restore"])
def test_interrupted_checkpointer(act, num, tmp_path):
    """At a sample of lines: nothing is lost, and the same call does what it was to do."""
    train_step = sharded(POLICIES[0])
    state = train_step.shard(new_state())
    acts = {
        "save": lambda checkpointer: (checkpointer.save(2, state), checkpointer.wait()),
        "restore": lambda checkpointer: checkpointer.restore(new_state()),
    }

    with jzero.Checkpointer(tmp_path / "two steps", train_step, max_to_keep=2) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state)

    def prepared(name):
        shutil.copytree(tmp_path / "two steps", tmp_path / name)
        return jzero.Checkpointer(tmp_path / name, train_step, max_to_keep=2)

    counting = Interrupted(sys.maxsize)
    with prepared("count") as checkpointer:
        counting(functools.partial(acts[act], checkpointer))
    for at in range(0, counting.lines, max(counting.lines // num, 1)):
        with prepared(str(at)) as checkpointer:
            interrupted = Interrupted(at)
            if interrupted(functools.partial(acts[act], checkpointer)) is None:
                continue
            checkpointer.wait()
            kept = [[1, 2], [0, 1]][act == "restore"]
            assert checkpointer.steps() in ([0, 1], kept), interrupted.where
            acts[act](checkpointer)
            assert checkpointer.steps() == kept, interrupted.where
            for x, y in zip(checkpointer.restore(new_state()), new_state(), strict=True):
                np.testing.assert_array_equal(np.asarray(x), y, err_msg=interrupted.where)
        names = sorted(path.name for path in (tmp_path / str(at)).iterdir())
        assert names == [str(step) for step in kept], interrupted.where
