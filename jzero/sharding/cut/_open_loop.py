# SPDX-License-Identifier: Apache-2.0
"""A loop opened: its body as equations among those around it, one iteration of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.ir._loops import Scan, makes_keys
from jzero.ir._loops import opened as opened_scan
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis._frames import split
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


@dataclasses.dataclass(frozen=True, eq=False)
class OpenLoop:
    """A `scan` or a `while` whose body reads what is around the loop by the names that it has there.

    What is derived only from leaves, each iteration makes for itself. A `scan` is a `while` that is known to
    end: it carries the iteration's place, and the stacks that it makes, `[iterations, ...]`; it reads whole
    those of which an iteration takes a slice.

    Attributes:
      body: an iteration; it takes the carry, and gives the next one.
      init: the first carry.
      results: the last carry, as it is known around the loop; None for what is the loop's own.
      first: equations before the loop, of what it begins with: stacks to write into, copies of leaves.
      length: how many iterations; None if `goes_on` tells.
      goes_on: of a `while`, what it asks before each iteration; it takes what it reads of the carry, and
        around.
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
        """As an iteration finds it."""
        return self.body.invars

    @property
    def reads(self) -> list[Var]:
        """What it takes of the values around it: to begin with, and in each iteration."""
        return list(dict.fromkeys([*variables(self.init), *self.reads_each_iteration]))

    @property
    def reads_each_iteration(self) -> list[Var]:
        """What it takes of the values around it, in each iteration."""
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
        self._body = JaxprWriter(eqn)  # `names` has what of leaves it makes anew.

    def run(self) -> OpenLoop | None:
        name = self._eqn.primitive.name
        return self._scan() if name == "scan" else self._while() if name == "while" else None

    def _while(self) -> OpenLoop | None:
        loop = _jaxpr.while_parts(self._eqn)
        asked, closed, init = split(self._eqn.invars, loop.num_cond_consts, loop.num_body_consts)
        if any(var in self._derived for var in variables(asked)):
            return None
        carry = [_jaxpr.new_var(out) for out in self._eqn.outvars]
        ins = [*map(self._inside, closed), *carry]
        outs = self._body.write(loop.body, loop.body_consts, ins)
        asks = JaxprWriter(self._eqn)
        again = asks.write(loop.cond, loop.cond_consts, [*asked, *carry])
        goes_on = self._jaxpr(asks, [], again)
        goes_on = self._jaxpr(asks, _free(goes_on), again)
        known = dict(zip(asks.constvars, asks.consts, strict=True))
        results = self._eqn.outvars
        return self._loop(carry, outs, init, results, JaxprWriter(self._eqn), None, goes_on, known)

    def _scan(self) -> OpenLoop | None:
        scan = Scan.of(self._eqn)
        if makes_keys(scan):
            return None
        loop = opened_scan(scan)
        carry = [_jaxpr.new_var(port.before) for port in loop.carries]
        ins = [*(self._inside(port.outer) for port in loop.consts), *carry]
        outs = self._body.write(loop.body, _jaxpr.scan_parts(self._eqn).body_consts, ins)
        first = JaxprWriter(self._eqn)
        first.eqns += loop.before
        results = [None, *(port.out for port in loop.carries[1:])]
        init = [port.init for port in loop.carries]
        return self._loop(carry, outs, init, results, first, scan.length, None, {})

    def _loop(
        self, carry: list[Var], outs: Sequence[Atom], init: Sequence[Atom],
        results: Sequence[Var | None], first: JaxprWriter, length: int | None, goes_on: Jaxpr | None,
        known: Mapping[Var, Any],
    ) -> OpenLoop:  # fmt: skip
        begins, ends = self._copied(init, first), self._copied(outs, self._body)
        body = self._jaxpr(self._body, carry, ends)
        known = {**known, **dict(zip(self._body.constvars, self._body.consts, strict=True))}
        return OpenLoop(
            body, tuple(begins), tuple(results), tuple(first.eqns), length, goes_on, known
        )

    def _copied(self, atoms: Sequence[Atom], writer: JaxprWriter) -> list[Atom]:
        """The atoms, and of those that are leaves a copy: what a loop carries is none."""

        def is_leaf(atom: Atom) -> bool:
            return not _jaxpr.is_literal(atom) and self._derived.get(atom, self._eqn) is None

        return [
            writer.reshape(x, x.aval.shape, _jaxpr.new_var(x)) if is_leaf(x) else x for x in atoms
        ]

    def _jaxpr(self, writer: JaxprWriter, ins: list[Var], outs: Sequence[Atom]) -> Jaxpr:
        eqns = [*writer.eqns]
        return _jaxpr.replaced(self._around, constvars=[], invars=ins, outvars=[*outs], eqns=eqns)

    def _inside(self, atom: Atom) -> Atom:
        """An iteration's name of a value around the loop, recomputed if it is derived only from leaves."""
        eqn = None if _jaxpr.is_literal(atom) else self._derived.get(atom)
        if eqn is not None and atom not in self._body.names:
            for each in eqn.invars:
                self._inside(each)
            self._body.copy([eqn])
        return self._body.read(atom)


def _free(jaxpr: Jaxpr) -> list[Var]:
    """What a jaxpr reads that it neither takes nor makes."""
    made = {*jaxpr.invars, *(out for eqn in jaxpr.eqns for out in eqn.outvars)}
    read = [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]
    return [v for v in variables(read) if v not in made]
