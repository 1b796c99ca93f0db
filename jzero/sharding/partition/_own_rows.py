# SPDX-License-Identifier: Apache-2.0
"""Look-ups of each row in itself: `x[arange(B), y]` takes an element of each row that its device has.

A column of indices that counts the rows becomes a batching dim of the `gather` or `scatter`, so that the
operand's dim and the indices' are one factor, and it runs on shards of both. A column that counts each row k
times, `x[repeat(arange(B), k), y]`, has the dim `[B, k]` then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.ir._regions import Region
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

# Fields of dimension numbers: dims that the indices' columns count, dims that the windows collapse, batching
# dims of the operand and of the indices, and dims of the result or the updates that are windows.
_NAMES = {
    "gather": ("start_index_map", "collapsed_slice_dims", "operand_batching_dims",
               "start_indices_batching_dims", "offset_dims"),
    "scatter": ("scatter_dims_to_operand_dims", "inserted_window_dims", "operand_batching_dims",
                "scatter_indices_batching_dims", "update_window_dims"),
}  # fmt: skip


class _OwnColumn(NamedTuple):
    """A column of the indices that counts along a dim."""

    column: int
    operand: int  # the operand's dim that it is an index of
    indices: int  # the dim of the indices along which it counts
    num: int  # how many rows it counts
    times: int  # how often it counts each


def in_own_rows(region: Region, eqn: Eqn) -> list[Eqn]:
    """The equation; if it looks up each row in itself, with batching dims."""
    names = _NAMES.get(eqn.primitive.name.partition("-")[0].partition("_")[0])
    if names is None or (columns := _columns(region, eqn)) is None:
        return [eqn]
    found = _own_column(
        region, eqn, columns, [getattr(eqn.params["dimension_numbers"], n) for n in names[:4]]
    )
    if found is None:
        return [eqn]
    writer, out = JaxprWriter(eqn), eqn.outvars[0]
    if found.times > 1:
        eqn, columns = _with_rows_apart(writer, eqn, columns, found, names)
    numbers = eqn.params["dimension_numbers"]
    map_, gone, of_operand, of_indices = (list(getattr(numbers, name)) for name in names[:4])
    map_.remove(found.operand)
    gone.remove(found.operand)
    pairs = sorted([*zip(of_operand, of_indices, strict=True), (found.operand, found.indices)])
    dims = [map_, gone, [a for a, _ in pairs], [b for _, b in pairs]]
    new = numbers._replace(**dict(zip(names[:4], map(tuple, dims), strict=True)))
    params = eqn.params | {"dimension_numbers": new, "indices_are_sorted": False}
    indices, *others = [x for i, x in enumerate(columns) if i != found.column]
    if others:
        shape = (*indices.aval.shape[:-1], 1 + len(others))
        joined = _jaxpr.var_like(eqn.invars[1].aval, shape)
        (indices,) = writer.add(
            jax.lax.concatenate_p, [indices, *others], [joined], dimension=len(shape) - 1
        )
    operand, _, *updates = eqn.invars
    writer.eqns.append(eqn.replace(invars=[operand, indices, *updates], params=params))
    if eqn.outvars[0] is not out:
        writer.reshape(eqn.outvars[0], out.aval.shape, out)
    return writer.eqns


def _with_rows_apart(
    writer: JaxprWriter, eqn: Eqn, columns: Sequence[Atom], found: _OwnColumn, names: Sequence[str]
) -> tuple[Eqn, list[Atom]]:
    """The equation and its columns, with dims `[rows, times]` for the one that counts rows several times.

    Writes reshapes of columns and updates; the result of a gather is still to be reshaped.
    """
    numbers, dim, num = eqn.params["dimension_numbers"], found.indices, found.num
    of_indices, windows = (getattr(numbers, name) for name in names[3:])
    operand, indices, *updates = eqn.invars
    rows = (updates or eqn.outvars)[0]
    at = [d for d in range(rows.aval.ndim) if d not in windows][dim]
    moved = [k + (k > dim) for k in of_indices], [d + (d > at) for d in windows]
    new = numbers._replace(**dict(zip(names[3:], map(tuple, moved), strict=True)))
    apart: list[Atom] = [writer.reshape(x, _split(x, dim, num)) for x in columns]
    eqn = eqn.replace(params=eqn.params | {"dimension_numbers": new})
    if updates:
        part = writer.reshape(rows, _split(rows, at, num))
        return eqn.replace(invars=[operand, indices, part]), apart
    return eqn.replace(outvars=[_jaxpr.var_like(rows.aval, _split(rows, at, num))]), apart


def _split(x: Atom, dim: int, num: int) -> tuple[int, ...]:
    shape = x.aval.shape
    return (*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])


def _columns(region: Region, eqn: Eqn) -> list[Atom] | None:
    """The columns that the indices are concatenated from; None if they are not."""
    maker = _maker(region, eqn.invars[1])
    if maker is None or maker.primitive.name != "concatenate":
        return None
    last = eqn.invars[1].aval.ndim - 1
    alone = all(x.aval.shape[-1:] == (1,) for x in maker.invars)
    return [*maker.invars] if maker.params["dimension"] == last and alone else None


def _own_column(
    region: Region, eqn: Eqn, columns: list[Atom], dims: list[list[int]]
) -> _OwnColumn | None:
    map_, gone, _, of_indices = dims
    shape, places = eqn.invars[0].aval.shape, range(eqn.invars[1].aval.ndim - 1)
    if len(columns) < 2:
        return None
    for i, (column, d) in enumerate(zip(columns, map_, strict=True)):
        for k in places:
            times, more = divmod(column.aval.shape[k], shape[d]) if shape[d] > 1 else (0, 0)
            may = d in gone and k not in of_indices and times and not more
            if may and _counts(region, column, k, times):
                return _OwnColumn(i, d, k, shape[d], times)
    return None


def _maker(region: Region, atom: Atom) -> Eqn | None:
    i = None if _jaxpr.is_literal(atom) else region.makers.get(atom)
    return None if i is None else region.jaxpr.eqns[i]


def _counts(region: Region, atom: Atom, dim: int, times: int) -> bool:
    """Whether a value is known to be 0, 1, 2, ... along a dim, each so many times."""
    dtype: Any = atom.aval.dtype
    if not np.issubdtype(dtype, np.integer) or np.iinfo(dtype).max < atom.aval.shape[dim]:
        return False
    if (eqn := _maker(region, atom)) is None:
        return _is_count(_constant(region, atom), dim, times)
    name, ins = eqn.primitive.name, eqn.invars
    if name == "iota":
        return bool(eqn.params["dimension"] == dim and times == 1)
    if name == "select_n":
        # JAX's `where(i < 0, i + n, i)` for negative indices; of NumPy's indices JAX evaluates `i < 0`
        # itself.
        if (test := _maker(region, ins[0])) is None:
            chosen = _constant(region, ins[0])
            return chosen is not None and not np.any(chosen) and _counts(region, ins[1], dim, times)
        below = test.primitive.name == "lt" and _is_zero(test.invars[1])
        return below and all(_counts(region, x, dim, times) for x in (test.invars[0], ins[1]))
    source = _source(region, eqn, atom, dim, times)
    return source is not None and _counts(region, *source)


def _source(
    region: Region, eqn: Eqn, out: Atom, dim: int, times: int
) -> tuple[Atom, int, int] | None:
    """What has the same numbers along a dim, along which dim, and how often each; None if that is unknown."""
    name, atom, shape = eqn.primitive.name, eqn.invars[0], out.aval.shape
    if name == "broadcast_in_dim" and dim in (to := [*eqn.params["broadcast_dimensions"]]):
        d = to.index(dim)
        return (atom, d, times) if atom.aval.shape[d] == shape[dim] else None
    if name == "tile":
        return (atom, dim, times) if eqn.params["reps"][dim] == 1 else None
    if name == "convert_element_type":
        return atom, dim, times
    if name == "squeeze":
        kept = [d for d in range(atom.aval.ndim) if d not in eqn.params["dimensions"]]
        return atom, kept[dim], times
    if name == "slice" and eqn.params["strides"] in (None, (1,) * len(shape)):
        bounds = [*zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)]
        part = _part(_maker(region, atom), bounds, dim)
        return None if part is None else (part, dim, times)
    if name == "unstack":  # `tuple(x)`, in newer JAX
        axis, at = eqn.params["axis"], [x is out for x in eqn.outvars].index(True)
        dim += dim >= axis
        bounds = [(0, size) for size in atom.aval.shape]
        bounds[axis] = at, at + 1
        part = _part(_maker(region, atom), bounds, dim)
        return None if part is None else (part, dim, times)
    if name == "reshape" and eqn.params["dimensions"] is None:
        every, num = _stride(shape, dim) * times, shape[dim] // times
        for d, size in enumerate(atom.aval.shape):
            repeats, more = divmod(every, _stride(atom.aval.shape, d))
            if not more and size == num * repeats:
                return atom, d, repeats
    return None


def _stride(shape: Sequence[int], dim: int) -> int:
    return math.prod(shape[dim + 1 :])


def _part(joins: Eqn | None, bounds: list[tuple[int, int]], dim: int) -> Atom | None:
    """The operand of a concatenation along another dim that is within some bounds of its result."""
    if joins is None or joins.primitive.name != "concatenate" or joins.params["dimension"] == dim:
        return None
    along, start = joins.params["dimension"], 0
    for part in joins.invars:
        whole = [(0, size) for size in part.aval.shape]
        whole[along] = start, start + part.aval.shape[along]
        if whole == bounds:
            return part
        start = whole[along][1]
    return None


def _constant(region: Region, atom: Atom) -> Any:
    consts = dict(zip(region.jaxpr.constvars, region.consts, strict=True))
    value: Any = atom.val if _jaxpr.is_literal(atom) else consts.get(atom)
    return None if isinstance(value, jax.core.Tracer) else value


def _is_count(value: Any, dim: int, times: int) -> bool:
    """Whether a constant is 0, 1, 2, ... along a dim, each so many times."""
    if value is None:
        return False
    line = np.arange(value.shape[dim]) // times
    line = line.reshape([-1 if d == dim else 1 for d in range(value.ndim)])
    return bool(np.array_equal(np.asarray(value), np.broadcast_to(line, value.shape)))


def _is_zero(atom: Atom) -> bool:
    value: Any = atom.val if _jaxpr.is_literal(atom) else None
    return value is not None and np.ndim(value) == 0 and bool(value == 0)
