# SPDX-License-Identifier: Apache-2.0
"""`FileStorage`: a stored leaf in files, one for each device of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jzero.offload.memory._leaf_array import storage_of
from jzero.offload.memory._nvme_store import NVMeStore, StoreSpec, TileReader
from jzero.offload.memory._storage import HostPlacement, Parts, Storage, consumed, sizes_of


class FileStorage(Storage):
    """A leaf in files of the devices' host, until the next step; each use reads them."""

    where = "in files"

    def __init__(self, placement: HostPlacement, store: NVMeStore, name: str):
        """A leaf, by its name, of the step that the files have, or are about to have."""
        self.placement = placement
        self._store: NVMeStore | None = store
        self._name, self._step = name, store.newest

    @property
    def store(self) -> NVMeStore:
        """The files that it is in; raises a `StateError` if a step has consumed it."""
        store = self._store  # Read once: a step of another thread may consume it at any line.
        if store is None or store.newest != self._step:
            raise consumed(self)
        return store

    @property
    def aval(self) -> Any:
        store = self._store
        return self.placement, None if store is None else store.spec.layouts

    def renewed(self) -> FileStorage:
        """The same leaf after a step; this one is then deleted."""
        assert self._store is not None
        renewed = FileStorage(self.placement, self._store, self._name)
        self.delete()
        return renewed

    def delete(self) -> None:
        self._store = None

    def is_deleted(self) -> bool:
        store = self._store
        return store is None or store.newest != self._step

    def parts(self, reader: TileReader | None = None) -> Parts:
        """Each part, once; they can be read until the next step, or as long as `reader` pins this one."""
        store, boxes = self.store, self.placement.boxes()
        reader = reader or store.files
        found = {
            box: NVMePart(store, file, self._name, tuple(sizes_of(box)), self.dtype, reader)
            for file, box in reversed([*enumerate(boxes)])
        }
        return [(box, found[box]) for box in dict.fromkeys(boxes)]

    @property
    def buffer_bytes(self) -> int:
        return self.store.buffer_bytes(self._name)

    def pieces(self, file: int, start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Ranges of about `nbytes` in bytes `start` to `stop` of a device's part, each read by itself."""
        first, last = start, start
        for place in self.store.spec.places(file, self._name, start, stop):
            end = min(stop, place.extent.start + place.extent.nbytes)
            if end - first > nbytes and last > first:
                yield first, last
                first = last
            last = end
        if last > first:
            yield first, last

    def read_range(
        self, out: np.ndarray, file: int, start: int, buffer: np.ndarray | None = None
    ) -> None:
        """Reads bytes of the part of the device `file`, from `start` on; see `NVMeStore.read_range`."""
        store = self.store
        store.read_range(out, file, self._name, start, store.files, buffer)


class NVMePart:
    """One device's part of a leaf: an array, as NumPy reads it."""

    def __init__(
        self, store: NVMeStore, file: int, name: str, shape: tuple[int, ...], dtype: np.dtype,
        reader: TileReader,
    ):  # fmt: skip
        self._store, self._file, self._name, self._reader = store, file, name, reader
        self.shape, self.dtype = shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)
        return values if dtype is None else values.astype(dtype, copy=False)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the rows of an index, and takes the index of them."""
        if not index:
            return np.asarray(self)
        rows, others = index[0], index[1:]
        return self._rows(rows.start, rows.stop)[(slice(None), *others)]

    def _rows(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, *self.shape[1:]), self.dtype)
        out = values.reshape(-1).view(np.uint8)
        if len(out):
            first = start * (len(out) // len(values))
            self._store.read_range(out, self._file, self._name, first, self._reader)
        return values


def is_in_files(x: Any, placement: HostPlacement | None, spec: StoreSpec | None) -> bool:
    """Whether a leaf is in files with this spec already; in any files, if it is None."""
    storage = storage_of(x)
    if not isinstance(storage, FileStorage):
        return False
    if spec is None:
        return storage.placement == placement
    return bool(storage.aval == (placement, spec.layouts))
