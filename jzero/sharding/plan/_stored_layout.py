# SPDX-License-Identifier: Apache-2.0
"""Layouts of stored leaves. Pure; knows shapes, never arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from jzero.tracing import _call


@dataclasses.dataclass(frozen=True)
class Replicated:
    def __str__(self) -> str:
        return "replicated"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Each device holds an equal slice along `dim`; device order is that of the mesh `axes`.

    A dim that the devices do not divide is padded at its end.
    """

    dim: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"shard(dim {self.dim} over {','.join(self.axes)})"


# For each dim, the axes beside the data axes over which XLA shards it; trailing dims may be missing.
Automatic = tuple[tuple[str, ...], ...]


def cuts_of(automatic: Automatic, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis] for axis in axes) for axes in automatic)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sharded along several dims, each over its entry of `axes`."""

    axes: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"grid{partition_spec(self)}"


StoredLayout = Replicated | Shard | Grid
REPLICATED = Replicated()


def partition_spec(layout: StoredLayout, automatic: Automatic = ()) -> P:
    entries = [*(layout.axes if isinstance(layout, Grid) else automatic)]
    if isinstance(layout, Shard):
        entries += [()] * (layout.dim + 1 - len(entries))
        entries[layout.dim] = layout.axes + entries[layout.dim]
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def beside(spec: P, automatic: Automatic) -> P:
    """A spec of data axes, with Auto axes added behind them in each dim."""
    return partition_spec(of_spec(spec), automatic) if any(automatic) else spec


def of_spec(spec: P) -> StoredLayout:
    names = tuple(map(_call.spec_axes, spec))
    dims = [dim for dim, axes in enumerate(names) if axes]
    if len(dims) > 1:
        return Grid(names)
    return Shard(dims[0], names[dims[0]]) if dims else REPLICATED


MOST_GROWTH = 2  # by padding; what moves grows by as much


def padded_size(size: int, num_shards: int) -> int:
    return -(-size // num_shards) * num_shards


def choose_dim(shape: Sequence[int], num_shards: int, avoid: Collection[int] = ()) -> int | None:
    """The dim to shard: a large one that divides, else the one that needs least padding, or None.

    A large one, because the dim of stacked layers is nearly always small and must not be it, and because a
    leaf and its moments, having one shape, then agree before any step was seen. The first of those that reach
    a quarter of the largest, because what is gathered along the first dim needs no transposing afterwards.
    """
    if 0 in shape:
        return None
    dims = [dim for dim, size in enumerate(shape) if size > 1 and dim not in avoid]
    even = [dim for dim in dims if shape[dim] % num_shards == 0]
    if even:
        largest = max(shape[dim] for dim in even)
        return next(dim for dim in even if 4 * shape[dim] >= largest)
    growth = {dim: padded_size(shape[dim], num_shards) / shape[dim] for dim in dims}
    return min(
        (dim for dim in dims if growth[dim] <= MOST_GROWTH), key=growth.__getitem__, default=None
    )


def why_full(shape: Sequence[int], avoid: Collection[int]) -> str:
    """The reason for the report if `choose_dim` found no dim."""
    if not shape:
        return "a scalar"
    if 0 in shape:
        return "it has no elements"
    if any(size > 1 and dim in avoid for dim, size in enumerate(shape)):
        return "its other dims are looped over, or sharded over other axes, or too small"
    return "every dim is too small for so many devices"
