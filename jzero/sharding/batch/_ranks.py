# SPDX-License-Identifier: Apache-2.0
"""The largest along the batch, and where: each device finds its own, and then they compare."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._sent import cast, ordered_integers
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._cheapest import elsewhere
from jzero.sharding.batch._rows import FULL, Rows, is_padded
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.sharding.batch._writer import row_numbers
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


def _is_cheaper(body: Body, eqn: Eqn, ins: list[BatchValue], cost: float) -> bool:
    """Whether neither a gather of the rows nor rows of another dim cost as little."""
    found = elsewhere(body, eqn, ins)
    return cost < body.cost(ins[0], FULL) and (found is None or cost < found[0])


def _arg_extreme(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """`argmax`, `argmin`: the extreme of all, and the first place that has it; NaN is one, as in JAX."""
    (value,), out = ins, eqn.outvars[0].aval
    rows, kind = value.form, eqn.primitive.name[3:]
    (dim,) = eqn.params["axes"]
    plain = jnp.issubdtype(value.aval.dtype, jnp.integer) or value.aval.dtype == jnp.bool_
    plain = plain or jnp.issubdtype(value.aval.dtype, jnp.floating)
    cost = 6 * _rules.size_in_bytes(out)  # two numbers for each result
    if not (isinstance(rows, Rows) and rows.dim == dim and plain):
        return None
    if not _is_cheaper(body, eqn, ins, cost):
        return None
    body.note_movement(cost // 2, "each device finds its own, and they are compared")
    size = value.aval.shape[dim]
    x = body.mask(body.at(value, rows), rows, size, kind)
    (place,) = body.emit(eqn, [x], [FULL])
    best, number = body.inline(_best, (kind, rows, body.num, size), x, place, body.index)
    most = body.reduce(best, kind)
    (number,) = body.inline(_unless, (size,), best, most, number)
    (found,) = body.inline(cast, (out.dtype,), body.reduce(number, "min"))
    return [BatchValue(out, FULL, {FULL: found})]


def _best(
    kind: str, rows: Rows, num: int, size: int, x: jax.Array, place: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The extreme of this device's rows, as an integer, and its place among all rows; `size` of padding."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = ordered_integers(kind, jnp.where(x == 0, jnp.zeros_like(x), x))  # -0.0 is no smaller
    elif x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    best = jnp.max(x, rows.dim) if kind == "max" else jnp.min(x, rows.dim)
    return best, jnp.minimum(row_numbers(rows, num, index)[place], size)


def _unless(size: int, best: jax.Array, most: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.where(best == most, number, size)


def _top_k(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """The k largest of each device's, and of these the k largest: equal ones in the order of the batch."""
    (value,), (largest, places) = ins, (var.aval for var in eqn.outvars)
    rows, k = value.form, eqn.params["k"]
    dim = eqn.params["axis"] % value.aval.ndim
    if not isinstance(rows, Rows) or rows.dim != dim or rows.outer > 1:
        return None
    if is_padded(rows, value.aval.shape[dim], body.num):
        return None
    mine = min(k, rows.size)
    nbytes = sum(map(_rules.size_in_bytes, (largest, places))) // max(k, 1) * mine * body.num
    if not _is_cheaper(body, eqn, ins, nbytes):
        return None
    body.note_movement(nbytes, "each device finds its own, and they are compared")
    own = Rows(dim, 1, mine)
    found, at = body.emit(eqn, [body.at(value, rows)], [own, own], k=mine)
    (at,) = body.inline(_numbered, (rows, body.num), at, body.index)
    shape = [body.num * mine if d == dim else n for d, n in enumerate(largest.shape)]
    all_found, all_at = (
        body.gather(x, own, _jaxpr.var_like(None, shape, x.aval.dtype).aval) for x in (found, at)
    )
    best, chosen = body.emit(eqn, [all_found], [FULL, FULL])
    (places_of_best,) = body.inline(_chosen, (dim,), all_at, chosen)
    return values_of(eqn.outvars, [FULL, FULL], [best, places_of_best])


def _numbered(rows: Rows, num: int, at: jax.Array, index: jax.Array) -> jax.Array:
    return row_numbers(rows, num, index)[at].astype(at.dtype)


def _chosen(dim: int, x: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, chosen, dim)


ALONG: dict[str, BatchRule] = {"argmax": _arg_extreme, "argmin": _arg_extreme, "top_k": _top_k}
