# SPDX-License-Identifier: Apache-2.0
"""A locked folder of this process; those of dead processes, which are not locked, are removed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from jzero.checkpoint import _files

_ATTEMPTS = 20  # to remove a folder, into which threads of a write that failed may still write


class Temporary:
    """A new folder `path`, locked; those of dead processes with the same prefix are removed first."""

    def __init__(
        self, prefix: str, parent: Path, ends: Callable[[Path], None] = lambda _: None
    ):  # fmt: skip
        """`ends` is called with each folder before it is removed."""
        _files.make_directory(parent)
        self._pid, self._ends = os.getpid(), ends
        self._pattern, self._parent = f"{glob.escape(prefix)}*", parent
        for left in parent.glob(self._pattern):
            _remove_dead(left, ends)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # Until it is locked, another process may remove it as left behind.
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if _files.try_lock(self._fd) is not False and self.path.exists():
                return
            os.close(self._fd)

    def others(self) -> list[Path]:
        return [path for path in self._parent.glob(self._pattern) if path.name != self.path.name]

    def close(self) -> None:
        """Removes it, except in a forked child."""
        try:
            if os.getpid() == self._pid:
                _remove(self.path, self._ends)
        finally:
            os.close(self._fd)


def _remove_dead(path: Path, ends: Callable[[Path], None]) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _files.try_lock(fd):
                _remove(path, ends)
        finally:
            os.close(fd)


def _remove(path: Path, ends: Callable[[Path], None]) -> None:
    with contextlib.suppress(OSError):
        ends(path)
        for _ in range(_ATTEMPTS):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
