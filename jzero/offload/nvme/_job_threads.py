# SPDX-License-Identifier: Apache-2.0
"""Threads that read and write what a caller asks for, in the order in which it asks."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

import numpy as np

from jzero.offload.nvme._thread_group import ThreadGroup

# Given a buffer of its thread, reads or writes something.
Job: TypeAlias = Callable[[np.ndarray], None]


class Asked:
    """Jobs that are awaited together.

    Attributes:
      left: how many of them are not known to be done.
    """

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class JobThreads:
    """Some threads, each with a buffer.

    Behaves like::

        with JobThreads(buffers) as readers:
            asked = readers.ask(jobs)       # returns at once
            readers.wait(asked)             # all of them are done
        # no thread is left, however it was left

    >>> from jzero.offload.nvme._aligned import pages
    >>> found = []
    >>> with JobThreads([pages(4096)]) as readers:
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
        self._buffers, self._jobs = buffers, _Jobs(len(buffers))
        # An interrupt just before `with` has entered leaves nobody to stop the threads but this.
        self._dropped = weakref.finalize(self, self._jobs.group.stop)

    def __enter__(self) -> JobThreads:
        try:
            self._jobs.group.start([(self._jobs.do, buffer) for buffer in self._buffers])
            return self
        except BaseException:
            self._jobs.group.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._dropped.detach()
        self._jobs.group.end()

    def ask(self, jobs: Sequence[Job]) -> Asked:
        """Has jobs done, after all that was asked before was begun."""
        asked = Asked(len(jobs))
        for job in jobs:
            self._jobs.waiting.put((asked, job))
        return asked

    def wait(self, asked: Asked) -> None:
        """Returns when these jobs are done.

        Raises:
          BaseException: what a job has raised, of these or of others.
        """
        while asked.left:
            done = self._jobs.done.get()
            if done is None:
                raise self._jobs.group.errors[0]
            done.left -= 1


class _Jobs:
    """What the threads share; they have no way to the `JobThreads`, so that it can be dropped."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.waiting: queue.SimpleQueue[tuple[Asked, Job] | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.group = ThreadGroup(self._wake)

    def _wake(self) -> None:
        for _ in range(self._num):
            self.waiting.put(None)
        self.done.put(None)

    def do(self, buffer: np.ndarray) -> None:
        """What a thread does."""
        while (item := self.waiting.get()) is not None and not self.group.stopped:
            asked, job = item
            job(buffer)
            self.done.put(asked)
            del item, job  # And what it has read or written.
