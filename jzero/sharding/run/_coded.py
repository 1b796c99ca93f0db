# SPDX-License-Identifier: Apache-2.0
"""Gathers and reductions whose values travel as codes of few bits: rows of bytes, one collective each.

All of them run inside a `shard_map`, as those of `_collectives`, and have their results but for rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jzero._blocks import Blocks
from jzero.sharding.passes import _codes
from jzero.sharding.passes._in_place import row_major
from jzero.sharding.passes._waits import not_before
from jzero.sharding.plan._coded_form import CodedForm
from jzero.sharding.plan._layout import Automatic
from jzero.sharding.run import _collectives
from jzero.sharding.run._collectives import Axes, gather_scope, part_by_part
from jzero.sharding.run._values import CodedValue, Settled, ShardValue
from jzero.tracing._types import Eqn


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


def value_of(rows: jax.Array, form: CodedForm, axes: Axes = (), name: str = "") -> CodedValue:
    """One device's rows of a leaf that rests in codes, cut over `axes`."""
    size = 0 if form.dim is None else form.shape[form.dim]
    return CodedValue(rows, form.blocks, form.dtype, form.part, form.dim, size, axes, name)


def gather_rows(rows: jax.Array, value: CodedValue, axes: Axes) -> jax.Array:
    """Of a leaf that rests in codes its rows `[..., parts, bytes]`, with those of all devices of `axes`."""
    dim = value.num_stacked if value.is_cut_in_rows else value.dim
    assert dim is not None
    return _collectives.gather(rows, dim, axes, value.name, ())


def cast(value: CodedValue, dtype: str, scope: Hashable) -> Settled:
    """A leaf that rests in codes, cast when it was decoded."""
    key = (scope, "cast", dtype)
    if key not in value.views:
        value.views[key] = dataclasses.replace(
            value, casts=(*value.casts, dtype), origin=value.origin or value, gathered={}, views={}
        )
    return value.views[key]


def view(
    value: CodedValue, eqn: Eqn, indices: Iterable[jax.Array], scope: Hashable
) -> Settled | None:
    """A cast of a leaf that rests in codes, or a slice of its stack, still in codes; None of all else."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return cast(value, str(eqn.params["new_dtype"]), scope)
    if name not in ("slice", "dynamic_slice", "squeeze"):
        return None
    key = (scope, name, str(eqn.params))
    if name != "dynamic_slice" and key in value.views:
        return value.views[key]
    found = sliced(value, eqn, list(indices))
    if found is not None and name != "dynamic_slice":
        value.views[key] = found
    return found


def own_part(value: CodedValue, scope: Hashable) -> Settled:
    """This device's part of a leaf that rests in codes, decoded; gathered are codes."""
    key = (scope, "own part")
    if key not in value.views:
        assert value.dim is not None
        x, view = decode_rows(value.rows, value), (value, lambda whole: whole)
        value.views[key] = ShardValue(
            x, value.dim, value.size, value.axes, value.name, view_of=view
        )
    return value.views[key]


def sliced(value: CodedValue, eqn: Eqn, indices: Sequence[jax.Array]) -> CodedValue | None:
    """A slice of a stack that rests in codes; None if rows, or what devices divide, would be cut.

    Args:
      value: the stack.
      eqn: a `slice`, `dynamic_slice` or `squeeze` of it.
      indices: where a dynamic one starts.
    """
    rows, num, params = value.rows, value.num_stacked, eqn.params
    kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d >= num or d == value.dim]
    if eqn.primitive.name == "squeeze":
        gone = params["dimensions"]
        if any(d in kept for d in gone):
            return None
        dim = None if value.dim is None else value.dim - sum(d < value.dim for d in gone)
        return _stack_of(value, lax.squeeze(rows, gone), dim)
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if any(shape[d] != out[d] for d in kept):
        return None
    sizes = [rows.shape[d] if d in kept else out[d] for d in range(num)] + [*rows.shape[num:]]
    if eqn.primitive.name == "dynamic_slice":
        zero = jnp.zeros((), indices[0].dtype)
        starts = [zero if d in kept else index for d, index in enumerate(indices[:num])]
        # What was below 0 was counted from the end before: what still is, is clamped.
        part = lax.dynamic_slice(rows, [*starts, zero, zero], sizes, allow_negative_indices=False)
        return _stack_of(value, part, value.dim)
    first = [0 if d in kept else params["start_indices"][d] for d in range(num)] + [0, 0]
    steps = [*(params["strides"] or [1] * len(shape))]
    steps = [1 if d in kept else steps[d] for d in range(num)] + [1, 1]
    stops = [a + (n - 1) * step + 1 for a, n, step in zip(first, sizes, steps, strict=True)]
    return _stack_of(value, lax.slice(rows, first, stops, steps), value.dim)


