# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: the operations of a step, in order, and the table that `print` shows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jzero._memory_kinds import DEVICE, HostNeed
from jzero._quantities import readable_bytes
from jzero.offload.schedule._ops import (
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
    value_of,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What a step does, in order; `print` it."""

    ops: tuple[Op, ...]
    buffers: tuple[HostNeed, ...] = ()  # on each device's host, for data in transfer

    def __str__(self) -> str:
        lines = [HEADER]
        for row in rows(self.ops):
            size = "" if row.nbytes is None else readable_bytes(row.nbytes)
            lines.append(("  " * row.depth + row.op, row.what, size, row.link))
        first, what, nbytes = (max(len(line[i]) for line in lines) for i in range(3))
        return "\n".join(
            f"{op:<{first}}  {what_:<{what}}  {size:>{nbytes}}  {link}".rstrip()
            for op, what_, size, link in lines
        )

    def __repr__(self) -> str:
        return f"<Schedule: {len(self.ops)} operations; print it>"


class Row(NamedTuple):
    op: str
    what: str
    nbytes: int | None = None  # that move on each device in an iteration; None if nothing does
    link: str = ""
    depth: int = 0  # how many loops are around it


HEADER = ("operation", "what", "each device", "link")


def rows(ops: Sequence[Op], depth: int = 0, iterations: int = 1) -> Iterator[Row]:
    """The lines of operations, inside loops of `iterations` in all."""
    shown = [op for op in ops if not (isinstance(op, Run) and not op.program)]
    for name, group in itertools.groupby(shown, lambda op: _kind(op)[0]):
        kinds: dict[tuple[str, str, str], list[Op]] = {}
        for op in group:
            for each in _each(op):
                kinds.setdefault(_kind(each), []).append(each)
        for (_, _, link), found in kinds.items():
            for row in _rows(name, found, link, depth, iterations):
                yield row if row.depth else row._replace(depth=depth)


def _each(op: Op) -> Iterator[Op]:
    """An operation on several values as one for each."""
    if isinstance(op, Fetch | Send):
        yield from (dataclasses.replace(op, refs=(ref,)) for ref in op.refs)
    else:
        yield op


def _rows(name: str, ops: Sequence[Op], link: str, depth: int, iterations: int) -> Iterator[Row]:
    moved, inside = list[Ref](), list[Fetch]()
    for op in ops:
        match op:
            case Loop(body, length, where):
                what = "a while loop" if length is None else f"{length} iterations"
                yield Row(name, f"{what} at {where}" if where else what)
                yield from rows(body, depth + 1, length or 1)
            case Run(program, transfers=transfers):
                yield Row(name, program)
                yield from rows(transfers, depth + 1, iterations)
            case Commit():
                yield Row(name, "what was written")
            case Update(leaves=refs, transfers=transfers):
                moved, inside = [*moved, *refs], [*inside, *transfers]
            case Fetch(refs=refs) | Send(refs=refs):
                moved += refs
            case Wait(value):
                moved.append(value)
    if moved:
        nbytes = sum(
            value_of(ref).nbytes // (iterations if isinstance(ref, Slice) else 1) for ref in moved
        )
        slices = ", a slice of each" * any(isinstance(ref, Slice) for ref in moved)
        yield Row(name, _values([*map(value_of, moved)]) + slices, nbytes, link)
    yield from rows(inside, depth + 1, iterations)


def _kind(op: Op) -> tuple[str, str, str]:
    """The name of an operation, what separates it from its neighbours of that name, and its link."""
    match op:
        case Fetch(refs, store):
            return "fetch", _kind_of(refs), f"{store} -> {DEVICE}"
        case Send(refs, store):
            return "send", _kind_of(refs), f"{DEVICE} -> {store}"
        case Wait(value):
            return "wait", value.what, "on the host, between the passes"
        case Update(store, delayed=delayed):
            late = ", with the gradients of the step before" * delayed
            return "update", "", f"on the host, in {store}{late}"
    return type(op).__name__.lower(), "", ""


def _kind_of(refs: Sequence[Ref]) -> str:
    kinds = {f"{value_of(ref).what} {isinstance(ref, Slice)}" for ref in refs}
    return " ".join(sorted(kinds))


def _values(values: Sequence[Value]) -> str:
    counts: dict[str, int] = {}
    for value in values:
        counts[value.what] = counts.get(value.what, 0) + 1
    return ", ".join(f"{num} x {what}" for what, num in counts.items())
