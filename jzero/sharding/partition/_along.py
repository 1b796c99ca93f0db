# SPDX-License-Identifier: Apache-2.0
"""Equations that work along a sharded dim: each device computes its shard, and little is communicated.

Argmax, top-k, cumulative sums, concatenations, splits, slices and pads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._layout import AxisCut, Dim, Layout, Pad, Partial
from jzero.ir._sent import ordered_integers
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._look_ups import is_elsewhere, shards_of
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

DeviceValues = list[DeviceValue]
_COMPARED = "each device finds its own, and they are compared"


def along(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """The results of an equation along a sharded dim; None if no dim is, or if a gather is no dearer."""
    sharded = any(v.make is None and v.layout.axes for v in ins)
    return _HANDLERS[eqn.primitive.name](frame, eqn, ins) if sharded else None


def _value(eqn: Eqn, j: int, layout: Layout, x: Atom, like: DeviceValue) -> DeviceValue:
    aval, axes = eqn.outvars[j].aval, layout.axes
    return DeviceValue(aval, layout, {layout: x}, like.rows & axes)


def _gather_price(frame: DeviceFrame, value: DeviceValue, axes: Sequence[str]) -> int:
    return sum(frame.price(value, axis, None) for axis in axes)


# -- argmax and top-k ------------------------------------------------------------------------------------
def _arg_extreme(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """Reduces the extreme, and then the first position that has it; NaN counts as in JAX.

    The extreme of Booleans is known; if no element has it, position 0 is right.
    """
    (value,), (d,), out = ins, eqn.params["axes"], eqn.outvars[0].aval
    layout, dtype = value.layout, value.aval.dtype
    axes, kind = [cut.axis for cut in layout.dims[d].cuts], eqn.primitive.name[3:]
    plain = dtype == jnp.bool_ or any(jnp.issubdtype(dtype, x) for x in (jnp.integer, jnp.floating))
    n = layout.num(axes)
    two = 2 * (getattr(dtype, "itemsize", 4) + 4) * out.size * (n - 1) / n
    price = max((frame.wire(axis, "reduce", two) for axis in axes), default=0)
    if not axes or not plain or price >= _gather_price(frame, value, axes):
        return None
    after = dataclasses.replace(layout, dims=(*layout.dims[:d], *layout.dims[d + 1 :]))
    x = frame.masked(frame.at(value, layout), layout, d, kind)
    (place,) = frame.clone(eqn, [x], [_jaxpr.var_like(out, after.local_shape)])
    static = kind, d
    best, number = frame.trace(_best, x, place, frame.positions(layout.dims[d]), static=static)
    size = layout.dims[d].true
    most: Atom = _jaxpr.scalar(int(kind == "max"), np.int32)
    if dtype != jnp.bool_:
        most = _reduced(frame, best, after, axes, kind)
    number = frame.inline(_unless, (size,), best, most, number)
    first = _reduced(frame, number, after, axes, "min")
    found = frame.inline(_first, (size, str(out.dtype)), first)
    return [_value(eqn, 0, after, found, value)]


def _reduced(frame: DeviceFrame, x: Atom, layout: Layout, axes: Sequence[str], op: str) -> Atom:
    terms = layout.with_partial(*(Partial(axis, op) for axis in axes))
    return frame.convert(x, terms, layout, why=_COMPARED)


def _best(
    kind: str, dim: int, x: jax.Array, place: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The extreme of a device's shard, as an integer, and its global position."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = ordered_integers(kind, jnp.where(x == 0, jnp.zeros_like(x), x))  # -0.0 is no smaller
    elif x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    best = jnp.max(x, dim) if kind == "max" else jnp.min(x, dim)
    return best, positions[place]


def _unless(size: int, best: jax.Array, most: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.where(best == most, number, size)


def _first(size: int, dtype: str, number: jax.Array) -> jax.Array:
    return jnp.where(number == size, 0, number).astype(dtype)


def _top_k(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """The k largest of each shard, and of these the k largest; equal ones keep their order."""
    (value,), k = ins, eqn.params["k"]
    layout, d = value.layout, eqn.params["axis"] % value.aval.ndim
    shards, mine = shards_of(layout.dims[d], layout), min(k, layout.local_shape[d])
    if shards is None or shards.outer > 1 or layout.dims[d].pad is not None or not k:
        return None
    of_each = layout.with_dims({d: Dim(mine * shards.num, layout.dims[d].cuts)})
    of_all = of_each.without(shards.axes)
    nbytes = (getattr(value.aval.dtype, "itemsize", 4) + 4) * math.prod(of_all.local_shape)
    price = max(frame.wire(axis, "gather", nbytes) for axis in shards.axes)
    if price >= min(_gather_price(frame, value, shards.axes), _exchanged_price(frame, value, d)):
        return None
    outs = [_jaxpr.var_like(var.aval, of_each.local_shape) for var in eqn.outvars]
    found = frame.clone(eqn, [frame.at(value, layout)], outs, params=eqn.params | {"k": mine})
    largest, places = found[0], frame.inline(_placed, (), found[1], frame.positions(layout.dims[d]))
    every = [frame.convert(x, of_each, of_all, why=_COMPARED) for x in (largest, places)]
    after = of_all.with_dims({d: Dim(k)})
    outs = [_jaxpr.var_like(var.aval, after.local_shape) for var in eqn.outvars]
    best, chosen = frame.clone(eqn, [every[0]], outs)
    picked = frame.inline(_picked, (d,), every[1], chosen)
    return [_value(eqn, j, after, x, value) for j, x in enumerate((best, picked))]


def _exchanged_price(frame: DeviceFrame, value: DeviceValue, dim: int) -> float:
    """The price of an all-to-all to another dim; infinite if the devices divide no other."""
    axes, layout = [cut.axis for cut in value.layout.dims[dim].cuts], value.layout
    free = [d for d, each in enumerate(layout.dims) if d != dim and not each.cuts]
    n = layout.num(axes)
    fit = [d for d in free if layout.dims[d].size % n == 0]
    if not fit or frame.over_time.intersection(axes):
        return math.inf
    return sum(frame.price(value, axis, fit[0], 1) for axis in axes)


def _placed(places: jax.Array, positions: jax.Array) -> jax.Array:
    return positions[places].astype(places.dtype)


def _picked(dim: int, x: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, chosen, dim)


# -- cumulative sums -----------------------------------------------------------------------------------
_RUNNING: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "cumsum": ("sum", lax.add), "cumprod": ("prod", lax.mul), "cummax": ("max", lax.max),
    "cummin": ("min", lax.min),
}  # fmt: skip


def _running(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """The shard's cumulative sum (product, extreme), combined with the totals of the shards before it."""
    (value,), d = ins, eqn.params["axis"]
    layout, name = value.layout, eqn.primitive.name
    shards = shards_of(layout.dims[d], layout)
    if shards is None or value.aval.dtype == jnp.bool_:
        return None
    num = shards.outer * shards.num
    totals = layout.with_dims({d: Dim(num, layout.dims[d].cuts)})
    nbytes = _rules.size_in_bytes(value.aval) / value.aval.shape[d] * num
    price = max(frame.wire(axis, "gather", nbytes) for axis in shards.axes)
    if price >= _gather_price(frame, value, shards.axes):
        return None
    x = frame.masked(frame.at(value, layout), layout, d, _RUNNING[name][0])
    shape, reverse = layout.local_shape, eqn.params["reverse"]
    blocks = (*shape[:d], shards.outer, shards.inner, *shape[d + 1 :])
    (own,) = frame.clone(
        eqn, [frame.reshape(x, blocks)], [_jaxpr.var_like(value.aval, blocks)],
        params=eqn.params | {"axis": d + 1},
    )  # fmt: skip
    last = frame.inline(_last, (d + 1, reverse), own)
    why = "the totals of the devices are exchanged"
    every = frame.convert(last, totals, totals.without(shards.axes), why=why)
    out = frame.inline(_behind, (name, d, reverse), own, every, frame.index(shards.axes))
    out = frame.reshape(out, shape)
    return [_value(eqn, 0, layout, out, value)]


