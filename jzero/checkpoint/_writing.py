# SPDX-License-Identifier: Apache-2.0
"""Leaves are written: the true part of each shard, in chunks with checksums."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import type_handlers
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals as CommitFuture

from jzero._in_turn import groups
from jzero.checkpoint import _ocdbt, _reading
from jzero.checkpoint._chunks import chunk_shape
from jzero.checkpoint._fragments import Fragments
from jzero.checkpoint._seal import StoredLeaf
from jzero.offload.memory._away_array import AwayArray
from jzero.offload.memory._nvme_array import NVMeArray, NVMePart
from jzero.offload.memory._padded import PaddedArray
from jzero.offload.memory._pinned_leaf import is_pinned, view
from jzero.offload.nvme._files import Pin

Array: TypeAlias = jax.Array | PaddedArray | AwayArray
Box: TypeAlias = tuple[slice, ...]

# Bytes of leaves that a save writes in one transaction: it makes one new root of the tree that is on disk,
# waits for the disk, and holds what is written in it, compressed, until it is committed.
_TOGETHER = 2**28


class LatePart(NamedTuple):
    """A part of a leaf in files, which is read when it is written.

    Attributes:
      part: it, with its padding.
      shape: its shape without.
    """

    part: NVMePart
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.part.dtype.itemsize

    def read(self) -> np.ndarray:
        return np.asarray(self.part)[tuple(map(slice, self.shape))]


class WrittenLeaf(NamedTuple):
    """What this process writes of a leaf.

    Attributes:
      spec: the array on disk, for tensorstore.
      info: what Orbax says of it.
      parts: where in the leaf, and what; on the host, or in files.
      pin: keeps what is in files, while steps go on.
    """

    spec: dict[str, Any]
    info: Any
    parts: list[tuple[Box, np.ndarray | LatePart]]
    pin: Pin | None = None

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, data in self.parts)

    def release(self) -> None:
        """Lets go of the copies on the host, and of what is in files."""
        self.parts.clear()
        if self.pin:
            self.pin.release()

    @classmethod
    def of(cls, x: Array, info: Any) -> WrittenLeaf:
        """Of a leaf that the devices hold together, each a part of it."""
        spec = write_spec(info, x.shape, _shard_shape(x), x.dtype)
        pin = x.store.files.pin() if isinstance(x, NVMeArray) else None
        parts = [_cut(index, data, x.shape) for index, data in _own_parts(x, pin)]
        return cls(spec, info, [part for part in parts if part is not None], pin)

    @classmethod
    def of_copy(cls, x: Any, info: Any) -> WrittenLeaf:
        """Of a number or a NumPy array, which every process has whole, and its owner may change."""
        x = np.array(x)
        spec = write_spec(info, x.shape, x.shape, x.dtype)
        whole = tuple(slice(0, size) for size in x.shape)
        return cls(spec, info, [(whole, x)] if jax.process_index() == 0 else [])


class Writing:
    """What is being written, for whoever completes it.

    Attributes:
      leaves: the type on disk of each leaf, by its name there.
      fragments: parts of chunks of which other processes have the rest.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, StoredLeaf] = {}
        self.fragments = Fragments()
        self._failure: BaseException | None = None

    def futures(self, leaves: Sequence[WrittenLeaf]) -> list[Any]:
        """Starts to write them, in the background."""
        for leaf in leaves:
            self.note(leaf.info.name, leaf.spec)
        return [CommitFuture(self.noted(_write(leaves, self.fragments)), name="write")]

    async def noted(self, work: Coroutine[Any, Any, None]) -> None:
        """Does it; what goes wrong is kept, where Orbax's threads would print it."""
        try:
            await work
        except BaseException as error:
            self._failure = error

    def raise_failure(self) -> None:
        """Raises what went wrong, once all futures are done."""
        if self._failure is not None:
            raise self._failure

    def note(self, name: str, spec: dict[str, Any]) -> StoredLeaf:
        """Notes the type of a leaf; it."""
        found = spec["metadata"]
        chunks = found["chunk_grid"]["configuration"]["chunk_shape"]
        self.leaves[name] = StoredLeaf(tuple(found["shape"]), spec["dtype"], tuple(chunks))
        return self.leaves[name]


