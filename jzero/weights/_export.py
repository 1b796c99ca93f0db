# SPDX-License-Identifier: Apache-2.0
"""`export`: the parameters of a checkpoint as safetensors files, a block of rows in memory at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jzero._errors import CheckpointError, OptionError, message
from jzero._in_turn import groups
from jzero._json import shown
from jzero._quantities import BYTES_RULE, parse_bytes
from jzero.checkpoint import _files, _reading, _stored, _stream
from jzero.checkpoint._bucket import Bucket
from jzero.checkpoint._match import masters
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER
from jzero.weights import _publish, _safetensors
from jzero.weights._complete import Expected
from jzero.weights._families import layout_or_none
from jzero.weights._layout import WeightLayout
from jzero.weights._plan import Made, Pair, Planner, dtypes_of
from jzero.weights._safetensors import FLOATS, Tensor, is_float
from jzero.weights._sources import LocalFile, read_part

WHO = "export"
_PREFIX = "params/"


class _Export(NamedTuple):
    """A tensor to write, the array it is made of, and name and store of each leaf that this reads."""

    tensor: Tensor
    array: Made
    sources: Mapping[str, tuple[str, Any]]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Exported(NamedTuple):
    """What an export wrote."""

    files: list[Any]  # the last one is what was asked for, or its index; of a bucket, URLs
    left_out: list[str]  # leaves that are in none of them


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

    A reader of `out`, or of the index and then its files, sees all of an older export or all of the new one,
    or finds that files of the older one are gone; never some of each.

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
      select: instead of the parameters, the leaves whose names match this regular expression.
      max_file_size: 5GB by default; in a bucket 256MB, and at most 512MB.
      overwrite: replaces an older export.
      layout: as of `import_weights`: tensors are those of Hugging Face's files.
      config: the model's config.json, or its entries: the tensors are checked against it.

    Returns:
      The files, and the leaves that are in none of them.

    Raises:
      OptionError: an option, or the layout, is none; or there is such a file already.
      CheckpointError: leaves and tensors that have no counterpart, or another shape; or leaves are damaged.
    """
    _safetensors.check_dtype(WHO, dtype)
    bucket = Bucket.of(WHO, out)
    target, limit = _check(out, max_file_size, bucket)
    table = layout_or_none(WHO, layout, config=config)
    stored = _stored.find_latest(WHO, checkpoint)
    chosen = _chosen(stored, select)
    exports = _exports(stored, chosen, dtype, table, config)
    framework = "flax" if table is None else "pt"  # as Hugging Face's own files say
    # Larger dtypes come first, so that each tensor is aligned to its dtype.
    files = [sorted(x, key=lambda x: -x.tensor.dtype.itemsize) for x in groups(exports, limit)]
    write = partial(_write, stored, files, framework)
    try:
        made: list[Any] = (
            [*_publish.in_directory(WHO, target, overwrite, len(files), write)] if bucket is None
            else [*_publish.in_bucket(WHO, bucket, overwrite, len(files), write)]
        )  # fmt: skip
    except _reading.LeafErrors as error:
        raise CheckpointError(_stored.damaged(WHO, stored.directory, error)) from error
    except OSError as error:
        raise CheckpointError(message(
            f"{WHO} {target}", f"cannot be written: {error.strerror}", "Nothing was left of it.",
            "Check the path, its permissions, and the space on its disk.")) from error  # fmt: skip
    return Exported(made, [name for name in stored.leaves if name not in {*chosen}])


