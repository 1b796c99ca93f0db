# SPDX-License-Identifier: Apache-2.0
"""Opens loops: one iteration as equations that read the values around the loop by their names there."""

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
    """A `scan` or `while` whose body reads values around the loop by their names there.

    Each iteration recomputes values derived only from leaves. A `scan` is opened (`_loops.opened`): it has no
    stacks, but carries the row's index and the stacks that it makes.
    """

    body: Jaxpr  # From the carry to the next one.
    init: tuple[Atom, ...]
    results: tuple[
        Var | None, ...
    ]  # Final carries by their names around the loop; None for a row's index.
    first: tuple[
        Eqn, ...
    ]  # Equations before the loop, of initial carries: empty stacks, copies of leaves.
    length: int | None  # None for a `while`.
    goes_on: Jaxpr | None  # The condition of a `while`; it reads the carry, and values around.
    known: Mapping[Var, Any]  # Constants of the body.

    @property
    def carry(self) -> list[Var]:
        return self.body.invars

    @property
    def reads(self) -> list[Var]:
        """The values around the loop that it reads, as initial carries or in iterations."""
        return list(dict.fromkeys([*variables(self.init), *self.reads_each_iteration]))

    @property
    def reads_each_iteration(self) -> list[Var]:
        asked = [] if self.goes_on is None else self.goes_on.invars
        return [*_free(self.body), *(v for v in asked if v not in self.carry)]


def opened(eqn: Eqn, around: Jaxpr, derived: Mapping[Var, Eqn | None]) -> OpenLoop | None:
    """The opened loop; None if it is no loop, its condition reads leaves, or it makes stacks of keys.

    `around` is the jaxpr around it. `derived` has the equations of values derived only from leaves, and None
    for leaves.
    """
    return _LoopOpener(eqn, around, derived).run()


class _LoopOpener:
    def __init__(self, eqn: Eqn, around: Jaxpr, derived: Mapping[Var, Eqn | None]):
        self._eqn, self._around, self._derived = eqn, around, derived
        self._body = JaxprWriter(eqn)  # Its `names` are values that it recomputes from leaves.

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
        """The atoms, with copies of leaves, because a carry must not be a leaf."""

        def is_leaf(atom: Atom) -> bool:
            return not _jaxpr.is_literal(atom) and self._derived.get(atom, self._eqn) is None

        return [
            writer.reshape(x, x.aval.shape, _jaxpr.new_var(x)) if is_leaf(x) else x for x in atoms
        ]

    def _jaxpr(self, writer: JaxprWriter, ins: list[Var], outs: Sequence[Atom]) -> Jaxpr:
        eqns = [*writer.eqns]
        return _jaxpr.replaced(self._around, constvars=[], invars=ins, outvars=[*outs], eqns=eqns)

    def _inside(self, atom: Atom) -> Atom:
        """A value around the loop, recomputed in the iteration if it is derived only from leaves."""
        eqn = None if _jaxpr.is_literal(atom) else self._derived.get(atom)
        if eqn is not None and atom not in self._body.names:
            for each in eqn.invars:
                self._inside(each)
            self._body.copy([eqn])
        return self._body.read(atom)


def _free(jaxpr: Jaxpr) -> list[Var]:
    """The free variables of a jaxpr."""
    made = {*jaxpr.invars, *(out for eqn in jaxpr.eqns for out in eqn.outvars)}
    read = [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]
    return [v for v in variables(read) if v not in made]
