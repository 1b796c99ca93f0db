# SPDX-License-Identifier: Apache-2.0
"""`inspect`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from jzero import _json
from jzero.checkpoint import _mirror, _orbax, _reading, _seal, _stored, _stream
from jzero.checkpoint._bucket_steps import steps_in

WHO = "inspect"


class InspectedLeaf(NamedTuple):
    """A leaf; its role is None if none was noted."""

    name: str
    role: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunk_shape: tuple[int, ...]


class Saved(NamedTuple):
    """How the step that saved the state had sharded it."""

    version: str  # of jzero
    stage: int
    axes: dict[str, int]  # of the mesh: names and sizes


class Inspection(NamedTuple):
    directory: str
    step: int | None  # if its directory's name is a number
    steps: list[int]  # those beside it, if a directory of steps was asked for
    written: str | None  # when it was complete, in ISO format
    writer: str | None  # the handler of Orbax
    has_data_iterator: bool
    leaves: list[InspectedLeaf]
    saved: Saved | None = None

    def totals(self) -> list[dict[str, Any]]:
        groups: dict[tuple[str | None, str], list[InspectedLeaf]] = {}
        for leaf in self.leaves:
            groups.setdefault((leaf.role, leaf.dtype), []).append(leaf)
        return [
            {"role": role, "dtype": dtype, "leaves": len(group),
             "elements": sum(math.prod(leaf.shape) for leaf in group),
             "nbytes": sum(leaf.nbytes for leaf in group)}
            for (role, dtype), group in groups.items()
        ]  # fmt: skip


def inspect(checkpoint: str | Path) -> tuple[Inspection, _stored.Stored]:
    """What is in a checkpoint, or in the latest step of a `Checkpointer`'s directory."""
    stored = _stored.find_latest(WHO, checkpoint)
    notes, root, item = _stored.notes(WHO, stored), stored.root, stored.directory.name
    roles = _stored.roles(notes)
    handlers = notes.get("item_handlers")
    writer = handlers.get(item) if isinstance(handlers, dict) else handlers
    # Another writer may have noted anything under this name.
    saved: Any = (notes.get("custom_metadata") or {}).get("jzero")
    is_ours = not _json.check(saved, {"version": str, "stage": int, "axes": {str: int}})
    return Inspection(
        _mirror.shown(stored.directory),
        int(root.name) if root.name.isdecimal() else None,
        steps_in(WHO, checkpoint).complete(),
        _time(notes.get("commit_timestamp_nsecs")),
        writer and writer.rpartition(".")[2],
        root != stored.directory and (root / _orbax.DATA).exists(),
        [_entry(name, stored.stores.get(name), roles.get(name)) for name in stored.leaves],
        Saved(saved["version"], saved["stage"], saved["axes"]) if is_ours else None,
    ), stored


class Verified(NamedTuple):
    """What reading every file of a checkpoint found."""

    damaged: dict[str, BaseException]  # leaves by name, and other files by path
    unchecked: list[str]  # leaves without checksums, in which a flipped bit goes unseen
    sealed: bool  # whether the other files have a seal; else a flipped bit in them may go unseen


def verify(stored: _stored.Stored) -> Verified:
    found = Verified({}, [], stored.seal is not None)
    if stored.seal is not None:
        damaged = _seal.check_digests(stored.root, stored.seal)
        found.damaged.update({name: _seal.Broken(damage) for name, damage in damaged.items()})
    for name, store in stored.stores.items():
        if not _stream.has_checksums(store):
            found.unchecked.append(name)
        try:
            for _ in _stream.read_blocks(name, store):
                pass
        except _reading.LeafErrors as error:
            found.damaged.update(error.errors)
    return found


def _entry(name: str, store: tensorstore.TensorStore | None, role: str | None) -> InspectedLeaf:
    if store is None:
        return InspectedLeaf(name, role, "string", (), 0, ())
    dtype, shape = store.dtype.numpy_dtype, store.shape
    chunks = tuple(n or 0 for n in store.chunk_layout.read_chunk.shape or shape)
    return InspectedLeaf(name, role, str(dtype), shape, store.size * dtype.itemsize, chunks)


def _time(nanoseconds: int | None) -> str | None:
    if nanoseconds is None:
        return None
    try:
        return datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return None
