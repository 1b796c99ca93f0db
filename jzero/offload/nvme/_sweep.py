# SPDX-License-Identifier: Apache-2.0
"""Tile after tile: read ahead, updated by the caller, and written behind, all three at once.

The caller's thread can be interrupted at any line (Ctrl-C; see [Note: interrupts]), and must then leave no
thread that uses a buffer. When a sweep ends, however it does, it waits for its threads, and then every buffer
is free, whatever is in any queue. Held by tests/test_nvme_sweep.py, which interrupts a sweep at every line.
"""

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from jzero._thread_group import ThreadGroup
from jzero.offload.nvme._aligned import TileRing

At = TypeVar("At")
Move: TypeAlias = Callable[[At, np.ndarray], None]


class LoadedTile(Generic[At]):
    __slots__ = ("at", "buffer", "number")

    def __init__(self, number: int, at: At, buffer: np.ndarray) -> None:
        self.number, self.at, self.buffer = number, at, buffer


class sweep(Generic[At]):
    """Yields tiles in order, with reads ahead and writes behind in other threads.

    What it is like, without the overlap::

        for at in order:
            read(at, buffer)            # in threads, as far ahead as there are free buffers
            yield LoadedTile(number, at, buffer)
            write(at, buffer)           # in threads; then the buffer is free

    >>> disk = {0: 1, 1: 2, 2: 3}
    >>> def read(at, buffer): buffer[0] = disk[at]
    >>> def write(at, buffer): disk[at] = int(buffer[0])
    >>> ring = TileRing(host_bytes=2**14, tile_bytes=2**12)
    >>> with sweep([0, 1, 2], ring, read, write) as loaded_tiles:
    ...     for loaded in loaded_tiles:
    ...         loaded.buffer[0] *= 10
    >>> disk
    {0: 10, 1: 20, 2: 30}

    Entered, it is an iterator of tiles in memory. When it is left without an error, all of them are written.
    The first error of any thread stops all of them, and is raised in the caller, out of the iterator or at
    the end.
    """

    def __init__(
        self, order: Iterable[At], ring: TileRing, read: Move[At] | None = None,
        write: Move[At] | None = None, threads: int = 4,
    ):  # fmt: skip
        """Starts nothing; `read` is None if the caller fills buffers, `write` if nothing is to be written.

        So many `threads` read, and as many write: each checks or sums what it moves, and another one must
        keep the disk busy meanwhile (experiments/infinity/disk.py).
        """
        self._work, self._threads = _Sweeping(list(order), ring, read, write), threads
        self._number, self._held = 0, 0
        self._arrived: dict[int, LoadedTile[At]] = {}
        # An interrupt just before `with` has entered leaves nobody to stop the threads but this.
        self._dropped = weakref.finalize(self, self._work.group.stop)

    def __enter__(self) -> sweep[At]:
        try:
            self._work.start(self._threads)
            return self
        except BaseException:
            self._work.end()
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # Not for one that ends: an interrupt while the garbage collector runs would be lost.
        self._dropped.detach()
        self._work.end(finish=error is None)
        if error is None:
            self._work.check()

    def __iter__(self) -> Iterator[LoadedTile[At]]:
        """The tiles in order; each is done when the next one is requested."""
        while (loaded := self.take()) is not None:
            yield loaded
            self.done(loaded)

    def take(self) -> LoadedTile[At] | None:
        """The next tile, when it is read; None after the last. At most `ring.num` are held at a time."""
        if self._number == len(self._work.order):
            return None
        assert self._held < self._work.ring.num, "every buffer is held: call done before take"
        while self._number not in self._arrived:
            loaded = self._work.ready.get()
            if loaded is None:
                self._work.check()
                raise AssertionError("the sweep has ended")
            self._arrived[loaded.number] = loaded
        loaded = self._arrived.pop(self._number)
        self._number += 1
        self._held += 1
        return loaded

    def done(self, loaded: LoadedTile[At]) -> None:
        """Lets a tile's buffer go: to be written, if there is something to write to."""
        self._held -= 1
        if self._work.write is None:
            self._work.free.put(loaded.buffer)
        else:
            self._work.dirty.put(loaded)


class _Sweeping(Generic[At]):
    """What threads of a sweep share; it has no reference to the `sweep`, so that this can be dropped."""

    def __init__(
        self, order: list[At], ring: TileRing, read: Move[At] | None, write: Move[At] | None
    ) -> None:
        self.order, self.ring = order, ring
        self._read, self.write = read, write
        self.ready: queue.SimpleQueue[LoadedTile[At] | None] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self.dirty: queue.SimpleQueue[LoadedTile[At] | None] = queue.SimpleQueue()
        self._count = itertools.count()
        self._num = 0  # threads that read, and that write
        self.group = ThreadGroup(self._wake)

    def start(self, threads: int) -> None:
        """Starts the threads, after those of a sweep that was dropped have ended."""
        if self.ring.owner is not None:
            self.ring.owner.end()
        self.ring.owner = self
        for buffer in self.ring.buffers:
            self.free.put(buffer)
        self._num = threads
        self.group.start(
            [(self._reader,)] * threads + [(self._writer,)] * (threads * bool(self.write))
        )

    def check(self) -> None:
        if self.group.errors:
            raise self.group.errors[0]

    def end(self, finish: bool = False) -> None:
        """Waits until no thread is left, whatever interrupts; with `finish`, until all is written."""
        try:
            self.group.end(self._say_last if finish else None)
        finally:
            if self.ring.owner is self:
                self.ring.owner = None

    def _say_last(self) -> None:
        """Has each thread end when it has done what is before it."""
        for _ in range(2 * self._num):
            self.free.put(None)
            self.dirty.put(None)

    def _wake(self) -> None:
        self._say_last()
        self.ready.put(None)

    def _reader(self) -> None:
        while (buffer := self.free.get()) is not None and not self.group.stopped:
            number = next(self._count)
            if number >= len(self.order):
                break
            loaded = LoadedTile(number, self.order[number], buffer)
            if self._read is not None:
                self._read(loaded.at, loaded.buffer)
            self.ready.put(loaded)

    def _writer(self) -> None:
        assert self.write is not None
        while (loaded := self.dirty.get()) is not None and not self.group.stopped:
            self.write(loaded.at, loaded.buffer)
            self.free.put(loaded.buffer)
