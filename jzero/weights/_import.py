# SPDX-License-Identifier: Apache-2.0
"""`import`: safetensors files as a checkpoint, a block of rows in memory at a time."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
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
from jzero.weights import _publish, _safetensors, _sources
from jzero.weights._complete import Expected
from jzero.weights._families import layout_or_none
from jzero.weights._layout import WeightLayout
from jzero.weights._plan import Made, Pair, Planner, dtypes_of
from jzero.weights._safetensors import FLOATS, Tensor, is_float
from jzero.weights._sources import WeightFile

WHO = "import"
_MAX_NAME = 1000  # bytes; each part of a name is a level of the tree, through which JAX recurses


class _Held(NamedTuple):
    """A tensor, and the file that holds its data."""

    tensor: Tensor
    file: WeightFile

    def read(self, index: Sequence[slice]) -> np.ndarray:
        return _sources.read_part(
            self.file, self.tensor.start, self.tensor.shape, self.tensor.dtype, index
        )


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

    Without a layout a tensor `a.b` becomes the leaf `prefix/a/b`. Either path may be a URL of a bucket.
    Memory holds a block of a leaf's rows at a time.

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
      prefix: the path above the leaves.
      layout: the tensors are Hugging Face's, and become leaves of a model of Flax: a `WeightLayout`, the name
        of one of `LAYOUTS`, or a file with one, `table.py:NAME` or `table.json`.
      like: the parameters of the model, as `jax.eval_shape` returns them: leaves get their names, shapes and
        dtypes, below `prefix`. By default leaves have the names that the layout says first, and heads no
        dims of their own.
      dtype: of floats; by default that of `like`, or their own.
      config: the model's config.json, or its entries: the file is checked against it.

    Returns:
      The number of leaves.

    Raises:
      OptionError: an option or the layout is invalid; or the checkpoint's path exists.
      CheckpointError: tensors and leaves that have no counterpart, or another shape; or files are damaged.
    """
    _safetensors.check_dtype(WHO, dtype)
    _check_like(like)
    bucket = Bucket.of(WHO, checkpoint)
    _check_prefix(prefix)
    file = _sources.find(WHO, source)
    table = layout_or_none(WHO, layout, like=like, config=config)
    with contextlib.ExitStack() as stack:
        if bucket is None:
            directory = Path(os.path.abspath(_publish.checked_path(WHO, checkpoint)))
            if os.path.lexists(directory):
                raise OptionError(message(
                    WHO, f"there is {directory} already", "A checkpoint is a new directory.",
                    "Name another, or remove it."))  # fmt: skip
        else:
            _publish.check_new(WHO, bucket)
            directory = stack.enter_context(_publish.staging(WHO, bucket)) / "checkpoint"
        held = _indexed(file) if str(file).endswith(".json") else _in_file(file)
        above = f"{prefix}/" if prefix else ""
        types = {
            above + name: leaf
            for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)
        }
        who = f"{WHO} {file}"
        pairs = (
            [Pair.same(x, above + x.replace(".", "/"), held[x].tensor.shape) for x in held] if table is None
            else _laid_out(who, held, table, types, prefix, config)
        )  # fmt: skip
        arrays = [array for pair in pairs for array in pair.as_leaves()]
        _check_names(who, arrays)
        own = {name: x.tensor.dtype for name, x in held.items()}
        dtypes = dtypes_of(who, arrays, own, "tensors", "Convert the file first.")
        leaves = {
            array.name: _leaf(array, held, own, types.get(array.name), dtype)
            for array, own in zip(arrays, dtypes, strict=True)
        }  # fmt: skip
        try:
            _write(directory, leaves)
        except JzeroError:
            raise
        except Exception as error:
            raise _not_written(directory, error) from error
        if bucket is not None:
            _publish.upload(WHO, directory, bucket)
    return len(leaves)


