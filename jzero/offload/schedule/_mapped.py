# SPDX-License-Identifier: Apache-2.0
"""The same schedule of other values: what moves when, without the programs that would do it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

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

Map = Callable[[Value], Value | None]


def mapped(ops: Sequence[Op], to: Map) -> tuple[Op, ...]:
    """The operations on `to` of each value; what has none is left out, and so are operations of nothing."""
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
            case Update(store, leaves, takes, gives, copies, delayed, rides=rides):
                made = tuple(map(value_of, _refs(gives, to)))
                back = tuple(x for x in _mapped(rides, to) if isinstance(x, Fetch))
                yield Update(
                    store, _refs(leaves, to), _refs(takes, to), made, copies, delayed, rides=back
                )
            case Run(program, index=index, rides=rides):
                riding = tuple(x for x in _mapped(rides, to) if isinstance(x, Fetch | Send))
                yield Run(program, index=index, rides=riding)
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
