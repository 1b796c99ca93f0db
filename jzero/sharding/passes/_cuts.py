# SPDX-License-Identifier: Apache-2.0
"""Tiles: how a matrix is cut, and equations that read and write ranges of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from jzero.ir._factors import with_size
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Var

# [Note: which dim is cut into tiles]
# A matrix [n, d] is sharded along n, as [n/k, d] on each device. Its tiles are ranges of another dim: a range
# of the shard's d is one of the whole's, and its gather has the rows in their order. A range of n/k would
# have some rows of every device.


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

    It is sharded along `sharded`, [Note: which dim is cut into tiles]; None if there is no other dim. The
    product does not sum over dims in `kept`: one of these is cut if its tiles are as small.
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
    # A few tiles more, all of one size, are better: a smaller last one is written beside the loop.
    equal = (num for num in range(fewest, fewest + fewest // 2 + 1) if size % num == 0)
    return Tiles(dim, size, -(-size // next(equal, fewest)))


def read_range(
    writer: JaxprWriter, x: Atom, start: int | Var, size: int, dim: int | None, num_parts: int
) -> Atom:
    """`x[:, start : start + size]`, along `dim`, of each of its parts; all of it without a dim."""
    if dim is None:
        return x
    shape = with_size(x.aval.shape, dim, size * num_parts)
    x, dim = _in_parts(writer, x, dim, num_parts)
    tile = with_size(x.aval.shape, dim, size)
    if isinstance(start, int):
        starts = with_size((0,) * len(tile), dim, start)
        found = writer.slice(x, starts, with_size(tile, dim, start + size))
    else:
        out = _jaxpr.var_like(x.aval, tile)
        (found,) = writer.add(
            lax.dynamic_slice_p, [x, *_places(len(tile), start, dim)], [out], slice_sizes=tile
        )
    return found if shape == tile else writer.reshape(found, shape)


def write_range(
    writer: JaxprWriter, whole: Atom, part: Atom, start: int | Var, dim: int, num_parts: int
) -> Var:
    """`whole.at[:, start : start + size].set(part)`, along `dim`, in each of its parts."""
    at = _jaxpr.scalar(start, np.int32) if isinstance(start, int) else start
    shape = whole.aval.shape
    part, _ = _in_parts(writer, part, dim, num_parts)
    whole, dim = _in_parts(writer, whole, dim, num_parts)
    ins = [whole, part, *_places(whole.aval.ndim, at, dim)]
    (new,) = writer.add(lax.dynamic_update_slice_p, ins, [_jaxpr.var_like(whole.aval)])
    return new if new.aval.shape == shape else writer.reshape(new, shape)


def _in_parts(writer: JaxprWriter, x: Atom, dim: int, num_parts: int) -> tuple[Atom, int]:
    """`[n, d]` as `[n, q, d/q]`, if d has q Auto parts, and the dim that tiles then cut."""
    if num_parts == 1:
        return x, dim
    shape = x.aval.shape
    parts = (*shape[:dim], num_parts, shape[dim] // num_parts, *shape[dim + 1 :])
    return writer.reshape(x, parts), dim + 1


def shape_of_part(shape: Sequence[int], parts: Mapping[int, int]) -> list[int]:
    return [size // parts.get(dim, 1) for dim, size in enumerate(shape)]


def _places(ndim: int, start: Atom, dim: int) -> list[Atom]:
    zero = _jaxpr.scalar(0, np.int32)
    return [start if d == dim else zero for d in range(ndim)]