def _laid_out(
    who: str, held: Mapping[str, _Held], layout: WeightLayout, types: Mapping[str, Any], prefix: str,
    config: Any,
) -> list[Pair]:  # fmt: skip
    """Pairs of tensors and leaves by a layout; the leaves are those of `types`, if there are any."""
    shapes, expected = (
        {name: x.tensor.shape for name, x in held.items()},
        Expected(WHO, layout, config),
    )
    wanted = {name: tuple(leaf.shape) for name, leaf in types.items()}
    plan = Planner(
        who, layout, expected, tensors=shapes, leaves=wanted or None, prefix=prefix
    ).plan()  # fmt: skip
    for first, second in plan.equal:
        _check_equal(who, held[first], held[second])
        del shapes[second]
    expected.check(who, shapes)
    return plan.pairs


def _leaf(
    array: Made, held: Mapping[str, _Held], own: np.dtype, like: Any, dtype: str | None
) -> LeafSource:
    """Converts only floats to another dtype, and only if no number becomes infinite."""
    wanted = own if like is None else np.dtype(like.dtype)
    if dtype is not None and is_float(wanted):
        wanted = np.dtype(FLOATS[dtype])
    if own != wanted and not (is_float(own) and is_float(wanted)):
        raise CheckpointError(message(
            f"{WHO} {array.name}", f"its tensors are {own}, and the leaf is {wanted}",
            "Floats become other floats.", "Correct like."))  # fmt: skip

    def read(index: Any) -> np.ndarray:
        if not math.prod(array.shape):
            return np.empty(array.shape, wanted)
        rows = slice(0, (*array.shape, 1)[0]) if index is ... else index
        values = array.read(rows, lambda name, part: held[name].read(part))
        values, fits = _safetensors.cast(values, wanted)
        if not fits:
            raise CheckpointError(message(
                f"{WHO} {array.name}", f"it has values beyond the largest {wanted}",
                "No number becomes infinite.",
                "Import another dtype; bf16 has the range of float32."))  # fmt: skip
        return values

    return LeafSource(array.shape, wanted, read)


