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


def partition_spec(layout: Layout) -> P:
    """The layout as JAX spells it."""
    if isinstance(layout, Full):
        return P()
    axes = layout.axes if len(layout.axes) > 1 else layout.axes[0]
    return P(*(None,) * layout.dim, axes)


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


def why_full(shape: Sequence[int], num_shards: int, avoid: Collection[int] = ()) -> str:
    """The reason, for the report, why `choose_dim` found nothing."""
    if not shape:
        return "a scalar"
    if not shardable_dims(shape, num_shards):
        return f"no dim is divisible by {num_shards}"
    dims = sorted(avoid)
    return f"dim {dims[0] if len(dims) == 1 else dims} is looped over and no other is divisible"
