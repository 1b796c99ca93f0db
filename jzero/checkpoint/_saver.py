# SPDX-License-Identifier: Apache-2.0
"""Writes steps in the background, one at a time, each complete or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from typing import Any

import jax

from jzero._errors import CheckpointError
from jzero._thread_group import Flag, start_thread
from jzero.checkpoint import _orbax, _together
from jzero.checkpoint._lock import WHO
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, STATE
from jzero.checkpoint._seal import File
from jzero.checkpoint._steps import Steps
from jzero.checkpoint._together import Round
from jzero.checkpoint._writing import Writing


class Saver:
    def __init__(self, steps: Steps, max_to_keep: int | None, save_bytes: int):
        self._steps, self._max_to_keep, self._save_bytes = steps, max_to_keep, save_bytes
        self._running: tuple[threading.Thread, _Work] | None = None
        self._failure: BaseException | None = None
        self.step: int | None = None  # that is being written, or was written last

    def start(self, step: int, tree: Any, place: Any, notes: dict[str, Any]) -> None:
        """Copies a state (a container) to the host, and writes it in the background."""
        meeting = Round(WHO)
        meeting.lead("begin", lambda: self._steps.begin(step))
        work = _Work(self._steps, step, meeting, tree, place, notes, self._save_bytes)
        name = f"jzero saves step {step}"
        thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._running = thread, work
        try:
            start_thread(thread)  # After Ctrl-C here it goes on, or never began.
            work.copied.wait()
        except BaseException:  # Steps may overwrite the state from now on.
            work.interrupted.set()
            raise

    def wait(self) -> None:
        """Waits until what is being written is complete; raises what went wrong, once."""
        if self._running is not None and self._is_running():
            self._running[1].done.wait()  # Thread.join is not safe from Ctrl-C before Python 3.12.
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what has gone wrong in the background, once; then its step can be saved again."""
        if self._failure is not None and self._running is not None:
            failure, self._failure = self._failure, None
            is_complete = self._running[1].is_complete  # Only older ones could not be removed.
            # It may have its name, and only the sync failed; if another process writes, it may be its step.
            with contextlib.suppress(CheckpointError):
                is_own = self._steps.lock.is_held
                is_complete = is_complete or (is_own and self.step in self._steps.complete())
            if not is_complete:
                self.step = None
            raise failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Releases the lock, if nothing is being written."""
        if not self._is_running():
            self._steps.close()

    def _is_running(self) -> bool:
        """Whether something is being written; a thread that Ctrl-C kept from starting writes nothing."""
        if self._running is None:
            return False
        thread, work = self._running
        if thread.ident is None:
            time.sleep(0.1)  # It may be about to.
        return thread.ident is not None and not work.done.is_set()

    def _run(self, work: _Work) -> None:
        self.step = work.step
        try:
            work.run()
            work.meeting.lead("prune", self._prune)
        except BaseException as error:
            if work.was_interrupted:  # The caller knows.
                self.step = None
            else:
                self._failure = error
        finally:
            work.tree = work.writing = None  # The next save would replace it, and that may be late.
            work.done.set()

    def _prune(self) -> None:
        if self._max_to_keep is not None:
            for step in self._steps.complete()[: -self._max_to_keep]:
                self._steps.remove(step)


@dataclasses.dataclass
class _Work:
    """One step that is being written, by all processes; the tree is there until it is copied."""

    steps: Steps
    step: int
    meeting: Round
    tree: Any
    place: Any
    notes: dict[str, Any]
    save_bytes: int

    def __post_init__(self) -> None:
        self.copied, self.done, self.interrupted = Flag(), Flag(), Flag()
        self.was_interrupted = self.is_complete = False
        self.writing: Any = None
        self._started = time.time_ns()

    def run(self) -> None:
        """Writes it, and makes it complete when all processes have written their parts."""
        failure: BaseException | None = None
        part: dict[str, File] = {}
        try:
            # Before any of them hands in what it has written.
            owner = self.meeting.lead("claim", lambda: self.steps.claim(self.step), own=self._write)
            part = self.steps.hand_in(self.step, owner)
        except BaseException as error:
            failure = error
            self.was_interrupted = self.interrupted.is_set() and not self.copied.is_set()
        finally:
            self.copied.set()
        outcome = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reports = self.meeting.report("written", (outcome, part, self.place))
        self.meeting.lead("complete", lambda: self._complete(failure, reports))
        self.is_complete = True

    def _write(self) -> None:
        """Writes this process's part; sets `copied` when the state may be consumed."""
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.tree))
        self._path = self.steps.folder(self.step, nbytes // jax.process_count())
        self.writing = Writing(self._path / STATE, self.save_bytes)
        self.writing.take(self.tree)
        self.tree = None

        def copied() -> None:
            if self.interrupted.is_set():  # Then the caller may have overwritten what was copied.
                raise InterruptedError("save() was interrupted before the state was copied")
            self.copied.set()

        self.writing.write(copied)

    def _complete(self, failure: BaseException | None, reports: list[Any]) -> None:
        """Process 0 merges all parts, adds what is beside them, and seals the step."""
        try:
            if failure is not None:
                raise failure
            found = [
                f"process {i} failed with {text}" for i, (text, *_) in enumerate(reports) if text
            ]
            if found:
                raise _together.failed(WHO, "; ".join(found))
            self._path.mkdir(exist_ok=True)  # What was in it may have been handed in.
            self.writing.complete(self.steps.base(self.step))
            handlers = {STATE: _orbax.PYTREE}
            if self.place is not None:
                handlers[DATA] = _orbax.JSON
                (self._path / DATA).mkdir()
                text = json.dumps({"iterators": [place for _, _, place in reports]})
                (self._path / DATA / ITERATOR_FILE).write_text(text)
            _orbax.write_notes(self._path, handlers, self._started, self.notes)
            parts = {name: File(*file) for _, part, _ in reports for name, file in part.items()}
            self.steps.publish(self.step, parts)
        except BaseException:
            self.steps.discard(self.step)
            raise
