# SPDX-License-Identifier: Apache-2.0
"""Streams offloaded leaves through the devices, within a memory budget."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax


def free(x: jax.Array) -> None:
    """Frees an array now; a tracer, in a trace of a step, has no memory."""
    if not isinstance(x, jax.core.Tracer):
        x.delete()


class StreamSlot(NamedTuple):
    """What is on the devices at a time: some offloaded leaves, and the program that takes them."""

    nbytes: int  # of the leaves, on each device
    fetch: Callable[[], Any]  # starts their copies to the devices
    # Starts the program with what was fetched; returns what to wait for: the copies back to the host, if
    # any.
    update: Callable[[Any], list[jax.Array]]
    over: Callable[[], None] = lambda: None  # called when these are there, in the order of slots
    reads: Sequence[Any] = ()  # what `fetch` needs from files
    counts: bool = True  # whether it counts in `under_way`: it runs more than a change of names


def stream(
    slots: Iterable[StreamSlot | None], device_bytes: int, under_way: int | None = None
) -> None:
    """Runs streaming slots in order, with at most `device_bytes` of fetched leaves on each device.

    The copies of a slot start before the update of the slot before; nothing waits but for memory, and for the
    last copies to the host::

        fetch 1, fetch 2, update 1, fetch 3 (when 1 is back on the host), update 2, ...

    A slot of no bytes does not count as the one before. None stands where later slots depend on the results
    of updates: all before it have started when the next one is requested. With `under_way`, a slot is fetched
    only when at most so many started updates are not over, which bounds what `nbytes` does not count.
    """
    held = 0
    fetched: collections.deque[tuple[StreamSlot, Any]] = collections.deque()
    leaving: collections.deque[tuple[StreamSlot, list[jax.Array]]] = collections.deque()

    def update_next() -> None:
        slot, arrays = fetched.popleft()
        leaving.append((slot, slot.update(arrays)))

    def end_next() -> int:
        slot, copies = leaving.popleft()
        jax.block_until_ready(copies)
        slot.over()
        return slot.nbytes

    def is_full(nbytes: int) -> bool:
        waits = under_way is not None and sum(v.counts for v, _ in leaving) > under_way
        return waits or (held > 0 and held + nbytes > device_bytes)

    for slot in slots:
        if slot is None:
            while fetched:
                update_next()
            continue
        while is_full(slot.nbytes):
            if not leaving:
                update_next()
            held -= end_next()
        fetched.append((slot, slot.fetch()))
        held += slot.nbytes
        while fetched and (not fetched[0][0].nbytes or sum(v.nbytes > 0 for v, _ in fetched) > 1):
            update_next()
    while fetched:
        update_next()
    while leaving:
        end_next()
