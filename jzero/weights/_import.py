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

import jax
import jax.numpy as jnp
import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, JzeroError, OptionError, message
from jzero._json import shown
from jzero.checkpoint import _files, _stream
from jzero.checkpoint._bucket import Bucket
from jzero.checkpoint._match import leaf_names
from jzero.checkpoint._orbax import LeafSource
from jzero.checkpoint._reading import LeafErrors
from jzero.sharding.plan._stages import PARAMETER
from jzero.weights import _complete, _objects, _private, _safetensors, _sources
from jzero.weights._bindings import MadeArray, into_leaves
from jzero.weights._families import LAYOUTS, layout_of
from jzero.weights._layout import WeightLayout
from jzero.weights._safetensors import FLOATS, Tensor
from jzero.weights._sources import WeightFile

WHO = "import"
_MAX_NAME = 1000  # bytes; each part of a name is a level of the tree, which JAX walks by recursion


class _Held(NamedTuple):
    """A tensor, and the file that holds its data."""

    tensor: Tensor
    file: WeightFile

    def read(self, index: Sequence[slice]) -> np.ndarray:
        return _sources.read_part(self.file, self.tensor.start, *self.tensor[2:0:-1], index)


def import_weights(
    source: str | Path,
    checkpoint: str | Path,
    *,
    prefix: str = "params",
    layout: str | WeightLayout | None = None,
    like: Any = None,
    dtype: str | None = None,
    config: Any = None,
) -> int:
    """Writes the tensors of a safetensors file, or of an index and its files, as an Orbax checkpoint.

    Without a layout a tensor `a.b` becomes the leaf `prefix/a/b`. Either path may be a URL of a bucket. In
    memory is a block of a leaf's rows at a time; of tensors that a layout transposes also 1 GiB at most,
    so that files are read about once.

    >>> import os, tempfile, numpy as np, jzero
    >>> from safetensors.numpy import save_file
    >>> rule = jzero.WeightRule("lm_head.weight", "lm_head/kernel", "out d -> d out")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file, imported = os.path.join(folder, "in.safetensors"), os.path.join(folder, "imported")
    ...     save_file({"lm_head.weight": np.ones((5, 3), np.float32)}, file)
    ...     jzero.import_weights(file, imported, layout=jzero.WeightLayout("head", (rule,)))
    1

    Args:
      source: the file, the index, or the directory of a `model.safetensors` or its index.
      checkpoint: a new directory.
      prefix: what leaves are below.
      layout: the tensors are Hugging Face's, and become leaves of a model of Flax: a `WeightLayout`, the name
        of one of `LAYOUTS`, or a file with one, `table.py:NAME` or `table.json`.
      like: the parameters of the model, as `jax.eval_shape` returns them: leaves get their names, shapes and
        dtypes, below `prefix`. By default leaves have the names that the layout says first, and heads no
        dims of their own.
      dtype: of floats; by default that of `like`, or their own.
      config: the model's config.json, or its entries: the file is held against it.

    Returns:
      The number of leaves.

    Raises:
      OptionError: an option, or the layout, is none; or there is something of the checkpoint's name.
      CheckpointError: tensors and leaves that have no counterpart, or another shape; or files are damaged.
    """
    _safetensors.check_dtype(WHO, dtype)
    _check_like(like)
    bucket = Bucket.of(WHO, checkpoint)
    _check_prefix(prefix)
    path = _in_directory(_sources.find(WHO, source))
    table = None if layout is None else layout_of(WHO, layout)
    if table is None and (like is not None or config is not None):
        raise OptionError(message(
            WHO, "like or config is given without a layout", "They say what a layout makes of tensors.",
            "Add layout, one of " + ", ".join(LAYOUTS) + "."))  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(_sources.panels.clear)
        if bucket is None:
            directory = _new_directory(checkpoint)
        else:
            _objects.check_new(WHO, bucket)
            folder = stack.enter_context(_objects.staging(WHO, bucket))
            directory = folder / "checkpoint"
        held = _indexed(path) if str(path).endswith(".json") else _in_file(path)
        leaves = _as_they_are(held, prefix, path) if table is None else _laid_out(
            held, table, like, prefix, path, config)  # fmt: skip
        if dtype is not None:
            leaves = {name: _in_dtype(name, leaf, dtype) for name, leaf in leaves.items()}
        try:
            _write(directory, leaves)
        except JzeroError:
            raise
        except Exception as error:
            found = error.errors if isinstance(error, LeafErrors) else {"": error}
            if own := next((x for x in found.values() if isinstance(x, JzeroError)), None):
                raise own from error  # It says what to do.
            bad = [f"{name and f'{name} '}could not be written: {type(x).__name__}: {x}"
                   for name, x in found.items()]  # fmt: skip
            raise CheckpointError(message(
                f"{WHO} {directory}", bad, "Nothing was left of it.",
                "Check the path, its permissions, and the space on its disk.", "leaves", shown=20,
            )) from error  # fmt: skip
        if bucket is not None:
            _objects.upload(WHO, directory, bucket)
    return len(leaves)


