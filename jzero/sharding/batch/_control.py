# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and branches, and the table of everything that has bodies (`_bodies.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from jzero.sharding.batch._bodies import as_it_is, grew, inputs_of, run_body, write
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._rows import FULL, Form, Rows
from jzero.sharding.batch._scan import scan
from jzero.sharding.batch._values import BatchValue, values_of, vars_in
from jzero.sharding.batch._while import while_loop
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn


def _remat(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    call = _jaxpr.call_parts(eqn)
    assert call is not None
    flat = _rewrite.flatten_calls(*call)
    inputs = inputs_of(ins, flat[0].invars)
    while True:
        given = [x.inside() for x in inputs]
        done = run_body(body, flat, given)
        forms = [v.at_hand for v in done.outs]
        outs = [done.body.at(v, form) for v, form in zip(done.outs, forms, strict=True)]
        if not grew(inputs):
            break
    closed = done.closed([a for x in inputs for a in x.atoms], outs)
    outvars = vars_in(eqn.outvars, forms)
    params = dict(eqn.params, **{_jaxpr.CALLS[eqn.primitive.name]: closed})
    write(body, eqn, [done], [a for x in inputs for a in x.outside(body)], outvars, params)
    # What it only hands through is what it was: a loop around it may carry it unchanged.
    through = {id(value): outer for value, outer in zip(given, ins, strict=True)}
    made = values_of(eqn.outvars, forms, outvars)
    for value, inner in zip(made, done.outs, strict=True):
        value.is_queue = inner.is_queue
    return [through.get(id(v), value) for v, value in zip(done.outs, made, strict=True)]


def _cond(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    if (own := as_it_is(body, eqn, ins)) is not None:
        return own
    choice, *operands = ins
    branches = [_rewrite.flatten_calls(*branch) for branch in _jaxpr.cond_parts(eqn)]
    inputs = inputs_of(operands, branches[0][0].invars)
    while True:
        runs, atoms = [], []
        for flat in branches:
            runs.append(run_body(body, flat, [x.inside() for x in inputs]))
            atoms.append([a for x in inputs for a in x.atoms])
        forms = [_joined_form(values) for values in zip(*(r.outs for r in runs), strict=True)]
        reason = "branches return it in one form"
        outs = [
            [r.body.at(v, form, reason) for v, form in zip(r.outs, forms, strict=True)]
            for r in runs
        ]
        if not grew(inputs):
            break
    closed = [r.closed(given, out) for r, given, out in zip(runs, atoms, outs, strict=True)]
    index = body.at(choice, FULL, "it chooses a branch")
    given = [index, *(a for x in inputs for a in x.outside(body))]
    outvars = vars_in(eqn.outvars, forms)
    write(body, eqn, runs, given, outvars, dict(eqn.params, branches=tuple(closed)))
    return values_of(eqn.outvars, forms, outvars)


def _joined_form(values: Sequence[BatchValue]) -> Form:
    """One form for what several branches return."""
    forms = [value.at_hand for value in values]
    return next((form for form in forms if isinstance(form, Rows)), forms[0])


HANDLERS: dict[str, BatchRule] = {
    "remat2": _remat,
    "checkpoint": _remat,
    "cond": _cond,
    "scan": scan,
    "while": while_loop,
}
