# SPDX-License-Identifier: Apache-2.0
"""Writes leaves: the true part of each shard, in chunks with checksums, within a memory budget.

[Note: memory of a save] A save holds copies of what the next step overwrites until they are written, and the
compressed chunks of a transaction until it commits. What does not fit is copied and written part by part
before the state may be consumed; then the remainder is copied at once. A transaction has an eighth of
`save_bytes` (or one chunk) for its values, and as much for its chunks. tensorstore's cache of tree nodes has
an eighth, at most 100 MB; the copies have what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from jzero._in_turn import groups
from jzero.checkpoint import _ocdbt, _orbax, _reading
from jzero.checkpoint._chunks import Box, chunk_shape, cut, parts_of_chunks
from jzero.checkpoint._orbax import LeafSource
from jzero.offload.memory._file_storage import FileStorage, NVMePart
from jzero.offload.memory._leaf_array import storage_of
from jzero.offload.memory._pinned_leaf import is_pinned, view
from jzero.offload.memory._storage import HostBox, Storage, box_of
from jzero.offload.nvme._files import Pin, TileFiles

SAVE_BYTES = 2**31
# At most in one transaction, each of which writes a new root of the tree, and waits for the disk.
_TOGETHER = 2**28


class _Part:
    """`data[inside]`, which is written to `box` of the leaf `name`; a box of None only creates the leaf."""

    def __init__(
        self, name: str, box: Box | None, data: Any = None, inside: Box = (), is_cut: bool = False
    ):
        self.name, self.box, self.nbytes = name, box, 0
        if box is not None:
            self.nbytes = math.prod(_sizes(box)) * np.dtype(data.dtype).itemsize
        self.is_late = isinstance(data, NVMePart | LeafSource)  # It is read when it is written.
        self._data, self._inside, self._is_cut = data, inside, is_cut
        self._values: Any = None

    def start(self) -> None:
        if isinstance(self._data, jax.Array) and not self._is_cut and _is_copied(self._data):
            # JAX keeps what it copies of an array as long as the array; this one is ours.
            x = self._data
            self._data = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
            self._data.copy_to_host_async()

    def values(self) -> np.ndarray:
        """Its values, on the host, where nothing changes them; copied once."""
        if self._data is not None:
            self._values = _on_host(self._data, self._inside, self._is_cut)
            self._data = None
        return self._values

    def release(self) -> None:
        self._values = self._data = None


class Writing:
    """What a process writes of a checkpoint, for process 0 to complete it."""

    def __init__(self, directory: Path, save_bytes: int = SAVE_BYTES) -> None:
        """Writes into the directory of a tree; for `save_bytes` see [Note: memory of a save]."""
        self._directory = directory
        self._together = min(_TOGETHER, max(save_bytes // 8, 1))
        cache = min(_ocdbt.CACHE_BYTES, save_bytes // 8)
        self._room = save_bytes - 2 * self._together - cache
        self._context = _ocdbt.context(cache)
        self._parts: list[_Part] = []
        self._specs: dict[str, dict[str, Any]] = {}
        self._pins: dict[TileFiles, Pin] = {}  # keep what is in files, while steps go on
        # By the leaf's name: its shape and that of its chunks, and the parts of chunks that processes share.
        self.chunks: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self.shared: dict[str, list[tuple[int, Box]]] = {}

    def take(self, tree: Any) -> None:
        """Writes what describes a tree, and finds this process's parts of its leaves."""
        for name, x in _orbax.write_tree(self._directory, tree):
            if isinstance(x, jax.Array) and _reading.is_key(x.dtype):
                x = jax.random.key_data(x)
            self._take(name, x if isinstance(x, jax.Array | LeafSource) else np.asarray(x))

    def write(self, copied: Callable[[], Any] = lambda: None) -> None:
        """Writes them; calls `copied` when the tree may be consumed."""
        with contextlib.ExitStack() as stack:
            for pin in self._pins.values():
                stack.enter_context(pin)
            stack.callback(self._parts.clear)
            asyncio.run(self._write(copied))

    def complete(self, base: Mapping[str, Any] | None = None) -> None:
        """Process 0 merges what all have written into one store; `base` is its place in a bucket, if any."""
        base = base or _ocdbt.directory(self._directory)
        asyncio.run(_ocdbt.merge(base, range(jax.process_count()), self.shared))
        asyncio.run(_ocdbt.check_complete(base, self.chunks))

    def _take(self, name: str, x: Any) -> None:
        dtype, layout = np.dtype(x.dtype), _layout(x)
        shard = x.shape if layout is None else layout[1].shard_shape(layout[0])
        chunks = chunk_shape(x.shape, shard, dtype.itemsize)
        own = _ocdbt.directory(self._directory / _ocdbt.part_of(jax.process_index()))
        described = {"dtype": dtype.name, "metadata": metadata(x.shape, chunks)}
        self._specs[name] = _ocdbt.array_spec(own, name) | described
        self.chunks[name] = x.shape, chunks
        if layout is not None and (pieces := _pieces_of_processes(x.shape, *layout, chunks)):
            self.shared[name] = pieces
        # Only rows can be read of what is in a file.
        cuts = (*chunks[:1], *x.shape[1:]) if isinstance(x, LeafSource) else chunks
        parts = []
        for box, data in self._own_parts(x):
            true = _true(box, x.shape)
            boxes = [*cut(true, cuts, dtype.itemsize, self._together)] if true is not None else []
            for each in boxes:
                inside = tuple(
                    slice(a.start - b.start, a.stop - b.start)
                    for a, b in zip(each, box, strict=True)
                )
                parts.append(_Part(name, each, data, inside, is_cut=len(boxes) > 1))
        self._parts += parts or [_Part(name, None)]

    def _own_parts(self, x: Any) -> list[tuple[Box, Any]]:
        """The parts that this process writes, and where they are: the first copy of each."""
        x = storage_of(x)
        if isinstance(x, FileStorage):
            if (files := x.store.files) not in self._pins:
                self._pins[files] = files.pin()
            parts = x.own_parts(x.parts(self._pins[files]))
            return [(_slices(box), data) for box, data in parts]
        if isinstance(x, Storage):
            return [(_slices(box), data) for box, data in x.own_parts(x.parts())]
        if isinstance(x, jax.Array):
            shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
            return [(_slices(box_of(shard.index, x.shape)), shard.data) for shard in shards]
        return [(_slices([(0, n) for n in x.shape]), x)] if jax.process_index() == 0 else []

    async def _write(self, copied: Callable[[], Any]) -> None:
        """Writes the first parts until the others fit, copies these, and writes them."""
        first, room = len(self._parts), self._room
        while first:
            part = self._parts[first - 1]
            room -= 0 if part.is_late else part.nbytes
            if room < 0:
                break
            first -= 1
        for group in groups(self._parts[:first], self._together):
            _copy(group)
            await self._write_group(group)
        _copy(self._parts[first:])
        copied()
        for group in groups(self._parts[first:], self._together):
            await self._write_group(group)

    async def _write_group(self, group: Sequence[_Part]) -> None:
        by_leaf: dict[str, list[_Part]] = {}
        for part in group:
            by_leaf.setdefault(part.name, []).append(part)
        async with _ocdbt.transaction() as together:
            work = [self._write_parts(*each, together) for each in by_leaf.items()]
            await _reading.each(work, [*by_leaf])
        for part in group:
            part.release()
        # Each thread's arena keeps what its thread has compressed, until glibc is told.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    async def _write_parts(
        self, name: str, parts: Sequence[_Part], transaction: tensorstore.Transaction
    ) -> None:
        is_first = jax.process_index() == 0  # All would make the same array.
        how: Any = {"create": True} if is_first else {"assume_metadata": True}
        store = await tensorstore.open(
            self._specs[name], open=True, context=self._context, transaction=transaction, **how
        )

        async def write(part: _Part) -> None:
            values = await asyncio.to_thread(part.values) if part.is_late else part.values()
            # Nobody changes them: they belong to a jax.Array, or were copied.
            await store[part.box].write(values, can_reference_source_data_indefinitely=True)

        await _reading.all_of([write(part) for part in parts if part.box is not None])


