# SPDX-License-Identifier: Apache-2.0
"""A loop opened: its body as equations among those around it, one turn of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import split
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


@dataclasses.dataclass(frozen=True, eq=False)
class OpenLoop:
    """A `scan` or a `while` whose body reads what is around the loop by the names that it has there.

    What follows from leaves alone, each turn makes for itself. A `scan` is a `while` that is known to end:
    it carries the turn's place, and the stacks that it makes, `[turns, ...]`; it reads whole those of which
    a turn takes a slice.

    Attributes:
      body: a turn; it takes the carry, and gives the next one.
      init: the first carry.
      results: the last carry, as it is known around the loop; None for what is the loop's own.
      first: equations before the loop, of what it begins with: stacks to write into, copies of leaves.
      length: how many turns; None if `goes_on` tells.
      goes_on: of a `while`, what it asks before each turn; it takes what it reads of the carry, and around.
      known: constants that are in the body, by their names there.
    """

    body: Jaxpr
    init: tuple[Atom, ...]
    results: tuple[Var | None, ...]
    first: tuple[Eqn, ...]
    length: int | None
    goes_on: Jaxpr | None
    known: Mapping[Var, Any]

    @property
    def carry(self) -> list[Var]:
        """As a turn finds it."""
        return self.body.invars

    @property
    def reads(self) -> list[Var]:
        """What it takes of the values around it: to begin with, and in each turn."""
        return list(dict.fromkeys([*variables(self.init), *self.reads_in_turns]))

    @property
    def reads_in_turns(self) -> list[Var]:
        """What it takes of the values around it, in each turn."""
        asked = [] if self.goes_on is None else self.goes_on.invars
        return [*_free(self.body), *(v for v in asked if v not in self.carry)]


def opened(eqn: Eqn, around: Jaxpr, derived: Mapping[Var, Eqn | None]) -> OpenLoop | None:
    """The loop opened; None if it is none, or if its condition reads leaves, or it makes stacks of keys.

    Args:
      eqn: in `around`.
      around: the jaxpr around it.
      derived: leaves, and what follows from them alone, by the equation that makes it; of a leaf, None.
    """
    return _LoopOpener(eqn, around, derived).run()


class _LoopOpener:
    def __init__(self, eqn: Eqn, around: Jaxpr, derived: Mapping[Var, Eqn | None]):
        self._eqn, self._around, self._derived = eqn, around, derived
        self._eqns: list[Eqn] = []
        self._again: dict[Var, Atom] = {}
        self._known: dict[Var, Any] = {}

    def run(self) -> OpenLoop | None:
        """The loop, if it can be opened."""
        name = self._eqn.primitive.name
        return self._scan() if name == "scan" else self._while() if name == "while" else None

    def _while(self) -> OpenLoop | None:
        loop = _jaxpr.while_parts(self._eqn)
        asked, closed, init = split(self._eqn.invars, loop.num_cond_consts, loop.num_body_consts)
        if any(var in self._derived for var in variables(asked)):
            return None
        carry = [_jaxpr.new_var(out) for out in self._eqn.outvars]
        body, outs = self._inlined(
            loop.body, loop.body_consts, [*map(self._inside, closed), *carry]
        )
        self._eqns += body
        cond, again = self._inlined(loop.cond, loop.cond_consts, [*asked, *carry])
        goes_on = self._jaxpr([], again, cond)
        goes_on = self._jaxpr(_free(goes_on), again, cond)
        return self._loop(carry, outs, init, self._eqn.outvars, (), None, goes_on)

    def _scan(self) -> OpenLoop | None:
        scan = _jaxpr.scan_parts(self._eqn)
        closed, init, stacks = split(self._eqn.invars, scan.num_consts, scan.num_carry)
        ends, made = split(self._eqn.outvars, scan.num_carry)
        if any(jax.dtypes.issubdtype(y.aval.dtype, jax.dtypes.extended) for y in made):
            return None
        at, following = (_jaxpr.var_like(_PLACE.aval) for _ in range(2))
        carry = [_jaxpr.new_var(out) for out in ends]
        olds = [_jaxpr.new_var(y) for y in made]
        slices = [self._slice(self._inside(x), at) for x in stacks]
        body, outs = self._inlined(
            scan.body, scan.body_consts, [*map(self._inside, closed), *carry, *slices]
        )
        self._eqns += body
        leaving, ys = split(outs, scan.num_carry)
        news = [self._stored(old, y, at) for old, y in zip(olds, ys, strict=True)]
        step = _place(-1 if scan.reverse else 1)
        self._eqns.append(_jaxpr.equation(lax.add_p, [at, step], [following], self._eqn))
        start = _place(scan.length - 1 if scan.reverse else 0)
        first, empty = [], []
        for y in made:
            empty.append(_jaxpr.new_var(y))
            zero = _jaxpr.scalar(0, y.aval.dtype)
            params = dict(shape=y.aval.shape, broadcast_dimensions=(), sharding=None)
            first.append(
                _jaxpr.equation(lax.broadcast_in_dim_p, [zero], [empty[-1]], self._eqn, **params)
            )
        return self._loop(
            [at, *carry, *olds], [following, *leaving, *news], [start, *init, *empty],
            [None, *ends, *made], first, scan.length, None,
        )  # fmt: skip

    def _loop(
        self, carry: list[Var], outs: Sequence[Atom], init: Sequence[Atom],
        results: Sequence[Var | None], first: Sequence[Eqn], length: int | None, goes_on: Jaxpr | None,
    ) -> OpenLoop:  # fmt: skip
        before = list(first)
        begins, ends = self._copied(init, before), self._copied(outs, self._eqns)
        body = self._jaxpr(carry, ends, self._eqns)
        return OpenLoop(
            body, tuple(begins), tuple(results), tuple(before), length, goes_on, self._known
        )

    def _copied(self, atoms: Sequence[Atom], eqns: list[Eqn]) -> list[Atom]:
        """The atoms, and of those that are leaves a copy that `eqns` make: what a loop carries is none."""
        found: list[Atom] = []
        for atom in atoms:
            leaf = not _jaxpr.is_literal(atom) and self._derived.get(atom, self._eqn) is None
            copy = _jaxpr.new_var(atom)
            if leaf:
                eqns.append(self._reshape(atom, copy))
            found.append(copy if leaf else atom)
        return found

    def _jaxpr(self, ins: list[Var], outs: Sequence[Atom], eqns: Sequence[Eqn]) -> Jaxpr:
        return _jaxpr.replaced(
            self._around, constvars=[], invars=ins, outvars=list(outs), eqns=list(eqns)
        )

    def _inside(self, atom: Atom) -> Atom:
        """What a turn reads for something around the loop: made anew, if it follows from leaves alone."""
        eqn = None if _jaxpr.is_literal(atom) else self._derived.get(atom)
        if _jaxpr.is_literal(atom) or eqn is None:
            return atom
        if atom not in self._again:
            ins, outs = [*map(self._inside, eqn.invars)], [*map(_jaxpr.new_var, eqn.outvars)]
            self._eqns.append(eqn.replace(invars=ins, outvars=outs))
            self._again |= zip(eqn.outvars, outs, strict=True)
        return self._again[atom]

    def _inlined(
        self, jaxpr: Jaxpr, consts: Sequence[Any], ins: Sequence[Atom]
    ) -> tuple[list[Eqn], list[Atom]]:
        """The equations of a jaxpr with these inputs, and its outputs; no other call has its names."""
        flat, values = _rewrite.flatten_calls(jaxpr, consts)
        fresh = [_jaxpr.new_var(var) for var in flat.constvars]
        self._known |= zip(fresh, values, strict=True)
        env: dict[Var, Atom] = dict(zip(flat.constvars, fresh, strict=True))
        env |= zip(flat.invars, ins, strict=True)

        def read(atoms: Sequence[Atom]) -> list[Atom]:
            return [a if _jaxpr.is_literal(a) else env.get(a, a) for a in atoms]

        return [e.replace(invars=read(e.invars)) for e in flat.eqns], read(flat.outvars)

    def _slice(self, stack: Atom, at: Var) -> Var:
        """`[turns, n, d] -> [n, d]`."""
        shape = stack.aval.shape
        row = _jaxpr.var_like(stack.aval, (1, *shape[1:]))
        out = _jaxpr.var_like(stack.aval, shape[1:])
        starts = [at, *[_place(0)] * (len(shape) - 1)]
        self._eqns.append(_jaxpr.equation(
            lax.dynamic_slice_p, [stack, *starts], [row], self._eqn, slice_sizes=row.aval.shape
        ))  # fmt: skip
        self._eqns.append(self._reshape(row, out))
        return out

    def _stored(self, stack: Var, y: Atom, at: Var) -> Var:
        """The stack with a turn's `[n, d]` in its place."""
        row = _jaxpr.var_like(stack.aval, (1, *stack.aval.shape[1:]))
        new, starts = _jaxpr.new_var(stack), [at, *[_place(0)] * (len(stack.aval.shape) - 1)]
        self._eqns.append(self._reshape(y, row))
        self._eqns.append(
            _jaxpr.equation(lax.dynamic_update_slice_p, [stack, row, *starts], [new], self._eqn)
        )
        return new

    def _reshape(self, atom: Atom, out: Var) -> Eqn:
        params = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
        return _jaxpr.equation(lax.reshape_p, [atom], [out], self._eqn, **params)


def _place(i: int) -> Atom:
    return _jaxpr.scalar(i, np.int32)


_PLACE = _place(0)


def _free(jaxpr: Jaxpr) -> list[Var]:
    """What a jaxpr reads that it neither takes nor makes."""
    made = {*jaxpr.invars, *(out for eqn in jaxpr.eqns for out in eqn.outvars)}
    read = [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]
    return [v for v in variables(read) if v not in made]