def write_spec(
    info: Any, shape: Sequence[int], shard_shape: Sequence[int], dtype: Any
) -> dict[str, Any]:
    """The array on disk, for tensorstore: of chunks into which a shard can be cut."""
    spec = type_handlers.get_json_tspec_write(
        info, info.is_ocdbt_checkpoint, shape, shape, dtype, jax.process_index()
    )
    spec["metadata"] = metadata(shape, chunk_shape(shape, shard_shape, dtype.itemsize))
    return spec


def _shard_shape(x: Array) -> tuple[int, ...]:
    """The shape of each device's part, padding included."""
    if isinstance(x, AwayArray):
        return x.at_rest.shard_shape(x.padded_shape)
    x = x.padded if isinstance(x, PaddedArray) else x
    return x.sharding.shard_shape(x.shape)


def _own_parts(x: Array, pin: Pin | None = None) -> list[tuple[Box, Any]]:
    """The parts that this process writes, and where they are: the first copy of each."""
    if isinstance(x, AwayArray):
        found = x.own_parts(x.parts_by(pin) if pin and isinstance(x, NVMeArray) else None)
        return [(tuple(slice(*ends) for ends in box), data) for box, data in found]
    shards = (x.padded if isinstance(x, PaddedArray) else x).addressable_shards
    return [(shard.index, shard.data) for shard in shards if shard.replica_id == 0]


def start_copies(x: Array) -> None:
    for _, data in _own_parts(x):
        if isinstance(data, jax.Array) and not is_pinned(data):
            data.copy_to_host_async()


def _cut(
    index: Sequence[slice], data: jax.Array | np.ndarray | NVMePart, shape: Sequence[int]
) -> tuple[Box, np.ndarray | LatePart] | None:
    """A part on the host and its place, without padding; None if it is all padding."""
    starts = [part.start or 0 for part in index]
    stops = [min(start + n, size) for start, n, size in zip(starts, data.shape, shape, strict=True)]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if min(lengths, default=1) <= 0:
        return None
    place = tuple(map(slice, starts, stops))
    if isinstance(data, NVMePart):
        return place, LatePart(data, tuple(lengths))
    overwritten = is_pinned(data) or isinstance(data, np.ndarray)
    values = view(jax.block_until_ready(data)) if is_pinned(data) else np.asarray(data)
    values = values[tuple(slice(n) for n in lengths)]
    # The next step overwrites it, while it is being written.
    return place, values.copy() if overwritten else values


async def _write(leaves: Sequence[WrittenLeaf], fragments: Fragments) -> None:
    try:
        for group in groups(leaves, _TOGETHER):
            async with _ocdbt.transaction() as together:
                work = [_write_leaf(leaf, fragments, together) for leaf in group]
                await _reading.each(work, [leaf.info.name for leaf in group])
            for leaf in group:
                leaf.release()
    finally:
        for leaf in leaves:  # Steps wait for what is in files.
            leaf.release()


async def _write_leaf(leaf: WrittenLeaf, fragments: Fragments, transaction: Any) -> None:
    await leaf.info.await_path_creation()
    options = dict(open=True, context=leaf.info.ts_context, transaction=transaction)
    if jax.process_index() == 0:  # All would make the same array.
        await tensorstore.open(leaf.spec, create=True, **options)
    store = await tensorstore.open(leaf.spec, assume_metadata=True, **options)
    parts = [
        (index, await asyncio.to_thread(data.read) if isinstance(data, LatePart) else data)
        for index, data in leaf.parts
    ]
    # Nobody changes `data`: it belongs to a jax.Array, or was copied.
    writes = [
        store[index].write(data, can_reference_source_data_indefinitely=True)
        for index, data in fragments.split_off(leaf.spec, leaf.info, parts)
    ]
    await _reading.all_of(writes)


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
