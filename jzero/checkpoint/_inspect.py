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
from jzero.checkpoint._seal import StoredLeaf

WHO = "inspect"


class InspectedLeaf(NamedTuple):
    """A leaf: its bytes are those of its values, and fewer on disk; its role is None if nobody noted it."""

    name: str
    role: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunk_shape: tuple[int, ...]


class Saved(NamedTuple):
    """How jzero's step had sharded the state that it saved: any other one restores it, too."""

    version: str  # of jzero
    stage: int
    axes: dict[str, int]  # of the mesh: names and sizes


class Inspection(NamedTuple):
    """What is in a checkpoint.

    Attributes:
      directory: where its files are.
      step: its number, if its directory's name is one.
      steps: those beside it, if a directory of steps was asked for.
      written: when it was complete, in ISO format.
      writer: the handler of Orbax that wrote it.
      has_data_iterator: whether a `Checkpointer` saved one with it.
      leaves: one entry each.
      saved: by which step; None if nobody noted it.
    """

    directory: str
    step: int | None
    steps: list[int]
    written: str | None
    writer: str | None
    has_data_iterator: bool
    leaves: list[InspectedLeaf]
    saved: Saved | None = None

    @property
    def num_uneven(self) -> int:
        """Leaves in chunks that do not divide them: they rested in padded shards."""
        return sum(
            any(n % size for n, size in zip(leaf.shape, leaf.chunk_shape, strict=False) if size)
            for leaf in self.leaves
        )

    def totals(self) -> list[dict[str, Any]]:
        """Number of leaves, elements and bytes of each role and dtype."""
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
    notes = _stored.notes(WHO, stored)
    roles = _stored.roles(notes)
    leaves = [_entry(*pair, roles) for pair in stored.types.items()]
    step = int(stored.root.name) if stored.root.name.isdecimal() else None
    has_data = stored.root != stored.directory and (stored.root / _orbax.DATA).exists()
    writer = _writer(notes, stored.directory.name)
    steps = steps_in(WHO, checkpoint).complete()
    directory = _mirror.shown(stored.directory)
    saved, written = _saved(notes), _time(notes)
    return Inspection(directory, step, steps, written, writer, has_data, leaves, saved), stored


class Verified(NamedTuple):
    """What reading every file of a checkpoint found.

    Attributes:
      damaged: what is wrong with each damaged leaf, by name, and with each other file, by its path.
      unchecked: leaves without checksums, in which a flipped bit may be read as if it were right.
      sealed: whether the other files have a seal; else a flipped bit in them may go unseen.
    """

    damaged: dict[str, BaseException]
    unchecked: list[str]
    sealed: bool


def verify(stored: _stored.Stored) -> Verified:
    """Reads every chunk of every leaf, and all other files."""
    found = Verified({}, [], stored.seal is not None)
    if stored.seal is not None:
        damaged = _seal.check_digests(stored.root, stored.seal)
        found.damaged.update({name: _seal.Broken(damage) for name, damage in damaged.items()})
    for name, store in _stored.open_leaves(WHO, stored).items():
        if not _stream.has_checksums(store):
            found.unchecked.append(name)
        try:
            for _ in _stream.read_blocks(name, store):
                pass
        except _reading.LeafErrors as error:
            found.damaged.update(error.errors)
    return found


def _entry(name: str, found: StoredLeaf | None, roles: dict[str, str]) -> InspectedLeaf:
    if found is None:
        return InspectedLeaf(name, roles.get(name), "string", (), 0, ())
    dtype = tensorstore.dtype(found.dtype).numpy_dtype
    nbytes = math.prod(found.shape) * dtype.itemsize
    return InspectedLeaf(
        name, roles.get(name), str(dtype), found.shape, nbytes, found.chunk_shape or found.shape
    )


def _time(notes: dict[str, Any]) -> str | None:
    nanoseconds = notes.get("commit_timestamp_nsecs")
    if nanoseconds is None:
        return None
    try:
        return datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return None


def _saved(notes: dict[str, Any]) -> Saved | None:
    """None, too, for what somebody else has noted under this name: nothing goes by it."""
    found: Any = (notes.get("custom_metadata") or {}).get("jzero")
    if _json.check(found, {"version": str, "stage": int, "axes": {str: int}}):
        return None
    return Saved(found["version"], found["stage"], found["axes"])


def _writer(notes: dict[str, Any], item: str) -> str | None:
    found = notes.get("item_handlers")
    found = found.get(item) if isinstance(found, dict) else found
    return None if found is None else found.rpartition(".")[2]
