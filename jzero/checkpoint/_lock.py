# SPDX-License-Identifier: Apache-2.0
"""The lock of a directory of steps: one process at a time writes there.

A file or, in a bucket, an object names the holder, which updates it every few seconds. Others take the lock
of a holder that is certainly dead: a process of this machine that no longer runs, or one that has updated
nothing for minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero._json import Maybe
from jzero._thread_group import Flag, start_thread
from jzero.checkpoint import _files, _nearby
from jzero.checkpoint._bucket import Bucket, Lost, Object

WHO = "Checkpointer.save"  # in messages
NAME = "_JZERO_WRITER"
# Seconds between two heartbeats, and after how many without one a writer counts as dead.
BEAT, EXPIRES = 15.0, 120.0
_MARGIN = 45.0  # A writer in a bucket stops so long before that: a request may take as long.
_LOOK = 2.0  # seconds between two looks of who waits for a holder to be dead

_held: set[str] = set()  # tokens of this process


class Owner(NamedTuple):
    """A process that writes."""

    host: str
    world: str | None  # where its number is unique: one boot of one machine, and a container on it
    pid: int
    started: int | None  # in ticks since the boot: the number may be given again
    token: str  # of one `Lock`

    @classmethod
    def new(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), _world(), pid, _started(pid), uuid.uuid4().hex)

    @classmethod
    def of(cls, found: Any) -> Owner | None:
        """The owner that JSON describes; None if it describes none."""
        types = (str, str | None, int, int | None, str)
        if not isinstance(found, list) or len(found) != len(types):
            return None
        return cls(*found) if all(map(isinstance, found, types)) else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Holder(NamedTuple):
    """Who holds a lock; in a file system only the owner is known."""

    owner: Owner | None  # None if unknown
    version: bytes = b""  # of the object
    steps: list[int] | None = None  # that may exist; None if only a list of objects can tell
    beat: int = 0  # heartbeats so far
    free: bool = False  # It was released.


class Lock:
    """The lock of a directory in a file system: a file that its holder touches; `ObjectLock` is for a bucket.

    What processes leave that die while they take it is removed with unfinished steps.
    """

    def __init__(self, directory: Path | Bucket):
        self.directory: Any = directory
        self._owner: Owner | None = None
        self._ended = Flag()

    def __str__(self) -> str:
        return str(self.directory / NAME)

    @property
    def owner(self) -> str:
        return f"{self._owner}, {self._owner and self._owner.token}"

    @property
    def is_held(self) -> bool:
        """Whether this process holds it, as far as it knows."""
        return self._owner is not None

    def ensure(self) -> bool:
        """Acquires the lock, even that of a dead process; False if this process holds it already."""
        if self.is_held and self._is_there():
            self.check(now=False)
            return False
        self.release()  # Somebody has removed the directory, and all that was in it.
        owner = Owner.new()
        try:
            self._owner, self._ended = owner, Flag()
            _held.add(owner.token)
            while not self._take(owner):
                self._make_way()
            args = self, owner, self._ended
            start_thread(threading.Thread(target=_beat, args=args, daemon=True))
        except BaseException:  # Ctrl-C, too.
            self.release()
            raise
        return True

    def check(self, *, now: bool = True) -> None:
        """Raises an error unless this process holds the lock; without `now`, it may have held it recently."""
        if self._owner is None or not self._has(self._owner, now):
            holder = self.holder()
            self.release()  # Who saves again takes it again, or is refused.
            taken = f"{holder and holder.owner or 'somebody'} has taken over {self.directory}"
            raise CheckpointError(message(
                WHO, taken if holder else f"{self} was removed",
                f"A process that shows no sign of life for {EXPIRES:.0f} s counts as dead.",
                "End one of the two, or save to another directory."))  # fmt: skip

    def release(self) -> None:
        self._ended.set()
        owner, self._owner = self._owner, None
        _held.discard(owner.token if owner else "")
        if owner is not None and owner.pid == os.getpid():  # A forked child has it not.
            self._give_back(owner)

    def holder(self) -> Holder | None:
        found = self.read()
        return None if found is None or found.free else found

    def _make_way(self) -> None:
        """Removes the lock of a dead process; raises a `CheckpointError` if it may be alive."""
        holder = self.holder()
        if holder is None:
            return
        runs = None if holder.owner is None else _runs(holder.owner)
        age = self._age(holder) if runs is None else 0.0
        if runs or (runs is None and age < EXPIRES):
            writer = holder.owner or "somebody"
            raise CheckpointError(message(
                WHO, f"{writer} writes in {self.directory}, and showed it {age:.0f} s ago",
                "One process at a time saves steps in a directory.",
                _advice(holder.owner, self.directory)))  # fmt: skip
        self.remove(holder)

    def read(self) -> Holder | None:
        return Holder(_read(self._path)) if self._is_there() else None

    def beat(self, owner: Owner) -> None:
        os.utime(self._path, follow_symlinks=False)

    def remove(self, holder: Holder) -> None:
        """Removes a holder's lock; another process may do so just now, so what was moved is checked."""
        moved = self._beside(uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):
            if _files.kind(self._path) != "a file":
                self._path.unlink()  # A directory is an error.
            os.rename(self._path, moved)
            if _read(moved) != holder.owner:
                _link(moved, self._path)
            moved.unlink()

    @property
    def _path(self) -> Path:
        return Path(self.directory, NAME)

    def _is_there(self) -> bool:
        return os.path.lexists(self._path)

    def _has(self, owner: Owner, now: bool) -> bool:
        return _read(self._path) == owner

    def _take(self, owner: Owner) -> bool:
        """Takes a free lock; False if another process was faster."""
        if (kind := _files.kind(self._path)) not in ("a file", "nothing"):
            raise CheckpointError(message(
                WHO, f"{self} is {kind}", "A writer holds a regular file of that name.",
                "Remove it, if nobody writes there."))  # fmt: skip
        private = self._beside(owner.token)
        try:
            with private.open("x") as file:
                file.write(json.dumps(owner))
            _files.sync(private)  # After a power cut it says who had it, or is not there.
            # NFS may deny what it has done.
            return _link(private, self._path) or _read(self._path) == owner
        except FileNotFoundError:  # Who got it has tidied up.
            return False
        finally:
            private.unlink(missing_ok=True)

    def _age(self, holder: Holder) -> float:
        """Seconds since the last heartbeat of the holder, by the clock of the file system."""
        try:
            with tempfile.TemporaryFile(dir=self.directory) as now:
                return os.fstat(now.fileno()).st_mtime - self._path.lstat().st_mtime
        except FileNotFoundError:  # Given back.
            return EXPIRES

    def _give_back(self, owner: Owner) -> None:
        if _read(self._path) == owner:
            self._path.unlink(missing_ok=True)

    def _beside(self, tag: str) -> Path:
        return _files.unfinished(self.directory / f"{NAME}.{tag}")


