# SPDX-License-Identifier: Apache-2.0
"""The right to write in a directory of steps: one process at a time has it.

Whoever has it says so in a file, which it touches every few seconds. The file is taken from a process that
is certainly dead: one of this machine that runs no more, or one that has not touched it for minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from pathlib import Path
from typing import NamedTuple

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero._thread_group import Flag, start_thread
from jzero.checkpoint import _files, _nearby

NAME = "_JZERO_WRITER"
# Seconds between two heartbeats, and after how many without one a writer counts as dead.
BEAT, EXPIRES = 15.0, 120.0


_held: set[str] = set()  # tokens of this process


class Owner(NamedTuple):
    """A process that writes.

    Attributes:
      host: its machine's name.
      world: where process numbers are unique: one boot of one machine, and a container on it.
      pid: its number there.
      started: when it started, in ticks since the boot: the number may be given again.
      token: of one `Lock`.
    """

    host: str
    world: str | None
    pid: int
    started: int | None
    token: str

    @classmethod
    def new(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), _world(), pid, _started(pid), uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """The right to write in a directory, once it is acquired."""

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._owner: Owner | None = None
        self._ended = Flag()

    def ensure(self, who: str) -> bool:
        """Takes the right, also from a process that is dead; False if this process has it already.

        Raises:
          CheckpointError: another one has it.
        """
        if self._owner is not None and os.path.lexists(self._path):
            self.check(who)
            return False
        self.release()  # Somebody has removed the directory, and all that was in it.
        self._acquire(who)
        return True

    def _acquire(self, who: str) -> None:
        owner = Owner.new()
        private = self._path.with_name(f"{NAME}.{owner.token}")
        try:
            self._owner, self._ended = owner, Flag()
            _held.add(owner.token)
            while not _take(who, private, self._path, owner):
                pass
            for left in self._path.parent.glob(f"{NAME}.*"):  # of those who died while they tried
                if _files.kind(left) != "a directory":  # None of ours.
                    left.unlink(missing_ok=True)
            args = self._path, self._ended
            start_thread(threading.Thread(target=_beat, args=args, daemon=True))
        except BaseException:  # Ctrl-C, too.
            self.release()
            raise
        finally:
            private.unlink(missing_ok=True)

    def check(self, who: str) -> None:
        """That this process has it still: after a long sleep, another one may.

        Raises:
          CheckpointError: it has not.
        """
        found = _read(self._path)
        if found != self._owner:
            taken = f"{found or 'somebody'} has taken over {self._path.parent}"
            raise CheckpointError(message(
                who, taken if os.path.lexists(self._path) else f"{self._path} was removed",
                f"A process that shows no sign of life for {EXPIRES:.0f} s counts as dead.",
                "End one of the two, or save to another directory."))  # fmt: skip

    def release(self) -> None:
        """Gives it back, if this process has it."""
        self._ended.set()
        owner, self._owner = self._owner, None
        _held.discard(owner.token if owner else "")
        if owner is not None and owner.pid == os.getpid() and _read(self._path) == owner:
            self._path.unlink(missing_ok=True)  # A forked child has it not.


def unlock(who: str, directory: Path) -> str:
    """Ends the right of a process that is dead, as the caller knows; who had it.

    Raises:
      CheckpointError: nobody has it, or a process of this machine that runs.
    """
    path = directory / NAME
    owner = _read(path)
    if not os.path.lexists(path):
        raise CheckpointError(message(
            who, f"nobody writes in {directory}", f"Who does has a file {NAME} there.", _elsewhere(directory)
        ))  # fmt: skip
    if owner is not None and _runs(owner):
        raise CheckpointError(message(
            who, f"{owner} runs", "Two writers in one directory destroy what they write.",
            "End it first."))  # fmt: skip
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(message(
            who, f"{path} cannot be removed: {error.strerror}", "It is the file of who writes there.",
            "Remove whatever it is by hand.")) from error  # fmt: skip
    return str(owner or "somebody")


def _elsewhere(directory: Path) -> str:
    """What to do if nobody writes in a directory."""
    step = _nearby.step_of(directory)
    if step is None:
        return "Correct the path, if it is not the directory of steps."
    return f"It is in the step {step}, and not the directory of steps: name {step.parent}."


def _take(who: str, private: Path, path: Path, owner: Owner) -> bool:
    """Tries to take the right, and to make way for that; whether this process has it."""
    with open(private, "w", opener=_not_followed) as file:
        file.write(json.dumps(owner))
    try:
        _files.sync(private)  # After a power cut it says who had it, or is not there.
        if _link(private, path) or _read(path) == owner:  # NFS may deny what it has done.
            return True
        _take_over(who, path, private)
    except FileNotFoundError:  # Who got it has tidied up.
        pass
    return False


def _not_followed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _take_over(who: str, path: Path, private: Path) -> None:
    """Removes the file of a dead process.

    Raises:
      CheckpointError: its process may be alive, or no process made what is there.
    """
    if (kind := _files.kind(path)) not in ("a file", "nothing"):
        raise CheckpointError(message(
            who, f"{path} is {kind}", "Who writes there has a regular file of that name.",
            "Remove it, if nobody writes there."))  # fmt: skip
    owner = _read(path)
    runs = None if owner is None else _runs(owner)
    age = _age(path, private)
    if runs or (runs is None and age < EXPIRES):
        raise CheckpointError(message(
            who, f"{owner or 'somebody'} writes in {path.parent}, and showed it {age:.0f} s ago",
            "One process at a time saves steps in a directory.", _advice(owner, path)))  # fmt: skip
    # Somebody else may take over just now: what was moved away must be what was looked at.
    moved = path.with_name(f"{private.name}.old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, moved)
        if _read(moved) != owner:
            _link(moved, path)
        moved.unlink()


def _advice(owner: Owner | None, path: Path) -> str:
    if owner is not None and owner.world is not None and owner.world == _world():
        same = (
            "This process has another Checkpointer for it: close"
            if owner.pid == os.getpid()
            else "End"
        )
        return f"{same} it, or save to another directory."
    return (
        f"Save to another directory; if that process is dead, wait {EXPIRES:.0f} s, or take over with "
        f"python -m jzero unlock {path.parent}"
    )


def _link(source: Path, path: Path) -> bool:
    """Gives a file another name, if nobody has it: at once, with all that is in the file."""
    try:
        os.link(source, path)
        return True
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise
    except OSError:  # A file system without hard links.
        try:
            with path.open("x") as file:
                file.write(source.read_text())
            return True
        except FileExistsError:
            return False


def _read(path: Path) -> Owner | None:
    """Who has the right; None if nobody does, or it cannot be told."""
    try:
        owner = Owner(*_json.read("lock", path, follow=False))
    except (CheckpointError, TypeError):
        return None
    types = (str, str | None, int, int | None, str)
    pairs = zip(owner, types, strict=True)
    return owner if all(isinstance(value, kind) for value, kind in pairs) else None


def _runs(owner: Owner) -> bool | None:
    """Whether a process runs; None if that cannot be told from here."""
    if owner.world is None or owner.world != _world():
        return None
    if owner.pid == os.getpid():
        return owner.token in _held  # Else it could not be given back.
    return _started(owner.pid) == owner.started


def _age(path: Path, private: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system."""
    os.utime(private)
    return private.stat().st_mtime - path.lstat().st_mtime


def _beat(path: Path, ended: Flag) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _world() -> str | None:
    """Of this process; None where the system does not say (it is no Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process of this world started; None if there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
