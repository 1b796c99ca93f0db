# SPDX-License-Identifier: Apache-2.0
"""A file that is read and written past the page cache (O_DIRECT), where the file system allows it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
import sys
import weakref
from pathlib import Path

import numpy as np

from jzero._errors import OptionError, StateError, message
from jzero.offload.nvme._tile_layout import PAGE, WHO

BLOCK = 2**23  # Bytes of one transfer, at most; experiments/infinity/disk.py measures others.
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it.
_DAMAGED = "What is on the disk is not what this run needs, and nothing was overwritten."
_open_files: weakref.WeakSet[DirectFile] = weakref.WeakSet()


class DirectFile:
    """A file locked for this process; transfers are of whole pages, from memory of `memory_alignment`."""

    _close = staticmethod(os.close)  # Modules are gone when an interpreter ends; classes are not.

    def __init__(self, path: Path, create: bool = False) -> None:
        """Opens a regular file of Linux, or makes one where nothing is; refuses one that another run has."""
        # `why_not` says in words why transfers do not go past the page cache.
        self.path, self._fd, self.why_not = path, -1, ""
        if sys.platform != "linux":
            raise OptionError(message(
                WHO, f"this is {sys.platform}", "State is kept in files by system calls of Linux.",
                "Use another tier, such as HostCPU."))  # fmt: skip
        # What is no file of ours may be a link to anything, a pipe or a device.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        try:
            self._fd = self._open(flags)
            _open_files.add(self)
            self._lock()
        except BaseException:
            self.forget()
            raise

    def __del__(self) -> None:
        self.forget()  # An interrupt may leave nobody else to close it.

    @property
    def direct(self) -> bool:
        return not self.why_not

    @functools.cached_property
    def memory_alignment(self) -> int:
        """Of memory that a transfer reads or writes, in bytes; pages are always right."""
        return alignment_of_memory(self._fd) if self.direct else 1

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def _open(self, flags: int) -> int:
        try:
            fd = self._open_direct(flags)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is no regular file")
            if self.why_not:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
            return fd
        except FileNotFoundError as error:
            raise StateError(message(
                WHO, f"{self.path} is not there",
                "State that is resumed is in one file for each device.",
                "Put it back, or restore a checkpoint into another path, without resume=True.",
            )) from error  # fmt: skip
        except OSError as error:
            raise OptionError(message(
                WHO, f"{self.path} cannot be opened: {error.strerror}",
                "State is kept in files that this run reads and writes.", "Use another path."
            )) from error  # fmt: skip

    def _open_direct(self, flags: int) -> int:
        try:
            fd = os.open(self.path, flags | _O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.why_not = "the file system has no O_DIRECT"
            if flags & os.O_EXCL:  # Linux makes the file before it looks at O_DIRECT.
                self.path.unlink(missing_ok=True)
            return os.open(self.path, flags, 0o600)
        asked = alignment(fd)
        if (kind := _file_system(fd)) in ("tmpfs", "ramfs"):
            self.why_not = f"{kind} is memory, and no disk"
        elif asked is None:
            self.why_not = "the file system has no O_DIRECT for this file"
        elif asked > PAGE:
            self.why_not = f"O_DIRECT would need multiples of {asked} bytes here"
        return fd

    def _lock(self) -> None:
        """The kernel releases it when the process ends, however it does."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                raise BlockingIOError  # It has just got another name, by whoever had the lock.
        except (BlockingIOError, FileNotFoundError) as error:
            raise OptionError(message(
                WHO, f"another run has {self.path}", "One run at a time has the files of a path.",
                "End it, or give each run a path of its own.")) from error  # fmt: skip
        except OSError as error:
            raise OptionError(message(
                WHO, f"{self.path} cannot be locked: {error.strerror}",
                "A second run in the same folder must be noticed.", "Use a local file system."
            )) from error  # fmt: skip

    def read(self, buffer: np.ndarray, offset: int, what: str) -> None:
        view, done, refused = buffer.data, 0, 0
        while done < len(view):
            part = view[done : done + BLOCK]
            try:
                moved = os.preadv(self._fd, [part], offset + done)
            except OSError as error:
                raise self._failed("reading", what, offset + done, error) from error
            if moved == 0:
                raise self.cut(f"{what} needs bytes {offset} to {offset + len(view)}")
            done, refused = self._go_on(done, moved, refused, len(view), "reading", what, offset)

    def write(self, buffer: np.ndarray, offset: int, what: str) -> None:
        view, done, refused = buffer.data, 0, 0
        while done < len(view):
            try:
                moved = os.pwrite(self._fd, view[done : done + BLOCK], offset + done)
            except OSError as error:
                raise self._failed("writing", what, offset + done, error) from error
            done, refused = self._go_on(done, moved, refused, len(view), "writing", what, offset)

    def _go_on(
        self, done: int, moved: int, refused: int, total: int, doing: str, what: str, offset: int
    ) -> tuple[int, int]:
        """Where to go on after a transfer, which may be short; three in a row without a page are an error."""
        if done + moved < total:
            moved -= moved % PAGE  # The next one starts on a page, too.
        refused = 0 if moved else refused + 1
        if refused == 3:
            error = OSError(errno.EIO, "transfers stop short")
            raise self._failed(doing, what, offset + done, error)
        return done + moved, refused

    def resize(self, size: int) -> None:
        """Sets the size of the file, and reserves its space; an `OSError` says that there is no room."""
        if size:
            os.posix_fallocate(self._fd, 0, size)
        else:
            os.ftruncate(self._fd, 0)

    def sync(self) -> None:
        """Returns when all that was written is on the medium; else raises a `StateError`."""
        try:
            os.fdatasync(self._fd)
        except (
            OSError
        ) as error:  # A second try would succeed: the kernel reports a lost page only once.
            raise StateError(message(
                WHO, f"{self.path} cannot be synced: {error.strerror}",
                "A step is complete when the disk has all of it.",
                "Look at the disk; the step before is still there, unless in_place=True.",
            )) from error  # fmt: skip

    def _failed(self, doing: str, what: str, offset: int, error: OSError) -> StateError:
        return StateError(message(
            WHO, f"{doing} {what}, byte {offset} of {self.path}, failed: {error.strerror}",
            "Every byte of a tile is read and written.",
            "Look at the disk and the kernel's log; the step before is still there, unless in_place=True.",
        ))  # fmt: skip

    def cut(self, needed: str) -> StateError:
        """The error for a file that is shorter than it was."""
        return StateError(message(
            WHO, f"{self.path} has {self.size} bytes, and {needed}: it was cut", _DAMAGED,
            "Restore the last checkpoint into a new path, without resume=True."))  # fmt: skip

    def close(self) -> None:
        """Closes the file and releases the lock; again, does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # A child that was just forked may have it open.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Closes the file; the lock stays with other processes that have it open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._close(fd)


def _forget_in_child() -> None:
    """A forked child that kept the files open would keep their locks after its parent has ended."""
    for file in list(_open_files):
        file.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _file_system(fd: int) -> str:
    """The kernel's name for the kind of file system of a file; '' if nothing says it."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    # Fields, any number of optional ones, " - ", and the kind first (proc_pid_mountinfo(5)).
    kinds = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number)
    return next(kinds, "")


class _Statx(ctypes.Structure):
    """`struct statx` of statx(2), as far as it is read."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("after", ctypes.c_uint8 * 96),
    )


_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000


def alignment(fd: int) -> int | None:
    """Bytes that O_DIRECT needs, of memory and offsets; None without O_DIRECT; pages before Linux 6.1."""
    found = _asked(fd)
    return PAGE if found is None else max(found.dio_mem_align, found.dio_offset_align) or None


def alignment_of_memory(fd: int) -> int:
    """The same of memory alone, often less: an NVMe disk needs 4 bytes, and 512 of offsets."""
    found = _asked(fd)
    return PAGE if found is None else found.dio_mem_align or PAGE


def _asked(fd: int) -> _Statx | None:
    """What O_DIRECT needs; None where nothing says it."""
    found = _Statx()
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    failed = statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(found))
    return None if failed or not found.mask & _STATX_DIOALIGN else found
