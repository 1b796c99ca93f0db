# SPDX-License-Identifier: Apache-2.0
"""Parts of a file that is read: one on disk, or an object in a bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, message
from jzero.checkpoint import _stream
from jzero.checkpoint._bucket import Bucket
from jzero.offload.memory import _available

_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
)  # Hugging Face's loader takes the first.
_PANEL, _PANELS = 2**29, 2**30  # bytes of columns of one tensor, and of all that are kept


@dataclasses.dataclass
class LocalFile:
    """A file on disk. Nothing is mapped: one that becomes shorter is an error, and no SIGBUS."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def beside(self, name: str) -> LocalFile:
        return LocalFile(self.path.parent / name)

    def whole(self, who: str) -> bytes:
        return _json.read_bytes(who, self.path)

    def ends_at(self, end: int) -> bool:
        with _json.open_regular(self.path) as file:
            return os.fstat(file.fileno()).st_size == end

    def read(self, start: int, nbytes: int) -> np.ndarray:
        with _json.open_regular(self.path) as file:
            return _all_of(self, start, nbytes, np.fromfile(file, np.uint8, nbytes, offset=start))

    @contextlib.contextmanager
    def opened(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """A descriptor, and where some bytes begin in what it is of."""
        with _json.open_regular(self.path) as file:
            yield file.fileno(), start


@dataclasses.dataclass
class BucketFile:
    """An object of a bucket, read in ranges."""

    bucket: Bucket
    name: str
    _spooled: tuple[int, Any] | None = None  # where bytes on disk begin in it, and the file

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
        return self._has(end - 1) and not self._has(end)  # Nobody says how many it has.

    def read(self, start: int, nbytes: int) -> np.ndarray:
        parts = [np.frombuffer(part, np.uint8) for part in self._parts(start, nbytes)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    @contextlib.contextmanager
    def opened(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """They are on disk from then on, until others are asked for."""
        if self._spooled is None or self._spooled[0] != start:
            self._spooled = start, tempfile.TemporaryFile()
            self._spooled[1].writelines(self._parts(start, nbytes))
            self._spooled[1].flush()
        yield self._spooled[1].fileno(), 0

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
    """The file of a path or a URL, or that which Hugging Face's loader takes of a directory.

    Raises:
      CheckpointError: the directory has none.
    """
    if (bucket := Bucket.of(who, path)) is not None:
        above, _, name = bucket.prefix.rpartition("/")
        return BucketFile(dataclasses.replace(bucket, prefix=above), name)
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
    """A part of an array that begins at `start`: of whole rows, or of columns."""
    if not shape:
        return file.read(start, dtype.itemsize).view(dtype).reshape(())
    row = dtype.itemsize * math.prod(shape[1:])
    first, stop, _ = index[0].indices(shape[0])
    cuts = [slice(*cut.indices(size)) for cut, size in zip(index[1:], shape[1:], strict=True)]
    if all(cut == slice(0, size, 1) for cut, size in zip(cuts, shape[1:], strict=True)):
        data = file.read(start + first * row, (stop - first) * row)
        return data.view(dtype).reshape(stop - first, *shape[1:])
    each = dtype.itemsize * math.prod(shape[2:])
    panel = panels.columns(
        file, start + first * row, (stop - first, row), (each * cuts[0].start, each * cuts[0].stop), each
    )  # fmt: skip
    part = panel.view(dtype).reshape(stop - first, -1, *shape[2:])
    return part[(slice(None), slice(None), *cuts[1:])].copy()


class Panels:
    """Columns of tensors, of which a leaf's next rows take some more: a file is read about once.

    They take at most `_PANELS` bytes, and each a quarter of the memory that is available.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int, int], tuple[int, np.ndarray]] = {}

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def columns(
        self, file: WeightFile, start: int, shape: tuple[int, int], columns: tuple[int, int], each: int
    ) -> np.ndarray:  # fmt: skip
        """Some columns of the bytes [rows, row] from `start`, which are multiples of `each`."""
        (rows, row), (low, high) = shape, columns
        key = str(file), start, rows
        with self._lock:
            first, data = self._kept.get(key, (0, np.empty((rows, 0), np.uint8)))
            if not first <= low <= high <= first + data.shape[1]:
                self._kept.pop(key, None)
                left = _available.available()
                most = _PANEL if left is None else min(_PANEL, left // 4)
                width = min(row, max(most // max(rows, 1) // each * each, high - low))
                first = min(low, row - width)
                while (
                    self._kept
                    and rows * width + sum(x.nbytes for _, x in self._kept.values()) > _PANELS
                ):
                    del self._kept[next(iter(self._kept))]
                data = _read_columns(file, start, shape, first, width)
                self._kept[key] = first, data
        return np.ascontiguousarray(data[:, low - first : high - first])


panels = Panels()  # of the imports of this process


def _read_columns(
    file: WeightFile, start: int, shape: tuple[int, int], first: int, width: int
) -> np.ndarray:
    rows, row = shape
    if width == row:
        return file.read(start, rows * row).reshape(shape)
    data = np.empty((rows, width), np.uint8)
    with file.opened(start, rows * row) as (fd, begin):
        for i in range(rows):
            found = os.pread(fd, width, begin + i * row + first)
            data[i] = _all_of(file, start + i * row + first, width, np.frombuffer(found, np.uint8))
    return data


def _all_of(file: WeightFile, start: int, nbytes: int, found: np.ndarray) -> np.ndarray:
    if len(found) < nbytes:
        raise CheckpointError(message(
            str(file), f"it has no bytes {start} to {start + nbytes}", "It is a safetensors file.",
            "It is damaged or incomplete, or was replaced meanwhile: get it again."))  # fmt: skip
    return found
