# SPDX-License-Identifier: Apache-2.0
"""Gather, reduction and slice: the only file that binds collectives of jzero's own.

All of them run inside a `shard_map` that is manual over `axes`, on per-device values. A leaf that XLA
shards over further axes is gathered and reduced part by part (`automatic`): left alone, XLA would
gather it over those axes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike

from jzero.sharding.passes._in_place import row_major
from jzero.sharding.plan._layout import FULL, Automatic, partition_spec
from jzero.tracing import _jaxpr

# [Note: layouts at rest]
# XLA gathers and scatters along any dim but the first into another layout than arrays rest in, and what
# reads the result takes that over: a whole update, which then makes masters and moments beside the old
# ones, not in their place. And it starts all such gathers of an update together: a second copy of all
# parameters is alive at once. So what is scattered is put into the layout of arrays at rest, and large
# leaves are gathered in slices (test_preflight.py::test_an_update_is_made_in_the_place_of_the_old_state,
# test_memory.py::test_new_parameters_go_into_the_old_ones_in_slices). And a barrier in front of a scatter
# ends what the compiler knows of the layout that it reads: a product makes the whole gradient in another,
# and a copy of it stands beside it
# (test_preflight.py::test_a_gradient_that_waits_for_its_reduction_is_not_copied).

# [Note: 16 bits on CPUs]
# XLA:CPU sums 16-bit floats of several devices in 32 bits, and the pass that sees to it ends the process
# ("Invalid binary instruction opcode copy") where a sum is over some axes of the mesh and XLA shards over the
# others. So none are left to it: such a sum is made for each place along them, of all that they hold
# (test_tensor_axes.py::test_16_bit_sums_beside_an_automatic_axis).

Axes = tuple[str, ...]
_GATHER = "jzero.gather"


def gather(shard: jax.Array, dim: int, axes: Axes, name: str, automatic: Automatic) -> jax.Array:
    """`[n/k, d] -> [n, d]` along `dim`, padding included; `name` makes it readable in a profile."""

    def collective(part: jax.Array) -> jax.Array:
        whole: jax.Array = lax.all_gather(part, axes, axis=dim, tiled=True)
        return whole

    with gather_scope(name):
        return part_by_part(collective, automatic)(shard)


def gather_scope(name: str) -> contextlib.AbstractContextManager[None]:
    """Around the collective of a gather."""
    return jax.named_scope(f"{_GATHER}[{name}]")


def is_gather(eqn: _jaxpr.Eqn) -> bool:
    """Whether `gather` made the equation."""
    return any(scope.startswith(f"{_GATHER}[") for scope in _jaxpr.scopes(eqn))


def is_reduction(eqn: _jaxpr.Eqn) -> bool:
    """Whether it leaves of a value this device's shard of a sum over devices."""
    return eqn.primitive.name == "reduce_scatter"


def reduce_scatter(
    local: jax.Array, dim: int, axes: Axes, name: str, automatic: Automatic, alone: Axes = ()
) -> jax.Array:
    """`[n, d]` of each device -> this one's `[n/k, d]` of their sum, along `dim`."""

    def collective(part: jax.Array) -> jax.Array:
        # [Note: layouts at rest]
        return row_major(lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True))

    with jax.named_scope(f"jzero.reduce_scatter[{name}]"):
        return part_by_part(collective, automatic, alone)(local)


def exchange(x: jax.Array, cut: int, joined: int, axes: Axes, name: str) -> jax.Array:
    """`[n, d/k] -> [n/k, d]`: each device cuts `x` along a dim and joins what it gets along another."""
    with jax.named_scope(f"jzero.all_to_all[{name}]"):
        got: jax.Array = lax.all_to_all(x, axes, split_axis=cut, concat_axis=joined, tiled=True)
        return got


def with_dim_first(x: jax.Array, dim: int, automatic: Automatic, alone: Axes = ()) -> jax.Array:
    """`x` in the layout in which its reduction along `dim` reads it: [Note: layouts at rest]."""
    order = Layout((dim, *(d for d in range(x.ndim) if d != dim)))
    laid_out: jax.Array = part_by_part(
        lambda part: with_layout_constraint(part, order), automatic, alone
    )(x)
    return laid_out


def part_by_part(
    collective: Callable[[jax.Array], jax.Array], automatic: Automatic, alone: Axes = ()
) -> Callable[[jax.Array], jax.Array]:
    """A collective of a leaf that XLA shards over further axes, on its parts; and on those over `alone`."""
    names = {axis for axes in automatic for axis in axes} | {*alone}
    if not names:
        return collective
    spec = partition_spec(FULL, automatic)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
    )


def all_reduce(
    local: jax.Array, axes: Axes, kind: str = "sum", name: str = "", automatic: Automatic = (),
    alone: Axes = (),
) -> jax.Array:  # fmt: skip
    """`[n, d]` of each device -> their sum (or 'max', 'min') `[n, d]`, whole on each; a leaf has a `name`."""

    def collective(part: jax.Array) -> jax.Array:
        return _REDUCTIONS[kind](part, axes)

    with jax.named_scope(f"jzero.all_reduce[{name}]" if name else "jzero.all_reduce"):
        if kind != "sum" and jnp.issubdtype(local.dtype, jnp.inexact):
            # An all-reduce takes NaN for no maximum and no minimum of others.
            parts = lax.all_gather(local, axes)
            return jnp.max(parts, axis=0) if kind == "max" else jnp.min(parts, axis=0)
        return part_by_part(collective, automatic, alone)(local)


_REDUCTIONS: dict[str, Callable[[jax.Array, Axes], jax.Array]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}


def take_shard(full: jax.Array, dim: int, axes: Axes, num_shards: int) -> jax.Array:
    """`[n, d] -> [n/k, d]`: this device's slice of a value that is the same on all. Moves nothing."""
    size = full.shape[dim] // num_shards
    return lax.dynamic_slice_in_dim(full, lax.axis_index(axes) * size, size, dim)


def pad(x: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """`[n, d] -> [n + p, d]`: zeros after it along `dim`, up to a size that `num_shards` divides."""
    more = -x.shape[dim] % num_shards
    if not more:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more * (d == dim), 0) for d in range(x.ndim)])


def filled_up(x: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """`[n, d] -> [n + p, d]`, likewise, but with the last of it again: zeros are no matrices to invert."""
    more = -x.shape[dim] % num_shards
    last = lax.slice_in_dim(x, x.shape[dim] - 1, x.shape[dim], axis=dim)
    return lax.concatenate([x, *[last] * more], dim) if more else x


def unpad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`[n + p, d] -> [n, d]`: without what was added along `dim`, which has `size`."""
    return x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)


def mask_padding(shard: jax.Array, dim: int, size: int, axes: Axes, fill: ArrayLike) -> jax.Array:
    """`[n/k, d]`, with `fill` where it holds padding of a dim of `size`."""
    index = lax.axis_index(axes) * shard.shape[dim] + jnp.arange(shard.shape[dim])
    inside = lax.broadcast_in_dim(index < size, shard.shape, (dim,))
    return jnp.where(inside, shard, jnp.asarray(fill, shard.dtype))
