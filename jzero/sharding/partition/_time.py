# SPDX-License-Identifier: Apache-2.0
"""Microbatches as an axis in time: the batch is sharded over an axis that no device has.

The partitioner treats a microbatch as a device: rows are cut over the axis, and sums over rows are partial
over it. What it writes of "collectives" over the axis becomes loops (`_microbatches.py`).

[Note: conversions over time] A microbatch can wait for the others, and can give them nothing while it runs.
So the axis cuts nothing but rows: they are gathered over it or stay, and a sum over it is done whole. Both
end the loop over the microbatches, and so stand outside of all other loops and branches. A loop of the step
that cannot do without is opened: it is around loops over the microbatches, and carries what all of them have.

A gradient is a partial sum over devices and over time. With `once`, it is summed up over time first, and then
over the devices; else it is reduce-scattered in each microbatch, and shards are summed up over time. What is
reduced to all devices, as a loss is, waits for the last microbatch in either case.
"""

from __future__ import annotations

from typing import NamedTuple

from jzero.ir._layout import Layout, LayoutStep, NoWayError, conversion
from jzero.sharding.partition._values import joined


class TimeAxis(NamedTuple):
    """The axis of the microbatches.

    Attributes:
      name: beside the names of the mesh.
      num: of microbatches.
      once: sum gradients up over time before the devices reduce them.
      opens: whether other loops and branches may be around loops over time.
    """

    name: str
    num: int
    once: bool
    opens: bool = False


def step_over_time(source: Layout, target: Layout, time: TimeAxis) -> LayoutStep | None:
    """The reduction or gather over time on the way from layout to layout; None if there is none.

    It is written behind a conversion from `source` to its `before`; a gather comes first of all, so that one
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
    """Whether no conversion leaves what is cut over time where it is, as in another padding."""
    try:
        conversion(source, target, 4, still=time.name)
    except NoWayError:
        return True
    return False


def scattered(source: Layout, target: Layout, time: TimeAxis) -> Layout:
    """The sums over those devices done that get shards of them; `source` if they cannot be done alone."""
    partial = (p.axis for p in source.partial if p.axis != time.name and p.op == "sum")
    axes = frozenset(axis for axis in partial if target.place(axis) is not None)
    found = joined(source.reduced(axes), target, axes)
    return found if all(found.place(a) == target.place(a) for a in axes) else source


def without_time(layout: Layout, name: str) -> Layout:
    """The layout of what one device has for all its microbatches, with the same padding."""
    mesh = tuple(each for each in layout.mesh if each[0] != name)
    return Layout(_gathered(layout, name).dims, mesh, layout.partial)


def _gathered(layout: Layout, name: str) -> Layout:
    dims = {
        d: dim._replace(cuts=tuple(cut for cut in dim.cuts if cut.axis != name))
        for d, dim in enumerate(layout.dims)
    }
    return layout.with_dims(dims)
