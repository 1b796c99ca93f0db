"""Orbax's handler for arrays, with checksums, and without the padding of leaves at rest.

What it writes is an ordinary Orbax checkpoint, for every reader of Orbax checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals as CommitFuture

from jzero._groups import groups
from jzero._host_array import HostArray
from jzero._padded import PaddedArray

Array: TypeAlias = jax.Array | PaddedArray | HostArray

# A reader decodes whole chunks, also for a small part of one; so other layouts read little in vain.
_CHUNK_BYTES = 16 * 2**20
# Bytes of leaves that a save writes in one transaction: it makes one new root of the tree that is on disk,
# waits for the disk, and holds what is written in it, compressed, until it is committed.
_TOGETHER = 2**28
# The same for the commands, which are to need little memory.
AT_ONCE = 2**26


class LeafErrors(Exception):
    """What went wrong with each leaf, by its name in the checkpoint."""

    def __init__(self, errors: dict[str, BaseException]):
        super().__init__("; ".join(f"{name}: {error}" for name, error in errors.items()))
        self.errors = errors


class _Leaf(NamedTuple):
    """What this process writes of a leaf.

    Attributes:
      spec: the array on disk, for tensorstore.
      info: what Orbax says of it.
      parts: where in the leaf, and what; on the host.
    """

    spec: dict[str, Any]
    info: Any
    parts: list[tuple[tuple[slice, ...], np.ndarray]]

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, data in self.parts)

    @classmethod
    def of(cls, x: Array, info: Any) -> _Leaf:
        spec = write_spec(info, x.shape, _shard_shape(x), x.dtype)
        parts = [_cut(index, data, x.shape) for index, data in _own_parts(x)]
        return cls(spec, info, [part for part in parts if part is not None])


class ArrayHandler(type_handlers.ArrayHandler):
    """Saves `jax.Array`s, `PaddedArray`s and `HostArray`s in their true shapes, every chunk with a checksum.

    Orbax's own writes chunks in which a flipped bit is restored as if it were right, and knows only
    shards of one size. Reading is Orbax's (it fills up with zeros), and again leaf by leaf if it fails, so
    that each failure has its leaf.
    """

    def __init__(self) -> None:
        super().__init__(enable_write_sharding_file=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        """Copies to the host, so that the next step may consume the values; writes in the background."""
        plain = [jax.random.key_data(x) if _is_key(x.dtype) else x for x in values]
        for x in plain:
            _start_copies(x)
        leaves = [_Leaf.of(x, info) for x, info in zip(plain, infos, strict=True)]
        return [CommitFuture(_write(leaves), name="write")]

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Shape, dtype and chunks of each leaf."""
        return await _named(super().metadata, infos)

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[jax.Array]:
        """Reads each leaf as its `ArrayRestoreArgs` say."""
        assert args is not None
        arrays = await _named(super().deserialize, infos, args)
        return [
            jax.random.wrap_key_data(x, impl=arg.dtype) if _is_key(arg.dtype) else x
            for x, arg in zip(arrays, args, strict=True)
        ]


def handler(concurrent_bytes: int | None = None) -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for pytrees, with ours for arrays.

    Args:
      concurrent_bytes: the most that is read at the same time.
    """
    arrays = ArrayHandler()
    types = {
        int: type_handlers.ScalarHandler(),
        float: type_handlers.ScalarHandler(),
        np.number: type_handlers.ScalarHandler(),
        np.ndarray: type_handlers.NumpyHandler(),
        str: type_handlers.StringHandler(),
        jax.Array: arrays,
        PaddedArray: arrays,
        HostArray: arrays,
    }
    return pytree_handler(types, concurrent_bytes)


def pytree_handler(
    types: Mapping[type, Any], concurrent_bytes: int | None = None
) -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for pytrees, with a handler for each type of leaf."""
    registry = type_handlers.create_type_handler_registry(*types.items())
    options: dict[str, Any] = dict(use_zarr3=True, type_handler_registry=registry)
    base = ocp.BasePyTreeCheckpointHandler(restore_concurrent_bytes=concurrent_bytes, **options)
    return ocp.PyTreeCheckpointHandler(handler_impl=base, **options)


def write_spec(
    info: Any, shape: Sequence[int], shard_shape: Sequence[int], dtype: Any
) -> dict[str, Any]:
    """The array on disk, for tensorstore: of chunks into which a shard can be cut."""
    spec = type_handlers.get_json_tspec_write(
        info, info.is_ocdbt_checkpoint, shape, shape, dtype, jax.process_index()
    )
    spec["metadata"] = _metadata(shape, _chunk_shape(shard_shape, dtype.itemsize))
    return spec


