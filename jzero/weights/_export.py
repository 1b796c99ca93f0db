# SPDX-License-Identifier: Apache-2.0
"""`export`: the parameters of a checkpoint as safetensors files, a block of rows in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero import _json
from jzero._errors import CheckpointError, OptionError, message
from jzero._in_turn import groups
from jzero._json import shown
from jzero._quantities import BYTES_RULE, parse_bytes
from jzero.checkpoint import _files, _reading, _stored, _stream
from jzero.checkpoint._bucket import Bucket
from jzero.checkpoint._match import masters
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER
from jzero.weights import _complete, _objects, _private, _safetensors
from jzero.weights._bindings import MadeArray, into_tensors
from jzero.weights._families import LAYOUTS, layout_of
from jzero.weights._layout import WeightLayout
from jzero.weights._safetensors import FLOATS, Tensor

WHO = "export"
_SUFFIX, _PREFIX = ".safetensors", "params/"
_SHOWN = 20


class _Export(NamedTuple):
    """A tensor to be, the open leaves that its values come from, and what reads these in blocks of it."""

    tensor: Tensor
    leaves: list[str]
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Exported(NamedTuple):
    """What an export wrote.

    Attributes:
      files: the last one is what was asked for, or its index; of a bucket, URLs.
      left_out: leaves that are in none of them.
    """

    files: list[Any]
    left_out: list[str]


def export_weights(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    select: str | None = None,
    max_file_size: str | None = None,
    overwrite: bool = False,
    layout: str | WeightLayout | None = None,
    config: Any = None,
) -> Exported:
    """Writes the parameters of a checkpoint to `out`, or to several files of `max_file_size` and an index.

    Whoever reads `out`, or its index, finds all of an older export or all of the new one, whenever that is.

    >>> import os, tempfile, jax.numpy as jnp, jzero, orbax.checkpoint as ocp
    >>> with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as orbax:
    ...     orbax.save(os.path.join(folder, "plain"), {"params": {"head": {"kernel": jnp.ones((3, 5))}}})
    ...     orbax.wait_until_finished()
    ...     out = os.path.join(folder, "out.safetensors")
    ...     exported = jzero.export_weights(os.path.join(folder, "plain"), out)
    ...     print(exported.files[0].name, exported.left_out)
    out.safetensors []

    Args:
      checkpoint: a checkpoint of Orbax, or a directory of steps (the latest).
      out: a file, or the URL of an object in a bucket.
      dtype: of floats; by default their own.
      select: in place of the parameters, leaves in whose names this regular expression is found.
      max_file_size: 5GB by default; in a bucket 256MB, and at most 512MB.
      overwrite: replaces an older export.
      layout: as of `import_weights`: tensors are those of Hugging Face's files.
      config: the model's config.json, or its entries: the tensors are held against it.

    Returns:
      The files, and what is in none of them.

    Raises:
      OptionError: an option, or the layout, is none; or there is such a file already.
      CheckpointError: leaves and tensors that have no counterpart, or another shape; or leaves are damaged.
    """
    _safetensors.check_dtype(WHO, dtype)
    bucket = Bucket.of(WHO, out)
    target, limit = _check(out, max_file_size, bucket)
    table = None if layout is None else layout_of(WHO, layout)
    if table is None and config is not None:
        raise OptionError(message(
            WHO, "config is given without a layout", "Tensors of a layout are held against it.",
            "Add layout, one of " + ", ".join(LAYOUTS) + "."))  # fmt: skip
    stored = _stored.find_latest(WHO, checkpoint)
    chosen = _chosen(stored, select)
    exports = (
        _exports(stored, chosen, dtype) if table is None
        else _laid_out(stored, chosen, dtype, table, config)
    )  # fmt: skip
    framework = "flax" if table is None else "pt"  # as Hugging Face's own files say
    files = _split(exports, limit)
    left_out = [name for name in stored.leaves if name not in {*chosen}]
    try:
        if bucket is not None:
            made = _objects.write(
                WHO, bucket, overwrite, len(files), partial(_write, stored, files, framework)
            )
            return Exported([*made], left_out)
        with _private.folder(f"{WHO} {target}", target, partial(_withdraw, target)) as folder:
            _check_free(target, overwrite)
            parts = _objects.part_names(
                target.stem, len(files), lambda name: os.path.lexists(target.parent / name)
            ) if len(files) > 1 else []  # fmt: skip
            written = _write(stored, files, framework, folder, parts or [target.name])
            _check_free(target, overwrite)  # That took a while.
            return Exported(_publish(written, target), left_out)
    except _reading.LeafErrors as error:
        raise CheckpointError(_stored.damaged(WHO, stored.directory, error)) from error
    except OSError as error:
        raise CheckpointError(message(
            f"{WHO} {target}", f"cannot be written: {error.strerror}", "Nothing was left of it.",
            "Check the path, its permissions, and the space on its disk.")) from error  # fmt: skip


export = export_weights  # as the command is called


def _check(out: str | Path, size: str | None, bucket: Bucket | None) -> tuple[Path, int]:
    target = _private.checked_path(WHO, out if bucket is None else bucket.prefix)
    default = "5GB" if bucket is None else _objects.FILE_SIZE
    limit = parse_bytes(default if size is None else size)
    if target.suffix != _SUFFIX:
        raise OptionError(message(
            WHO, f"the output is {str(out)!r}", f"Its suffix is {_SUFFIX}.",
            f"Write out{_SUFFIX}."))  # fmt: skip
    if limit is None:
        raise OptionError(message(
            WHO, f"max_file_size={size!r}", f"It is {BYTES_RULE}.",
            f"Leave it out for {default}."))  # fmt: skip
    if bucket is not None and limit > _objects.MAX_FILE_SIZE:
        raise OptionError(message(
            WHO, f"max_file_size={size!r} in a bucket", "A file is uploaded in one request: at most 512 MB.",
            f"Leave it out for {default}."))  # fmt: skip
    return target, limit


def _check_free(target: Path, overwrite: bool) -> None:
    there = _older(target)
    if directories := [path for path in there if path.is_dir()]:
        raise OptionError(message(
            WHO, f"{directories[0]} is a directory", "An export is files.", "Write another file."
        ))  # fmt: skip
    if there and not overwrite:
        raise OptionError(message(
            WHO, f"there is {there[0]} already", "Files are only overwritten when asked.",
            "Add --overwrite, or write another file."))  # fmt: skip


def _older(target: Path) -> list[Path]:
    """The index and files of a former export to the same name; what others are found by comes first."""
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    parts = sorted(path for path in beside if _is_part(path.name, target))
    return [path for path in (target, _index(target)) if os.path.lexists(path)] + parts


def _is_part(name: str, target: Path) -> bool:
    return bool(re.fullmatch(re.escape(target.stem) + _objects.PART, name))


def _index(target: Path) -> Path:
    return target.with_name(target.name + ".index.json")


def _chosen(stored: _stored.Stored, select: str | None) -> list[str]:
    """The leaves that `select` matches; by default parameters, by their role or where they are."""
    if select is not None:
        chosen = [name for name in stored.leaves if _regex(select).search(name)]
        rule = "A leaf is selected if the pattern is found in its name."
    else:
        roles = _roles(stored)
        known = [name for name in stored.leaves if roles.get(name) == PARAMETER]
        params = {*known, *_unread(known, stored)}
        chosen = [name for name in stored.leaves if name in params]
        chosen = chosen or [name for name in stored.leaves if name.startswith(_PREFIX)]
        rule = "Parameters are leaves that a Checkpointer noted as such, or those under params."
    if not chosen:
        tops = ", ".join(dict.fromkeys(name.split("/")[0] for name in stored.leaves))
        what = "no parameters" if select is None else f"nothing that --select {select!r:.100} finds"
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", f"{what} among its leaves, which are under: {tops}", rule,
            f"Say which they are with {'' if select is None else 'another '}--select REGEX."))  # fmt: skip
    return chosen


def _unread(known: Sequence[str], stored: _stored.Stored) -> set[str]:
    """Floating leaves in the trees of the known parameters: those of which the loss reads nothing.

    Their role is that of all that only an update reads; where they are tells them from moments.
    """
    tops: dict[str, list[str]] = {}
    for name in known:
        tops.setdefault(name.split("/")[0], []).append(name)
    found: set[str] = set()
    for names in tops.values():
        tree, copies = _tree(names, stored)
        found |= {
            name for name, leaf in stored.leaves.items()
            if name.startswith(f"{tree}/") and name not in copies and _is_float(leaf.dtype)
        }  # fmt: skip
    return found


def _tree(params: Sequence[str], stored: _stored.Stored) -> tuple[str, set[str]]:
    """The name of the tree that parameters are in, and what in it is a copy of some: moments, averages.

    That is what is called params, or else the largest without copies.
    """
    above = os.path.commonpath([name.rpartition("/")[0] or name for name in params])
    parts = above.split("/")
    if "params" in parts:
        return "/".join(parts[: parts.index("params") + 1]), set()
    ends = {(name.removeprefix(f"{above}/"), stored.leaves[name].shape) for name in params}
    copies = {
        name for name, leaf in stored.leaves.items()
        if name not in params
        and any(name.endswith(f"/{end}") and leaf.shape == shape for end, shape in ends)
    }  # fmt: skip
    trees = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    clear = [tree for tree in trees if not any(name.startswith(f"{tree}/") for name in copies)]
    return (clear[0] if clear else above), copies


def _is_float(dtype: Any) -> bool:
    return dtype != "string" and jnp.issubdtype(dtype, jnp.floating)


def _roles(stored: _stored.Stored) -> dict[str, str]:
    """The roles that were noted, if they are those of this checkpoint's leaves."""
    found = _stored.roles(_stored.notes(WHO, stored))
    known = (PARAMETER, OPTIMIZER, OTHER)
    bad = [f"{shown(name)} is noted, and not there" for name in found if name not in stored.leaves]
    bad += [f"{shown(name)} is noted as {shown(role)}, not as one of {', '.join(known)}"
            for name, role in found.items() if role not in known]  # fmt: skip
    if bad:
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", bad, "The notes of a checkpoint have roles of its leaves.",
            "They are damaged: export an earlier step, or say what to export with --select REGEX.",
            shown=_SHOWN))  # fmt: skip
    return found


