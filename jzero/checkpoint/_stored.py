# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint on disk, whoever wrote it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tensorstore

from jzero import _json
from jzero._errors import CheckpointError, message, named
from jzero._json import Maybe
from jzero.checkpoint import _files, _iterators, _mirror, _nearby, _orbax, _reading, _seal
from jzero.checkpoint._bucket_steps import steps_in
from jzero.checkpoint._match import Leaf, leaf_names
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, NOTES, STATE, TREE
from jzero.checkpoint._reading import ReadAs
from jzero.checkpoint._seal import Seal, StoredLeaf
from jzero.offload.memory import _writes
from jzero.offload.nvme._header import Write

# Files that Orbax and tensorstore read whole before they know what is in them.
_STRINGS, _MANIFEST = "_strings.json", "manifest.ocdbt"
_READ_WHOLE = (_STRINGS, "checkpoint", _MANIFEST, ".zarray", "zarr.json")
# Of what Orbax says of a checkpoint, that which is used.
_NOTES_FORM = {
    "item_handlers": Maybe(({str: str}, str)),
    "commit_timestamp_nsecs": Maybe(int),
    "custom_metadata": Maybe({"roles": Maybe({}), "writes": Maybe({})}),
}

_EVERY_CHUNK = "store_array_data_equal_to_fill_value"
_TREE_FORM = {"tree_metadata": {}, "use_ocdbt": Maybe(bool), _EVERY_CHUNK: Maybe(bool)}


class Stored(NamedTuple):
    """A checkpointed pytree.

    Attributes:
      directory: where its files are.
      root: of all items of the step, if the checkpoint is one of them; else the same.
      seal: of the step that it is of; None if it has none.
      infos: what Orbax says of each leaf, by name.
      types: the type of each; None for a string.
      leaves: the same, as JAX would have them.
    """

    directory: Path
    root: Path
    seal: Seal | None
    infos: dict[str, Any]
    types: dict[str, StoredLeaf | None]
    leaves: dict[str, Leaf]


def find(who: str, path: str | os.PathLike[str]) -> Stored:
    """Reads what is in the checkpoint in `path`: of a `Checkpointer` or any of Orbax's.

    Raises:
      CheckpointError: there is none, or what describes it is damaged.
    """
    path = _mirror.local(who, path)
    try:
        directory = _tree_directory(who, path)
        root = _root(directory)
        files = list(_files.files_below(directory))
    except OSError as error:
        raise CheckpointError(damaged(who, path, error)) from error
    try:
        seal = _seal.read(root)
        if seal is not None and (found := _seal.check_digests(root, seal, _is_read)):
            raise _seal.Broken("; ".join(f"{name} {damage}" for name, damage in found.items()))
    except Exception as error:
        raise CheckpointError(damaged(who, directory, error)) from error
    described = _json.read(who, directory / TREE, _TREE_FORM)
    # Orbax goes by what is said, and where nothing is said by what is there.
    in_store = (directory / _MANIFEST).exists() and described.get("use_ocdbt") is not False
    try:
        _check_what_is_read_whole(directory, files)
        if not in_store:
            _check_paths(described["tree_metadata"])
        tree = _orbax.read_tree(directory)
        infos = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
        for info in infos.values():
            if _is_array(info):  # Orbax once left out chunks of zeros.
                info.raise_array_data_missing_error = bool(described.get(_EVERY_CHUNK))
        types = _reading.run(_types(infos, {} if seal is None else seal.leaves))
    except Exception as error:
        raise CheckpointError(damaged(who, directory, error)) from error
    leaves = {name: _leaf(name, found) for name, found in types.items()}
    if not in_store:
        _check_chunks_in_files(who, directory, leaves, files)
    return Stored(directory, root, seal, infos, types, leaves)


