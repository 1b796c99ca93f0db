# SPDX-License-Identifier: Apache-2.0
"""Gathers and reductions whose values travel as codes of few bits: rows of bytes, one collective each.

All of them run inside a `shard_map`, as those of `_collectives`, and have their results but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jzero._blocks import Blocks
from jzero.sharding.plan._layout import Automatic
from jzero.sharding.run import _codes
from jzero.sharding.run._collectives import Axes, gather_scope, part_by_part, row_major
from jzero.sharding.run._queue import not_before


def gather(
    shard: jax.Array, dim: int, axes: Axes, name: str, automatic: Automatic, codes: Blocks
) -> jax.Array:
    """`[n/k, d] -> [n, d]` along `dim`: the same on all devices, this one's own part included."""

    def collective(part: jax.Array) -> jax.Array:
        row = _codes.encode(part.reshape(1, part.size), codes)
        with gather_scope(name):
            rows = lax.all_gather(row, axes, axis=0, tiled=True)
        parts = _codes.decode(rows, part.size, part.dtype, codes)
        parts = jnp.moveaxis(parts.reshape(rows.shape[0], *part.shape), 0, dim)
        return parts.reshape(*part.shape[:dim], -1, *part.shape[dim + 1 :])

    return part_by_part(collective, automatic)(shard)


def reduce_scatter(
    local: jax.Array, dim: int, sizes: Mapping[str, int], hops: Sequence[str],
    codes: Mapping[str, Blocks | None], name: str, automatic: Automatic, tokens: Sequence[jax.Array],
) -> jax.Array:  # fmt: skip
    """`[n, d]` of each device -> this one's `[n/k, d]` of their sum, along `dim`; a hop over each axis.

    Args:
      local: a device's own.
      dim: along which it is cut.
      sizes: names and sizes of the axes, in the order in which they cut it.
      hops: these axes, in the order in which sums are taken.
      codes: in which they travel over each; None for exact.
      name: of the leaf.
      automatic: how XLA shards it.
      tokens: the first hop waits for them; none where XLA shards the leaf.
    """

    def collective(part: jax.Array) -> jax.Array:
        # [n, d] as [k1, k2, ..., n/k, d], and then one axis after the other goes.
        parts = part.reshape(*part.shape[:dim], *sizes.values(), -1, *part.shape[dim + 1 :])
        left = list(sizes)
        for axis in hops:
            parts = jnp.moveaxis(parts, dim + left.index(axis), 0)
            after = () if len(left) < len(sizes) else tokens
            left.remove(axis)
            parts = parts if codes[axis] else parts.astype(part.dtype)
            parts = _summed(parts, axis, codes[axis], after)
        return row_major(parts.astype(part.dtype))

    with jax.named_scope(f"jzero.reduce_scatter[{name}]"):
        return part_by_part(collective, automatic)(local)


def all_reduce(local: jax.Array, axis: str, size: int, codes: Blocks, name: str) -> jax.Array:
    """`[n, d]` of each device of an axis -> their sum, the same on all of them: two hops."""
    with jax.named_scope(f"jzero.all_reduce[{name}]"):
        flat = jnp.pad(local.reshape(-1), (0, -local.size % size))
        total = _summed(flat.reshape(size, -1), axis, codes)
        rows = lax.all_gather(_codes.encode(total[None], codes), axis, axis=0, tiled=True)
        whole = _codes.decode(rows, total.size, local.dtype, codes).reshape(-1)
        return whole[: local.size].reshape(local.shape)


def _summed(
    parts: jax.Array, axis: str, codes: Blocks | None, tokens: Sequence[jax.Array] = ()
) -> jax.Array:
    """Of `[k, n, d]`, a part for each device of `axis`, all devices' parts for this one, summed up."""
    if codes is None:
        parts = not_before(parts, tokens)
        total: jax.Array = lax.psum_scatter(parts, axis, scatter_dimension=0, tiled=False)
        return total
    rows = not_before(_codes.encode(parts.reshape(parts.shape[0], -1), codes), tokens)
    rows = lax.all_to_all(rows, axis, 0, 0, tiled=True)
    wide = jnp.promote_types(parts.dtype, jnp.float32)
    terms = _codes.decode(rows, parts[0].size, wide, codes)
    return jnp.sum(terms, axis=0).reshape(parts.shape[1:])
