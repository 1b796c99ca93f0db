# SPDX-License-Identifier: Apache-2.0
"""`Watch`: a thread that publishes what this process has called, and checks that the others call the same.

A little more than once a second every process writes its log into the key-value store of `jax.distributed`,
if it has changed, and reads the verdict of the first process, which compares all logs. These are two requests
of 0.3 ms, and no step waits for them.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import jax

from jzero._errors import ProcessError
from jzero._thread_group import Flag, start_thread
from jzero.processes import _unlike
from jzero.processes._call_log import ENDS, CallLog, Copy, Difference, first_difference
from jzero.tracing import _jax_state

WHO = "shard_train_step"
# Between two polls; with more than 750 processes a millisecond for each, to not flood the store.
_INTERVAL_SECONDS = 0.75
# If the main thread does not call jzero for so long after a difference was found, it is taken to wait in a
# collective, in which nothing can be raised.
_GRACE_SECONDS = 5.0
# The first process has the store, and JAX ends all others when it ends: so it ends later.
_FIRST_WAITS_SECONDS = 1.5
_LAST_SECONDS = 1.0  # for other exit handlers
# How long an exiting process waits for its peers before JAX's shutdown barrier takes over.
_EXIT_SECONDS = 30.0
_END = "the end of the process"


class Peers:
    """The log of this process's calls on one set of processes, and its keys in the store."""

    def __init__(self, processes: tuple[int, ...]):
        self.processes = processes
        self.log, self.over = CallLog(), False  # over: all processes end
        self._key = f"jzero/calls/{hashlib.sha256(repr(processes).encode()).hexdigest()[:16]}"
        self._described: set[str] = set()
        self._undeclared: list[tuple[str, _unlike.Sections]] = []
        self._written = ""
        self._suspect = 0  # the call in which processes were last found to differ
        self._alike = 0  # the call up to which all are known to be alike

    def describe(self, name: str, sections: _unlike.Sections) -> None:
        """Declares what a name in the log stands for."""
        if name not in self._described:
            self._described.add(name)
            self._undeclared.append((name, sections))

    def end(self) -> None:
        """Logs that this process makes no more calls."""
        self.describe(_END, {"call": [_END]})
        self.log.ends(_END)

    def look(self, store: Any) -> str | None:
        """Publishes this process's log; returns the difference between processes, if one was found."""
        while self._undeclared:
            name, sections = self._undeclared.pop()
            store.key_value_set_bytes(f"{self._key}/text/{name}", _unlike.pack(sections), True)
        copy = self.log.copy()
        text = json.dumps([copy.calls, copy.entries])
        if text != self._written:
            store.key_value_set(f"{self._key}/log/{jax.process_index()}", text, True)
            self._written = text
        if jax.process_index() == self.processes[0]:
            self._compare(store)
        found = try_get(store, f"{self._key}/found")
        alike, self.over, difference = json.loads(found) if found else (0, False, None)
        self.log.forget(alike)
        return difference

    def _compare(self, store: Any) -> None:
        pairs = store.key_value_dir_get(f"{self._key}/log/")
        logs = {int(key.rpartition("/")[2]): Copy(*json.loads(text)) for key, text in pairs}
        difference = first_difference(logs, self._alike)
        report = None
        if difference is not None and not self._waits_for_more(difference):
            few, many = difference.groups[0], difference.groups[-1]
            texts = [self._text(store, name) for name, _ in (few, many)]
            report = _unlike.in_a_call(WHO, difference.call, [few[1], many[1]], texts)
        alike, over = self._alike, False
        if len(logs) == len(self.processes) and difference is None:
            alike = (
                min(log.calls for log in logs.values()) - 1
            )  # The last call may not be settled yet.
            over = all(log.entries and log.entries[-1][1] == ENDS for log in logs.values())
        if report or over or alike > self._alike:
            self._alike = alike
            store.key_value_set(f"{self._key}/found", json.dumps([alike, over, report]), True)

    def _waits_for_more(self, difference: Difference) -> bool:
        """Whether others may be about to publish their calls, which would show who is the odd one."""
        num = sum(len(processes) for _, processes in difference.groups)
        first, self._suspect = self._suspect != difference.call, difference.call
        return first and num < len(self.processes)

    def _text(self, store: Any, name: str) -> _unlike.Sections:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return _unlike.unpack(store.key_value_try_get_bytes(f"{self._key}/text/{name}"))
        return {"call": [name]}


