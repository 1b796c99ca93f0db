# SPDX-License-Identifier: Apache-2.0
"""Distributed updates: each whole matrix of Muon, Shampoo and their like is updated by one device.

Update subgraphs (`sharding/analysis/_update_subgraphs.py`) need leaves replicated, and two kinds can still be
distributed. A *batch* of matrices has a dim that its update only passes on: the update is partitioned over
the slices, as a step is over rows of its batch. Updates of several matrices by equal equations form a
*bucket*: one program serves them all. Either way an all-to-all gives each device some whole matrices, it
updates them, and another all-to-all returns shards. All other subgraphs read gathered matrices, and every
device runs them.

The equations of a bucket become one call, [Note: bucket calls]. The rest of the analysis takes it for a call
like any other, and any program that does not distribute it runs it as one.
"""

from __future__ import annotations

import dataclasses
import graphlib
import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jzero._errors import describe_leaf
from jzero.ir._layout import replicated
from jzero.ir._regions import Region, variables
from jzero.sharding.analysis import _update_subgraphs
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.sharding.analysis._update_subgraphs import Names, UpdateSubgraph
from jzero.sharding.partition._matrix_buckets import MatrixBatch, MatrixBucket, UpdatesByCall
from jzero.sharding.partition._movement import is_of_rows
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram, partition
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Var

# [Note: bucket calls]
# A bucket runs when all its matrices are there, and the readers of any of its results run after it. So its
# equations become one call at the place of the last of them, and readers move behind it. An update and one
# that depends on it (the step updates a leaf twice) cannot share a bucket.

_SLICES = "slices"  # an axis in the place of all that shard leaves
ALONE = "no other update is like it"
TOGETHER = "one branch, loop or product updates them together"


@dataclasses.dataclass(frozen=True)
class DistributedUpdate:
    """A distributed update, or why every device gathers the matrices and repeats it."""

    leaves: tuple[str, ...]  # paths of the parameters
    matrix: str  # dtype and shape of one matrix
    num: int  # of matrices
    each: int  # how many of them a device updates
    why: str = ""  # why every device updates all of them; '' if the update is distributed

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.each} of {self.num} {self.matrix} of {', '.join(self.leaves)}{why}"


class UpdateCall(NamedTuple):
    """Subgraphs whose equations become one call, and its distributed form."""

    subgraphs: list[UpdateSubgraph]
    distributed: MatrixBucket | MatrixBatch


class DistributedStep(NamedTuple):
    frame: Frame  # the step; each bucket or batch is one call in it
    distributed: UpdatesByCall  # the distributed form of each such call
    owned: tuple[DistributedUpdate, ...]  # the report


def distribute_updates(
    frame: Frame, links: Links, axes: Mapping[str, int], names: Names
) -> DistributedStep:
    """Distributes updates of whole matrices over the devices of `axes`, which shard them."""
    calls: list[UpdateCall] = []
    owned: list[DistributedUpdate] = []
    for subgraphs in _alike(frame, _update_subgraphs.find_update_subgraphs(frame, links, names)):
        more, report = _share_out(frame, subgraphs, calls, axes)
        calls += more
        owned += report
    if not calls:
        return DistributedStep(frame, {}, _together(owned))
    distributed = {_gives(call.subgraphs)[0]: call.distributed for call in calls}
    return DistributedStep(_with_calls(frame, calls), distributed, _together(owned))


def _together(owned: Sequence[DistributedUpdate]) -> tuple[DistributedUpdate, ...]:
    """Entries that are gathered for the same reason become one."""
    found: dict[Hashable, DistributedUpdate] = {}
    for number, each in enumerate(owned):
        key = (each.matrix, each.why) if each.why else number
        old = found.get(key)
        found[key] = each if old is None else dataclasses.replace(
            old, leaves=old.leaves + each.leaves, num=old.num + each.num, each=old.each + each.each
        )  # fmt: skip
    return tuple(found.values())


def _share_out(
    frame: Frame,
    subgraphs: Sequence[UpdateSubgraph],
    others: Sequence[UpdateCall],
    axes: Mapping[str, int],
) -> tuple[list[UpdateCall], list[DistributedUpdate]]:
    """Update calls for subgraphs of equal equations, and the report; no calls if none is possible."""
    num = math.prod(axes.values())
    why = _update_subgraphs.why_not_alone(frame, subgraphs[0])
    choices = [] if why else _choices(subgraphs, num)
    reasons: dict[int, str] = {}
    for dim in choices:
        made = _bucket(frame, subgraphs) if dim is None else _batch(frame, subgraphs, dim, axes)
        if isinstance(made, list) and _order(frame, [*others, *made]) is not None:
            return made, _shared(subgraphs, dim, num, made)
        reason = made if isinstance(made, str) else "other updates follow from it and lead to it"
        reasons[-1 if dim is None else dim] = reason
    why = why or (reasons[min(reasons)] if reasons else ALONE)
    return [], _gathered(subgraphs, why)


