# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint on disk, whoever wrote it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero._errors import CheckpointError, message
from jzero.checkpoint import _files, _handlers, _json, _nearby, _reading, _seal, _steps
from jzero.checkpoint._json import Maybe
from jzero.checkpoint._match import Leaf, leaf_names
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, NOTES, STATE, TREE
from jzero.checkpoint._seal import Seal, StoredLeaf
from jzero.offload.memory import _writes
from jzero.offload.nvme._header import Write

# Of what Orbax says of a checkpoint, that which is used.
_NOTES_FORM = {
    "item_handlers": Maybe(({str: str}, str)),
    "commit_timestamp_nsecs": Maybe(int),
    "custom_metadata": Maybe({"roles": Maybe({}), "writes": Maybe({})}),
}


class Stored(NamedTuple):
    """A checkpointed pytree.

    Attributes:
      directory: where its files are.
      seal: of the step that it is of; None if it has none.
      tree: nested dicts of Orbax's metadata, one per leaf.
      leaves: the same by name.
    """

    directory: Path
    seal: Seal | None
    tree: Any
    leaves: dict[str, Leaf]

    @property
    def known(self) -> Mapping[str, StoredLeaf]:
        """The types of leaves, by their names in Orbax's files, as far as they are sealed."""
        return {} if self.seal is None else self.seal.leaves


def find(who: str, path: str | Path) -> Stored:
    """Reads what is in the checkpoint in `path`: of a `Checkpointer` or any of Orbax's.

    Raises:
      CheckpointError: there is none, or what describes it is damaged.
    """
    path = _files.local(who, path)
    try:
        directory = _tree_directory(who, path)
        root = _root(directory)
    except OSError as error:
        raise CheckpointError(damaged(who, path, error)) from error
    try:
        seal = _seal.read(root)
        if seal is not None and (found := _seal.check_digests(root, seal, _is_read)):
            raise _seal.Broken("; ".join(f"{name} {damage}" for name, damage in found.items()))
        known = None if seal is None else seal.leaves
        tree = _handlers.handler(known=known).metadata(epath.Path(directory)).tree
    except Exception as error:
        raise CheckpointError(damaged(who, directory, error)) from error
    names, metadata = leaf_names(tree), jax.tree.leaves(tree)
    leaves = {name: _leaf(name, found) for name, found in zip(names, metadata, strict=True)}
    return Stored(directory, seal, tree, leaves)


def find_latest(who: str, path: str | Path) -> Stored:
    """Like `find`; of a `Checkpointer`'s directory, the latest step."""
    latest = _steps.latest(_files.local(who, path))
    return find(who, path if latest is None else Path(path, str(latest)))


def root(stored: Stored) -> Path:
    """The directory of all items of the step, if the checkpoint is one of them; else its own."""
    return _root(stored.directory)


def identity(stored: Stored) -> list[str]:
    """What makes a checkpoint another one, in lines: its step, and the digest of what describes it."""
    directory = root(stored)
    files = [directory / _seal.NAME, directory / NOTES, stored.directory / TREE]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists()))
    return [f"{directory.name}, described by {digest.hexdigest()[:8]}"]


def notes(who: str, stored: Stored) -> dict[str, Any]:
    """What Orbax says of the checkpoint or its step: when and by what it was written, `custom_metadata`.

    Raises:
      CheckpointError: it is damaged.
    """
    file = root(stored) / NOTES
    return _json.read(who, file, _NOTES_FORM) if file.exists() else {}


def iterators(who: str, step: Path) -> list[Any]:
    """Where the data iterator of each process stood.

    Raises:
      CheckpointError: none was saved, or what was is damaged.
    """
    file = step / DATA / ITERATOR_FILE
    if not file.exists():
        raise CheckpointError(message(
            f"{who} {step}", "it was saved without a data iterator",
            "There is nothing to restore it from.", "Leave data_iterator out."))  # fmt: skip
    found = _json.read(who, file, {"iterators": [{"bytes": Maybe(str)}]})["iterators"]
    if not found or any(entry.keys() not in ({"json"}, {"bytes"}) for entry in found):
        raise CheckpointError(damaged(who, file, ValueError("it has no states of iterators")))
    return list(found)


