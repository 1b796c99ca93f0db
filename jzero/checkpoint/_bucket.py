# SPDX-License-Identifier: Apache-2.0
"""A directory in a bucket (`s3://`, `gs://`): objects are read, written and removed whole, by tensorstore.

An object exists as a whole or not at all, and a write may be conditional: the code relies on nothing else.
tensorstore retries requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from jzero._errors import CheckpointError, OptionError, message

_URL = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/+(.*))?", re.DOTALL)
_DRIVERS = {"s3": "s3", "gs": "gcs"}
# Retries of half a minute in all, where tensorstore's default is a quarter of an hour.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
# Seconds: tensorstore tries a silent server seven times, a minute each.
_PATIENCE = 100.0
_IN_FLIGHT = 2**27  # bytes that are being uploaded or downloaded at a time
_TRIES = 3  # to replace an object
_FEW = _IN_FLIGHT // 16  # bytes that are assumed of a small object


class Object(NamedTuple):
    """An object's content, and the version that a conditional write names."""

    data: bytes
    version: bytes


class Lost(Exception):
    """A conditional write was too late: the object is not what it was."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A directory of objects."""

    scheme: str  # `s3` or `gs`
    name: str  # the bucket's
    prefix: str = ""  # of all names in it, without a slash at its ends; empty for the whole bucket

    @classmethod
    def of(cls, who: str, path: Any) -> Bucket | None:
        """The directory that a URL names; None for a path in a file system."""
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not isinstance(text, str) or not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:/", text):
            return None
        text = re.sub(r"^(\w+):/+", r"\1://", text)  # pathlib takes two slashes for one.
        found = _URL.fullmatch(text)
        prefix = (found[3] or "").strip("/") if found else ""
        if not found or "//" in prefix or {".", ".."} & {*prefix.split("/")}:
            raise OptionError(message(
                who, f"the path is {path!s:.200}",
                "It is one in a file system, s3://bucket/path or gs://bucket/path.",
                "Correct it (a bucket has at least 3 small letters), or mount what it names."))  # fmt: skip
        return cls(found[1], found[2], prefix)

    def __truediv__(self, name: str) -> Bucket:
        return dataclasses.replace(self, prefix=f"{self.prefix}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}/{self.prefix}".rstrip("/")

    __fspath__ = __str__

    def spec(self, name: str = "") -> dict[str, Any]:
        """For tensorstore: the directory, or one in it; its path ends with a slash."""
        path = "/".join(filter(None, (self.prefix, name)))
        driver = _DRIVERS[self.scheme]
        made: dict[str, Any] = {"driver": driver, "bucket": self.name, "path": path and f"{path}/"}
        made["context"] = {f"{driver}_request_retries": _RETRIES}
        return made | (_s3_options() if self.scheme == "s3" else {})

    def read(self, name: str) -> Object | None:
        """An object; None if there is none."""
        found = self._wait(name, "read", self._open.read(name))
        return None if found.state != "value" else Object(found.value, found.stamp.generation)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of an object; raises a `CheckpointError` if it does not have them."""
        found = self._wait(name, "read", self._open.read(name, byte_range=slice(start, stop)))
        if found.state != "value":
            raise _failed(str(self / name), "read", "there is no such object")
        if len(found.value) != stop - start:
            raise _failed(str(self / name), "read", f"it has no bytes {start} to {stop}")
        return bytes(found.value)

    def write(self, name: str, data: bytes) -> bytes:
        """Writes an object, whatever was there; returns its version."""
        version = bytes(self._wait(name, "written", self._open.write(name, data)).generation)
        if not version:  # tensorstore accepts a 412, even to an unconditional write.
            found = "the server says that a condition does not hold"
            raise _failed(str(self / name), "written", found)
        return version

    def write_if(self, name: str, data: bytes, version: bytes | None) -> bytes:
        """Writes an object if it still has this version (None: does not exist); else raises `Lost`."""
        wanted = _absent() if version is None else version
        done = self._wait(name, "written", self._open.write(name, data, if_equal=wanted))
        if done.generation:
            return bytes(done.generation)
        # A retried request meets what it wrote itself, if only its answer was lost.
        there = self.read(name)
        if there is None and version is None:  # S3 answers 404, which tensorstore takes for a 412.
            raise _failed(str(self / name), "written", "there is no such bucket")
        if there is None or there.data != data:
            raise Lost(f"{self / name}")
        return there.version

    def remove_if(self, name: str, version: bytes) -> None:
        self._wait(name, "removed", self._open.write(name, None, if_equal=version))

    def names(self, below: str = "") -> list[str]:
        """All objects whose names begin with `below`, in order; without that beginning."""
        store = self._open / below if below else self._open
        found = self._wait(below, "listed", store.list())
        return sorted(name.decode() for name in found)

    def remove(self, names: Iterable[str], check: Callable[[], None] = lambda: None) -> None:
        """Removes those of these objects that exist; `check` is called before each."""

        def begin(name: str) -> Any:
            check()
            return self._open.write(name, None)

        for name, future in _in_turn(((_FEW, name) for name in names), begin):
            self._wait(name, "removed", future)

    def upload(
        self, files: Mapping[str, Path], owns: Callable[[], None], check: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Writes files as objects, by name; at most `_IN_FLIGHT` bytes, or one file, are in memory.

        `check` is called before each; `owns` before an object is replaced, after it was read. It raises
        `Lost` if others write here.
        """

        def begin(name: str) -> Any:
            check()
            return self._open.write(name, files[name].read_bytes(), if_equal=_absent())

        sizes = ((path.stat().st_size, name) for name, path in files.items())
        for name, future in _in_turn(sizes, begin):
            if not self._wait(name, "written", future).generation:
                self._replace(name, files[name].read_bytes(), owns)

    def _replace(self, name: str, data: bytes, owns: Callable[[], None]) -> None:
        """Replaces what a dead process has left, and nothing that came after `owns`; else raises `Lost`."""
        for _ in range(_TRIES):
            there = self.read(name)
            if there is not None and there.data == data:  # see `write_if`
                return
            owns()
            with contextlib.suppress(Lost):  # to a last request of one that lost its lock
                self.write_if(name, data, there and there.version)
                return
        raise Lost(f"{self / name}")

    def cut_short(self, sizes: Mapping[str, int]) -> list[str]:
        """Those of some objects that do not exist, or are smaller than these sizes."""

        def is_whole(name: str, future: Any) -> bool:
            try:
                return bool(self._wait(name, "read", future).state == "value")
            except CheckpointError as error:
                if "OUT_OF_RANGE" not in str(error):
                    raise
                return False

        last = {name: slice(max(size - 1, 0), size) for name, size in sizes.items()}
        looks = _in_turn(((1, x) for x in sizes), lambda x: self._open.read(x, byte_range=last[x]))
        return [name for name, future in looks if not is_whole(name, future)]

    def objects(self, names: Iterable[str]) -> Iterator[tuple[str, Object]]:
        """Those of some small objects that exist."""
        for name, future in _in_turn(((_FEW, x) for x in names), self._open.read):
            found = self._wait(name, "read", future)
            if found.state == "value":
                yield name, Object(found.value, found.stamp.generation)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Writes objects as files below a folder; leaves out those that no longer exist."""
        for name, found in self.objects(names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(found.data)

    @functools.cached_property
    def _open(self) -> Any:
        return self._wait("", "opened", tensorstore.KvStore.open(self.spec()))

    def _wait(self, name: str, done: str, future: Any) -> Any:
        """The result of a request; raises a `CheckpointError` if it and its retries failed."""
        try:
            return future.result(timeout=_PATIENCE)
        except Exception as error:
            silent = f"there was no answer for {_PATIENCE:.0f} s"
            found = silent if isinstance(error, TimeoutError) else str(error)
            raise _failed(str(self / name), done, found) from error


def _in_turn(
    items: Iterable[tuple[int, str]], start: Callable[[str], Any]
) -> Iterator[tuple[str, Any]]:
    """Starts a request for each item of so many bytes; at most `_IN_FLIGHT`, or one, run at a time."""
    running: deque[tuple[int, str, Any]] = deque()
    for nbytes, name in items:
        while running and sum(each[0] for each in running) + nbytes > _IN_FLIGHT:
            yield running.popleft()[1:]
        running.append((nbytes, name, start(name)))
    while running:
        yield running.popleft()[1:]


@functools.cache
def _absent() -> bytes:
    """Tensorstore's version of what does not exist."""
    store = tensorstore.KvStore.open("memory://").result()
    return bytes(store.read("nothing").result().stamp.generation)


def _s3_options() -> dict[str, Any]:
    """What AWS's own tools read from the environment and tensorstore does not."""
    env = os.environ
    made: dict[str, Any] = {
        # By the endpoint's own conditions, and not by a look before the write.
        "use_conditional_write": True,
    }
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    if endpoint:
        made["endpoint"], region = endpoint, region or "us-east-1"
    if region:
        made["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in env:  # Else it complains of files of credentials that are not there.
        made["aws_credentials"] = {"type": "environment"}
    return made


def _failed(url: str, done: str, found: str) -> CheckpointError:
    line = found.splitlines()[0][:300] if found else "for an unknown reason"
    return CheckpointError(message(
        "Checkpointer", f"{url} could not be {done}: {line}",
        "Nothing counts that the bucket has not acknowledged.",
        "Check the bucket's name, its region and endpoint (AWS_REGION, AWS_ENDPOINT_URL), and what the "
        "credentials permit."))  # fmt: skip
