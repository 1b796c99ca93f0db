# SPDX-License-Identifier: Apache-2.0
"""Rows: how a value lies on the devices whose dim is that of the batch, or holds it. Pure arithmetic."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """Each device holds its rows of one dim.

    The dim is `[outer, devices, inner]`: of each of `outer` blocks, device i has the i-th `inner` rows. A
    batch has one block; `[time, batch]` merged into one dim has as many blocks as time steps. If the
    devices do not divide a dim of one block, the last rows are padding, of which nothing is known.
    """

    dim: int
    outer: int
    inner: int

    @property
    def size(self) -> int:
        """How many rows a device holds, padding included."""
        return self.outer * self.inner

    def at(self, dim: int) -> Rows:
        """The same rows of another dim."""
        return self._replace(dim=dim)


class Whole(enum.Enum):
    """Values that are no rows.

    FULL: whole and equal on every device. OWN: of one row of the batch, a different one on each device
    (inside a loop over rows).
    """

    FULL, OWN = range(2)


class PartialSum(NamedTuple):
    """Inside a loop over rows: what the loop has carried, plus or minus terms of this device's rows.

    It is known up to what other devices add, so nothing but its carry's next value may depend on it
    [Note: sums of a loop over rows].

    Attributes:
      carry: whose previous value it contains, once: an index into what the loop carries.
    """

    carry: int


FULL, OWN = Whole.FULL, Whole.OWN
Form = Rows | PartialSum | Whole


def is_of_iteration(form: Form) -> bool:
    """Whether it is a form that exists inside a loop over rows only."""
    return form is OWN or isinstance(form, PartialSum)


def even_rows(dim: int, size: int, num: int) -> Rows:
    """A dim of `size` over `num` devices, in one block; padded if they do not divide it."""
    return Rows(dim, 1, -(-size // num))


def local_shape(shape: Sequence[int], form: Form) -> tuple[int, ...]:
    """The shape of each device's part."""
    if not isinstance(form, Rows):
        return tuple(shape)
    return tuple(form.size if d == form.dim else n for d, n in enumerate(shape))


def is_padded(rows: Rows, size: int, num: int) -> bool:
    """Whether the devices hold more rows than the dim's `size`."""
    return rows.size * num != size


def reshaped(shape: Sequence[int], out: Sequence[int], rows: Rows, num: int) -> Rows | None:
    """Where the rows of an array of `shape` are after a reshape to `out`; None if they are no rows there.

    In the flat array a device's rows are runs of `inner * rest` elements, one for each block of this dim and
    of the dims before it; the new dim must have the same runs.
    """
    if 0 in shape:
        return None
    padded = is_padded(rows, shape[rows.dim], num)
    blocks = math.prod(shape[: rows.dim]) * rows.outer
    run = rows.inner * math.prod(shape[rows.dim + 1 :])
    for dim, size in enumerate(out):
        before, after = math.prod(out[:dim]), math.prod(out[dim + 1 :])
        if size == 1 or blocks % before or run % after:
            continue
        new = Rows(dim, blocks // before, run // after)
        if padded and not (new.outer == rows.outer == 1 and num * new.inner >= size):
            continue
        if padded or new.size * num == size:
            return new
    return None
