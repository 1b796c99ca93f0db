# SPDX-License-Identifier: Apache-2.0
"""Owners: updates that need matrices whole, each of them run by one device and not by all.

Of what needs a leaf whole (`sharding/analysis/_regions.py`), some may still be cut. A *stack* has a dim that
its update only passes on: the update is partitioned for some of the slices, as a step is for some rows of the
batch. Several updates that compute the same of other matrices are a *group*: any of them updates any of the
matrices. Either way each device gets some matrices whole, updates them, and sends back
the results. What is neither is gathered, and run by every device.

The equations of a group become one call, [Note: boxes]. To the rest of the analysis it is a call like any
other, and whoever does not know of owners runs it so.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jzero._errors import describe_leaf
from jzero.ir._layout import replicated
from jzero.ir._regions import Region, variables
from jzero.sharding.analysis import _frames, _regions
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.analysis._regions import Names, OwnedRegion
from jzero.sharding.partition._matrix_owners import OwnedGroup, OwnedStack, Owners
from jzero.sharding.partition._movement import is_of_rows
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram, partition
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Var

# [Note: boxes]
# A group runs when all its matrices are there, and what follows of any of them runs after it. So its
# equations stand together as one call, as late as the last of them, and others move behind it. A group that
# waits for its own results (an update of the same leaf later in the step) is none.

_SLICES = "slices"  # an axis in the place of all that shard leaves
ALONE = "no other update is like it"
TOGETHER = "one branch, loop or product updates them together"


@dataclasses.dataclass(frozen=True)
class Owned:
    """What is updated by owners, or why it is gathered and updated by every device.

    Attributes:
      leaves: the parameters, by their paths.
      matrix: type and shape of what is sent to the owner.
      num: how many of these there are.
      each: how many a device updates.
      why: why it updates all of them; '' if it does not.
    """

    leaves: tuple[str, ...]
    matrix: str
    num: int
    each: int
    why: str = ""

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.each} of {self.num} {self.matrix} of {', '.join(self.leaves)}{why}"


class OwnerCall(NamedTuple):
    """Regions whose equations become one call, and what owners run in its place."""

    regions: list[OwnedRegion]
    owners: OwnedGroup | OwnedStack


class SharedOut(NamedTuple):
    """A step's update, shared out among owners.

    Attributes:
      frame: the step, in which each group or stack is one call.
      owners: what the owners run in the place of such a call.
      owned: what is to be said of them.
    """

    frame: Frame
    owners: Owners
    owned: tuple[Owned, ...]


def shared_out(frame: Frame, links: Links, axes: Mapping[str, int], names: Names) -> SharedOut:
    """Shares out what needs leaves whole among the devices of `axes`, over which these are sharded."""
    boxes: list[OwnerCall] = []
    owned: list[Owned] = []
    for regions in _alike(frame, _regions.find_regions(frame, links, names)):
        more, told = _share_out(frame, regions, boxes, axes)
        boxes += more
        owned += told
    if not boxes:
        return SharedOut(frame, {}, _together(owned))
    owners = {_gives(box.regions)[0]: box.owners for box in boxes}
    return SharedOut(_with_calls(frame, boxes), owners, _together(owned))


def _together(owned: Sequence[Owned]) -> tuple[Owned, ...]:
    """With what is gathered for the same reason as one."""
    found: dict[Hashable, Owned] = {}
    for number, each in enumerate(owned):
        key = (each.matrix, each.why) if each.why else number
        old = found.get(key)
        found[key] = each if old is None else dataclasses.replace(
            old, leaves=old.leaves + each.leaves, num=old.num + each.num, each=old.each + each.each
        )  # fmt: skip
    return tuple(found.values())


def _share_out(
    frame: Frame,
    regions: Sequence[OwnedRegion],
    others: Sequence[OwnerCall],
    axes: Mapping[str, int],
) -> tuple[list[OwnerCall], list[Owned]]:
    """Boxes for regions that compute the same, and what is to be said of them; no boxes if none fits."""
    num = math.prod(axes.values())
    why = _regions.why_not_alone(frame, regions[0])
    choices = [] if why else _choices(regions, num)
    reasons: dict[int, str] = {}
    for dim in choices:
        made = _group(frame, regions) if dim is None else _stack(frame, regions, dim, axes)
        if isinstance(made, list) and _order(frame, [*others, *made]) is not None:
            return made, _told(regions, dim, num, made)
        reason = made if isinstance(made, str) else "other updates follow from it and lead to it"
        reasons[-1 if dim is None else dim] = reason
    why = why or (reasons[min(reasons)] if reasons else ALONE)
    return [], _gathered(regions, why)


def _alike(frame: Frame, regions: Sequence[OwnedRegion]) -> list[list[OwnedRegion]]:
    """Regions that compute the same, together."""
    found: dict[Hashable, list[OwnedRegion]] = {}
    for region in regions:
        found.setdefault(_regions.signature(frame, region), []).append(region)
    return list(found.values())


def _choices(regions: Sequence[OwnedRegion], num: int) -> list[int | None]:
    """Ways to share out work, the least first: along a dim of the largest operand, or None, as a group."""
    shape = _regions.largest_read(regions[0]).aval.shape
    sizes: list[tuple[int, int | None]] = [(len(regions), None)]
    # A matrix by itself has no dim to spare.
    more = sum(size > 1 for size in shape) > 2
    sizes += [(size, dim) for dim, size in enumerate(shape) if more]
    shares = [(-(-size // num) / size, dim) for size, dim in sizes if size > 1]
    return [dim for share, dim in sorted(shares, key=lambda pair: pair[0]) if share < 1]


def _told(
    regions: Sequence[OwnedRegion], choice: int | None, num: int, calls: Sequence[OwnerCall]
) -> list[Owned]:
    """What is to be said of regions that `num` devices share."""
    largest, times = _regions.largest_read(regions[0]).aval, len(regions)
    matrix = _matrix([size for dim, size in enumerate(largest.shape) if dim != choice], largest)
    if choice is None:
        leaves = _distinct(names for region in regions for names in region.leaves)
        return [Owned(leaves, matrix, times, -(-times // num))]
    cut, left = [], []
    for region, call in zip(regions, calls, strict=True):
        dims = call.owners.give_dims if isinstance(call.owners, OwnedStack) else ()
        rows = list(zip(region.gives, region.leaves, dims, strict=True))
        cut += [names for _, names, dim in rows if dim is not None]
        left += [(var, names) for var, names, dim in rows if dim is None and names not in cut]
    size = largest.shape[choice]
    told = Owned(_distinct(cut), matrix, times * size, times * -(-size // num))
    return [told, *_together(_each(left, TOGETHER))]


def _gathered(regions: Sequence[OwnedRegion], why: str) -> list[Owned]:
    """What is to be said of regions that every device runs."""
    told = []
    for region in regions:
        pairs = list(zip(region.gives, region.leaves, strict=True))
        if len({names for _, names in pairs if names}) > 1:
            told += _each(pairs, TOGETHER if why == ALONE else why)
        else:
            largest = _regions.largest_read(region).aval
            told.append(Owned(_distinct(region.leaves), _matrix(largest.shape, largest), 1, 1, why))
    return list(_together(told))


def _each(pairs: Sequence[tuple[Var, tuple[str, ...]]], why: str) -> list[Owned]:
    """Of several matrices that one region updates, each by its result."""
    results = {names: var.aval for var, names in reversed(pairs) if names and var.aval.ndim > 1}
    return [
        Owned(names, _matrix(aval.shape, aval), 1, 1, why)
        for names, aval in reversed(results.items())
    ]


def _matrix(shape: Sequence[int], like: Any) -> str:
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return describe_leaf("", shape, like.dtype).strip()


def _distinct(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))


# --------------------------------------------------------------------------------------------------
# Groups and stacks.


def _group(frame: Frame, regions: Sequence[OwnedRegion]) -> list[OwnerCall]:
    """All regions as one group."""
    reads = (region.reads for region in regions)
    shared = tuple(len(set(slot)) == 1 for slot in zip(*reads, strict=True))
    return [OwnerCall([*regions], OwnedGroup(tuple(regions), shared, _update(frame, regions[0])))]


def _stack(
    frame: Frame, regions: Sequence[OwnedRegion], dim: int, axes: Mapping[str, int]
) -> list[OwnerCall] | str:
    """Each region as a stack along a dim of its largest operand; or why it is none."""
    first = regions[0]
    size = _regions.largest_read(first).aval.shape[dim]
    dims = tuple(_dim_of(var, dim, size) for var in first.reads)
    program = _on_slices(_update(frame, first), dims, math.prod(axes.values()))
    if move := next(filter(is_of_rows, program.moves), None):
        return f"its {move.operation} needs dim {dim} whole"
    if why := _why_reduced(Region(program.jaxpr, program.consts), dim):
        return why
    places = [layout.place(_SLICES) for layout in program.outs]
    gives = tuple(None if place is None else place[0] for place in places)
    return [OwnerCall([region], OwnedStack(region, dims, gives)) for region in regions]


def _on_slices(flat: _rewrite.Flat, dims: Sequence[int | None], num: int) -> DeviceProgram:
    """An update as one of so many devices runs it of its slices of some operands, which may be padded."""
    layouts = [replicated(x.aval.shape, {_SLICES: num}) for x in flat.invars]
    ins = [
        DeviceInput(layout)
        if dim is None
        else DeviceInput(layout.cut(dim, _SLICES), frozenset([_SLICES]))
        for layout, dim in zip(layouts, dims, strict=True)
    ]
    outs = [None] * len(flat.outvars)
    return partition(flat, [], {_SLICES: num}, ins, outs, keeps_padding=True)


def _update(frame: Frame, region: OwnedRegion) -> _rewrite.Flat:
    eqns = [frame.jaxpr.eqns[i] for i in region.eqns]
    return _rewrite.Flat([], [*region.reads], [*region.gives], eqns)


def _why_reduced(body: Region, dim: int) -> str:
    """What of the update of some slices asks the other devices, if anything does."""
    found = [(region, eqn) for region, eqn in body.walk() if eqn.primitive in _jaxpr.COLLECTIVES]
    tests = [region.inner(eqn)[0] for region, eqn in body.walk() if eqn.primitive.name == "while"]
    # Whether a slice goes on a device could decide by itself; but as a call no such loop can be written.
    of_slices = any(test.jaxpr.outvars[0].aval.ndim for test in tests)
    if of_slices or any(region is test for region, _ in found for test in tests):
        return "its loop ends when all slices are done"
    return f"it reduces dim {dim}" if found else ""


def _dim_of(var: Var, dim: int, size: int) -> int | None:
    """Along which dim a device gets slices of an operand: one that has as many, rather the one of this place.

    What it should be no type says; a wrong guess is found out, since then something must move.
    """
    shape = var.aval.shape
    found = sorted(
        (d for d, n in enumerate(shape) if n == size and len(shape) > 1), key=lambda d: d != dim
    )
    return found[0] if found else None


# --------------------------------------------------------------------------------------------------
# Equations in order: [Note: boxes].


def _gives(regions: Sequence[OwnedRegion]) -> list[Var]:
    return [var for region in regions for var in region.gives]


def _indices(box: OwnerCall) -> list[int]:
    return sorted(i for region in box.regions for i in region.eqns)


def _order(frame: Frame, boxes: Sequence[OwnerCall]) -> list[int] | None:
    """Equations by index, of each box the last one for all; None if one would wait for its own results."""
    eqns = frame.jaxpr.eqns
    node_of = list(range(len(eqns)))
    for box in boxes:
        indices = _indices(box)
        for i in indices:
            node_of[i] = indices[-1]
    maker = {out: node_of[i] for i, eqn in enumerate(eqns) for out in eqn.outvars}
    waits: dict[int, set[int]] = {node: set() for node in node_of}
    for i, eqn in enumerate(eqns):
        waits[node_of[i]] |= {maker[v] for v in variables(eqn.invars) if v in maker}
    for node, before in waits.items():
        before.discard(node)
    return _topological(waits)


def _with_calls(frame: Frame, boxes: Sequence[OwnerCall]) -> Frame:
    """The frame, with a call for each box; what was found of its values stays."""
    jaxpr, eqns, order = frame.jaxpr, frame.jaxpr.eqns, _order(frame, boxes)
    assert order is not None
    calls = dict[int, Eqn]()
    for box in boxes:
        indices = _indices(box)
        reads = variables(var for region in box.regions for var in region.reads)
        calls[indices[-1]] = _rewrite.boxed([eqns[i] for i in indices], reads, _gives(box.regions))
    new = [calls.get(node, eqns[node]) for node in order]
    flat = _rewrite.Flat([*jaxpr.constvars], [*jaxpr.invars], [*jaxpr.outvars], new)
    found = dataclasses.replace(frame, jaxpr=flat, children={})
    for place, node in enumerate(order):
        if (call := calls.get(node)) is not None:
            (program,) = Region(flat, frame.consts).inner(call)
            inside: Sequence[Frame] = [_frames.frames_of(program, lambda *_: _frames.NOWHERE)]
        else:
            inside = frame.children.get(node, ())
        for child in inside:
            child.around = found, new[place]
        if inside:
            found.children[place] = [*inside]
    return found


def _topological(waits: Mapping[int, set[int]]) -> list[int] | None:
    """Nodes after those that they wait for, else the smallest first; None if some wait for each other."""
    after: dict[int, list[int]] = {node: [] for node in waits}
    for node, before in waits.items():
        for other in before:
            after[other].append(node)
    left = {node: len(before) for node, before in waits.items()}
    ready = [node for node, num in left.items() if not num]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, other)
    return order if len(order) == len(waits) else None
