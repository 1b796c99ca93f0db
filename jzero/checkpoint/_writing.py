# SPDX-License-Identifier: Apache-2.0
"""Leaves are written: the true part of each shard, in chunks with checksums, within so much memory.

[Note: memory of a save] Memory holds copies of what the next step overwrites, until they are written, and of
what is written in one transaction its chunks too, compressed, until it is committed. What is more than there
is room for is copied and written in turn, before the state may be consumed; then the rest is copied. A
transaction has an eighth of `save_bytes`, or one chunk: what it brings to the host and its chunks are a
quarter. Nodes of the store's tree that tensorstore keeps have an eighth, at most 100 MB; the rest of the
copies has what is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import tensorstore

from jzero._in_turn import groups
from jzero.checkpoint import _ocdbt, _orbax, _reading
from jzero.checkpoint._chunks import Box, chunk_shape, cut, parts_of_chunks
from jzero.checkpoint._orbax import LeafSource
from jzero.checkpoint._seal import StoredLeaf
from jzero.offload.memory._away_array import AwayArray
from jzero.offload.memory._nvme_array import NVMeArray, NVMePart
from jzero.offload.memory._padded import PaddedArray
from jzero.offload.memory._pinned_leaf import is_pinned, view
from jzero.offload.nvme._files import Pin

Array: TypeAlias = jax.Array | PaddedArray | AwayArray

SAVE_BYTES = 2**31
# The most that is written in one transaction: it makes one new root of the tree that is on disk, and waits
# for the disk.
_TOGETHER = 2**28


class _Leaf:
    """A leaf, as far as this process writes it.

    Attributes:
      name: Orbax's.
      spec: the array on disk, for tensorstore.
      pin: keeps what is in files, while steps go on.
      left: how many of its parts are not written.
    """

    def __init__(self, name: str, spec: dict[str, Any], pin: Pin | None = None):
        self.name, self.spec, self.pin, self.left = name, spec, pin, 0


class _Part:
    """A part of a leaf.

    Attributes:
      leaf: of which.
      box: where; None if there is only the leaf itself to write.
      nbytes: its bytes.
      is_late: whether it is in files, and read when it is written.
    """

    def __init__(
        self, leaf: _Leaf, box: Box | None, data: Any, inside: Box = (), is_cut: bool = False
    ):
        self.leaf, self.box = leaf, box
        self.nbytes = (
            math.prod(_sizes(box)) * np.dtype(data.dtype).itemsize if box is not None else 0
        )
        self.is_late = isinstance(data, NVMePart | LeafSource)
        # Of what, where in it, whether it is not all of that; then what is on the host.
        self._data, self._inside, self._is_cut = data, inside, is_cut
        self._values: Any = None
        leaf.left += 1

    def start(self) -> None:
        """Begins to bring an array to the host."""
        if isinstance(self._data, jax.Array) and not self._is_cut and _is_copied(self._data):
            # JAX keeps what it copies of an array as long as the array; this one is ours.
            x = self._data
            self._data = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
            self._data.copy_to_host_async()

    def values(self) -> np.ndarray:
        """What it is, on the host, where nobody changes it; it is brought there once."""
        if self._data is not None:
            self._values = _on_host(self._data, self._inside, self._is_cut)
            self._data = None
        return self._values

    def release(self) -> None:
        """Lets go of it; of the leaf's files, for which steps wait, with its last part."""
        self._values = self._data = None
        self.leaf.left -= 1
        if self.leaf.left == 0 and self.leaf.pin:
            self.leaf.pin.release()


