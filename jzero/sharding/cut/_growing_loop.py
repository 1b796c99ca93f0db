# SPDX-License-Identifier: Apache-2.0
"""A `scan` to which equations around it are added: its body runs them on an iteration's part of their stacks.

The part of a stack `[iterations * k, ...]` is `[k, ...]`, so that equations keep their ranks and dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir._loops import CarryPort, Scan, ScanBuilder
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.cut import _over_iterations
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Var


class MadeInLoop(NamedTuple):
    """How another loop computes a stack, slice by slice."""

    eqns: list[Eqn]  # Of that loop's body.
    out: Atom  # The slice of the stack.
    slices: Mapping[
        Var, Atom
    ]  # Stacks whose slices the equations read, by their names in the body.
    consts: Mapping[Var, Atom]  # The loop constants that they read, likewise.


Source = Eqn | MadeInLoop
Derived = Mapping[Var, Source]  # Stacks that any loop can compute slice by slice, and how.


class GrowingLoop(ScanBuilder):
    """A loop to which equations are added; `equations` replace it."""

    def __init__(self, eqn: Eqn, derived: Derived):
        super().__init__(Scan.of(eqn))
        self.eqn, self._derived = eqn, derived
        self._rows: dict[Var, Atom] = {}

    @property
    def length(self) -> int:
        return self.scan.length

    @property
    def stacks(self) -> list[Var]:
        """The stacks that it slices."""
        return variables(port.stack for port in self.xs)

    @property
    def made(self) -> list[Var]:
        return [port.stack for port in self.ys]

    @property
    def reads(self) -> list[Var]:
        """All values that the loop reads."""
        eqns = self.equations()
        made = {out for e in eqns for out in e.outvars}
        return [v for v in variables(a for e in eqns for a in e.invars) if v not in made]

    def make(self, stack: Var) -> None:
        """Derives the slices of a stack in the body instead of slicing it."""
        shape = stack.aval.shape[1:]
        self.sink(stack, lambda row: self.first.reshape(self._rows_of(stack), shape, row))

    def run(self, eqn: Eqn) -> None:
        """Runs an equation in each iteration."""
        combine = _over_iterations.combines(eqn)
        if combine is None:
            self._place(eqn, self.last)
            return
        (out,) = eqn.outvars
        (part,) = self.last.clone(eqn, [*map(self._rows_of, eqn.invars)])
        init = self.before.full(_over_iterations.neutral(eqn), out.aval, source=eqn)
        before, after = _jaxpr.new_var(out), _jaxpr.new_var(out)
        self.last.add(combine, [before, part], [after], eqn)
        self.carries.append(CarryPort(init, before, after, out))

    def return_stack(self, stack: Var) -> None:
        """Returns a stack `[iterations * k, ...]` from the iterations' parts of it."""
        rows, shape = self._rows_of(stack), stack.aval.shape
        if shape[0] == self.length:
            row = self.last.reshape(rows, shape[1:], _jaxpr.var_like(stack.aval, shape[1:]))
            self.stack(row, stack)
        else:
            apart = _jaxpr.var_like(stack.aval, (self.length, *rows.aval.shape))
            self.after.reshape(apart, shape, stack)
            self.stack(rows, apart)

    def keep(self, read: set[Var]) -> None:
        """Drops stacks that are not in `read`, and all that only they needed."""
        self.ys = [port for port in self.ys if port.stack in read]
        wanted = [*(port.after for port in self.carries), *(port.row for port in self.ys)]
        eqns = [*self.first.eqns, *self.eqns, *self.last.eqns]
        live = _rewrite.behind(eqns, wanted)[0]
        needed = set(variables([*wanted, *(a for e in live for a in e.invars)]))
        self.first.eqns, self.last.eqns, self.eqns = [], [], tuple(live)
        self.consts = [port for port in self.consts if port.inner in needed]
        self.xs = [port for port in self.xs if port.row in needed]

    def equations(self) -> list[Eqn]:
        return self.build().equations()

    def _rows_of(self, atom: Atom) -> Atom:
        """An iteration's part `[k, ...]` of a stack `[iterations * k, ...]`."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._rows:
            found = [port.row for port in self.ys if port.stack is atom]
            source = self._derived.get(atom)
            if found:
                self._rows[atom] = self._with_dim(found[0], atom, self.last)
            elif source is None:
                self._rows[atom] = self._taken(atom)
            elif isinstance(source, MadeInLoop):
                self._rows[atom] = self._made_again(atom, source)
            else:
                self._place(source, self.first)
        return self._rows[atom]

    def _taken(self, stack: Var) -> Atom:
        rows = _over_iterations.rows_of(stack.aval, self.length)
        if rows[0] == 1:
            return self._with_dim(self.slice(stack), stack, self.first)
        return self.slice(self.before.reshape(stack, (self.length, *rows)))

    def _with_dim(self, row: Atom, stack: Var, where: JaxprWriter) -> Var:
        shape = (1, *stack.aval.shape[1:])
        return where.reshape(row, shape, _jaxpr.var_like(stack.aval, shape))

    def _row(self, atom: Atom) -> Atom:
        """An iteration's slice `[...]` of a stack `[iterations, ...]`."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._derived:
            return self.slice(atom)
        row = _jaxpr.var_like(atom.aval, atom.aval.shape[1:])
        return self.first.reshape(self._rows_of(atom), row.aval.shape, row)

    def _made_again(self, stack: Var, source: MadeInLoop) -> Atom:
        names = {inner: self._row(a) for inner, a in source.slices.items()}
        names |= {inner: self.whole(a) for inner, a in source.consts.items()}
        copies = JaxprWriter(self.eqn, names)
        copies.copy(source.eqns)
        self.first.eqns += copies.eqns
        return self._with_dim(copies.read(source.out), stack, self.first)

    def _place(self, eqn: Eqn, where: JaxprWriter) -> None:
        gives = _over_iterations.stacked(eqn, self.length)
        assert gives is not None, eqn
        pairs = zip(eqn.invars, gives, strict=True)
        ins = [self._rows_of(a) if given else self.whole(a) for a, given in pairs]
        avals = [out.aval for out in eqn.outvars]
        outs = [_jaxpr.var_like(x, _over_iterations.rows_of(x, self.length)) for x in avals]
        params = _over_iterations.of_iteration(eqn, outs[0].aval.shape[0])
        where.clone(eqn, ins, outs, params=params)
        self._rows |= zip(eqn.outvars, outs, strict=True)


def is_loop(eqn: Eqn) -> bool:
    """Whether it is a `scan` of several iterations."""
    return eqn.primitive.name == "scan" and _jaxpr.scan_parts(eqn).length > 1


def stacks_made(eqn: Eqn) -> Sequence[Var]:
    """The stacks of slices that a loop returns."""
    return eqn.outvars[_jaxpr.scan_parts(eqn).num_carry :]
