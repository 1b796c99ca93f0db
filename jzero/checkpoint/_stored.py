# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint on disk, whoever wrote it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tensorstore

from jzero import _json
from jzero._errors import CheckpointError, JzeroError, message, named
from jzero._json import Maybe
from jzero.checkpoint import _files, _iterators, _mirror, _nearby, _orbax, _reading, _seal
from jzero.checkpoint._bucket_steps import steps_in
from jzero.checkpoint._match import Leaf, leaf_names
from jzero.checkpoint._orbax import DATA, ITERATOR_FILE, NOTES, STATE, TREE
from jzero.checkpoint._reading import ReadAs
from jzero.checkpoint._seal import Broken, Seal
from jzero.offload.memory import _writes
from jzero.offload.nvme._header import Write

# Files that Orbax and tensorstore read whole before they know what is in them.
_STRINGS, _MANIFEST = "_strings.json", "manifest.ocdbt"
_READ_WHOLE = (_STRINGS, "checkpoint", _MANIFEST, ".zarray", "zarr.json")
# The used part of what Orbax notes of a checkpoint.
_NOTES_FORM = {
    "item_handlers": Maybe(({str: str}, str)),
    "commit_timestamp_nsecs": Maybe(int),
    "custom_metadata": Maybe({"roles": Maybe({}), "writes": Maybe({})}),
}

_EVERY_CHUNK = "store_array_data_equal_to_fill_value"
_TREE_FORM = {
    "tree_metadata": {str: {"key_metadata": [{"key": (str, int)}]}},
    "use_ocdbt": Maybe(bool), _EVERY_CHUNK: Maybe(bool),
}  # fmt: skip


class Stored(NamedTuple):
    directory: Path  # where its files are
    root: Path  # of all items of the step, if the checkpoint is one of them; else the same
    seal: Seal | None  # of the step
    stores: dict[str, tensorstore.TensorStore]  # open; those that are no strings
    leaves: dict[str, Leaf]  # as JAX would have them


def find(who: str, path: str | os.PathLike[str]) -> Stored:
    """Opens the checkpoint in `path`, a `Checkpointer`'s or any of Orbax's; reads no values."""
    path = _mirror.local(who, path)
    with _damage(who, path):
        directory = _tree_directory(who, path)
    with _damage(who, directory):
        files = list(_files.files_below(directory))
        above = directory.parent
        in_step = (above / NOTES).exists() or (above / _seal.NAME).exists()
        root = above if in_step else directory
        if (seal := _seal.read(root)) and (found := _seal.check_digests(root, seal, _is_read)):
            raise Broken("; ".join(f"{name} {damage}" for name, damage in found.items()))
        described = _json.read(who, directory / TREE, _TREE_FORM)
        # Orbax goes by what is said, else by what is there.
        in_store = (directory / _MANIFEST).exists() and described.get("use_ocdbt") is not False
        _check_sizes(directory, [x for x in files if x.name in _READ_WHOLE], _json.MAX_BYTES)
        if (strings := directory / _STRINGS).exists():
            _json.parse(strings.read_bytes(), _STRINGS)
        if not in_store:  # Leaves are directories, by their names.
            keys = (x for leaf in described["tree_metadata"].values() for x in leaf["key_metadata"])
            for key in (str(x["key"]) for x in keys):
                if key.startswith("/") or ".." in key.split("/"):
                    raise Broken(f"a leaf of the name {_json.shown(key)} would be somewhere else")
        tree = _orbax.read_tree(directory)
        infos = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
        arrays = {name: info for name, info in infos.items() if _is_array(info)}
        for info in arrays.values():  # Orbax once left out chunks of zeros.
            info.raise_array_data_missing_error = bool(described.get(_EVERY_CHUNK))
        work = [_reading.open_leaf(info) for info in arrays.values()]
        opened = _reading.run(_reading.each(work, [*arrays]))
        stores = dict(zip(arrays, opened, strict=True))
        leaves = {name: _leaf(name, stores.get(name)) for name in infos}
        if not in_store:  # Chunks are files of their own, each read whole.
            sizes = [x.size * x.dtype.numpy_dtype.itemsize for x in stores.values()]
            most = max(sizes, default=0)
            _check_sizes(directory, files, 2 * most + _json.MAX_BYTES)
    return Stored(directory, root, seal, stores, leaves)


def find_latest(who: str, path: str | os.PathLike[str]) -> Stored:
    """Like `find`; of a `Checkpointer`'s directory, the latest step."""
    steps = steps_in(who, path)
    latest = steps.latest()
    return find(who, path if latest is None else steps.where / str(latest))


