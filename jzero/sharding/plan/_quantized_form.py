# SPDX-License-Identifier: Apache-2.0
"""`QuantizedForm`: a quantized leaf as rows of bytes. Pure; knows shapes, never arrays."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from jzero._blocks import Blocks


@dataclasses.dataclass(frozen=True)
class QuantizedForm:
    """A leaf `[..., n, d]` as `uint8[..., parts, bytes]`: each device has a part of every row.

    A row is a matrix, the last two dims, so that loops over stacks of layers slice rows like leaves; several
    matrices, if they are smaller than a block. It is cut along `dim` into parts, each with its own blocks:
    what one device dequantizes is what was one device's. If `dim` is before the matrix, rows have one part
    each, and devices have some of the rows.
    """

    shape: tuple[int, ...]  # the leaf's, without padding
    dtype: str  # as which it is dequantized
    blocks: Blocks  # the format
    dim: int | None  # that is cut; None for a leaf that is not sharded
    num_parts: int = 1
    padding: int = 0  # at the end of that dim

    @functools.cached_property
    def num_stacked(self) -> int:
        """How many dims come before a row."""
        first = max(0, len(self.shape) - 2)
        while first and math.prod(self.shape[first:]) < self.blocks.elements:
            first -= 1
        return first

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(n + self.padding * (d == self.dim) for d, n in enumerate(self.shape))

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of one part of a row, padding included."""
        shape, first = self.padded_shape, self.num_stacked
        return tuple(
            n // self.num_parts if d == self.dim else n for d, n in enumerate(shape) if d >= first
        )

    @property
    def is_cut_in_rows(self) -> bool:
        return self.dim is not None and self.dim >= self.num_stacked

    @property
    def rows_dim(self) -> int | None:
        """The dim of the rows that the devices divide."""
        return self.num_stacked if self.is_cut_in_rows else self.dim

    @property
    def rows_shape(self) -> tuple[int, ...]:
        nbytes = self.blocks.nbytes(math.prod(self.part), self.scale_bytes)
        parts = self.num_parts if self.is_cut_in_rows else 1
        return (*self.padded_shape[: self.num_stacked], parts, nbytes)

    @property
    def scale_bytes(self) -> int:
        return max(4, self.itemsize)

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} in {self.blocks}"
