# SPDX-License-Identifier: Apache-2.0
"""Which sums over the devices are gradients of leaves themselves, and not of what is computed from leaves."""

from __future__ import annotations

from collections.abc import Sequence

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._rules import Cost
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

# What a gradient passes through on its way to its leaf, and is still all of it.
_PLAIN = _rules.named(Cost.COPY, Cost.VIEW, Cost.CAST) | _frames.REDUCTIONS | {
    "add_any", "pad", "concatenate",
}  # fmt: skip


def note_own_gradients(frame: Frame, outs: Sequence[bool] | None = None) -> list[bool]:
    """Fills `own_gradients` of the frame and those below: sums of which nothing else is computed in a pass.

    Args:
      frame: of the step.
      outs: which results go on to be part of something else; none of the step's.

    Returns:
      Which of its inputs do so inside.
    """
    known = [False] * len(frame.jaxpr.outvars) if outs is None else outs
    ends = zip(frame.jaxpr.outvars, known, strict=True)
    mixed = {atom for atom, is_mixed in ends if is_mixed and not _jaxpr.is_literal(atom)}
    for index, eqn in reversed(list(enumerate(frame.jaxpr.eqns))):
        asked = [out in mixed for out in eqn.outvars]
        if children := frame.children.get(index, []):
            found = _of_children(eqn, children, asked)
            mixed.update(v for v, is_mixed in zip(eqn.invars, found, strict=True)
                         if is_mixed and not _jaxpr.is_literal(v))  # fmt: skip
        elif eqn.primitive.name in _frames.REDUCTIONS:
            frame.own_gradients |= {out for out in eqn.outvars if out not in mixed}
        elif any(asked) or (frame.pass_of(eqn) and not _is_plain(eqn)):
            mixed.update(variables(eqn.invars))
    return [var in mixed for var in frame.jaxpr.invars]


def _is_plain(eqn: Eqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":  # What `w[i]` has squeezed.
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return eqn.primitive.name in _PLAIN


def _of_children(eqn: Eqn, children: Sequence[Frame], asked: Sequence[bool]) -> list[bool]:
    """Which operands of an equation become a part of something else in the jaxprs inside of it."""
    (child, *others), name = children, eqn.primitive.name
    known = len(child.jaxpr.invars) == len(eqn.invars) and name not in ("while", "cond")
    if others or not known:
        for each in children:
            note_own_gradients(each, [True] * len(each.jaxpr.outvars))
        return [True] * len(eqn.invars)
    if name != "scan":
        return note_own_gradients(child, asked)
    scan, outs = _jaxpr.scan_parts(eqn), list(asked)
    while True:
        for each in child.regions():
            each.own_gradients.clear()
        found = note_own_gradients(child, outs)
        carried = found[scan.num_consts : scan.num_consts + scan.num_carry]
        after = [a or b for a, b in zip(outs, [*carried, *outs[scan.num_carry :]], strict=True)]
        if after == outs:
            return found
        outs = after
