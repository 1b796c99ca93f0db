# SPDX-License-Identifier: Apache-2.0
"""Look-ups and updates along a sharded dim: each device does those in its shard.

They add factors to `gather` and `scatter`, of the dim that a column of the indices counts. Look-ups of all
devices are summed. A `dynamic_slice` or `slice` of few elements along a sharded dim becomes a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import Dim, Layout
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

_MODES = (
    lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    lax.GatherScatterMode.FILL_OR_DROP,
)  # fmt: skip


class Shards(NamedTuple):
    """A dim as `[outer, num, inner]`, sharded by adjacent axes, with `true` elements."""

    axes: tuple[str, ...]
    outer: int
    num: int
    inner: int
    true: int


def shards_of(dim: Dim, layout: Layout) -> Shards | None:
    """None if it has none, or its axes are not adjacent, or it has padding inside."""
    if not dim.cuts or dim.pad is not None and (dim.pad.outer, dim.cuts[0].outer) != (1, 1):
        return None
    outer = at = dim.cuts[0].outer
    for cut in dim.cuts:
        if cut.outer != at:
            return None
        at *= layout.num([cut.axis])
    axes = tuple(cut.axis for cut in dim.cuts)
    return Shards(axes, outer, at // outer, dim.size // at, dim.true)


def factors(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> list[Factor]:
    """The factors of sharded dims along which it looks up, or updates, single elements."""
    if not _rules.costs(eqn, _rules.Cost.LOOKUP) or ins[0].make is not None:
        return []
    if jnp.issubdtype(ins[0].aval.dtype, jax.dtypes.extended):
        return []
    layout = ins[0].layout
    if eqn.primitive.name != "gather":
        dims = [d for d in range(len(layout.dims)) if may_update(eqn, layout, d)]
        return [Factor((d, None, None), (d,)) for d in dims]
    if eqn.params["mode"] not in _MODES:
        return []
    counted, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
    found = [d for d in counted if sizes[d] == 1 and shards_of(layout.dims[d], layout) is not None]
    return [Factor((d, None), (None,), "sum") for d in found if _may_sum(frame, layout.dims[d])]


def _may_sum(frame: DeviceFrame, dim: Dim) -> bool:
    """Microbatches cannot reduce inside a loop."""
    return frame.outer is None or frame.over_time.isdisjoint(cut.axis for cut in dim.cuts)


def is_look_up(eqn: Eqn, factor: Factor) -> bool:
    return eqn.primitive.name == "gather" and factor.reduces is not None


def looked_up(
    frame: DeviceFrame, eqn: Eqn, layout: Layout, dims: Sequence[int], operand: Atom, indices: Atom,
    write: Callable[[Atom], Atom],
) -> Atom:  # fmt: skip
    """A device's look-ups along sharded dims; zeros for look-ups in other shards."""
    numbers, mine = eqn.params["dimension_numbers"], list[Atom]()
    fills = eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    for d in dims:
        shards = shards_of(layout.dims[d], layout)
        assert shards is not None
        static = numbers.start_index_map.index(d), shards, fills
        index = frame.index(shards.axes)
        indices, inside = frame.trace(_in_shards, indices, index, static=static)
        mine.append(inside)
    found = write(indices)
    places = tuple(k for k in range(found.aval.ndim) if k not in numbers.offset_dims)
    return frame.inline(_if_mine, (places,), found, *mine)


