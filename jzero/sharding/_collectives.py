"""Gather, reduction and slice: the only file that binds collectives of jzero's own.

All of them run inside a `shard_map` that is manual over `axes`, on per-device values.
"""

from __future__ import annotations

import jax
from jax import lax

Axes = tuple[str, ...]


def gather(shard: jax.Array, dim: int, axes: Axes, name: str) -> jax.Array:
    """All-gathers `shard` along `dim`; `name` makes it readable in a profile."""
    with jax.named_scope(f"jzero.gather[{name}]"):
        return lax.all_gather(shard, axes, axis=dim, tiled=True)


def reduce_scatter(local: jax.Array, dim: int, axes: Axes, name: str) -> jax.Array:
    """Sums `local` over the devices; each keeps its slice along `dim`."""
    with jax.named_scope(f"jzero.reduce_scatter[{name}]"):
        return lax.psum_scatter(local, axes, scatter_dimension=dim, tiled=True)


def all_reduce(local: jax.Array, axes: Axes, kind: str = "sum") -> jax.Array:
    """Sums (or takes 'max', 'min' of) `local` over the devices; each keeps the whole result."""
    with jax.named_scope("jzero.all_reduce"):
        return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[kind](local, axes)


def take_shard(full: jax.Array, dim: int, axes: Axes, num_shards: int) -> jax.Array:
    """This device's slice of a value that is the same on all devices. Moves nothing."""
    size = full.shape[dim] // num_shards
    return lax.dynamic_slice_in_dim(full, lax.axis_index(axes) * size, size, dim)


def keep_apart(shard: jax.Array, token: jax.Array) -> jax.Array:
    """`shard`, but not before `token` is there: keeps one pass's gather from serving the next."""
    return lax.optimization_barrier((shard, token))[0]
