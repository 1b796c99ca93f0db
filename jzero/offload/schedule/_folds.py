# SPDX-License-Identifier: Apache-2.0
"""What follows from a schedule: bytes over each link, memory of the hosts, what parts hand to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jzero._memory_kinds import NVME, PINNED, HostNeed
from jzero.offload.schedule._ops import (
    HANDED_ON,
    Fetch,
    Loop,
    Ref,
    Run,
    Send,
    Slice,
    Update,
    Value,
    Wait,
    flat,
    value_of,
)
from jzero.offload.schedule._schedule import Schedule

TO_HOST, TO_DEVICE = "to host", "to device"
TO_DISK, FROM_DISK = "to disk", "from disk"
_UNDER_WAY = "gradients and parameters on their way"


class Iterations(NamedTuple):
    """A loop in which something crosses in each iteration.

    Attributes:
      where: its line.
      num: how many iterations it has in a step; None for a `while`, of which nobody knows.
    """

    where: str
    num: int | None


class Crossing(NamedTuple):
    """What each device and its host copy to each other in a step.

    Attributes:
      direction: 'to host' or 'to device'; or between host and disk, 'to disk' or 'from disk'.
      what: 'gradient', 'parameter', 'optimizer state', ...
      dtype: of the elements.
      elements: in each device's part, padding included; of a `while`, in each iteration.
      nbytes: of these.
      loop: the innermost loop in whose iterations they cross again; None if they cross once.
    """

    direction: str
    what: str
    dtype: str
    elements: int
    nbytes: int
    loop: Iterations | None = None

    @property
    def each_iteration(self) -> bool:
        """Whether these are of one iteration of a `while`."""
        return self.loop is not None and self.loop.num is None


def crossings(schedule: Schedule) -> tuple[Crossing, ...]:
    """What each device copies to its host and back, and the host to files and from them."""
    found, waits, in_files = list[Crossing](), list[Wait](), set[Value]()
    for op, around in flat(schedule.ops):
        match op:
            case Fetch(refs, store):
                ways = (FROM_DISK, TO_DEVICE) if store == NVME else (TO_DEVICE,)
                found += _crossings(refs, ways, around)
            case Send(refs, store):
                ways = (TO_HOST, TO_DISK) if store == NVME else (TO_HOST,)
                found += _crossings(refs, ways, around)
                in_files |= {*map(value_of, refs)} if store == NVME else set()
            case Update(store, leaves, takes):
                moved = [*map(value_of, leaves)] if store == NVME else []
                found += (_crossing(way, x) for way in (FROM_DISK, TO_DISK) for x in moved)
                waited = [value_of(ref) for ref in takes if value_of(ref) in in_files]
                found += (_crossing(FROM_DISK, x) for x in waited)
            case Wait():
                waits.append(op)
    found += (_crossing(way, x.value, times=x.times) for way in (TO_HOST, TO_DEVICE) for x in waits)
    return tuple(found)


def _crossings(
    refs: Sequence[Ref], ways: Sequence[str], around: Sequence[Loop]
) -> Iterator[Crossing]:
    """Those of some values: of a slice of each iteration, all of the stack."""
    for ref in refs:
        loop = _iterations(around[:-1] if isinstance(ref, Slice) else around)
        yield from (_crossing(way, value_of(ref), loop) for way in ways)


def _crossing(way: str, value: Value, loop: Iterations | None = None, times: int = 1) -> Crossing:
    times *= loop.num or 1 if loop else 1
    return Crossing(
        way, value.what, value.dtype, times * value.elements, times * value.nbytes, loop
    )


def _iterations(around: Sequence[Loop]) -> Iterations | None:
    """The iterations of the last of these loops, each around the next."""
    if not around:
        return None
    nums = [loop.length for loop in around]
    num = None if None in nums else math.prod(n for n in nums if n is not None)
    return Iterations(around[-1].where, num)


def host_needs(schedule: Schedule) -> tuple[HostNeed, ...]:
    """What it takes of the memory of each device's host while it runs, besides the stored state.

    What goes down and comes up is there until the step is over.
    """
    under_way = waiting = 0
    for op, _ in flat(schedule.ops):
        match op:
            case Send(refs, store, copies=copies, waits=waits) if store == PINNED:
                nbytes = copies * sum(value_of(ref).nbytes for ref in refs)
                under_way, waiting = under_way + nbytes * (not waits), waiting + nbytes * waits
            case Update(gives=gives, copies=copies):
                under_way += copies * sum(x.nbytes for x in gives)
            case Wait(value, copies=copies):
                waiting += copies * value.nbytes
    needs = HostNeed(_UNDER_WAY, PINNED, under_way), HostNeed("activations", PINNED, waiting)
    return tuple(need for need in (*needs, *schedule.buffers) if need.nbytes)


def handed_bytes(schedule: Schedule) -> int:
    """The most bytes on each device of what parts of a step hand to later parts; 0 if it is one part.

    What a loop leaves behind counts from its beginning to the end of its last reader.
    """
    parts = [op for op in schedule.ops if isinstance(op, (Run, Loop))]
    last = {value: i for i, part in enumerate(parts) for value in part.takes}
    most, alive = 0, set[Ref]()
    for i, part in enumerate(parts):
        handed = [x for x in part.gives if value_of(x).what == HANDED_ON]
        alive |= {value for value in handed if last.get(value, -1) > i}
        most = max(most, sum(value_of(x).nbytes for x in alive))
        alive = {value for value in alive if last[value] > i}
    return most
