"""Loops, branches and checkpoints: their bodies are rewritten with rows going in and out.

What a body reads from outside is given to it in the forms in which it asks for it (`Value.asked`), so that a
gather stands before a loop and not in it. The forms of what a loop carries are found by running the body
until they no longer change; running it is cheap, since nothing is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import split
from jzero.sharding.batch._body import Body, Handler, Value, var_in
from jzero.sharding.batch._equations import NotRowByRow, run
from jzero.sharding.batch._rows import FULL, OWN, SUM, Form, Rows, is_padded
from jzero.sharding.batch._writer import masked
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._jaxpr import Eqn

TURN_BYTES = 2**20  # of a loop's slice whose rows move turn by turn, lest all be whole together


@dataclasses.dataclass(eq=False)
class _Input:
    """What a body reads from outside, in every form that it has asked for."""

    outer: Value
    aval: Any
    form: Form
    forms: list[Form]
    offset: int = 0  # of dims: a loop's slice has one less
    turn_by_turn: bool = False  # the body itself moves its slice
    atoms: list[Any] = dataclasses.field(default_factory=list)  # in the last body
    reasons: dict[Form, str] = dataclasses.field(default_factory=dict)
    _given: list[Value] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, value: Value, aval: Any, offset: int = 0) -> _Input:
        form = _shifted(value.form, -offset)
        return cls(value, aval, form, [] if value.is_lazy else [form], offset)

    def inside(self) -> Value:
        """A new value of the body's."""
        atoms = {form: var_in(self.aval, form) for form in self.forms}
        value = Value(self.aval, self.form, dict(atoms), asked=None if self.turn_by_turn else {})
        value.is_queue = self.outer.is_queue
        value.fill, value.constant = self.outer.fill, None if self.offset else self.outer.constant
        self.atoms = list(atoms.values())
        self._given.append(value)
        return value

    def grew(self) -> bool:
        """Whether bodies have asked for more since this was asked last."""
        asked = {form: why for value in self._given for form, why in (value.asked or {}).items()}
        more = {form: why for form, why in asked.items() if form not in self.forms}
        self.forms += more
        self.reasons |= more
        self._given.clear()
        return bool(more)

    def outside(self, body: Body) -> list[Any]:
        """What stands outside for `atoms`."""
        return [
            body.at(self.outer, _shifted(form, self.offset), self.why(form)) for form in self.forms
        ]

    def why(self, form: Form, otherwise: str = "a loop or branch needs them whole") -> str:
        """Why a body asked for a form."""
        return self.reasons.get(form) or otherwise


def _grew(inputs: Sequence[_Input]) -> bool:
    return sum(x.grew() for x in inputs) > 0  # Every one is asked.


def _shifted(form: Form, offset: int) -> Form:
    return form.at(form.dim + offset) if isinstance(form, Rows) else form


def _out_vars(eqn: Eqn, forms: Sequence[Form]) -> list[Any]:
    return [var_in(var.aval, form) for var, form in zip(eqn.outvars, forms, strict=True)]


def _values(eqn: Eqn, forms: Sequence[Form], atoms: Sequence[Any]) -> list[Value]:
    return [
        Value(var.aval, form, {form: atom})
        for var, form, atom in zip(eqn.outvars, forms, atoms, strict=True)
    ]


@dataclasses.dataclass(eq=False)
class _Run:
    """One run of a body's jaxpr: what it wrote, and what it returned."""

    body: Body
    outs: list[Value]
    constvars: list[Any]
    consts: list[Any]

    def closed(self, invars: Sequence[Any], outvars: Sequence[Any]) -> _jaxpr.Closed:
        body = self.body
        flat = _rewrite.Flat(
            [*self.constvars, *body.constvars],
            list(invars),
            list(outvars),
            body.without_unread(outvars),
        )
        return _jaxpr.Closed(flat, [*self.consts, *body.consts])


def _run(outer: Body, flat: tuple[Any, list[Any]], ins: Sequence[Value], times: int = 1) -> _Run:
    jaxpr, consts = flat
    body = outer.inside(times)
    env = {var: Value(var.aval, FULL, {FULL: var}) for var in jaxpr.constvars}
    env |= zip(jaxpr.invars, ins, strict=True)
    return _Run(body, run(body, jaxpr, env), list(jaxpr.constvars), consts)


