# SPDX-License-Identifier: Apache-2.0
"""Reads parts of a file on disk, or of an object in a bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero.checkpoint import _stream
from jzero.checkpoint._bucket import Bucket
from jzero.weights._axes import TILE

# Hugging Face's loader takes the first.
_NAMES = ("model.safetensors", "model.safetensors.index.json")
_SPOOLED = 8  # tensors of an object that are copied to disk: one leaf may be made of several


@dataclasses.dataclass(eq=False)
class LocalFile:
    """A file on disk, open from its first read on: what replaces it meanwhile is not read.

    It is not mapped: if it becomes shorter that is an error, and no SIGBUS.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def beside(self, name: str) -> LocalFile:
        return LocalFile(self.path.parent / name)

    def whole(self, who: str) -> bytes:
        return _json.read_bytes(who, self.path)

    def ends_at(self, end: int) -> bool:
        return os.fstat(self._fd).st_size == end

    def read(self, start: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        _check(self, start, nbytes, _fill(self._fd, data, start))
        return data

    @contextlib.contextmanager
    def opened(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """A file descriptor, and the offset in it of the byte `start`."""
        yield self._fd, start

    @functools.cached_property
    def _fd(self) -> int:
        with _json.open_regular(self.path) as file:
            fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, fd)
        return fd


@dataclasses.dataclass(eq=False)
class BucketFile:
    """An object of a bucket, read in ranges."""

    bucket: Bucket
    name: str
    # Tensors that are copied to disk, by their offset.
    _spooled: dict[int, Any] = dataclasses.field(default_factory=dict)
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return str(self.bucket / self.name)

    def beside(self, name: str) -> BucketFile:
        return BucketFile(self.bucket, name)

    def whole(self, who: str) -> bytes:
        if (found := self.bucket.read(self.name)) is None:
            raise CheckpointError(message(
                who, f"there is no {self}", "It is a safetensors file, or an index of some.",
                "Correct its name."))  # fmt: skip
        return found.data

    def ends_at(self, end: int) -> bool:
        return self._has(end - 1) and not self._has(end)  # Its size cannot be asked for.

    def read(self, start: int, nbytes: int) -> np.ndarray:
        parts = [np.frombuffer(part, np.uint8) for part in self._parts(start, nbytes)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    @contextlib.contextmanager
    def opened(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Copies the range to disk: whoever reads columns reads each byte several times."""
        with self._lock:
            if start not in self._spooled:
                if len(self._spooled) == _SPOOLED:
                    del self._spooled[next(iter(self._spooled))]
                with contextlib.ExitStack() as stack:
                    file = stack.enter_context(tempfile.TemporaryFile())
                    file.writelines(self._parts(start, nbytes))
                    file.flush()
                    stack.pop_all()  # The file is complete; one that is not is closed.
                self._spooled[start] = file
            file = self._spooled[start]
        yield file.fileno(), 0

    def _parts(self, start: int, nbytes: int) -> Iterator[bytes]:
        for at in range(start, start + nbytes, _stream.AT_ONCE):
            stop = min(at + _stream.AT_ONCE, start + nbytes)
            yield self.bucket.read_range(self.name, at, stop)

    def _has(self, at: int) -> bool:
        try:
            return bool(self.bucket.read_range(self.name, at, at + 1))
        except CheckpointError:
            return False


WeightFile = LocalFile | BucketFile


def find(who: str, path: str | os.PathLike[str]) -> WeightFile:
    """The file of a path or URL, or the one that Hugging Face's loader takes in a directory."""
    if (bucket := Bucket.of(who, path)) is not None:
        above, _, name = bucket.prefix.rpartition("/")
        file = BucketFile(dataclasses.replace(bucket, prefix=above), name)
        if name and not file.bucket.cut_short({name: 1}):
            return file
        missing = bucket.cut_short(dict.fromkeys(_NAMES, 1))
        if names := [x for x in _NAMES if x not in missing]:
            return BucketFile(bucket, names[0])
        raise CheckpointError(message(
            f"{who} {bucket}", f"there is no object {bucket}, and no {' or '.join(_NAMES)} below it",
            "An object is read, or of a directory one of these.", "Correct the URL."))  # fmt: skip
    if not os.path.isdir(path):
        return LocalFile(Path(path))
    if found := [Path(path, name) for name in _NAMES if Path(path, name).exists()]:
        return LocalFile(found[0])
    raise CheckpointError(message(
        f"{who} {path}", f"there is no {' or '.join(_NAMES)} in it", "Of a directory one of these is read.",
        "Name the file, or its index."))  # fmt: skip


def read_part(
    file: WeightFile, start: int, shape: Sequence[int], dtype: np.dtype, index: Sequence[slice]
) -> np.ndarray:
    """A part of an array that begins at `start`, read contiguous piece by piece.

    Nothing is cached: neighbouring columns come from the system's cache.
    """
    box = [range(*x.indices(size)) for x, size in zip(index, shape, strict=True)]
    each = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    # Later dims are read whole.
    last = max((i for i, size in enumerate(shape) if len(box[i]) < size), default=0)
    sizes, width = [*map(len, box)], dtype.itemsize * math.prod(map(len, box[last:]))
    begins = np.array([sum(step * side.start for step, side in zip(each, box, strict=True))])
    for step, size in zip(each[:last], sizes, strict=False):
        begins = np.add.outer(begins, step * np.arange(size)).reshape(-1)
    if len(begins) == 1:
        return file.read(start + int(begins[0]), width).view(dtype).reshape(sizes)
    # Column-major, which is the order in which columns are used.
    made = np.empty((width // dtype.itemsize, len(begins)), dtype)
    tile = np.empty((TILE, width), np.uint8)
    with file.opened(start, math.prod(shape) * dtype.itemsize) as (fd, at):
        for i in range(0, len(begins), TILE):
            rows = tile[: len(begins) - i]
            for row, begin in zip(rows, begins[i : i + TILE].tolist(), strict=True):
                _check(file, start + begin, width, _fill(fd, row, at + begin))
            made[:, i : i + TILE] = rows.view(dtype).T
    return made.T.reshape(sizes)


def _fill(fd: int, data: np.ndarray, at: int) -> int:
    """Reads bytes into `data`, and returns how many there were; one `preadv` may read fewer."""
    done = 0
    while done < data.size and (num := os.preadv(fd, [data[done:].data], at + done)):
        done += num
    return done


def _check(file: WeightFile, start: int, nbytes: int, found: int) -> None:
    if found < nbytes:
        raise CheckpointError(message(
            str(file), f"it has no bytes {start} to {start + nbytes}", "It is a safetensors file.",
            "It is damaged or incomplete, or was replaced meanwhile: get it again."))  # fmt: skip
