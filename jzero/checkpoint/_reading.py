# SPDX-License-Identifier: Apache-2.0
"""Leaves are read: each is opened once, and only what this process's devices hold of it is decoded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from jzero import _json
from jzero._errors import escaped, named
from jzero.checkpoint import _mirror
from jzero.checkpoint._seal import StoredLeaf

_LEAST_CHUNK = 2**26  # bytes that chunks of other writers may have, however small the leaf
_ALIGNMENT = 64  # bytes; on CPUs XLA takes an array as it is that begins at a multiple


class LeafErrors(Exception):
    """What went wrong with each leaf, by its name in the checkpoint."""

    def __init__(self, errors: dict[str, BaseException]):
        each = [f"{named(name)}: {escaped(str(error))}" for name, error in errors.items()]
        super().__init__("; ".join(each))  # It is in the traceback, as the cause.
        self.errors = errors


async def each(work: Sequence[Coroutine[Any, Any, Any]], names: Sequence[str]) -> list[Any]:
    """Does all of the work, also if some of it fails; then raises what failed."""
    done = await asyncio.gather(*work, return_exceptions=True)  # The loop is closed after it.
    errors = {
        name.replace(".", "/"): result
        for name, result in zip(names, done, strict=True)
        if isinstance(result, BaseException)
    }
    if errors:
        raise LeafErrors(errors)
    return done


async def all_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Does all of the work; then raises what failed first."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return done


async def open_leaf(info: Any, known: StoredLeaf | None = None) -> tensorstore.TensorStore:
    """Opens a leaf to read; nothing is read but its type, which must be the known one.

    Raises:
      ValueError: it is another.
    """
    await info.await_path_creation()
    spec = type_handlers.get_json_tspec_read(
        info,
        info.is_ocdbt_checkpoint,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
    )
    if (bucket := _mirror.bucket_of(info.parent_dir)) is not None:
        spec["kvstore"]["base"] = bucket.spec()
    await _check_described(spec, info.ts_context)
    store = await tensorstore.open(spec, open=True, read=True, context=info.ts_context)
    _check_chunks(store)
    if known is not None and _type_of(store) != known:
        raise ValueError(f"it is {_type_of(store)}, and was written as {known}")
    return store


async def _check_described(spec: dict[str, Any], context: Any) -> None:
    """Tensorstore's parser of what describes an array recurses, and ends the process where that is deep.

    Raises:
      Malformed: it is no JSON of ordinary size and depth.
    """
    name = {"zarr": ".zarray", "zarr3": "zarr.json"}[spec["driver"]]
    kvstore = await tensorstore.KvStore.open(spec["kvstore"], context=context)
    if not kvstore.path.endswith("/"):
        name = f"/{name}"
    found = await kvstore.read(name)
    if found.state == "value":  # tensorstore says what is missing.
        _json.parse(bytes(found.value), name.lstrip("/"))


def _check_chunks(store: tensorstore.TensorStore) -> None:
    """Tensorstore makes room for a whole chunk before it reads one, and aborts where there is none.

    Raises:
      ValueError: a chunk would be larger than its leaf.
    """
    itemsize = store.dtype.numpy_dtype.itemsize
    own = math.prod(store.shape) * itemsize
    for layout in (store.chunk_layout.read_chunk, store.chunk_layout.write_chunk):
        nbytes = math.prod(max(n or 1, 1) for n in layout.shape or ()) * itemsize
        if nbytes > max(own, _LEAST_CHUNK):
            raise ValueError(f"a chunk of it would have {nbytes} bytes, and all of it has {own}")


async def metadata_of(info: Any, known: StoredLeaf | None) -> Any:
    """What Orbax calls the metadata of an array; it is opened only where its type is not known."""
    if known is None:
        known = _type_of(await open_leaf(info))
    dtype = tensorstore.dtype(known.dtype).numpy_dtype
    return ocp.metadata.ArrayMetadata(
        name=info.name, directory=info.parent_dir, shape=known.shape, sharding=None, dtype=dtype,
        storage=ocp.metadata.StorageMetadata(chunk_shape=known.chunk_shape),
    )  # fmt: skip


class Budget:
    """So many bytes that may be read at the same time, or one leaf; first come, first served."""

    def __init__(self, nbytes: int | None):
        self._all, self._free = nbytes, nbytes or 0
        self._turn, self._given = asyncio.Lock(), asyncio.Event()

    async def take(self, nbytes: int) -> int:
        """Waits until so many are free; what to give back."""
        if self._all is None:
            return 0
        taken = min(nbytes, self._all)
        async with self._turn:
            while self._free < taken:
                self._given.clear()
                await self._given.wait()
            self._free -= taken
        return taken

    def give(self, nbytes: int) -> None:
        self._free += nbytes
        self._given.set()


def _type_of(store: tensorstore.TensorStore) -> StoredLeaf:
    chunks = store.chunk_layout.read_chunk.shape or store.shape
    return StoredLeaf(store.shape, store.dtype.name, tuple(n or 0 for n in chunks))


async def read(
    info: Any, known: StoredLeaf | None, arg: ocp.ArrayRestoreArgs, budget: Budget
) -> jax.Array:
    """A leaf in its layout; what it lacks of the shape that is asked for is filled with zeros."""
    store = await open_leaf(info, known)
    of_keys = is_key(arg.dtype)
    shape = tuple(store.shape if of_keys or arg.global_shape is None else arg.global_shape)
    if not of_keys and arg.dtype is not None and store.dtype.numpy_dtype != arg.dtype:
        store = tensorstore.cast(store, arg.dtype)
    indices = arg.sharding.addressable_devices_indices_map(shape).values()
    boxes = list(dict.fromkeys(_ends(index or (), shape) for index in indices))
    nbytes = sum(_nbytes(ends, store.dtype.numpy_dtype.itemsize) for ends in boxes)
    taken = await budget.take(nbytes)
    try:
        found = await all_of(_read_box(store, ends) for ends in boxes)
        parts = dict(zip(boxes, found, strict=True))
        with jax.transfer_guard("allow"):  # Whoever forbids copies does not mean these.
            array = jax.make_array_from_callback(
                shape, arg.sharding, lambda index: parts[_ends(index or (), shape)]
            )
        if taken:  # What is not yet on its device needs memory here.
            await asyncio.to_thread(array.block_until_ready)
    finally:
        budget.give(taken)
    return jax.random.wrap_key_data(array, impl=arg.dtype) if of_keys else array


async def _read_box(store: tensorstore.TensorStore, ends: tuple[tuple[int, int], ...]) -> Any:
    """The values between these ends in each dim; zeros beyond the array's own."""
    dtype = store.dtype.numpy_dtype
    out = _aligned([stop - start for start, stop in ends], dtype)
    pairs = zip(ends, store.shape, strict=True)
    inside = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in pairs)
    lengths = tuple(slice(part.stop - part.start) for part in inside)
    if any(part.stop < size for part, size in zip(lengths, out.shape, strict=True)):
        out[...] = np.zeros((), dtype)
    box: Any = (*lengths, ...)  # of no dims, too: a view
    view = out[box]
    if view.size:
        target = tensorstore.array(view, dtype=store.dtype)
        await target.write(store[inside][tensorstore.d[:].translate_to[0]] if inside else store)
    return out


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that XLA does not copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _ends(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _nbytes(ends: Sequence[tuple[int, int]], itemsize: int) -> int:
    return math.prod(stop - start for start, stop in ends) * itemsize


def is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
