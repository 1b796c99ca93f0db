# SPDX-License-Identifier: Apache-2.0
"""Look-ups of each row in itself: `x[arange(B), y]` takes an element of each row that its device has.

A column of indices that counts the rows becomes a batching dim of the `gather` or `scatter`, so that the
operand's dim and the indices' are one factor, and it runs on shards of both.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jzero.ir._regions import Region
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

# Fields of dimension numbers: dims that the indices' columns count, dims that the windows collapse, and the
# batching dims of the operand and of the indices.
_NAMES = {
    "gather": ("start_index_map", "collapsed_slice_dims", "operand_batching_dims",
               "start_indices_batching_dims"),
    "scatter": ("scatter_dims_to_operand_dims", "inserted_window_dims", "operand_batching_dims",
                "scatter_indices_batching_dims"),
}  # fmt: skip


def in_own_rows(region: Region, eqn: Eqn) -> list[Eqn]:
    """The equation; if it looks up each row in itself, with batching dims."""
    names = _NAMES.get(eqn.primitive.name.partition("-")[0].partition("_")[0])
    if names is None or (columns := _columns(region, eqn)) is None:
        return [eqn]
    numbers = eqn.params["dimension_numbers"]
    dims = [list(getattr(numbers, name)) for name in names]
    if (found := _own_column(region, eqn, columns, dims)) is None:
        return [eqn]
    column, d, k = found
    map_, gone, of_operand, of_indices = dims
    map_.remove(d)
    gone.remove(d)
    pairs = sorted([*zip(of_operand, of_indices, strict=True), (d, k)])
    dims = [map_, gone, [a for a, _ in pairs], [b for _, b in pairs]]
    new = numbers._replace(**dict(zip(names, map(tuple, dims), strict=True)))
    params = eqn.params | {"dimension_numbers": new, "indices_are_sorted": False}
    rest = [x for i, x in enumerate(columns) if i != column]
    operand, _, *others = eqn.invars
    if len(rest) == 1:
        return [eqn.replace(invars=[operand, rest[0], *others], params=params)]
    shape = (*rest[0].aval.shape[:-1], len(rest))
    joined = _jaxpr.var_like(eqn.invars[1].aval, shape)
    joins = _jaxpr.equation(jax.lax.concatenate_p, rest, [joined], eqn, dimension=len(shape) - 1)
    return [joins, eqn.replace(invars=[operand, joined, *others], params=params)]


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
) -> tuple[int, int, int] | None:
    """A column that counts along a dim of the indices: its number, the operand's dim, and that dim."""
    map_, gone, _, of_indices = dims
    shape, places = eqn.invars[0].aval.shape, range(eqn.invars[1].aval.ndim - 1)
    if len(columns) < 2:
        return None
    for i, (column, d) in enumerate(zip(columns, map_, strict=True)):
        for k in places:
            same = shape[d] == column.aval.shape[k] > 1
            if d in gone and k not in of_indices and same and _counts(region, column, k):
                return i, d, k
    return None


def _maker(region: Region, atom: Atom) -> Eqn | None:
    i = None if _jaxpr.is_literal(atom) else region.makers.get(atom)
    return None if i is None else region.jaxpr.eqns[i]


def _counts(region: Region, atom: Atom, dim: int) -> bool:
    """Whether a value is known to be 0, 1, 2, ... along a dim."""
    dtype: Any = atom.aval.dtype
    if not np.issubdtype(dtype, np.integer) or np.iinfo(dtype).max < atom.aval.shape[dim]:
        return False
    if (eqn := _maker(region, atom)) is None:
        return _is_count(_constant(region, atom), dim)
    name, ins = eqn.primitive.name, eqn.invars
    if name == "iota":
        return bool(eqn.params["dimension"] == dim)
    if name == "broadcast_in_dim" and dim in (to := [*eqn.params["broadcast_dimensions"]]):
        d = to.index(dim)
        return ins[0].aval.shape[d] == atom.aval.shape[dim] and _counts(region, ins[0], d)
    if name == "convert_element_type":
        return _counts(region, ins[0], dim)
    if name == "select_n":
        # JAX's `where(i < 0, i + n, i)` for negative indices; of NumPy's indices JAX evaluates `i < 0`
        # itself.
        if (test := _maker(region, ins[0])) is None:
            chosen = _constant(region, ins[0])
            return chosen is not None and not np.any(chosen) and _counts(region, ins[1], dim)
        below = test.primitive.name == "lt" and _is_zero(test.invars[1])
        return below and all(_counts(region, x, dim) for x in (test.invars[0], ins[1]))
    return False


def _constant(region: Region, atom: Atom) -> Any:
    consts = dict(zip(region.jaxpr.constvars, region.consts, strict=True))
    value: Any = atom.val if _jaxpr.is_literal(atom) else consts.get(atom)
    return None if isinstance(value, jax.core.Tracer) else value


def _is_count(value: Any, dim: int) -> bool:
    if value is None:
        return False
    line = np.arange(value.shape[dim]).reshape([-1 if d == dim else 1 for d in range(value.ndim)])
    return bool(np.array_equal(np.asarray(value), np.broadcast_to(line, value.shape)))


def _is_zero(atom: Atom) -> bool:
    value: Any = atom.val if _jaxpr.is_literal(atom) else None
    return value is not None and np.ndim(value) == 0 and bool(value == 0)