def _check_equal(who: str, first: _Held, second: _Held) -> None:
    """Refuses a tied tensor whose values differ from those of the one that has a leaf."""
    (one, other), same = (first.tensor, second.tensor), first.tensor[1:3] == second.tensor[1:3]
    rows = range(0, one.shape[0], max(_stream.AT_ONCE * one.shape[0] // max(one.nbytes, 1), 1))
    for start in rows if same else ():
        part = [slice(start, min(start + rows.step, one.shape[0])), *map(slice, one.shape[1:])]
        same = same and first.read(part).tobytes() == second.read(part).tobytes()
    if not same:
        raise CheckpointError(message(
            who, f"{other.name} has no leaf, and other values than {one.name}",
            "In a tree without a leaf for it, it is tied.", "Untie them in the model."))  # fmt: skip


def _check_like(like: Any) -> None:
    leaves = jax.tree.leaves(like)
    if like is not None and not leaves:
        raise OptionError(message(
            WHO, f"like={shown(like)}, which has no leaves", "Its leaves are the parameters of a model.",
            "Pass jax.eval_shape(model.init, ...)['params'], or leave it out."))  # fmt: skip
    if bad := [x for x in leaves if not (hasattr(x, "shape") and hasattr(x, "dtype"))]:
        raise OptionError(message(
            WHO, f"like has {bad[0]!r:.100}, which has no shape and dtype",
            "Its leaves are the parameters of a model, not the model or a function.",
            "Pass jax.eval_shape(model.init, ...)['params'], or nnx.state(model, nnx.Param)."))  # fmt: skip


def _check_prefix(prefix: str) -> None:
    if prefix and (problem := _problem(prefix)):
        raise OptionError(message(
            WHO, f"prefix={prefix!r:.100} {problem}", "It is a path in a tree.",
            "Leave it out for params."))  # fmt: skip


def _write(directory: Path, leaves: Mapping[str, LeafSource]) -> None:
    """Writes the checkpoint in a private folder, and moves it once it is complete and on the disk."""
    notes = {"roles": dict.fromkeys(leaves, PARAMETER)}
    missing = [parent for parent in directory.parents if not parent.exists()]
    try:
        with _publish.private(f"{WHO} {directory}", directory) as folder:
            written = folder / "checkpoint"
            _stream.write_leaves(written, _nested(leaves), notes)
            written.rename(directory)
            _files.sync(directory.parent)
    finally:
        for parent in missing:  # Remove the folders that were made for it, unless they are in use.
            with contextlib.suppress(OSError):
                parent.rmdir()  # fails for those that are not empty


def _not_written(directory: Path, error: Exception) -> JzeroError:
    found = error.errors if isinstance(error, LeafErrors) else {"": error}
    if own := next((x for x in found.values() if isinstance(x, JzeroError)), None):
        return own  # It says what to do.
    bad = [
        f"{name and f'{name} '}could not be written: {type(x).__name__}: {x}"
        for name, x in found.items()
    ]
    return CheckpointError(message(
        f"{WHO} {directory}", bad, "Nothing was left of it.",
        "Check the path, its permissions, and the space on its disk."))  # fmt: skip


def _in_file(file: WeightFile) -> dict[str, _Held]:
    return {tensor.name: _Held(tensor, file) for tensor in _safetensors.read_header(WHO, file)}


def _indexed(index: WeightFile) -> dict[str, _Held]:
    """All tensors of an index's files; both must agree."""
    form = {"weight_map": {str: str}}
    weight_map = _json.decode(WHO, str(index), index.whole(WHO), form)["weight_map"]
    bad = [
        f"{shown(x)} is in {shown(name)}" for x, name in weight_map.items() if not _is_beside(name)
    ]
    if bad or not weight_map:
        raise CheckpointError(message(
            f"{WHO} {index}", bad or "its weight_map has no tensors",
            "An index has a weight_map: for each tensor the name of a file beside it.",
            "Name the index, or the only file, of an export.", "tensors"))  # fmt: skip
    files = {name: _in_file(index.beside(name)) for name in sorted({*weight_map.values()})}
    bad = [f"{x:.100} is not in {name}" for x, name in weight_map.items() if x not in files[name]]
    bad += [
        f"{x:.100} in {name} is not in the index"
        for name, held in files.items() for x in held if weight_map.get(x) != name
    ]  # fmt: skip
    if bad:
        raise CheckpointError(message(
            f"{WHO} {index}", bad, "An index names the tensors of its files, no more and no less.",
            "Get index and files from one export.", "tensors"))  # fmt: skip
    return {tensor: files[name][tensor] for tensor, name in weight_map.items()}


def _is_beside(name: str) -> bool:
    """Whether it is the name of a file, and no path to elsewhere."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def _check_names(who: str, arrays: Sequence[Made]) -> None:
    """Refuses names that no leaf can have, names of several leaves, and leaves below leaves."""
    times = Counter(array.name for array in arrays)
    inner = {name[:i] for name in times for i, c in enumerate(name) if c == "/"}
    bad = [f"{shown(x.sources[0])} {found}" for x in arrays if (found := _problem(x.name))]
    bad = bad or [f"{name} would be {num} leaves" for name, num in times.items() if num > 1]
    bad = bad or [
        f"{name} would be a leaf, and have leaves below it" for name in times if name in inner
    ]
    if bad or not arrays:
        raise CheckpointError(message(
            who, bad or "there are no tensors in it", "A tensor's name is its path in a tree, with . for /.",
            "Rename it in the file."))  # fmt: skip


def _problem(name: str) -> str | None:
    """Why no leaf can have this name."""
    parts = name.split("/")
    if not all(parts):
        return "has an empty part between its dots and slashes"
    if {".", ".."} & {*parts}:
        return "has a part of dots"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if (nbytes := len(name.encode())) > _MAX_NAME:
        return f"has {nbytes} bytes, more than {_MAX_NAME}"
    return None


def _nested(leaves: Mapping[str, LeafSource]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree
