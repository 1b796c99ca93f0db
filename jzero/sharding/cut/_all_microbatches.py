# SPDX-License-Identifier: Apache-2.0
"""Equations for all microbatches at once: what is shared is made once, and all else in a loop over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax import lax

from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.cut._param_derived import repeats
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var


class Running(NamedTuple):
    """A value that each microbatch takes from the one before: a sum.

    Attributes:
      before: what a microbatch takes.
      init: what the first one takes.
      after: what a microbatch makes of it.
      out: what the last one makes.
    """

    before: Var
    init: Atom
    after: Atom
    out: Var


class AllMicrobatches:
    """A place for equations of one microbatch, where they run for all of them.

    Of each value of theirs there is one for all, or a stack. What is shared is made when it is first read.

    Attributes:
      eqns: those that stand there.
      shared: what is the same for all microbatches, by its name in one.
      stacks: what is not, `[microbatches, ...]`.
    """

    def __init__(self, loop: Eqn):
        """`loop` is the loop over the microbatches that they come from."""
        scan = _jaxpr.scan_parts(loop)
        self._loop, self._body, self._num = loop, scan.body, scan.length
        self._writer = JaxprWriter(loop)
        self.shared: dict[Var, Atom] = {}
        self.stacks: dict[Var, Atom] = {}
        self._by_iteration: dict[
            Var, Var
        ] = {}  # `[iterations, microbatches, ...]`, as loops over layers have them
        self._makers: dict[Var, Eqn] = {}  # of what is shared
        self._cheap: dict[Var, Eqn] = {}  # of these, what is made again where it is read

    @property
    def eqns(self) -> list[Eqn]:
        return self._writer.eqns

    def take(self, outer: Atom, name: Var, shared: bool) -> tuple[Atom, Var]:
        """What a loop's iteration has of `outer`: one value for all microbatches, or a stack of theirs."""
        mine = _jaxpr.new_var(name) if shared else _stack_like(name, self._num)
        (self.shared if shared else self.stacks)[name] = mine
        return outer, mine

    def local(self, eqns: Iterable[Eqn]) -> list[Eqn]:
        """Those of the equations whose results differ between microbatches."""
        found = []
        for eqn in eqns:
            if not all(map(self.is_shared, eqn.invars)):
                found.append(eqn)
                continue
            self._makers |= dict.fromkeys(eqn.outvars, eqn)
            if repeats(eqn, self._cheap):
                self._cheap |= dict.fromkeys(eqn.outvars, eqn)
        return found

    def is_shared(self, atom: Atom) -> bool:
        """Whether a value is the same for all microbatches."""
        return _jaxpr.is_literal(atom) or atom in self.shared or atom in self._makers

    def whole(self, atom: Atom) -> Atom:
        """What all microbatches share."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self.shared:
            eqn = self._makers[atom]
            fresh = self._writer.clone(eqn, [*map(self.whole, eqn.invars)])
            self.shared |= zip(eqn.outvars, fresh, strict=True)
        return self.shared[atom]

    def stack(self, atom: Atom) -> Atom:
        """`[microbatches, ...]`."""
        if self.is_shared(atom):
            out = _stack_like(atom, self._num)
            return self._writer.broadcast(self.whole(atom), out, tuple(range(1, out.aval.ndim)))
        var = _jaxpr.variable(atom)
        if var not in self.stacks:
            self.stacks[var] = self._writer.swapped(self._by_iteration[var])
        return self.stacks[var]

    def by_iteration(self, atom: Atom) -> Atom:
        """`[iterations, microbatches, ...]` of a stack `[iterations, ...]` of each microbatch."""
        var = _jaxpr.variable(atom)
        if var not in self._by_iteration:
            self._by_iteration[var] = self._writer.swapped(self.stacks[var])
        return self._by_iteration[var]

    def new_shared(self, name: Var) -> Var:
        """A value that all microbatches share, which a loop makes."""
        self.shared[name] = made = _jaxpr.new_var(name)
        return made

    def new_stack(self, name: Var) -> Var:
        """`[microbatches, ...]`, which a loop makes."""
        self.stacks[name] = made = _stack_like(name, self._num)
        return made

    def new_by_iteration(self, name: Var) -> Var:
        """`[iterations, microbatches, ...]`, which a loop makes iteration by iteration."""
        length, *row = name.aval.shape
        self._by_iteration[name] = made = _jaxpr.var_like(name.aval, (length, self._num, *row))
        return made

    def copy(self, atom: Atom, out: Var) -> None:
        """`out = atom`."""
        self._writer.add(lax.copy_p, [atom], [out])

    def row(self, stack: Atom, index: int, out: Var) -> None:
        """`out = stack[index]`."""
        row, rows = out.aval.shape, _jaxpr.var_like(out.aval, (1, *out.aval.shape))
        self._writer.slice(stack, (index, *(0 for _ in row)), (index + 1, *row), rows)
        self._writer.add(lax.squeeze_p, [rows], [out], dimensions=(0,))

    def run(self, eqns: Sequence[Eqn], running: Sequence[Running], made: Sequence[Var]) -> None:
        """Runs equations for one microbatch after the other; `made` then are stacks."""
        if not eqns and not running:
            return
        ends = [*(each.after for each in running), *made]
        everything = self._with_cheap(eqns, ends)
        here = {out for eqn in everything for out in eqn.outvars}
        here |= {each.before for each in running}
        read = variables([*(a for eqn in everything for a in eqn.invars), *ends])
        read = [v for v in read if v not in here]
        shared = [v for v in read if self.is_shared(v)]
        own = [v for v in read if not self.is_shared(v)]
        invars = [*shared, *(each.before for each in running), *own]
        body = _jaxpr.replaced(self._body, invars=invars, eqns=everything, outvars=ends)
        ins = [*map(self.whole, shared), *(each.init for each in running), *map(self.stack, own)]
        outs = [*(each.out for each in running), *map(self.new_stack, made)]
        nums, parts = (len(shared), len(running)), _jaxpr.scan_parts(self._loop)
        loop = _jaxpr.scan_like(self._loop, body, ins, outs, *nums, self._num, parts.reverse)
        self.eqns.append(loop)

    def _with_cheap(self, eqns: Sequence[Eqn], ends: Sequence[Atom]) -> list[Eqn]:
        """The equations, and before them what they read that is made where it is read."""
        needed, found = set(variables([*(a for eqn in eqns for a in eqn.invars), *ends])), []
        for eqn in reversed({id(eqn): eqn for eqn in self._cheap.values()}.values()):
            if needed.intersection(eqn.outvars):
                needed.update(variables(eqn.invars))
                found.append(eqn)
        return [*found[::-1], *eqns]


def _stack_like(atom: Atom, num: int) -> Var:
    return _jaxpr.var_like(atom.aval, (num, *atom.aval.shape))