def _regex(select: str) -> re.Pattern[str]:
    try:
        return re.compile(select)
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(message(
            WHO, f"select={select!r:.100}: {error}", "It is a regular expression of Python.", "Correct it."
        )) from error  # fmt: skip


class _Opened:
    """Open leaves, and where the values of each come from: its master, if it gets another dtype."""

    def __init__(self, stored: _stored.Stored, dtype: str | None):
        self._stored, self._dtype = stored, dtype
        self._stores = stored.stores
        self._wide = masters(f"{WHO} {stored.directory}", stored.leaves) if dtype else {}

    def dtypes(self, leaves: Sequence[str]) -> dict[str, np.dtype]:
        """Of the tensor that each becomes.

        Raises:
          CheckpointError: no tensor can have it.
        """
        found, bad = {}, []
        for leaf in leaves:
            own = self._stores[leaf].dtype.numpy_dtype if leaf in self._stores else "a string"
            found[leaf] = _wanted(own, self._dtype)
            if not _safetensors.can_hold(found[leaf]):
                bad.append(f"{leaf} is {own}, not a dtype of safetensors")
        if bad:
            raise CheckpointError(message(
                f"{WHO} {self._stored.directory}", bad, "Its dtypes are floats, integers and booleans.",
                "Leave some out with --select REGEX.", shown=_SHOWN))  # fmt: skip
        return found

    def source(self, leaf: str, wanted: np.dtype) -> tuple[str, Any]:
        """The name and the store that values come from."""
        own = self._stores[leaf].dtype.numpy_dtype
        name = leaf if wanted == own else self._wide.get(leaf, leaf)
        return name, self._stores[name]


