# SPDX-License-Identifier: Apache-2.0
"""Threads of a caller who may be interrupted at any line: `ThreadGroup`, `Flag`, `start_thread`.

[Note: interrupts] Ctrl-C raises KeyboardInterrupt between any two instructions of the main thread. What
holds a lock *in Python* there may leave it locked: `ThreadPoolExecutor.submit`, `Thread.start`, and `set` and
`wait` of `threading.Event` do (a `Condition` is entered by a function of Python's own). What takes that lock
next, or the end of the process, then waits for ever. So the main thread shares no such lock with others: all
hand-overs are queues of the interpreter's own (`SimpleQueue`), and threads are started in one call that is
not Python's.
Held by tests/test_ctrl_c.py and tests/test_nvme_sweep.py.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

POLL_SECONDS = 0.05  # An interrupt may swallow the item that says that a thread has ended.
_LOOK_SECONDS = 0.5  # The same for a flag.


class ThreadGroup:
    """Threads that end together: when one fails, or when they are told to."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Starts nothing. `wake` must wake up all threads, and a caller who waits for them."""
        self._wake = wake
        self.errors: list[BaseException] = []  # of all threads, in order
        self.stopped = False  # Threads look at it before they begin anything.
        self._threads: list[int] = []
        self._ended: list[None] = []  # One item of each thread that has ended.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, calls: Sequence[tuple[Callable[..., None], *tuple[Any, ...]]]) -> None:
        # One call, which no interrupt divides: so the number of threads to wait for is known.
        self._threads.extend(map(_thread.start_new_thread, itertools.repeat(self._run), calls))

    @property
    def is_started(self) -> bool:
        return bool(self._threads)

    def stop(self) -> None:
        """Asks the threads to end after what they are doing."""
        self.stopped = True
        self._wake()

    def end(self, finish: Callable[[], None] | None = None) -> None:
        """Waits until no thread is left, whatever interrupts.

        `finish` asks them to end in their time. Without it, and after an interrupt, they are told to stop.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                (finish or self.stop)()
                while len(self._ended) < len(self._threads):
                    with contextlib.suppress(queue.Empty):
                        self._news.get(timeout=POLL_SECONDS)
                break
            except BaseException as error:
                interrupt, finish = error, None
        if interrupt is not None:
            raise interrupt

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self.stop()
        finally:
            self._ended.append(None)
            self._news.put(None)


class Flag:
    """A `threading.Event` for a main thread that may be interrupted; see [Note: interrupts]."""

    def __init__(self) -> None:
        self._is_set = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._news.put(None)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float = float("inf")) -> bool:
        """Waits at most `seconds`; returns whether it is set."""
        end = time.monotonic() + seconds
        while not self._is_set and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=min(left, _LOOK_SECONDS))
        return self._is_set


def start_thread(thread: threading.Thread) -> None:
    """Starts it from another thread, where no interrupt comes; see [Note: interrupts]."""
    group = ThreadGroup(lambda: None)
    group.start([(thread.start,)])
    group.end(lambda: None)
    if group.errors:
        raise group.errors[0]
