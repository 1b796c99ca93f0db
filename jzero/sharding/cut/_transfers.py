# SPDX-License-Identifier: Apache-2.0
"""Chooses the values that the forward-backward program transfers to the optimizer program: the fewest bytes.

A value that the optimizer program reads may be transferred, or recomputed from other values: a clipped
float32 gradient from the bfloat16 gradient and the norm. A transferred value counts once, however many
equations read it, so the best choice is a minimum cut of a graph whose vertices are values (`_min_cut.py`).
Of equal cuts it is the one nearest to the reductions: gradients are transferred unscaled, before anything
that depends on all of them (a norm) is known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._min_cut import min_cut
from jzero.tracing._types import Atom, Eqn, Var


def is_scalar(var: Atom) -> bool:
    return var.aval.size <= 1


def copies(
    frame: Frame, reads: Iterable[Var], made: Collection[Var], free: Collection[Var] = ()
) -> dict[Var, int]:
    """Values that the optimizer program recomputes, each with the index of its equation.

    Leaves on the devices count as transferred, unless the optimizer program reads them anyway. Scalars and
    constants do not count.

    Args:
      frame: the root frame.
      reads: values that the optimizer program reads.
      made: offloaded leaves, and values that depend on them.
      free: values that exist where the update runs: parameters on the host.
    """
    known = {*frame.jaxpr.constvars, *made}
    makers = frame.makers

    def large(atoms: Iterable[Atom]) -> list[Var]:
        return [a for a in variables(atoms) if a not in known and not is_scalar(a)]

    wanted = large(reads)
    made_of: dict[Var, list[Var] | None] = {}  # None: it must be transferred.
    todo = list(wanted)
    while todo:
        if (var := todo.pop()) not in made_of:
            eqn = frame.jaxpr.eqns[makers[var]] if var in makers else None
            made_of[var] = large(eqn.invars) if eqn and _can_copy(frame, eqn) else None
            todo += made_of[var] or []
    paid = {*free, *wanted} & set(frame.jaxpr.invars)
    sizes = {var: 0 if var in paid else _rules.size_in_bytes(var.aval) for var in made_of}
    edges = [(atom, var) for var, atoms in made_of.items() for atom in atoms or []]
    starts = [var for var, atoms in made_of.items() if atoms is None]
    transfers = min_cut(sizes, edges, starts, wanted)
    found: dict[Var, int] = {}
    todo = wanted
    while todo:
        if (var := todo.pop()) not in transfers and var not in found:
            found[var] = makers[var]
            todo += made_of[var] or []
    return found


def _can_copy(frame: Frame, eqn: Eqn) -> bool:
    """Whether an equation is elementwise or repeats elements, and its operands are not device-varying."""
    if len(eqn.outvars) != 1 or any(frame.reads(eqn)) or frame.varies(eqn.outvars[0]):
        return False
    atoms, shape = eqn.invars, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        return math.prod(atoms[0].aval.shape) < math.prod(shape)
    alike = all(is_scalar(atom) or atom.aval.shape == shape for atom in atoms)
    return alike and not is_scalar(eqn.outvars[0]) and _rules.is_elementwise(eqn)