def _exports(stored: _stored.Stored, leaves: Sequence[str], dtype: str | None) -> list[_Export]:
    """The tensors. In another dtype than the leaf's, values come from its master, if it has one."""
    opened = _Opened(stored, dtype)
    names = _tensor_names(leaves)
    _check_names(stored, names)
    exports = []
    for name, (leaf, wanted) in zip(names, opened.dtypes(leaves).items(), strict=True):
        source, store = opened.source(leaf, wanted)
        tensor = Tensor(name, wanted, tuple(store.shape))
        exports.append(_Export(tensor, [source], partial(_stream.read_blocks, source, store)))
    return exports


def _laid_out(
    stored: _stored.Stored, leaves: Sequence[str], dtype: str | None, layout: WeightLayout, config: Any
) -> list[_Export]:  # fmt: skip
    """The tensors that a layout makes of leaves."""
    opened, path = _Opened(stored, dtype), stored.directory
    shapes = {leaf: stored.leaves[leaf].shape for leaf in leaves}
    bound = into_tensors(f"{WHO} {path}", layout, shapes, _complete.expected(layout, config))
    if config is not None:
        made = {array.name: array.shape for array in bound.arrays}
        _complete.check(WHO, path, layout, made, config)
    dtypes, exports, bad = opened.dtypes(leaves), [], []
    for array in bound.arrays:
        found = {dtypes[leaf] for leaf in array.sources}
        if len(found) > 1:
            bad.append(
                f"{array.name} would be of leaves of {' and '.join(sorted(map(str, found)))}"
            )
            continue
        tensor = Tensor(array.name, found.pop(), array.shape)
        sources = {leaf: opened.source(leaf, tensor.dtype) for leaf in array.sources}
        names = [name for name, _ in sources.values()]
        exports.append(_Export(tensor, names, partial(_blocks, array, tensor, sources)))
    if bad:
        raise CheckpointError(message(
            f"{WHO} {path}", bad, "A tensor has one dtype.", "Export one with --dtype.",
            shown=_SHOWN))  # fmt: skip
    return exports


