# SPDX-License-Identifier: Apache-2.0
"""The layout of tiles in a file: parts of leaves, one after the other."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

WHO = "jzero.NVMe"  # in messages: what the user called
LINE = 64  # Bytes of a cache line: kernels and JAX read an extent where it is.
# The least unit of tiles on a disk and of buffers; a multiple of what O_DIRECT asks for.
PAGE = 4096
# Name of a leaf, first byte, number of bytes, and whether it is lone.
LeafRange: TypeAlias = tuple[str, int, int] | tuple[str, int, int, bool]


class Extent(NamedTuple):
    leaf: str
    start: int  # first byte in the device's shard of the leaf
    nbytes: int
    offset: int  # in the tile, a multiple of 64 bytes
    lone: bool = False  # whether it is also read by itself: it has its own pages and checksum

    @property
    def pages(self) -> tuple[int, int]:
        """The first and last byte in the tile of the pages of a lone extent."""
        return self.offset, self.offset + whole_pages(self.nbytes)


@dataclasses.dataclass(frozen=True)
class TileLayout:
    """The tiles of one file, and the extents of each, as they are stored on the disk.

    A tile has all leaves of one range of elements, so that an update of that range is one read and one write.

    >>> layout = TileLayout.of([[("w", 0, 100), ("m", 0, 100)], [("w", 100, 40), ("m", 100, 40)]])
    >>> layout.tiles[1][1]
    Extent(leaf='m', start=100, nbytes=40, offset=64, lone=False)
    >>> layout.most_bytes
    4096
    >>> layout.of_leaf("m", 90, 110)
    [(0, 1), (1, 1)]

    A lone extent has pages of its own, and a checksum of its own:

    >>> layout = TileLayout.of([[("m", 0, 100), ("w", 0, 50, True), ("x", 0, 50, True)]])
    >>> [extent.offset for extent in layout.tiles[0]], layout.checked[0]
    ([0, 4096, 8192], [(0, 4096), (4096, 8192), (8192, 12288)])
    """

    tiles: tuple[tuple[Extent, ...], ...]

    @classmethod
    def of(cls, tiles: Iterable[Sequence[LeafRange]]) -> TileLayout:
        """Lays out `(leaf, start, nbytes)`, in bytes, or lone `(leaf, start, nbytes, True)`, of each tile."""
        return cls(tuple(map(_packed, tiles)))

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest tile on the disk; the size of a buffer."""
        return max(self.nbytes, default=0)

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Bytes of each tile on the disk: multiples of 4096."""
        ends = (tile[-1].offset + tile[-1].nbytes if tile else 0 for tile in self.tiles)
        return [*map(whole_pages, ends)]

    @functools.cached_property
    def checked(self) -> list[list[tuple[int, int]]]:
        """The ranges of bytes of each tile with a checksum each, in order; together they are all of it."""
        found = []
        for nbytes, extents in zip(self.nbytes, self.tiles, strict=True):
            ends = {end for extent in extents if extent.lone for end in extent.pages}
            found.append(list(itertools.pairwise(sorted({0, nbytes, *ends}))))
        return found

    @functools.cached_property
    def first_checksums(self) -> list[int]:
        """The index of each tile's first checksum in the file; then how many there are."""
        return list(itertools.accumulate(map(len, self.checked), initial=0))

    def checksum_of(self, tile: int, i: int) -> int:
        return self.first_checksums[tile] + self.checked[tile].index(self.tiles[tile][i].pages)

    def views(self, tile: int, buffer: np.ndarray) -> list[np.ndarray]:
        return [buffer[x.offset : x.offset + x.nbytes] for x in self.tiles[tile]]

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._places

    def of_leaf(self, leaf: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """The extents with bytes `start` to `stop` of a leaf: tile, and index in it."""
        found = self._places.get(leaf, [])
        first = bisect.bisect_right(found, start, key=lambda place: self._extent(place).start) - 1
        places = []
        for place in found[max(first, 0) :]:
            extent = self._extent(place)
            if stop is not None and extent.start >= stop:
                break
            if extent.start + extent.nbytes > start:
                places.append(place)
        return places

    @functools.cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        """The extents of each leaf, by where they start in it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for tile, extents in enumerate(self.tiles):
            for i, extent in enumerate(extents):
                found.setdefault(extent.leaf, []).append((tile, i))
        for places in found.values():
            places.sort(key=lambda place: self._extent(place).start)
        return found

    def _extent(self, place: tuple[int, int]) -> Extent:
        return self.tiles[place[0]][place[1]]


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _packed(parts: Sequence[LeafRange]) -> tuple[Extent, ...]:
    extents, offset = [], 0
    for leaf, start, nbytes, *lone in parts:
        whole = whole_pages if any(lone) else whole_lines
        offset = whole(offset)
        extents.append(Extent(leaf, start, nbytes, offset, any(lone)))
        offset = whole(offset + nbytes)
    return tuple(extents)
