# SPDX-License-Identifier: Apache-2.0
"""Frames: what a step's jaxpr says before anything runs, and first of all which values vary.

A frame is one place a jaxpr is called from, so that a function called twice is judged twice. These facts
are found about its variables:

* **varying** (here): the mesh axes over which the value differs between devices. jzero's own dataflow.
* **linked dims** (`_links.py`): dims that are sharded together.
* **feeds batch** (`_feeds.py`): which inputs flow into compute that differs between devices.
* **residuals** (`_residuals.py`): what is offloaded for a backward pass, if it shall.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from jax.typing import ArrayLike

from jzero.ir import _rules
from jzero.ir._regions import Region
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

Item = TypeVar("Item")
Varying = frozenset[str]  # the mesh axes over which a value differs between devices
NOWHERE: Varying = frozenset()

# The result is the same on all devices of the axes it names.
REDUCTIONS = frozenset({"psum", "psum_invariant"})
GATHERS = frozenset({"all_gather", "all_gather_invariant"})
AGREEING = REDUCTIONS | GATHERS | {"pmax", "pmin"}
# The result differs between devices of the axes it names.
SPREADING = frozenset(
    {"axis_index", "ppermute", "pshuffle", "all_to_all", "reduce_scatter", "psum_scatter"}
)
COLLECTIVES = AGREEING | SPREADING


@dataclasses.dataclass(eq=False)
class Frame(Region):
    """A region, and facts about its variables."""

    varying: dict[Var, Varying] = dataclasses.field(default_factory=dict)
    children: dict[int, list[Frame]] = dataclasses.field(default_factory=dict)
    unreduced: set[Var] = dataclasses.field(default_factory=set)

    def inner(self, eqn: Eqn) -> Sequence[Frame]:
        place = self._places.get(id(eqn))  # None of one that was written in the place of another.
        return super().inner(eqn) if place is None else self.children.get(place, ())

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {id(eqn): index for index, eqn in enumerate(self.jaxpr.eqns)}

    def varies(self, atom: Atom) -> Varying:
        """The axes over which `atom` differs between devices."""
        return NOWHERE if _jaxpr.is_literal(atom) else self.varying[atom]

    def reads(self, eqn: Eqn) -> list[Varying]:
        return [self.varies(atom) for atom in eqn.invars]

    @property
    def out_varying(self) -> list[Varying]:
        return [self.varies(atom) for atom in self.jaxpr.outvars]


# --------------------------------------------------------------------------------------------------
# Variance: forward over the equations, to a fixed point in loops.


def build_frames(
    jaxpr: Jaxpr,
    consts: list[ArrayLike],
    in_varying: Sequence[Varying],
    autodiff: str | None = None,
    around: tuple[Frame, Eqn] | None = None,
) -> Frame:
    """The tree of frames of `jaxpr`, with the variance of every variable."""
    varying = dict(zip(jaxpr.invars, in_varying, strict=True))
    varying |= dict.fromkeys(jaxpr.constvars, NOWHERE)
    frame = Frame(jaxpr, consts, autodiff, around, varying)
    for index, eqn in enumerate(jaxpr.eqns):
        flow = _FLOW.get(eqn.primitive.name, _flow_default)
        outs = flow(frame, index, eqn, frame.reads(eqn))
        frame.varying |= dict(zip(eqn.outvars, outs, strict=True))
        _note_unreduced(frame, index, eqn)
    return frame


def frames_of(program: Region, varies: Callable[[Region, Atom], Varying]) -> Frame:
    """The tree of frames of a program, with given variance."""
    jaxpr = program.jaxpr
    made = (out for eqn in jaxpr.eqns for out in eqn.outvars)
    varying = {var: varies(program, var) for var in [*jaxpr.constvars, *jaxpr.invars, *made]}
    frame = Frame(jaxpr, program.consts, program.autodiff, None, varying)
    for index, eqn in enumerate(jaxpr.eqns):
        if inner := program.inner(eqn):
            frame.children[index] = [frames_of(each, varies) for each in inner]
            for child in frame.children[index]:
                child.around = frame, eqn
    return frame


def _returned(frame: Frame, index: int, eqn: Eqn, noted: Callable[[Frame], set[Var]]) -> set[Var]:
    """The results of an equation that a jaxpr inside it returns from what is noted there."""
    return {
        out
        for child in frame.children.get(index, ())
        for out, atom in zip(eqn.outvars, child.jaxpr.outvars, strict=False)
        if not _jaxpr.is_literal(atom) and atom in noted(child)
    }


def _child(
    frame: Frame, eqn: Eqn, jaxpr: Jaxpr, consts: list[ArrayLike], ins: Sequence[Varying]
) -> Frame:
    return build_frames(jaxpr, consts, ins, frame.pass_of(eqn), (frame, eqn))


def _union(ins: Sequence[Varying]) -> Varying:
    return NOWHERE.union(*ins)


def _flow_default(frame: Frame, index: int, eqn: Eqn, ins: list[Varying]) -> list[Varying]:
    call = _jaxpr.call_parts(eqn)
    if call is not None:
        child = _child(frame, eqn, *call, ins)
        frame.children[index] = [child]
        return child.out_varying
    if eqn.primitive.name == "optimization_barrier":
        return ins
    out = _union(ins)
    if eqn.primitive.name in AGREEING and not eqn.params.get("axis_index_groups"):
        return [axes - set(_jaxpr.axes_of(eqn)) for axes in ins]
    if eqn.primitive.name in COLLECTIVES:
        out |= set(_jaxpr.axes_of(eqn))
    return [out] * len(eqn.outvars)


def _flow_scan(frame: Frame, index: int, eqn: Eqn, ins: list[Varying]) -> list[Varying]:
    scan = _jaxpr.scan_parts(eqn)
    consts, carry, xs = split(ins, scan.num_consts, scan.num_carry)
    while True:
        child = _child(frame, eqn, scan.body, scan.body_consts, [*consts, *carry, *xs])
        new = [a | b for a, b in zip(carry, child.out_varying, strict=False)]
        if new == carry:
            break
        carry = new
    frame.children[index] = [child]
    return [*carry, *child.out_varying[scan.num_carry :]]


def _flow_while(frame: Frame, index: int, eqn: Eqn, ins: list[Varying]) -> list[Varying]:
    loop = _jaxpr.while_parts(eqn)
    cond_ins, body_ins, carry = split(ins, loop.num_cond_consts, loop.num_body_consts)
    while True:
        cond = _child(frame, eqn, loop.cond, loop.cond_consts, [*cond_ins, *carry])
        body = _child(frame, eqn, loop.body, loop.body_consts, [*body_ins, *carry])
        # Devices that leave the loop at different times carry different values out of it.
        trips = _union(cond.out_varying)
        new = [a | b | trips for a, b in zip(carry, body.out_varying, strict=True)]
        if new == carry:
            break
        carry = new
    frame.children[index] = [cond, body]
    return carry


def _flow_cond(frame: Frame, index: int, eqn: Eqn, ins: list[Varying]) -> list[Varying]:
    choice, *operands = ins
    branches = [_child(frame, eqn, *branch, operands) for branch in _jaxpr.cond_parts(eqn)]
    frame.children[index] = branches
    outs = []
    for i, axes in enumerate(zip(*(branch.out_varying for branch in branches), strict=True)):
        pending = choice and any(is_unreduced(b, b.jaxpr.outvars[i]) for b in branches)
        # Each device adds the gradient of its own branch to a reduction that all take part in later.
        outs.append(_union(axes) if pending else _union(axes) | choice)
    return outs


_FLOW: dict[str, Callable[[Frame, int, Eqn, list[Varying]], list[Varying]]] = {
    "scan": _flow_scan,
    "while": _flow_while,
    "cond": _flow_cond,
}


def split(items: Sequence[Item], *sizes: int) -> list[list[Item]]:
    """Cuts `items` after `sizes`; the last piece is the rest."""
    pieces: list[list[Item]] = []
    start = 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    return [*pieces, list(items[start:])]


# --------------------------------------------------------------------------------------------------
# Unreduced values: results of reductions, and of linear operations on them, that may wait.


def is_unreduced(frame: Frame, atom: Atom) -> bool:
    """Whether `atom` is an unreduced sum over devices."""
    return not _jaxpr.is_literal(atom) and atom in frame.unreduced


def _note_unreduced(frame: Frame, index: int, eqn: Eqn) -> None:
    name = eqn.primitive.name
    if name in REDUCTIONS:
        for out, axes in zip(eqn.outvars, frame.reads(eqn), strict=False):
            if axes and not frame.varies(out):
                frame.unreduced.add(out)
    elif name == "cond" and frame.reads(eqn)[0]:
        same = {out for out in eqn.outvars if not frame.varies(out)}
        frame.unreduced |= same & _returned(frame, index, eqn, lambda child: child.unreduced)
    elif index in frame.children and name not in _FLOW:  # a call
        frame.unreduced |= _returned(frame, index, eqn, lambda child: child.unreduced)
    elif _rules.sum_waits(eqn):
        if all(is_unreduced(frame, atom) for atom in eqn.invars):
            frame.unreduced.update(eqn.outvars)


def num_reads(jaxpr: Jaxpr) -> dict[Var, int]:
    """How often each variable is read or returned."""
    uses: dict[Var, int] = {}
    for atoms in [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]:
        for atom in atoms:
            if not _jaxpr.is_literal(atom):
                uses[atom] = uses.get(atom, 0) + 1
    return uses
