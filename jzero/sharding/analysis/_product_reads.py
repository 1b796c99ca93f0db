# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters that matrix products read, which may be gathered quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn, edges, holder, variables
from jzero.ir._rules import Cost
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var


def read_by_products(root: Frame, links: Links) -> frozenset[str]:
    """Paths of leaves that are multiplied with values of the batch, also after casts and slices."""
    return frozenset(
        links.leaf_of(frame, var)
        for frame, eqn in root.walk()
        if _rules.costs(eqn, Cost.PRODUCT) and any(frame.varies(out) for out in eqn.outvars)
        for var in variables(eqn.invars)
        if not frame.varies(var)
    )


# Each element of a result is an element of the first operand, possibly cast.
_VIEWS = (Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.PART, Cost.CAST)


def read_through_views(root: Frame, names: Mapping[Var, str]) -> frozenset[str]:
    """The names of the inputs that products read through views, slices and casts."""
    found = set[str]()

    def of_results(_: Region, eqn: Eqn, ins: Sequence[str]) -> list[str]:
        if _rules.costs(eqn, Cost.PRODUCT):
            found.update(filter(None, ins))
        return [ins[0] if _rules.costs(eqn, *_VIEWS) else ""] * len(eqn.outvars)

    start: dict[ValueIn, str] = {(root, var): name for var, name in names.items()}
    forward(root, start, of_results, lambda a, b: a or b, "", _across)
    return frozenset(found)


def _across(eqn: Eqn, edge: Edge, name: str) -> str:
    """Views are followed into programs, except carries of loops, and out of calls."""
    around = holder(edge.target[0], eqn)
    if around is edge.target[0]:
        return name if _jaxpr.call_parts(eqn) is not None else ""
    back = (each.target for each in edges(around, eqn) if each.kind is EdgeKind.BACK)
    return "" if edge.kind is EdgeKind.PREDICATE or edge.target in back else name
