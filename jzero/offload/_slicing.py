# SPDX-License-Identifier: Apache-2.0
"""The buckets of `PinnedHost`: how many leaves are on the devices at a time, and in how many slices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jzero._errors import OptionError, message
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut import _elementwise, _subgraphs
from jzero.sharding.cut._subgraphs import OptimizerProgram, Subgraph
from jzero.sharding.plan._interface import ProgramInterface
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import UpdateBucket
from jzero.sharding.plan._stored_layout import StoredLayout
from jzero.tracing import _call

WHO = _call.WHO
# While one is copied to the devices, one is updated and one is copied back.
BUCKETS_AT_ONCE = 3


def device_buckets(
    leaves: Sequence[LeafPlan], frame: Frame, update: OptimizerProgram, interface: ProgramInterface,
    device_bytes: int,
) -> tuple[UpdateBucket, ...]:  # fmt: skip
    """Buckets of the update on the devices: as many subgraphs, or slices of one, as there is room for."""
    sizes = [leaf.nbytes_per_device for leaf in leaves]
    most = device_bytes // BUCKETS_AT_ONCE
    number = {id(subgraph): i for i, subgraph in enumerate(update.subgraphs)}
    buckets, bad = list[UpdateBucket](), list[str]()
    for pack in _subgraphs.pack(update.subgraphs, sizes, most):
        nbytes = _subgraphs.nbytes_of(pack, sizes)
        paths = tuple(leaves[i].path for i in _subgraphs.leaves_of(pack))
        num, at_once, why = 1, nbytes, ""
        # One subgraph that is too large for the bucket size.
        if nbytes > most:
            why = obstacle_of(frame, leaves, update, interface, pack[0])
            if not why:
                rows = num_rows(leaves[pack[0].leaves[0]])
                num = -(-rows // max(1, most * rows // nbytes))
                at_once = -(-rows // num) * nbytes // rows
        buckets.append(
            UpdateBucket(tuple(number[id(p)] for p in pack), paths, nbytes, num, at_once)
        )
        if at_once > device_bytes:
            bad.append(f"{', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}: "
                       f"{at_once} bytes on each device at once ({why or 'one row of them'})")  # fmt: skip
    if bad:
        raise OptionError(message(
            WHO, bad, f"Leaves whose updates depend on each other are on the devices together, and "
            f"device_bytes={device_bytes} is the most that may be there.",
            f"Use PinnedHost(device_bytes={max(bucket.nbytes_at_once for bucket in buckets)}) or more.",
            things="groups of leaves", shown=6))  # fmt: skip
    return tuple(buckets)


def obstacle_of(
    frame: Frame,
    leaves: Sequence[LeafPlan],
    update: OptimizerProgram,
    interface: ProgramInterface,
    subgraph: Subgraph,
) -> str:
    """Why a subgraph's leaves cannot be updated part by part, each at any time; '' if they can."""
    if found := _not_alone(frame, leaves, subgraph):
        return found
    if layout_of(frame, leaves, interface, subgraph) is None:
        return "they are not all stored alike"
    invars = frame.jaxpr.invars
    own = {*subgraph.reads, *(invars[i] for i in subgraph.outs)} & set(invars[: len(leaves)])
    own = {var for var in own if var.aval.shape}  # All may read a scalar, as a loss scale.
    others = [other for other in update.subgraphs if other is not subgraph]
    if any(own & set(other.reads) for other in others):  # They need the old leaf.
        return "other updates read them, too"
    return ""


def part_obstacle(
    frame: Frame, leaves: Sequence[LeafPlan], interface: ProgramInterface, subgraph: Subgraph
) -> str:
    """Why one device's part of leaves, over all mesh axes, cannot be updated by itself; '' if it can."""
    if found := _not_alone(frame, leaves, subgraph):
        return found
    invars = frame.jaxpr.invars
    offloaded = {invars[i] for i in subgraph.leaves}
    met = {*subgraph.reads, *(invars[i] for i in subgraph.outs)} - offloaded
    places = {(leaves[i].layout, leaves[i].automatic) for i in subgraph.leaves}
    passed = [interface.as_passed(var) for var in met if var.aval.shape]
    places |= {(value.layout, value.automatic) for value in passed}
    return "their moments, gradients and masters are not all cut alike" if len(places) > 1 else ""


def _not_alone(frame: Frame, leaves: Sequence[LeafPlan], subgraph: Subgraph) -> str:
    if any(i >= len(leaves) for i in subgraph.outs):
        return "the step returns something else of their update"
    return _elementwise.obstacle(frame, subgraph)


def layout_of(
    frame: Frame, leaves: Sequence[LeafPlan], interface: ProgramInterface, subgraph: Subgraph
) -> StoredLayout | None:
    """The one layout of a subgraph's offloaded leaves and gradients; None if they differ."""
    own = [leaves[i] for i in subgraph.leaves]
    state = set(frame.jaxpr.invars[: len(leaves)])
    gradients = [interface.of(v) for v in subgraph.reads if v.aval.shape and v not in state]
    found = {(x.layout, x.automatic) for x in own} | {(x.layout, x.automatic) for x in gradients}
    return found.pop()[0] if len(found) == 1 else None


def num_rows(leaf: LeafPlan) -> int:
    """Of each device's part, with all dims but the last as one."""
    return math.prod(leaf.shape_per_device[: max(1, len(leaf.shape) - 1)])
