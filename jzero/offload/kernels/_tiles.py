# SPDX-License-Identifier: Apache-2.0
"""Tiles: ranges of elements of leaves that are updated together, so many bytes of state at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jzero.offload.nvme._layout import LINE

# Elements: a range that is cut is cut there, so that every part but a leaf's last fills whole vectors.
GRAIN = 64


class Together(NamedTuple):
    """Leaves that are updated together, element by element.

    Attributes:
      leaves: of the state, by index; none if what they make reads no state.
      itemsizes: of each.
      size: elements of each.
      chunk: with which others it is complete.
    """

    leaves: tuple[int, ...]
    itemsizes: tuple[int, ...]
    size: int
    chunk: int

    def nbytes(self, count: int) -> int:
        """Of so many elements of each leaf in a tile."""
        return sum(-(-count * itemsize // LINE) * LINE for itemsize in self.itemsizes)


class Span(NamedTuple):
    """A range of elements of leaves that are updated together.

    Attributes:
      together: which of them, by index.
      first: its first element.
      num: how many elements.
    """

    together: int
    first: int
    num: int


class Tile(NamedTuple):
    """What is updated at a time.

    Attributes:
      spans: what is in it.
      chunk: of which it is a part.
    """

    spans: tuple[Span, ...]
    chunk: int


def cut(found: Sequence[Together], tile_bytes: int) -> Iterator[Tile]:
    """Tiles of up to `tile_bytes`, or `least_bytes`, in order; none has parts of two chunks."""
    tile_bytes = max(tile_bytes, least_bytes(found))
    for chunk, members in itertools.groupby(enumerate(found), lambda pair: pair[1].chunk):
        spans: list[Span] = []
        room = tile_bytes
        for index, each in members:
            first = 0
            while first < each.size:
                count = _fitting(each, each.size - first, room)
                if count:
                    spans.append(Span(index, first, count))
                    first, room = first + count, room - each.nbytes(count)
                else:
                    yield Tile(tuple(spans), chunk)
                    spans, room = [], tile_bytes
        if spans:
            yield Tile(tuple(spans), chunk)


def least_bytes(found: Sequence[Together]) -> int:
    """Of the smallest tile that can be made."""
    return max((each.nbytes(min(GRAIN, each.size)) for each in found), default=0)


def _fitting(each: Together, wanted: int, room: int) -> int:
    """How many of the wanted elements have room."""
    if each.nbytes(wanted) <= room:
        return wanted
    # A multiple of GRAIN elements fills whole lines, of any dtype.
    return room // each.nbytes(GRAIN) * GRAIN
