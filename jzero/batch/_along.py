"""Operations along the batch itself: reshapes, concatenation, running sums, look-ups of one's own row."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero import _jaxpr, _rewrite
from jzero._jaxpr import Atom, Eqn
from jzero.batch._body import Body, Handler, MadeInRows, Value, row_numbers
from jzero.batch._equations import gathered, on_whole, reshape_rows, rows_of, run, whole
from jzero.batch._factors import SCATTER_REDUCES
from jzero.batch._rows import FULL, OWN, SUM, Rows, even_rows, is_padded, reshaped


def _reshape(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    value, out = ins[0], eqn.outvars[0].aval
    rows = value.form
    if not isinstance(rows, Rows) or len(ins) > 1 or eqn.params.get("dimensions") is not None:
        return None
    new = reshaped(value.aval.shape, out.shape, rows, body.num)
    if new is not None:
        return [rows_of(out, new, reshape_rows(body, eqn, value.atoms[rows], new))]
    reason = "its rows are not rows of the new shape"
    if _jaxpr.in_scope(eqn, _jaxpr.GROUPS):
        reason = f"jzero.groups is local if its n is a multiple of {body.num}"
    (made,) = gathered(body, eqn, ins, reason)
    if isinstance(made.form, Rows):
        return [made]
    # Cut along the first dim of what the rows became that is large enough.
    before = math.prod(value.aval.shape[: rows.dim])
    dims = [
        d for d, n in enumerate(out.shape) if n >= body.num and math.prod(out.shape[:d]) >= before
    ]
    even = [d for d in dims if out.shape[d] % body.num == 0]
    for dim in [*even, *dims][:1]:
        cut = even_rows(dim, out.shape[dim], body.num)
        body.at(made, cut)
        made.form = cut
    return [made]


def _concatenate(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """Pieces of one size along the batch: a device has its rows of each, a block after the other."""
    dim, out = eqn.params["dimension"], eqn.outvars[0].aval
    forms = {value.form for value in ins if isinstance(value.form, Rows)}
    sizes = {value.aval.shape[dim] for value in ins}
    if len(forms) != 1 or len(sizes) != 1:
        return None
    (rows,), (size,) = forms, sizes
    if rows.dim != dim or is_padded(rows, size, body.num):
        return None
    new = Rows(dim, rows.outer * len(ins), rows.inner)
    (atom,) = body.emit(eqn, [body.at(value, rows) for value in ins], [new])
    return [rows_of(out, new, atom)]


def _blocks(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """`slice` and `split` of whole blocks: what was put together comes apart."""
    value, params = ins[0], eqn.params
    rows, shape = value.form, value.aval.shape
    assert isinstance(rows, Rows)
    dim, block = rows.dim, body.num * rows.inner
    if eqn.primitive.name == "split":
        ends = np.cumsum(params["sizes"]).tolist()
        cuts = list(zip([0, *ends[:-1]], ends, strict=True))
    else:
        starts, limits = params["start_indices"], params["limit_indices"]
        others = [(0, n) for n in shape]
        if any(
            (a, b) != o
            for d, (a, b, o) in enumerate(zip(starts, limits, others, strict=True))
            if d != dim
        ):
            return None
        if params["strides"] is not None and any(step != 1 for step in params["strides"]):
            return None
        cuts = [(starts[dim], limits[dim])]
    if is_padded(rows, shape[dim], body.num) or any(a % block or b % block for a, b in cuts):
        return None
    outs = []
    for (start, stop), var in zip(cuts, eqn.outvars, strict=True):
        new = Rows(dim, (stop - start) // block, rows.inner)
        first, last = start // block * rows.inner, stop // block * rows.inner
        (atom,) = body.inline(_sliced, (dim, first, last), value.atoms[rows])
        outs.append(rows_of(var.aval, new, atom))
    return outs


def _sliced(dim: int, start: int, stop: int, x: Any) -> Any:
    return lax.slice_in_dim(x, start, stop, axis=dim)


def _cumsum(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """A running sum along the batch: of this device's rows, and the totals of the devices before it."""
    (value,) = ins
    rows = value.form
    assert isinstance(rows, Rows)
    if rows.outer > 1 or rows.dim != eqn.params["axis"]:
        return None
    x = body.mask(value.atoms[rows], rows, value.aval.shape[rows.dim], "sum")
    (sums,) = body.emit(eqn, [x], [rows])
    (total,) = body.inline(_total, (rows.dim, eqn.params["reverse"]), sums)
    body.note_movement(
        Value(
            _jaxpr.var_like(None, (body.num, *total.aval.shape), total.aval.dtype).aval, FULL, {}
        ),
        "the totals of the devices are exchanged",
    )
    ones = Rows(rows.dim, 1, 1)
    whole = _jaxpr.var_like(
        None, [body.num if d == rows.dim else n for d, n in enumerate(total.aval.shape)], total.aval.dtype
    ).aval  # fmt: skip
    totals = body.gather(total, ones, whole)
    (out,) = body.inline(_behind, (rows.dim, eqn.params["reverse"]), sums, totals, body.index)
    return [rows_of(eqn.outvars[0].aval, rows, out)]


