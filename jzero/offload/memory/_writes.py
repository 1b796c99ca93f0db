# SPDX-License-Identifier: Apache-2.0
"""The commit to files that each leaf of a state belongs to; see [Note: writes] in `_folders.py`.

A JAX array on the devices cannot say it, so what places, restores or returns a leaf notes it here while the
leaf lives. Copies, and what a user computes of a leaf, belong to no commit.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._leaf_array import storage_of
from jzero.offload.nvme._header import Write

# By the id of a live leaf; the reference tells it from a later one with the same id.
_known: dict[int, tuple[weakref.ref[Any], Write]] = {}
_TEXT = re.compile(r"([0-9a-f]{32})-(\d{1,18})")


def of(leaf: Any) -> Write | None:
    """The commit of a leaf; None if none is known."""
    leaf = storage_of(leaf)  # A step takes this, while nothing keeps the leaf.
    if isinstance(leaf, FileStorage):
        return None if leaf.is_deleted() else leaf.store.files.committed
    there, write = _known.get(id(leaf), (None, None))
    return write if there is not None and there() is leaf else None


def of_saved(leaves: Sequence[Any]) -> list[Write | None]:
    """The commit of each leaf of a state that is saved: beside leaves in files, theirs."""
    # Even of what a user has made since the last step: what is saved together is restored together.
    in_files = _of_files(leaves)
    return [in_files or of(leaf) for leaf in leaves]


def note(leaf: Any, write: Write | None) -> None:
    """From here on a leaf belongs to this commit, or to none."""
    leaf = storage_of(leaf)
    if isinstance(leaf, FileStorage):
        return
    key = id(leaf)
    if write is None:
        _known.pop(key, None)
        return

    def forget(reference: weakref.ref[Any]) -> None:
        if (found := _known.get(key)) and found[0] is reference:
            _known.pop(key, None)

    try:
        _known[key] = weakref.ref(leaf, forget), write
    except TypeError:  # a Python number
        _known.pop(key, None)


def are_known() -> bool:
    return bool(_known)


def carry(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Leaves that were moved keep their commits."""
    if _known:
        for before, after in zip(old, new, strict=True):
            if after is not before:
                note(after, of(before))


def settle(leaves: Iterable[Any]) -> None:
    """All leaves of a state that was placed, or that a step returned, get the commit of its files, if any."""
    leaves = list(leaves)
    write = _of_files(leaves)
    if write is not None or _known:
        for leaf in leaves:
            note(leaf, write)


def as_text(write: Write) -> str:
    return f"{write.run}-{write.step}"


def of_text(text: Any) -> Write | None:
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    return Write(int(found[2]), found[1]) if found else None


def _of_files(leaves: Iterable[Any]) -> Write | None:
    """The commit of the first leaf in files, if there is one."""
    return next((of(leaf) for leaf in leaves if isinstance(storage_of(leaf), FileStorage)), None)
