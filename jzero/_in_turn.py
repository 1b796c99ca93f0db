# SPDX-License-Identifier: Apache-2.0
"""Cuts a sequence into groups of limited bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def groups(
    things: Iterable[Any], limit: int, nbytes: Callable[[Any], int] = lambda thing: thing.nbytes
) -> Iterator[list[Any]]:
    """Cuts a sequence into consecutive groups of at most `limit` bytes, or of one thing that has more."""
    group: list[Any] = []
    held = 0
    for thing in things:
        if group and held + nbytes(thing) > limit:
            yield group
            group, held = [], 0
        group.append(thing)
        held += nbytes(thing)
    if group:
        yield group