class ObjectLock(Lock):
    """An object in a bucket, never removed, and replaced only if it is still what was read.

    No clocks are compared: the holder counts heartbeats in the object, and whoever waits for the lock checks
    by its own clock that nothing changes. A holder that has slept gives its lock up before others may take
    it.
    """

    def __init__(self, bucket: Bucket):
        super().__init__(bucket)
        # That may exist, if known: to list a bucket is to list all objects of all steps.
        self.steps: list[int] | None = None
        self._seen = float("-inf")  # when it was certainly this process's

    def noted(self) -> tuple[list[int] | None, bool]:
        """The steps that may exist, if known, and whether this process is the one that writes."""
        found = self.read()
        is_own = self.is_held and found is not None and found.owner == self._owner
        return found and found.steps, is_own

    def read(self) -> Holder | None:
        found = self.directory.read(NAME)
        return None if found is None else _parsed(found)

    def beat(self, owner: Owner) -> None:
        self._rewrite(owner)

    def remove(self, holder: Holder) -> None:
        with contextlib.suppress(Lost):
            self.directory.write_if(NAME, _text(None, 0, holder.steps), holder.version)

    def _is_there(self) -> bool:
        return True  # `_has` says if not.

    def _has(self, owner: Owner, now: bool) -> bool:
        seen = not now and _now() - self._seen < EXPIRES - _MARGIN
        return seen or self._rewrite(owner)

    def _take(self, owner: Owner) -> bool:
        start, found = _now(), self.read()
        if found is not None and not found.free:
            return found.owner == owner
        self.steps = None if found is None else found.steps
        try:
            data = _text(owner, 0, self.steps)
            old = self.directory.write_if(NAME, data, found and found.version)
            self._check_conditions(owner, old)
        except Lost:
            return False
        self._seen = start
        return True

    def _check_conditions(self, owner: Owner, old: bytes) -> None:
        """Raises a `CheckpointError` unless conditional writes can fail: the lock relies on it."""
        self.directory.write_if(NAME, _text(owner, 1, self.steps), old)
        for version in (None, old):
            try:
                self.directory.write_if(NAME, _text(owner, 2, self.steps), version)
            except Lost:
                continue
            raise CheckpointError(message(
                WHO, f"{self.directory} replaces an object that another writer has written",
                "One of two writers must fail, which takes conditional writes (If-None-Match, If-Match).",
                "Use an endpoint that honours them, or save to a file system."))  # fmt: skip

    def _age(self, holder: Holder) -> float:
        """Watches the object until it changes, or for as long as a holder may be silent."""
        start = time.monotonic()
        while (age := time.monotonic() - start) < EXPIRES:
            time.sleep(min(_LOOK, EXPIRES - age))
            found = self.directory.read(NAME)
            if found is None or found.version != holder.version:
                return 0.0
        return EXPIRES

    def _give_back(self, owner: Owner) -> None:
        with contextlib.suppress(CheckpointError):
            self._rewrite(owner, release=True)

    def _rewrite(self, owner: Owner, *, release: bool = False) -> bool:
        """Counts a heartbeat, if the lock is still this owner's; returns whether it is."""
        while True:
            start, found = _now(), self.read()
            if found is None or found.owner != owner:
                return False
            data = _text(None if release else owner, found.beat + 1, self.steps)
            try:
                self.directory.write_if(NAME, data, found.version)
            except Lost:  # The other thread of this process was first, or another process.
                continue
            self._seen = start
            return True


