# SPDX-License-Identifier: Apache-2.0
"""Which factor of an equation moves least, and the equation along it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._factors import SCATTER_REDUCES, Factor
from jzero.ir._rules import BY_DEVICES, Cost
from jzero.sharding.batch._body import Body
from jzero.sharding.batch._rows import FULL, Form, Rows, even_rows, is_padded
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.tracing._types import Atom, Eqn


def factors_of(eqn: Eqn) -> list[Factor]:
    """Those along which devices can have rows; reshapes are in `_along.py`."""
    if eqn.primitive.name == "reshape" or _rules.costs(eqn, Cost.COLLECTIVE):
        return []
    return [f for f in _rules.factors_of(eqn) if f.reduces is None or f.reduces in BY_DEVICES]


def cheapest(
    body: Body, eqn: Eqn, ins: list[BatchValue], factors: Sequence[Factor]
) -> tuple[float, Factor, Rows] | None:
    """The factor that moves least, with the bytes that reach a device, and the rows along it."""
    candidates: list[tuple[float, Factor, Rows]] = []
    for k, value in enumerate(ins):
        for rows in value.rows:
            for factor in factors:
                if factor.ins[k] == rows.dim and _fits(body, eqn, ins, factor, value, rows):
                    cost = _cost(body, eqn, ins, factor, rows)
                    candidates.append((cost, factor, rows))
    return min(candidates, key=lambda found: found[0], default=None)


def elsewhere(body: Body, eqn: Eqn, ins: list[BatchValue]) -> tuple[float, Factor, Rows] | None:
    """What `cheapest` finds if devices exchange rows of the batch for rows of another dim."""
    candidates: list[tuple[float, Factor, Rows]] = []
    for k, value in enumerate(ins):
        if not isinstance(value.form, Rows):
            continue
        for factor in factors_of(eqn):
            dim = factor.ins[k]
            if dim is None or dim == value.form.dim or factor.groups or None in factor.outs:
                continue
            rows = even_rows(dim, value.aval.shape[dim], body.num)
            if body.may_exchange(value, rows) and _fits(body, eqn, ins, factor, value, rows):
                candidates.append((_cost(body, eqn, ins, factor, rows), factor, rows))
    return min(candidates, key=lambda found: found[0], default=None)


def _fits(
    body: Body, eqn: Eqn, ins: list[BatchValue], factor: Factor, value: BatchValue, rows: Rows
) -> bool:
    """Whether the devices' rows of `value` can be rows of the equation's factor."""
    size = value.aval.shape[rows.dim]
    if factor.groups:
        even = factor.groups % body.num == 0 and not is_padded(rows, size, body.num)
        return even and rows.outer == 1
    sizes = [v.aval.shape[d] for v, d in zip(ins, factor.ins, strict=True) if d is not None]
    outs = zip(eqn.outvars, factor.outs, strict=True)
    sizes += [var.aval.shape[d] for var, d in outs if d is not None]
    return all(other == size for other in sizes)


def _cost(body: Body, eqn: Eqn, ins: list[BatchValue], factor: Factor, rows: Rows) -> float:
    """Bytes that reach a device, about; rows that are given up count with what is made of them.

    Of what loses the batch's rows, though it has their dim, it is likely that they are needed again.
    """
    cost, lost = 0.0, False
    for value, dim in zip(ins, factor.ins, strict=True):
        wanted: Form = FULL if dim is None else _on_dim(body, factor, rows, value, dim)
        moved = body.cost(value, wanted)
        cost += moved
        lost = lost or (moved > 0 and wanted is FULL and not value.is_queue)
    if lost and rows_of_queue(ins, factor, rows):
        cost += sum(_rules.size_in_bytes(var.aval) / body.num for var in eqn.outvars)
    if all(dim is None for dim in factor.outs):
        cost += sum(2 * _rules.size_in_bytes(var.aval) for var in eqn.outvars)
    return cost


def rows_of_queue(ins: list[BatchValue], factor: Factor, rows: Rows) -> bool:
    """Whether rows along a factor are those of a scattered sum."""
    pairs = zip(ins, factor.ins, strict=True)
    return any(v.is_queue and dim is not None and rows.at(dim) == v.form for v, dim in pairs)


def _on_dim(body: Body, factor: Factor, rows: Rows, value: BatchValue, dim: int) -> Rows:
    return even_rows(dim, value.aval.shape[dim], body.num) if factor.groups else rows.at(dim)


def run_factor(
    body: Body, eqn: Eqn, ins: list[BatchValue], factor: Factor, rows: Rows
) -> list[BatchValue]:
    name = eqn.primitive.name
    reason = "another operand's rows are along another dim"
    reduces = factor.reduces if all(dim is None for dim in factor.outs) else None
    atoms = []
    for value, dim in zip(ins, factor.ins, strict=True):
        if dim is None:
            atom = body.at(value, FULL, reason)
            if name in SCATTER_REDUCES and reduces == "sum" and value is ins[0]:
                atom = _once(body, value, atom)
        else:
            form = _on_dim(body, factor, rows, value, dim)
            atom = body.at(value, form, reason)
            scattered = name in SCATTER_REDUCES and value is not ins[2]
            # Of a product both operands: 0 times NaN, in what the other one has as padding, is NaN.
            if reduces is not None and not scattered:
                atom = body.mask(atom, form, value.aval.shape[dim], reduces)
        atoms.append(atom)
    local = factor.local(rows.size, body.num)
    if reduces is not None:
        (out,) = body.emit(eqn, atoms, [FULL], **local)
        aval = eqn.outvars[0].aval
        if reduces == "sum":
            return [body.summed(aval, out)]
        return [BatchValue(aval, FULL, {FULL: body.reduce(out, reduces)})]
    forms: list[Form] = []
    for var, dim in zip(eqn.outvars, factor.outs, strict=True):
        if dim is None:
            forms.append(FULL)
            continue
        size = var.aval.shape[dim]
        forms.append(even_rows(dim, size, body.num) if factor.groups else rows.at(dim))
    outs = body.emit(eqn, atoms, forms, **local)
    is_queue = rows_of_queue(ins, factor, rows)
    return values_of(eqn.outvars, forms, outs, is_queue)


def _once(body: Body, value: BatchValue, atom: Atom) -> Atom:
    """A whole value as a term of a sum over the devices."""
    if value.fill is not None and value.fill == 0:
        return atom
    return body.inline(_on_first, (), atom, body.index)[0]


def _on_first(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(index == 0, x, jnp.zeros_like(x))