def _check(out: str | Path, size: str | None, bucket: Bucket | None) -> tuple[Path, int]:
    target = _publish.checked_path(WHO, out if bucket is None else bucket.prefix)
    default = "5GB" if bucket is None else _publish.FILE_SIZE
    limit = parse_bytes(default if size is None else size)
    if target.suffix != _publish.SUFFIX:
        raise OptionError(message(
            WHO, f"the output is {str(out)!r}", f"Its suffix is {_publish.SUFFIX}.",
            f"Write out{_publish.SUFFIX}."))  # fmt: skip
    rule = f"It is {BYTES_RULE}." if limit is None else (
        "A file is uploaded in one request: at most 512 MB."
        if bucket is not None and limit > _publish.MAX_FILE_SIZE else "")  # fmt: skip
    if limit is None or rule:
        raise OptionError(message(
            WHO, f"max_file_size={size!r}", rule, f"Leave it out for {default}."))  # fmt: skip
    return target, limit


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
    """Floating leaves of the parameters' trees that the loss does not read.

    Their role is that of everything that only an update reads; their place tells them from moments.
    """
    tops: dict[str, list[str]] = {}
    for name in known:
        tops.setdefault(name.split("/")[0], []).append(name)
    found: set[str] = set()
    for names in tops.values():
        tree, copies = _tree(names, stored)
        found |= {
            name for name, leaf in stored.leaves.items()
            if name.startswith(f"{tree}/") and name not in copies and is_float(leaf.dtype)
        }  # fmt: skip
    return found


def _tree(params: Sequence[str], stored: _stored.Stored) -> tuple[str, set[str]]:
    """The tree that holds the parameters, and the leaves in it that are copies of some: moments, averages.

    It is the one named params, or else the largest without copies.
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


def _roles(stored: _stored.Stored) -> dict[str, str]:
    """The roles in a checkpoint's notes; refuses those that are not of its leaves."""
    found = _stored.roles(_stored.notes(WHO, stored))
    known = (PARAMETER, OPTIMIZER, OTHER)
    bad = [f"{shown(name)} is noted, and not there" for name in found if name not in stored.leaves]
    bad += [f"{shown(name)} is noted as {shown(role)}, not as one of {', '.join(known)}"
            for name, role in found.items() if role not in known]  # fmt: skip
    if bad:
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", bad, "The notes of a checkpoint have roles of its leaves.",
            "They are damaged: export an earlier step, or say what to export with --select REGEX."
        ))  # fmt: skip
    return found


def _regex(select: str) -> re.Pattern[str]:
    try:
        return re.compile(select)
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(message(
            WHO, f"select={select!r:.100}: {error}", "It is a regular expression of Python.", "Correct it."
        )) from error  # fmt: skip


def _exports(
    stored: _stored.Stored, leaves: Sequence[str], dtype: str | None, layout: WeightLayout | None, config: Any
) -> list[_Export]:  # fmt: skip
    """The tensors to write. In another dtype than the leaf's, values come from its master, if it has one."""
    who = f"{WHO} {stored.directory}"
    stores = stored.stores
    wide = masters(who, stored.leaves) if dtype else {}
    own = {x: stores[x].dtype.numpy_dtype if x in stores else "a string" for x in leaves}
    wanted = {x: np.dtype(FLOATS[dtype]) if dtype and is_float(own[x]) else own[x] for x in leaves}
    if bad := [x for x in leaves if wanted[x] not in _safetensors.NAMES]:
        raise CheckpointError(message(
            who, [f"{x} is {own[x]}, not a dtype of safetensors" for x in bad],
            "Its dtypes are floats, integers and booleans.",
            "Leave some out with --select REGEX."))  # fmt: skip
    shapes = {leaf: stored.leaves[leaf].shape for leaf in leaves}
    if layout is None:
        pairs = [Pair.same(x, leaf, shapes[leaf]) for leaf, x in _names(who, leaves).items()]
    else:
        expected = Expected(WHO, layout, config)
        pairs = Planner(who, layout, expected, leaves=shapes).plan().pairs
    arrays = [array for pair in pairs for array in pair.as_tensors()]
    if layout is not None:
        expected.check(who, {array.name: array.shape for array in arrays})
    exports = []
    for array, kind in zip(
        arrays, dtypes_of(who, arrays, wanted, "leaves", "Export one with --dtype."), strict=True
    ):
        names = {x: x if kind == own[x] else wide.get(x, x) for x in array.sources}
        sources = {leaf: (name, stores[name]) for leaf, name in names.items()}
        exports.append(_Export(Tensor(array.name, kind, array.shape), array, sources))
    return exports


