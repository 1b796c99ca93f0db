# SPDX-License-Identifier: Apache-2.0
"""Frames: regions of a step that know over which mesh axes their values are device-varying."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from jax.typing import ArrayLike

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._regions import Region, ValueIn
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

Item = TypeVar("Item")
Varying = frozenset[str]  # The mesh axes over which a value differs between devices.
NOWHERE: Varying = frozenset()

# Collectives whose result is the same on all devices of their axes.
REDUCTIONS = frozenset({"psum", "psum_invariant"})
GATHERS = frozenset({"all_gather", "all_gather_invariant"})
AGREEING = REDUCTIONS | GATHERS | {"pmax", "pmin"}
# Collectives whose result differs between devices of their axes.
SPREADING = frozenset({"axis_index", "ppermute", "all_to_all", "reduce_scatter"})
COLLECTIVES = AGREEING | SPREADING


@dataclasses.dataclass(eq=False)
class Frame(Region):
    varying: dict[Var, Varying] = dataclasses.field(default_factory=dict)

    def of(self, jaxpr: Jaxpr) -> Frame:
        """The frame of another jaxpr, which has some of its equations."""
        found = dataclasses.replace(self, jaxpr=jaxpr)
        found._inner.update(self._inner)
        return found

    def varies(self, atom: Atom) -> Varying:
        return NOWHERE if _jaxpr.is_literal(atom) else self.varying.get(atom, NOWHERE)

    def reads(self, eqn: Eqn) -> list[Varying]:
        return [self.varies(atom) for atom in eqn.invars]

    @property
    def out_varying(self) -> list[Varying]:
        return [self.varies(atom) for atom in self.jaxpr.outvars]


def build_frames(
    jaxpr: Jaxpr,
    consts: list[ArrayLike],
    in_varying: Sequence[Varying],
    autodiff: str | None = None,
) -> Frame:
    """The tree of frames of `jaxpr`, with the variance of every variable."""
    program = Region(jaxpr, consts, autodiff)
    starts: dict[ValueIn, Varying] = {
        (program, var): axes for var, axes in zip(jaxpr.invars, in_varying, strict=True)
    }
    found = forward(program, starts, _varying_results, frozenset.union, NOWHERE)
    return frames_of(program, lambda region, atom: found.get((region, atom), NOWHERE))


def _varying_results(region: Region, eqn: Eqn, ins: Sequence[Varying]) -> Sequence[Varying]:
    if eqn.primitive.name == "optimization_barrier":
        return ins
    if eqn.primitive.name in AGREEING and not eqn.params.get("axis_index_groups"):
        return [axes - set(_jaxpr.axes_of(eqn)) for axes in ins]
    out = NOWHERE.union(*ins)
    if eqn.primitive.name in COLLECTIVES:
        out |= set(_jaxpr.axes_of(eqn))
    return [out] * len(eqn.outvars)


def frames_of(
    program: Region, varies: Callable[[Region, Atom], Varying], around: tuple[Frame, Eqn] | None = None
) -> Frame:  # fmt: skip
    """The tree of frames of a program, with given variance."""
    jaxpr = program.jaxpr
    made = (out for eqn in jaxpr.eqns for out in eqn.outvars)
    varying = {var: varies(program, var) for var in [*jaxpr.constvars, *jaxpr.invars, *made]}
    frame = Frame(jaxpr, program.consts, program.autodiff, around, varying)
    for eqn in jaxpr.eqns:
        inner = program.inner(eqn)
        frame._inner[id(eqn)] = [frames_of(each, varies, (frame, eqn)) for each in inner]
    return frame


def split(items: Sequence[Item], *sizes: int) -> list[list[Item]]:
    """Cuts `items` after `sizes`; the last piece is the rest."""
    pieces: list[list[Item]] = []
    start = 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    return [*pieces, list(items[start:])]


def is_unreduced(frame: Frame, atom: Atom) -> bool:
    """Whether `atom` is a sum that the step itself takes over devices, or a view or cast of one."""
    if _jaxpr.is_literal(atom) or (i := frame.makers.get(atom)) is None or frame.varies(atom):
        return False
    eqn = frame.jaxpr.eqns[i]
    if eqn.primitive.name in REDUCTIONS:
        return bool(frame.varies(eqn.invars[eqn.outvars.index(atom)]))
    if _jaxpr.call_parts(eqn) is not None:
        (child,) = frame.inner(eqn)
        return is_unreduced(child, child.jaxpr.outvars[eqn.outvars.index(atom)])
    return _rules.sum_waits(eqn) and all(is_unreduced(frame, x) for x in eqn.invars)


def num_reads(jaxpr: Jaxpr) -> Counter[Var]:
    """How often each variable is read or returned."""
    read = itertools.chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
    return Counter(atom for atom in read if not _jaxpr.is_literal(atom))