def _alike(frame: Frame, subgraphs: Sequence[UpdateSubgraph]) -> list[list[UpdateSubgraph]]:
    """Subgraphs by their equations: those of one list can share a program."""
    found: dict[Hashable, list[UpdateSubgraph]] = {}
    for subgraph in subgraphs:
        found.setdefault(_update_subgraphs.signature(frame, subgraph), []).append(subgraph)
    return list(found.values())


def _choices(subgraphs: Sequence[UpdateSubgraph], num: int) -> list[int | None]:
    """Ways to distribute, least work per device first: a dim of the largest operand; None is a bucket."""
    shape = _update_subgraphs.largest_read(subgraphs[0]).aval.shape
    sizes: list[tuple[int, int | None]] = [(len(subgraphs), None)]
    # A single matrix has no batch dim.
    more = sum(size > 1 for size in shape) > 2
    sizes += [(size, dim) for dim, size in enumerate(shape) if more]
    shares = [(-(-size // num) / size, dim) for size, dim in sizes if size > 1]
    return [dim for share, dim in sorted(shares, key=lambda pair: pair[0]) if share < 1]


def _shared(
    subgraphs: Sequence[UpdateSubgraph], choice: int | None, num: int, calls: Sequence[UpdateCall]
) -> list[DistributedUpdate]:
    """The report on subgraphs that `num` devices share."""
    largest, times = _update_subgraphs.largest_read(subgraphs[0]).aval, len(subgraphs)
    matrix = _matrix([size for dim, size in enumerate(largest.shape) if dim != choice], largest)
    if choice is None:
        leaves = _distinct(names for subgraph in subgraphs for names in subgraph.leaves)
        return [DistributedUpdate(leaves, matrix, times, -(-times // num))]
    cut, left = [], []
    for subgraph, call in zip(subgraphs, calls, strict=True):
        dims = call.distributed.give_dims if isinstance(call.distributed, MatrixBatch) else ()
        rows = list(zip(subgraph.gives, subgraph.leaves, dims, strict=True))
        cut += [names for _, names, dim in rows if dim is not None]
        left += [(var, names) for var, names, dim in rows if dim is None and names not in cut]
    size = largest.shape[choice]
    found = DistributedUpdate(_distinct(cut), matrix, times * size, times * -(-size // num))
    return [found, *_together(_each(left, TOGETHER))]


def _gathered(subgraphs: Sequence[UpdateSubgraph], why: str) -> list[DistributedUpdate]:
    """The report on subgraphs that every device runs."""
    found = []
    for subgraph in subgraphs:
        pairs = list(zip(subgraph.gives, subgraph.leaves, strict=True))
        if len({names for _, names in pairs if names}) > 1:
            found += _each(pairs, TOGETHER if why == ALONE else why)
        else:
            largest = _update_subgraphs.largest_read(subgraph).aval
            leaves, matrix = _distinct(subgraph.leaves), _matrix(largest.shape, largest)
            found.append(DistributedUpdate(leaves, matrix, 1, 1, why))
    return list(_together(found))


def _each(pairs: Sequence[tuple[Var, tuple[str, ...]]], why: str) -> list[DistributedUpdate]:
    """The report on several matrices that one subgraph updates, one entry for each result."""
    results = {names: var.aval for var, names in reversed(pairs) if names and var.aval.ndim > 1}
    return [
        DistributedUpdate(names, _matrix(aval.shape, aval), 1, 1, why)
        for names, aval in reversed(results.items())
    ]


def _matrix(shape: Sequence[int], like: Any) -> str:
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return describe_leaf("", shape, like.dtype).strip()


def _distinct(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))


# --------------------------------------------------------------------------------------------------
# Buckets and batches.


def _bucket(frame: Frame, subgraphs: Sequence[UpdateSubgraph]) -> list[UpdateCall]:
    reads = (subgraph.reads for subgraph in subgraphs)
    shared = tuple(len(set(slot)) == 1 for slot in zip(*reads, strict=True))
    bucket = MatrixBucket(tuple(subgraphs), shared, _update(frame, subgraphs[0]))
    return [UpdateCall([*subgraphs], bucket)]


def _batch(
    frame: Frame, subgraphs: Sequence[UpdateSubgraph], dim: int, axes: Mapping[str, int]
) -> list[UpdateCall] | str:
    """Each subgraph as a batch along a dim of its largest operand; or why it is none."""
    first = subgraphs[0]
    size = _update_subgraphs.largest_read(first).aval.shape[dim]
    dims = tuple(_dim_of(var, dim, size) for var in first.reads)
    program = _on_slices(_update(frame, first), dims, math.prod(axes.values()))
    if move := next(filter(is_of_rows, program.moves), None):
        return f"its {move.operation} needs dim {dim} whole"
    if why := _why_reduced(Region(program.jaxpr, program.consts), dim):
        return why
    places = [layout.place(_SLICES) for layout in program.outs]
    gives = tuple(None if place is None else place[0] for place in places)
    return [UpdateCall([subgraph], MatrixBatch(subgraph, dims, gives)) for subgraph in subgraphs]


def _on_slices(flat: _rewrite.Flat, dims: Sequence[int | None], num: int) -> DeviceProgram:
    """One device's program of an update whose operands are sharded along their batch dim."""
    layouts = [replicated(x.aval.shape, {_SLICES: num}) for x in flat.invars]
    ins = [*map(DeviceInput, layouts)]
    for k, dim in enumerate(dims):
        if dim is not None:
            ins[k] = DeviceInput(layouts[k].cut(dim, _SLICES), frozenset([_SLICES]))
    outs = [None] * len(flat.outvars)
    return partition(flat, [], {_SLICES: num}, ins, outs, keeps_padding=True)


def _update(frame: Frame, subgraph: UpdateSubgraph) -> _rewrite.Flat:
    eqns = [frame.jaxpr.eqns[i] for i in subgraph.eqns]
    return _rewrite.Flat([], [*subgraph.reads], [*subgraph.gives], eqns)


def _why_reduced(body: Region, dim: int) -> str:
    """Why an update of some slices needs the other devices; '' if it does not."""
    found = [
        (subgraph, eqn) for subgraph, eqn in body.walk() if eqn.primitive in _jaxpr.COLLECTIVES
    ]
    tests = [
        subgraph.inner(eqn)[0] for subgraph, eqn in body.walk() if eqn.primitive.name == "while"
    ]
    # Each device could decide alone whether its slices go on, but such a loop cannot be written as a call.
    of_slices = any(test.jaxpr.outvars[0].aval.ndim for test in tests)
    if of_slices or any(subgraph is test for subgraph, _ in found for test in tests):
        return "its loop ends when all slices are done"
    return f"it reduces dim {dim}" if found else ""


def _dim_of(var: Var, dim: int, size: int) -> int | None:
    """The batch dim of an operand: a dim of that size, preferably `dim`; None if it has none.

    Shapes do not say which it is. A wrong guess is detected: the program would then communicate.
    """
    shape = var.aval.shape
    found = sorted(
        (d for d, n in enumerate(shape) if n == size and len(shape) > 1), key=lambda d: d != dim
    )
    return found[0] if found else None


# --------------------------------------------------------------------------------------------------
# Equations in order: [Note: bucket calls].


def _gives(subgraphs: Sequence[UpdateSubgraph]) -> list[Var]:
    return [var for subgraph in subgraphs for var in subgraph.gives]


def _indices(call: UpdateCall) -> list[int]:
    return sorted(i for subgraph in call.subgraphs for i in subgraph.eqns)


def _order(frame: Frame, calls: Sequence[UpdateCall]) -> list[int] | None:
    """Equations by index, each call as its last one; None if a call would depend on its own results."""
    eqns = frame.jaxpr.eqns
    node_of = list(range(len(eqns)))
    for call in calls:
        indices = _indices(call)
        for i in indices:
            node_of[i] = indices[-1]
    maker = {out: node_of[i] for i, eqn in enumerate(eqns) for out in eqn.outvars}
    waits: dict[int, set[int]] = {node: set() for node in node_of}
    for i, eqn in enumerate(eqns):
        waits[node_of[i]] |= {maker[v] for v in variables(eqn.invars) if v in maker}
    for node, before in waits.items():
        before.discard(node)
    return _topological(waits)


def _with_calls(frame: Frame, calls: Sequence[UpdateCall]) -> Frame:
    """The frame, in which equations became calls; facts about its values stay."""
    jaxpr, eqns, order = frame.jaxpr, frame.jaxpr.eqns, _order(frame, calls)
    assert order is not None
    written = dict[int, Eqn]()
    for call in calls:
        indices = _indices(call)
        reads = variables(var for subgraph in call.subgraphs for var in subgraph.reads)
        written[indices[-1]] = _rewrite.boxed(
            [eqns[i] for i in indices], reads, _gives(call.subgraphs)
        )
    new = [written.get(node, eqns[node]) for node in order]
    flat = _rewrite.Flat([*jaxpr.constvars], [*jaxpr.invars], [*jaxpr.outvars], new)
    return frame.of(flat)  # type: ignore[arg-type]


def _topological(waits: Mapping[int, set[int]]) -> list[int] | None:
    """Topological order of nodes, the smallest first among several; None if there is a cycle."""
    sorter = graphlib.TopologicalSorter(waits)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    order, ready = list[int](), list[int]()
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, node)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order