def unlock(who: str, directory: Path | Bucket) -> str:
    """Removes the lock of a process that the caller knows to be dead; returns who held it."""
    lock = ObjectLock(directory) if isinstance(directory, Bucket) else Lock(directory)
    holder = lock.holder()
    if holder is None:
        raise CheckpointError(message(
            who, f"nobody writes in {directory}", f"A writer has {NAME} there.",
            _elsewhere(directory)))  # fmt: skip
    if holder.owner is not None and _runs(holder.owner):
        raise CheckpointError(message(
            who, f"{holder.owner} runs", "Two writers in one directory destroy what they write.",
            "End it first."))  # fmt: skip
    try:
        lock.remove(holder)
    except OSError as error:
        raise CheckpointError(message(
            who, f"{lock} cannot be removed: {error.strerror}",
            "It is the lock file of the process that writes there.",
            "Remove whatever it is by hand.")) from error  # fmt: skip
    return str(holder.owner or "somebody")


def _advice(owner: Owner | None, directory: Path | Bucket) -> str:
    if owner is not None and owner.world is not None and owner.world == _world():
        own = owner.pid == os.getpid()
        same = "This process has another Checkpointer for it: close" if own else "End"
        return f"{same} it, or save to another directory."
    return (
        f"Save to another directory; if that process is dead, wait {EXPIRES:.0f} s, or take over with "
        f"python -m jzero unlock {directory}"
    )


def _elsewhere(directory: Path | Bucket) -> str:
    step = None if isinstance(directory, Bucket) else _nearby.step_of(directory)
    if step is None:
        return "Correct the path, if it is not the directory of steps."
    return f"It is in the step {step}, and not the directory of steps: name {step.parent}."


def _beat(lock: Lock, owner: Owner, ended: Flag) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError, CheckpointError):
            lock.beat(owner)


def _text(owner: Owner | None, beat: int, steps: list[int] | None) -> bytes:
    said = {"owner": owner, "beat": beat, "steps": steps}
    return json.dumps({**said, "digest": _digest(said)}).encode()


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _parsed(found: Object) -> Holder:
    """What an object says; a writer of what cannot be understood may be alive."""
    try:
        value = _json.parse(found.data)
    except _json.Malformed:
        value = {}
    is_wrong = _json.check(value, {"beat": int, "steps": Maybe([int]), "digest": str})
    if (
        is_wrong
        or _digest({key: value.get(key) for key in ("owner", "beat", "steps")}) != value["digest"]
    ):
        return Holder(None, found.version)
    owner = Owner.of(value.get("owner"))
    free = value.get("owner", ...) is None
    return Holder(owner, found.version, value.get("steps"), value["beat"], free)


def _now() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _link(source: Path, path: Path) -> bool:
    """Gives a file another name, unless it is taken: atomically, with all of its content."""
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
    """Who holds the lock; None if nobody does, or if it is unknown."""
    try:
        return Owner.of(_json.read("lock", path, follow=False))
    except CheckpointError:
        return None


def _runs(owner: Owner) -> bool | None:
    """Whether a process runs; None if this machine cannot know."""
    if owner.world is None or owner.world != _world():
        return None
    if owner.pid == os.getpid():
        return owner.token in _held  # Else it could not be given back.
    return _started(owner.pid) == owner.started


def _world() -> str | None:
    """The world of this process; None where the system does not say (it is no Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process of this world started; None if none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