def identity(stored: Stored) -> list[str]:
    """Lines that identify a checkpoint: its step, and the digest of what describes it."""
    files = [stored.root / _seal.NAME, stored.root / NOTES, stored.directory / TREE]
    found = [_json.read_bytes("restore", file) for file in files if file.exists()]
    digest = hashlib.sha256(b"".join(found))
    return [f"{stored.root.name}, described by {digest.hexdigest()[:8]}"]


def notes(who: str, stored: Stored) -> dict[str, Any]:
    """What Orbax notes of the checkpoint or its step: when and by what it was written, `custom_metadata`."""
    file = stored.root / NOTES
    return _json.read(who, file, _NOTES_FORM) if file.exists() else {}


def iterators(who: str, step: Path) -> list[_iterators.SavedIterator]:
    file = step / DATA / ITERATOR_FILE
    if not file.exists():
        raise CheckpointError(message(
            f"{who} {step}", "it was saved without a data iterator",
            "There is nothing to restore it from.", "Leave data_iterator out."))  # fmt: skip
    found = _json.read(who, file, {"iterators": [_iterators.FORM]})["iterators"]
    with _damage(who, file):
        forms = ({"json"}, {"bytes"})
        if not found or any(entry.keys() - {"place"} not in forms for entry in found):
            raise ValueError("it has no states of iterators")
        return [_iterators.decoded(entry) for entry in found]


def roles(found: dict[str, Any]) -> dict[str, str]:
    """The role of each leaf by name, from `notes`, as far as a `Checkpointer` knew it."""
    return dict((found.get("custom_metadata") or {}).get("roles") or {})


def writes(who: str, stored: Stored) -> dict[str, Write]:
    """The commit to files of each leaf, by name; leaves without one are left out."""
    if stored.seal is None:  # Others wrote it.
        return {}
    texts = (notes(who, stored).get("custom_metadata") or {}).get("writes") or {}
    return {name: write for name, text in texts.items() if (write := _writes.of_text(text))}


def read(
    who: str, stored: Stored, wanted: Mapping[str, ReadAs], at_once: int
) -> dict[str, jax.Array]:
    """Reads some leaves by name, each as wanted, with at most `at_once` bytes at a time."""

    async def read() -> list[jax.Array]:
        budget = _reading.Budget(at_once)
        work = [_reading.read(stored.stores[name], how, budget) for name, how in wanted.items()]
        return await _reading.each(work, [*wanted])

    with _damage(who, stored.directory):
        return dict(zip(wanted, _reading.run(read()), strict=True))


@contextlib.contextmanager
def _damage(who: str, directory: Path) -> Iterator[None]:
    """Turns any error about files that others wrote into one that names them."""
    try:
        yield
    except JzeroError:
        raise
    except Exception as error:
        raise CheckpointError(damaged(who, directory, error)) from error


def damaged(who: str, directory: Any, error: Exception) -> str:
    """The message for a checkpoint that cannot be read: each leaf that is the reason, if leaves are."""
    errors = error.errors if isinstance(error, _reading.LeafErrors) else {"": error}
    found = [
        f"{named(name)}: {_first_line(reason)}" if name else _first_line(reason)
        for name, reason in errors.items()
    ]
    kinds = jax.errors.JaxRuntimeError | MemoryError
    # JAX's own errors and a host without memory come after the files were read.
    if all(isinstance(reason, kinds) for reason in errors.values()):
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


def _check_sizes(directory: Path, files: Sequence[Path], most: int) -> None:
    """For files that Orbax and tensorstore read into memory whole, whatever their sizes."""
    sizes = {named(str(path.relative_to(directory))): path.stat().st_size for path in files}
    bad = [f"{name} has {n} bytes, more than {most}" for name, n in sizes.items() if n > most]
    if bad:
        raise Broken("; ".join(bad[:3]))


def _is_read(name: str) -> bool:
    """Whether a file is read to restore: not what each process wrote before the merge."""
    return "ocdbt.process_" not in name


def _is_array(info: Any) -> bool:
    return getattr(info, "value_typestr", "string") != "string"


def _leaf(name: str, store: tensorstore.TensorStore | None) -> Leaf:
    if store is None:
        return Leaf(named(name), (), "string")
    return Leaf(
        named(name), store.shape, str(jax.dtypes.canonicalize_dtype(store.dtype.numpy_dtype))
    )


def _first_line(error: BaseException) -> str:
    """What tensorstore says first is what went wrong; then it repeats its whole configuration."""
    line = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, _json.NotRegular):
        return str(error.strerror)
    if isinstance(error, _json.Malformed):
        return "; ".join(map(str, error.args))[:300]
    return (line if isinstance(error, Broken) else f"{type(error).__name__}: {line}")[:300]
