"""Sweeps: tiles in order, three things at once, in bounded memory; an error or interrupt ends all threads."""

import _thread
import gc
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nvme_state
from interrupting import interruption
from jzero.offload.nvme import _sweep
from jzero.offload.nvme._aligned import TileRing
from jzero.offload.nvme._sweep import sweep
from nvme_state import check, made, new_ring
from waiting import wait_until

PAGE = 4096
FOLDER = str(pathlib.Path(_sweep.__file__).parent)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = _thread._count()
    yield
    gc.collect()
    wait_until(lambda: _thread._count() <= before, "threads end", 5)


class Tiles:
    """A disk that takes a while: tile k has the value k."""

    def __init__(self, num: int, seconds: float = 0.0) -> None:
        self.values, self.seconds = {k: k for k in range(num)}, seconds
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    def read(self, at: int, buffer: np.ndarray) -> None:
        self._takes_a_while()
        buffer[:] = self.values[at]

    def _takes_a_while(self) -> None:
        with self._lock:
            self.threads.add(threading.get_ident())
        time.sleep(self.seconds)

    def write(self, at: int, buffer: np.ndarray) -> None:
        self._takes_a_while()
        assert (buffer == buffer[0]).all()
        self.values[at] = int(buffer[0])


def ring_of(num: int) -> TileRing:
    return TileRing(num * PAGE, PAGE)


@pytest.mark.slow(but=["3-5"])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_buffers", [3, 4, 20])
def test_tiles_come_in_order(num_buffers, threads):
    tiles, ring = Tiles(50), ring_of(num_buffers)
    order = [*range(0, 50, 2), *range(49, 0, -2)]
    with sweep(order, ring, tiles.read, tiles.write, threads) as visits:
        seen = []
        for visit in visits:
            seen.append((visit.number, visit.at, int(visit.buffer[0])))
            visit.buffer += 100
    assert seen == [(i, at, at) for i, at in enumerate(order)]
    assert tiles.values == {k: k + 100 for k in range(50)}
    assert len(tiles.threads) <= 2 * threads
    assert threading.get_ident() not in tiles.threads


@pytest.mark.slow
def test_several_are_held_at_a_time():
    """Up to all buffers, and given back in any order."""
    tiles, ring = Tiles(12), ring_of(4)
    with sweep(range(12), ring, tiles.read, tiles.write) as visits:
        for start in range(0, 12, 4):
            held = [visit for _ in range(4) if (visit := visits.take())]
            assert [visit.at for visit in held] == list(range(start, start + 4))
            if start < 8:
                with pytest.raises(AssertionError, match="every buffer is held"):
                    visits.take()
            for visit in reversed(held):
                visit.buffer += 100
                visits.done(visit)
        assert visits.take() is None
    assert tiles.values == {k: k + 100 for k in range(12)}


# --------------------------------------------------------------------------------- errors of threads


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("where", ["read", "write"])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_the_first_error_stops_all(at, where, threads):
    tiles, ring = Tiles(20, 0.001), ring_of(4)

    def fails(move: Callable[[int, np.ndarray], None]) -> Callable[[int, np.ndarray], None]:
        def call(number: int, buffer: np.ndarray) -> None:
            if number == at:
                raise OSError(5, f"tile {number}")
            move(number, buffer)

        return call

    read = fails(tiles.read) if where == "read" else tiles.read
    write = fails(tiles.write) if where == "write" else tiles.write
    seen = []

    def run() -> None:
        with sweep(range(20), ring, read, write, threads) as visits:
            for visit in visits:
                seen.append(visit.at)
                visit.buffer += 100

    with pytest.raises(OSError, match=f"tile {at}"):
        run()
    assert seen == list(range(len(seen)))
    assert len(seen) <= (at if where == "read" else 20)
    with sweep(range(20), ring, tiles.read) as visits:
        assert len(list(visits)) == 20


@pytest.mark.slow
def test_threads_that_cannot_be_started(monkeypatch):
    """Those that were started end."""
    real, left = _thread.start_new_thread, [3]

    def start(function: Any, arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return real(function, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start)
    tiles, ring = Tiles(5), ring_of(3)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        with sweep(range(5), ring, tiles.read, tiles.write):
            pass
    monkeypatch.undo()
    with sweep(range(5), ring, tiles.read) as visits:
        assert len(list(visits)) == 5


# ------------------------------------------------------------------------------------------ interrupts


class InterruptedSweep:
    """Runs a function, and raises KeyboardInterrupt at the n-th line of the room in this thread, from 0."""

    def __init__(self, at: int):
        self._left, self.where = at, ""

    def __call__(self, run: Callable[[], None]) -> bool:
        """Whether it was interrupted."""
        return interruption(run, self._called) is not None

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.where:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.slow(but=["34"])
@pytest.mark.parametrize("every", [34, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_at_every_line(every, tmp_path):
    """No thread and no buffer is lost, the next step works, and the state is of one step or the next."""
    ring, where, committed = new_ring(), set(), 0
    with made(tmp_path) as files:
        for number, at in enumerate(range(0, 10_000, every)):
            before = nvme_state.step_of(files)
            interrupted = InterruptedSweep(at)
            if not interrupted(lambda: nvme_state.train(files, ring)):
                break
            where.add(interrupted.where)
            files.abort()
            gc.collect()
            if number % 20 == 0:
                check(files, before + (files.step != before))
            committed += files.step != before
            with sweep(files.tiles(), ring, files.read) as visits:
                assert sum(1 for _ in visits) == 10
            assert ring.owner is None
        check(files, before + 1)
    assert at > 500
    assert sum("_sweep.py" in name for name in where) > (50 if every == 1 else 1)
    assert committed < 5  # Of the last lines of commit only.


def test_more_interrupts_while_threads_are_waited_for():
    """It waits all the same: a thread may be filling a buffer."""
    tiles, ring, came, raised = Tiles(10, 0.3), ring_of(3), 0, 0

    def interrupted(number: int, frame: Any) -> None:
        """Raises in `run` only: later, pytest would end."""
        nonlocal came, raised
        came += 1
        while frame is not None:
            if frame.f_code is run.__code__:
                raised += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def interrupt() -> None:
        for number in range(4):  # Each when the one before has come.
            _thread.interrupt_main()
            while came <= number:
                time.sleep(0.001)

    def run() -> None:
        with sweep(range(10), ring, tiles.read, tiles.write) as visits:
            thread.start()
            for visit in visits:
                visit.buffer += 1

    thread, before = threading.Thread(target=interrupt), signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert ring.owner is None
    finally:
        while thread.is_alive():  # A lock that is waited for would not let the rest come.
            time.sleep(0.001)
        signal.signal(signal.SIGINT, before)
    assert raised > 1


def test_a_sweep_that_is_dropped():
    """As an interrupt just before `with` would leave it: its threads end, and the next sweep works."""
    tiles, ring = Tiles(10), ring_of(3)
    dropped = sweep(range(10), ring, tiles.read, tiles.write)
    dropped.__enter__()
    with sweep(range(10), ring, tiles.read) as visits:
        assert [int(visit.buffer[0]) for visit in visits] == list(range(10))
    with pytest.raises(AssertionError, match="the sweep has ended"):
        list(dropped)
    second = sweep(range(10), ring, tiles.read)
    second.__enter__()
    del second  # Nobody but the garbage collector stops this one.