async def _named(
    read: Callable[..., Coroutine[Any, Any, Any]], infos: Sequence[Any], *args: Sequence[Any]
) -> Sequence[Any]:
    """What is read of all leaves together; if that fails, of one after the other, to name those that fail."""
    before = asyncio.all_tasks()
    try:
        return await read(infos, *args)
    except Exception:
        await _others(before)
        ones = [read(*[[part] for part in parts]) for parts in zip(infos, *args, strict=True)]
        return [x for (x,) in await each(ones, [info.name for info in infos])]


async def each(work: Sequence[Coroutine[Any, Any, Any]], names: Sequence[str]) -> list[Any]:
    """Does all of the work, also if some of it fails; then raises what failed."""
    before = asyncio.all_tasks()
    done = await asyncio.gather(*work, return_exceptions=True)
    pairs = zip(names, done, strict=True)
    errors = {name: result for name, result in pairs if isinstance(result, BaseException)}
    if errors:
        await _others(before)
        raise LeafErrors(errors)
    return done


async def _others(before: set[Any]) -> None:
    """Waits for tasks of reads that failed: the others of a leaf go on, and the loop will be closed."""
    await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _shard_shape(x: Array) -> tuple[int, ...]:
    """The shape of each device's part, padding included."""
    if isinstance(x, HostArray):
        return x.at_rest.shard_shape(x.padded_shape)
    x = x.padded if isinstance(x, PaddedArray) else x
    return x.sharding.shard_shape(x.shape)


def _own_parts(x: Array) -> list[tuple[tuple[slice, ...], Any]]:
    """The parts that this process writes, and where they are: the first copy of each."""
    if isinstance(x, HostArray):
        return [(tuple(slice(*ends) for ends in box), data) for box, data in x.own_parts()]
    shards = (x.padded if isinstance(x, PaddedArray) else x).addressable_shards
    return [(shard.index, shard.data) for shard in shards if shard.replica_id == 0]


def _start_copies(x: Array) -> None:
    for _, data in _own_parts(x):
        if isinstance(data, jax.Array):
            data.copy_to_host_async()


def _cut(
    index: Sequence[slice], data: jax.Array | np.ndarray, shape: Sequence[int]
) -> tuple[tuple[slice, ...], np.ndarray] | None:
    """A part on the host and its place, without padding; None if it is all padding."""
    starts = [part.start or 0 for part in index]
    stops = [min(start + n, size) for start, n, size in zip(starts, data.shape, shape, strict=True)]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if min(lengths, default=1) <= 0:
        return None
    values = np.asarray(data)[tuple(slice(n) for n in lengths)]
    if isinstance(data, np.ndarray):  # The next step overwrites it, while it is being written.
        values = values.copy()
    return tuple(map(slice, starts, stops)), values


async def _write(leaves: Sequence[_Leaf]) -> None:
    for group in groups(leaves, _TOGETHER):
        async with tensorstore.Transaction(atomic=True) as transaction:
            work = [_write_leaf(leaf, transaction) for leaf in group]
            await each(work, [leaf.info.name for leaf in group])
        for leaf in group:
            leaf.parts.clear()  # the copies on the host


async def _write_leaf(leaf: _Leaf, transaction: Any) -> None:
    await leaf.info.await_path_creation()
    options = dict(open=True, context=leaf.info.ts_context, transaction=transaction)
    if jax.process_index() == 0:  # All would make the same array.
        await tensorstore.open(leaf.spec, create=True, **options)
    store = await tensorstore.open(leaf.spec, assume_metadata=True, **options)
    # Nobody changes `data`: it belongs to a jax.Array, or was copied.
    writes = [
        store[index].write(data, can_reference_source_data_indefinitely=True)
        for index, data in leaf.parts
    ]
    await asyncio.gather(*writes)


def _metadata(shape: Sequence[int], chunk_shape: Sequence[int]) -> dict[str, Any]:
    """Zarr 3 array metadata: compressed as Orbax does, with a checksum of the data in each chunk."""
    return {
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
        ],
    }


def _chunk_shape(shard_shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A shard, cut along its first dims into equal chunks of at most `_CHUNK_BYTES`."""
    shape = [max(size, 1) for size in shard_shape]
    for dim in range(len(shape)):
        rest = int(np.prod(shape)) // shape[dim] * itemsize
        wanted = max(_CHUNK_BYTES // rest, 1)
        shape[dim] = max(n for n in range(1, min(wanted, shape[dim]) + 1) if shape[dim] % n == 0)
    return tuple(shape)