def may_update(eqn: Eqn, layout: Layout, d: int) -> bool:
    """Whether each device can do the updates in its shard of a dim without the others."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    columns = numbers.scatter_dims_to_operand_dims
    known = mode in _MODES and (mode is not lax.GatherScatterMode.CLIP or len(columns) == 1)
    single = d in columns and d in numbers.inserted_window_dims
    return known and single and shards_of(layout.dims[d], layout) is not None


def may_add(eqn: Eqn, layout: Layout, d: int) -> bool:
    """Whether it adds, and drops updates out of bounds: those of other shards are out of bounds."""
    drops = eqn.params.get("mode") is lax.GatherScatterMode.FILL_OR_DROP
    return eqn.primitive.name == "scatter-add" and drops and may_update(eqn, layout, d)


def is_update(eqn: Eqn, factor: Factor) -> bool:
    if eqn.primitive.name == "gather" or not _rules.costs(eqn, _rules.Cost.LOOKUP):
        return False
    return factor.ins[0] is not None and factor.ins[1:] == (None, None)


def into_shards(frame: DeviceFrame, eqn: Eqn, layout: Layout, d: int, indices: Atom) -> Atom:
    """Indices of updates in this device's shard of a dim; those of other shards are just behind its end."""
    shards = shards_of(layout.dims[d], layout)
    assert shards is not None
    column = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims.index(d)
    clips = eqn.params["mode"] is lax.GatherScatterMode.CLIP
    index = frame.index(shards.axes)
    local, mine = frame.trace(_in_shards, indices, index, static=(column, shards, not clips))
    if not clips:
        return local
    return frame.inline(_others_behind, (column, shards.outer * shards.inner), local, mine)


def updated(
    frame: DeviceFrame, eqn: Eqn, layout: Layout, dims: Sequence[int], ins: Sequence[Atom],
    params: dict[str, Any],
) -> Atom:  # fmt: skip
    """This device's shard with its updates; one extra element behind it takes those of other shards.

    [Note: one element more] Updates out of bounds do not work: XLA:CPU merges a slice of a slice into one and
    forgets to clamp, so that in a slice of a larger array it writes the element behind the slice
    (docs/facts.md#a-slice-of-a-slice-forgets-to-clamp;
    test_partition_rules.py::test_one_update_of_rows_that_were_moved).
    """
    operand, indices, *updates = ins
    for d in dims:
        indices = into_shards(frame, eqn, layout, d, indices)
    longer = frame.inline(_with_one_more, (tuple(dims),), operand)
    params |= {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False,
               "unique_indices": False}  # fmt: skip
    made = _jaxpr.var_like(longer.aval)
    frame.clone(eqn, [longer, indices, *updates], [made], params=params)
    return frame.inline(_without_the_last, (tuple(dims),), made)


def _others_behind(column: int, size: int, indices: jax.Array, mine: jax.Array) -> jax.Array:
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where((columns == column) & ~mine[..., None], size, indices)


def _with_one_more(dims: tuple[int, ...], x: jax.Array) -> jax.Array:
    for d in dims:
        x = lax.concatenate([x, lax.slice_in_dim(x, 0, 1, axis=d)], d)
    return x


def _without_the_last(dims: tuple[int, ...], x: jax.Array) -> jax.Array:
    for d in dims:
        x = lax.slice_in_dim(x, 0, x.shape[d] - 1, axis=d)
    return x


