# SPDX-License-Identifier: Apache-2.0
"""A folder beside what is to be written, for what is not complete yet; it goes with who made it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jzero._errors import CheckpointError, OptionError, message
from jzero.checkpoint import _files

# `.out.safetensors-k3x0a_9b.tmp/lock`, and `files/` beside it: so the lock can go last.
_SUFFIX, _LOCK, _INSIDE = ".tmp", "lock", "files"
_ATTEMPTS = 20  # to remove a folder, into which threads of a write that failed may still write


def checked_path(who: str, path: str | Path) -> Path:
    """The path, if it can be one.

    Raises:
      OptionError: no file can have it.
    """
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise OptionError(message(
            who, f"the output is {str(path)!r}", "No file can be called that.", "Correct the path."
        ))  # fmt: skip
    return Path(path)


@contextlib.contextmanager
def folder(
    who: str, target: Path, withdraw: Callable[[Path], None] = lambda _: None
) -> Iterator[Path]:
    """A folder beside `target`, of the same file system, removed at the end, however that comes.

    First those go that killed processes left for the same target: a process holds a lock in its folder, and
    whoever dies holds none.

    Args:
      who: whom messages name.
      target: what is to be written.
      withdraw: called with a folder before it is removed: takes back what was moved out of it, if that
        was not yet all.

    Raises:
      CheckpointError: a living process writes the same target.
    """
    made, lock = _make(target)
    with lock:
        try:
            clear(who, target, made.name, withdraw)
            (made / _INSIDE).mkdir()
            yield made / _INSIDE
        finally:
            _remove(made, withdraw)


def _make(target: Path) -> tuple[Path, BinaryIO]:
    """A new folder, and the lock in it, until it is closed."""
    while True:
        made = Path(tempfile.mkdtemp(_SUFFIX, f".{target.name}-", target.parent))
        try:
            # Until it is locked, another process may take it for one that was left, and remove it.
            if (lock := _lock(made, os.O_CREAT)) is not None:
                return made, lock
        except OSError:
            _remove_empty(made)
            raise


def _lock(made: Path, flags: int = 0) -> BinaryIO | None:
    """The lock of a folder; None if another process has it, or it is not there."""
    try:
        fd = os.open(made / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        if flags and error.errno != errno.ENOENT:
            raise
        return None
    locked = _files.try_lock(fd)
    if locked is None:  # A file system without locks: no folder is taken for one that was left.
        locked = bool(flags)
    elif locked:
        locked = os.fstat(fd).st_nlink > 0
    if locked:
        return os.fdopen(fd, "wb")
    os.close(fd)
    return None


def clear(
    who: str, target: Path, own: str | None = None,
    withdraw: Callable[[Path], None] = lambda _: None,
) -> None:  # fmt: skip
    """Removes the folders of dead processes for a target, but not the one called `own`.

    Raises:
      CheckpointError: a living process writes the same target.
    """
    name = re.compile(re.escape(f".{target.name}-") + "[a-z0-9_]{8}" + re.escape(_SUFFIX))
    for left in sorted(target.parent.iterdir()):
        if left.name == own or not name.fullmatch(left.name) or left.is_symlink():
            continue
        if (lock := _lock(left)) is not None:
            with lock:
                _remove(left, withdraw)
        elif not _remove_empty(left):
            raise CheckpointError(message(
                who, f"another process is writing it, in {left}", "One writes at a time.",
                "Wait until it is done; remove that folder if there is none."))  # fmt: skip


def _remove_empty(made: Path) -> bool:
    """Removes a folder that was never locked; whether it is gone."""
    with contextlib.suppress(OSError):
        made.rmdir()
    return not made.exists()


def _remove(made: Path, withdraw: Callable[[Path], None]) -> None:
    """Removes a folder that is locked; what cannot be removed now will be by who writes the target next."""
    files = made / _INSIDE
    with contextlib.suppress(OSError):
        withdraw(files)
        for _ in range(_ATTEMPTS):
            shutil.rmtree(files, ignore_errors=True)
            if not files.exists():
                break
        else:
            return
        (made / _LOCK).unlink()
        made.rmdir()