class Writing:
    """What a process writes of a checkpoint, for whoever completes it.

    Attributes:
      leaves: the type on disk of each leaf, by its name there.
      shared: of chunks of which several processes have parts, whose and where these are, by the leaf.
    """

    def __init__(self, directory: Path, save_bytes: int = SAVE_BYTES) -> None:
        """Writes into a directory, within so much memory of the host.

        Args:
          directory: of the tree.
          save_bytes: see [Note: memory of a save].
        """
        self._directory = directory
        self._together = min(_TOGETHER, max(save_bytes // 8, 1))
        cache = min(_ocdbt.CACHE_BYTES, save_bytes // 8)
        self._room = save_bytes - 2 * self._together - cache
        self._context = _ocdbt.context(cache)
        self._parts: list[_Part] = []
        self.leaves: dict[str, StoredLeaf] = {}
        self.shared: dict[str, list[tuple[int, Box]]] = {}

    def take(self, tree: Any) -> None:
        """Writes what describes a tree, and finds this process's parts of its leaves."""
        for name, x in _orbax.write_tree(self._directory, tree):
            if isinstance(x, jax.Array) and _reading.is_key(x.dtype):
                x = jax.random.key_data(x)
            self._take(name, x if isinstance(x, Array | LeafSource) else np.asarray(x))

    def write(self, copied: Callable[[], Any] = lambda: None) -> None:
        """Writes them; calls `copied` when the tree may be consumed."""
        try:
            asyncio.run(self._write(copied))
        finally:
            for part in self._parts:  # An error may have come first.
                if part.leaf.pin:
                    part.leaf.pin.release()
            self._parts = []

    def complete(self, base: Mapping[str, Any] | None = None) -> None:
        """Makes one store of what all processes have written; process 0 does.

        Args:
          base: where it was copied to, for tensorstore; where it was written by default.
        """
        base = base or _ocdbt.directory(self._directory)
        asyncio.run(_ocdbt.merge(base, range(jax.process_count()), self.shared))
        asyncio.run(_ocdbt.check_complete(base, self.leaves))

    def _take(self, name: str, x: Any) -> None:
        dtype = np.dtype(x.dtype)
        chunks = chunk_shape(x.shape, _shard_shape(x), dtype.itemsize)
        own = _ocdbt.directory(self._directory / _ocdbt.part_of(jax.process_index()))
        spec = {**_ocdbt.array_spec(own, name), "dtype": dtype.name}
        leaf = _Leaf(name, spec | {"metadata": metadata(x.shape, chunks)})
        self.leaves[name] = StoredLeaf(tuple(x.shape), dtype.name, tuple(chunks))
        if pieces := _pieces_of_processes(x, chunks):
            self.shared[name] = pieces
        if isinstance(x, NVMeArray):
            leaf.pin = x.store.files.pin()
        # Only rows can be read of what is in a file.
        cuts = (*chunks[:1], *x.shape[1:]) if isinstance(x, LeafSource) else chunks
        for box, data in _own_parts(x, leaf.pin):
            boxes = [
                each for true in _true(box, x.shape)
                for each in cut(true, cuts, dtype.itemsize, self._together)
            ]  # fmt: skip
            for each in boxes:
                inside = tuple(
                    slice(a.start - b.start, a.stop - b.start)
                    for a, b in zip(each, box, strict=True)
                )
                self._parts.append(_Part(leaf, each, data, inside, is_cut=len(boxes) > 1))
        if not leaf.left:
            self._parts.append(_Part(leaf, None, None))

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
        by_leaf: dict[_Leaf, list[_Part]] = {}
        for part in group:
            by_leaf.setdefault(part.leaf, []).append(part)
        async with _ocdbt.transaction() as together:
            work = [self._write_parts(*each, together) for each in by_leaf.items()]
            await _reading.each(work, [leaf.name for leaf in by_leaf])
        for part in group:
            part.release()
        _give_back()

    async def _write_parts(
        self, leaf: _Leaf, parts: Sequence[_Part], transaction: tensorstore.Transaction
    ) -> None:
        is_first = jax.process_index() == 0  # All would make the same array.
        how: Any = {"create": True} if is_first else {"assume_metadata": True}
        store = await tensorstore.open(
            leaf.spec, open=True, context=self._context, transaction=transaction, **how
        )

        async def write(part: _Part) -> None:
            values = await asyncio.to_thread(part.values) if part.is_late else part.values()
            # Nobody changes them: they belong to a jax.Array, or were copied.
            await store[part.box].write(values, can_reference_source_data_indefinitely=True)

        await _reading.all_of([write(part) for part in parts if part.box is not None])


def _give_back() -> None:
    """Has the C library give back what is free: each thread's arena keeps what its thread compressed."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


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
    """Brings to the host what rests elsewhere than in files."""
    now = [part for part in parts if not part.is_late]
    for part in now:
        part.start()
    for part in now:
        part.values()


def _layout(x: Any) -> tuple[tuple[int, ...], Any] | None:
    """The shape of a leaf, padding included, and who has which part; None for what each process has whole."""
    if isinstance(x, AwayArray):
        return x.padded_shape, x.at_rest
    x = x.padded if isinstance(x, PaddedArray) else x
    return (x.shape, x.sharding) if isinstance(x, jax.Array) else None


def _shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of each device's part, padding included."""
    layout = _layout(x)
    return tuple(x.shape) if layout is None else layout[1].shard_shape(layout[0])


def _own_parts(x: Any, pin: Pin | None = None) -> list[tuple[Box, Any]]:
    """The parts that this process writes, and where they are: the first copy of each."""
    if isinstance(x, AwayArray):
        found = x.own_parts(x.parts_by(pin) if pin and isinstance(x, NVMeArray) else None)
        return [(tuple(slice(*ends) for ends in box), data) for box, data in found]
    x = x.padded if isinstance(x, PaddedArray) else x
    if isinstance(x, jax.Array):
        shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
        return [(_box(shard.index, x.shape), shard.data) for shard in shards]
    return [(_box((slice(None),) * len(x.shape), x.shape), x)] if jax.process_index() == 0 else []


def _pieces_of_processes(x: Any, chunks: Sequence[int]) -> list[tuple[int, Box]]:
    """What processes have of chunks that they share, as where a shard has a large prime size."""
    layout = _layout(x)
    if layout is None or jax.process_count() == 1:
        return []
    owners: dict[tuple[tuple[int, int], ...], int] = {}
    shape, sharding = layout
    for device, index in sharding.devices_indices_map(shape).items():
        ends = tuple(side.indices(size)[:2] for side, size in zip(index, shape, strict=True))
        owners.setdefault(ends, device.process_index)
    pieces = [
        (process, piece)
        for ends, process in owners.items()
        for box in _true(tuple(slice(*pair) for pair in ends), x.shape)
        for piece in parts_of_chunks(box, x.shape, chunks)
    ]
    return pieces if len({process for process, _ in pieces}) > 1 else []


def _is_copied(x: jax.Array) -> bool:
    """Whether NumPy has a copy of it, and not a view."""
    return not is_pinned(x) and next(iter(x.devices())).platform != "cpu"


def _on_host(data: Any, inside: Box, is_cut: bool) -> np.ndarray:
    """Some of a leaf's part on the host, where nobody changes it."""
    if isinstance(data, LeafSource):  # Nobody else has what it reads.
        return data.read(inside[0] if is_cut else ...)
    if isinstance(data, NVMePart):
        return data.read(inside)
    if is_pinned(data):  # The next step overwrites it, while it is being written.
        return view(jax.block_until_ready(data))[inside].copy()
    if not isinstance(data, jax.Array):
        return data[inside].copy()
    return _slice(data, inside) if is_cut else np.asarray(data)[inside]


def _slice(data: jax.Array, box: Box) -> np.ndarray:
    """Some of an array, cut on its device."""
    starts = [side.start for side in box]
    with jax.transfer_guard("allow"), jax.set_mesh(None):
        return np.asarray(jax.lax.dynamic_slice(data, starts, _sizes(box)))


def _true(box: Box, shape: Sequence[int]) -> list[Box]:
    """A part without padding; nothing if it is all padding."""
    cut_off = tuple(
        slice(side.start, min(side.stop, size)) for side, size in zip(box, shape, strict=True)
    )
    return [cut_off] if min(_sizes(cut_off), default=1) > 0 else []


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    pairs = zip(index, shape, strict=True)
    return tuple(slice(*side.indices(size)[:2]) for side, size in pairs)


def _sizes(box: Box) -> list[int]:
    return [side.stop - side.start for side in box]
