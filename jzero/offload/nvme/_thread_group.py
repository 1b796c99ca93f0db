# SPDX-License-Identifier: Apache-2.0
"""`ThreadGroup`: threads that work for one caller, who may be interrupted at any line; see `_sweep.py`."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import queue
from collections.abc import Callable, Sequence
from typing import Any

_POLL_SECONDS = 0.05  # An interrupt may eat the news that a thread has ended.


class ThreadGroup:
    """Threads that end together: when one fails, or when they are told to.

    Attributes:
      errors: what they have raised, in that order.
      stopped: whether they were told to end; each looks before it begins anything.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Starts nothing.

        Args:
          wake: gives all threads, and a caller who waits for them, something to wake up for.
        """
        self._wake = wake
        self.errors: list[BaseException] = []
        self.stopped = False
        self._threads: list[int] = []
        self._ended: list[None] = []  # One item of each thread that has ended.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, calls: Sequence[tuple[Callable[..., None], *tuple[Any, ...]]]) -> None:
        """Starts a thread for each call: a function and its arguments."""
        # In one call that no interrupt divides: so it is known how many there are to wait for.
        self._threads.extend(map(_thread.start_new_thread, itertools.repeat(self._run), calls))

    def stop(self) -> None:
        """Tells the threads to end soon; they finish what they are at."""
        self.stopped = True
        self._wake()

    def end(self, finish: Callable[[], None] | None = None) -> None:
        """Waits until no thread is left, whatever interrupts.

        Args:
          finish: has each of them end in its time; without, and after an interrupt, they are told to stop.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                (finish or self.stop)()
                while len(self._ended) < len(self._threads):
                    with contextlib.suppress(queue.Empty):
                        self._news.get(timeout=_POLL_SECONDS)
                break
            except BaseException as error:
                interrupt, finish = error, None
        if interrupt is not None:
            raise interrupt

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        """What a thread does."""
        try:
            call(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self.stop()
        finally:
            self._ended.append(None)
            self._news.put(None)