def _blocks(
    array: MadeArray, tensor: Tensor, sources: Mapping[str, tuple[str, Any]]
) -> Iterator[np.ndarray]:
    """All of a tensor, in order."""

    def read(leaf: str, index: tuple[slice, ...]) -> np.ndarray:
        name, store = sources[leaf]
        try:
            return np.asarray(store[index].read().result())
        except Exception as error:
            raise _reading.LeafErrors({name: error}) from error

    if tensor.nbytes:
        rows = (*array.shape, 1)[0]
        each = max(_stream.AT_ONCE * rows // tensor.nbytes, 1)
        for start in range(0, rows, each):
            yield array.read(slice(start, min(start + each, rows)), read)


def _tensor_names(leaves: Sequence[str]) -> list[str]:
    """The leaves' names with `.` for `/`, and without `params/` if all have it."""
    common = _PREFIX if all(leaf.startswith(_PREFIX) for leaf in leaves) else ""
    return [leaf.removeprefix(common).replace("/", ".") for leaf in leaves]


def _check_names(stored: _stored.Stored, names: Sequence[str]) -> None:
    bad = [f"{name} would be {num} tensors" for name, num in Counter(names).items() if num > 1]
    bad += [f"{name} would be a tensor, and is not a tensor's name" for name in names
            if name == _safetensors.METADATA]  # fmt: skip
    if bad:
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", bad, "Tensors have the names of leaves, with . for /.",
            "Leave some out with --select REGEX.", "tensors", shown=_SHOWN))  # fmt: skip


def _wanted(own: Any, dtype: str | None) -> Any:
    """The dtype of a tensor: integers keep theirs."""
    is_float = not isinstance(own, str) and _is_float(own)
    return np.dtype(FLOATS[dtype]) if dtype and is_float else own