def roles(found: dict[str, Any]) -> dict[str, str]:
    """The role of each leaf by name, from `notes`, as far as a `Checkpointer` knew it."""
    return dict((found.get("custom_metadata") or {}).get("roles") or {})


def writes(who: str, stored: Stored) -> dict[str, Write]:
    """The commit to files that each leaf is of, by name; not of leaves that are of none.

    Raises:
      CheckpointError: what says so is damaged.
    """
    if stored.seal is None:  # What others say of their checkpoints is not read.
        return {}
    texts = (notes(who, stored).get("custom_metadata") or {}).get("writes") or {}
    return {name: write for name, text in texts.items() if (write := _writes.of_text(text))}


def read(
    who: str, stored: Stored, args: dict[str, Any], concurrent_bytes: int | None = None
) -> dict[str, Any]:
    """Reads some leaves, each as its `RestoreArgs` say, by name.

    Raises:
      CheckpointError: all leaves that cannot be read.
    """
    names, treedef = leaf_names(stored.tree), jax.tree.structure(stored.tree)
    item = jax.tree.unflatten(treedef, [0 if name in args else ocp.PLACEHOLDER for name in names])
    restore_args = jax.tree.unflatten(
        treedef, [args.get(name, ocp.RestoreArgs()) for name in names]
    )
    handler = _handlers.handler(known=stored.known, concurrent_bytes=concurrent_bytes)
    try:
        tree = handler.restore(
            epath.Path(stored.directory),
            args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args),
        )
    except Exception as error:
        raise CheckpointError(damaged(who, stored.directory, error)) from error
    return {name: x for name, x in zip(names, jax.tree.leaves(tree), strict=True) if name in args}


def damaged(who: str, directory: Any, error: Exception) -> str:
    """The message for a checkpoint that cannot be read: each leaf that is the reason, if leaves are."""
    leaves = error.errors.items() if isinstance(error, _reading.LeafErrors) else []
    found = [f"{name}: {_first_line(reason)}" for name, reason in leaves]
    return message(
        f"{who} {directory}", found or [_first_line(error)],
        "Its files are damaged, incomplete, or not those of a checkpoint.",
        "Restore an earlier step, and check the disk.", shown=20)  # fmt: skip


def _tree_directory(who: str, path: Path) -> Path:
    if not path.is_dir():
        what = f"{path} is a file" if path.exists() else f"there is no directory {path}"
        raise CheckpointError(message(
            who, what, "A checkpoint is a directory.", _nearby.advice(path)))  # fmt: skip
    if _files.UNFINISHED in path.name:
        raise CheckpointError(message(
            who, f"{path} was never finished", "A checkpoint counts once it is complete.",
            "Use the latest complete step."))  # fmt: skip
    if (path / TREE).exists():
        return path
    found = sorted(part.name for part in path.iterdir() if (part / TREE).exists())
    for name in (STATE, "default", *found[: len(found) == 1]):
        if name in found:
            return path / name
    raise CheckpointError(message(
        who, f"{path} is no checkpoint, nor a directory of steps",
        f"A checkpoint of Orbax has a file {TREE}, or one item that has.", _nearby.advice(path)
    ))  # fmt: skip


def _root(directory: Path) -> Path:
    parent = directory.parent
    return parent if (parent / NOTES).exists() or (parent / _seal.NAME).exists() else directory


def _is_read(name: str) -> bool:
    """Whether a file is read to restore: not what each process wrote before all was put together."""
    return "ocdbt.process_" not in name


def _leaf(name: str, metadata: Any) -> Leaf:
    shape = tuple(getattr(metadata, "shape", None) or ())
    dtype = getattr(metadata, "dtype", None)
    return Leaf(
        name, shape, "string" if dtype is None else str(jax.dtypes.canonicalize_dtype(dtype))
    )


def _first_line(error: BaseException) -> str:
    """What tensorstore says first is what went wrong; then it repeats its whole configuration."""
    line = str(error).splitlines()[0] if str(error) else ""
    return (line if isinstance(error, _seal.Broken) else f"{type(error).__name__}: {line}")[:300]
