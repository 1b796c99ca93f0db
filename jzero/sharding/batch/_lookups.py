# SPDX-License-Identifier: Apache-2.0
"""Look-ups along the batch: of one's own row, of rows that other devices have, and their transposes."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.sharding.batch._along import concatenate
from jzero.sharding.batch._body import BatchRule, Body, RuleInRows
from jzero.sharding.batch._cheapest import cheapest, elsewhere, factors_of, run_factor
from jzero.sharding.batch._rows import FULL, Form, Rows, even_rows, is_of_iteration
from jzero.sharding.batch._values import BatchValue, rows_of, whole
from jzero.sharding.batch._waiting import on_whole
from jzero.tracing._types import Atom, Aval, Eqn

MODES = lax.GatherScatterMode
SCATTERS = _rules.named(_rules.Cost.LOOKUP) - {"gather"}


# -- x[arange(B), y] takes of each row an element, which is its device's ------------------------------


def _note_columns(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """Remembers what an array of indices is put together from."""
    if any(is_of_iteration(v.form) for v in ins):
        return None
    dim, out = eqn.params["dimension"], eqn.outvars[0].aval
    rows = [v.form for v in ins if isinstance(v.form, Rows)]
    if any(form.dim == dim for form in rows):
        along = concatenate(body, eqn, ins)
        if along is not None:
            return along
    if dim != out.ndim - 1 or any(v.aval.shape[dim] != 1 for v in ins):
        return None
    if rows:
        (atom,) = body.emit(eqn, [body.at(v, rows[0]) for v in ins], [rows[0]])
        made = rows_of(out, rows[0], atom)
    elif any(v.constant is not None for v in ins):
        (made,) = on_whole(body, eqn, ins)
    else:
        return None
    made.columns = dict(enumerate(ins))
    return [made]


def _counts_rows(indices: BatchValue, column: int, dim: int) -> bool:
    """Whether a column of an array of indices is 0, 1, 2, ... along a dim."""
    value = (indices.columns or {0: indices}).get(column)
    if value is None or value.constant is None:
        return False
    shape = value.aval.shape
    counts = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return bool(np.array_equal(value.constant(), np.broadcast_to(counts, shape)))


def _own_rows(
    ins: list[BatchValue], numbers: Sequence[int], places: list[int], batching: Collection[int]
) -> tuple[int, int, Rows] | None:
    """`(column, dim of the operand, rows)` if every row of the indices names that row of the operand.

    `places` are dims of the updates, for those of the indices; `batching` dims of the indices are taken by
    others of the operand.
    """
    operand, indices, *_ = ins
    for k in range(indices.aval.ndim - 1):
        if k in batching:
            continue
        if isinstance(indices.form, Rows) and indices.form.dim != k:
            continue
        for column, dim in enumerate(numbers):
            dims = zip(ins, (dim, k, places[k]), strict=False)
            held = [v.form for v, d in dims if isinstance(v.form, Rows) and v.form.dim == d]
            same = held and operand.aval.shape[dim] == indices.aval.shape[k]
            if same and _counts_rows(indices, column, k):
                return column, dim, held[0].at(k)
    return None


def _gather(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    operand, indices = ins
    if any(is_of_iteration(v.form) for v in ins):
        return None
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    places = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    found = _own_rows(ins, numbers.start_index_map, places, numbers.start_indices_batching_dims)
    if found is None or found[1] not in numbers.collapsed_slice_dims:
        return _look_up(body, eqn, ins)
    column, dim, rows = found
    (local,) = body.inline(_in_own, (column, rows), body.at(indices, rows))
    new = rows.at(places[rows.dim])
    (atom,) = body.emit(eqn, [body.at(operand, rows.at(dim)), local], [new])
    return [rows_of(out, new, atom)]


def _scatter(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    operand, indices, updates = ins
    if any(is_of_iteration(v.form) for v in ins):
        return None
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    places = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    found = _own_rows(
        ins, numbers.scatter_dims_to_operand_dims, places, numbers.scatter_indices_batching_dims
    )
    if found is None or found[1] not in numbers.inserted_window_dims:
        return _add_to_rows(body, eqn, ins)
    column, dim, rows = found
    (local,) = body.inline(_in_own, (column, rows), body.at(indices, rows))
    new = rows.at(dim)
    moved = body.at(updates, rows.at(places[rows.dim]))
    (atom,) = body.emit(eqn, [body.at(operand, new), local, moved], [new])
    return [rows_of(out, new, atom)]


def _in_own(column: int, rows: Rows, indices: jax.Array) -> jax.Array:
    """The indices, of which a column counts this device's rows."""
    counts = lax.broadcasted_iota(indices.dtype, indices.shape, rows.dim)
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where(columns == column, counts, indices)


