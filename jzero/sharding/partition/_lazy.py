# SPDX-License-Identifier: Apache-2.0
"""Lazy values: iota, random bits, broadcasts and elementwise functions of these, made where they are read.

Each device computes its shard of positions and masks along a sharded sequence, and nothing is communicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import Dim, Layout, Partial
from jzero.ir._rules import BY_DEVICES, Cost
from jzero.ir._sent import cast
from jzero.sharding.partition._equations import met
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._look_ups import into_shards, may_add
from jzero.sharding.partition._values import DeviceValue, sized
from jzero.tracing import _jaxpr, _keys
from jzero.tracing._types import Atom, Eqn

_FREE = (Cost.ELEMENTWISE, Cost.CAST, Cost.VIEW, Cost.REPEAT, Cost.SOURCE, Cost.COPY)
LARGE = 2**20  # elements: a larger operand of a reduction is computed in shards


def may_wait(eqn: Eqn, ins: Sequence[DeviceValue]) -> bool:
    """Whether the equation is cheap in any layout, and may be written where it is read."""
    name, lazy = eqn.primitive.name, any(v.make is not None for v in ins)
    if not lazy and name not in ("iota", "random_bits", "broadcast_in_dim"):
        return False
    if len(eqn.outvars) != 1 or any(v.layout.partial for v in ins):
        return False
    size = eqn.outvars[0].aval.size
    if name == "iota":
        return not ins and size > 1
    if name == "random_bits":
        # Threefry computes bits by their position; other generators run replicated.
        counts = _keys.is_threefry(ins[0].aval.dtype) and not ins[0].aval.shape
        return counts and 1 < size < 2**32
    if name == "broadcast_in_dim":
        return len(ins) == 1 and (lazy or size > ins[0].aval.size)
    if name == "reshape" and len(ins) > 1:
        return False
    if name == "scatter-add":
        # To zeros: the gradient of indexing by row number (CLIP's labels), which has as many columns as rows.
        here = (v.make is not None or not v.rows and v.layout.is_replicated for v in ins)
        return ins[0].make is not None and all(here)
    if _rules.costs(eqn, Cost.REDUCTION):
        large = lazy and ins[0].aval.size >= LARGE and ins[0].layout.is_replicated
        return large and any(f.reduces in BY_DEVICES for f in _rules.factors_of(eqn))
    free = name != "tile" and _rules.costs(eqn, *_FREE) and size > 1
    return free and lazy and all(v.make is not None or v.aval.size == 1 for v in ins)


def lazy(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor]
) -> DeviceValue:
    out = eqn.outvars[0].aval
    layout = met(frame, eqn, ins, factors)
    if eqn.primitive.name == "reshape":
        layout = ins[0].layout.reshapable(out.shape).reshape(out.shape)
    rows = frozenset(a for v in ins for a in v.rows) & layout.axes
    views = eqn.primitive.name in ("broadcast_in_dim", "reshape") or _rules.is_float_cast(eqn)
    fill = ins[0].fill if ins and views else None
    if isinstance(fill, jax.Array) or fill is not None and fill.size != 1:
        fill = None
    make = functools.partial(_make, eqn, tuple(ins), tuple(factors), frame)
    return DeviceValue(out, layout, rows=rows, make=make, fill=fill)


def _make(
    eqn: Eqn, ins: tuple[DeviceValue, ...], factors: tuple[Factor, ...], home: DeviceFrame,
    frame: DeviceFrame, layout: Layout,
) -> Atom:  # fmt: skip
    assert home is frame, "a lazy value of another frame"
    source, frame.source = frame.source, eqn
    name = eqn.primitive.name
    if name == "iota":
        made = _iota(frame, eqn, layout)
    elif name == "random_bits":
        positions = [frame.positions(dim) for dim in layout.dims]
        static = eqn.params["shape"], eqn.params["bit_width"]
        made = frame.inline(_bits, static, frame.replica(ins[0]), *positions)
    elif name == "reshape":
        made = _reshape(frame, eqn, ins[0], layout)
    else:
        cut = {f.outs[0]: f for f in factors if f.outs[0] is not None and _is_cut(layout, f)}
        others = [d for d, dim in enumerate(layout.dims) if dim.cuts and d not in cut]
        added = [d for d in others if may_add(eqn, layout, d)]
        own_layout = frame.replicated(layout.shape).with_dims(
            {d: layout.dims[d] for d in (*cut, *added)}
        )
        shards, atoms = _to_reduce(frame, eqn, ins, factors, own_layout), []
        for k, value in enumerate(ins):
            shape, own = value.aval.shape, {} if k else dict(shards)
            for to, factor in cut.items():
                if (d := factor.ins[k]) is not None:
                    own[d] = sized(layout.dims[to], shape[d])
            own |= {d: layout.dims[d] for d in (added if k == 0 else ())}
            atoms.append(frame.at(value, frame.replicated(shape).with_dims(own)))
        for d in added:
            atoms[1] = into_shards(frame, eqn, own_layout, d, atoms[1])
        made = _written(frame, eqn, atoms, own_layout)
        axes = [cut.axis for dim in shards.values() for cut in dim.cuts]
        if axes:
            (op,) = {f.reduces or "" for f in factors if f.outs[0] is None}
            own_layout = own_layout.with_partial(*(Partial(axis, op) for axis in axes))
        made = frame.convert(made, own_layout, layout)
    frame.source = source
    return made


def _to_reduce(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], factors: Sequence[Factor], layout: Layout
) -> dict[int, Dim]:  # fmt: skip
    """The sharded dim of a large operand of a reduction: each device computes and reduces a part."""
    axes = [a for a in frame.mesh if a not in layout.axes | frame.over_time]
    num, cut = layout.num(axes), layout.num(layout.axes)
    if not _rules.costs(eqn, Cost.REDUCTION) or ins[0].aval.size // cut < LARGE or num == 1:
        return {}
    for factor in factors:
        d = factor.ins[0]
        if d is None or factor.reduces not in BY_DEVICES or ins[0].aval.shape[d] % num:
            continue
        return {d: frame.replicated(ins[0].aval.shape).shard(d, axes).dims[d]}
    return {}


def _is_cut(layout: Layout, factor: Factor) -> bool:
    assert factor.outs[0] is not None
    dim = layout.dims[factor.outs[0]]
    return bool(dim.cuts or dim.pad)


def _written(frame: DeviceFrame, eqn: Eqn, atoms: list[Atom], layout: Layout) -> Atom:
    shape = layout.local_shape
    more = {"shape": shape} if eqn.primitive.name == "broadcast_in_dim" else {}
    out = _jaxpr.var_like(eqn.outvars[0].aval, shape)
    return frame.clone(eqn, atoms, [out], params={**eqn.params, **more})[0]


def _iota(frame: DeviceFrame, eqn: Eqn, layout: Layout) -> Atom:
    out, d = eqn.outvars[0].aval, eqn.params["dimension"]
    line = frame.inline(cast, (out.dtype,), frame.positions(layout.dims[d]))
    return frame.inline(_along_dim, (layout.local_shape, d), line)


def _bits(shape: tuple[int, ...], width: int, key: jax.Array, *own: jax.Array) -> jax.Array:
    """Threefry's bits at the positions `own` of each dim: those of this device's shard."""
    local = tuple(at.shape[0] for at in own)
    place = jnp.zeros(local, jnp.uint32)
    for d, at in enumerate(own):
        step = jnp.asarray(math.prod(shape[d + 1 :]), jnp.uint32)
        place = place + lax.broadcast_in_dim(at.astype(jnp.uint32) * step, local, (d,))
    return _keys.threefry_bits(key, jnp.zeros(local, jnp.uint32), place, width)


def _along_dim(shape: tuple[int, ...], dim: int, line: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(line, shape, (dim,))


def _reshape(frame: DeviceFrame, eqn: Eqn, value: DeviceValue, layout: Layout) -> Atom:
    out = eqn.outvars[0].aval
    before = layout.reshapable(value.aval.shape).reshape(value.aval.shape)
    after = before.reshape(out.shape)
    params: dict[str, Any] = {**eqn.params, "new_sizes": after.local_shape}
    new = _jaxpr.var_like(out, after.local_shape)
    (made,) = frame.clone(eqn, [frame.at(value, before)], [new], params=params)
    return frame.convert(made, after, layout)
