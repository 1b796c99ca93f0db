# SPDX-License-Identifier: Apache-2.0
"""What follows from a schedule: bytes on each link, memory of the hosts, live values between programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jzero._memory_kinds import NVME, PINNED, HostNeed
from jzero.offload.schedule._ops import (
    HANDED_ON,
    Commit,
    Fetch,
    Loop,
    Op,
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
WAYS, DISK_WAYS = (TO_HOST, TO_DEVICE), (FROM_DISK, TO_DISK)
PARTS = FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "update"
_UNDER_WAY = "gradients and parameters on their way"


class Iterations(NamedTuple):
    """A loop with a transfer in each iteration."""

    where: str  # the user's line
    num: int | None  # in a step, of all loops around; None for a `while`


class Transfer(NamedTuple):
    """What each device and its host, or the host and its disk, copy in a step."""

    direction: str  # 'to host', 'to device', 'to disk' or 'from disk'
    what: str
    dtype: str
    elements: int  # of each device's part, padding included; of a `while`, in each iteration
    nbytes: int
    loop: Iterations | None = None  # the innermost loop in which it is repeated
    part: str = ""  # of the step: a pass, or the update

    @property
    def each_iteration(self) -> bool:
        """Whether the numbers are of one iteration of a `while`."""
        return self.loop is not None and self.loop.num is None


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    found, waits, in_files, updates = list[Transfer](), list[Wait](), set[Value](), False
    for op, around in flat(schedule.ops):
        moved = [value_of(ref).what for ref in op.refs] if isinstance(op, Fetch | Send) else []
        # From the first copy for the devices' update on, no pass reads what is moved.
        begins = "optimizer state" in moved or (isinstance(op, Fetch) and "gradient" in moved)
        updates = updates or begins
        part = UPDATE if updates else _pass_of(op, around)
        match op:
            case Fetch(refs, store):
                directions = (FROM_DISK, TO_DEVICE) if store == NVME else (TO_DEVICE,)
                found += _transfers(refs, directions, around, part)
            case Send(refs, store):
                directions = (TO_HOST, TO_DISK) if store == NVME else (TO_HOST,)
                found += _transfers(refs, directions, around, part)
                in_files |= {*map(value_of, refs)} if store == NVME else set()
            case Update(store, leaves, takes):
                if store == NVME:
                    for direction in DISK_WAYS:
                        found += _transfers([*map(value_of, leaves)], (direction,), (), part)
                waited = [value_of(ref) for ref in takes if value_of(ref) in in_files]
                found += (_transfer(FROM_DISK, x, part) for x in waited)
                updates = updates or not around
            case Wait():
                waits.append(op)
    for direction, part in ((TO_HOST, FORWARD), (TO_DEVICE, BACKWARD)):
        found += (_transfer(direction, x.value, part, times=x.times) for x in waits)
    return tuple(found)


def _pass_of(op: Op, around: Sequence[Loop]) -> str:
    """The part of a step in which an operation moves something, until the devices update."""
    if around:  # Loops of derivatives run in reverse.
        return BACKWARD if any(loop.reverse for loop in around) else FORWARD
    # A program that has ended made what is sent after all loops: nothing hides the copy.
    return FORWARD if isinstance(op, Fetch) else UPDATE


def _transfers(
    refs: Sequence[Ref], directions: Sequence[str], around: Sequence[Loop], part: str
) -> Iterator[Transfer]:
    """A slice of each iteration counts as the whole stack, outside the innermost loop."""
    for ref in refs:
        loop = _iterations(around[:-1] if isinstance(ref, Slice) else around)
        yield from (_transfer(direction, value_of(ref), part, loop) for direction in directions)


def _transfer(
    direction: str, value: Value, part: str, loop: Iterations | None = None, times: int = 1
) -> Transfer:
    times *= loop.num or 1 if loop else 1
    return Transfer(
        direction, value.what, value.dtype, times * value.elements, times * value.nbytes, loop, part
    )


def _iterations(around: Sequence[Loop]) -> Iterations | None:
    if not around:
        return None
    nums = [loop.length for loop in around]
    num = None if None in nums else math.prod(n for n in nums if n is not None)
    return Iterations(around[-1].where, num)


class Held(NamedTuple):
    """A value in pinned memory of each device's host, from its copy until the end of the step."""

    what: str
    # 'incoming', 'outgoing', 'delayed' to the next step, or 'waiting' for the backward pass
    does: str
    nbytes: int  # of all copies
    copies: int = 1


