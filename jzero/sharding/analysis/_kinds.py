# SPDX-License-Identifier: Apache-2.0
"""Kinds: what a value is to the microbatches of a step, inside loops, branches and checkpoints.

There a partial sum must stay one: only linear operations may read it, because its sum over the microbatches
is complete only after the last of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import cast

from jzero._errors import StepError, message
from jzero.ir import _regions as regions
from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._regions import Edge, Region, ValueIn, turns
from jzero.sharding.analysis._frames import REDUCTIONS, Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Literal


class CutError(StepError):
    """A step that cannot run in microbatches."""


class Kind(enum.Enum):
    """What a value is to the microbatches.

    SAME: the same for all of them. ZERO: that, and zero. LOCAL: differs between them. PARTIAL: comes from
    a reduction by linear operations, so that its sum over the microbatches is still due.
    """

    SAME, ZERO, LOCAL, PARTIAL = range(4)


# Collectives that need what every microbatch has: at the root of a step they stand between two loops.
COLLECTED = frozenset({"all_gather", "all_gather_invariant", "pmax", "pmin"})


def equations(frame: Frame, eqn: Eqn) -> list[tuple[Frame, Eqn]]:
    """The equation, and every one inside it."""
    inner = [each for child in frame.inner(eqn) for each in child.walk()]
    return [(frame, eqn), *inner]


def reduces(frame: Frame, eqn: Eqn) -> bool:
    """Whether the equation reduces something that differs between devices."""
    return eqn.primitive.name in REDUCTIONS and any(frame.reads(eqn))


def uncut_checkpoints(frame: Frame) -> set[int]:
    """The `jax.checkpoint` bodies of the frame, by equation, that a loop over microbatches must end within.

    What they compute again is computed in another loop than the first time, or with it.
    """
    found = set()
    for index, eqn in enumerate(frame.jaxpr.eqns):
        if _jaxpr.is_rematted(eqn):
            ins = [Kind.LOCAL if axes else Kind.SAME for axes in frame.reads(eqn)]
            try:
                kinds_of(frame, eqn, ins)
            except CutError:
                found.add(index)
            if any(e.primitive.name in COLLECTED for _, e in equations(frame, eqn)):
                found.add(index)
    return found


def literal_kind(atom: Literal) -> Kind:
    """ZERO or SAME."""
    is_zero = getattr(atom.val, "ndim", 0) == 0 and atom.val == 0
    return Kind.ZERO if is_zero else Kind.SAME


def kinds_of(frame: Frame, eqn: Eqn, ins: Sequence[Kind]) -> list[Kind]:
    """Kinds of an equation's results, given those of its operands.

    Raises:
      CutError: it reads a partial sum otherwise than linearly.
    """
    if not frame.inner(eqn):
        return _of_equation(frame, eqn, ins)
    program, at = frame.only(eqn), [(frame, eqn)]  # where kinds are joined

    def frame_of(region: Region) -> Frame:
        return region if isinstance(region, Frame) else frame

    def across(eqn: Eqn, edge: Edge, kind: Kind | None) -> Kind | None:
        end, var = edge.target
        inside = end.around is not None and end.around[1] is eqn
        at[:] = [(frame_of(end.around[0] if inside and end.around else end), eqn)]
        decides = edge.kind is regions.EdgeKind.PREDICATE
        if kind is Kind.PARTIAL and (decides or turns(eqn) is None):
            raise _refusal(*at[0])
        if kind is None or decides:
            return None
        return kind if inside or not frame_of(end).varies(var) else Kind.LOCAL

    def join(a: Kind | None, b: Kind | None) -> Kind | None:
        return b if a is None else a if b is None else _join(*at[0], (a, b))

    def step(region: Region, eqn: Eqn, ins: Sequence[Kind | None]) -> list[Kind | None]:
        own = frame_of(region)
        if reduces(own, eqn) and (loop := _uncounted(own)):
            raise _refusal(*loop)
        known = [Kind.SAME if kind is None else kind for kind in ins]  # of constants
        return [*_of_equation(own, eqn, known)]

    given = zip(eqn.invars, ins, strict=True)
    facts: dict[ValueIn, Kind | None] = {
        (program, atom): kind for atom, kind in given if not _jaxpr.is_literal(atom)
    }
    found = forward(program, facts, step, join, None, across, literal_kind)
    return [found[program, out] or Kind.SAME for out in eqn.outvars]


def _uncounted(frame: Frame) -> tuple[Frame, Eqn] | None:
    """The loop around a frame whose turns nobody knows: AD makes no reductions in one."""
    while frame.around is not None:
        outer, eqn = frame.around
        frame = cast(Frame, outer)
        if turns(eqn) is None:
            return frame, eqn
    return None


def _of_equation(frame: Frame, eqn: Eqn, ins: Sequence[Kind]) -> list[Kind]:
    """Of one that holds no programs."""
    if reduces(frame, eqn):
        return [
            Kind.PARTIAL if axes and not frame.varies(out) else Kind.LOCAL if axes else Kind.SAME
            for axes, out in zip(frame.reads(eqn), eqn.outvars, strict=False)
        ]
    zeros = [i for i, kind in enumerate(ins) if kind is Kind.ZERO]
    if Kind.PARTIAL not in ins:
        same = Kind.ZERO if _rules.stays_zero(eqn, zeros) else Kind.SAME
        return [Kind.LOCAL if frame.varies(out) else same for out in eqn.outvars]
    partial = [i for i, kind in enumerate(ins) if kind is Kind.PARTIAL]
    stays = _rules.stays_partial(eqn, partial, zeros)
    if not stays or any(frame.varies(out) for out in eqn.outvars):
        raise _refusal(frame, eqn)
    return [Kind.PARTIAL] * len(eqn.outvars)


def _join(frame: Frame, eqn: Eqn, kinds: Sequence[Kind]) -> Kind:
    found = set(kinds)
    if Kind.PARTIAL in found and found - {Kind.PARTIAL, Kind.ZERO}:
        raise _refusal(frame, eqn)
    order = (Kind.LOCAL, Kind.PARTIAL, Kind.SAME, Kind.ZERO)
    return next(kind for kind in order if kind in found)


def _refusal(frame: Frame, eqn: Eqn) -> CutError:
    return CutError(message(
        "shard_train_step",
        f"accumulate > 1, and {eqn.primitive.name}{frame.at_line(eqn)} uses a gradient, loss or sum of "
        "the whole batch inside a loop, branch or jax.checkpoint that also computes it",
        "In microbatches, sums are complete only after the last one.",
        "Drop accumulate (the step may keep its own loop), or move the update or the count out of the "
        "loop or jax.checkpoint."))  # fmt: skip
