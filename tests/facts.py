"""What jzero's analyses find of a step, found again on `jzero.ir`: edges and dataflow, and nothing else.

Facts are mappings from (region, variable). None of these functions knows a loop, a branch or a call.
"""

import functools
import operator
from typing import Any

from jzero.ir import _rules
from jzero.ir._dataflow import backward
from jzero.ir._regions import EdgeKind, Region, ValueIn, edges
from jzero.tracing import _jaxpr


def loops(region, eqn):
    return any(
        edge.kind in (EdgeKind.BACK, EdgeKind.PAST) or edge.shift for edge in edges(region, eqn)
    )


def is_inside(region, eqn):
    return region.around is not None and region.around[1] is eqn


class OpenCalls(Region):
    """A program whose loops are equations like others: of them nobody looks inside."""

    def inner(self, eqn):
        return () if self.closes(eqn) else super().inner(eqn)

    def closes(self, eqn):
        return loops(self.opened, eqn)

    @functools.cached_property
    def opened(self):
        return Region(self.jaxpr, self.consts, self.autodiff)


def new_leaves(frame, num, stops):
    """Of variables, which of the first results they become, along operations that pass on their dims."""
    program = OpenCalls(frame.jaxpr, frame.consts, frame.autodiff)
    stopped = {id(frame.jaxpr.eqns[i]) for i in stops}

    def step(region, eqn, outs):
        if id(eqn) in stopped or region.pass_of(eqn) is not None:
            return [0] * len(eqn.invars)
        shapes = dict[Any, int]()
        for out, leaves in zip(eqn.outvars, outs, strict=True):
            shape = getattr(out.aval, "shape", ())
            shapes[shape] = shapes.get(shape, 0) | leaves
        maps = _rules.dims_of(eqn)
        if maps is not None:
            every = functools.reduce(operator.or_, shapes.values())
            passed = [any(d is not None for d in dims) for dims in maps]
            return [every * has_dims(x) * p for x, p in zip(eqn.invars, passed, strict=True)]
        same = region.closes(eqn) or eqn.primitive.name in _rules.IDENTITIES
        of = [shapes.get(getattr(x.aval, "shape", ()), 0) for x in eqn.invars]
        return [leaves * has_dims(x) * same for x, leaves in zip(eqn.invars, of, strict=True)]

    def across(eqn, edge, leaves):
        region = edge.source[0].around[0] if is_inside(edge.source[0], eqn) else edge.source[0]
        stays = id(eqn) in stopped or region.pass_of(eqn) is not None
        return 0 if stays or edge.kind is EdgeKind.PREDICATE else leaves * has_dims(edge.source[1])

    start = dict[ValueIn, int]()
    for i, atom in enumerate(frame.jaxpr.outvars[:num]):
        if not _jaxpr.is_literal(atom) and has_dims(atom):
            start[program, atom] = start.get((program, atom), 0) | 1 << i
    found = backward(program, start, step, operator.or_, 0, across)
    return {var: leaves for (region, var), leaves in found.items() if leaves and region is program}


def has_dims(atom):
    return getattr(atom.aval, "ndim", 0) > 1
