# SPDX-License-Identifier: Apache-2.0
"""Last uses of values, computed from the list of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from jzero._memory_kinds import NVME
from jzero.offload.schedule._ops import (
    Fetch,
    Loop,
    Op,
    Ref,
    Run,
    Send,
    Slice,
    Update,
    Value,
    with_transfers,
)


@dataclasses.dataclass(frozen=True)
class Stack:
    """All slices of a stack, as they are known outside the loop that makes or reads them."""

    of: Value


Name = Ref | Stack


@dataclasses.dataclass
class Live:
    here: set[Name]  # on the devices
    there: set[Name]  # in stores


@dataclasses.dataclass(frozen=True)
class Dead:
    here: tuple[Ref, ...] = ()  # on the devices
    there: tuple[Ref, ...] = ()  # in stores


NOTHING = Dead()


def dead_after(
    ops: Sequence[Op], here: Collection[Value], there: Collection[Value]
) -> dict[int, Dead]:
    """What nothing reads any more after each operation, by the operation's identity, within loops too.

    A value lives until its last reader, or until an operation makes it anew: of what is fetched twice, the
    first copy is dropped after its last reader. `here` (on devices) and `there` (in stores) are read at the
    end.
    """
    found: dict[int, Dead] = {}
    _walk(ops, Live({*here}, {*there}), found)
    return found


def _walk(ops: Sequence[Op], live: Live, found: dict[int, Dead]) -> None:
    """Goes backward over the operations, from what is live after them to what is live before them."""
    for op in reversed([*with_transfers(ops)]):
        if isinstance(op, Loop):
            _walk_loop(op, live, found)
            continue
        reads, makes = _here(op)
        reads_there, makes_there = _there(op)
        # What goes into files from the devices stays until it is written.
        stays = isinstance(op, Send) and not op.places and not op.by
        found[id(op)] = Dead(
            () if stays else tuple(_unneeded([*reads, *makes], live.here)),
            tuple(_unneeded([*reads_there, *makes_there], live.there)),
        )
        live.here.difference_update(makes)
        live.here.update(reads)
        live.there.difference_update(makes_there)
        live.there.update(reads_there)


def _walk_loop(loop: Loop, live: Live, found: dict[int, Dead]) -> None:
    asked = {*loop.goes_on.takes} if loop.goes_on else set[Ref]()
    behind_here, behind_there = {*live.here}, {*live.there}
    _walk(loop.last, live, found)
    live.here, live.there = _before(live.here), _before(live.there)
    live.here |= asked
    begins = Live({*live.here}, {*live.there})
    for _ in range(2):  # An iteration's end needs what the next iteration reads of it.
        ends = Live(live.here | _before(begins.here), live.there | _before(begins.there))
        _walk(loop.body, ends, found)
        ends.here |= asked
        begins = ends
    # What iterations pass to each other, or all of them read.
    found[id(loop)] = Dead(
        tuple(x for x in _before(begins.here) - behind_here if isinstance(x, Value)),
        tuple(x for x in _before(begins.there) - behind_there if isinstance(x, Value)),
    )
    first = Live(_before(begins.here), _before(begins.there))
    _walk(loop.first, first, found)
    live.here, live.there = _around(first.here), _around(first.there)


def _before(names: Iterable[Name]) -> set[Name]:
    """Names as the iteration before knows them."""
    found = set[Name]()
    for name in names:
        found.add(Slice(name.of, name.ahead + 1) if isinstance(name, Slice) else name)
    return found


def _around(names: Iterable[Name]) -> set[Name]:
    return {Stack(name.of) if isinstance(name, Slice) else name for name in names}


def _unneeded(refs: Iterable[Ref], live: set[Name]) -> Iterable[Ref]:
    for ref in dict.fromkeys(refs):
        stack = isinstance(ref, Slice) and Stack(ref.of) in live
        if ref not in live and not stack:
            yield ref


def _here(op: Op) -> tuple[Sequence[Ref], Sequence[Ref]]:
    """What an operation reads of the devices, and makes there."""
    match op:
        case Fetch(refs):
            return (), refs
        case Run(takes=takes, gives=gives):
            return takes, gives
        case Send(refs):
            return refs, ()
    return (), ()


def _there(op: Op) -> tuple[Sequence[Ref], Sequence[Ref]]:
    """What an operation reads of the stores, and makes there."""
    match op:
        case Fetch(refs, store, by=by, frees=frees):
            if store == NVME:
                return (), ()
            read = [ref.of if isinstance(ref, Slice) else ref for ref in refs] if by else refs
            return (*read, *frees), ()
        case Send(refs, by=by):
            # Of a stack that a program writes its slices into, all are there with the last one.
            return ((), ()) if by else ((), refs)
        case Update(takes=takes, gives=gives):
            return takes, gives
    return (), ()
