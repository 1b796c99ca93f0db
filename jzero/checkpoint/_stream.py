# SPDX-License-Identifier: Apache-2.0
"""Leaves of a checkpoint a block of rows at a time, so that no model need fit into memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jzero.checkpoint import _orbax, _reading, _seal
from jzero.checkpoint._chunks import cut
from jzero.checkpoint._writing import Writing
from jzero.offload.memory import _available

# Bytes of leaves that are read or written together: the commands are to need little memory.
AT_ONCE = 2**26


def write_leaves(directory: Path, tree: Any, notes: dict[str, Any]) -> None:
    """Writes a checkpoint of `LeafSource`s to a new directory, seals and syncs it."""
    started = time.time_ns()
    directory.mkdir()
    writing = Writing(directory, 8 * AT_ONCE)  # writes an eighth of it at once, and copies nothing
    writing.take(tree)
    writing.write()
    writing.complete()
    _orbax.write_notes(directory, _orbax.PYTREE, started, notes)
    _seal.write(directory)


def read_blocks(name: str, store: tensorstore.TensorStore) -> Iterator[np.ndarray]:
    """All of an open leaf, in order; each chunk is decoded once. A damaged one raises `LeafErrors`."""
    itemsize = store.dtype.numpy_dtype.itemsize
    chunk_rows = [n or 1 for n in (store.chunk_layout.read_chunk.shape or ())[:1]]
    whole = tuple(slice(0, size) for size in store.shape)
    for box in cut(whole, (*chunk_rows, *store.shape[1:]), itemsize, AT_ONCE):
        try:
            nbytes = math.prod(side.stop - side.start for side in box) * itemsize
            left = _available.available() if nbytes > AT_ONCE else None
            if left is not None and 2 * nbytes > left:  # Tensorstore would end the process.
                raise ValueError(
                    f"its chunks are so large that {nbytes} bytes are read at once, which takes twice as "
                    f"much memory, and {left} bytes are available"
                )
            block = np.asarray(store[box].read().result())
        except Exception as error:
            raise _reading.LeafErrors({name: error}) from error
        yield block


def has_checksums(store: tensorstore.TensorStore) -> bool:
    def check(codecs: Sequence[dict[str, Any]]) -> bool:
        options = [(codec["name"], codec.get("configuration", {})) for codec in codecs]
        return any(
            name == "crc32c" or option.get("checksum", False) or check(option.get("codecs", []))
            for name, option in options
        )

    return check(store.spec().to_json()["metadata"].get("codecs", []))  # Zarr 2 has none.
