# SPDX-License-Identifier: Apache-2.0
"""A `scan` that takes over equations around it: its body runs them on what a turn has of their stacks.

In the body, a stack `[turns * k, ...]` is `[k, ...]`, dim 0 included: so equations keep their ranks and dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax import lax

from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut import _over_turns
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Var


class MadeInLoop(NamedTuple):
    """How another loop makes a stack out of slices, turn by turn.

    Attributes:
      eqns: of that loop's body.
      out: the turn's slice of the stack.
      slices: the stacks that the equations read slices of, by the names that these have there.
      consts: what they read whole, likewise.
    """

    eqns: list[Eqn]
    out: Atom
    slices: Mapping[Var, Atom]
    consts: Mapping[Var, Atom]


Source = Eqn | MadeInLoop
# By value, how it follows from others turn by turn: it can be made in any loop.
Derived = Mapping[Var, Source]


class _CarryParts(NamedTuple):
    init: Atom
    before: Var
    after: Atom
    out: Var


class GrowingLoop:
    """A loop, to which equations are added; `equations` are those that then stand in its place.

    Attributes:
      eqn: the loop as it was.
      turns: how many.
    """

    def __init__(self, eqn: Eqn, derived: Derived):
        scan = _jaxpr.scan_parts(eqn)
        nums = scan.num_consts, scan.num_carry
        ins, body_ins = split(eqn.invars, *nums), split(scan.body.invars, *nums)
        outs = split(eqn.outvars, scan.num_carry)
        body_outs = split(scan.body.outvars, scan.num_carry)
        self.eqn, self.turns = eqn, scan.length
        self._derived, self._body = derived, scan.body
        self._consts = list(zip(ins[0], body_ins[0], strict=True))
        carries = zip(ins[1], body_ins[1], body_outs[0], outs[0], strict=True)
        self._carries = [_CarryParts(*each) for each in carries]
        self._stacks = list(zip(ins[2], body_ins[2], strict=True))
        self._made = list(zip(body_outs[1], outs[1], strict=True))
        self._first: list[Eqn] = []  # of the body; what they read, no equation of the body makes
        self._last: list[Eqn] = []
        self._before: list[Eqn] = []  # the loop
        self._after: list[Eqn] = []
        self._rows: dict[Var, Atom] = {}

    @property
    def stacks(self) -> list[Var]:
        """The stacks of which it takes slices."""
        return variables(stack for stack, _ in self._stacks)

    @property
    def made(self) -> list[Var]:
        """The stacks that it makes."""
        return [out for _, out in self._made]

    @property
    def reads(self) -> list[Var]:
        """All that must be there when the loop begins."""
        eqns = self.equations()
        made = {out for e in eqns for out in e.outvars}
        return [v for v in variables(a for e in eqns for a in e.invars) if v not in made]

    def sink(self, stack: Var) -> None:
        """Makes the slices of a derived stack in the body, rather than taking them."""
        for outer, inner in self._stacks:
            if outer is stack:
                self._first.append(_reshape(self._rows_of(stack), inner, self.eqn))
        self._stacks = [pair for pair in self._stacks if pair[0] is not stack]

    def run(self, eqn: Eqn) -> None:
        """Runs an equation in each turn, on what the loop made or takes."""
        combine = _over_turns.combines(eqn)
        if combine is None:
            self._place(eqn, self._last)
            return
        (out,) = eqn.outvars
        part, before, after = (_jaxpr.new_var(out) for _ in range(3))
        ins = [self._rows_of(atom) for atom in eqn.invars]
        self._last.append(eqn.replace(invars=ins, outvars=[part]))
        self._last.append(_jaxpr.equation(combine, [before, part], [after], eqn))
        self._carries.append(_CarryParts(self._full(eqn, out), before, after, out))

    def hand_out(self, stack: Var) -> None:
        """Makes a stack `[turns * k, ...]` of what each turn has of it."""
        rows, shape = self._rows_of(stack), stack.aval.shape[1:]
        if stack.aval.shape[0] == self.turns:
            row = _jaxpr.var_like(stack.aval, shape)
            self._last.append(_reshape(rows, row, self.eqn))
            self._made.append((row, stack))
        else:
            apart = _jaxpr.var_like(stack.aval, (self.turns, *rows.aval.shape))
            self._after.append(_reshape(apart, stack, self.eqn))
            self._made.append((rows, apart))

    def keep(self, read: set[Var]) -> None:
        """Drops what nobody reads of what it makes, and what then is for nothing."""
        self._made = [pair for pair in self._made if pair[1] in read]
        wanted = [*(c.after for c in self._carries), *(x for x, _ in self._made)]
        eqns = [*self._first, *self._body.eqns, *self._last]
        live = _rewrite.without_unread(eqns, wanted, lambda _: True)
        needed = set(variables([*wanted, *(a for e in live for a in e.invars)]))
        self._first, self._last = [], []
        self._body = _jaxpr.replaced(self._body, eqns=live)
        self._consts = [pair for pair in self._consts if pair[1] in needed]
        self._stacks = [pair for pair in self._stacks if pair[1] in needed]

    def equations(self) -> list[Eqn]:
        """The loop, and what stands around it."""
        eqns = [*self._first, *self._body.eqns, *self._last]
        invars = [inner for _, inner in self._consts]
        invars += [*(c.before for c in self._carries), *(inner for _, inner in self._stacks)]
        outvars = [*(c.after for c in self._carries), *(x for x, _ in self._made)]
        body = _jaxpr.replaced(self._body, invars=invars, outvars=outvars, eqns=eqns)
        ins = [outer for outer, _ in self._consts]
        ins += [*(c.init for c in self._carries), *(outer for outer, _ in self._stacks)]
        outs = [*(c.out for c in self._carries), *(out for _, out in self._made)]
        loop = _jaxpr.scan_like(self.eqn, body, ins, outs, len(self._consts), len(self._carries))
        return [*self._before, loop, *self._after]

    def _rows_of(self, atom: Atom) -> Atom:
        """`[turns * k, ...] -> [k, ...]`."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._rows:
            found = [x for x, out in self._made if out is atom]
            source = self._derived.get(atom)
            if found:
                self._rows[atom] = self._with_dim(found[0], atom, self._last)
            elif source is None:
                self._rows[atom] = self._taken(atom)
            elif isinstance(source, MadeInLoop):
                self._rows[atom] = self._made_again(atom, source)
            else:
                self._place(source, self._first)
        return self._rows[atom]

    def _taken(self, stack: Var) -> Atom:
        """Slices of a stack that is there when the loop begins."""
        rows = _over_turns.rows_of(stack.aval, self.turns)
        if rows[0] == 1:
            return self._with_dim(self._slice(stack), stack, self._first)
        apart = _jaxpr.var_like(stack.aval, (self.turns, *rows))
        self._before.append(_reshape(stack, apart, self.eqn))
        return self._slice(apart)

    def _slice(self, stack: Var) -> Var:
        for outer, inner in self._stacks:
            if outer is stack:
                return inner
        self._stacks.append((stack, _jaxpr.var_like(stack.aval, stack.aval.shape[1:])))
        return self._stacks[-1][1]

    def _with_dim(self, row: Atom, stack: Var, where: list[Eqn]) -> Var:
        rows = _jaxpr.var_like(stack.aval, (1, *stack.aval.shape[1:]))
        where.append(_reshape(row, rows, self.eqn))
        return rows

    def _row(self, atom: Atom) -> Atom:
        """`[turns, ...] -> [...]`, of what is there when the loop begins."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._derived:
            return self._slice(atom)
        row = _jaxpr.var_like(atom.aval, atom.aval.shape[1:])
        self._first.append(_reshape(self._rows_of(atom), row, self.eqn))
        return row

    def _made_again(self, stack: Var, source: MadeInLoop) -> Atom:
        env: dict[Var, Atom] = {inner: self._row(a) for inner, a in source.slices.items()}
        env |= {inner: self._whole(a) for inner, a in source.consts.items()}

        def read(atom: Atom) -> Atom:
            return atom if _jaxpr.is_literal(atom) else env[atom]

        for eqn in source.eqns:
            fresh = [_jaxpr.new_var(out) for out in eqn.outvars]
            self._first.append(eqn.replace(invars=[*map(read, eqn.invars)], outvars=fresh))
            env |= zip(eqn.outvars, fresh, strict=True)
        return self._with_dim(read(source.out), stack, self._first)

    def _whole(self, atom: Atom) -> Atom:
        """What each turn reads whole."""
        if _jaxpr.is_literal(atom):
            return atom
        for outer, inner in self._consts:
            if outer is atom:
                return inner
        self._consts.append((atom, _jaxpr.new_var(atom)))
        return self._consts[-1][1]

    def _place(self, eqn: Eqn, where: list[Eqn]) -> None:
        gives = _over_turns.stacked(eqn, self.turns)
        assert gives is not None, eqn
        pairs = zip(eqn.invars, gives, strict=True)
        ins = [self._rows_of(a) if given else self._whole(a) for a, given in pairs]
        shapes = [_over_turns.rows_of(out.aval, self.turns) for out in eqn.outvars]
        outs = [
            _jaxpr.var_like(out.aval, shape) for out, shape in zip(eqn.outvars, shapes, strict=True)
        ]
        params = _over_turns.of_turn(eqn, shapes[0][0])
        where.append(eqn.replace(invars=ins, outvars=outs, params=params))
        self._rows |= zip(eqn.outvars, outs, strict=True)

    def _full(self, eqn: Eqn, like: Var) -> Atom:
        value = _jaxpr.scalar(_over_turns.neutral(eqn), like.aval.dtype)
        if not like.aval.shape:
            return value
        out = _jaxpr.new_var(like)
        params = dict(shape=like.aval.shape, broadcast_dimensions=(), sharding=None)
        self._before.append(_jaxpr.equation(lax.broadcast_in_dim_p, [value], [out], eqn, **params))
        return out


def _reshape(atom: Atom, out: Var, source: Eqn) -> Eqn:
    params = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
    return _jaxpr.equation(lax.reshape_p, [atom], [out], source, **params)


def is_loop(eqn: Eqn) -> bool:
    """Whether it is a loop of several turns over stacks."""
    return eqn.primitive.name == "scan" and _jaxpr.scan_parts(eqn).length > 1


def stacks_of(eqn: Eqn) -> list[Atom]:
    """What a loop takes slices of."""
    scan = _jaxpr.scan_parts(eqn)
    return eqn.invars[scan.num_consts + scan.num_carry :]


def stacks_made(eqn: Eqn) -> Sequence[Var]:
    """What a loop makes of a slice of each turn."""
    return eqn.outvars[_jaxpr.scan_parts(eqn).num_carry :]
