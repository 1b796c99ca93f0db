# SPDX-License-Identifier: Apache-2.0
"""A directory of steps: which are complete, and how one becomes complete or is removed."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jzero import _json
from jzero._errors import CheckpointError, message, warn
from jzero.checkpoint import _files, _ocdbt, _seal
from jzero.checkpoint._bucket import Bucket
from jzero.checkpoint._lock import WHO, Lock
from jzero.checkpoint._orbax import NOTES, STATE, TREE
from jzero.checkpoint._seal import Broken, File, Unfinished

_SEEN_SECONDS = 30.0
_said: set[tuple[str, str]] = set()  # Steps that are not whole, and why: each is said once.


class Steps:
    """A directory of steps that all processes see: each is written beside, sealed, then renamed."""

    def __init__(self, directory: Path):
        self.where: Any = directory

    @functools.cached_property
    def lock(self) -> Lock:
        return Lock(self.where)

    def complete(self) -> list[int]:
        """The steps that are whole; it warns once of each other one."""
        return sorted(self._whole())

    def damaged(self) -> list[int]:
        return sorted({*self._candidates()} - {*self.complete()})

    def latest(self) -> int | None:
        """The last that is whole."""
        return next(self._whole(), None)

    def check_is_last(self, step: int) -> None:
        """Raises a `CheckpointError` if a step is complete that is not before this one."""
        latest = self.latest()
        if latest is not None and step <= latest:
            raise CheckpointError(message(
                WHO, f"step {step} is not after step {latest} of {self.where}",
                "Steps are saved in order.", "To go back to an earlier step, remove the directories of those "
                "after it first, or save to another directory."))  # fmt: skip

    def open(self) -> None:
        """Makes the directory if it does not exist, or finds out that it cannot be used."""
        _files.make_directory(self.where)

    def is_there(self, step: int) -> bool:
        return os.path.lexists(self.where / str(step))

    def path(self, step: int) -> Path:
        """Where what describes a step can be read; raises `Broken` if it is not whole."""
        self._check(step)
        return Path(self.where, str(step))

    def begin(self, step: int) -> None:
        """Process 0 acquires the lock, and empties a step's place, before all of them write."""
        self.open()
        if self.lock.ensure():
            # Of writers that were interrupted.
            for left in self.where.glob(f"*{_files.UNFINISHED}"):
                _files.discard(left)
        self.check_is_last(step)
        _files.discard(self._folder(step))
        (self._folder(step) / STATE).mkdir(parents=True)

    def folder(self, step: int, nbytes: int) -> Path:
        """Where this process writes its part, of so many bytes, in an item of the name `STATE`."""
        # Process 0 has made it, which network file systems are late to tell.
        folder, end = self._folder(step), time.monotonic() + _SEEN_SECONDS
        while not (folder / STATE).is_dir():
            if time.monotonic() > end:
                raise CheckpointError(message(
                    WHO, f"process {jax.process_index()} does not see {folder}, which process 0 has made",
                    "Checkpoints are in a bucket, or on a file system that all processes see.",
                    "Give all of them the same directory, on such a one."))  # fmt: skip
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                os.listdir(self.where)
        return folder

    def claim(self, step: int) -> str:
        """Process 0 says that it has begun a step, before anybody hands in; returns its name."""
        return ""

    def hand_in(self, step: int, owner: str) -> dict[str, File]:
        """Brings what this process has written to where process 0 merges all; returns what that is."""
        return {}

    def base(self, step: int) -> dict[str, Any]:
        """Of the store in which the parts of all processes are merged, for tensorstore."""
        return _ocdbt.directory(self._folder(step) / STATE)

    def publish(self, step: int, parts: Mapping[str, File]) -> None:
        """Seals a step whose files are all there (`parts` were handed in), and commits it."""
        _seal.write(self._folder(step))
        self.lock.check()
        _files.publish(self.where / str(step))

    def discard(self, step: int) -> None:
        """Removes what there is of a step that could not be written; never raises."""
        with contextlib.suppress(OSError):
            _files.discard(self._folder(step))

    def remove(self, step: int) -> None:
        self.lock.check()
        _files.remove(self.where / str(step))

    def close(self) -> None:
        self.lock.release()

    def _folder(self, step: int) -> Path:
        return _files.unfinished(self.where / str(step))

    def _names(self) -> list[str]:
        return os.listdir(self.where) if self.where.is_dir() else []

    def _check(self, step: int) -> None:
        """Raises `Broken` if a step does not count."""
        path = self.where / str(step)
        with _readable(path):
            if path.is_symlink():
                raise Broken("it is a link")
            if not path.is_dir():
                raise Broken("it is no directory")
            if _seal.read(path) is None:
                _check_unsealed(path)

    def _candidates(self) -> list[int]:
        names = [name for name in self._names() if name.isdecimal()]
        steps = [name for name in names if len(name) < 20 and str(int(name)) == name]
        for name in {*names} - {*steps}:
            _say(self.where, name, "that is not how its number is written")
        return [int(name) for name in steps]

    def _whole(self) -> Iterator[int]:
        """The steps that are whole, the last first."""
        with _readable(self.where):
            yield from filter(self._is_whole, sorted(self._candidates(), reverse=True))

    def _is_whole(self, step: int) -> bool:
        try:
            self._check(step)
        except Unfinished:
            return False
        except Broken as error:
            _say(self.where, str(step), str(error))
            return False
        except (CheckpointError, OSError):
            if self.is_there(step):
                raise
            return False  # It has just been removed.
        return True


@contextlib.contextmanager
def _readable(directory: Path | Bucket) -> Iterator[None]:
    """An error, so that what cannot be read does not pass for missing."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(message(
            f"Checkpointer {directory}", f"could not be read: {type(error).__name__}: {error}",
            "Which of its steps are complete is not known.",
            "Check the path, its permissions, and the disk.")) from error  # fmt: skip


def _say(directory: Path | Bucket, name: str, reason: str) -> None:
    if (str(directory / name), reason) not in _said:
        _said.add((str(directory / name), reason))
        warn(message(
            f"Checkpointer {directory}", f"{name} does not count as a step: {reason}",
            "What is not whole is left out.", "Look at it, and remove it."))  # fmt: skip


def _check_unsealed(directory: Path) -> None:
    """Raises `Broken` unless a step without a seal has what every Orbax checkpoint has."""
    trees = [path for path in (directory / TREE, *directory.glob(f"*/{TREE}")) if path.exists()]
    if not trees:
        raise Broken(f"{TREE} is missing")
    for path in (*sorted(trees), directory / NOTES):
        with _seal.malformed_is_broken():
            found = _json.read("step", path, {}) if path.exists() else {}
        manifest = path.parent / "manifest.ocdbt"
        if found.get("use_ocdbt") and not (manifest.is_file() and manifest.stat().st_size):
            raise Broken(f"{manifest.relative_to(directory)} is missing")
