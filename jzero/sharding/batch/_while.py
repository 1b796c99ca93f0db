# SPDX-License-Identifier: Apache-2.0
"""While loops: all devices run as many turns, until none of them goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.sharding.analysis._frames import split
from jzero.sharding.batch import _bodies
from jzero.sharding.batch._bodies import CARRIED, BodyRun, FlatBody
from jzero.sharding.batch._body import Body
from jzero.sharding.batch._equations import run
from jzero.sharding.batch._rows import FULL, Form, Rows
from jzero.sharding.batch._values import BatchValue, values_of, vars_in
from jzero.sharding.batch._writer import masked
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn


class _WhileTurn(NamedTuple):
    """Condition and body of a while loop, settled: the runs that wrote them, and their jaxprs."""

    asked: BodyRun
    done: BodyRun
    cond: _jaxpr.Closed
    step: _jaxpr.Closed
    forms: list[Form]


def while_loop(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    if (own := _bodies.as_it_is(body, eqn, ins)) is not None:
        return own
    return _While(body, eqn, ins).run()


class _While:
    """A `while`; of a vmapped one each element stops by itself, and all devices run alike."""

    def __init__(self, body: Body, eqn: Eqn, ins: list[BatchValue]):
        self.body, self.eqn = body, eqn
        self.parts = parts = _jaxpr.while_parts(eqn)
        self.cond = _rewrite.flatten_calls(parts.cond, parts.cond_consts)
        self.step = _rewrite.flatten_calls(parts.body, parts.body_consts)
        cond_ins, step_ins, self.init = split(ins, parts.num_cond_consts, parts.num_body_consts)
        cond_vars = self.cond[0].invars[: parts.num_cond_consts]
        step_vars, self.carry_vars = split(self.step[0].invars, parts.num_body_consts)
        self.cond_inputs = _bodies.inputs_of(cond_ins, cond_vars)
        self.step_inputs = _bodies.inputs_of(step_ins, step_vars)
        self.is_vmapped = bool(self.cond[0].outvars[0].aval.ndim)
        if self.is_vmapped:  # The body asks again which elements go on.
            self.step_inputs += _bodies.inputs_of(cond_ins, cond_vars)

    def run(self) -> list[BatchValue]:
        """The loop's equation, and what it returns."""
        body, inputs = self.body, [*self.cond_inputs, *self.step_inputs]
        turn = _bodies.settle(inputs, [_bodies.first_form(v) for v in self.init], self.turn)
        cond_consts = [a for x in self.cond_inputs for a in x.outside(body)]
        step_consts = [a for x in self.step_inputs for a in x.outside(body)]
        starts = [body.at(v, f, CARRIED) for v, f in zip(self.init, turn.forms, strict=True)]
        outvars = vars_in(self.eqn.outvars, turn.forms)
        params = dict(
            cond_jaxpr=turn.cond, body_jaxpr=turn.step,
            cond_nconsts=len(cond_consts), body_nconsts=len(step_consts),
        )  # fmt: skip
        given = [*cond_consts, *step_consts, *starts]
        _bodies.write(body, self.eqn, [turn.asked, turn.done], given, outvars, params)
        return values_of(self.eqn.outvars, turn.forms, outvars)

    def turn(self, forms: list[Form]) -> tuple[list[Form], _WhileTurn | None]:
        """Condition and body with a carry in such forms (`settle`)."""
        atoms = vars_in(self.carry_vars, forms)
        carried = values_of(self.carry_vars, forms, atoms)
        asked = _bodies.run_body(
            self.body, self.cond, [*(x.inside() for x in self.cond_inputs), *carried]
        )
        again = _goes_on(asked.body, asked.outs[0])
        cond_ins = [*(a for x in self.cond_inputs for a in x.atoms), *atoms]
        atoms = vars_in(self.carry_vars, forms)
        carried = values_of(self.carry_vars, forms, atoms)
        consts, cond_consts = split(
            [x.inside() for x in self.step_inputs], self.parts.num_body_consts
        )
        done = _bodies.run_body(self.body, self.step, [*consts, *carried])
        found = [_bodies.wider(form, v) for form, v in zip(forms, done.outs, strict=True)]
        if found != forms:
            return found, None
        new = [done.body.at(v, form, CARRIED) for v, form in zip(done.outs, forms, strict=True)]
        if self.is_vmapped:
            new = _where_going_on(done.body, self.cond, cond_consts, carried, new)
        step_ins = [*(a for x in self.step_inputs for a in x.atoms), *atoms]
        cond, step = asked.closed(cond_ins, [again]), done.closed(step_ins, new)
        return found, _WhileTurn(asked, done, cond, step, forms)


def _goes_on(body: Body, again: BatchValue) -> Atom:
    """Whether the loop goes on, for any element on any device."""
    form = again.at_hand
    atom = body.at(again, form)
    if isinstance(form, Rows):
        static = (form, again.aval.shape[form.dim], body.num)
        (atom,) = body.inline(_only_true, static, atom, body.index)
    if not again.aval.ndim:
        return atom
    (atom,) = body.inline(jnp.any, (), atom)
    return body.reduce(atom, "max") if isinstance(form, Rows) else atom


def _only_true(rows: Rows, size: int, num: int, goes_on: jax.Array, index: jax.Array) -> jax.Array:
    return masked(rows, size, num, "max", goes_on, index)


def _where_going_on(
    body: Body,
    cond: FlatBody,
    consts: Sequence[BatchValue],
    carry: Sequence[BatchValue],
    new: Sequence[Atom],
) -> list[Atom]:
    """What the body returns, for the elements that go on; of the others, what they were."""
    jaxpr, values = cond
    fresh = [_jaxpr.new_var(var) for var in jaxpr.constvars]
    body.constvars += fresh
    body.consts += values
    env = dict(zip(jaxpr.constvars, values_of(fresh, [FULL] * len(fresh), fresh), strict=True))
    env |= zip(jaxpr.invars, [*consts, *carry], strict=True)
    (again,) = run(body, jaxpr, env)
    out = []
    for old, x in zip(carry, new, strict=True):
        leads = isinstance(old.form, Rows) and old.form.dim < again.aval.ndim
        reason = "every device needs to know which elements go on"
        goes_on = body.at(again, old.form if leads else FULL, reason)
        out += body.inline(_chosen, (), goes_on, x, old.atoms[old.form])
    return out


def _chosen(goes_on: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    shape = goes_on.shape + (1,) * (new.ndim - goes_on.ndim)
    return jnp.where(goes_on.reshape(shape), new, old)
