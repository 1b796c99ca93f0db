# SPDX-License-Identifier: Apache-2.0
"""Writes steps in the background, one at a time, each complete or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax

from jzero._errors import CheckpointError, message
from jzero._thread_group import Flag, start_thread
from jzero.checkpoint import _files, _orbax, _seal, _steps, _together, _writing
from jzero.checkpoint._lock import Lock
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, STATE
from jzero.checkpoint._together import Round

WHO = "Checkpointer.save"
_SEEN_SECONDS = 30.0


class Saver:
    """Writes steps into a directory.

    Attributes:
      step: the one that is being written, or was written last.
    """

    def __init__(self, directory: Path, max_to_keep: int | None, save_bytes: int):
        self._directory, self._max_to_keep = directory, max_to_keep
        self._save_bytes = save_bytes
        self._lock = Lock(directory)
        self._running: tuple[threading.Thread | None, Flag] = None, Flag()
        self._failure: BaseException | None = None
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
        final = self._directory / str(step)
        meeting = Round(WHO)
        meeting.lead("begin", lambda: self._begin(final))
        copied, done = Flag(), Flag()
        work = _Work(self._lock, final, self._max_to_keep, meeting, tree, iterators, notes,
                     self._save_bytes)  # fmt: skip
        thread = threading.Thread(
            target=self._run, args=(work, step, copied, done), name=f"jzero saves step {step}"
        )
        self._running = thread, done
        start_thread(thread)  # After Ctrl-C here it goes on, or never began.
        copied.wait()

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
            # If it is there, only older ones could not be removed.
            if not os.path.lexists(self._directory / str(self.step)):
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
            self._lock.release()

    def _is_running(self) -> bool:
        """Whether something is being written; a thread that Ctrl-C kept from starting writes nothing."""
        thread, done = self._running
        if thread is not None and thread.ident is None:
            time.sleep(0.1)  # It may be about to.
        return thread is not None and thread.ident is not None and not done.is_set()

    def _begin(self, final: Path) -> None:
        """What process 0 does before all of them write."""
        _files.make_directory(self._directory)
        if self._lock.ensure(WHO):
            _files.remove_unfinished(self._directory)
        check_is_last(final)
        unfinished = _files.unfinished(final)
        _files.discard(unfinished)
        (unfinished / STATE).mkdir(parents=True)

    def _run(self, work: _Work, step: int, copied: Flag, done: Flag) -> None:
        self.step = step
        try:
            work.run(copied)
        except BaseException as error:
            self._failure = error
        finally:
            done.set()


def check_is_last(final: Path) -> None:
    """That no step is complete that is as late as the one that is to be saved.

    Raises:
      CheckpointError: there is one.
    """
    latest = _steps.latest(final.parent)
    if latest is not None and int(final.name) <= latest:
        raise CheckpointError(message(
            WHO, f"step {final.name} is not after step {latest} of {final.parent}",
            "Steps are saved in order.", "To go back to an earlier step, remove the directories of those "
            "after it first, or save to another directory."))  # fmt: skip


@dataclasses.dataclass
class _Work:
    """One step that is being written, by all processes.

    Attributes:
      lock: the writer's.
      final: the directory that it will have.
      max_to_keep: how many steps are to be left then; None for all.
      meeting: of the processes.
      tree: the state, a container, until it is copied.
      iterators: where the data iterator of each process stands.
      notes: what readers may want to know.
      save_bytes: the memory of the host that it may use beside the state.
    """

    lock: Lock
    final: Path
    max_to_keep: int | None
    meeting: Round
    tree: Any
    iterators: list[Any] | None
    notes: dict[str, Any]
    save_bytes: int

    def __post_init__(self) -> None:
        self._started = time.time_ns()
        self._path = _files.unfinished(self.final)
        self._writing = _writing.Writing(self._path / STATE, self.save_bytes)

    def run(self, copied: Flag) -> None:
        """Writes it, and makes it complete when all processes have written their parts."""
        failure: BaseException | None = None
        try:
            self._write(copied)
        except BaseException as error:
            failure = error
        finally:
            copied.set()
        elsewhere = self.meeting.report("written", failure)
        self.meeting.lead("complete", lambda: self._complete(failure, elsewhere))

    def _write(self, copied: Flag) -> None:
        """This process's part; `copied` is set when the state may be consumed."""
        _wait_for(self._path / STATE)
        self._writing.take(self.tree)
        self.tree = None
        self._writing.write(copied.set)

    def _complete(self, failure: BaseException | None, elsewhere: str) -> None:
        """What process 0 does at the end."""
        try:
            if failure is not None:
                raise failure
            if elsewhere:
                raise _together.failed(WHO, elsewhere)
            self._seal()
            self.lock.check(WHO)
            _files.publish(self.final)
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise
        self._prune()

    def _seal(self) -> None:
        """All that process 0 writes, and everything is on the disk."""
        self._writing.complete()
        handlers = {STATE: _orbax.PYTREE}
        if self.iterators is not None:
            handlers[DATA] = _orbax.JSON
            (self._path / DATA).mkdir()
            text = json.dumps({"iterators": self.iterators})
            (self._path / DATA / ITERATOR_FILE).write_text(text)
        _orbax.write_notes(self._path, handlers, self._started, self.notes)
        _seal.write(self._path, self._writing.leaves)

    def _prune(self) -> None:
        """Removes the steps that are too many."""
        if self.max_to_keep is not None:
            for step in _steps.complete(self.final.parent)[: -self.max_to_keep]:
                self.lock.check(WHO)
                _files.remove(self.final.parent / str(step))


def _wait_for(directory: Path) -> None:
    """Waits until this process sees what process 0 has made: network file systems are late to tell.

    Raises:
      CheckpointError: it does not.
    """
    end = time.monotonic() + _SEEN_SECONDS
    while not directory.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(message(
                WHO, f"process {jax.process_index()} does not see {directory}, which process 0 has made",
                "Checkpoints are on a file system that all processes see.",
                "Give all of them the same directory, on such a one."))  # fmt: skip
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(directory.parent.parent)
