# SPDX-License-Identifier: Apache-2.0
"""How arrays of one layout are read as arrays of another: their axes have names, and a read is a box of them.

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

Dims = tuple[tuple[str, ...], ...]  # for each dim its axes, outermost first
Ranges = dict[str, tuple[int, int]]  # of each axis a range
# Reads a part of the array with this number: a slice of each dim.
Read = Callable[[int, tuple[slice, ...]], np.ndarray]


class Side(NamedTuple):
    """Some equal arrays.

    Attributes:
      grid: the axes that number them.
      dims: the axes of each.
    """

    grid: tuple[str, ...]
    dims: Dims

    @property
    def axes(self) -> list[str]:
        return [*self.grid, *itertools.chain(*self.dims)]


class Rearranged(NamedTuple):
    """Arrays of one side as arrays of the other.

    Attributes:
      source: what is read.
      made: what is made of it; of the same axes.
      sizes: of all axes.
    """

    source: Side
    made: Side
    sizes: Mapping[str, int]

    def read(self, number: int, rows: slice, read: Read) -> np.ndarray:
        """Some rows of an array that is made; all of it if it has no dims."""
        at = np.unravel_index(number, [self.sizes[axis] for axis in self.made.grid] or [1])
        box = {axis: (0, size) for axis, size in self.sizes.items()}
        box |= {axis: (int(i), int(i) + 1) for axis, i in zip(self.made.grid, at, strict=False)}
        if not self.made.dims:
            return self._box(box, read)
        parts = [
            self._box({**box, **part}, read)
            for part in _boxes(self.made.dims[0], self.sizes, rows.start, rows.stop)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _box(self, box: Ranges, read: Read) -> np.ndarray:
        bounds, inner, cuts = zip(
            *(_bounds(axes, self.sizes, box) for axes in self.source.dims), strict=True
        ) if self.source.dims else ((), (), ())  # fmt: skip
        grid = [self.sizes[axis] for axis in self.source.grid]
        parts = [
            read(int(np.ravel_multi_index(at, grid)) if grid else 0, bounds)
            .reshape([*itertools.chain(*inner)])[tuple(itertools.chain(*cuts))]
            for at in itertools.product(*(range(*box[axis]) for axis in self.source.grid))
        ]  # fmt: skip
        lengths = {axis: stop - start for axis, (start, stop) in box.items()}
        data = np.stack(parts) if len(parts) > 1 else parts[0]
        data = data.reshape([lengths[axis] for axis in self.source.axes])
        data = data.transpose([self.source.axes.index(axis) for axis in self.made.axes])
        return data.reshape(shape_of(self.made.dims, lengths))


def shape_of(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis] for axis in axes) for axes in dims)


def parse(text: str) -> tuple[Dims, Dims]:
    """The dims of both sides of `(h k) d -> d h k`.

    Raises:
      ValueError: it is not of that form.
    """
    sides = text.split("->")
    if len(sides) != 2 or not all(re.fullmatch(r"\s*(?:\w+\s*|\([\w\s]+\)\s*)*", x) for x in sides):
        raise ValueError("it is not like (h k) d -> d h k")
    left, right = (
        tuple(tuple(group.strip("()").split()) for group in re.findall(r"\w+|\([^)]*\)", side))
        for side in sides
    )
    for axes in (Side((), left).axes, Side((), right).axes):
        if len({*axes}) < len(axes):
            raise ValueError("an axis is there twice on one side")
    return left, right


def merged(dims: Dims, others: Dims) -> Dims:
    """Dims of one axis as one dim, where the other side has these axes together: a matrix for some heads."""
    inner = {pair for group in others for pair in itertools.pairwise(group)}
    found: list[tuple[str, ...]] = []
    for group in dims:
        if found and (found[-1][-1], group[0]) in inner:
            found[-1] += group
        else:
            found.append(group)
    return tuple(found)


def fused(dims: Dims, others: Dims) -> tuple[Dims, Dims]:
    """Both sides with one axis for those that are together on both: their sizes need not be known."""
    both = {pair for group in dims for pair in itertools.pairwise(group)}
    both &= {pair for group in others for pair in itertools.pairwise(group)}

    def fuse(group: tuple[str, ...]) -> tuple[str, ...]:
        found = [group[0]]
        for pair in itertools.pairwise(group):
            found[-1:] = [f"{found[-1]} {pair[1]}"] if pair in both else [found[-1], pair[1]]
        return tuple(found)

    return tuple(map(fuse, dims)), tuple(map(fuse, others))


def solve(sizes: dict[str, int], dims: Dims, shape: Sequence[int]) -> bool:
    """Adds the sizes of axes that follow from a shape; whether it can be the shape."""
    if len(dims) != len(shape):
        return False
    for axes, size in zip(dims, shape, strict=True):
        open_ = [axis for axis in axes if axis not in sizes]
        known = math.prod(sizes[axis] for axis in axes if axis in sizes)
        if len(open_) == 1 and known and size % known == 0:
            sizes[open_[0]] = size // known
        elif not open_ and known != size:
            return False
        elif len(open_) == 1:
            return False
    return True


def _boxes(
    axes: Sequence[str], sizes: Mapping[str, int], start: int, stop: int
) -> Iterator[Ranges]:
    """Boxes that have, in turn, the positions from `start` to `stop` of axes that are one dim."""
    axis, *inner = axes
    if not inner:
        yield {axis: (start, stop)}
        return
    each = math.prod(sizes[name] for name in inner)
    first, last = -(-start // each), stop // each
    if first > last:
        parts = [(last, start - last * each, stop - last * each)]
    else:
        parts = [(first - 1, start - (first - 1) * each, each)] if start < first * each else []
    for at, low, high in parts:
        yield from ({axis: (at, at + 1), **box} for box in _boxes(inner, sizes, low, high))
    if first < last:
        yield {axis: (first, last)}
    if first <= last and last * each < stop:
        rest = _boxes(inner, sizes, 0, stop - last * each)
        yield from ({axis: (last, last + 1), **box} for box in rest)


def _bounds(
    axes: Sequence[str], sizes: Mapping[str, int], box: Ranges
) -> tuple[slice, list[int], list[slice]]:
    """The slice of a dim that encloses a box; the lengths of its axes in it, and the box in these."""
    offset, lengths, cuts = 0, [], []
    for i, axis in enumerate(axes):
        inner = [sizes[name] for name in axes[i + 1 :]]
        (start, stop), each = box[axis], math.prod(inner)
        offset += start * each
        lengths.append(stop - start)
        cuts.append(slice(None))
        if stop - start != 1 or not inner:
            cuts += [slice(*box[name]) for name in axes[i + 1 :]]
            return slice(offset, offset + (stop - start) * each), [*lengths, *inner], cuts
    return slice(0, 1), lengths, cuts
