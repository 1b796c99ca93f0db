# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: what a step does, in order; and its table, a line for operations of one kind side by side."""

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
    """What a step does, in order; `print` it.

    Attributes:
      ops: the operations.
      buffers: memory of each device's host through which values pass, whatever is under way.
    """

    ops: tuple[Op, ...]
    buffers: tuple[HostNeed, ...] = ()

    def __str__(self) -> str:
        lines = [HEADER, *map(_cells, rows(self.ops))]
        first, what, nbytes = (max(len(line[i]) for line in lines) for i in range(3))
        return "\n".join(
            f"{op:<{first}}  {what_:<{what}}  {size:>{nbytes}}  {link}".rstrip()
            for op, what_, size, link in lines
        )

    def __repr__(self) -> str:
        return f"<Schedule: {len(self.ops)} operations; print it>"


class Row(NamedTuple):
    """A line.

    Attributes:
      op: what is done.
      what: with what.
      nbytes: that move, on each device; in a loop, in each iteration. None if nothing does.
      link: from where to where.
      depth: how many loops are around it.
    """

    op: str
    what: str
    nbytes: int | None = None
    link: str = ""
    depth: int = 0


HEADER = ("operation", "what", "each device", "link")


def _cells(row: Row) -> tuple[str, str, str, str]:
    return (
        "  " * row.depth + row.op,
        row.what,
        "" if row.nbytes is None else readable_bytes(row.nbytes),
        row.link,
    )


def rows(ops: Sequence[Op], depth: int = 0, iterations: int = 1) -> Iterator[Row]:
    """The lines of operations, of which loops around them run so many times."""
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
    """What moves several values, as so many operations."""
    if isinstance(op, Fetch | Send):
        yield from (dataclasses.replace(op, refs=(ref,)) for ref in op.refs)
    else:
        yield op


def _rows(name: str, ops: Sequence[Op], link: str, depth: int, iterations: int) -> Iterator[Row]:
    moved, riding = list[Ref](), list[Fetch]()
    for op in ops:
        match op:
            case Loop(body, length, where):
                what = "a while loop" if length is None else f"{length} iterations"
                yield Row(name, f"{what} at {where}" if where else what)
                yield from rows(body, depth + 1, length or 1)
            case Run(program, rides=rides):
                yield Row(name, program)
                # Below the program whose part it is.
                yield from rows(rides, depth + 1, iterations)
            case Commit():
                yield Row(name, "what was written")
            case Update(leaves=refs, rides=rides):
                moved, riding = [*moved, *refs], [*riding, *rides]
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
    yield from rows(riding, depth + 1, iterations)


def _kind(op: Op) -> tuple[str, str, str]:
    """Its name, what tells neighbours of one name apart, and between which memories it moves something."""
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
