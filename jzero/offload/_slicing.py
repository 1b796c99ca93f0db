# SPDX-License-Identifier: Apache-2.0
"""The buckets of `PinnedHost`: how many leaves visit the devices together, and in how many slices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jzero._errors import OptionError, message
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut import _elementwise, _subgraphs
from jzero.sharding.cut._subgraphs import OptimizerProgram, Subgraph
from jzero.sharding.plan._interface import ProgramInterface
from jzero.sharding.plan._layout import StoredLayout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import UpdateBucket
from jzero.tracing import _call

WHO = _call.WHO
# While one is copied to the devices, one is updated and one is copied back.
BUCKETS_AT_ONCE = 3


@dataclasses.dataclass(frozen=True)
class Slicer:
    """Plans buckets for leaves that visit the devices.

    Attributes:
      leaves: of the state.
      frame: the root frame of the step.
      update: its optimizer program.
      interface: how values lie between its programs.
      device_bytes: the most bytes of offloaded leaves on each device at any time.
    """

    leaves: tuple[LeafPlan, ...]
    frame: Frame
    update: OptimizerProgram
    interface: ProgramInterface
    device_bytes: int

    def buckets(self) -> tuple[UpdateBucket, ...]:
        """As many subgraphs in each as there is room for.

        Raises:
          OptionError: leaves that visit together are larger than `device_bytes`.
        """
        sizes = [leaf.nbytes_per_device for leaf in self.leaves]
        subgraphs = self.update.subgraphs
        packs = _subgraphs.pack(subgraphs, sizes, self.device_bytes // BUCKETS_AT_ONCE)
        number = {id(subgraph): i for i, subgraph in enumerate(subgraphs)}
        buckets = []
        for pack in packs:
            nbytes = _subgraphs.nbytes_of(pack, sizes)
            paths = tuple(self.leaves[i].path for i in _subgraphs.leaves_of(pack))
            parts, at_once = self._slices(pack, nbytes)
            buckets.append(
                UpdateBucket(tuple(number[id(p)] for p in pack), paths, nbytes, parts, at_once)
            )
        self._check_room(packs, buckets)
        return tuple(buckets)

    def _slices(self, pack: Sequence[Subgraph], nbytes: int) -> tuple[int, int]:
        """How many slices a pack's leaves are cut into, and their bytes.

        Only if they are so large that two buckets would not be on the devices together; one row may have
        more.
        """
        most = self.device_bytes // BUCKETS_AT_ONCE
        if nbytes <= most or len(pack) > 1 or self._obstacle(pack[0]):
            return 1, nbytes
        rows = num_rows(self.leaves[pack[0].leaves[0]])
        num = -(-rows // max(1, most * rows // nbytes))
        return num, -(-rows // num) * nbytes // rows

    def _obstacle(self, subgraph: Subgraph) -> str:
        """Why a subgraph's leaves cannot be cut into slices; '' if they can."""
        return obstacle_of(self.frame, self.leaves, self.update, self.interface, subgraph)

    def _check_room(
        self, packs: Sequence[Sequence[Subgraph]], buckets: Sequence[UpdateBucket]
    ) -> None:
        bad = [
            f"{', '.join(bucket.leaves[:3])}{', ...' if len(bucket.leaves) > 3 else ''}: "
            f"{bucket.nbytes_at_once} bytes on each device at once "
            f"({self._obstacle(pack[0]) or 'one row of them'})"
            for bucket, pack in zip(buckets, packs, strict=True)
            if bucket.nbytes_at_once > self.device_bytes
        ]
        if bad:
            raise OptionError(message(
                WHO, bad, f"Leaves whose updates depend on each other visit the devices together, and "
                f"device_bytes={self.device_bytes} is the most that may be there.",
                f"Use PinnedHost(device_bytes={max(bucket.nbytes_at_once for bucket in buckets)}) or more.",
                things="groups of leaves", shown=6))  # fmt: skip


def obstacle_of(
    frame: Frame,
    leaves: Sequence[LeafPlan],
    update: OptimizerProgram,
    interface: ProgramInterface,
    subgraph: Subgraph,
) -> str:
    """Why no part of a subgraph's leaves can be updated by itself, at any time; '' if each can."""
    if found := _not_alone(frame, leaves, subgraph):
        return found
    if layout_of(frame, leaves, interface, subgraph) is None:
        return "they are not all stored alike"
    invars = frame.jaxpr.invars
    own = {*subgraph.reads, *(invars[i] for i in subgraph.outs)} & set(invars[: len(leaves)])
    own = {var for var in own if var.aval.shape}  # All may read a scalar: a loss scale.
    others = [other for other in update.subgraphs if other is not subgraph]
    if any(own & set(other.reads) for other in others):  # They need the leaf as it was.
        return "other updates read them, too"
    return ""


def part_obstacle(
    frame: Frame, leaves: Sequence[LeafPlan], interface: ProgramInterface, subgraph: Subgraph
) -> str:
    """Why a device's part of leaves, over all mesh axes, cannot be updated by itself; '' if it can."""
    if found := _not_alone(frame, leaves, subgraph):
        return found
    invars = frame.jaxpr.invars
    hosted = {invars[i] for i in subgraph.leaves}
    met = {*subgraph.reads, *(invars[i] for i in subgraph.outs)} - hosted
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
    """The layout of a subgraph's offloaded leaves and gradients, if XLA, too, shards all of them alike."""
    own = [leaves[i] for i in subgraph.leaves]
    state = set(frame.jaxpr.invars[: len(leaves)])
    gradients = [interface.of(v) for v in subgraph.reads if v.aval.shape and v not in state]
    found = {(x.layout, x.automatic) for x in own} | {(x.layout, x.automatic) for x in gradients}
    return found.pop()[0] if len(found) == 1 else None


def num_rows(leaf: LeafPlan) -> int:
    """Of each device's part, with all dims but the last as one."""
    return math.prod(leaf.shape_per_device[: max(1, len(leaf.shape) - 1)])
