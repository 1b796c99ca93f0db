# SPDX-License-Identifier: Apache-2.0
"""What readers of Orbax checkpoints find beside the leaves: Orbax writes and reads it, and no leaf."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

STATE, DATA = "state", "data"  # The items of our checkpoints; a state alone is Orbax's "default".
TREE = "_METADATA"  # The file that every Orbax checkpoint of a pytree has.
NOTES = "_CHECKPOINT_METADATA"  # What Orbax says of a checkpoint, or of all items of a step.
ITERATOR_FILE = "metadata"  # The only file of an item that is JSON.
# What Orbax calls its handlers of items.
PYTREE, JSON = (
    f"{handler.__module__}.{handler.__qualname__}"
    for handler in (ocp.PyTreeCheckpointHandler, ocp.JsonCheckpointHandler)
)


def write_notes(
    directory: Path, handlers: str | dict[str, str], started: int, custom: dict[str, Any]
) -> None:
    """Writes what Orbax notes of a checkpoint, or of a step, begun at `started` nanoseconds."""
    notes = {
        "item_handlers": handlers, "metrics": {}, "performance_metrics": {},
        "init_timestamp_nsecs": started, "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": custom,
    }  # fmt: skip
    (directory / NOTES).write_text(json.dumps(notes))


def read_tree(directory: Path) -> Any:
    """Nested dicts of what Orbax says of each leaf: its name, and where it is."""
    return _handler([]).metadata(epath.Path(directory)).tree


def write_tree(directory: Path, tree: Any) -> list[tuple[str, Any]]:
    """Writes what describes a tree of arrays and numbers; returns these, by their names."""
    given: list[tuple[str, Any]] = []
    args = ocp.args.PyTreeSave(tree)
    for future in asyncio.run(_handler(given).async_save(epath.Path(directory), args=args)) or []:
        future.result()
    return given


class LeafSource:
    """A leaf that is read when it is written: some rows, `read(slice(0, 2))`, or all of it, `read(...)`."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray]):
        self.shape, self.dtype, self.read = shape, dtype, read
        self.nbytes = math.prod(shape) * dtype.itemsize  # Orbax asks.


class _OrbaxArray:
    """The type of arrays that Orbax alone has written: it calls them jax.Array."""


def _handler(given: list[tuple[str, Any]]) -> ocp.PyTreeCheckpointHandler:
    scalar = _Handler("scalar", given)
    types = {
        **dict.fromkeys((int, float, complex, np.number, np.bool_), scalar),
        str: _Handler("string", given),
        _OrbaxArray: _Handler("jax.Array", given),
        # For who asks without devices, arrays are NumPy's.
        **dict.fromkeys((np.ndarray, jax.Array, LeafSource), _Handler("np.ndarray", given)),
    }
    registry = type_handlers.create_type_handler_registry(*types.items())
    options: dict[str, Any] = dict(use_zarr3=True, type_handler_registry=registry)
    base = ocp.BasePyTreeCheckpointHandler(**options)
    return ocp.PyTreeCheckpointHandler(handler_impl=base, **options)


class _Handler(type_handlers.TypeHandler):
    """Leaves of one type, put into `given`: handlers of Orbax write whole leaves, and no checksums."""

    _array_metadata_store = None  # Orbax asks.

    def __init__(self, kind: str, given: list[tuple[str, Any]]) -> None:
        self._kind, self._given = kind, given

    def typestr(self) -> str:
        return self._kind

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        self._given += zip((info.name for info in infos), values, strict=True)
        return []

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Any]:
        raise NotImplementedError

    async def metadata(self, infos: Sequence[Any]) -> list[Any]:
        for info in infos:
            info.value_typestr = self._kind
        return list(infos)
