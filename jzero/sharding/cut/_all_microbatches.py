# SPDX-License-Identifier: Apache-2.0
"""Runs equations of one microbatch for all of them: shared values once, all others in a loop."""

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
    """A carry of the loop over microbatches, such as a sum."""

    before: Var  # In a microbatch.
    init: Atom
    after: Atom  # The next value, in a microbatch.
    out: Var


class AllMicrobatches:
    """Writes equations of the body of `loop`, a loop over microbatches, for all microbatches.

    `shared` maps variables of the body to values that all microbatches share, which are computed when first
    read, and `stacks` all others to `[microbatches, ...]`.
    """

    def __init__(self, loop: Eqn):
        scan = _jaxpr.scan_parts(loop)
        self._loop, self._body, self._num = loop, scan.body, scan.length
        self._writer = JaxprWriter(loop)
        self.shared: dict[Var, Atom] = {}
        self.stacks: dict[Var, Atom] = {}
        # `[iterations, microbatches, ...]`, as loops over layers stack them.
        self._by_iteration: dict[Var, Var] = {}
        self._makers: dict[Var, Eqn] = {}  # Equations of shared values.
        self._cheap: dict[Var, Eqn] = {}  # Those that are recomputed where they are read.

    @property
    def eqns(self) -> list[Eqn]:
        return self._writer.eqns

    def take(self, outer: Atom, name: Var, shared: bool) -> tuple[Atom, Var]:
        """Names `outer` in a loop's iteration: one value for all microbatches, or their stack."""
        mine = _jaxpr.new_var(name) if shared else _stack_like(name, self._num)
        (self.shared if shared else self.stacks)[name] = mine
        return outer, mine

    def local(self, eqns: Iterable[Eqn]) -> list[Eqn]:
        """The equations whose results differ between microbatches; notes the others as shared."""
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
        return _jaxpr.is_literal(atom) or atom in self.shared or atom in self._makers

    def whole(self, atom: Atom) -> Atom:
        """A shared value."""
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
        self.shared[name] = made = _jaxpr.new_var(name)
        return made

    def new_stack(self, name: Var) -> Var:
        self.stacks[name] = made = _stack_like(name, self._num)
        return made

    def new_by_iteration(self, name: Var) -> Var:
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
        """Writes a loop over microbatches of these equations; `made` become stacks."""
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
        """The equations behind the cheap ones that they need."""
        needed, found = set(variables([*(a for eqn in eqns for a in eqn.invars), *ends])), []
        for eqn in reversed({id(eqn): eqn for eqn in self._cheap.values()}.values()):
            if needed.intersection(eqn.outvars):
                needed.update(variables(eqn.invars))
                found.append(eqn)
        return [*found[::-1], *eqns]


def _stack_like(atom: Atom, num: int) -> Var:
    return _jaxpr.var_like(atom.aval, (num, *atom.aval.shape))