def _split(exports: Sequence[_Export], limit: int) -> list[list[_Export]]:
    """Files of at most `limit` bytes of data, or of one tensor; in order, but aligned."""
    # Tensors of larger items first: so each begins at a multiple of its item.
    return [
        sorted(file, key=lambda export: -export.tensor.dtype.itemsize)
        for file in groups(exports, limit)
    ]


def _write(
    stored: _stored.Stored, files: Sequence[Sequence[_Export]], framework: str, folder: Path,
    names: Sequence[str], written: Callable[[Path], None] = lambda _: None,
) -> list[Path]:  # fmt: skip
    """Writes all files into `folder`, and says when each is; the index last."""
    paths, overflown = [folder / name for name in names], []
    for path, exports in zip(paths, files, strict=True):
        overflown += _write_file(path, exports, framework)
        if not overflown:
            written(path)
    if overflown:
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", [f"{leaf} has values beyond the largest" for leaf in overflown],
            "No number becomes infinite.", "Export another --dtype; bf16 has the range of float32.",
            shown=_SHOWN))  # fmt: skip
    if len(names) > 1:
        paths.append(folder / f"{names[0].rsplit('-00001-of-', 1)[0]}{_SUFFIX}.index.json")
        paths[-1].write_text(_index_text(files, names))
        _files.sync(paths[-1])
    _files.sync(folder)
    return paths


def _write_file(path: Path, exports: Sequence[_Export], framework: str) -> list[str]:
    """Writes one file; the leaves with finite values that the wanted dtype cannot hold."""
    overflown: dict[str, None] = {}
    with path.open("wb") as file:
        file.write(_safetensors.header([export.tensor for export in exports], framework))
        for export in exports:
            for block in export.blocks():
                values, fits = _safetensors.cast(block, export.tensor.dtype)
                if not fits:
                    overflown |= dict.fromkeys(export.leaves)
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())  # Before it gets the name of a complete file.
    return [*overflown]


def _index_text(files: Sequence[Sequence[_Export]], names: Sequence[str]) -> str:
    """As Hugging Face writes it."""
    total = sum(export.tensor.nbytes for file in files for export in file)
    pairs = zip(names, files, strict=True)
    weight_map = {export.tensor.name: name for name, file in pairs for export in file}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )


def _publish(written: Sequence[Path], target: Path) -> list[Path]:
    """Moves what is complete to where it was asked for; then what it replaces goes.

    What one finds at each moment, also after a kill or a power cut:

    1. Parts come, under names that no file had: `target` and its index are what they were.
    2. `target`, or the index, is replaced in one go, and is the new export from then on. If the older one
       had the other form, both are there, and each is complete. (Of the two, Hugging Face reads `target`.)
    3. What the older one was found by goes, `target` or the index, and only then its parts, which nothing
       names any more: never is there an index without its parts.

    Whoever has read an older index and finds its parts gone gets an error, and never parts of another export.
    """
    *parts, last = written
    moved = [path.rename(target.parent / path.name) for path in parts]
    _files.sync(target.parent)
    moved.append(last.replace(target.parent / last.name))
    _finish(target, moved)
    return moved


def _finish(target: Path, moved: Sequence[Path]) -> None:
    """Once the new export is in place: removes the older one, each file before those that it names."""
    try:
        _files.sync(target.parent)
        for path in _older(target):
            if path not in moved:
                path.unlink()
                _files.sync(target.parent)
    except OSError as error:
        raise CheckpointError(message(
            f"{WHO} {target}", f"the older export cannot be removed: {error}", "The new one is complete.",
            "Remove the older one's files.")) from error  # fmt: skip


def _withdraw(target: Path, folder: Path) -> None:
    """Takes back the parts that came before their index, which is still in the folder and names them."""
    index = folder / _index(target).name
    if not index.exists():
        return
    try:
        found = _json.read(WHO, index, {"weight_map": {str: str}})
    except CheckpointError:  # Not yet complete: before it is, no part comes.
        return
    for name in set(found["weight_map"].values()):
        if _is_part(name, target) and not (folder / name).exists():
            (target.parent / name).unlink(missing_ok=True)
    index.unlink()