def _stack_of(value: CodedValue, rows: jax.Array, dim: int | None) -> CodedValue:
    return dataclasses.replace(value, rows=rows, dim=dim, origin=None, gathered={}, views={})


def with_all_rows(value: CodedValue, rows: jax.Array) -> CodedValue:
    """A leaf that rests in codes, of which these `rows` are all."""
    dim = value.dim
    if dim is not None and not value.is_cut_in_rows:  # Then all is there that is said of it.
        rows, dim = _collectives.unpad(rows, dim, value.size), None
    return dataclasses.replace(
        value, rows=rows, axes=(), dim=dim, origin=None, gathered={}, views={}
    )


def nbytes_of_rows(value: CodedValue, sizes: Mapping[str, int]) -> int:
    """Bytes of all rows of a leaf, of mesh axes of these sizes."""
    return int(value.rows.nbytes) * math.prod(sizes[axis] for axis in value.axes)


def without_padding(x: jax.Array, value: CodedValue) -> jax.Array:
    """The whole `[n, d]` that was decoded of all rows."""
    return x if value.dim is None else _collectives.unpad(x, value.dim, value.size)


def decode_rows(rows: jax.Array, value: CodedValue) -> jax.Array:
    """These rows of a leaf that rests in codes, `[..., parts, bytes]`, as floats `[..., n, d]`, cast."""
    *stack, parts, nbytes = rows.shape
    num = math.prod(value.part)
    x = _codes.decode(rows.reshape(-1, nbytes), num, value.dtype, value.blocks)
    x = x.reshape(*stack, parts, *value.part)
    dim = len(stack) if value.dim is None else max(value.dim, len(stack))
    x = jnp.moveaxis(x, len(stack), dim)  # a part's own dims follow it
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]) if value.part else x[..., 0]
    for dtype in value.casts:
        x = x.astype(dtype)
    return x


def encode_rows(x: jax.Array, form: CodedForm) -> jax.Array:
    """One device's part of a leaf, `[..., n/k, d]` with padding, as rows `[..., 1, bytes]`."""
    stack = x.shape[: form.num_stacked]
    rows = _codes.encode(x.reshape(-1, math.prod(form.part)), form.blocks)
    return rows.reshape(*stack, 1, rows.shape[1])


def reduce_scatter(
    local: jax.Array, dim: int, sizes: Mapping[str, int], hops: Sequence[str],
    codes: Mapping[str, Blocks | None], name: str, automatic: Automatic, tokens: Sequence[jax.Array],
    alone: Axes = (),
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
      tokens: the first hop waits for them; none where XLA shards the leaf, or might.
      alone: axes over which XLA shall not.
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
        return part_by_part(collective, automatic, alone)(local)


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
    if codes is None or parts.shape[0] == 1:  # From one device nothing travels.
        parts = not_before(parts, tokens)
        total: jax.Array = lax.psum_scatter(parts, axis, scatter_dimension=0, tiled=False)
        return total
    rows = not_before(_codes.encode(parts.reshape(parts.shape[0], -1), codes), tokens)
    rows = lax.all_to_all(rows, axis, 0, 0, tiled=True)
    wide = jnp.promote_types(parts.dtype, jnp.float32)
    terms = _codes.decode(rows, parts[0].size, wide, codes)
    return jnp.sum(terms, axis=0).reshape(parts.shape[1:])
