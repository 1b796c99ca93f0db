"""Layouts: how a leaf lies on the devices. Pure; knows shapes, never arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Full:
    """The whole value on every device."""

    def __str__(self) -> str:
        return "full"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Each device holds an equal slice along `dim`; device order is that of the mesh `axes`."""

    dim: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"shard(dim {self.dim} over {','.join(self.axes)})"


Layout = Full | Shard
FULL = Full()


# For each dim, the axes beside the data axes over which XLA shards it; trailing dims may be missing.
Automatic = tuple[tuple[str, ...], ...]


def partition_spec(layout: Layout, automatic: Automatic = ()) -> P:
    """The layout as JAX spells it."""
    entries = [*automatic]
    if isinstance(layout, Shard):
        entries += [()] * (layout.dim + 1 - len(entries))
        entries[layout.dim] = layout.axes + entries[layout.dim]
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def shardable_dims(shape: Sequence[int], num_shards: int) -> list[int]:
    """Dims that `num_shards` devices can split evenly."""
    return [dim for dim, size in enumerate(shape) if size and size % num_shards == 0]


def choose_dim(shape: Sequence[int], num_shards: int, avoid: Collection[int] = ()) -> int | None:
    """The dim to shard: the largest that divides, the first of equals; None if there is none.

    The largest, because the dim of stacked layers is nearly always a small one and must not be it, and
    because a leaf and its moments, having one shape, then agree before any step was seen.
    """
    dims = [dim for dim in shardable_dims(shape, num_shards) if dim not in avoid]
    return max(dims, key=lambda dim: (shape[dim], -dim), default=None)


def why_full(
    shape: Sequence[int], num_shards: int, looped: Collection[int], taken: Collection[int]
) -> str:
    """The reason, for the report, why `choose_dim` found nothing."""
    if not shape:
        return "a scalar"
    dims = shardable_dims(shape, num_shards)
    if not dims:
        return f"no dim is divisible by {num_shards}"
    if set(dims) & set(taken):
        return "its divisible dims are sharded over other axes or looped over"
    dims = sorted(looped)
    return f"dim {dims[0] if len(dims) == 1 else dims} is looped over and no other is divisible"
