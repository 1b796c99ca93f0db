# SPDX-License-Identifier: Apache-2.0
"""A schedule of other values, without its programs: what an estimate scales."""

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
