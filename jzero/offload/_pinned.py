"""Streams what rests in the hosts' pinned memory through the devices, so many bytes at a time."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax


class Visit(NamedTuple):
    """A turn of offloaded leaves on the devices.

    Attributes:
      nbytes: of them, on each device.
      fetch: starts their copies to the devices.
      update: given these, starts their update and then the copies back to the host, which it returns; if
        there are none, what is there when the update is over.
    """

    nbytes: int
    fetch: Callable[[], Any]
    update: Callable[[Any], list[jax.Array]]


def stream(visits: Iterable[Visit], device_bytes: int) -> None:
    """Makes all visits, in order, with at most `device_bytes` of offloaded leaves on each device.

    A visit's copies to the device start before the update of the visit before; nothing waits but for room,
    and for the last copies to the host::

        fetch 1, fetch 2, update 1, fetch 3 (when 1 is back on the host), update 2, ...
    """
    held = 0
    fetched: collections.deque[tuple[Visit, Any]] = collections.deque()
    leaving: collections.deque[tuple[int, list[jax.Array]]] = collections.deque()

    def update_next() -> None:
        visit, arrays = fetched.popleft()
        leaving.append((visit.nbytes, visit.update(arrays)))

    for visit in visits:
        while held and held + visit.nbytes > device_bytes:
            if not leaving:
                update_next()
            nbytes, copies = leaving.popleft()
            jax.block_until_ready(copies)
            held -= nbytes
        fetched.append((visit, visit.fetch()))
        held += visit.nbytes
        if len(fetched) > 1:
            update_next()
    while fetched:
        update_next()
    jax.block_until_ready([copies for _, copies in leaving])
