# SPDX-License-Identifier: Apache-2.0
"""`GatherChain`: a gather of what a program takes, with the views and casts that make its operand."""

from __future__ import annotations

from typing import NamedTuple

from jzero.ir import _rules
from jzero.sharding.passes import _waits
from jzero.sharding.passes._origins import VIEWS
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var


class GatherChain(NamedTuple):
    """A gather, without the barriers before it.

    Attributes:
      root: the argument of the program that it gathers.
      eqns: what is done to the argument: views, casts and gathers, of which the last one is this.
    """

    root: Var
    eqns: tuple[Eqn, ...]

    @property
    def out(self) -> Var:
        return self.eqns[-1].outvars[0]


def chains(jaxpr: Jaxpr) -> list[GatherChain]:
    """The gathers of a program's own arguments, in order; without those of inner jaxprs."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    found = [_chain(eqn, makers) for eqn in jaxpr.eqns if _waits.is_gather(eqn)]
    arguments = {*jaxpr.invars}
    return [chain for chain in found if chain is not None and chain.root in arguments]


def _chain(eqn: Eqn, makers: _waits.Makers) -> GatherChain | None:
    eqns, atom = [eqn], eqn.invars[0]
    while not _jaxpr.is_literal(atom) and (made := makers.get(atom)) is not None:
        if made.primitive.name == "optimization_barrier":
            atom = made.invars[_waits.place_of(made, atom)]
        elif may_stand_in(made):
            eqns.append(made)
            atom = made.invars[0]
        else:
            return None
    return None if _jaxpr.is_literal(atom) else GatherChain(atom, tuple(eqns[::-1]))


def may_stand_in(eqn: Eqn) -> bool:
    """Whether it only views, casts or gathers one value."""
    known = all(map(_jaxpr.is_literal, eqn.invars[1:])) and len(eqn.outvars) == 1
    return known and (_waits.is_gather(eqn) or _rules.costs(eqn, *VIEWS))
