# SPDX-License-Identifier: Apache-2.0
"""`import`: safetensors files as a checkpoint, a block of rows in memory at a time."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, JzeroError, OptionError, message
from jzero._json import shown
from jzero.checkpoint import _files, _stream
from jzero.sharding.plan._stages import PARAMETER
from jzero.weights import _private, _safetensors
from jzero.weights._safetensors import Tensor

WHO = "import"
_MAX_NAME = 1000  # bytes; each part of a name is a level of the tree, which JAX walks by recursion


class _Held(NamedTuple):
    """A tensor, and the file that holds its data."""

    tensor: Tensor
    file: Path


def import_(source: str | Path, checkpoint: str | Path, *, prefix: str = "params") -> int:
    """Writes the tensors of a safetensors file, or of an index and its files, as an Orbax checkpoint.

    A tensor `a.b` becomes the leaf `prefix/a/b`.

    Returns:
      The number of tensors.
    """
    directory = _new_directory(checkpoint)
    _check_prefix(prefix)
    path = Path(source)
    held = _indexed(path) if path.suffix == ".json" else _in_file(path)
    names = {tensor: _leaf_name(tensor, prefix) for tensor in held}
    _check_names(names, path)
    leaves = {names[tensor]: _source(*entry) for tensor, entry in held.items()}
    try:
        _write(directory, leaves)
    except JzeroError:
        raise
    except Exception as error:
        raise CheckpointError(message(
            f"{WHO} {directory}", f"could not be written: {type(error).__name__}: {error}",
            "Nothing was left of it.", "Check the path, its permissions, and the space on its disk."
        )) from error  # fmt: skip
    return len(held)


def _new_directory(checkpoint: str | Path) -> Path:
    directory = Path(os.path.abspath(_private.checked_path(WHO, checkpoint)))
    if os.path.lexists(directory):
        _private.clear(WHO, directory)  # Whoever made it may have died just then.
        raise OptionError(message(
            WHO, f"there is {directory} already", "A checkpoint is a new directory.",
            "Name another, or remove it."))  # fmt: skip
    return directory


def _check_prefix(prefix: str) -> None:
    if prefix and (problem := _problem(prefix.split("/"))):
        raise OptionError(message(
            WHO, f"prefix={prefix!r:.100} {problem}", "It is a path in a tree.",
            "Leave it out for params."))  # fmt: skip


def _write(directory: Path, leaves: Mapping[str, _stream.LeafSource]) -> None:
    """Writes the checkpoint where nobody looks, and moves it when it is complete and on the disk."""
    notes = {"roles": dict.fromkeys(leaves, PARAMETER)}
    with _parents(directory), _private.folder(f"{WHO} {directory}", directory) as folder:
        written = folder / "checkpoint"
        _stream.write_leaves(written, _nested(leaves), notes)
        written.rename(directory)
        _files.sync(directory.parent)


@contextlib.contextmanager
def _parents(directory: Path) -> Iterator[None]:
    """Makes the directories that it is to be in; those that were missing go again if it is not made."""
    missing = [parent for parent in directory.parents if not parent.exists()]
    try:
        _files.make_directory(directory.parent)
        yield
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()  # It does nothing to those that are not empty.


def _in_file(path: Path) -> dict[str, _Held]:
    return {tensor.name: _Held(tensor, path) for tensor in _safetensors.read_header(WHO, path)}


def _indexed(path: Path) -> dict[str, _Held]:
    """All tensors of the files of an index, which must agree with it."""
    weight_map = _weight_map(path)
    files = {name: _in_file(path.parent / name) for name in sorted(set(weight_map.values()))}
    bad = [
        f"{tensor:.100} is not in {file}"
        for tensor, file in weight_map.items()
        if tensor not in files[file]
    ]
    bad += [
        f"{tensor:.100} in {file} is not in the index"
        for file, tensors in files.items()
        for tensor in tensors
        if weight_map.get(tensor) != file
    ]
    if bad:
        raise CheckpointError(message(
            f"{WHO} {path}", bad, "An index names the tensors of its files, no more and no less.",
            "Get index and files from one export.", "tensors", shown=20))  # fmt: skip
    return {tensor: files[file][tensor] for tensor, file in weight_map.items()}


def _weight_map(path: Path) -> dict[str, str]:
    found = _json.read(WHO, path, {"weight_map": {str: str}})["weight_map"]
    bad = [f"{shown(tensor)} is in {shown(file)}" for tensor, file in found.items()
           if not _is_beside(file)]  # fmt: skip
    if bad or not found:
        raise CheckpointError(message(
            f"{WHO} {path}", bad or "its weight_map has no tensors",
            "An index has a weight_map: for each tensor the name of a file beside it.",
            "Name the index, or the only file, of an export.", "tensors", shown=20))  # fmt: skip
    return found


def _is_beside(name: str) -> bool:
    """Whether it is a file's name, and not a path to elsewhere."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def _leaf_name(tensor: str, prefix: str) -> str:
    return "/".join([*filter(None, [prefix]), *tensor.split(".")])


def _check_names(names: Mapping[str, str], path: Path) -> None:
    """Leaves have different names, and none below them."""
    parts = {tensor: name.split("/") for tensor, name in names.items()}
    bad = [f"{shown(tensor)} {problem}" for tensor in names if (problem := _problem(parts[tensor]))]
    bad = bad or _clashes([*names.values()])
    if bad or not names:
        raise CheckpointError(message(
            f"{WHO} {path}", bad or "there are no tensors in it",
            "A tensor's name is its path in a tree, with . for /.", "Rename it in the file.",
            shown=20))  # fmt: skip


def _problem(parts: Sequence[str]) -> str | None:
    """Why no leaf can have a name of these parts."""
    if not all(parts):
        return "has an empty part between its dots and slashes"
    if ".." in parts or "." in parts:
        return "has a part of dots"
    if not all(part.isprintable() for part in parts):
        return "has characters that cannot be printed"
    if (nbytes := len("/".join(parts).encode())) > _MAX_NAME:
        return f"has {nbytes} bytes, more than {_MAX_NAME}"
    return None


def _clashes(names: Sequence[str]) -> list[str]:
    times = Counter(names)
    inner = {name[:i] for name in times for i, c in enumerate(name) if c == "/"}
    bad = [f"{name} would be {num} leaves" for name, num in times.items() if num > 1]
    return bad + [
        f"{name} would be a leaf, and have leaves below it" for name in times if name in inner
    ]


def _nested(leaves: Mapping[str, _stream.LeafSource]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


def _source(tensor: Tensor, file: Path) -> _stream.LeafSource:
    row = tensor.nbytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else 0

    def read(index: Any) -> np.ndarray:
        """Reads, and maps nothing: a file that becomes shorter is an error, and no SIGBUS."""
        first, last = (0, None) if index is ... else (index.start, index.stop)
        shape = tensor.shape if last is None else (last - first, *tensor.shape[1:])
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        with _json.open_regular(file) as opened:
            data = np.fromfile(opened, np.uint8, nbytes, offset=tensor.start + first * row)
        return data.view(tensor.dtype).reshape(shape)

    return _stream.LeafSource(tensor.shape, tensor.dtype, read)
