"""What is in a checkpoint on disk, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero._errors import CheckpointError, message
from jzero.checkpoint import _arrays
from jzero.checkpoint._match import Leaf, leaf_names

STATE, DATA = "state", "data"  # The items of our checkpoints; a state alone is Orbax's "default".
_TREE = "_METADATA"  # the file that every Orbax checkpoint of a pytree has
_NOTES = "_CHECKPOINT_METADATA"  # what Orbax says of a checkpoint, or of all items of a step


class Stored(NamedTuple):
    """A checkpointed pytree.

    Attributes:
      directory: where its files are.
      tree: nested dicts of Orbax's metadata, one per leaf.
      leaves: the same by name.
    """

    directory: epath.Path
    tree: Any
    leaves: dict[str, Leaf]


def find(who: str, path: str | Path) -> Stored:
    """Reads what is in the checkpoint in `path`: of a `Checkpointer` or any of Orbax's.

    Raises:
      CheckpointError: there is none, or what describes it is damaged.
    """
    directory = _tree_directory(who, epath.Path(path).absolute())  # Orbax wants it absolute.
    try:
        tree = _arrays.handler().metadata(directory).tree
    except Exception as error:
        raise CheckpointError(damaged(who, directory, error)) from error
    names, metadata = leaf_names(tree), jax.tree.leaves(tree)
    leaves = {name: _leaf(name, found) for name, found in zip(names, metadata, strict=True)}
    return Stored(directory, tree, leaves)


def steps(path: str | Path) -> list[int]:
    """The complete steps in a `Checkpointer`'s directory; none in the directory of one checkpoint."""
    directory = epath.Path(path)
    parts = directory.iterdir() if directory.is_dir() else ()
    found = (part for part in parts if part.name.isdecimal() and part.is_dir())
    return sorted(int(part.name) for part in found if ocp.utils.is_checkpoint_finalized(part))


def find_latest(who: str, path: str | Path) -> Stored:
    """Like `find`; of a `Checkpointer`'s directory, the latest step."""
    numbers = steps(path)
    return find(who, epath.Path(path) / str(numbers[-1]) if numbers else path)


def root(stored: Stored) -> epath.Path:
    """The directory of all items of the step, if the checkpoint is one of them; else its own."""
    parent = stored.directory.parent
    return parent if (parent / _NOTES).exists() else stored.directory


def notes(who: str, stored: Stored) -> dict[str, Any]:
    """What Orbax says of the checkpoint or its step: when and by what it was written, `custom_metadata`.

    Raises:
      CheckpointError: it is damaged.
    """
    file = root(stored) / _NOTES
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(damaged(who, file, error)) from error


def roles(found: dict[str, Any]) -> dict[str, str]:
    """The role of each leaf by name, from `notes`, as far as a `Checkpointer` knew it."""
    return dict((found.get("custom_metadata") or {}).get("roles") or {})


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
    checkpointer = ocp.Checkpointer(_arrays.handler(concurrent_bytes))
    try:
        tree = checkpointer.restore(
            stored.directory, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
        )
    except Exception as error:
        raise CheckpointError(damaged(who, stored.directory, error)) from error
    return {name: x for name, x in zip(names, jax.tree.leaves(tree), strict=True) if name in args}


def damaged(who: str, directory: Any, error: Exception) -> str:
    """The message for a checkpoint that cannot be read: each leaf that is the reason, if leaves are."""
    leaves = error.errors.items() if isinstance(error, _arrays.LeafErrors) else []
    found = [f"{name.replace('.', '/')}: {_first_line(reason)}" for name, reason in leaves]
    return message(
        f"{who} {directory}", found or [_first_line(error)],
        "Its files are damaged, incomplete, or not those of a checkpoint.",
        "Restore an earlier step, and check the disk.", shown=20)  # fmt: skip


def _tree_directory(who: str, path: epath.Path) -> epath.Path:
    if not path.is_dir():
        raise CheckpointError(message(
            who, f"there is no directory {path}", "A checkpoint is a directory.",
            "Correct the path."))  # fmt: skip
    if not ocp.utils.is_checkpoint_finalized(path):
        raise CheckpointError(message(
            who, f"{path} was never finished", "A checkpoint counts once it is complete.",
            "Use the latest complete step."))  # fmt: skip
    if (path / _TREE).exists():
        return path
    found = sorted(part.name for part in path.iterdir() if (part / _TREE).exists())
    for name in (STATE, "default", *found[: len(found) == 1]):
        if name in found:
            return path / name
    raise CheckpointError(message(
        who, f"{path} has {sorted(part.name for part in path.iterdir())[:6]}",
        f"A checkpoint of Orbax has a file {_TREE}, or one item that has.",
        "Name the directory of one step: checkpoints/1000."))  # fmt: skip


def _leaf(name: str, metadata: Any) -> Leaf:
    shape = tuple(getattr(metadata, "shape", None) or ())
    dtype = getattr(metadata, "dtype", None)
    return Leaf(
        name, shape, "string" if dtype is None else str(jax.dtypes.canonicalize_dtype(dtype))
    )


def _first_line(error: BaseException) -> str:
    """What tensorstore says first is what went wrong; then it repeats its whole configuration."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