def _names(who: str, leaves: Iterable[str]) -> dict[str, str]:
    """Names of tensors: those of leaves with `.` for `/`, and without `params/` if all have it."""
    common = _PREFIX if all(leaf.startswith(_PREFIX) for leaf in leaves) else ""
    names = {leaf: leaf.removeprefix(common).replace("/", ".") for leaf in leaves}
    times = Counter(names.values())
    bad = [f"{name} would be {num} tensors" for name, num in times.items() if num > 1]
    if _safetensors.METADATA in times:
        bad.append(f"{_safetensors.METADATA} would be a tensor, and is not a tensor's name")
    if bad:
        raise CheckpointError(message(
            who, bad, "Tensors have the names of leaves, with . for /.",
            "Leave some out with --select REGEX.", "tensors"))  # fmt: skip
    return names


class _Leaves:
    """Reads stored leaves for tensors; one that is read by columns is first copied to disk.

    So each chunk is decoded once.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, LocalFile] = {}

    def blocks(self, export: _Export) -> Iterator[np.ndarray]:
        """All of a tensor, in order."""
        array, sources = export.array, export.sources
        names = {name for name, _ in sources.values()}
        for name in self._files.keys() - names:
            self._files.pop(name).path.unlink()
        if array.is_copy:
            yield from _stream.read_blocks(*sources[array.sources[0]])
            return

        def read(leaf: str, index: tuple[slice, ...]) -> np.ndarray:
            name, store = sources[leaf]
            if name not in self._files:
                self._files[name] = LocalFile(self._folder / secrets.token_hex(8))
                with self._files[name].path.open("xb") as file:
                    for block in _stream.read_blocks(name, store):
                        file.write(_bytes_of(block))
            dtype = store.dtype.numpy_dtype
            return read_part(self._files[name], 0, store.shape, dtype, index)

        rows = (*array.shape, 1)[0] if export.nbytes else 0
        # Small blocks, for which malloc reuses memory: new pages take longer than the read.
        each = max(_stream.AT_ONCE // 4 * rows // max(export.nbytes, 1), 1)
        for start in range(0, rows, each):
            yield array.read(slice(start, min(start + each, rows)), read)


def _write(
    stored: _stored.Stored, files: Sequence[Sequence[_Export]], framework: str, folder: Path,
    names: Sequence[str], written: Callable[[Path], None],
) -> list[Path]:  # fmt: skip
    """Writes all files into `folder`, and calls `written` after each; the index comes last."""
    paths, overflown, leaves = [folder / name for name in names], list[str](), _Leaves(folder)
    for path, exports in zip(paths, files, strict=True):
        overflown += _write_file(path, exports, framework, leaves)
        if not overflown:
            written(path)
    if overflown:
        raise CheckpointError(message(
            f"{WHO} {stored.directory}", [f"{leaf} has values beyond the largest" for leaf in overflown],
            "No number becomes infinite.",
            "Export another --dtype; bf16 has the range of float32."))  # fmt: skip
    if len(names) > 1:
        paths.append(folder / f"{names[0].rsplit('-00001-of-', 1)[0]}{_publish.SUFFIX}.index.json")
        paths[-1].write_text(_index(dict(zip(names, files, strict=True))))
        _files.sync(paths[-1])
    _files.sync(folder)
    return paths


def _write_file(
    path: Path, exports: Iterable[_Export], framework: str, leaves: _Leaves
) -> list[str]:
    """Writes one file; the leaves with finite values that the wanted dtype cannot hold."""
    overflown: dict[str, None] = {}
    with path.open("wb") as file:
        file.write(_safetensors.header([export.tensor for export in exports], framework))
        for export in exports:
            for block in leaves.blocks(export):
                values, fits = _safetensors.cast(block, export.tensor.dtype)
                if not fits:
                    overflown |= dict.fromkeys(name for name, _ in export.sources.values())
                file.write(_bytes_of(values))
        file.flush()
        os.fsync(file.fileno())  # before it gets its final name
    return [*overflown]


def _bytes_of(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _index(files: Mapping[str, Sequence[_Export]]) -> str:
    total = sum(export.nbytes for exports in files.values() for export in exports)
    weight_map = {x.tensor.name: name for name, exports in files.items() for x in exports}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )
