# SPDX-License-Identifier: Apache-2.0
"""Microbatches as a mesh axis in time: the batch is sharded over an axis that is no devices'.

The partitioner treats a microbatch as a device: the batch is sharded over the time axis, and sums over the
batch are partial over it. "Collectives" over the axis become loops (`_microbatches.py`).

[Note: conversions over time] Microbatches run one after the other, so a microbatch cannot exchange data with
others while it runs. Hence the time axis shards the batch and nothing else: batch-sharded values are gathered
over it or stay sharded, and partial sums over it are all-reduced, never scattered. Both end the loop over
microbatches, and so stand outside of all other loops and branches. A loop of the step that needs either
inside is *opened*: it runs around loops over the microbatches, and carries the values of all of them.

A gradient is a partial sum over devices and over time. With `once`, it is accumulated over time first, and
then reduced over the devices; without, it is reduce-scattered in each microbatch, and shards are accumulated.
Values that are all-reduced, such as a loss, are reduced after the last microbatch in either case.
"""

from __future__ import annotations

from typing import NamedTuple

from jzero.ir._layout import Layout, LayoutStep, NoWayError, conversion
from jzero.sharding.partition._values import joined


class TimeAxis(NamedTuple):
    name: str  # distinct from the mesh's
    num: int  # of microbatches
    once: bool  # gradients are accumulated over time before the devices reduce them
    opens: bool = False  # loops and branches of the step may be opened


def step_over_time(source: Layout, target: Layout, time: TimeAxis) -> LayoutStep | None:
    """The reduction or gather over time in a conversion; None if there is none.

    It comes after a conversion from `source` to its `before`. A gather over time comes first, so that one
    collective of the devices serves all microbatches.
    """
    partial = next((p for p in source.partial if p.axis == time.name), None)
    if partial is not None and all(p.axis != time.name for p in target.partial):
        reduces = partial.op == "sum" and not time.once
        before = scattered(source, target, time) if reduces else source
        return LayoutStep("reduce", (time.name,), before, before.reduced([time.name]), ())
    place = source.place(time.name)
    if place is not None and (target.place(time.name) != place or _must_move(source, target, time)):
        return LayoutStep("gather", (time.name,), source, _gathered(source, time.name), ())
    return None


def _must_move(source: Layout, target: Layout, time: TimeAxis) -> bool:
    """Whether every conversion moves rows between microbatches, as one to another padding does."""
    try:
        conversion(source, target, 4, still=time.name)
    except NoWayError:
        return True
    return False


def scattered(source: Layout, target: Layout, time: TimeAxis) -> Layout:
    """`source`, reduce-scattered over the axes that shard `target`; itself if that is impossible."""
    partial = (p.axis for p in source.partial if p.axis != time.name and p.op == "sum")
    axes = frozenset(axis for axis in partial if target.place(axis) is not None)
    found = joined(source.reduced(axes), target, axes)
    return found if all(found.place(a) == target.place(a) for a in axes) else source


def without_time(layout: Layout, name: str) -> Layout:
    """The layout of a device's microbatches together, with the same padding."""
    mesh = tuple(each for each in layout.mesh if each[0] != name)
    return Layout(_gathered(layout, name).dims, mesh, layout.partial)


def _gathered(layout: Layout, name: str) -> Layout:
    dims = {
        d: dim._replace(cuts=tuple(cut for cut in dim.cuts if cut.axis != name))
        for d, dim in enumerate(layout.dims)
    }
    return layout.with_dims(dims)
