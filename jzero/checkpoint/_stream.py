# SPDX-License-Identifier: Apache-2.0
"""Leaves of a checkpoint a block of rows at a time, read and written, so that no model need fit into memory.

Orbax reads and writes whole leaves. It knows where they are, and leaves the rest to its handlers of types;
these open a leaf instead of reading it, and write one from what is yet to be read.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import type_handlers
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals as CommitFuture

from jzero._errors import CheckpointError
from jzero._in_turn import groups
from jzero.checkpoint import _handlers, _ocdbt, _orbax, _reading, _seal, _writing
from jzero.checkpoint._match import leaf_names
from jzero.checkpoint._stored import Stored, damaged
from jzero.offload.memory import _available

# Bytes of leaves that are read or written together: the commands are to need little memory.
AT_ONCE = 2**26


class LeafSource:
    """A leaf that is yet to be read.

    Args:
      shape: its shape.
      dtype: its dtype.
      read: reads some rows, `read(slice(0, 2))`, or all of it, `read(...)`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray]):
        self.shape, self.dtype, self.read = shape, dtype, read
        self.nbytes = math.prod(shape) * dtype.itemsize  # Orbax asks.


def open_leaves(who: str, stored: Stored) -> dict[str, tensorstore.TensorStore]:
    """Opens each leaf that is numbers, by name; nothing is read.

    Raises:
      CheckpointError: those that cannot be opened.
    """
    given = _writing.Writing(), stored.known
    scalars = _ScalarOpener(*given)
    types = {
        int: scalars,
        float: scalars,
        np.number: scalars,
        np.ndarray: _NumpyOpener(*given),
        str: type_handlers.StringHandler(),
        jax.Array: _ArrayOpener(*given),
    }
    handler = _handlers.pytree_handler(types)
    try:
        tree = handler.restore(epath.Path(stored.directory), args=ocp.args.PyTreeRestore())
    except Exception as error:
        raise CheckpointError(damaged(who, stored.directory, error)) from error
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return {name: leaf for name, leaf in leaves if isinstance(leaf, tensorstore.TensorStore)}


def write_leaves(directory: Path, tree: Any, notes: dict[str, Any]) -> None:
    """Writes a checkpoint of `LeafSource`s to a new directory, seals and syncs it."""
    started, writing = time.time_ns(), _writing.Writing()
    # Orbax warns where there is none for jax.Array.
    types = {LeafSource: _LeafSourceHandler(writing, {}), jax.Array: type_handlers.ArrayHandler()}
    handler = _handlers.pytree_handler(types)
    directory.mkdir()
    handler.save(epath.Path(directory), args=ocp.args.PyTreeSave(tree))
    writing.raise_failure()
    handler.finalize(epath.Path(directory))
    asyncio.run(_ocdbt.check_complete(directory, writing.leaves))
    _orbax.write_notes(directory, _orbax.PYTREE, started, notes)
    _seal.write(directory, writing.leaves)


def read_blocks(name: str, store: tensorstore.TensorStore) -> Iterator[np.ndarray]:
    """All of an open leaf, in order; each chunk is decoded once.

    Raises:
      LeafErrors: a chunk is damaged.
    """
    itemsize = store.dtype.numpy_dtype.itemsize
    for index, nbytes in _blocks(store.shape, itemsize, store.chunk_layout.read_chunk.shape):
        try:
            _check_fits(nbytes)
            block = np.asarray(store[index].read().result())
        except Exception as error:
            raise _reading.LeafErrors({name: error}) from error
        yield block


def _check_fits(nbytes: int) -> None:
    """A block of large chunks, decoded and again in order, is in memory; tensorstore aborts without it.

    Raises:
      ValueError: there is less.
    """
    if nbytes > AT_ONCE and (left := _available.available()) is not None and 2 * nbytes > left:
        raise ValueError(
            f"its chunks are so large that {nbytes} bytes are read at once, which takes twice as much "
            f"memory, and {left} bytes are available"
        )


def has_checksums(store: tensorstore.TensorStore) -> bool:
    """Whether a flipped bit in a chunk is an error, and not another value."""

    def check(codecs: Sequence[dict[str, Any]]) -> bool:
        options = [(codec["name"], codec.get("configuration", {})) for codec in codecs]
        return any(
            name == "crc32c" or option.get("checksum", False) or check(option.get("codecs", []))
            for name, option in options
        )

    return check(store.spec().to_json()["metadata"].get("codecs", []))  # Zarr 2 has none.


def _blocks(
    shape: Sequence[int], itemsize: int, chunk_shape: Sequence[int | None] | None
) -> Iterator[tuple[Any, int]]:
    """Blocks of rows that are whole chunks, of at most `AT_ONCE` bytes if possible: index and bytes."""
    nbytes = math.prod(shape) * itemsize
    if nbytes <= AT_ONCE:
        yield ..., nbytes
        return
    row, chunk_rows = nbytes // shape[0], (chunk_shape and chunk_shape[0]) or 1
    rows = max(AT_ONCE // row // chunk_rows, 1) * chunk_rows
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        yield slice(start, stop), (stop - start) * row


class _Opener(_handlers.Handler):
    """A handler that opens leaves where others read them."""

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Any]:
        work = [_reading.open_leaf(info, self._known.get(info.name)) for info in infos]
        return await _reading.each(work, [info.name for info in infos])


class _ArrayOpener(_Opener, type_handlers.ArrayHandler):
    pass


class _NumpyOpener(_Opener, type_handlers.NumpyHandler):
    pass


class _ScalarOpener(_Opener, type_handlers.ScalarHandler):
    pass


class _Part(NamedTuple):
    """What is written at a time: some rows of a leaf."""

    source: LeafSource
    info: Any
    spec: dict[str, Any]
    index: Any
    nbytes: int


class _LeafSourceHandler(_handlers.Handler, type_handlers.ArrayHandler):
    """Writes `LeafSource`s as the arrays that they will be."""

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[LeafSource], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        parts = [part for pair in zip(values, infos, strict=True) for part in self._parts(*pair)]
        return [CommitFuture(self._writing.noted(_write(parts)), name="write")]

    def _parts(self, source: LeafSource, info: Any) -> Iterator[_Part]:
        spec = _writing.write_spec(info, source.shape, source.shape, source.dtype)
        found = self._writing.note(info.name, spec)
        for index, nbytes in _blocks(source.shape, source.dtype.itemsize, found.chunk_shape):
            yield _Part(source, info, spec, index, nbytes)


async def _write(parts: Sequence[_Part]) -> None:
    """One transaction for each `AT_ONCE` bytes: it holds what is written in it until it is committed."""
    for group in groups(parts, AT_ONCE):
        async with _ocdbt.transaction() as together:
            await _reading.all_of(_write_part(part, together) for part in group)


async def _write_part(part: _Part, transaction: Any) -> None:
    await part.info.await_path_creation()
    store = await tensorstore.open(
        part.spec, open=True, create=True, context=part.info.ts_context, transaction=transaction
    )
    data = part.source.read(part.index)  # Nobody else has it.
    await store[part.index].write(data, can_reference_source_data_indefinitely=True)
