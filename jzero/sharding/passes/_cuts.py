# SPDX-License-Identifier: Apache-2.0
"""Tiles: how a matrix is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# [Note: which dim is cut into tiles]
# A matrix [n, d] rests along n, as [n/k, d] on each device. Its tiles are ranges of another dim: a range of
# the shard's d is one of the whole's, and its gather has the rows in their order. A range of n/k would be of
# some rows of every device.


class Tiles(NamedTuple):
    """A matrix cut along `dim`, of `size`, into ranges of `tile`; the last one may be smaller."""

    dim: int
    size: int
    tile: int

    @property
    def num(self) -> int:
        return self.size // self.tile

    @property
    def rest(self) -> int:
        """The size of a smaller last one, or 0."""
        return self.size % self.tile


def cut(
    shape: Sequence[int],
    itemsize: int,
    sharded: int,
    nbytes: int,
    kept: Sequence[int] | None = None,
) -> Tiles | None:
    """Tiles of at most `nbytes` of a value that is larger; of one index of a dim at least.

    `sharded`: the dim along which it is; [Note: which dim is cut into tiles].
    `kept`: dims that the product does not sum over; one of these if its tiles are as small. None for all.

    Returns:
      The cut; None if there is no other dim.
    """
    dims = [dim for dim, size in enumerate(shape) if dim != sharded and size > 1]
    if not dims:
        return None
    whole = math.prod(shape) * itemsize

    def rank(dim: int) -> tuple[bool, bool, int]:
        fits = whole <= nbytes * shape[dim]
        return fits, fits and (kept is None or dim in kept), shape[dim]

    dim = max(dims, key=rank)
    size = shape[dim]
    # Three at least: the compiler takes loops of one iteration apart, and makes the tiles of all of them at
    # once.
    fewest = min(size, max(3, -(-size // max(1, nbytes * size // whole))))
    # Rather a few tiles more that are all of one size: a smaller one stands beside the loop.
    equal = (num for num in range(fewest, fewest + fewest // 2 + 1) if size % num == 0)
    return Tiles(dim, size, -(-size // next(equal, fewest)))
