# SPDX-License-Identifier: Apache-2.0
"""Values derived only from parameters, and which of them are gathered."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jzero.ir import _by_parts, _rules
from jzero.ir._regions import Edge, EdgeKind, Region, edges, region_of, variables
from jzero.sharding.cut._transfers import is_scalar
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class ParamDerived:
    """Finds values derived only from leaves and scalars, equation by equation.

    Scalars of the batch do not count: with a batch of one row, the whole model would be derived.
    """

    def __init__(self, leaves: Iterable[Var], batch: Iterable[Var]):
        self.found, self.batch = set(leaves), set(batch)

    def takes(self, eqn: Eqn) -> bool:
        """Whether an equation's results are derived; records them."""
        read = variables(eqn.invars)
        if not self.batch.isdisjoint(read):
            self.batch.update(eqn.outvars)
            return False
        large = [v for v in read if not is_scalar(v)]
        inner = _by_parts.inside(eqn)
        opens = _jaxpr.has_side_effects(inner) or _jaxpr.inner_jaxprs(inner)
        if opens or not large or not self.found.issuperset(large):
            return False
        self.found.update(eqn.outvars)
        return True


def without_barriers(jaxpr: Jaxpr, leaves: Collection[Var], batch: Collection[Var]) -> Jaxpr:
    """The jaxpr without derived values in barriers, which parts that run one after another do not need."""
    follows, same, eqns = ParamDerived(leaves, batch), dict[Var, Atom](), []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(
            invars=[a if _jaxpr.is_literal(a) else same.get(a, a) for a in eqn.invars]
        )
        if eqn.primitive.name == "optimization_barrier":
            pairs = [*zip(eqn.outvars, eqn.invars, strict=True)]
            same |= (x for x in pairs if not _jaxpr.is_literal(x[1]) and x[1] in follows.found)
            kept = [pair for pair in pairs if pair[0] not in same]
            if not kept:
                continue
            eqn = eqn.replace(outvars=[out for out, _ in kept], invars=[a for _, a in kept])
        follows.takes(eqn)
        eqns.append(eqn)
    outvars = [a if _jaxpr.is_literal(a) else same.get(a, a) for a in jaxpr.outvars]
    return _jaxpr.replaced(jaxpr, eqns=eqns, outvars=outvars)


def param_derived(
    eqns: Iterable[Eqn], leaves: Collection[Var], batch: Collection[Var]
) -> dict[Var, Eqn]:
    """The values derived only from leaves, with their equations."""
    follows = ParamDerived(leaves, batch)
    return {out: eqn for eqn in eqns if follows.takes(eqn) for out in eqn.outvars}


def repeats(eqn: Eqn, cheap: Collection[Var]) -> bool:
    """Whether an equation repeats few elements, given such values in `cheap`."""
    large = [atom for atom in variables(eqn.invars) if not is_scalar(atom)]
    fits = eqn.primitive.name == "iota" or _rules.is_elementwise(eqn)
    return fits and all(atom in cheap for atom in large)


def gathered_bytes(eqns: Iterable[Eqn], leaves: Collection[Var]) -> int:
    """Bytes that equations gather of values derived only from leaves; a loop counts as one iteration."""
    return _gathered(region_of(eqns), leaves)


def _gathered(region: Region, leaves: Iterable[Var]) -> int:
    follows, total = ParamDerived(leaves, ()), 0

    def is_param_derived(edge: Edge) -> bool:
        atom = edge.source[1]
        return edge.kind is EdgeKind.IN and not _jaxpr.is_literal(atom) and atom in follows.found

    for eqn in region.jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            follows.found.update(
                v for v, a in pairs if not _jaxpr.is_literal(a) and a in follows.found
            )
        elif follows.takes(eqn):
            moves = _by_parts.inside(eqn)  # Over Auto axes a device has only its own part.
            if moves.primitive.name == "all_gather":
                total += _rules.size_in_bytes(moves.outvars[0].aval)
            if moves is not eqn:
                continue
        given = [edge.target for edge in edges(region, eqn) if is_param_derived(edge)]
        for inner in region.inner(eqn):
            total += _gathered(inner, [_jaxpr.variable(v) for at, v in given if at is inner])
    return total
