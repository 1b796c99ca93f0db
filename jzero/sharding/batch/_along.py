# SPDX-License-Identifier: Apache-2.0
"""Operations along the batch itself: reshapes, concatenation, running sums."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jzero.ir import _rules
from jzero.sharding.batch._body import BatchRule, Body, RuleInRows
from jzero.sharding.batch._equations import gathered
from jzero.sharding.batch._rows import FULL, Rows, even_rows, is_padded, local_shape, reshaped
from jzero.sharding.batch._values import BatchValue, rows_of
from jzero.sharding.batch._waiting import maker, reshape_rows
from jzero.sharding.batch._writer import row_numbers
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Aval, Eqn


def _reshape(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    value, out = ins[0], eqn.outvars[0].aval
    rows = value.form
    if not isinstance(rows, Rows) or len(ins) > 1 or eqn.params.get("dimensions") is not None:
        return None
    longest = _longest(body, value, out)
    if value.make is not None and rows not in value.atoms and longest is not None:
        return [BatchValue(out, longest, {}, make=maker(body, eqn, ins))]
    new = reshaped(value.aval.shape, out.shape, rows, body.num)
    if new is not None:
        return [rows_of(out, new, reshape_rows(body, eqn, body.at(value, rows), new))]
    made = _reshape_exchanged(body, eqn, value)
    if made is not None:
        return [made]
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


def _longest(body: Body, value: BatchValue, out: Aval) -> Rows | None:
    """Rows along the longest dim of what the rows' dim became, if devices can have as many each."""
    assert isinstance(value.form, Rows)
    shape, dim = value.aval.shape, value.form.dim
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    dims = [
        d for d, n in enumerate(out.shape) if n % body.num == 0 and n > 1
        and math.prod(out.shape[:d]) >= before and math.prod(out.shape[d + 1 :]) >= after
    ]  # fmt: skip
    longest = max(dims, key=lambda d: out.shape[d], default=None)
    return None if longest is None else even_rows(longest, out.shape[longest], body.num)


def _reshape_exchanged(body: Body, eqn: Eqn, value: BatchValue) -> BatchValue | None:
    """`[batch, time, ...]` in chunks that cut the batch: of rows of the time, every chunk has as many."""
    out, shape = eqn.outvars[0].aval, value.aval.shape
    assert isinstance(value.form, Rows)
    for dim in (value.form.dim + 1, value.form.dim - 1):
        if not 0 <= dim < len(shape):
            continue
        rows = even_rows(dim, shape[dim], body.num)
        new = reshaped(shape, out.shape, rows, body.num)
        merged = new is not None and out.shape[new.dim] != shape[dim]
        if new is not None and merged and body.may_exchange(value, rows):
            reason = "its rows are not rows of the new shape"
            return rows_of(out, new, reshape_rows(body, eqn, body.at(value, rows, reason), new))
    return None


def concatenate(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
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


def _blocks(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
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
        (atom,) = body.inline(_sliced, (dim, first, last), body.at(value, rows))
        outs.append(rows_of(var.aval, new, atom))
    return outs


def _sliced(dim: int, start: int, stop: int, x: jax.Array) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=dim)


def _cumsum(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A running sum along the batch: of each block of a device's rows, and the totals of all before it."""
    (value,) = ins
    rows = value.form
    assert isinstance(rows, Rows)
    if rows.dim != eqn.params["axis"]:
        return None
    reverse = eqn.params["reverse"]
    x = body.mask(body.at(value, rows), rows, value.aval.shape[rows.dim], "sum")
    sums, totals = body.inline(_sums_and_totals, (rows, reverse), x)
    nbytes = body.num * _rules.size_in_bytes(totals.aval)
    body.note_movement(nbytes, "the totals of the devices are exchanged")
    totals = body.all_gather(totals)
    (out,) = body.inline(_behind, (rows, reverse), sums, totals, body.index)
    return [rows_of(eqn.outvars[0].aval, rows, out)]


def _sums_and_totals(rows: Rows, reverse: bool, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape, dim = x.shape, rows.dim
    blocks = x.reshape(*shape[:dim], rows.outer, rows.inner, *shape[dim + 1 :])
    sums = lax.cumsum(blocks, dim + 1, reverse=reverse)
    return sums, lax.index_in_dim(sums, 0 if reverse else rows.inner - 1, dim + 1, keepdims=False)


def _behind(
    rows: Rows, reverse: bool, sums: jax.Array, totals: jax.Array, index: jax.Array
) -> jax.Array:
    """The sums of a device's blocks, and what is before each; `totals` are `[devices, ..., outer, ...]`."""
    num, dim = totals.shape[0], rows.dim
    totals = jnp.moveaxis(totals, 0, dim + 1)
    flat = totals.reshape(*totals.shape[:dim], rows.outer * num, *totals.shape[dim + 2 :])
    upto = lax.cumsum(flat, dim, reverse=reverse)
    shift = [((1, -1, 0), (-1, 1, 0))[reverse] if d == dim else (0, 0, 0) for d in range(flat.ndim)]
    before = lax.pad(upto, jnp.zeros((), upto.dtype), shift).reshape(totals.shape)
    offset = lax.dynamic_index_in_dim(before, index, dim + 1, keepdims=True)
    out: jax.Array = sums + offset
    return out.reshape(*out.shape[:dim], rows.size, *out.shape[dim + 2 :])


# -- wrappers ------------------------------------------------------------------------------------------


def _placed(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """`jax.device_put(x)` says nothing if it names no device."""
    return ins if all(device is None for device in eqn.params["devices"]) else None


# -- made where they are needed ------------------------------------------------------------------------


def _iota_rows(body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows) -> Atom | None:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    local = local_shape(shape, rows)
    if dim != rows.dim:
        return body.emit(eqn, [], [rows], shape=local)[0]
    return body.inline(_numbered, (rows, body.num, local, eqn.params["dtype"]), body.index)[0]


def _numbered(
    rows: Rows, num: int, shape: tuple[int, ...], dtype: DTypeLike, index: jax.Array
) -> jax.Array:
    return lax.broadcast_in_dim(row_numbers(rows, num, index).astype(dtype), shape, (rows.dim,))


def _random_rows(body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows) -> Atom | None:
    """Bits of one device's rows, where the generator counts; others are made whole and cut."""
    key, shape = ins[0], eqn.params["shape"]
    if not _jaxpr.is_threefry(key.aval.dtype) or math.prod(shape) >= 2**32:
        out, reason = eqn.outvars[0].aval, "its random bits are made whole on every device, and cut"
        body.note_movement(_rules.size_in_bytes(out), reason, out)
        return None
    static = (rows, body.num, shape, eqn.params["bit_width"])
    return body.inline(_bits, static, body.at(key, FULL), body.index)[0]


def _bits(
    rows: Rows, num: int, shape: tuple[int, ...], width: int, key: jax.Array, index: jax.Array
) -> jax.Array:
    local = local_shape(shape, rows)
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


HANDLERS: dict[str, BatchRule] = {
    "device_put": _placed,
}
ALONG: dict[str, BatchRule] = {
    "reshape": _reshape,
    "slice": _blocks,
    "split": _blocks,
    "cumsum": _cumsum,
}
IN_ROWS: dict[str, RuleInRows] = {"iota": _iota_rows, "random_bits": _random_rows}
