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

from jzero._errors import CheckpointError, message
from jzero._thread_group import Flag, start_thread
from jzero.checkpoint import _orbax, _together, _writing
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, STATE
from jzero.checkpoint._seal import File
from jzero.checkpoint._steps import Steps
from jzero.checkpoint._together import Round

WHO = "Checkpointer.save"


class Saver:
    """Writes steps into a directory.

    Attributes:
      step: the one that is being written, or was written last.
    """

    def __init__(self, steps: Steps, max_to_keep: int | None, save_bytes: int):
        self._steps, self._max_to_keep, self._save_bytes = steps, max_to_keep, save_bytes
        self._running: tuple[threading.Thread | None, Flag] = None, Flag()
        self._failure: BaseException | None = None
        self._is_complete = False  # though something failed
        self.step: int | None = None

    def start(
        self, step: int, tree: Any, iterators: list[Any] | None, notes: dict[str, Any]
    ) -> None:
        """Copies a state to the host, and writes it in the background.

        Args:
          step: its number.
          tree: the state, a container.
          iterators: where the data iterator of each process stands.
          notes: what readers may want to know.

        Raises:
          CheckpointError: another process writes in this directory, or has saved a later step.
          Exception: the state could not be copied.
        """
        meeting = Round(WHO)
        meeting.lead("begin", lambda: self._steps.begin(WHO, step))
        copied, done = Flag(), Flag()
        work = _Work(self._steps, step, self._max_to_keep, meeting, tree, iterators, notes,
                     self._save_bytes)  # fmt: skip
        thread = threading.Thread(
            target=self._run, args=(work, step, copied, done), name=f"jzero saves step {step}"
        )
        self._running = thread, done
        try:
            start_thread(thread)  # After Ctrl-C here it goes on, or never began.
            copied.wait()
        except BaseException:  # Steps may overwrite the state from now on.
            work.interrupted.set()
            raise

    def wait(self) -> None:
        """Waits until what is being written is complete; raises what went wrong, once."""
        if self._is_running():
            _, done = self._running
            done.wait()  # To join the thread is not safe from Ctrl-C before Python 3.12.
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what has gone wrong in the background, once; then its step can be saved again."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            # It may have its name, and only the sync failed; if another process writes, it may be its step.
            with contextlib.suppress(CheckpointError):
                is_own = self._steps.lock.is_held
                self._is_complete |= is_own and self.step in self._steps.complete()
            if not self._is_complete:  # Else only older ones could not be removed.
                self.step = None
            raise failure

    def close(self) -> None:
        """Waits, and lets others write; raises what went wrong."""
        try:
            self.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Lets others write, if nothing is being written."""
        if not self._is_running():
            self._steps.close()

    def _is_running(self) -> bool:
        """Whether something is being written; a thread that Ctrl-C kept from starting writes nothing."""
        thread, done = self._running
        if thread is not None and thread.ident is None:
            time.sleep(0.1)  # It may be about to.
        return thread is not None and thread.ident is not None and not done.is_set()

    def _run(self, work: _Work, step: int, copied: Flag, done: Flag) -> None:
        self.step = step
        try:
            work.run(copied)
        except BaseException as error:
            self._is_complete = work.is_complete
            if work.was_interrupted:  # The caller knows.
                self.step = None
            else:
                self._failure = error
        finally:
            done.set()


@dataclasses.dataclass
class _Work:
    """One step that is being written, by all processes.

    Attributes:
      steps: the directory that it will be in.
      step: its number.
      max_to_keep: how many steps are to be left then; None for all.
      meeting: of the processes.
      tree: the state, a container, until it is copied.
      iterators: where the data iterator of each process stands.
      notes: what readers may want to know.
      save_bytes: the memory of the host that it may use beside the state.
    """

    steps: Steps
    step: int
    max_to_keep: int | None
    meeting: Round
    tree: Any
    iterators: list[Any] | None
    notes: dict[str, Any]
    save_bytes: int

    def __post_init__(self) -> None:
        self.is_complete = False
        self.interrupted = Flag()  # The caller no longer waits until the state is copied.
        self.was_interrupted = False  # before it was
        self._started = time.time_ns()

    def run(self, copied: Flag) -> None:
        """Writes it, and makes it complete when all processes have written their parts."""
        failure: BaseException | None = None
        part: dict[str, File] = {}
        try:
            self._write(copied)
        except BaseException as error:
            failure = error
        finally:
            copied.set()
        try:
            owner = self.meeting.lead("claim", lambda: self._claim(failure))
            part = self._hand_in(failure, owner)
        except BaseException as error:
            failure = failure or error
        elsewhere, others = self.meeting.report("written", failure, part)
        parts = {name: File(*found) for each in (part, *others) for name, found in each.items()}
        self.meeting.lead("complete", lambda: self._complete(failure, elsewhere, parts))
        self.is_complete = True
        self.meeting.lead("prune", self._prune)

    def _write(self, copied: Flag) -> None:
        """This process's part; `copied` is set when the state may be consumed."""
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.tree))
        self._path = self.steps.folder(WHO, self.step, nbytes // jax.process_count())
        self._writing = _writing.Writing(self._path / STATE, self.save_bytes)
        self._writing.take(self.tree)
        self.tree = None

        def done() -> None:
            # Once all is copied: what the caller may have overwritten by then counts for nothing.
            if self.interrupted.is_set():
                raise InterruptedError
            copied.set()

        try:
            self._writing.write(done)
        except Exception as error:
            if copied.is_set() or not self.interrupted.is_set():
                raise
            self.was_interrupted = True
            raise CheckpointError(message(
                WHO, f"step {self.step} was interrupted before its state was copied",
                "What is saved is the state that save() was given.", "Save it, or a later one, again."
            )) from error  # fmt: skip

    def _claim(self, failure: BaseException | None) -> str:
        """What process 0 does before any of them hands in what it has written."""
        if failure is not None:
            raise failure
        return self.steps.claim(WHO, self.step)

    def _hand_in(self, failure: BaseException | None, owner: str) -> dict[str, File]:
        if failure is not None:
            raise failure
        return self.steps.hand_in(WHO, self.step, owner)

    def _complete(
        self, failure: BaseException | None, elsewhere: str, parts: dict[str, File]
    ) -> None:
        """What process 0 does at the end."""
        try:
            if failure is not None:
                raise failure
            if elsewhere:
                raise _together.failed(WHO, elsewhere)
            self._put_together()
            self.steps.publish(WHO, self.step, self._writing.leaves, parts)
        except BaseException:
            self.steps.discard(self.step)
            raise

    def _put_together(self) -> None:
        """One store of all parts, and what process 0 writes beside it."""
        self._path.mkdir(exist_ok=True)  # What was in it may have been handed in.
        self._writing.complete(self.steps.base(self.step))
        handlers = {STATE: _orbax.PYTREE}
        if self.iterators is not None:
            handlers[DATA] = _orbax.JSON
            (self._path / DATA).mkdir()
            text = json.dumps({"iterators": self.iterators})
            (self._path / DATA / ITERATOR_FILE).write_text(text)
        _orbax.write_notes(self._path, handlers, self._started, self.notes)

    def _prune(self) -> None:
        """Removes the steps that are too many."""
        if self.max_to_keep is not None:
            for step in self.steps.complete()[: -self.max_to_keep]:
                self.steps.remove(WHO, step)