def metadata(shape: Sequence[int], chunks: Sequence[int]) -> dict[str, Any]:
    """Zarr 3 array metadata: compressed as Orbax does, with a checksum of the data in each chunk."""
    return {
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
        ],
    }


def _copy(parts: Sequence[_Part]) -> None:
    now = [part for part in parts if not part.is_late]
    for part in now:
        part.start()
    for part in now:
        part.values()


def _layout(x: Any) -> tuple[tuple[int, ...], Any] | None:
    """The padded shape of a leaf and its sharding; None for what each process has whole."""
    x = storage_of(x)
    return (x.shape, x.sharding) if isinstance(x, jax.Array | Storage) else None


def _pieces_of_processes(
    shape: Sequence[int], padded: Sequence[int], sharding: Any, chunks: Sequence[int]
) -> list[tuple[int, Box]]:
    """The boxes of chunks that processes share, as where a shard has a large prime size."""
    if jax.process_count() == 1:
        return []
    owners: dict[HostBox, int] = {}
    for device, index in sharding.devices_indices_map(tuple(padded)).items():
        owners.setdefault(box_of(index, padded), device.process_index)
    pieces = [
        (process, piece)
        for ends, process in owners.items()
        if (box := _true(_slices(ends), shape)) is not None
        for piece in parts_of_chunks(box, shape, chunks)
    ]
    return pieces if len({process for process, _ in pieces}) > 1 else []


def _is_copied(x: jax.Array) -> bool:
    """Whether NumPy has a copy of it, and not a view."""
    return not is_pinned(x) and next(iter(x.devices())).platform != "cpu"


def _on_host(data: Any, inside: Box, is_cut: bool) -> np.ndarray:
    """Some of a leaf's part on the host, where nothing changes it."""
    if isinstance(data, LeafSource):  # Nobody else has what it reads.
        return data.read(inside[0] if is_cut else ...)
    if isinstance(data, NVMePart):
        return data.read(inside)
    if not isinstance(data, jax.Array):
        return data[inside].copy()
    if is_pinned(data):  # The next step overwrites it, while it is being written.
        return view(jax.block_until_ready(data))[inside].copy()
    if not is_cut:
        return np.asarray(data)[inside]
    starts = [side.start for side in inside]
    with jax.transfer_guard("allow"), jax.set_mesh(None):  # It is cut on its device.
        return np.asarray(jax.lax.dynamic_slice(data, starts, _sizes(inside)))


def _true(box: Box, shape: Sequence[int]) -> Box | None:
    """A part without padding; None if it is all padding."""
    sides = zip(box, shape, strict=True)
    cut_off = tuple(slice(side.start, min(side.stop, size)) for side, size in sides)
    return cut_off if min(_sizes(cut_off), default=1) > 0 else None


def _slices(ends: Sequence[tuple[int, int]]) -> Box:
    return tuple(slice(*pair) for pair in ends)


def _sizes(box: Box) -> list[int]:
    return [side.stop - side.start for side in box]
