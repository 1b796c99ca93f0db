# SPDX-License-Identifier: Apache-2.0
"""Streams what is stored on the hosts through the devices, so many bytes at a time."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax


def free(x: jax.Array) -> None:
    """Gives an array's memory back; in a trace of a step there is none."""
    if not isinstance(x, jax.core.Tracer):
        x.delete()


class Visit(NamedTuple):
    """A bucket of offloaded leaves on the devices.

    Attributes:
      nbytes: of them, on each device.
      fetch: starts their copies to the devices.
      update: given these, starts their update and then the copies back to the host, which it returns; if
        there are none, what is there when the update is over.
      over: called when these are there; visits end in their order.
      reads: what `fetch` needs of files.
      counts: whether it counts among those under way: it runs more than a change of names.
    """

    nbytes: int
    fetch: Callable[[], Any]
    update: Callable[[Any], list[jax.Array]]
    over: Callable[[], None] = lambda: None
    reads: Sequence[Any] = ()
    counts: bool = True


def stream(visits: Iterable[Visit | None], device_bytes: int, under_way: int | None = None) -> None:
    """Makes all visits, in order, with at most `device_bytes` of offloaded leaves on each device.

    A visit's copies to the device start before the update of the visit before; nothing waits but for room,
    and for the last copies to the host::

        fetch 1, fetch 2, update 1, fetch 3 (when 1 is back on the host), update 2, ...

    A visit of no bytes does not count as the one before. None stands where the visits that follow depend on
    what updates make: all before it have started when the next one is asked for.

    Args:
      visits: to be made.
      device_bytes: of the leaves that they fetch.
      under_way: a visit fetches when all updates but so many are over, whatever room there is: with what is
        not counted in bytes, so many visits and two more are on the device. None: as many as there is room.
    """
    held = 0
    fetched: collections.deque[tuple[Visit, Any]] = collections.deque()
    leaving: collections.deque[tuple[Visit, list[jax.Array]]] = collections.deque()

    def update_next() -> None:
        visit, arrays = fetched.popleft()
        leaving.append((visit, visit.update(arrays)))

    def end_next() -> int:
        visit, copies = leaving.popleft()
        jax.block_until_ready(copies)
        visit.over()
        return visit.nbytes

    def is_full(nbytes: int) -> bool:
        waits = under_way is not None and sum(v.counts for v, _ in leaving) > under_way
        return waits or (held > 0 and held + nbytes > device_bytes)

    for visit in visits:
        if visit is None:
            while fetched:
                update_next()
            continue
        while is_full(visit.nbytes):
            if not leaving:
                update_next()
            held -= end_next()
        fetched.append((visit, visit.fetch()))
        held += visit.nbytes
        while fetched and (not fetched[0][0].nbytes or sum(v.nbytes > 0 for v, _ in fetched) > 1):
            update_next()
    while fetched:
        update_next()
    while leaving:
        end_next()