class Watch:
    """The thread, the logs that it publishes, and what it has found."""

    def __init__(self) -> None:
        self.difference: str | None = None  # between processes, as the message of an error
        self._peers: dict[tuple[int, ...], Peers] = {}
        self._thread: threading.Thread | None = None
        self._wake, self._stop, self._done = (Flag() for _ in range(3))
        self._reported = False
        self._deadline = float("inf")
        self._exiting = False
        self._pid = os.getpid()

    def peers(self, processes: tuple[int, ...]) -> Peers:
        """The log of calls on these processes; the first call starts the thread."""
        if processes not in self._peers:
            self._peers = self._peers | {processes: Peers(processes)}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jzero: watch", daemon=True)
            start_thread(self._thread)
            atexit.register(self._exit)  # After JAX's, so that it runs before them.
        return self._peers[processes]

    def look_soon(self) -> None:
        self._wake.set()

    def check(self) -> None:
        """Raises ProcessError if processes were found to differ."""
        if self.difference is not None:
            self._reported = True
            raise ProcessError(self.difference)

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for a difference to be found."""
        end = time.monotonic() + seconds
        while self.difference is None and time.monotonic() < end:
            time.sleep(0.02)

    def _run(self) -> None:
        while not self._stop.is_set():
            most = max([_INTERVAL_SECONDS, *(len(peers) / 1000 for peers in self._peers)])
            self._wake.wait(most if self.difference is None else 0.1)
            self._wake.clear()
            if self.difference is None:
                self._look()
            elif time.monotonic() > self._deadline and (self._exiting or not self._reported):
                self._end()
        self._done.set()

    def _look(self) -> None:
        store = _jax_state.key_value_store()
        if store is None:  # jax.distributed was shut down.
            return
        for peers in self._peers.values():
            try:
                found = peers.look(store)
            except jax.errors.JaxRuntimeError:
                continue  # The first process, which has the store, has ended.
            if found is not None:
                first = jax.process_index() == 0
                self._deadline = time.monotonic() + _GRACE_SECONDS + first * _FIRST_WAITS_SECONDS
                self.difference = found

    def _end(self) -> None:
        """Ends a process whose main thread waits for what never comes."""
        if not self._reported:
            self._report()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def _report(self) -> None:
        """Prints the difference as if the main thread had raised it where it is."""
        self._reported = True
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = traceback.format_stack(frame) if frame and not self._exiting else []
        error = traceback.format_exception_only(ProcessError(self.difference))
        start = ["Traceback (most recent call last):\n"] * bool(lines)
        print("".join([*start, *lines, *error]), end="", file=sys.stderr)

    def _exit(self) -> None:
        """At exit: says so, and waits for the others as JAX would, but not for ever."""
        if os.getpid() != self._pid:
            return
        if not isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self._exiting = True
            for peers in self._peers.values():
                peers.end()
            self._wait_for_others()
        if self.difference is None:
            self._stop.set()
            self._wake.set()
            self._done.wait(_GRACE_SECONDS)
            return
        if (
            not self._reported
        ):  # The user does not know yet that results are wrong: exit with a failure.
            time.sleep(_LAST_SECONDS + (jax.process_index() == 0) * _FIRST_WAITS_SECONDS)
            self._end()
        # JAX may wait for ever at exit; the thread then ends the process.
        self._deadline = max(self._deadline, time.monotonic() + _LAST_SECONDS)

    def _wait_for_others(self) -> None:
        end = time.monotonic() + _EXIT_SECONDS
        pause = max([0.1, *(len(peers) / 1000 for peers in self._peers)])
        while self.difference is None and time.monotonic() < end:
            if (
                all(peers.over for peers in self._peers.values())
                or not _jax_state.key_value_store()
            ):
                break
            self._wake.set()
            time.sleep(pause)


def try_get(store: Any, key: str) -> str | None:
    """The value of a key, or None."""
    try:
        return store.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


watch = Watch()
