# SPDX-License-Identifier: Apache-2.0
"""Values that wait to be needed: made where they are read, in the form in which they are read.

An iota, a broadcast, random bits, what is made of small values: it costs nothing to make, and rows of it
less than the whole. A sum over the devices waits, too: it is there whole, and scattered where its rows are
needed (`Body.summed`).
"""

from __future__ import annotations

from collections.abc import Callable

from jzero.ir import _rules
from jzero.ir._factors import SCATTER_REDUCES
from jzero.ir._rules import Cost
from jzero.sharding.batch._body import Body
from jzero.sharding.batch._cheapest import factors_of, run_factor
from jzero.sharding.batch._rows import FULL, Form, Rows, even_rows, local_shape, reshaped
from jzero.sharding.batch._values import BatchValue, OfSum, values_of
from jzero.tracing._types import Atom, Eqn

LARGE = 2**20  # elements of a value that waits to be needed, and is not made whole to be reduced


def on_whole(body: Body, eqn: Eqn, ins: list[BatchValue], reason: str = "") -> list[BatchValue]:
    """The equation on whole operands, now."""
    atoms = body.emit(eqn, [body.at(v, FULL, reason) for v in ins], [FULL] * len(eqn.outvars))
    return values_of(eqn.outvars, [FULL] * len(atoms), atoms)


def may_wait(eqn: Eqn, ins: list[BatchValue]) -> bool:
    """Whether its result is made where it is needed: there it may be rows only, and cheap to make."""
    name, size = eqn.primitive.name, eqn.outvars[0].aval.size
    if name == "iota":
        return True
    if name == "random_bits":
        return ins[0].aval.ndim == 0
    if name == "broadcast_in_dim":
        return all(v.is_lazy or v.aval.size < size for v in ins)
    if _reduces_waiting(eqn, ins):
        return True
    if name in SCATTER_REDUCES:  # The gradient of a look-up.
        return ins[0].is_lazy and all(v.aval.size < size for v in ins[1:])
    if not _rules.keeps_dims(eqn) or name in (
        "dynamic_slice",
        "dynamic_update_slice",
        "sort",
        "pad",
    ):
        return False
    return any(v.is_lazy for v in ins) and all(v.is_lazy or v.aval.size < size for v in ins)


def maker(body: Body, eqn: Eqn, ins: list[BatchValue]) -> Callable[[BatchValue, Form], Atom]:
    def make(value: BatchValue, form: Form) -> Atom:
        if isinstance(form, Rows):
            atom = _made_in_rows(body, eqn, ins, form)
            return body.take(body.at(value, FULL), form) if atom is None else atom
        outs = reduced_in_rows(body, eqn, ins)
        return (outs or on_whole(body, eqn, ins))[0].atoms[FULL]

    return make


def note_sum(body: Body, eqn: Eqn, ins: list[BatchValue], outs: list[BatchValue]) -> None:
    """What is made of a sum over the devices can be made of a scattered one, if its rows are needed."""
    sums = [value.of_sum for value in ins if value.of_sum is not None]
    if len(outs) != 1 or not sums or outs[0].of_sum is not None or not outs[0].atoms:
        return

    def in_rows(rows: Rows) -> Atom | None:
        with body.at_source(eqn):
            return _made_in_rows(body, eqn, ins, rows)

    outs[0].of_sum = OfSum(in_rows, any(found.is_gradient for found in sums))


def note_growth(body: Body, eqn: Eqn, ins: list[BatchValue], outs: list[BatchValue]) -> None:
    """What is made of smaller rows can be made in other forms too, of these moved: `x[None]`, of [B, B]."""
    if len(outs) != 1 or not isinstance(outs[0].form, Rows) or outs[0].make is not None:
        return
    grows = _rules.costs(eqn, Cost.REPEAT, Cost.COPY, Cost.CAST, Cost.ELEMENTWISE)
    size = outs[0].nbytes
    small = all(v.is_lazy or body.num * v.cheapest_bytes < size for v in ins)
    if grows and small:
        outs[0].make = maker(body, eqn, ins)
        outs[0].grown_from = sum(0 if v.is_lazy else v.cheapest_bytes for v in ins)


def reduced_in_rows(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """The reduction of a large value that waits to be needed: each device makes and reduces its rows."""
    if not (_reduces_waiting(eqn, ins) and ins[0].aval.size >= LARGE and body.exchanges):
        return None
    for factor in factors_of(eqn):
        dim = factor.ins[0]
        size = 0 if dim is None else ins[0].aval.shape[dim]
        if factor.reduces is not None and dim is not None and size and size % body.num == 0:
            return run_factor(body, eqn, ins, factor, even_rows(dim, size, body.num))
    return None


def _reduces_waiting(eqn: Eqn, ins: list[BatchValue]) -> bool:
    reduces = _rules.costs(eqn, Cost.REDUCTION) and any(f.reduces for f in factors_of(eqn))
    return reduces and ins[0].is_lazy


def _made_in_rows(body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows) -> Atom | None:
    """The rows of an equation's result alone; None if they cannot be made without the rest."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name in body.rules.in_rows:
        atom = body.rules.in_rows[name](body, eqn, ins, rows)
        if atom is not None:
            return atom
    if name == "reshape":
        if len(ins) > 1 or eqn.params.get("dimensions") is not None:
            return None
        before = reshaped(shape, ins[0].aval.shape, rows, body.num)
        return None if before is None else reshape_rows(body, eqn, body.at(ins[0], before), rows)
    for factor in factors_of(eqn):
        if factor.outs == (rows.dim,):
            outs = run_factor(body, eqn, ins, factor, rows)
            return outs[0].atoms[rows]
    if name == "broadcast_in_dim":  # A dim that the operand does not have.
        local = local_shape(eqn.params["shape"], rows)
        return body.emit(eqn, [body.at(v, FULL) for v in ins], [rows], shape=local)[0]
    return None


def reshape_rows(body: Body, eqn: Eqn, x: Atom, rows: Rows) -> Atom:
    """The rows `x`, as rows of the reshaped value."""
    return body.emit(eqn, [x], [rows], new_sizes=local_shape(eqn.params["new_sizes"], rows))[0]
