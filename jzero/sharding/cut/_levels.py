# SPDX-License-Identifier: Apache-2.0
"""Levels: how many loops over the microbatches must have run before a value can be computed."""

from __future__ import annotations

from collections.abc import Collection

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._kinds import (
    COLLECTED,
    CutError,
    Kind,
    equations,
    kinds_of,
    literal_kind,
    reduces,
)
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var


class Levels:
    """One forward walk over the root frame that gives every variable and equation a kind and a level.

    Attributes:
      frame: the root frame.
      of: the level of a variable.
      of_eqns: those of the equations, by index.
      kinds: what a variable is to the microbatches.
      maker: the equation that makes a variable, by index; arguments have none.
      lasts: variables that every microbatch computes alike.
      loop: equations that run for each microbatch, by index.
    """

    def __init__(self, frame: Frame, apart: Collection[int], boundary: Collection[Var]):
        self.frame = frame
        self.of: dict[Var, int] = {}
        self.of_eqns: list[int] = []
        self.kinds: dict[Var, Kind] = {}
        self.maker: dict[Var, int] = {}
        self.lasts: set[Var] = set()
        self.loop: set[int] = set()
        self._unfinished: set[int] = set()  # equations that run on partial sums
        self._boundary = boundary
        for var in [*frame.jaxpr.constvars, *frame.jaxpr.invars]:
            self.kinds[var] = Kind.LOCAL if frame.varies(var) else Kind.SAME
            self.of[var] = 0
        for index, eqn in enumerate(frame.jaxpr.eqns):
            self._place(index, eqn, index in apart)

    def _place(self, index: int, eqn: Eqn, is_apart: bool) -> None:
        frame, atoms = self.frame, variables(eqn.invars)
        outs = None if is_apart else self._kinds_while_summing(eqn, atoms)
        if outs is not None:
            self._unfinished.add(id(eqn))
        level = max((self.of[a] + self._is_due(eqn, a) for a in atoms), default=0)
        kinds = [
            self._kind(a) if _jaxpr.is_literal(a) or not self._is_due(eqn, a) else Kind.SAME
            for a in eqn.invars
        ]
        in_loop = not is_apart and (
            outs is not None
            or Kind.LOCAL in kinds
            or any(frame.varies(out) for out in eqn.outvars)
            or any(a in self.lasts and self.of[a] == level for a in atoms)
            or any(reduces(f, e) for f, e in equations(frame, eqn))
        )
        outs = kinds_of(frame, eqn, kinds) if outs is None else outs
        for out, kind in zip(eqn.outvars, outs, strict=True):
            self.kinds[out], self.of[out], self.maker[out] = kind, level, index
            if in_loop and kind in (Kind.SAME, Kind.ZERO):
                self.lasts.add(out)
        if in_loop:
            self.loop.add(index)
        self.of_eqns.append(level)

    def _kinds_while_summing(self, eqn: Eqn, atoms: list[Var]) -> list[Kind] | None:
        """Kinds of the results if the equation may run on partial sums, inside their loop.

        What AD adds up (tied weights) then is one sum, and a loop may go on adding to it.
        """
        kinds = [self._kind(a) for a in eqn.invars]
        adds = eqn.primitive.name in _rules.ADDS or _rules.sum_waits(eqn)
        if Kind.PARTIAL not in kinds or not (adds or Kind.LOCAL in kinds):
            return None
        partial = [a for a in atoms if self.kinds[a] is Kind.PARTIAL]
        if any(a in self._boundary for a in partial):
            return None
        if {self.of[a] for a in partial} != {max(self.of[a] for a in atoms)}:
            return None
        try:
            return kinds_of(self.frame, eqn, kinds)
        except CutError:
            return None

    def _kind(self, atom: Atom) -> Kind:
        return literal_kind(atom) if _jaxpr.is_literal(atom) else self.kinds[atom]

    def _is_due(self, eqn: Eqn, var: Var) -> bool:
        """Whether `eqn` reads what is complete only when the loop that makes it is done."""
        return (
            self.is_finished(eqn, var)
            or self.is_collected(eqn, var)
            or (eqn.primitive.name in COLLECTED and var in self.lasts)
        )

    def is_collected(self, eqn: Eqn, var: Var) -> bool:
        """Whether `eqn` reads of `var` what every microbatch has."""
        return eqn.primitive.name in COLLECTED and self.is_local(var)

    def is_finished(self, eqn: Eqn | None, var: Var) -> bool:
        """Whether `eqn` (None: who reads outputs) reads what a loop summed up."""
        due = self.kinds[var] is Kind.PARTIAL
        return due and (eqn is None or id(eqn) not in self._unfinished)

    def is_local(self, var: Var) -> bool:
        """Whether a variable differs between microbatches."""
        return self.kinds[var] is Kind.LOCAL

    def is_made_in_loop(self, var: Var) -> bool:
        """Whether an equation that runs for each microbatch makes a variable."""
        return self.maker.get(var) in self.loop
