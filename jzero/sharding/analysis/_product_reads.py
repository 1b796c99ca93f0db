# SPDX-License-Identifier: Apache-2.0
"""Which parameters products read: those that may be gathered in few bits."""

from __future__ import annotations

from collections.abc import Mapping

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._rules import Cost
from jzero.sharding.analysis._frames import Frame, split
from jzero.sharding.analysis._links import Links
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var


def read_by_products(root: Frame, links: Links) -> frozenset[str]:
    """Paths of leaves with which something of the batch is multiplied; casts and slices of them count."""
    return frozenset(
        links.leaf_of(frame, var)
        for frame, eqn in root.walk()
        if _rules.costs(eqn, Cost.PRODUCT) and any(frame.varies(out) for out in eqn.outvars)
        for var in variables(eqn.invars)
        if not frame.varies(var)
    )


# Each element of a result is one of the first operand, cast perhaps.
_VIEWS = (Cost.IDENTITY, Cost.COPY, Cost.VIEW, Cost.PART, Cost.CAST)


def read_through_views(root: Frame, names: Mapping[Var, str]) -> frozenset[str]:
    """Which of some variables of a frame products read: as they are, cast, rearranged, or slices of them.

    Args:
      root: the frame.
      names: what each variable is called.

    Returns:
      Names.
    """
    found = set[str]()
    _follow(root, dict(names), found)
    return frozenset(found)


def _follow(frame: Frame, known: dict[Var, str], found: set[str]) -> list[str]:
    """Adds to `found`; returns the names of the frame's outputs, '' for what is no view of a variable."""
    for index, eqn in enumerate(frame.jaxpr.eqns):
        names = [_name(known, atom) for atom in eqn.invars]
        if not any(names):
            continue
        children = frame.children.get(index, [])
        if _rules.costs(eqn, Cost.PRODUCT):
            found.update(filter(None, names))
        elif _rules.costs(eqn, *_VIEWS):
            known |= dict.fromkeys(eqn.outvars, names[0])
        for child, ins in zip(children, _operands(eqn, names), strict=False):
            named = {var: name for var, name in zip(child.jaxpr.invars, ins, strict=True) if name}
            outs = _follow(child, named, found)
            if eqn.primitive.name not in ("scan", "while", "cond"):
                known |= {out: name for out, name in zip(eqn.outvars, outs, strict=True) if name}
    return [_name(known, atom) for atom in frame.jaxpr.outvars]


def _operands(eqn: Eqn, names: list[str]) -> list[list[str]]:
    """What each jaxpr inside an equation takes; loops carry nothing that has a name."""
    if eqn.primitive.name == "cond":
        return [names[1:]] * len(eqn.params["branches"])
    if eqn.primitive.name == "scan":
        scan = _jaxpr.scan_parts(eqn)
        consts, carry, xs = split(names, scan.num_consts, scan.num_carry)
        return [[*consts, *[""] * len(carry), *xs]]
    if eqn.primitive.name == "while":
        loop = _jaxpr.while_parts(eqn)
        cond, body, carry = split(names, loop.num_cond_consts, loop.num_body_consts)
        return [[*consts, *[""] * len(carry)] for consts in (cond, body)]
    return [names]


def _name(known: Mapping[Var, str], atom: Atom) -> str:
    return "" if _jaxpr.is_literal(atom) else known.get(atom, "")