# -- rows that other devices have ----------------------------------------------------------------------


def _look_up(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A look-up in the batch by whole indices: its result has rows along them, by what moves least.

    Devices look up what is in their own rows, and add that up. Or they exchange their rows for parts of all
    rows, and what they found in these for rows of it. Or all rows are gathered, once for all look-ups.
    """
    (operand, indices), out = ins, eqn.outvars[0].aval
    rows, numbers = operand.form, eqn.params["dimension_numbers"]
    if not isinstance(rows, Rows) or rows.dim not in numbers.start_index_map:
        return None
    kept = any(factor.ins[0] == rows.dim for factor in factors_of(eqn))
    if isinstance(indices.form, Rows) or kept:
        return None
    new = _rows_of_indices(body, eqn, out)
    nbytes = _rules.size_in_bytes(out)
    own = (
        nbytes * (1 if new is not None and body.exchanges else 2)
        if _is_sum(eqn, rows)
        else math.inf
    )
    found = elsewhere(body, eqn, ins)
    other = math.inf if found is None else found[0] + nbytes / body.num
    whole = body.cost(operand, FULL)
    if own < min(other, whole):
        return [_found_by_all(body, eqn, ins, rows, new)]
    if found is not None and other < whole:
        (made,) = run_factor(body, eqn, ins, *found[1:])
    elif new is not None:
        (made,) = on_whole(body, eqn, ins, "rows are looked up")
    else:
        return None
    if new is None:
        return [made]
    # Not yet in rows of the indices: a reshape may say which.
    return [BatchValue(out, new, dict(made.atoms), make=functools.partial(_moved, body, made))]


def _moved(body: Body, made: BatchValue, value: BatchValue, form: Form) -> Atom:
    return body.at(made, form)


def _rows_of_indices(body: Body, eqn: Eqn, out: Aval) -> Rows | None:
    """Rows along the longest dim of the indices, if devices can have some each."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    dims = [d for d in range(out.ndim) if d not in offsets and out.shape[d] % body.num == 0]
    dim = max(dims, key=lambda d: out.shape[d], default=None)
    return None if dim is None or not out.shape[dim] else even_rows(dim, out.shape[dim], body.num)


def _is_sum(eqn: Eqn, rows: Rows) -> bool:
    """Whether the result is the sum of what devices find in their own rows."""
    known = eqn.params["mode"] in (MODES.FILL_OR_DROP, MODES.CLIP, MODES.PROMISE_IN_BOUNDS)
    extended = jnp.issubdtype(eqn.outvars[0].aval.dtype, jax.dtypes.extended)
    return eqn.params["slice_sizes"][rows.dim] == 1 and known and not extended


def _found_by_all(
    body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows, new: Rows | None
) -> BatchValue:
    (operand, indices), out = ins, eqn.outvars[0].aval
    numbers, size = eqn.params["dimension_numbers"], operand.aval.shape[rows.dim]
    reason = "each device looks up what is in its rows"
    body.note_movement(_rules.size_in_bytes(out), reason, out)
    column, fills = (
        numbers.start_index_map.index(rows.dim),
        eqn.params["mode"] == MODES.FILL_OR_DROP,
    )
    static = (column, rows, body.num, size, fills)
    local, mine = body.inline(_in_rows, static, body.at(indices, FULL), body.index)
    (found,) = body.emit(
        eqn, [body.at(operand, rows), local], [FULL], indices_are_sorted=False, unique_indices=False
    )
    places = tuple(d for d in range(out.ndim) if d not in numbers.offset_dims)
    (found,) = body.inline(_if_mine, (places,), found, mine)
    if new is not None and body.exchanges:
        return rows_of(out, new, body.reduce_scatter(found, new))
    total = body.reduce(found, "sum")
    return whole(total) if new is None else rows_of(out, new, body.take(total, new))


def _in_rows(
    column: int, rows: Rows, num: int, size: int, fills: bool, indices: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Indices into this device's rows, and which are to be looked up by it.

    What is out of bounds is so for the first device too, which looks it up: the operation says what it finds.
    """
    at = jnp.minimum(indices[..., column], min(size, jnp.iinfo(indices.dtype).max))
    at = at.astype(jnp.int32)
    if not fills:
        at = jnp.clip(at, 0, size - 1)
    block, place = at // (num * rows.inner), at % (num * rows.inner)
    outside = (at < 0) | (at >= size)
    inside = ~outside & (place // rows.inner == index)
    local = jnp.where(inside, block * rows.inner + place % rows.inner, rows.size if fills else 0)
    # A small dtype holds no number that is out of bounds for sure.
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    wide = jnp.minimum(indices, jnp.iinfo(jnp.int32).max if _is_wide(indices) else indices)
    moved = jnp.where(columns == column, local[..., None], wide.astype(jnp.int32))
    return moved, inside | (outside & (index == 0))


def _is_wide(indices: jax.Array) -> bool:
    return jnp.iinfo(indices.dtype).max > jnp.iinfo(jnp.int32).max


def _if_mine(places: tuple[int, ...], found: jax.Array, mine: jax.Array) -> jax.Array:
    """`found` where it is this device's; else the number that changes no other, not even -0.0."""
    mine = lax.broadcast_in_dim(mine, found.shape, places)
    zeros = jnp.zeros_like(found)
    return jnp.where(mine, found, zeros if found.dtype == jnp.bool_ else -zeros)


def _add_to_rows(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """Each device takes those updates that are for its rows, if that moves less than other ways."""
    operand, *others = ins
    rows = operand.form
    if not isinstance(rows, Rows) or not _scatters_into(eqn, rows):
        return None
    cost = sum(body.cost(value, FULL) for value in others)
    found = cheapest(body, eqn, ins, factors_of(eqn))
    if found is not None and found[0] <= cost:
        return None
    return [rows_of(eqn.outvars[0].aval, rows, _scatter_rows(body, eqn, ins, rows))]


def _scatters_into(eqn: Eqn, rows: Rows) -> bool:
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    columns = numbers.scatter_dims_to_operand_dims
    known = mode in (MODES.FILL_OR_DROP, MODES.PROMISE_IN_BOUNDS)
    known = known or (mode == MODES.CLIP and len(columns) == 1)
    return known and rows.dim in columns and rows.dim in numbers.inserted_window_dims


def _scatter_rows(body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows) -> Atom:
    """Each device's rows, behind which stands one more for what is dropped.

    [Note: one row more] An update out of bounds would not do: XLA:CPU makes one slice of a slice of a slice,
    and forgets to clamp, so that of a slice of a larger array it writes the element behind the slice
    (docs/facts-compilers.md; test_batch_rules.py::test_one_update_of_rows_that_were_moved).
    """
    operand, indices, updates = ins
    reason = "each device takes the updates of its rows"
    column = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims.index(rows.dim)
    size, mode = operand.aval.shape[rows.dim], eqn.params["mode"]
    static = (column, rows, body.num, size, mode != MODES.CLIP)
    local, mine = body.inline(_in_rows, static, body.at(indices, FULL, reason), body.index)
    (local,) = body.inline(_dropped, (column, rows.size), local, mine)
    (longer,) = body.inline(_with_one_more, (rows.dim,), body.at(operand, rows, reason))
    atoms, more = [longer, local, body.at(updates, FULL, reason)], Rows(rows.dim, 1, rows.size + 1)
    (made,) = body.emit(
        eqn, atoms, [more], mode=MODES.FILL_OR_DROP, indices_are_sorted=False, unique_indices=False
    )
    return body.inline(_without_the_last, (rows.dim,), made)[0]


def _with_one_more(dim: int, x: jax.Array) -> jax.Array:
    return lax.concatenate([x, lax.slice_in_dim(x, 0, 1, axis=dim)], dim)


def _without_the_last(dim: int, x: jax.Array) -> jax.Array:
    return lax.slice_in_dim(x, 0, x.shape[dim] - 1, axis=dim)


def _dropped(column: int, size: int, indices: jax.Array, mine: jax.Array) -> jax.Array:
    """The indices, out of bounds where they are of other devices."""
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where((columns == column) & ~mine[..., None], size, indices)


def _scatter_in_rows(body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows) -> Atom | None:
    """The rows of a scatter whose operand is made where it is needed."""
    return _scatter_rows(body, eqn, ins, rows) if _scatters_into(eqn, rows) else None


HANDLERS: dict[str, BatchRule] = {
    "concatenate": _note_columns,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
IN_ROWS: dict[str, RuleInRows] = dict.fromkeys(SCATTERS, _scatter_in_rows)
