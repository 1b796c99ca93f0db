# SPDX-License-Identifier: Apache-2.0
"""Threads that do jobs in the order in which they are given: reads, writes, updates."""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jzero._thread_group import POLL_SECONDS, ThreadGroup

# Reads, writes or computes something, with its thread's buffer.
Job: TypeAlias = Callable[[np.ndarray], None]
NO_BUFFER = np.empty(0, np.uint8)


class Asked:
    """Jobs that are awaited together.

    A waiting caller reads whether they are done, and takes nothing away: so an interrupt loses nothing, nor
    does a signal's handler that waits for other jobs.
    """

    __slots__ = ("_done", "_num", "news")

    def __init__(self, num: int) -> None:
        self._num = num
        self._done: list[None] = []  # One item of each that is done.
        self.news: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_done(self) -> bool:
        return len(self._done) >= self._num

    def one_is_done(self) -> None:
        self._done.append(None)
        self.news.put(None)


class JobThreads:
    """Some threads, each with a buffer of its own: `uint8[nbytes]`, on a page.

    Behaves like::

        with JobThreads(buffers) as readers:
            asked = readers.ask(jobs)       # returns at once
            readers.wait(asked)             # all of them are done
        # no thread is left, however it was left

    Without `with`, after `start()`, threads wait for jobs until the `JobThreads` is dropped.

    >>> from jzero.offload.nvme._aligned import pages
    >>> found = []
    >>> with JobThreads([pages(4096)]) as readers:
    ...     asked = readers.ask([lambda buffer: found.append(len(buffer))])
    ...     readers.wait(asked)
    >>> found
    [4096]
    """

    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        self._buffers, self._jobs = buffers, _Jobs(len(buffers))
        # An interrupt just before `with` has entered leaves nobody to stop the threads but this.
        self._dropped = weakref.finalize(self, self._jobs.group.stop)

    def __enter__(self) -> JobThreads:
        try:
            self.start()
            return self
        except BaseException:
            self._jobs.group.end()
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._dropped.detach()
        self._jobs.group.end()

    def start(self) -> None:
        if not self._jobs.group.is_started:
            self._jobs.group.start([(self._jobs.do, buffer) for buffer in self._buffers])

    def ask(self, jobs: Sequence[Job]) -> Asked:
        """Has jobs done, after all earlier ones were begun."""
        asked = Asked(len(jobs))
        for job in jobs:
            self._jobs.waiting.put((asked, job))
        return asked

    def wait(self, asked: Asked) -> None:
        """Returns when these jobs are done; raises what a job has raised, of these or of others."""
        while not asked.is_done:
            if self._jobs.group.errors:
                raise self._jobs.group.errors[0]
            with contextlib.suppress(queue.Empty):
                asked.news.get(timeout=POLL_SECONDS)


class _Jobs:
    """What the threads share; it has no reference to the `JobThreads`, so that this can be dropped."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.waiting: queue.SimpleQueue[tuple[Asked, Job] | None] = queue.SimpleQueue()
        self.group = ThreadGroup(self._wake)

    def _wake(self) -> None:
        for _ in range(self._num):
            self.waiting.put(None)

    def do(self, buffer: np.ndarray) -> None:
        while (item := self.waiting.get()) is not None and not self.group.stopped:
            asked, job = item
            job(buffer)
            asked.one_is_done()
            del item, asked, job  # and what it has read or written