def _last(dim: int, reverse: bool, x: jax.Array) -> jax.Array:
    return lax.index_in_dim(x, 0 if reverse else -1, dim, keepdims=False)


def _behind(
    name: str, dim: int, reverse: bool, own: jax.Array, totals: jax.Array, index: jax.Array
) -> jax.Array:
    reduces, combine = _RUNNING[name]
    running: Callable[..., jax.Array] = getattr(lax, name)
    upto = running(totals, dim, reverse=reverse)
    neutral = jnp.asarray(_rules.neutral(reduces, upto.dtype), upto.dtype)
    shift = [((1, -1, 0), (-1, 1, 0))[reverse] if d == dim else (0, 0, 0) for d in range(upto.ndim)]
    before = lax.pad(upto, neutral, shift)
    outer = own.shape[dim]
    parts = before.reshape(*before.shape[:dim], outer, -1, *before.shape[dim + 1 :])
    mine = lax.dynamic_slice_in_dim(parts, index, 1, dim + 1)
    return combine(own, jnp.broadcast_to(mine, own.shape))


# -- parts ---------------------------------------------------------------------------------------------
def _concatenate(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """Operands must be sharded alike or replicated: a device concatenates its shards of them."""
    d, num = eqn.params["dimension"], len(ins)
    shards = [v for v in ins if v.make is None and v.layout.dims[d].cuts]
    own = shards[0].layout if shards else ins[0].layout
    dim = own.dims[d]
    for v in ins:
        free = v.make is not None or v.layout.is_replicated
        if not dim.cuts or v.layout.dims != own.dims and not (free and v.aval.shape == own.shape):
            return None
    pad = dim.pad and Pad(num * dim.pad.outer, dim.pad.true)
    new = Dim(num * dim.size, tuple(AxisCut(axis, num * outer) for axis, outer in dim.cuts), pad)
    layout = own.with_dims({d: new})
    out = _jaxpr.var_like(eqn.outvars[0].aval, layout.local_shape)
    frame.clone(eqn, [frame.at(v, own) for v in ins], [out])
    rows = frozenset(a for v in ins for a in v.rows)
    return [dataclasses.replace(_value(eqn, 0, layout, out, shards[0]), rows=rows & layout.axes)]


def _split(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """A dim that is cut in blocks, into parts of whole blocks."""
    value, d = ins[0], eqn.params["axis"]
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    parts = [_blocks(value.layout, d, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    layouts = [layout for layout in parts if layout is not None]
    if len(layouts) < len(parts):
        return None
    sizes = tuple(layout.local_shape[d] for layout in layouts)
    outs = [
        _jaxpr.var_like(var.aval, layout.local_shape)
        for var, layout in zip(eqn.outvars, layouts, strict=True)
    ]
    frame.clone(eqn, [frame.at(value, value.layout)], outs, params=eqn.params | {"sizes": sizes})
    return [_value(eqn, j, layouts[j], x, value) for j, x in enumerate(outs)]


def _slice(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """Whole blocks of a dim that is cut in blocks; or most rows from the beginning, the rest as padding."""
    (value,), params = ins, eqn.params
    layout, shape, out = value.layout, value.aval.shape, eqn.outvars[0].aval.shape
    starts, limits = [*params["start_indices"]], [*params["limit_indices"]]
    strides = params["strides"] or (1,) * len(shape)
    cut = [d for d in range(len(shape)) if layout.dims[d].cuts and out[d] != shape[d]]
    if not cut or any(strides[d] != 1 for d in cut) or 0 in out:
        return None
    if (found := _from_replicated(frame, eqn, value, cut)) is not None:
        return [found]
    after = layout
    for d, (size, dim) in enumerate(zip(out, layout.dims, strict=True)):
        if d in cut:
            part = _blocks(after, d, starts[d], limits[d])
            rows = any(cut.axis in value.rows for cut in dim.cuts)
            if part is None and rows and not is_elsewhere(value, d):
                part = _beginning(after, d, starts[d], size)
            if part is None:
                return None
            after = part
            starts[d] = starts[d] * layout.local_shape[d] // shape[d]
            limits[d] = starts[d] + after.local_shape[d]
        elif size != shape[d]:
            after = after.with_dims({d: Dim(size)})
            if dim.pad is not None:
                return None
        else:
            starts[d], limits[d] = 0, layout.local_shape[d]
    new = _jaxpr.var_like(eqn.outvars[0].aval, after.local_shape)
    given = params | {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
    frame.clone(eqn, [frame.at(value, layout)], [new], params=given)
    return [_value(eqn, 0, after, new, value)]


def _from_replicated(
    frame: DeviceFrame, eqn: Eqn, value: DeviceValue, cut: Sequence[int]
) -> DeviceValue | None:
    """Evenly sharded, if padded dims are gathered already: all tokens but the last."""
    layout, out = value.layout, eqn.outvars[0].aval.shape
    cuts = [(d, c.axis) for d in cut for c in layout.dims[d].cuts]
    source = layout.without([axis for _, axis in cuts])
    new = {d: Dim(n) for d, n in enumerate(out) if n != layout.shape[d]}
    is_there = any(not frame.price_from(value, x, source) for x in value.atoms)
    padded = all(layout.dims[d].pad is not None for d in cut)
    others = any(source.dims[d].cuts or source.dims[d].pad for d in new)
    if not (is_there and padded) or others or eqn.params["strides"] is not None:
        return None
    replicated = after = source.with_dims(new)
    for dim, axis in cuts:
        after = after.cut(dim, axis)
    if any(after.dims[d].pad is not None for d in cut):
        return None
    starts = tuple(s if d in new else 0 for d, s in enumerate(eqn.params["start_indices"]))
    limits = tuple(s + n for s, n in zip(starts, replicated.local_shape, strict=True))
    made = _jaxpr.var_like(eqn.outvars[0].aval, replicated.local_shape)
    given = eqn.params | {"start_indices": starts, "limit_indices": limits}
    frame.clone(eqn, [frame.at(value, source)], [made], params=given)
    return _value(eqn, 0, after, frame.convert(made, replicated, after), value)


def _blocks(layout: Layout, d: int, start: int, stop: int) -> Layout | None:
    """The layout of whole blocks of a dim; None if the range is not one of whole blocks."""
    dim = layout.dims[d]
    if not dim.cuts:
        return None
    num, pad = dim.cuts[0].outer, dim.pad
    if pad is not None and num % pad.outer:
        return None
    num = num if pad is None else pad.outer
    block, size = dim.true // num, stop - start
    if not size or start % block or stop % block:
        return None
    part = size // block
    cuts = tuple(AxisCut(axis, outer * part // num) for axis, outer in dim.cuts)
    return layout.with_dims({d: Dim(dim.size * part // num, cuts, pad and Pad(part, pad.true))})


def _beginning(layout: Layout, d: int, start: int, size: int) -> Layout | None:
    """The layout of most of a dim from its beginning; the rest becomes padding."""
    dim = layout.dims[d]
    padded = dim.pad is not None and dim.pad.outer > 1
    if start or padded or 2 * size <= dim.size or dim.cuts[0].outer > 1:
        return None
    return layout.with_dims({d: dim._replace(pad=Pad(1, size))})


def _pad(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> DeviceValues | None:
    """A pad behind the end that fills exactly the padding of a dim: the gradient of `_beginning`."""
    value, fill = ins
    changed = [d for d, by in enumerate(eqn.params["padding_config"]) if by != (0, 0, 0)]
    if len(changed) != 1 or value.make is not None:
        return None
    (d,), layout = changed, value.layout
    low, high, inside = eqn.params["padding_config"][d]
    dim = layout.dims[d]
    if dim.pad is None or dim.pad.outer != 1 or low or inside or dim.true + high != dim.size:
        return None
    frame.reduce(fill)
    with_fill = frame.filled(frame.at(value, layout), layout, d, frame.replica(fill))
    after = layout.with_dims({d: dim._replace(pad=None)})
    return [_value(eqn, 0, after, with_fill, value)]


_HANDLERS: dict[str, Callable[[DeviceFrame, Eqn, Sequence[DeviceValue]], DeviceValues | None]] = {
    "argmax": _arg_extreme, "argmin": _arg_extreme, "concatenate": _concatenate, "split": _split,
    "slice": _slice, "pad": _pad, "top_k": _top_k, **dict.fromkeys(_RUNNING, _running),
}  # fmt: skip
NAMES = frozenset(_HANDLERS)