def _is_own(ins: Sequence[Value]) -> bool:
    return any(value.form in (OWN, SUM) for value in ins)


def _as_it_is(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """Inside a loop along the batch, whatever depends on its row runs unchanged."""
    if any(value.form is SUM for value in ins) or _jaxpr.has_side_effects(eqn):
        raise NotRowByRow
    reason = "a loop along the batch reads it"
    atoms = [v.atoms[OWN] if v.form is OWN else body.at(v, FULL, reason) for v in ins]
    outs = body.emit(eqn, atoms, [FULL] * len(eqn.outvars))
    return _values(eqn, [OWN] * len(outs), outs)


# -- checkpoints and branches ----------------------------------------------------------------------------


def _remat(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    call = _jaxpr.call_parts(eqn)
    assert call is not None
    flat = _rewrite.flatten_calls(*call)
    inputs = [_Input.of(v, var.aval) for v, var in zip(ins, flat[0].invars, strict=True)]
    while True:
        given = [x.inside() for x in inputs]
        done = _run(body, flat, given)
        forms = [v.at_hand for v in done.outs]
        outs = [done.body.at(v, form) for v, form in zip(done.outs, forms, strict=True)]
        if not _grew(inputs):
            break
    closed = done.closed([a for x in inputs for a in x.atoms], outs)
    outvars = _out_vars(eqn, forms)
    params = dict(eqn.params, **{_jaxpr.CALLS[eqn.primitive.name]: closed})
    operands = [a for x in inputs for a in x.outside(body)]
    body.movements += done.body.movements
    body.eqns.append(eqn.replace(
        invars=operands, outvars=outvars, params=params, source_info=body.source.source_info
    ))  # fmt: skip
    # What it only hands through is what it was: a loop around it may carry it unchanged.
    through = {id(value): outer for value, outer in zip(given, ins, strict=True)}
    made = _values(eqn, forms, outvars)
    for value, inner in zip(made, done.outs, strict=True):
        value.is_queue = inner.is_queue
    return [through.get(id(v), value) for v, value in zip(done.outs, made, strict=True)]


def _cond(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    if _is_own(ins):
        return _as_it_is(body, eqn, ins)
    choice, *operands = ins
    branches = [_rewrite.flatten_calls(*branch) for branch in _jaxpr.cond_parts(eqn)]
    inputs = [
        _Input.of(v, var.aval) for v, var in zip(operands, branches[0][0].invars, strict=True)
    ]
    forms: list[Form] = [FULL] * len(eqn.outvars)
    while True:
        runs, atoms = [], []
        for flat in branches:
            runs.append(_run(body, flat, [x.inside() for x in inputs]))
            atoms.append([a for x in inputs for a in x.atoms])
        found = [_joined_forms([r.outs[i] for r in runs]) for i in range(len(forms))]
        reason = "branches return it in one form"
        outs = [
            [r.body.at(v, form, reason) for v, form in zip(r.outs, found, strict=True)]
            for r in runs
        ]
        grew = _grew(inputs)
        if not grew and found == forms:
            break
        forms = found
    closed = [r.closed(given, out) for r, given, out in zip(runs, atoms, outs, strict=True)]
    index = body.at(choice, FULL, "it chooses a branch")
    given = [a for x in inputs for a in x.outside(body)]
    for r in runs:
        body.movements += r.body.movements
    outvars = _out_vars(eqn, forms)
    body.eqns.append(eqn.replace(
        invars=[index, *given], outvars=outvars, params=dict(eqn.params, branches=tuple(closed)),
        source_info=body.source.source_info,
    ))  # fmt: skip
    return _values(eqn, forms, outvars)


def _joined_forms(values: Sequence[Value]) -> Form:
    """One form for what several bodies return."""
    forms = [value.at_hand for value in values]
    return next((form for form in forms if isinstance(form, Rows)), forms[0])


# -- loops -----------------------------------------------------------------------------------------------


def _scan(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    if _is_own(ins):
        return _as_it_is(body, eqn, ins)
    scan = _jaxpr.scan_parts(eqn)
    _, _, xs = split(ins, scan.num_consts, scan.num_carry)
    along = {v.form for v in xs if isinstance(v.form, Rows) and v.form.dim == 0}
    for rows in along:
        assert isinstance(rows, Rows)
        if len(along) == 1 and not is_padded(rows, scan.length, body.num):
            mark = len(body.eqns), len(body.movements)
            try:
                return _Scan(body, eqn, ins, rows).run()
            except NotRowByRow:
                del body.eqns[mark[0] :], body.movements[mark[1] :]
    return _Scan(body, eqn, ins, None).run()


class _Scan:
    """A `scan`; with `rows`, each device runs the turns of its own rows."""

    def __init__(self, body: Body, eqn: Eqn, ins: list[Value], rows: Rows | None):
        self.body, self.eqn, self.rows = body, eqn, rows
        self.parts = scan = _jaxpr.scan_parts(eqn)
        self.flat = _rewrite.flatten_calls(scan.body, scan.body_consts)
        consts, self.init, xs = split(ins, scan.num_consts, scan.num_carry)
        const_vars, self.carry_vars, x_vars = split(
            self.flat[0].invars, scan.num_consts, scan.num_carry
        )
        self.length = scan.length if rows is None else rows.size
        self.consts = [_Input.of(v, var.aval) for v, var in zip(consts, const_vars, strict=True)]
        self.xs = [self.slices(v, var.aval) for v, var in zip(xs, x_vars, strict=True)]
        self.forms: list[Form] = [
            v.form if isinstance(v.form, Rows) and rows is None else FULL for v in self.init
        ]

    def slices(self, value: Value, aval: Any) -> _Input:
        """What the loop slices: in whole turns, or the turns of this device's rows."""
        if self.rows is not None:
            return _Input(value, aval, OWN, [OWN], 1)
        form = value.form
        if isinstance(form, Rows) and form.dim == 0:
            return _Input(value, aval, FULL, [FULL], 1)
        slices = _Input.of(value, aval, 1)
        slices.turn_by_turn = isinstance(form, Rows) and _rules.size_in_bytes(aval) >= TURN_BYTES
        return slices

    def run(self) -> list[Value]:
        while not self.settled():
            pass
        return self.written()

    def settled(self) -> bool:
        """Runs the body; whether all forms are what they were."""
        self.carry = [var_in(v.aval, f) for v, f in zip(self.carry_vars, self.forms, strict=True)]
        carried = [
            Value(var.aval, form, {form: atom})
            for var, form, atom in zip(self.carry_vars, self.forms, self.carry, strict=True)
        ]
        ins = [*(x.inside() for x in self.consts), *carried, *(x.inside() for x in self.xs)]
        times = self.parts.length if self.rows is None else self.rows.size
        self.done = _run(self.body, self.flat, ins, times)
        outs, ys = split(self.done.outs, self.parts.num_carry)
        forms = [
            self.next_form(form, out, out.atoms.get(form) is atom)
            for form, out, atom in zip(self.forms, outs, self.carry, strict=False)
        ]
        reason = "a loop carries it in one form"
        if forms == self.forms:
            self.new_carry = [
                v.atoms[form] if form in (OWN, SUM) else self.done.body.at(v, form, reason)
                for form, v in zip(forms, outs, strict=True)
            ]
            self.y_forms = [self.y_form(v) for v in ys]
            self.ys = [self.done.body.at(v, f) for v, f in zip(ys, self.y_forms, strict=True)]
        grew = _grew([*self.consts, *self.xs])
        same = forms == self.forms and not grew
        self.forms = forms
        return same

    def next_form(self, form: Form, out: Value, unchanged: bool) -> Form:
        """The form in which the next run carries what came out as `out`."""
        found = out.at_hand
        if self.rows is None:
            return found if form is FULL and isinstance(found, Rows) else form
        # A device sees the turns of its rows only: what turns change must be a sum over them.
        if form is FULL and not unchanged:
            return SUM  # The next run tells whether it is one.
        if form is SUM and found is not SUM:
            raise NotRowByRow
        return form

    def y_form(self, value: Value) -> Form:
        if value.form is SUM:
            raise NotRowByRow
        if self.rows is not None and value.form is not OWN:
            return FULL
        return value.at_hand

    def written(self) -> list[Value]:
        """The loop's equation, and what it returns."""
        body, eqn, scan, rows = self.body, self.eqn, self.parts, self.rows
        const_atoms, x_atoms = ([a for x in xs for a in x.atoms] for xs in (self.consts, self.xs))
        closed = self.done.closed(
            [*const_atoms, *self.carry, *x_atoms], [*self.new_carry, *self.ys]
        )
        consts = [a for x in self.consts for a in x.outside(body)]
        xs = [a for x in self.xs for a in self.outside(x)]
        reason = "a loop carries it in one form"
        starts = [
            _zeros(body, v.aval) if form is SUM else body.at(v, form, reason)
            for form, v in zip(self.forms, self.init, strict=True)
        ]
        carry_out, ys_out = split(eqn.outvars, scan.num_carry)
        y_forms: list[Form] = [
            rows if rows is not None else _shifted(form, 1) for form in self.y_forms
        ]
        outvars = [var_in(var.aval, form) for var, form in zip(carry_out, self.forms, strict=True)]
        outvars += [var_in(var.aval, form) for var, form in zip(ys_out, y_forms, strict=True)]
        params = dict(
            jaxpr=closed, length=self.length, reverse=scan.reverse, unroll=scan.unroll,
            num_consts=len(consts), num_carry=len(starts),
        )  # fmt: skip
        body.movements += self.done.body.movements
        body.eqns.append(eqn.replace(
            invars=[*consts, *starts, *xs], outvars=outvars, params=params,
            source_info=body.source.source_info,
        ))  # fmt: skip
        outs = []
        for var, form, atom, init in zip(carry_out, self.forms, outvars, self.init, strict=False):
            if form is SUM:
                total = body.reduce(atom, "sum")
                if init.fill is None or init.fill != 0:
                    (total,) = body.inline(_added, (), body.at(init, FULL), total)
                outs.append(Value(var.aval, FULL, {FULL: total}))
            else:
                outs.append(Value(var.aval, form, {form: atom}))
        ys = self.done.outs[scan.num_carry :]
        for var, form, atom, y in zip(ys_out, y_forms, outvars[scan.num_carry :], ys, strict=True):
            outs.append(Value(var.aval, form, {form: atom}, is_queue=y.is_queue))
        return outs

    def outside(self, x: _Input) -> list[Any]:
        if self.rows is not None:
            return [self.body.at(x.outer, self.rows, "its loop runs along other rows")]
        along = isinstance(x.outer.form, Rows) and x.outer.form.dim == 0
        reason = (
            "a loop along the batch whose turns depend on each other"
            if along
            else "a loop reads them"
        )
        return [self.body.at(x.outer, _shifted(form, 1), x.why(form, reason)) for form in x.forms]


def _zeros(body: Body, aval: Any) -> Any:
    return body.inline(jnp.zeros, (tuple(aval.shape), aval.dtype))[0]


def _added(init: Any, total: Any) -> Any:
    return init + total


def _while(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    if _is_own(ins):
        return _as_it_is(body, eqn, ins)
    loop = _jaxpr.while_parts(eqn)
    cond, step = (
        _rewrite.flatten_calls(loop.cond, loop.cond_consts),
        _rewrite.flatten_calls(loop.body, loop.body_consts),
    )
    cond_ins, step_ins, init = split(ins, loop.num_cond_consts, loop.num_body_consts)
    cond_inputs = [_Input.of(v, var.aval) for v, var in zip(cond_ins, cond[0].invars, strict=False)]
    step_inputs = [_Input.of(v, var.aval) for v, var in zip(step_ins, step[0].invars, strict=False)]
    carry_vars = step[0].invars[loop.num_body_consts :]
    again_var = cond[0].outvars[0]
    several = bool(again_var.aval.ndim)  # A vmapped loop: each element stops by itself.
    if several:  # The body asks again which elements go on, so that all devices run alike.
        step_inputs += [
            _Input.of(v, var.aval) for v, var in zip(cond_ins, cond[0].invars, strict=False)
        ]
    forms: list[Form] = [v.form if isinstance(v.form, Rows) else FULL for v in init]

    def carried() -> tuple[list[Any], list[Value]]:
        atoms = [var_in(v.aval, f) for v, f in zip(carry_vars, forms, strict=True)]
        return atoms, [
            Value(v.aval, f, {f: a}) for v, f, a in zip(carry_vars, forms, atoms, strict=True)
        ]

    while True:
        cond_carry, cond_values = carried()
        asked = _run(body, cond, [*(x.inside() for x in cond_inputs), *cond_values])
        again = _goes_on(asked.body, asked.outs[0], reduce=True)
        step_carry, step_values = carried()
        given = [x.inside() for x in step_inputs]
        done = _run(body, step, [*given[: loop.num_body_consts], *step_values])
        found = [_while_form(f, v) for f, v in zip(forms, done.outs, strict=True)]
        if found == forms:
            reason = "a loop carries it in one form"
            new = [done.body.at(v, f, reason) for v, f in zip(done.outs, forms, strict=True)]
            if several:
                new = _where_going_on(
                    done, cond, given[loop.num_body_consts :], step_values, new, forms
                )
        grew = _grew([*cond_inputs, *step_inputs])
        if found == forms and not grew:
            break
        forms = found
    constants = [a for x in cond_inputs for a in x.outside(body)]
    step_constants = [a for x in step_inputs for a in x.outside(body)]
    starts = [
        body.at(v, f, "a loop carries it in one form") for v, f in zip(init, forms, strict=True)
    ]
    outvars = _out_vars(eqn, forms)
    params = dict(
        cond_jaxpr=asked.closed([*(a for x in cond_inputs for a in x.atoms), *cond_carry], [again]),
        body_jaxpr=done.closed([*(a for x in step_inputs for a in x.atoms), *step_carry], new),
        cond_nconsts=len(constants), body_nconsts=len(step_constants),
    )  # fmt: skip
    body.movements += [*asked.body.movements, *done.body.movements]
    body.eqns.append(eqn.replace(
        invars=[*constants, *step_constants, *starts], outvars=outvars, params=params,
        source_info=body.source.source_info,
    ))  # fmt: skip
    return _values(eqn, forms, outvars)


def _while_form(form: Form, out: Value) -> Form:
    found = out.at_hand
    return found if form is FULL and isinstance(found, Rows) else form


def _goes_on(body: Body, again: Value, reduce: bool) -> Any:
    """Whether the loop goes on, on any device; or for which elements, as rows or whole."""
    form = again.at_hand
    atom = body.at(again, form)
    if isinstance(form, Rows):
        atom = body.inline(
            _only_true, (form, again.aval.shape[form.dim], body.num), atom, body.index
        )[0]
    if not reduce or not again.aval.ndim:
        return atom
    (atom,) = body.inline(_any, (), atom)
    return body.reduce(atom, "max") if isinstance(form, Rows) else atom


def _only_true(rows: Rows, size: int, num: int, goes_on: Any, index: Any) -> Any:
    return masked(rows, size, num, "max", goes_on, index)


def _any(goes_on: Any) -> Any:
    return jnp.any(goes_on)


def _where_going_on(
    done: _Run, cond: tuple[Any, list[Any]], consts: Sequence[Value], carry: Sequence[Value],
    new: Sequence[Any], forms: Sequence[Form],
) -> list[Any]:  # fmt: skip
    """What the body returns, for the elements that go on; of the others, what they were."""
    jaxpr, values = cond
    body = done.body
    fresh = [_jaxpr.new_var(var) for var in jaxpr.constvars]
    body.constvars += fresh
    body.consts += values
    env = {
        var: Value(var.aval, FULL, {FULL: f}) for var, f in zip(jaxpr.constvars, fresh, strict=True)
    }
    env |= zip(jaxpr.invars, [*consts, *carry], strict=True)
    (again,) = run(body, jaxpr, env)
    out = []
    for form, old, x in zip(forms, carry, new, strict=True):
        leads = isinstance(form, Rows) and form.dim < again.aval.ndim
        wanted: Form = form if leads else FULL
        goes_on = body.at(again, wanted, "every device needs to know which elements go on")
        out += body.inline(_chosen, (), goes_on, x, old.atoms[form])
    return out


def _chosen(goes_on: Any, new: Any, old: Any) -> Any:
    shape = goes_on.shape + (1,) * (new.ndim - goes_on.ndim)
    return jnp.where(goes_on.reshape(shape), new, old)


HANDLERS: dict[str, Handler] = {
    "remat2": _remat,
    "checkpoint": _remat,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
