# SPDX-License-Identifier: Apache-2.0
"""Reads leaves: each is opened once, and only what this process's devices have of it is decoded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import type_handlers

from jzero import _json
from jzero._errors import escaped, named
from jzero.checkpoint import _mirror
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._storage import HostBox, box_of, sizes_of

_LEAST_CHUNK = 2**26  # bytes that chunks of other writers may have, however small the leaf
# Neighbouring chunks of a bucket that are read within so long become one request.
_COALESCED = {
    "experimental_read_coalescing_interval": "20ms",
    "experimental_read_coalescing_merged_bytes": 2**24,
    "experimental_read_coalescing_threshold_bytes": 2**18,  # unneeded bytes between two of them
}


class LeafErrors(Exception):
    def __init__(self, errors: dict[str, BaseException]):
        each = [f"{named(name)}: {escaped(str(error))}" for name, error in errors.items()]
        super().__init__("; ".join(each))  # It is in the traceback, as the cause.
        self.errors = errors


class ReadAs(NamedTuple):
    """How a leaf is to be read: its shape, with zeros beyond the stored one, dtype and sharding."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; in another thread if this one, as a notebook's, has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def each(work: Sequence[Coroutine[Any, Any, Any]], names: Sequence[str]) -> list[Any]:
    """Does all of the work, even if some of it fails; then raises what failed."""
    done = await asyncio.gather(*work, return_exceptions=True)
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


async def open_leaf(info: Any) -> tensorstore.TensorStore:
    """Opens a leaf to read; reads nothing but its type."""
    spec = type_handlers.get_json_tspec_read(
        info, info.is_ocdbt_checkpoint,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
    )  # fmt: skip
    if bucket := _mirror.bucket_of(info.parent_dir):
        if info.is_ocdbt_checkpoint:
            kept = {key: spec["kvstore"][key] for key in ("driver", "path", "cache_pool")}
            spec["kvstore"] = {**kept, **_COALESCED, "base": bucket.spec()}
        else:
            spec["kvstore"] = bucket.spec(info.name)
    await _check_described(spec, info.ts_context)
    store = await tensorstore.open(spec, open=True, read=True, context=info.ts_context)
    _check_chunks(store)
    return store


async def _check_described(spec: dict[str, Any], context: Any) -> None:
    """Raises `Malformed` if JSON is so deep that tensorstore, whose parser recurses, ends the process."""
    name = {"zarr": ".zarray", "zarr3": "zarr.json"}[spec["driver"]]
    kvstore = await tensorstore.KvStore.open(spec["kvstore"], context=context)
    if not kvstore.path.endswith("/"):
        name = f"/{name}"
    found = await kvstore.read(name)
    if found.state == "value":  # tensorstore says what is missing.
        _json.parse(bytes(found.value), name.lstrip("/"))


def _check_chunks(store: tensorstore.TensorStore) -> None:
    """Raises a `ValueError` for a chunk larger than its leaf, for which tensorstore may abort."""
    itemsize = store.dtype.numpy_dtype.itemsize
    own = math.prod(store.shape) * itemsize
    for layout in (store.chunk_layout.read_chunk, store.chunk_layout.write_chunk):
        nbytes = math.prod(max(n or 1, 1) for n in layout.shape or ()) * itemsize
        if nbytes > max(own, _LEAST_CHUNK):
            raise ValueError(f"a chunk of it would have {nbytes} bytes, and all of it has {own}")


class Budget:
    """Bytes that may be read at the same time, or one leaf; first come, first served."""

    def __init__(self, nbytes: int):
        self._all = self._free = nbytes
        self._turn, self._given = asyncio.Lock(), asyncio.Event()

    async def take(self, nbytes: int) -> int:
        """Waits until so many bytes are free; returns what to give back."""
        taken = min(nbytes, self._all)
        async with self._turn:
            if self._free < taken:
                # Waiters start together, so that neighbours in a bucket are one request.
                while self._free < max(taken, self._all // 4):
                    self._given.clear()
                    await self._given.wait()
            self._free -= taken
        return taken

    def give(self, nbytes: int) -> None:
        self._free += nbytes
        self._given.set()


async def read(store: tensorstore.TensorStore, arg: ReadAs, budget: Budget) -> jax.Array:
    of_keys = is_key(arg.dtype)
    shape = store.shape if of_keys else arg.shape
    if not of_keys and store.dtype.numpy_dtype != arg.dtype:
        store = tensorstore.cast(store, arg.dtype)
    indices = arg.sharding.addressable_devices_indices_map(shape).values()
    boxes = list(dict.fromkeys(box_of(index or (), shape) for index in indices))
    nbytes = store.dtype.numpy_dtype.itemsize * sum(math.prod(sizes_of(ends)) for ends in boxes)
    taken = await budget.take(nbytes)
    try:
        found = await all_of(_read_box(store, ends) for ends in boxes)
        parts = dict(zip(boxes, found, strict=True))
        with jax.transfer_guard("allow"):  # These copies are what the user asked for.
            array = jax.make_array_from_callback(
                shape, arg.sharding, lambda index: parts[box_of(index or (), shape)]
            )
        # Until it is on its device it needs memory here.
        await asyncio.to_thread(array.block_until_ready)
    finally:
        budget.give(taken)
    return jax.random.wrap_key_data(array, impl=arg.dtype) if of_keys else array


async def _read_box(store: tensorstore.TensorStore, ends: HostBox) -> Any:
    """The values between these ends in each dim; zeros beyond the array's own."""
    dtype = store.dtype.numpy_dtype
    out = host_empty(sizes_of(ends), dtype)
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


def is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
