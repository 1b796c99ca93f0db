# SPDX-License-Identifier: Apache-2.0
"""Finds the inputs of a step that flow into device-varying compute, as parameters do."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from jzero.ir import _rules
from jzero.ir._dataflow import backward
from jzero.ir._regions import Edge, EdgeKind, Region, edges, holder, trip_count
from jzero.sharding.analysis._frames import Frame
from jzero.tracing._types import Eqn


def feed_batch(frame: Frame) -> list[bool]:
    """Whether each input of a step flows into device-varying compute."""
    found = backward(frame, {}, _step, operator.or_, False, _across)
    return [found.get((frame, var), False) for var in frame.jaxpr.invars]


def _is_of_a_pass(region: Region, eqn: Eqn) -> bool:
    assert isinstance(region, Frame)
    # A pass of `jax.grad` counts, too: a weight that only a penalty reads is a parameter.
    return region.pass_of(eqn) is not None or any(map(region.varies, eqn.outvars))


def _step(region: Region, eqn: Eqn, outs: Sequence[bool]) -> Sequence[bool]:
    if eqn.primitive.name in _rules.IDENTITIES or eqn.primitive.name == "optimization_barrier":
        return outs
    return [_is_of_a_pass(region, eqn) or any(outs)] * len(eqn.invars)


def _across(eqn: Eqn, edge: Edge, feeds: bool) -> bool:
    around = holder(edge.source[0], eqn)
    if edge.kind is EdgeKind.PREDICATE:
        # A condition does not flow into what an iteration or a branch computes.
        return (feeds and edge.target[0] is around) or _is_of_a_pass(around, eqn)
    if edge.kind is EdgeKind.PAST:  # A `scan` has at least one iteration.
        return feeds and trip_count(eqn) is None
    return feeds or (edge.kind is EdgeKind.IN and _is_chosen(around, eqn))


def _is_chosen(around: Region, eqn: Eqn) -> bool:
    """Whether each device chooses by itself which program of an equation runs."""
    assert isinstance(around, Frame)
    choices = (edge.source for edge in edges(around, eqn) if edge.kind is EdgeKind.PREDICATE)
    return any(region is around and bool(around.varies(x)) for region, x in choices)
