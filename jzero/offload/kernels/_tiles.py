# SPDX-License-Identifier: Apache-2.0
"""Tiles: ranges of elements of leaves that are updated together, a limited number of bytes at a time."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jzero.offload.nvme._tile_layout import LINE, PAGE, TileLayout, whole_lines, whole_pages

# Ranges are cut at multiples of so many elements, so that every part but the last fills whole vectors.
GRAIN = 64


class Together(NamedTuple):
    leaves: tuple[int, ...]  # of the state, by index; none if what they make reads no state
    itemsizes: tuple[int, ...]  # of each
    size: int  # elements of each
    portion: int  # after which their outputs are complete
    lone: frozenset[int] = frozenset()  # those of the leaves that are also read by themselves
    num_slices: int = 1  # equal ranges of elements, which are then cut into tiles
    # Inputs that come with the leaves, by index, and their itemsizes; they have pages of their own, like
    # lone leaves.
    gradients: tuple[tuple[int, int], ...] = ()

    def nbytes(self, count: int) -> int:
        """Of `count` elements of each leaf in a tile, and of their gradients."""
        state = sum(
            (whole_pages if leaf in self.lone else whole_lines)(count * itemsize)
            for leaf, itemsize in zip(self.leaves, self.itemsizes, strict=True)
        )
        return state + sum(whole_pages(count * itemsize) for _, itemsize in self.gradients)

    def least_bytes(self, count: int) -> int:
        """A size in which so many elements fit wherever the pages of lone leaves begin."""
        every = [*self.itemsizes, *(itemsize for _, itemsize in self.gradients)]
        lines = sum(whole_lines(count * itemsize) for itemsize in every)
        return lines + (len(self.lone) + len(self.gradients)) * (PAGE - LINE)


class Span(NamedTuple):
    together: int  # by index
    first: int
    num: int  # of elements


class Tile(NamedTuple):
    spans: tuple[Span, ...]
    portion: int


def cut(found: Sequence[Together], tile_bytes: int) -> Iterator[Tile]:
    """Tiles of up to `tile_bytes`, or `least_bytes`, in order; none has parts of two portions.

    Of leaves with as many slices each, the first slices come first, as iterations of a loop read them; a
    slice may be cut into tiles.
    """
    tile_bytes = max(tile_bytes, least_bytes(found))
    for portion, members in itertools.groupby(enumerate(found), lambda pair: pair[1].portion):
        spans: list[Span] = []
        room = tile_bytes
        for index, first, num in _slices(members):
            each = found[index]
            while num:
                count = _fitting(each, num, room, _grain(each, tile_bytes))
                if count:
                    spans.append(Span(index, first, count))
                    first, num, room = first + count, num - count, room - each.nbytes(count)
                else:
                    yield Tile(tuple(spans), portion)
                    spans, room = [], tile_bytes
        if spans:
            yield Tile(tuple(spans), portion)


def ranges(tile: Tile, found: Sequence[Together]) -> list[tuple[Span, int, int]]:
    """The range, leaf and itemsize of each part of a tile, as in `laid_out`: lone leaves come last."""
    every = [
        (span, leaf, itemsize)
        for span in tile.spans
        for leaf, itemsize in zip(*found[span.together][:2], strict=True)
    ]
    return sorted(every, key=lambda part: part[1] in found[part[0].together].lone)


def of_whole_leaves(
    leaves: Sequence[jax.ShapeDtypeStruct], num_slices: Sequence[int], names: Sequence[str],
    tile_bytes: int,
) -> TileLayout:  # fmt: skip
    """The layout of leaves that nobody updates; `num_slices` is 0 for those that are not lone."""
    found = [
        Together((i,), (x.dtype.itemsize,), x.size, 0, frozenset([i][: min(num, 1)]), max(num, 1))
        for i, (x, num) in enumerate(zip(leaves, num_slices, strict=True))
    ]
    return laid_out(cut(found, tile_bytes), found, names)


def rows(tile: Tile) -> dict[Span, int]:
    """How many ranges of the same leaves come before each span in its tile."""
    # Slices of a stack are apart, and kernels count elements of a leaf from one address: each has its own.
    seen: collections.Counter[int] = collections.Counter()
    found = {}
    for span in tile.spans:
        found[span] = seen[span.together]
        seen[span.together] += 1
    return found


def laid_out(tiles: Iterable[Tile], found: Sequence[Together], names: Sequence[str]) -> TileLayout:
    """The layout of tiles, by the leaves' names."""
    return TileLayout.of(
        [
            (names[leaf], span.first * itemsize, span.num * itemsize,
             leaf in found[span.together].lone)
            for span, leaf, itemsize in ranges(tile, found)
        ]
        for tile in tiles
    )  # fmt: skip


def gradient_ranges(tile: Tile, found: Sequence[Together]) -> list[tuple[Span, int, int]]:
    """The range, the gradient and the itemsize of each part, in the order of `gradients_of`."""
    return [
        (span, i, itemsize) for span in tile.spans for i, itemsize in found[span.together].gradients
    ]


def gradients_of(
    tiles: Iterable[Tile], found: Sequence[Together], names: Mapping[int, str]
) -> TileLayout:
    """The layout of gradients behind tiles; no tiles if there are none."""
    layout = TileLayout.of(
        [
            (names[i], span.first * itemsize, span.num * itemsize, True)
            for span, i, itemsize in gradient_ranges(tile, found)
        ]
        for tile in tiles
    )
    return layout if layout.most_bytes else TileLayout(())


def least_bytes(found: Sequence[Together]) -> int:
    """Of the smallest tile that can be made."""
    return max((each.least_bytes(min(GRAIN, each.size)) for each in found), default=0)


def _slices(members: Iterable[tuple[int, Together]]) -> Iterator[Span]:
    """All elements, slice by slice of leaves with as many slices."""
    alike: dict[int, list[tuple[int, int]]] = {}
    for index, each in members:
        assert each.size % each.num_slices == 0, f"{each.size} elements in {each.num_slices} slices"
        alike.setdefault(each.num_slices, []).append((index, each.size // each.num_slices))
    for num_slices, sizes in alike.items():
        for k in range(num_slices):
            yield from (Span(index, k * size, size) for index, size in sizes)


def _grain(each: Together, tile_bytes: int) -> int:
    """Parts have a multiple of so many elements: whole pages of lone leaves, if a tile has room."""
    sizes = dict(zip(each.leaves, each.itemsizes, strict=True))
    lone = [sizes[leaf] for leaf in each.lone] + [itemsize for _, itemsize in each.gradients]
    whole = max([GRAIN, *(PAGE // itemsize for itemsize in lone)])
    return whole if each.least_bytes(whole) <= tile_bytes else GRAIN


def _fitting(each: Together, wanted: int, room: int, grain: int) -> int:
    if each.nbytes(wanted) <= room:
        return wanted
    # A multiple of GRAIN elements fills whole lines, of any dtype.
    ends = each.least_bytes(0)
    return max(room - ends, 0) // (each.least_bytes(grain) - ends) * grain