def along_indices(eqn: Eqn, layout: Layout, dim: Dim) -> Layout | None:
    """Where look-ups are scattered without a hint: along the longest dim of the indices."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    free = [d for d in range(len(layout.dims)) if d not in offsets and not layout.dims[d].cuts]
    axes = [cut.axis for cut in dim.cuts]
    even = [d for d in free if layout.dims[d].size and layout.dims[d].size % layout.num(axes) == 0]
    if not even:
        return None
    return layout.reduced(axes).shard(max(even, key=lambda d: layout.dims[d].size), axes)


def _in_shards(
    column: int, shards: Shards, fills: bool, indices: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Local indices, and which of them are in this device's shard.

    Indices out of bounds go to the first device, out of its bounds, where the operation's mode decides.
    """
    _, outer, num, inner, true = shards
    at = jnp.minimum(indices[..., column], min(true, jnp.iinfo(indices.dtype).max))
    at = at.astype(jnp.int32)
    if not fills:
        at = jnp.clip(at, 0, true - 1)
    block, place = at // (num * inner), at % (num * inner)
    outside = (at < 0) | (at >= true)
    inside = ~outside & (place // inner == index)
    local = jnp.where(inside, block * inner + place % inner, outer * inner if fills else 0)
    columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    most = jnp.iinfo(indices.dtype).max
    others = jnp.minimum(indices, min(most, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
    return jnp.where(columns == column, local[..., None], others), inside | outside & (index == 0)


def _if_mine(places: tuple[int, ...], found: jax.Array, *mine: jax.Array) -> jax.Array:
    for each in mine:
        inside = lax.broadcast_in_dim(each, found.shape, places)
        found = jnp.where(inside, found, jnp.zeros((), found.dtype))
    return found


def is_elsewhere(value: DeviceValue, d: int) -> bool:
    """Whether the value already exists with another dim sharded over the dim's axes."""
    axes = [cut.axis for cut in value.layout.dims[d].cuts]
    places = [layout.place(axis) for layout in value.atoms for axis in axes]
    return any(place is not None and place[0] != d for place in places)


# -- slices --------------------------------------------------------------------------------------------
def slices(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> Any:
    """A slice of few elements along a sharded dim, as look-ups: `(function, static)`; None for others."""
    name = eqn.primitive.name
    if name not in ("slice", "dynamic_slice") or ins[0].make is not None:
        return None
    value = ins[0]
    if jnp.issubdtype(value.aval.dtype, jax.dtypes.extended):
        return None
    shape, out = value.aval.shape, eqn.outvars[0].aval.shape
    for d, dim in enumerate(value.layout.dims):
        cut = out[d] != shape[d] and 0 not in out and shards_of(dim, value.layout) is not None
        if not cut or is_elsewhere(value, d) or not _may_sum(frame, dim):
            continue
        axes = [cut.axis for cut in dim.cuts]
        n = value.layout.num(axes)
        other = any(
            e != d and not x.cuts and x.size % n == 0 for e, x in enumerate(value.layout.dims)
        )
        # By an all-to-all, each device would get a part of another dim.
        gathered = sum(frame.price(value, axis, None) for axis in axes) / (n if other else 1)
        summed = 2 * _rules.size_in_bytes(eqn.outvars[0].aval) * (n - 1) / n
        if max(frame.wire(axis, "reduce", summed) for axis in axes) < gathered:
            if name == "dynamic_slice":
                return _dynamic_rows, (d, eqn.params["slice_sizes"])
            names = "start_indices", "limit_indices", "strides"
            starts, limits, strides = (eqn.params[name] for name in names)
            return _rows, (d, starts, limits, strides or (1,) * len(shape))
    return None


def _dynamic_rows(dim: int, sizes: tuple[int, ...], x: jax.Array, *starts: jax.Array) -> jax.Array:
    """`lax.dynamic_slice(x, starts, sizes)`, whose starts are in bounds."""
    at = starts[dim].astype(jnp.int32) + lax.iota(jnp.int32, sizes[dim])
    found, others = _found(dim, x, at), [*starts]
    others[dim] = jnp.zeros_like(starts[dim])
    return found if found.shape == sizes else lax.dynamic_slice(found, others, sizes)


def _rows(
    dim: int, starts: tuple[int, ...], limits: tuple[int, ...], strides: tuple[int, ...], x: jax.Array
) -> jax.Array:  # fmt: skip
    num = -(-(limits[dim] - starts[dim]) // strides[dim])
    at = jnp.int32(starts[dim]) + lax.iota(jnp.int32, num) * jnp.int32(strides[dim])
    found = _found(dim, x, at)
    starts, limits, strides = (
        (*old[:dim], new, *old[dim + 1 :])
        for old, new in ((starts, 0), (limits, num), (strides, 1))
    )
    return lax.slice(found, starts, limits, strides)


def _found(dim: int, x: jax.Array, at: jax.Array) -> jax.Array:
    sizes = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(x.ndim) if d != dim), collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
    )  # fmt: skip
    return lax.gather(x, at[:, None], numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
