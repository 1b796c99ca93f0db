"""The library of `faults.c`: compiled, armed in the process that has loaded it, and its log."""

import contextlib
import ctypes
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

SOURCE = pathlib.Path(__file__).with_name("faults.c")
CACHE = pathlib.Path(__file__).parents[2] / ".cache" / "faults"
CHANGES, READS = 1, 2  # kinds of operations, as in the library
WRITES = ("write", "pwrite", "pwrite64", "writev", "pwritev", "pwritev64")
# In the order of the library: nothing happens; the process is killed; it is killed halfway through a write;
# the operation fails; it and all that follow fail; a write does the first half only, and says so.
ACTIONS = ("count", "kill", "tear", "fail", "fail_from", "shorten")


class Fault(NamedTuple):
    """What happens at one operation.

    Attributes:
      action: one of `ACTIONS`.
      at: the number of the operation, from 1.
      error: how it fails: the name of an errno.
      kinds: which operations are counted.
    """

    action: str = "count"
    at: int = 0
    error: str = "EIO"
    kinds: int = CHANGES

    @property
    def kills(self) -> bool:
        return self.action in ("kill", "tear")


class Operation(NamedTuple):
    """One line of the log; see `faults.c`. A note has the number 0, and its text for a path."""

    number: int
    begin: int
    end: int
    name: str
    path: str
    other: str
    result: int
    error: int

    @property
    def target(self) -> str:
        return self.path

    @property
    def reads(self) -> bool:
        """Whether it changes nothing."""
        return self.name in ("open", "opendir") or self.name.startswith(("read", "pread"))


def why_not() -> str | None:
    """Why there are no faults on this machine; None if there are."""
    if sys.platform != "linux":
        return "the library is loaded by LD_PRELOAD and reads /proc: Linux only"
    return None if _compiler() else "no C compiler"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def compiled() -> pathlib.Path:
    """The library, compiled when its source is new."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = CACHE / f"faults-{digest}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [_compiler(), "-O1", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"]
        subprocess.run([str(part) for part in command], check=True, timeout=120)
        made.rename(library)
    return library


@contextlib.contextmanager
def armed(root: str, fault: Fault, log: str | None = None) -> Iterator[None]:
    """While it is entered, the fault is there, for operations below `root`; also leaves by `disarm`."""
    arm = _loaded().faults_arm
    text, integer = ctypes.c_char_p, ctypes.c_int
    arm.argtypes = [text, text, integer, integer, ctypes.c_long, integer]
    path, action, error = (
        os.path.realpath(root),
        ACTIONS.index(fault.action),
        getattr(errno, fault.error),
    )
    failed = arm(path.encode(), log.encode() if log else None, fault.kinds, action, fault.at, error)
    if failed:
        raise OSError(failed, os.strerror(failed))
    try:
        yield
    finally:
        disarm()


def disarm() -> int:
    """Nothing fails any more; how many operations were counted."""
    return _loaded().faults_disarm()


def note(text: str) -> None:
    """Writes an operation of the name "note" into the log."""
    _loaded().faults_note(text.encode())


def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def read_log(path: pathlib.Path) -> list[Operation]:
    """The operations in the order in which they began."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    found = [
        Operation(int(number), int(begin), int(end), name, first, second, int(result), int(error))
        for number, begin, end, name, first, second, result, error in lines
    ]
    return sorted(found, key=lambda operation: operation.begin)
