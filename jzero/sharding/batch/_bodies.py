# SPDX-License-Identifier: Apache-2.0
"""Bodies of loops, branches and checkpoints: rewritten with rows going in and out.

What a body reads from outside is given to it in the forms in which it asks for it (`BatchValue.asked`), so
that a gather stands before a loop and not in it. The forms of what a loop carries are found by running the
body until they no longer change; running it is cheap, since nothing is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from jax.typing import ArrayLike

from jzero.ir._factors import Params
from jzero.sharding.batch._body import Body
from jzero.sharding.batch._equations import NotRowByRow, run
from jzero.sharding.batch._rows import FULL, OWN, Form, PartialSum, Rows, is_of_iteration
from jzero.sharding.batch._values import BatchValue, values_of, var_in, whole
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Aval, Eqn, Var

CARRIED = "a loop carries it in one form"
FlatBody = tuple[_rewrite.Flat, list[ArrayLike]]  # a body without calls, and its constants
Made = TypeVar("Made")


@dataclasses.dataclass(eq=False)
class Input:
    """What a body reads from outside, in every form that it has asked for."""

    outer: BatchValue
    aval: Aval
    form: Form
    forms: list[Form]
    offset: int = 0  # of dims: a loop's slice has one less
    turn_by_turn: bool = False  # the body itself moves its slice
    atoms: list[Var] = dataclasses.field(default_factory=list)  # in the last body
    reasons: dict[Form, str] = dataclasses.field(default_factory=dict)
    _given: list[BatchValue] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, value: BatchValue, aval: Aval, offset: int = 0) -> Input:
        form = shifted(value.form, -offset)
        return cls(value, aval, form, [] if value.is_lazy else [form], offset)

    def inside(self) -> BatchValue:
        """A new value of the body's."""
        atoms = {form: var_in(self.aval, form) for form in self.forms}
        value = BatchValue(self.aval, self.form, {**atoms}, asked=None if self.turn_by_turn else {})
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

    def outside(self, body: Body) -> list[Atom]:
        """What stands outside for `atoms`."""
        return [
            body.at(self.outer, shifted(form, self.offset), self.why(form)) for form in self.forms
        ]

    def why(self, form: Form, otherwise: str = "a loop or branch needs them whole") -> str:
        """Why a body asked for a form."""
        return self.reasons.get(form) or otherwise


def inputs_of(values: Sequence[BatchValue], variables: Sequence[Var]) -> list[Input]:
    """What a body reads from outside, by the variables that it has for it."""
    return [Input.of(v, var.aval) for v, var in zip(values, variables, strict=True)]


def shifted(form: Form, offset: int) -> Form:
    """The form of a value with so many more dims in front."""
    return form.at(form.dim + offset) if isinstance(form, Rows) else form


@dataclasses.dataclass(eq=False)
class BodyRun:
    """One run of a body's jaxpr: what it wrote, and what it returned."""

    body: Body
    outs: list[BatchValue]
    constvars: list[Var]
    consts: list[ArrayLike]

    def closed(self, invars: Sequence[Var], outvars: Sequence[Atom]) -> _jaxpr.Closed:
        """The body as it is written, of these inputs and outputs."""
        body = self.body
        flat = _rewrite.Flat(
            [*self.constvars, *body.constvars],
            list(invars),
            list(outvars),
            body.without_unread(outvars),
        )
        return _jaxpr.Closed(flat, [*self.consts, *body.consts])


def run_body(outer: Body, flat: FlatBody, ins: Sequence[BatchValue], times: int = 1) -> BodyRun:
    """Rewrites a body that a step runs so many times for each run of what is around it."""
    jaxpr, consts = flat
    body = outer.inside(times)
    env = {var: whole(var) for var in jaxpr.constvars}
    env |= zip(jaxpr.invars, ins, strict=True)
    return BodyRun(body, run(body, jaxpr, env), list(jaxpr.constvars), consts)


def settle(
    inputs: Sequence[Input], forms: list[Form],
    turn: Callable[[list[Form]], tuple[list[Form], Made | None]],
) -> Made:  # fmt: skip
    """Rewrites a loop's bodies until they ask for nothing new, and return what they carry as it came in.

    Args:
      inputs: what they read from outside.
      forms: of what the loop carries, at first.
      turn: rewrites them with a carry in such forms: in which ones it came out, and what was made of them;
        None if these are others.
    """
    while True:
        found, made = turn(forms)
        if not grew(inputs) and made is not None:
            return made
        forms = found


def grew(inputs: Sequence[Input]) -> bool:
    """Whether bodies have asked for more since this was asked last."""
    return sum(x.grew() for x in inputs) > 0  # Every one is asked.


def wider(form: Form, out: BatchValue) -> Form:
    """The form in which the next run carries what came in as `form` and came out as `out`."""
    return out.at_hand if form is FULL and isinstance(out.at_hand, Rows) else form


def first_form(value: BatchValue) -> Form:
    """The form in which a loop carries a value at first."""
    return value.form if isinstance(value.form, Rows) else FULL


def write(
    outer: Body, eqn: Eqn, runs: Iterable[BodyRun], ins: Sequence[Atom], outs: Sequence[Var],
    params: Params,
) -> None:  # fmt: skip
    """Writes the equation of rewritten bodies."""
    for done in runs:
        outer.movements += done.body.movements
    outer.replace(eqn, ins, outs, params)


def as_it_is(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """Inside a loop along the batch, whatever depends on its row runs unchanged; None if nothing does."""
    if not any(is_of_iteration(value.form) for value in ins):
        return None
    if any(isinstance(value.form, PartialSum) for value in ins) or _jaxpr.has_side_effects(eqn):
        raise NotRowByRow
    reason = "a loop along the batch reads it"
    atoms = [v.atoms[OWN] if v.form is OWN else body.at(v, FULL, reason) for v in ins]
    outs = body.emit(eqn, atoms, [FULL] * len(eqn.outvars))
    return values_of(eqn.outvars, [OWN] * len(outs), outs)
