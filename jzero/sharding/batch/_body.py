# SPDX-License-Identifier: Apache-2.0
"""One device's step while it is being written: values, and the forms in which they are made and moved."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jzero.ir._factors import Params
from jzero.ir._sent import SENT_AS
from jzero.sharding.batch._rows import FULL, Form, Rows, is_padded
from jzero.sharding.batch._values import BatchValue, OfSum, var_in, vars_in
from jzero.sharding.batch._writer import EquationWriter
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Aval, Eqn, Var

OUTPUT = "output"  # in the place of a primitive, of what is gathered because it is returned
# The reason of a loop that is no sum over its rows; a report says what else they may be.
TURNS_DEPEND = "a loop along the batch whose turns depend on each other"


@dataclasses.dataclass(frozen=True)
class Movement:
    """Rows that move because an operation needs others than a device has; see `describe`.

    Attributes:
      operation: the primitive.
      where: the user's line, `file.py:12 (train_step)`; of an output, its path.
      nbytes: that reach each device: the whole value's, or, if rows of one dim become rows of another, those
        of the rows.
      times: how often a step does it.
      reason: what the operation needs.
      value: whose rows they are, `float32[16,64]`; of totals and ranks nothing.
    """

    operation: str
    where: str
    nbytes: int
    times: int
    reason: str
    value: str = ""

    def __str__(self) -> str:
        times = f", {self.times} times a step" if self.times > 1 else ""
        return f"{self.operation} at {self.where}: {self.reason}{times}"


class BatchRules(NamedTuple):
    """What equations are rewritten by, beside their factors.

    Attributes:
      handlers: asked first, by the name of the primitive; None means: not this time.
      along: asked if no factor has the rows.
      in_rows: makes one device's rows of a value that waits to be needed.
      effect: for equations that do more than compute.
    """

    handlers: Mapping[str, BatchRule]
    along: Mapping[str, BatchRule]
    in_rows: Mapping[str, RuleInRows]
    effect: Callable[[Body, Eqn, list[BatchValue]], list[BatchValue]]


class Body(EquationWriter):
    """Equations of one frame of the step, for one device."""

    def __init__(
        self, axes: tuple[str, ...], num: int, source: Eqn, rules: BatchRules, times: int = 1,
        exchanges: bool = True,
    ):  # fmt: skip
        super().__init__(axes, num, source)
        self.rules, self.times = rules, times
        self.exchanges = exchanges  # whether devices may send each other parts of their rows
        self.movements: list[Movement] = []
        self.turn: Atom | None = None  # what the next ordered effect waits for
        self.autodiff: str | None = None  # the pass of the loop or branch around it
        self._scattered: list[tuple[Atom, Atom, Rows]] = []  # whole sums, and their scattered twins
        self._reason = ""  # why a value is made that waited to be needed
        self._outer: Body | None = None

    def inside(self, times: int = 1) -> Body:
        """A loop's or a branch's body in this one."""
        inner = Body(
            self.axes, self.num, self.source, self.rules, self.times * times, self.exchanges
        )
        inner._outer = self
        inner.autodiff = self.pass_of(self.source)
        return inner

    def in_scope(self, name: str) -> bool:
        """Whether the equation that is being rewritten, or a loop around it, was made under this name."""
        inside = _jaxpr.in_scope(self.source, name)
        return inside or (self._outer is not None and self._outer.in_scope(name))

    def pass_of(self, eqn: Eqn) -> str | None:
        """'forward' or 'backward' if JAX's AD made the equation, or what is around it.

        What a checkpoint computes again, in the backward pass, is forward too.
        """
        if _jaxpr.in_scope(eqn, "rematted_computation"):
            return "forward"
        return _jaxpr.autodiff_pass(eqn) or self.autodiff

    @contextlib.contextmanager
    def at_source(self, eqn: Eqn) -> Iterator[None]:
        """What is written meanwhile stands for `eqn`."""
        outer, self.source = self.source, eqn
        yield
        self.source = outer

    # -- writing equations -----------------------------------------------------------------------

    def emit(
        self, eqn: Eqn, ins: Sequence[Atom], forms: Sequence[Form], **overrides: Any
    ) -> list[Atom]:
        """Writes `eqn` on other operands; `forms` are those of its results."""
        outs = vars_in(eqn.outvars, forms)
        self.replace(eqn, ins, outs, {**eqn.params, **overrides} if overrides else eqn.params)
        return [*outs]

    def replace(self, eqn: Eqn, ins: Sequence[Atom], outs: Sequence[Var], params: Params) -> None:
        """Writes `eqn` with other operands, results and parameters."""
        self.again(eqn, ins, outs, self.source, params)

    def summed(self, aval: Aval, x: Atom) -> BatchValue:
        """The sum of `x` over the devices: whole, or scattered, as it will be needed."""
        whole = self.reduce(x, "sum")
        value = BatchValue(aval, FULL, {FULL: whole})
        sent = jnp.issubdtype(x.aval.dtype, jnp.floating) and str(x.aval.dtype) not in SENT_AS
        if self.exchanges and x.aval.ndim and sent:
            backward = self.pass_of(self.source) == "backward"
            value.of_sum = OfSum(functools.partial(self._scatter, x, whole), backward)
        return value

    def _scatter(self, x: Atom, whole: Atom, rows: Rows) -> Atom | None:
        if rows.outer > 1 or is_padded(rows, x.aval.shape[rows.dim], self.num):
            return None
        out = self.reduce_scatter(x, rows)
        self._scattered.append((whole, out, rows))
        return out

    def without_unread(self, outs: Sequence[Atom]) -> list[Eqn]:
        """The equations, without collectives that nobody needs: a loss that is not read is not summed up.

        A sum that is needed whole, too, is not scattered besides.
        """
        kept = _rewrite.without_unread(self.eqns, outs, _is_collective)
        made = {out for eqn in kept for out in eqn.outvars}
        twins = {out: (whole, rows) for whole, out, rows in self._scattered if whole in made}
        if not twins:
            return kept
        eqns = []
        for eqn in kept:
            twin = twins.get(eqn.outvars[0]) if eqn.outvars else None
            eqns += [eqn] if twin is None else self._taken_instead(eqn, *twin)
        return eqns

    def _taken_instead(self, eqn: Eqn, whole: Atom, rows: Rows) -> list[Eqn]:
        """What takes this device's rows of a whole sum, in the place of the equation that scatters it."""
        outside = self.eqns, self.source, self._index
        self.eqns, self.source, self._index = [], eqn, None
        taken = self.take(whole, rows)
        *before, last = self.eqns
        assert last.outvars == [taken]
        self.eqns, self.source, self._index = outside
        return [*before, last.replace(outvars=eqn.outvars)]

    # -- values in other forms -------------------------------------------------------------------

    def at(self, value: BatchValue, form: Form, reason: str = "") -> Atom:
        """The variable that holds `value` in a form; written now if there is none.

        `reason` is why rows are gathered, if they must be.
        """
        if form in value.atoms:
            return value.atoms[form]
        atom: Atom
        if value.asked is not None:
            value.asked.setdefault(form, reason)
            atom = var_in(value.aval, form)  # A place-holder: the body will be run again.
        elif value.make is not None:
            outer, self._reason = self._reason, reason or self._reason
            atom = value.make(value, form)
            self._reason = outer
        elif form is FULL:
            assert isinstance(value.form, Rows), (value.form, reason)
            self.note_movement(value.nbytes, reason, value.aval)
            atom = self.gather(value.atoms[value.form], value.form, value.aval)
        elif value.of_sum is not None and isinstance(form, Rows):
            scattered = value.of_sum.rows(form)
            atom = self.take(value.atoms[FULL], form) if scattered is None else scattered
        elif FULL not in value.atoms and self.may_exchange(value, form):
            assert isinstance(value.form, Rows)
            assert isinstance(form, Rows)
            self.note_movement(
                value.nbytes // self.num,
                reason or self._reason or "rows along another dim",
                value.aval,
            )
            atom = self.exchange(value.atoms[value.form], value.form, form)
        else:
            assert isinstance(form, Rows)
            atom = self.take(
                self.at(value, FULL, reason or self._reason or "rows along another dim"), form
            )
        value.atoms[form] = atom
        return atom

    def note_movement(self, nbytes: int, reason: str, of: Aval | None = None) -> None:
        """Remembers that so many bytes of rows of a value reach each device, for the report."""
        where, name = self._line(), self.source.primitive.name
        value = "" if of is None else f"{of.dtype}[{','.join(map(str, of.shape))}]"
        reason = reason or self._reason
        self.movements.append(Movement(name, where, nbytes, self.times, reason, value))

    def _line(self) -> str:
        """Where the user wrote what is being rewritten, or called the library that did."""
        return _jaxpr.summary(self.source) or (self._outer._line() if self._outer else "")

    def may_exchange(self, value: BatchValue, new: Form) -> bool:
        """Whether devices can send each other parts of their rows, so that each has `new` ones."""
        old, shape = value.form, value.aval.shape
        if not (self.exchanges and isinstance(old, Rows) and isinstance(new, Rows)):
            return False
        even = not any(is_padded(rows, shape[rows.dim], self.num) for rows in (old, new))
        return even and old.dim != new.dim

    def cost(self, value: BatchValue, form: Form) -> float:
        """Bytes that reach a device before it has `value` in this form."""
        if form in value.atoms or FULL in value.atoms or not isinstance(value.form, Rows):
            return 0
        if value.make is not None:
            return value.grown_from
        return value.nbytes / self.num if self.may_exchange(value, form) else value.nbytes


def _is_collective(eqn: Eqn) -> bool:
    return eqn.primitive in _jaxpr.COLLECTIVES


BatchRule = Callable[[Body, Eqn, list[BatchValue]], list[BatchValue] | None]
RuleInRows = Callable[[Body, Eqn, list[BatchValue], Rows], Atom | None]
