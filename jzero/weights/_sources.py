# SPDX-License-Identifier: Apache-2.0
"""Parts of a file that is read: one on disk, or an object in a bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero.checkpoint import _stream
from jzero.checkpoint._bucket import Bucket
from jzero.offload.memory import _available


@dataclasses.dataclass
class BucketFile:
    """An object of a bucket, read in ranges."""

    bucket: Bucket
    name: str
    _spooled: tuple[int, Any] | None = (
        None  # where in it a tensor begins that is on disk, and the file
    )

    def __str__(self) -> str:
        return str(self.bucket / self.name)

    def read(self, start: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, _stream.AT_ONCE):
            stop = min(at + _stream.AT_ONCE, nbytes)
            found = self.bucket.read_range(self.name, start + at, start + stop)
            data[at:stop] = np.frombuffer(found, np.uint8)
        return data

    def has(self, start: int) -> bool:
        """Whether it has a byte there."""
        try:
            return len(self.bucket.read_range(self.name, start, start + 1)) == 1
        except CheckpointError:
            return False

    def spooled(self, start: int, nbytes: int) -> Any:
        """A file of some bytes, for those who read them several times; until they ask for others."""
        if self._spooled is None or self._spooled[0] != start:
            self._spooled = start, tempfile.TemporaryFile()
            for at in range(0, nbytes, _stream.AT_ONCE):
                self._spooled[1].write(
                    self.read(start + at, min(_stream.AT_ONCE, nbytes - at)).tobytes()
                )
            self._spooled[1].flush()
        return self._spooled[1]


WeightFile = Path | BucketFile


def beside(source: WeightFile, name: str) -> WeightFile:
    """Another file of the same directory."""
    return source.parent / name if isinstance(source, Path) else BucketFile(source.bucket, name)


def find(who: str, path: str | os.PathLike[str]) -> WeightFile:
    """The file of a path or a URL."""
    bucket = Bucket.of(who, path)
    if bucket is None:
        return Path(path)
    above, _, name = bucket.prefix.rpartition("/")
    return BucketFile(dataclasses.replace(bucket, prefix=above), name)


def read_whole(who: str, source: WeightFile) -> bytes:
    """A small file.

    Raises:
      CheckpointError: it cannot be read, or there is none.
    """
    if isinstance(source, Path):
        return _json.read_bytes(who, source)
    found = source.bucket.read(source.name)
    if found is None:
        raise CheckpointError(message(
            who, f"there is no {source}", "It is a safetensors file, or an index of some.",
            "Correct its name."))  # fmt: skip
    return found.data


def size(source: WeightFile) -> int | None:
    """Bytes of a file; of an object nobody says."""
    if isinstance(source, BucketFile):
        return None
    with _json.open_regular(source) as file:
        return os.fstat(file.fileno()).st_size


def check_end(source: WeightFile, end: int) -> None:
    """That an object ends there.

    Raises:
      Malformed: it ends elsewhere.
    """
    if isinstance(source, BucketFile) and (source.has(end) or not source.has(end - 1)):
        raise _json.Malformed(f"its tensors end at byte {end}, and it does not")


def read(source: WeightFile, start: int, nbytes: int) -> np.ndarray:
    """Some bytes. Nothing is mapped: a file that becomes shorter is an error, and no SIGBUS."""
    if isinstance(source, BucketFile):
        return source.read(start, nbytes)
    with _json.open_regular(source) as file:
        return np.fromfile(file, np.uint8, nbytes, offset=start)


def read_part(
    source: WeightFile, start: int, shape: Sequence[int], dtype: np.dtype, index: Sequence[slice]
) -> np.ndarray:
    """A part of an array that begins at `start`: of whole rows, or of columns."""
    if not shape:
        return read(source, start, dtype.itemsize).view(dtype).reshape(())
    row = dtype.itemsize * math.prod(shape[1:])
    first, stop, _ = index[0].indices(shape[0])
    cuts = [cut.indices(size)[:2] for cut, size in zip(index[1:], shape[1:], strict=True)]
    if all(cut == (0, size) for cut, size in zip(cuts, shape[1:], strict=True)):
        data = read(source, start + first * row, (stop - first) * row)
        return data.view(dtype).reshape(stop - first, *shape[1:])
    each = dtype.itemsize * math.prod(shape[2:])
    low, high = (each * end for end in cuts[0])
    panel = panels.columns(source, start + first * row, (stop - first, row), (low, high), each)
    part = panel.view(dtype).reshape(stop - first, -1, *shape[2:])
    return part[(slice(None), slice(None), *(slice(*cut) for cut in cuts[1:]))].copy()


_PANEL, _PANELS = 2**29, 2**30  # bytes of one panel, and of all that are kept
_SHORT = 1024  # bytes; shorter parts of rows are not read one by one


class Panels:
    """Columns of tensors, of which a leaf's next rows take some more: a file is read about once.

    They take at most `_PANELS` bytes, and each a quarter of the memory that is available.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int, int], tuple[int, int, np.ndarray]] = {}

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def columns(
        self, source: WeightFile, start: int, shape: tuple[int, int], columns: tuple[int, int], each: int
    ) -> np.ndarray:  # fmt: skip
        """Some columns of the bytes [rows, row] from `start`, which are multiples of `each`."""
        (rows, row), (low, high) = shape, columns
        key = str(source), start, rows
        with self._lock:
            first, last, data = self._kept.get(key, (0, 0, np.empty((rows, 0), np.uint8)))
            if not first <= low <= high <= last:
                self._kept.pop(key, None)
                left = _available.available()
                most = _PANEL if left is None else min(_PANEL, left // 4)
                width = max(most // max(rows, 1) // each * each, high - low)
                first, last = (0, row) if width >= row else (low, min(low + width, row))
                while self._kept and (
                    rows * (last - first) + sum(x.nbytes for *_, x in self._kept.values()) > _PANELS
                ):
                    del self._kept[next(iter(self._kept))]
                data = _read_columns(source, start, shape, first, last)
                self._kept[key] = first, last, data
        return np.ascontiguousarray(data[:, low - first : high - first])


panels = Panels()  # of the imports of this process


def _read_columns(
    source: WeightFile, start: int, shape: tuple[int, int], first: int, last: int
) -> np.ndarray:
    (rows, row), width = shape, last - first
    if width == row:
        return read(source, start, rows * row).reshape(shape)
    data = np.empty((rows, width), np.uint8)
    with contextlib.ExitStack() as stack:
        if isinstance(source, BucketFile):
            file, start = source.spooled(start, rows * row), 0
        else:
            file = stack.enter_context(_json.open_regular(source))
        each = 1 if width >= _SHORT else max(_stream.AT_ONCE // row, 1)
        for i in range(0, rows, each):
            some = data[i : i + each]
            at, nbytes = start + i * row, (len(some) - 1) * row + last
            if each == 1:
                at, nbytes = at + first, width
            found = os.pread(file.fileno(), nbytes, at)
            if len(found) < nbytes:
                raise OSError(errno.EIO, f"{source} became shorter")
            if each == 1:
                some[0] = np.frombuffer(found, np.uint8)
            else:
                found = found.ljust(len(some) * row, b"\0")
                some[:] = np.frombuffer(found, np.uint8).reshape(-1, row)[:, first:last]
    return data
