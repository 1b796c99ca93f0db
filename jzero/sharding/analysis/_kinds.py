# SPDX-License-Identifier: Apache-2.0
"""Kinds: what a value is to the microbatches of a step, inside loops, branches and checkpoints.

There a partial sum must stay one: only linear operations may read it, because its sum over the microbatches
is complete only after the last of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jzero._errors import StepError, message
from jzero.sharding.analysis import _rules
from jzero.sharding.analysis._frames import REDUCTIONS, Frame, split
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Literal


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


def equations(frame: Frame, index: int, eqn: Eqn) -> list[tuple[Frame, Eqn]]:
    """The equation, and every one inside it."""
    inner = [(f, e) for child in frame.children.get(index, ()) for f, _, e in child.walk()]
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
                kinds_of(frame, index, eqn, ins)
            except CutError:
                found.add(index)
            if any(e.primitive.name in COLLECTED for _, e in equations(frame, index, eqn)):
                found.add(index)
    return found


# Which operands must be summands (partial or zero), so that the result is the partial sum of the results;
# all others must be the same for all microbatches.
_SUMMANDS = {
    **dict.fromkeys(
        "add add_any sub neg convert_element_type transpose reshape squeeze broadcast_in_dim reduce_sum"
        " concatenate copy copy_p slice rev real imag conj cumsum split".split(),
        slice(None),
    ),
    **dict.fromkeys(_rules.IDENTITIES | REDUCTIONS, slice(None)),
    **dict.fromkeys(["div", "dynamic_slice", "gather"], slice(0, 1)),
    **dict.fromkeys(["dynamic_update_slice", "pad"], slice(0, 2)),
    "scatter-add": slice(0, 3, 2),
    "select_n": slice(1, None),
}
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_ZERO_OF_ZEROS = frozenset(_SUMMANDS) - {"div"}


def literal_kind(atom: Literal) -> Kind:
    """ZERO or SAME."""
    is_zero = getattr(atom.val, "ndim", 0) == 0 and atom.val == 0
    return Kind.ZERO if is_zero else Kind.SAME


def kinds_of(frame: Frame, index: int, eqn: Eqn, ins: list[Kind]) -> list[Kind]:
    """Kinds of an equation's results, given those of its operands.

    Raises:
      CutError: it reads a partial sum otherwise than linearly.
    """
    name, children = eqn.primitive.name, frame.children.get(index, [])
    if name == "scan":
        return _scan_kinds(frame, eqn, children[0], ins)
    if name == "while":
        return _while_kinds(frame, index, eqn, ins)
    if name == "cond":
        branches = [_frame_kinds(child, ins[1:]) for child in children]
        if ins[0] is Kind.PARTIAL:
            raise _refusal(frame, eqn)
        return [
            Kind.LOCAL if frame.varies(out) else _join(frame, eqn, kinds)
            for out, kinds in zip(eqn.outvars, zip(*branches, strict=True), strict=True)
        ]
    if children:
        return _frame_kinds(children[0], ins)
    if reduces(frame, eqn):
        return [
            Kind.PARTIAL if axes and not frame.varies(out) else Kind.LOCAL if axes else Kind.SAME
            for axes, out in zip(frame.reads(eqn), eqn.outvars, strict=False)
        ]
    if Kind.PARTIAL not in ins:
        zeros = bool(ins) and name in _ZERO_OF_ZEROS and set(ins[_SUMMANDS[name]]) == {Kind.ZERO}
        same = Kind.ZERO if zeros else Kind.SAME
        return [Kind.LOCAL if frame.varies(out) else same for out in eqn.outvars]
    rounds = name == "convert_element_type" and not _rules.is_linear(eqn)
    if rounds or not _stays_partial(name, ins) or any(frame.varies(out) for out in eqn.outvars):
        raise _refusal(frame, eqn)
    return [Kind.PARTIAL] * len(eqn.outvars)


def _stays_partial(name: str, ins: list[Kind]) -> bool:
    if name in _PRODUCTS:
        return ins.count(Kind.PARTIAL) == 1
    if name not in _SUMMANDS:
        return False
    summands = ins[_SUMMANDS[name]]
    return (
        all(kind in (Kind.PARTIAL, Kind.ZERO) for kind in summands)
        and ins.count(Kind.PARTIAL) == summands.count(Kind.PARTIAL)
    )  # fmt: skip


def _frame_kinds(frame: Frame, ins: Sequence[Kind]) -> list[Kind]:
    kinds = dict(zip(frame.jaxpr.invars, ins, strict=True))
    kinds |= dict.fromkeys(frame.jaxpr.constvars, Kind.SAME)

    def read(atom: Atom) -> Kind:
        return literal_kind(atom) if _jaxpr.is_literal(atom) else kinds[atom]

    for index, eqn in enumerate(frame.jaxpr.eqns):
        outs = kinds_of(frame, index, eqn, [read(atom) for atom in eqn.invars])
        kinds |= zip(eqn.outvars, outs, strict=True)
    return [read(atom) for atom in frame.jaxpr.outvars]


def _join(frame: Frame, eqn: Eqn, kinds: Sequence[Kind]) -> Kind:
    found = set(kinds)
    if Kind.PARTIAL in found and found - {Kind.PARTIAL, Kind.ZERO}:
        raise _refusal(frame, eqn)
    order = (Kind.LOCAL, Kind.PARTIAL, Kind.SAME, Kind.ZERO)
    return next(kind for kind in order if kind in found)


def _scan_kinds(frame: Frame, eqn: Eqn, body: Frame, ins: list[Kind]) -> list[Kind]:
    scan = _jaxpr.scan_parts(eqn)
    consts, carry, xs = split(ins, scan.num_consts, scan.num_carry)
    while True:
        new, ys = split(_frame_kinds(body, [*consts, *carry, *xs]), scan.num_carry)
        joined = [_join(frame, eqn, pair) for pair in zip(carry, new, strict=True)]
        if joined == carry:
            return [*carry, *ys]
        carry = joined


def _while_kinds(frame: Frame, index: int, eqn: Eqn, ins: list[Kind]) -> list[Kind]:
    # Nothing may be said of a loop whose number of turns is unknown; AD makes no reductions in one.
    if Kind.PARTIAL in ins or any(reduces(f, e) for f, e in equations(frame, index, eqn)):
        raise _refusal(frame, eqn)
    return [Kind.LOCAL if frame.varies(out) else Kind.SAME for out in eqn.outvars]


def _refusal(frame: Frame, eqn: Eqn) -> CutError:
    return CutError(message(
        "shard_train_step",
        f"accumulate > 1, and {eqn.primitive.name}{frame.at_line(eqn)} uses a gradient, loss or sum of "
        "the whole batch inside a loop, branch or jax.checkpoint that also computes it",
        "In microbatches, sums are complete only after the last one.",
        "Drop accumulate (the step may keep its own loop), or move the update or the count out of the "
        "loop or jax.checkpoint."))  # fmt: skip
