"""A process that is interrupted wherever its main thread hands work to other threads; then it must end.

`python tests/handing_over.py {update,save} STRIDE` interrupts each `STRIDE`th instruction, and prints how
many these were, and when it was done.
"""

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from interrupting import interruption
from jzero.offload.kernels._host_update import HostUpdate

# What hands work over, and waits for it: jzero's files, and those of Python's own library.
FILES = (
    "_loops.py",
    "_job_threads.py",
    "_thread_group.py",
    "/threading.py",
    "/queue.py",
    "/futures/thread.py",
    "/futures/_base.py",
)
SIZE = 1 << 18  # four blocks, so that three threads help


class Interrupted:
    """Runs a function, and raises KeyboardInterrupt at the n-th line or instruction in `FILES`, from 0."""

    def __init__(self, at: int):
        self._left = at

    def __call__(self, run: Callable[[], Any]) -> bool:
        """Whether it was interrupted."""
        return interruption(run, self._called) is not None

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        return self._at_instruction

    def _at_instruction(self, frame: Any, event: str, arg: Any) -> Any:
        if event in ("opcode", "line"):
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt
        return self._at_instruction


def with_output(state: Any, inputs: Any) -> Any:
    (w,), (g,) = state, inputs
    return (0.5 * w + g,), (w.astype(jnp.bfloat16),)


def without_output(state: Any, inputs: Any) -> Any:
    (w,), (g,) = state, inputs
    return (0.5 * w + g,), ()


def run(engine: HostUpdate, state: list[np.ndarray]) -> None:
    gradient, out = np.ones(SIZE, np.float32), np.zeros(SIZE, jnp.bfloat16)
    engine.prepare([state], [[gradient]])
    for _ in engine.run([[out]]):
        pass


def start(engine: HostUpdate, state: list[np.ndarray]) -> None:
    engine.start([state], [[np.ones(SIZE, np.float32)]]).finish()


def update(stride: int) -> Iterator[bool]:
    """Interrupts first updates of an engine, which start its threads, and second ones."""
    shape = [jax.ShapeDtypeStruct((SIZE,), np.float32)]
    for fn, act in (with_output, run), (without_output, start):
        for started in False, True:
            at, again = 0, True
            while again:
                engine = HostUpdate(fn, shape, shape, threads=4)
                if started:
                    act(engine, [np.ones(SIZE, np.float32)])
                state = [np.ones(SIZE, np.float32)]
                again = Interrupted(at)(functools.partial(act, engine, state))
                yield again
                new = [np.ones(SIZE, np.float32)]
                act(engine, new)
                assert (new[0] == 1.5).all()
                at += stride


def save(stride: int) -> Iterator[bool]:
    """Interrupts saves; the next one is complete."""
    train_step = jzero.shard_train_step(lambda w, x: (w - x.mean(), None), stage=0)
    state = train_step.shard(np.ones(8, np.float32))
    at, again = 0, True
    while again:
        with tempfile.TemporaryDirectory() as folder:
            checkpointer = jzero.Checkpointer(folder, train_step)

            def one(step: int, checkpointer: Any = checkpointer) -> None:
                checkpointer.save(step, state)
                checkpointer.wait()

            again = Interrupted(at)(functools.partial(one, 0))
            yield again
            one(1)
            assert checkpointer.latest_step() == 1
            checkpointer.close()
        at += stride


if __name__ == "__main__":
    act, stride = sys.argv[1:]
    print(sum({"update": update, "save": save}[act](int(stride))), time.time(), flush=True)