def find_latest(who: str, path: str | os.PathLike[str]) -> Stored:
    """Like `find`; of a `Checkpointer`'s directory, the latest step."""
    steps = steps_in(who, path)
    latest = steps.latest()
    return find(who, path if latest is None else steps.where / str(latest))


def identity(stored: Stored) -> list[str]:
    """What makes a checkpoint another one, in lines: its step, and the digest of what describes it."""
    files = [stored.root / _seal.NAME, stored.root / NOTES, stored.directory / TREE]
    found = [_json.read_bytes("restore", file) for file in files if file.exists()]
    digest = hashlib.sha256(b"".join(found))
    return [f"{stored.root.name}, described by {digest.hexdigest()[:8]}"]


def notes(who: str, stored: Stored) -> dict[str, Any]:
    """What Orbax says of the checkpoint or its step: when and by what it was written, `custom_metadata`.

    Raises:
      CheckpointError: it is damaged.
    """
    file = stored.root / NOTES
    return _json.read(who, file, _NOTES_FORM) if file.exists() else {}


def iterators(who: str, step: Path) -> list[_iterators.SavedIterator]:
    """Where the data iterator of each process stood.

    Raises:
      CheckpointError: none was saved, or what was is damaged.
    """
    file = step / DATA / ITERATOR_FILE
    if not file.exists():
        raise CheckpointError(message(
            f"{who} {step}", "it was saved without a data iterator",
            "There is nothing to restore it from.", "Leave data_iterator out."))  # fmt: skip
    found = _json.read(who, file, {"iterators": [_iterators.FORM]})["iterators"]
    try:
        if not found or any(
            entry.keys() - {"place"} not in ({"json"}, {"bytes"}) for entry in found
        ):
            raise ValueError("it has no states of iterators")
        return [_iterators.decoded(entry) for entry in found]
    except ValueError as error:
        raise CheckpointError(damaged(who, file, error)) from error


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
    who: str, stored: Stored, wanted: Mapping[str, ReadAs], at_once: int
) -> dict[str, jax.Array]:
    """Reads some leaves by name, each as is wanted, so many bytes at the same time.

    Raises:
      CheckpointError: all leaves that cannot be read.
    """

    async def read() -> list[jax.Array]:
        budget = _reading.Budget(at_once)
        stores = await _opened(stored, [*wanted])
        work = [_reading.read(x, wanted[name], budget) for name, x in stores.items()]
        return await _reading.each(work, [*wanted])

    return dict(zip(wanted, _run(who, stored, read()), strict=True))


def open_leaves(who: str, stored: Stored) -> dict[str, tensorstore.TensorStore]:
    """Opens each leaf that is numbers, by name; nothing is read.

    Raises:
      CheckpointError: those that cannot be opened.
    """
    names = [name for name, known in stored.types.items() if known]
    return dict(_run(who, stored, _opened(stored, names)))


async def _opened(stored: Stored, names: Sequence[str]) -> dict[str, tensorstore.TensorStore]:
    work = [_reading.open_leaf(stored.infos[name], stored.types[name]) for name in names]
    return dict(zip(names, await _reading.each(work, names), strict=True))


