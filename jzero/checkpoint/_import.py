"""`import`: safetensors files as a checkpoint, a block of rows in memory at a time."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jzero._errors import CheckpointError, OptionError, message
from jzero.checkpoint import _safetensors, _stream
from jzero.checkpoint._safetensors import Tensor
from jzero.sharding._plan import PARAMETER

WHO = "import"


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
    directory = epath.Path(checkpoint).absolute()
    if directory.exists():
        raise OptionError(message(
            WHO, f"there is {directory} already", "A checkpoint is a new directory.",
            "Name another, or remove it."))  # fmt: skip
    path = Path(source)
    held = _indexed(path) if path.suffix == ".json" else _in_file(path)
    names = {tensor: _leaf_name(tensor, prefix) for tensor in held}
    _check_names(names, path)
    leaves = {names[tensor]: _source(*entry) for tensor, entry in held.items()}
    tree = _nested(leaves)
    try:
        _stream.write_leaves(directory, tree, {"roles": dict.fromkeys(leaves, PARAMETER)})
    except Exception as error:
        raise CheckpointError(message(
            f"{WHO} {directory}", f"could not be written: {type(error).__name__}: {error}",
            "Nothing was left of it.", "Check the path, its permissions, and the space on its disk."
        )) from error  # fmt: skip
    return len(held)


def _in_file(path: Path) -> dict[str, _Held]:
    return {tensor.name: _Held(tensor, path) for tensor in _safetensors.read_header(WHO, path)}


def _indexed(path: Path) -> dict[str, _Held]:
    """All tensors of the files of an index, which must agree with it."""
    weight_map = _weight_map(path)
    files = {name: _in_file(path.parent / name) for name in sorted(set(weight_map.values()))}
    bad = [
        f"{tensor} is not in {file}"
        for tensor, file in weight_map.items()
        if tensor not in files[file]
    ]
    bad += [
        f"{tensor} in {file} is not in the index"
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
    try:
        match json.loads(path.read_text()):
            case {"weight_map": dict(found)} if found and all(map(_is_beside, found.values())):
                return found
        reason = "it has no weight_map of tensors to files beside it"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except ValueError as error:
        reason = f"it is not JSON: {error}"
    raise CheckpointError(message(
        f"{WHO} {path}", reason, "An index has a weight_map: the file of each tensor.",
        "Name the index, or the only file, of an export."))  # fmt: skip


def _is_beside(name: Any) -> bool:
    """Whether it is a file's name, and not a path to elsewhere."""
    return isinstance(name, str) and Path(name).name == name


def _leaf_name(tensor: str, prefix: str) -> str:
    return "/".join([*filter(None, [prefix]), *tensor.split(".")])


def _check_names(names: Mapping[str, str], path: Path) -> None:
    """Leaves have different names, and none below them."""
    times = Counter(names.values())
    inner = {name[:i] for name in times for i, c in enumerate(name) if c == "/"}
    bad = [f"{name} would be {num} leaves" for name, num in times.items() if num > 1]
    bad += [f"{name} would be a leaf, and have leaves below it" for name in times if name in inner]
    if bad or not names:
        raise CheckpointError(message(
            f"{WHO} {path}", bad or "there are no tensors in it",
            "A tensor's name is its path in a tree, with . for /.", "Rename it in the file.",
            shown=20))  # fmt: skip


def _nested(leaves: Mapping[str, _stream.Source]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


def _source(tensor: Tensor, file: Path) -> _stream.Source:
    row = tensor.nbytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else 0

    def read(index: Any) -> np.ndarray:
        """Reads, and maps nothing: a file that becomes shorter is an error, and no SIGBUS."""
        first, last = (0, None) if index is ... else (index.start, index.stop)
        shape = tensor.shape if last is None else (last - first, *tensor.shape[1:])
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        data = np.fromfile(file, np.uint8, nbytes, offset=tensor.start + first * row)
        return data.view(tensor.dtype).reshape(shape)

    return _stream.Source(tensor.shape, tensor.dtype, read)
