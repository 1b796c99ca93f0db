# SPDX-License-Identifier: Apache-2.0
"""Reshapes: each device reshapes its shard, if that is a shard of the result.

If not, rows move: when a batch is split into fewer chunks than devices, each device gets a part of every
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jzero.ir._layout import AxisCut, Layout, dim_groups, fits
from jzero.sharding.partition._equations import scatter_to_through
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue, next_outer, place_of
from jzero.tracing import _jaxpr, _local
from jzero.tracing._types import Eqn


def reshaped(frame: DeviceFrame, eqn: Eqn, value: DeviceValue) -> DeviceValue:
    """Writes a reshape; state whose sharding the result cannot have is gathered.

    Batch-sharded values go to other blocks of the same dims by an all-to-all, or are gathered and sliced.
    Values with one number per row are gathered, which costs nothing.
    """
    out = eqn.outvars[0].aval
    if _jaxpr.in_scope(eqn, _local.GROUPS):
        num = math.prod(frame.mesh.values())
        frame.reason = f"jzero.groups is local if its n is a multiple of {num}"
    source, lost = value.layout, _lost_rows(frame, value, out.shape)
    lost = lost if lost and value.aval.size > source.dims[place_of(source, lost[0])[0]].true else []
    if lost and value.make is None:
        source = _in_other_blocks(frame, value, lost, out.shape) or source
        frame.shared.layouts_before[out.shape, value.aval.shape] = value.layout
    before = source.reshapable(out.shape)
    after = before.reshape(out.shape)
    params = {**eqn.params, "new_sizes": after.local_shape}
    new = _jaxpr.var_like(out, after.local_shape)
    frame.clone(eqn, [frame.at(value, before)], [new], params=params)
    axes = after.axes
    made = DeviceValue(
        out, after, {after: new}, value.rows & axes, exchanged=value.exchanged & axes,
        fill=value.fill, origin=value.origin, looked_up=value.looked_up,
        is_activation=value.is_activation,
        scatter_to=value.scatter_to and scatter_to_through(eqn, value.scatter_to),
    )  # fmt: skip
    gone = [axis for axis in lost if axis not in axes]
    if gone:
        return _cut_after(frame, made, value, gone)
    earlier = frame.shared.layouts_before.get((value.aval.shape, out.shape))
    # The inverse of an earlier reshape restores its layout, which the values beside it have.
    if earlier is not None and made.rows == axes == earlier.axes and not made.layout.partial:
        made.atoms[earlier] = frame.at(made, earlier)
        made.layout = earlier
    return made


def _cut_after(
    frame: DeviceFrame, made: DeviceValue, value: DeviceValue, axes: Sequence[str]
) -> DeviceValue:
    """Shards a reshape of gathered rows again, along the largest of their dims, padded or not."""
    _, news = _dims_of_rows(value.layout, made.aval.shape, axes[0])
    n, shape = made.layout.num(axes), made.aval.shape
    free = [d for d in news if not made.layout.dims[d].cuts and made.layout.dims[d].pad is None]
    fit = [d for d in free if shape[d] % n == 0] or [d for d in free if shape[d] > n]
    if not fit:
        return made
    layout = made.layout.shard(max(fit, key=lambda d: shape[d]), axes)
    made.atoms[layout] = frame.at(made, layout)
    made.layout, made.rows = layout, made.rows.union(axes)
    return made


def _lost_rows(frame: DeviceFrame, value: DeviceValue, shape: Sequence[int]) -> list[str]:
    """The axes whose batch sharding the result of a reshape cannot have, in the order of their cuts."""
    layout = value.layout
    kept = layout.reshapable(shape).axes | frame.over_time
    cuts = (cut.axis for dim in layout.dims for cut in dim.cuts)
    return [axis for axis in cuts if axis in value.rows and axis not in kept]


def _in_other_blocks(
    frame: DeviceFrame, value: DeviceValue, lost: Sequence[str], shape: Sequence[int]
) -> Layout | None:
    """A layout with the rows of `lost` in other blocks, which the reshape keeps; best of the same dim."""
    own, left, found = place_of(value.layout, lost[0])[0], value.layout.without(lost), []
    for d in _dims_of_rows(value.layout, shape, lost[0])[0]:
        dim, at = left.dims[d], next_outer(left, left.dims[d])
        if at is None or dim.pad is not None:
            continue
        at *= left.num(lost) if d == own else 1
        for axis in lost:
            dim, at = dim.put(AxisCut(axis, at)), at * left.num([axis])
        if not dim.size or not fits(dim.size, left.digits(dim.cuts)):
            continue
        layout = left.with_dims({d: dim})
        if layout.axes == layout.reshapable(shape).axes:
            found.append((d != own, d, layout))
    return min(found)[-1] if found else None


def _dims_of_rows(layout: Layout, shape: Sequence[int], axis: str) -> tuple[range, range]:
    """The dims that a reshape merges and splits with the one that an axis cuts; before and after it."""
    own, _ = place_of(layout, axis)
    return next(pair for pair in dim_groups(layout.shape, shape) if own in pair[0])
