# SPDX-License-Identifier: Apache-2.0
"""Reads arrays of one layout as arrays of another. Axes have names, and a read is a box of them.

Written as einops does: `(h k) d -> d h k` is a matrix [h * k, d] on one side, and an array [d, h, k] on the
other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

TILE = 32  # rows or columns that are transposed together: two cache lines of float32

Dims = tuple[tuple[str, ...], ...]  # the axes of each dim, outermost first
AxisRanges = Mapping[str, tuple[int, int]]
# Reads a part of the array with this number, by a slice of each dim.
Read = Callable[[int, tuple[slice, ...]], np.ndarray]


class Side(NamedTuple):
    """Equal arrays of one layout."""

    counter: str  # the axis that numbers them; empty for a single array
    dims: Dims  # of each

    @property
    def axes(self) -> list[str]:
        return [*filter(None, [self.counter]), *axes_of(self.dims)]


class Rearranged(NamedTuple):
    """Reads arrays of one side as arrays of the other; both have the same axes, with these `sizes`."""

    source: Side
    made: Side
    sizes: Mapping[str, int]

    def read(self, number: int, rows: slice, read: Read) -> np.ndarray:
        """Reads some rows of an array of the other side; all of it if it has no dims."""
        box = {axis: (0, size) for axis, size in self.sizes.items()}
        if self.made.counter:
            box[self.made.counter] = number, number + 1
        if not self.made.dims:
            return self._read_box(box, read)
        boxes = _boxes(self.made.dims[0], self.sizes, rows.start, rows.stop)
        parts = [self._read_box({**box, **part}, read) for part in boxes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_box(self, box: AxisRanges, read: Read) -> np.ndarray:
        bounds = [_bounds(axes, self.sizes, box) for axes in self.source.dims]
        index, inner = tuple(b[0] for b in bounds), [n for b in bounds for n in b[1]]
        cuts = tuple(cut for b in bounds for cut in b[2])
        numbers = range(*box[self.source.counter]) if self.source.counter else [0]
        parts = [read(number, index).reshape(inner)[cuts] for number in numbers]
        lengths = {axis: stop - start for axis, (start, stop) in box.items()}
        data = np.stack(parts) if len(parts) > 1 else parts[0]
        data = data.reshape([lengths[axis] for axis in self.source.axes])
        data = data.transpose([self.source.axes.index(axis) for axis in self.made.axes])
        return _in_order(data).reshape(shape_of(self.made.dims, lengths))


def axes_of(dims: Dims) -> list[str]:
    return [*itertools.chain(*dims)]


def shape_of(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis] for axis in axes) for axes in dims)


def parse(text: str) -> tuple[Dims, Dims]:
    """The dims of both sides of `(h k) d -> d h k`."""
    sides = text.split("->")
    if len(sides) != 2 or not all(re.fullmatch(r"\s*(?:\w+\s*|\([\w\s]+\)\s*)*", x) for x in sides):
        raise ValueError("it is not like (h k) d -> d h k")
    left, right = (
        tuple(tuple(group.strip("()").split()) for group in re.findall(r"\w+|\([^)]*\)", side))
        for side in sides
    )
    if any(len({*axes_of(dims)}) < len(axes_of(dims)) for dims in (left, right)):
        raise ValueError("an axis is there twice on one side")
    return left, right


def merged(dims: Dims, others: Dims) -> Dims:
    """Merges dims whose axes are one dim on the other side: a matrix for some heads."""
    together = _neighbours(others)
    found: list[tuple[str, ...]] = []
    for group in dims:
        if found and (found[-1][-1], group[0]) in together:
            found[-1] += group
        else:
            found.append(group)
    return tuple(found)


def fused(dims: Dims, others: Dims) -> tuple[Dims, Dims]:
    """Merges axes that are adjacent in one dim on both sides, so that their sizes need not be known."""
    together = _neighbours(dims) & _neighbours(others)

    def fuse(group: tuple[str, ...]) -> tuple[str, ...]:
        found = group[0]
        for pair in itertools.pairwise(group):
            found += (" " if pair in together else "|") + pair[1]
        return tuple(found.split("|"))

    return tuple(map(fuse, dims)), tuple(map(fuse, others))


def solve(sizes: dict[str, int], dims: Dims, shape: Sequence[int]) -> bool:
    """Adds the sizes of axes that follow from a shape; returns whether the shape fits."""
    if len(dims) != len(shape):
        return False
    for axes, size in zip(dims, shape, strict=True):
        unknown = [axis for axis in axes if axis not in sizes]
        known = math.prod(sizes[axis] for axis in axes if axis in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
        elif len(unknown) == 1 or (not unknown and known != size):
            return False
    return True


def _in_order(x: np.ndarray) -> np.ndarray:
    """Copies a transposed array in tiles: NumPy's copy reads a cache line for each element of a row."""
    while x.ndim > 1 and x.strides[-2] == x.shape[-1] * x.strides[-1]:
        x = x.reshape(*x.shape[:-2], -1)  # a view
    if not x.ndim or x.strides[-1] == x.itemsize:
        return x
    made = np.empty(x.shape, x.dtype)
    for at in range(0, x.shape[-1], TILE):
        made[..., at : at + TILE] = x[..., at : at + TILE]
    return made


def _neighbours(dims: Dims) -> set[tuple[str, str]]:
    return {pair for group in dims for pair in itertools.pairwise(group)}


def _boxes(
    axes: Sequence[str], sizes: Mapping[str, int], start: int, stop: int
) -> Iterator[AxisRanges]:
    """Boxes that cover, in order, the positions from `start` to `stop` of axes that are one dim."""
    axis, *inner = axes
    each = math.prod(sizes[name] for name in inner)
    while start < stop:
        at, low = divmod(start, each)
        num = (stop - start) // each
        if low == 0 and num:
            yield {axis: (at, at + num)}
            start += num * each
        else:
            high = min(each, low + stop - start)
            yield from ({axis: (at, at + 1), **box} for box in _boxes(inner, sizes, low, high))
            start += high - low


def _bounds(
    axes: Sequence[str], sizes: Mapping[str, int], box: AxisRanges
) -> tuple[slice, list[int], list[slice]]:
    """The slice of a dim that encloses a box; the lengths of its axes in it, and the box within these."""
    offset, lengths = 0, list[int]()
    for i, axis in enumerate(axes):
        inner = axes[i + 1 :]
        each = math.prod(sizes[name] for name in inner)
        start, stop = box[axis]
        offset += start * each
        lengths.append(stop - start)
        if stop - start != 1:  # Inner axes are read whole.
            cuts = [*[slice(None)] * len(lengths), *(slice(*box[name]) for name in inner)]
            lengths += [sizes[name] for name in inner]
            return slice(offset, offset + (stop - start) * each), lengths, cuts
    return slice(offset, offset + 1), lengths, [slice(None)] * len(lengths)
