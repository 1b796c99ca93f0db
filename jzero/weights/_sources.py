# SPDX-License-Identifier: Apache-2.0
"""Parts of a file that is read: one on disk, or an object in a bucket."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero.checkpoint import _stream
from jzero.checkpoint._bucket import Bucket


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
    """A part of an array that begins at `start`: of whole rows, or of columns, a block of rows at a time."""
    if not shape:
        return read(source, start, dtype.itemsize).view(dtype).reshape(())
    row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    first, stop, _ = index[0].indices(shape[0])
    cuts = tuple(index[1:])
    whole = all(
        cut.indices(size)[:2] == (0, size) for cut, size in zip(cuts, shape[1:], strict=True)
    )
    each = max(stop - first if whole else _stream.AT_ONCE // max(row, 1), 1)
    file = None
    if not whole and isinstance(source, BucketFile) and row * shape[0] > _stream.AT_ONCE:
        file = source.spooled(start, row * shape[0])
    parts = []
    for at in range(first, max(stop, first + 1), each):
        rows = min(each, stop - at)
        if file is None:
            data = read(source, start + at * row, rows * row)
        else:
            file.seek(at * row)
            data = np.frombuffer(file.read(rows * row), np.uint8)
        part = data.view(dtype).reshape(rows, *shape[1:])
        # A copy: the block goes with this turn.
        parts.append(part if whole else part[(slice(None), *cuts)].copy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