def held(schedule: Schedule) -> Iterator[Held]:
    for op, _ in flat(schedule.ops):
        match op:
            case Send(refs, store, copies=copies, waits=waits) if store == PINNED and copies:
                for value in map(value_of, refs):
                    yield Held(value.what, "waiting" if waits else "incoming", value.nbytes)
                    if copies > 1:
                        yield Held(value.what, "delayed", (copies - 1) * value.nbytes)
            case Update(gives=gives, copies=copies):
                yield from (Held(x.what, "outgoing", copies * x.nbytes, copies) for x in gives)
            case Wait(value, copies=copies):
                yield Held(value.what, "waiting", copies * value.nbytes)


def host_needs(schedule: Schedule) -> tuple[HostNeed, ...]:
    """Memory of each device's host that a step takes, besides the stored state."""
    waiting = under_way = 0
    for each in held(schedule):
        waiting += each.nbytes * (each.does == "waiting")
        under_way += each.nbytes * (each.does != "waiting")
    needs = HostNeed(_UNDER_WAY, PINNED, under_way), HostNeed("activations", PINNED, waiting)
    return tuple(need for need in (*needs, *schedule.buffers) if need.nbytes)


def updated_bytes(schedule: Schedule) -> dict[str, int]:
    """Bytes of optimizer state that a device's share of its host updates, by part of the step."""
    found = dict.fromkeys(PARTS, 0)
    for op, around in flat(schedule.ops):
        if isinstance(op, Update):
            values = map(value_of, op.leaves)
            nbytes = sum(x.nbytes for x in values if x.what == "optimizer state")
            found[_pass_of(op, around)] += nbytes
    return found


def handed_bytes(schedule: Schedule) -> int:
    """The most bytes on each device that live between programs of a step; 0 if there is one."""
    # What a loop leaves counts from the loop's beginning.
    parts = [op for op in schedule.ops if isinstance(op, (Run, Loop))]
    last = {value: i for i, part in enumerate(parts) for value in part.takes}
    most, alive = 0, set[Ref]()
    for i, part in enumerate(parts):
        handed = [x for x in part.gives if value_of(x).what == HANDED_ON]
        alive |= {value for value in handed if last.get(value, -1) > i}
        most = max(most, sum(value_of(x).nbytes for x in alive))
        alive = {value for value in alive if last[value] > i}
    return most


Map = Callable[[Value], Value | None]


def mapped(ops: Sequence[Op], to: Map) -> tuple[Op, ...]:
    """The operations on `to(value)`; values without one, and operations on no value, are left out."""
    return tuple(_mapped(ops, to))


def _mapped(ops: Sequence[Op], to: Map) -> Iterator[Op]:
    for op in ops:
        match op:
            case Fetch(refs, store):
                if moved := _refs(refs, to):
                    yield Fetch(moved, store)
            case Send(refs, store, copies=copies, waits=waits):
                if moved := _refs(refs, to):
                    yield Send(moved, store, copies=copies, waits=waits)
            case Wait(value):
                if (new := to(value)) is not None:
                    yield dataclasses.replace(op, value=new)
            case Update(store, leaves, takes, gives, copies, delayed, transfers=inside):
                made = tuple(map(value_of, _refs(gives, to)))
                back = tuple(x for x in _mapped(inside, to) if isinstance(x, Fetch))
                taken = _refs(leaves, to), _refs(takes, to)
                yield Update(store, *taken, made, copies, delayed, transfers=back)
            case Run(program, transfers=inside):
                copied = tuple(x for x in _mapped(inside, to) if isinstance(x, Fetch | Send))
                yield Run(program, transfers=copied)
            case Loop(body, length, where, reverse=reverse):
                yield Loop(mapped(body, to), length, where, reverse=reverse)
            case Commit():
                yield op


def _refs(refs: Iterable[Ref], to: Map) -> tuple[Ref, ...]:
    found = list[Ref]()
    for ref in refs:
        if (new := to(value_of(ref))) is not None:
            found.append(Slice(new, ref.ahead) if isinstance(ref, Slice) else new)
    return tuple(found)
