# SPDX-License-Identifier: Apache-2.0
"""Threads that read what a caller asks for, in the order in which it asks; see the note in `_sweep.py`."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import queue
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

import numpy as np

# Given a buffer of its thread, reads something.
Job: TypeAlias = Callable[[np.ndarray], None]
_POLL_SECONDS = 0.05  # An interrupt may eat the news that a thread has ended.


class Asked:
    """Jobs that are awaited together.

    Attributes:
      left: how many of them are not known to be done.
    """

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class ReadThreads:
    """Some threads, each with a buffer.

    Behaves like::

        with ReadThreads(buffers) as readers:
            asked = readers.ask(jobs)       # returns at once
            readers.wait(asked)             # all of them are done
        # no thread is left, however it was left

    >>> from jzero.offload.nvme._aligned import pages
    >>> found = []
    >>> with ReadThreads([pages(4096)]) as readers:
    ...     asked = readers.ask([lambda buffer: found.append(len(buffer))])
    ...     readers.wait(asked)
    >>> found
    [4096]
    """

    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        """Starts nothing.

        Args:
          buffers: `uint8[nbytes]` each, on a page; one for each thread, of nobody else meanwhile.
        """
        self._work = _Reading(buffers)
        # An interrupt just before `with` has entered leaves nobody to stop the threads but this.
        self._dropped = weakref.finalize(self, self._work.stop)

    def __enter__(self) -> ReadThreads:
        try:
            self._work.start()
            return self
        except BaseException:
            self._work.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._dropped.detach()
        self._work.end()

    def ask(self, jobs: Sequence[Job]) -> Asked:
        """Has jobs done, after all that was asked before was begun."""
        asked = Asked(len(jobs))
        for job in jobs:
            self._work.jobs.put((asked, job))
        return asked

    def wait(self, asked: Asked) -> None:
        """Returns when these jobs are done.

        Raises:
          BaseException: what a job has raised, of these or of others.
        """
        while asked.left:
            done = self._work.done.get()
            if done is None:
                raise self._work.errors[0]
            done.left -= 1


class _Reading:
    """What the threads share; they have no way to the `ReadThreads`, so that it can be dropped."""

    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        self._buffers = list(buffers)
        self.jobs: queue.SimpleQueue[tuple[Asked, Job] | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self._threads: list[int] = []
        self._ended: list[None] = []  # One item of each thread that has ended.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopped = False

    def start(self) -> None:
        # In one call that no interrupt divides: so it is known how many there are to wait for.
        bodies = itertools.repeat(self._run)
        self._threads.extend(
            map(_thread.start_new_thread, bodies, [(buffer,) for buffer in self._buffers])
        )

    def stop(self) -> None:
        """Tells the threads to end; they finish the job at which they are."""
        self._stopped = True
        for _ in self._buffers:
            self.jobs.put(None)

    def end(self) -> None:
        """Waits until no thread is left, whatever interrupts."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.stop()
                while len(self._ended) < len(self._threads):
                    with contextlib.suppress(queue.Empty):
                        self._news.get(timeout=_POLL_SECONDS)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self, buffer: np.ndarray) -> None:
        """What a thread does."""
        try:
            while (item := self.jobs.get()) is not None and not self._stopped:
                asked, job = item
                job(buffer)
                self.done.put(asked)
                del item, job  # And what it has read or written.
        except BaseException as error:
            self.errors.append(error)
            self.stop()
            self.done.put(None)
        finally:
            self._ended.append(None)
            self._news.put(None)