import_ = import_weights  # as the command is called


def _as_they_are(held: Mapping[str, _Held], prefix: str, path: WeightFile) -> dict[str, LeafSource]:
    names = {tensor: _leaf_name(tensor, prefix) for tensor in held}
    _check_names(names, path)
    return {names[tensor]: _source(entry) for tensor, entry in held.items()}


def _laid_out(
    held: Mapping[str, _Held], layout: WeightLayout, like: Any, prefix: str, path: WeightFile, config: Any
) -> dict[str, LeafSource]:  # fmt: skip
    """The leaves that a layout makes of tensors."""
    shapes = {name: entry.tensor.shape for name, entry in held.items()}
    if config is not None:
        for first, second in _complete.tied(layout, shapes, config):
            _check_equal(held[first], held[second], path)
            del shapes[second]
        _complete.check(WHO, path, layout, shapes, config)
    wanted = {} if like is None else {
        "/".join(filter(None, [prefix, name])): leaf
        for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)
    }  # fmt: skip
    leaves = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    bound = into_leaves(f"{WHO} {path}", layout, shapes, leaves if wanted else None, prefix)
    _check_names({name: name for name in (array.name for array in bound.arrays)}, path)
    for first, second in bound.equal:
        _check_equal(held[first], held[second], path)
    made, bad = {}, []
    for array in bound.arrays:
        dtypes = {held[name].tensor.dtype for name in array.sources}
        if len(dtypes) > 1:
            bad.append(
                f"{array.name} would be of tensors of {' and '.join(sorted(map(str, dtypes)))}"
            )
            continue
        leaf = _array_source(array, held, dtypes.pop())
        if array.name in wanted and (dtype := np.dtype(wanted[array.name].dtype)) != leaf.dtype:
            leaf = _in_dtype(array.name, leaf, dtype)
        made[array.name] = leaf
    if bad:
        raise CheckpointError(message(
            f"{WHO} {path}", bad, "A leaf has one dtype.", "Convert the file first.", shown=20))  # fmt: skip
    return made


def _array_source(
    array: MadeArray, held: Mapping[str, _Held], dtype: np.dtype
) -> LeafSource:  # fmt: skip
    def read(index: Any) -> np.ndarray:
        if not math.prod(array.shape):
            return np.empty(array.shape, dtype)
        rows = slice(0, (*array.shape, 1)[0]) if index is ... else index
        return array.read(rows, lambda name, part: held[name].read(part))

    return LeafSource(array.shape, dtype, read)


def _in_dtype(name: str, leaf: LeafSource, wanted: Any) -> LeafSource:
    """A leaf of floats in another dtype, in which no number becomes infinite."""
    dtype = np.dtype(FLOATS[wanted] if isinstance(wanted, str) else wanted)
    if not (jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)):
        if isinstance(wanted, str):
            return leaf
        raise CheckpointError(message(
            f"{WHO} {name}", f"its tensors are {leaf.dtype}, and the leaf is {dtype}",
            "Floats become other floats.", "Correct like."))  # fmt: skip

    def read(index: Any) -> np.ndarray:
        made, fits = _safetensors.cast(leaf.read(index), dtype)
        if not fits:
            raise CheckpointError(message(
                f"{WHO} {name}", f"it has values beyond the largest {dtype}", "No number becomes infinite.",
                "Import another dtype; bf16 has the range of float32."))  # fmt: skip
        return made

    return LeafSource(leaf.shape, dtype, read)


