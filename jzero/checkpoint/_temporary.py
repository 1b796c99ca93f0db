# SPDX-License-Identifier: Apache-2.0
"""A folder of this process, in which others find it alive; who dies leaves it to the next one to remove."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from jzero.checkpoint import _files


class Temporary:
    """A new folder, locked; those of dead processes with the same prefix are removed first.

    Attributes:
      path: of it.
    """

    def __init__(self, prefix: str, parent: Path):
        _files.make_directory(parent)
        self._pid = os.getpid()
        for left in parent.glob(f"{prefix}*"):
            _remove_dead(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Until it is locked, another process may take it for one that was left, and remove it.
            if _files.try_lock(self._fd) is not False and self.path.exists():
                return
            os.close(self._fd)

    def close(self) -> None:
        """Removes it; a forked child has it not."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _remove_dead(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _files.try_lock(fd):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
