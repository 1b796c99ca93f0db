# SPDX-License-Identifier: Apache-2.0
"""What a loop's body does with a carry: passes it on, or only adds to it."""

from __future__ import annotations

from jzero.ir import _rules
from jzero.ir._regions import Region, trip_count
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var


def source_of(region: Region, atom: Atom) -> Atom:
    """The source of a value, through identities and calls that only pass it on."""
    while not _jaxpr.is_literal(atom) and (i := region.makers.get(atom)) is not None:
        eqn = region.jaxpr.eqns[i]
        k, inner = eqn.outvars.index(atom), region.inner(eqn)
        if eqn.primitive.name in _rules.IDENTITIES:
            atom = eqn.invars[k]
        elif len(inner) == 1 and trip_count(eqn) == 1:
            (body,) = inner
            own = source_of(body, body.jaxpr.outvars[k])
            if own not in body.jaxpr.invars:
                break
            atom = eqn.invars[body.jaxpr.invars.index(own)]
        else:
            break
    return atom


def sum_of(region: Region, var: Var) -> Var | None:
    """The result that a value becomes by adding terms, also in calls; None if anything else reads it."""
    eqns = region.jaxpr.eqns
    while len(readers := region.readers.get(var, [])) == 1 and readers[0] < len(eqns):
        eqn, inner = eqns[readers[0]], region.inner(eqns[readers[0]])
        name, k = eqn.primitive.name, eqn.invars.index(var)
        if sum(atom is var for atom in eqn.invars) > 1:  # Doubled.
            return None
        if len(inner) == 1 and trip_count(eqn) == 1:
            outs = inner[0].jaxpr.outvars
            found = sum_of(inner[0], inner[0].jaxpr.invars[k])
            if found is None or sum(atom is found for atom in outs) != 1:
                return None
            var = eqn.outvars[outs.index(found)]
        elif _adds_to(eqn, name, k):
            var = eqn.outvars[k if name == "optimization_barrier" else 0]
        else:
            return None
    return var if region.readers.get(var) == [len(eqns)] else None


def _adds_to(eqn: Eqn, name: str, k: int) -> bool:
    """Whether an equation adds a term to its operand k, subtracts one, or leaves it as it is."""
    adds = name in _rules.ADDS or name == "sub" and k == 0
    same = eqn.invars[k].aval.dtype == eqn.outvars[0].aval.dtype
    alike = eqn.invars[k].aval.shape == eqn.outvars[0].aval.shape
    return adds and same and alike or _rules.keeps_dtype(eqn) or name == "optimization_barrier"


def added_to(region: Region, var: Var) -> Var | None:
    """The result to which a value, or a view of it, is only added; None if there is none."""
    eqns = region.jaxpr.eqns
    while len(readers := region.readers.get(var, [])) == 1 and readers[0] < len(eqns):
        eqn = eqns[readers[0]]
        if len(eqn.outvars) > 1 or not (
            _rules.costs(eqn, Cost.VIEW) or eqn.primitive.name in _rules.ADDS
        ):
            return None
        (var,) = eqn.outvars
        if region.readers.get(var) == [len(eqns)]:
            return var if eqn.primitive.name in _rules.ADDS else None
    return None