def _check_equal(first: _Held, second: _Held, path: WeightFile) -> None:
    """That a tied tensor has the values of the one that has a leaf."""
    (one, other), same = (first.tensor, second.tensor), first.tensor[1:3] == second.tensor[1:3]
    rows = range(0, one.shape[0], max(_stream.AT_ONCE * one.shape[0] // max(one.nbytes, 1), 1))
    for start in rows if same else ():
        part = [slice(start, min(start + rows.step, one.shape[0])), *map(slice, one.shape[1:])]
        same = same and first.read(part).tobytes() == second.read(part).tobytes()
    if not same:
        raise CheckpointError(message(
            f"{WHO} {path}", f"{other.name} has no leaf, and other values than {one.name}",
            "In a tree without a leaf for it, it is tied.", "Untie them in the model."))  # fmt: skip


def _new_directory(checkpoint: str | Path) -> Path:
    directory = Path(os.path.abspath(_private.checked_path(WHO, checkpoint)))
    if os.path.lexists(directory):
        _private.clear(WHO, directory)  # Whoever made it may have died just then.
        raise OptionError(message(
            WHO, f"there is {directory} already", "A checkpoint is a new directory.",
            "Name another, or remove it."))  # fmt: skip
    return directory


def _in_directory(path: WeightFile) -> WeightFile:
    """What a directory has, as Hugging Face calls it; of both what its loader takes. A file is itself."""
    if not (isinstance(path, Path) and path.is_dir()):
        return path
    names = ("model.safetensors", "model.safetensors.index.json")
    for name in names:
        if (path / name).exists():
            return path / name
    raise CheckpointError(message(
        f"{WHO} {path}", f"there is no {' or '.join(names)} in it", "Of a directory one of these is read.",
        "Name the file, or its index."))  # fmt: skip


def _check_like(like: Any) -> None:
    leaves = jax.tree.leaves(like)
    if bad := [x for x in leaves if not (hasattr(x, "shape") and hasattr(x, "dtype"))]:
        raise OptionError(message(
            WHO, f"like has {bad[0]!r:.100}, which has no shape and dtype",
            "Its leaves are the parameters of a model, not the model or a function.",
            "Pass jax.eval_shape(model.init, ...)['params'], or nnx.state(model, nnx.Param)."))  # fmt: skip


def _check_prefix(prefix: str) -> None:
    if prefix and (problem := _problem(prefix.split("/"))):
        raise OptionError(message(
            WHO, f"prefix={prefix!r:.100} {problem}", "It is a path in a tree.",
            "Leave it out for params."))  # fmt: skip


def _write(directory: Path, leaves: Mapping[str, LeafSource]) -> None:
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


def _in_file(path: WeightFile) -> dict[str, _Held]:
    return {tensor.name: _Held(tensor, path) for tensor in _safetensors.read_header(WHO, path)}


def _indexed(path: WeightFile) -> dict[str, _Held]:
    """All tensors of the files of an index, which must agree with it."""
    weight_map = _weight_map(path)
    files = {
        name: _in_file(_sources.beside(path, name)) for name in sorted(set(weight_map.values()))
    }
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


def _weight_map(path: WeightFile) -> dict[str, str]:
    data = _sources.read_whole(WHO, path)
    found = _json.decode(WHO, str(path), data, {"weight_map": {str: str}})["weight_map"]
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


def _check_names(names: Mapping[str, str], path: WeightFile) -> None:
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


def _nested(leaves: Mapping[str, LeafSource]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


def _source(held: _Held) -> LeafSource:
    tensor = held.tensor

    def read(index: Any) -> np.ndarray:
        rows = slice(None) if index is ... else index
        return held.read([rows, *map(slice, tensor.shape[1:])][: len(tensor.shape)])

    return LeafSource(tensor.shape, tensor.dtype, read)