def _total(dim: int, reverse: bool, sums: Any) -> Any:
    return lax.index_in_dim(sums, 0 if reverse else sums.shape[dim] - 1, dim, keepdims=True)


def _behind(dim: int, reverse: bool, sums: Any, totals: Any, index: Any) -> Any:
    places = lax.broadcasted_iota(jnp.int32, totals.shape, dim)
    before = places > index if reverse else places < index
    offset = jnp.sum(jnp.where(before, totals, jnp.zeros_like(totals)), axis=dim, keepdims=True)
    return sums + offset.astype(sums.dtype)


# -- look-ups: x[arange(B), y] takes of each row an element, which is its device's ---------------------


def _note_columns(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """Remembers what an array of indices is put together from."""
    if any(v.form in (OWN, SUM) for v in ins):
        return None
    dim, out = eqn.params["dimension"], eqn.outvars[0].aval
    rows = [v.form for v in ins if isinstance(v.form, Rows)]
    if any(form.dim == dim for form in rows):
        along = _concatenate(body, eqn, ins)
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


def _counts_rows(indices: Value, column: int, dim: int) -> bool:
    """Whether a column of an array of indices is 0, 1, 2, ... along a dim."""
    value = (indices.columns or {0: indices}).get(column)
    if value is None or value.constant is None:
        return False
    shape = value.aval.shape
    counts = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return bool(np.array_equal(value.constant(), np.broadcast_to(counts, shape)))


def _own_rows(
    ins: list[Value], numbers: Any, places: list[int], batching: Any
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


def _gather(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    operand, indices = ins
    if any(v.form in (OWN, SUM) for v in ins):
        return None
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    places = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    found = _own_rows(ins, numbers.start_index_map, places, numbers.start_indices_batching_dims)
    if found is None:
        return None
    column, dim, rows = found
    if dim not in numbers.collapsed_slice_dims:
        return None
    (local,) = body.inline(_in_own, (column, rows), body.at(indices, rows))
    new = rows.at(places[rows.dim])
    (atom,) = body.emit(eqn, [body.at(operand, rows.at(dim)), local], [new])
    return [rows_of(out, new, atom)]


def _scatter(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    operand, indices, updates = ins
    if any(v.form in (OWN, SUM) for v in ins):
        return None
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    places = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    found = _own_rows(
        ins, numbers.scatter_dims_to_operand_dims, places, numbers.scatter_indices_batching_dims
    )
    if found is None:
        return None
    column, dim, rows = found
    if dim not in numbers.inserted_window_dims:
        return None
    (local,) = body.inline(_in_own, (column, rows), body.at(indices, rows))
    new = rows.at(dim)
    moved = body.at(updates, rows.at(places[rows.dim]))
    (atom,) = body.emit(eqn, [body.at(operand, new), local, moved], [new])
    return [rows_of(out, new, atom)]


def _in_own(column: int, rows: Rows, indices: Any) -> Any:
    """The indices, of which a column counts this device's rows."""
    counts = lax.broadcasted_iota(indices.dtype, indices.shape, rows.dim)
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where(columns == column, counts, indices)


# -- wrappers ------------------------------------------------------------------------------------------


def _linear_solve(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """What it wraps for the sake of derivatives, which are taken already: its solver."""
    counts = eqn.params["const_lengths"]
    before, mine = counts.matvec + counts.vecmat, counts.solve
    solver, consts = _rewrite.flatten_calls(*_jaxpr.open_jaxpr(eqn.params["jaxprs"].solve))
    operands = [*ins[before : before + mine], *ins[sum(counts) :]]
    fresh = [_jaxpr.new_var(var) for var in solver.constvars]
    body.constvars += fresh
    body.consts += consts
    env = {var: whole(new) for var, new in zip(solver.constvars, fresh, strict=True)}
    return run(body, solver, env | dict(zip(solver.invars, operands, strict=True)))


def _placed(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """`jax.device_put(x)` says nothing if it names no device."""
    return ins if all(device is None for device in eqn.params["devices"]) else None


# -- made where they are needed ------------------------------------------------------------------------


def _iota_rows(body: Body, eqn: Eqn, ins: list[Value], rows: Rows) -> Atom | None:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    local = tuple(rows.size if d == rows.dim else n for d, n in enumerate(shape))
    if dim != rows.dim:
        return body.emit(eqn, [], [rows], shape=local)[0]
    return body.inline(_numbered, (rows, body.num, local, eqn.params["dtype"]), body.index)[0]


def _numbered(rows: Rows, num: int, shape: tuple[int, ...], dtype: Any, index: Any) -> Any:
    return lax.broadcast_in_dim(row_numbers(rows, num, index).astype(dtype), shape, (rows.dim,))


def _random_rows(body: Body, eqn: Eqn, ins: list[Value], rows: Rows) -> Atom | None:
    """Bits of one device's rows, where the generator counts; others are made whole and cut."""
    key, shape = ins[0], eqn.params["shape"]
    if not _jaxpr.is_threefry(key.aval.dtype) or math.prod(shape) >= 2**32:
        whole = Value(eqn.outvars[0].aval, FULL, {})
        body.note_movement(whole, "its random bits are made whole on every device, and cut")
        return None
    static = (rows, body.num, shape, eqn.params["bit_width"])
    return body.inline(_bits, static, body.at(key, FULL), body.index)[0]


def _bits(rows: Rows, num: int, shape: tuple[int, ...], width: int, key: Any, index: Any) -> Any:
    local = tuple(rows.size if d == rows.dim else n for d, n in enumerate(shape))
    place = jnp.zeros(local, jnp.uint32)
    for dim, size in enumerate(shape):
        own = dim == rows.dim
        at = (
            row_numbers(rows, num, index).astype(jnp.uint32)
            if own
            else jnp.arange(size, dtype=jnp.uint32)
        )
        step = jnp.asarray(math.prod(shape[dim + 1 :]), jnp.uint32)
        place = place + lax.broadcast_in_dim(at * step, local, (dim,))
    return _jaxpr.threefry_bits(key, jnp.zeros(local, jnp.uint32), place, width)


HANDLERS: dict[str, Handler] = {
    "concatenate": _note_columns,
    "gather": _gather,
    **dict.fromkeys(["scatter", "scatter-mul", "scatter_mul", *SCATTER_REDUCES], _scatter),
    "custom_linear_solve": _linear_solve,
    "device_put": _placed,
}
ALONG: dict[str, Handler] = {
    "reshape": _reshape,
    "slice": _blocks,
    "split": _blocks,
    "cumsum": _cumsum,
}
IN_ROWS: dict[str, MadeInRows] = {"iota": _iota_rows, "random_bits": _random_rows}