def _run(who: str, stored: Stored, work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return _reading.run(work)
    except Exception as error:
        raise CheckpointError(damaged(who, stored.directory, error)) from error


async def _types(
    infos: Mapping[str, Any], known: Mapping[str, StoredLeaf]
) -> dict[str, StoredLeaf | None]:
    """The type of each leaf, which is opened where it is not known."""

    async def type_of(info: Any) -> StoredLeaf | None:
        if not _is_array(info):
            return None
        return known.get(info.name) or _reading.type_of(await _reading.open_leaf(info))

    found = await _reading.each([type_of(info) for info in infos.values()], [*infos])
    return dict(zip(infos, found, strict=True))


def damaged(who: str, directory: Any, error: Exception) -> str:
    """The message for a checkpoint that cannot be read: each leaf that is the reason, if leaves are."""
    errors = error.errors if isinstance(error, _reading.LeafErrors) else {"": error}
    found = [
        f"{named(name)}: {_first_line(reason)}" if name else _first_line(reason)
        for name, reason in errors.items()
    ]
    # JAX's own errors and a host without memory come after the files were read.
    if all(
        isinstance(reason, jax.errors.JaxRuntimeError | MemoryError) for reason in errors.values()
    ):
        rule = "Nothing is wrong with its files: what was read of them could not be placed."
        edit = "Correct what the error says, and restore the same step."
    else:
        rule = "Its files are damaged, incomplete, or not those of a checkpoint."
        edit = "Restore an earlier step, and check the disk."
    return message(f"{who} {_mirror.shown(directory)}", found, rule, edit, shown=20)


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


def _check_what_is_read_whole(directory: Path, files: Sequence[Path]) -> None:
    """Orbax and tensorstore read some files into memory, whatever their sizes.

    Raises:
      Broken: one is beyond what an honest one may have.
    """
    for path in files:
        if path.name in _READ_WHOLE and (size := path.stat().st_size) > _json.MAX_BYTES:
            name = named(str(path.relative_to(directory)))
            raise _seal.Broken(f"{name} has {size} bytes, more than {_json.MAX_BYTES}")
    if (strings := directory / _STRINGS).exists():
        _json.parse(strings.read_bytes(), _STRINGS)


def _check_paths(tree: Any) -> None:
    """That leaves which are directories, by their names, are in the checkpoint's.

    Raises:
      Broken: a name leads out of it.
    """
    if bad := _json.check(tree, {str: {"key_metadata": [{"key": (str, int)}]}}):
        raise _seal.Broken("; ".join(bad[:3]))
    keys = [str(key["key"]) for leaf in tree.values() for key in leaf["key_metadata"]]
    for key in keys:
        if key.startswith("/") or ".." in key.split("/"):
            raise _seal.Broken(f"a leaf of the name {_json.shown(key)} would be somewhere else")


def _check_chunks_in_files(
    who: str, directory: Path, leaves: Mapping[str, Leaf], files: Sequence[Path]
) -> None:
    """That chunks which are files of their own, each read whole, are no larger than leaves.

    Raises:
      CheckpointError: one is.
    """
    most = 2 * max((leaf.nbytes for leaf in leaves.values()), default=0) + _json.MAX_BYTES
    large = [path for path in files if path.stat().st_size > most]
    bad = [f"{named(str(path.relative_to(directory)))} has {path.stat().st_size} bytes, and no leaf has "
           f"more than {(most - _json.MAX_BYTES) // 2}" for path in large]  # fmt: skip
    if bad:
        raise CheckpointError(damaged(who, directory, _seal.Broken("; ".join(bad[:3]))))


def _root(directory: Path) -> Path:
    parent = directory.parent
    return parent if (parent / NOTES).exists() or (parent / _seal.NAME).exists() else directory


def _is_read(name: str) -> bool:
    """Whether a file is read to restore: not what each process wrote before all was put together."""
    return "ocdbt.process_" not in name


def _is_array(info: Any) -> bool:
    return getattr(info, "value_typestr", "string") != "string"


def _leaf(name: str, found: StoredLeaf | None) -> Leaf:
    if found is None:
        return Leaf(named(name), (), "string")
    dtype = jax.dtypes.canonicalize_dtype(tensorstore.dtype(found.dtype).numpy_dtype)
    return Leaf(named(name), found.shape, str(dtype))


def _first_line(error: BaseException) -> str:
    """What tensorstore says first is what went wrong; then it repeats its whole configuration."""
    line = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, _json.NotRegular):
        return str(error.strerror)
    if isinstance(error, _json.Malformed):
        return "; ".join(map(str, error.args))[:300]
    return (line if isinstance(error, _seal.Broken) else f"{type(error).__name__}: {line}")[:300]
