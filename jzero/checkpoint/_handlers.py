# SPDX-License-Identifier: Apache-2.0
"""Orbax's handlers for arrays, NumPy arrays and numbers: every chunk with a checksum, and without padding.

What they write is an ordinary Orbax checkpoint, for every reader of Orbax checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jzero.checkpoint import _reading
from jzero.checkpoint._seal import StoredLeaf
from jzero.checkpoint._writing import Writing, WrittenLeaf, start_copies


class Handler(type_handlers.TypeHandler):
    """What our handlers share.

    Args:
      writing: where to note what is written.
      known: the types that leaves must be found to have, by name.
    """

    def __init__(self, writing: Writing, known: Mapping[str, StoredLeaf], **options: Any) -> None:
        super().__init__(**options)
        self._writing, self._known = writing, known

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        """Copies what every process has whole; writes in the background."""
        return self._writing.futures(list(map(WrittenLeaf.of_copy, values, infos)))

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Shape, dtype and chunks of each leaf."""
        work = [_reading.metadata_of(info, self._known.get(info.name)) for info in infos]
        return await _reading.each(work, [info.name for info in infos])


class NumpyHandler(Handler, type_handlers.NumpyHandler):
    """Saves NumPy arrays with checksums."""


class ScalarHandler(Handler, type_handlers.ScalarHandler):
    """Saves Python numbers with checksums."""


class OrbaxArray:
    """The type of arrays that Orbax alone has written, in `pytree_handler`: it calls them jax.Array."""


class OrbaxArrayHandler(Handler, type_handlers.ArrayHandler):
    """Says what these are."""


class ArrayHandler(Handler, type_handlers.ArrayHandler):
    """Saves and reads `jax.Array`s, and leaves padded or on the host, in their true shapes.

    Orbax's own writes chunks in which a flipped bit is restored as if it were right, and knows only
    shards of one size. For readers who say nothing of devices these are NumPy arrays.

    Args:
      writing: where to note what is written.
      known: the types that leaves must be found to have, by name.
      concurrent_bytes: how much may be read at the same time, or one leaf.
    """

    def __init__(
        self, writing: Writing, known: Mapping[str, StoredLeaf], concurrent_bytes: int | None
    ) -> None:
        super().__init__(writing, known, enable_write_sharding_file=False)
        self._concurrent_bytes = concurrent_bytes

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        """Copies to the host, so that the next step may consume the values; writes in the background."""
        plain = [jax.random.key_data(x) if _reading.is_key(x.dtype) else x for x in values]
        for x in plain:
            start_copies(x)
        return self._writing.futures(list(map(WrittenLeaf.of, plain, infos)))

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[jax.Array]:
        """Reads each leaf as its `ArrayRestoreArgs` say: what this process's devices hold of it."""
        assert args is not None
        budget = _reading.Budget(self._concurrent_bytes)
        work = [
            _reading.read(info, self._known.get(info.name), arg, budget)
            for info, arg in zip(infos, args, strict=True)
        ]
        return await _reading.each(work, [info.name for info in infos])


def handler(
    writing: Writing | None = None,
    known: Mapping[str, StoredLeaf] | None = None,
    concurrent_bytes: int | None = None,
) -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for pytrees, with ours for arrays and numbers.

    Args:
      writing: where to note what is written.
      known: the types of leaves, by name, where they are known.
      concurrent_bytes: the most that is read at the same time.
    """
    writing, known = writing or Writing(), known or {}
    arrays = ArrayHandler(writing, known, concurrent_bytes)
    scalars = ScalarHandler(writing, known)
    types = {
        int: scalars,
        float: scalars,
        complex: scalars,
        np.number: scalars,
        np.bool_: scalars,
        np.ndarray: NumpyHandler(writing, known),
        str: type_handlers.StringHandler(),
        OrbaxArray: OrbaxArrayHandler(writing, known),
        jax.Array: arrays,
    }
    return pytree_handler(types)


def pytree_handler(types: Mapping[type, Any]) -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for pytrees, with a handler for each type of leaf."""
    registry = type_handlers.create_type_handler_registry(*types.items())
    options: dict[str, Any] = dict(use_zarr3=True, type_handler_registry=registry)
    base = ocp.BasePyTreeCheckpointHandler(**options)
    return ocp.PyTreeCheckpointHandler(handler_impl=base, **options)
