# SPDX-License-Identifier: Apache-2.0
"""Scans: as they are, or, along the batch, each device the turns of its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.ir import _rules
from jzero.sharding.analysis._frames import split
from jzero.sharding.batch import _bodies
from jzero.sharding.batch._bodies import CARRIED, BodyRun, Input
from jzero.sharding.batch._body import TURNS_DEPEND, Body
from jzero.sharding.batch._equations import NotRowByRow
from jzero.sharding.batch._rows import (
    FULL,
    OWN,
    Form,
    PartialSum,
    Rows,
    is_of_iteration,
    is_padded,
)
from jzero.sharding.batch._values import BatchValue, values_of, vars_in
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Aval, Eqn, Var

TURN_BYTES = 2**20  # of a loop's slice whose rows move turn by turn, lest all be whole together


def scan(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """Along the batch if what it slices has rows there and its turns allow it; else as it is."""
    if (own := _bodies.as_it_is(body, eqn, ins)) is not None:
        return own
    parts = _jaxpr.scan_parts(eqn)
    _, _, xs = split(ins, parts.num_consts, parts.num_carry)
    along = {v.form for v in xs if isinstance(v.form, Rows) and v.form.dim == 0}
    # What an iteration does besides computing (a print) is done in all of them.
    apart = len(along) == 1 and not _jaxpr.has_side_effects(eqn)
    if apart and not is_padded(rows := along.pop(), parts.length, body.num):
        mark = len(body.eqns), len(body.movements)
        try:
            return _Scan(body, eqn, ins, rows).run()
        except NotRowByRow:
            del body.eqns[mark[0] :], body.movements[mark[1] :]
    return _Scan(body, eqn, ins, None).run()


class _ScanTurn(NamedTuple):
    """The body of a scan, settled.

    Attributes:
      done: the run that wrote it.
      closed: its jaxpr.
      forms: of what it carries.
      y_forms: of what each turn hands out.
    """

    done: BodyRun
    closed: _jaxpr.Closed
    forms: list[Form]
    y_forms: list[Form]


class _Scan:
    """A `scan`; with `rows`, each device runs the turns of its own rows."""

    def __init__(self, body: Body, eqn: Eqn, ins: list[BatchValue], rows: Rows | None):
        self.body, self.eqn, self.rows = body, eqn, rows
        self.parts = parts = _jaxpr.scan_parts(eqn)
        self.flat = _rewrite.flatten_calls(parts.body, parts.body_consts)
        consts, self.init, xs = split(ins, parts.num_consts, parts.num_carry)
        const_vars, self.carry_vars, x_vars = split(
            self.flat[0].invars, parts.num_consts, parts.num_carry
        )
        self.length = parts.length if rows is None else rows.size
        self.consts = _bodies.inputs_of(consts, const_vars)
        self.xs = [self.slices(v, var.aval) for v, var in zip(xs, x_vars, strict=True)]

    def slices(self, value: BatchValue, aval: Aval) -> Input:
        """What the loop slices: in whole turns, or the turns of this device's rows."""
        if self.rows is not None:
            return Input(value, aval, OWN, [OWN], 1)
        form = value.form
        if isinstance(form, Rows) and form.dim == 0:
            return Input(value, aval, FULL, [FULL], 1)
        slices = Input.of(value, aval, 1)
        slices.turn_by_turn = isinstance(form, Rows) and _rules.size_in_bytes(aval) >= TURN_BYTES
        return slices

    def run(self) -> list[BatchValue]:
        """The loop's equation, and what it returns."""
        forms = [_bodies.first_form(v) if self.rows is None else FULL for v in self.init]
        turn = _bodies.settle([*self.consts, *self.xs], forms, self.turn)
        parts, num_carry = self.parts, self.parts.num_carry
        consts = [a for x in self.consts for a in x.outside(self.body)]
        xs = [a for x in self.xs for a in self.outside(x)]
        starts = [self.start(v, form) for v, form in zip(self.init, turn.forms, strict=True)]
        y_forms = [self.rows or _bodies.shifted(form, 1) for form in turn.y_forms]
        outvars = vars_in(self.eqn.outvars, [*turn.forms, *y_forms])
        params = dict(
            jaxpr=turn.closed, length=self.length, reverse=parts.reverse, unroll=parts.unroll,
            num_consts=len(consts), num_carry=num_carry,
        )  # fmt: skip
        _bodies.write(self.body, self.eqn, [turn.done], [*consts, *starts, *xs], outvars, params)
        outs = values_of(self.eqn.outvars, [*turn.forms, *y_forms], outvars)
        for out, inner in zip(outs[num_carry:], turn.done.outs[num_carry:], strict=True):
            out.is_queue = inner.is_queue
        summed = [self.summed(v, out) for v, out in zip(self.init, outs[:num_carry], strict=True)]
        return [*summed, *outs[num_carry:]]

    def turn(self, forms: list[Form]) -> tuple[list[Form], _ScanTurn | None]:
        """The body with a carry in such forms (`settle`)."""
        carry = vars_in(self.carry_vars, forms)
        carried = values_of(self.carry_vars, forms, carry)
        ins = [*(x.inside() for x in self.consts), *carried, *(x.inside() for x in self.xs)]
        # Of a loop along the batch a device runs its own turns only.
        done = _bodies.run_body(self.body, self.flat, ins, self.length)
        outs, _ = split(done.outs, self.parts.num_carry)
        found = [
            self.next_form(i, form, out, out.atoms.get(form) is atom)
            for i, (form, out, atom) in enumerate(zip(forms, outs, carry, strict=True))
        ]
        return found, self.closed(done, carry, forms) if found == forms else None

    def closed(self, done: BodyRun, carry: Sequence[Var], forms: list[Form]) -> _ScanTurn:
        """The body whose carry comes out in the forms in which it came in."""
        outs, ys = split(done.outs, self.parts.num_carry)
        returned = [
            v.atoms[form] if is_of_iteration(form) else done.body.at(v, form, CARRIED)
            for form, v in zip(forms, outs, strict=True)
        ]
        y_forms = [self.y_form(v) for v in ys]
        returned += [done.body.at(v, form) for v, form in zip(ys, y_forms, strict=True)]
        const_atoms, x_atoms = ([a for x in xs for a in x.atoms] for xs in (self.consts, self.xs))
        closed = done.closed([*const_atoms, *carry, *x_atoms], returned)
        return _ScanTurn(done, closed, forms, y_forms)

    def next_form(self, index: int, form: Form, out: BatchValue, unchanged: bool) -> Form:
        """The form in which the next run carries what came out as `out`, in this place."""
        if self.rows is None:
            return _bodies.wider(form, out)
        # A device runs the iterations of its rows only: what they change must be a sum over them.
        if form is FULL and not unchanged:
            return PartialSum(index)  # The next run tells whether it is one.
        if isinstance(form, PartialSum) and out.at_hand != form:
            raise NotRowByRow
        return form

    def y_form(self, value: BatchValue) -> Form:
        """The form in which a turn hands out a value."""
        if isinstance(value.form, PartialSum):
            raise NotRowByRow
        if self.rows is not None and value.form is not OWN:
            return FULL
        return value.at_hand

    def outside(self, x: Input) -> list[Atom]:
        """What stands outside for what a turn reads of what is sliced."""
        if self.rows is not None:
            return [self.body.at(x.outer, self.rows, "its loop runs along other rows")]
        along = isinstance(x.outer.form, Rows) and x.outer.form.dim == 0
        reason = TURNS_DEPEND if along else "a loop reads them"
        return [
            self.body.at(x.outer, _bodies.shifted(form, 1), x.why(form, reason)) for form in x.forms
        ]

    def start(self, value: BatchValue, form: Form) -> Atom:
        """What the loop begins with; a sum over the devices' turns begins with nothing."""
        if isinstance(form, PartialSum):
            return self.body.inline(jnp.zeros, (tuple(value.aval.shape), value.aval.dtype))[0]
        return self.body.at(value, form, CARRIED)

    def summed(self, init: BatchValue, out: BatchValue) -> BatchValue:
        """What a loop carried, of the turns of all devices."""
        if not isinstance(out.form, PartialSum):
            return out
        total = self.body.reduce(out.atoms[out.form], "sum")
        if init.fill is None or init.fill != 0:
            (total,) = self.body.inline(_added, (), self.body.at(init, FULL), total)
        return BatchValue(out.aval, FULL, {FULL: total})


def _added(init: jax.Array, total: jax.Array) -> jax.Array:
    return init + total
