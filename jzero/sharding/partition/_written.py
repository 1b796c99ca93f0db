# SPDX-License-Identifier: Apache-2.0
"""Steps that are written for one device, with collectives of their own.

[Note: device-varying values] In such a step a device-varying value has the shape that the step gives it, and
no layout says what it is a shard of. Equations that read one are kept as they are, on replicated operands.
Values that depend on the state alone stay sharded, and are gathered where they meet device-varying ones. A
`psum` over all axes over which a value varies is a partial sum, as a sum over the batch is in other steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax import lax

from jzero.ir import _rules
from jzero.ir._errors import cannot, cannot_in_time
from jzero.ir._layout import Partial
from jzero.ir._regions import Region
from jzero.sharding.analysis._frames import COLLECTIVES, GATHERS, REDUCTIONS
from jzero.sharding.partition import _lazy, _look_ups
from jzero.sharding.partition._equations import ordinary
from jzero.sharding.partition._frame import DeviceFrame, WrittenStep
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

_REDUCES = dict.fromkeys(REDUCTIONS, "sum") | {"pmax": "max", "pmin": "min"}


def equation(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: Sequence[DeviceValue]
) -> list[DeviceValue] | None:
    """Writes a collective of the step's own, or an equation of device-varying values; None for others."""
    if (written := frame.shared.written) is None:
        return None
    if eqn.primitive.name in COLLECTIVES:
        return _collective(frame, region, written, eqn, ins)
    own = frozenset[str]().union(*(v.own for v in ins))
    acts = _jaxpr.has_side_effects(eqn)
    if not own and not acts:
        return None
    if acts and _jaxpr.has_ordered_effects(eqn):
        raise cannot(
            "it is an ordered effect beside collectives of the step's own", eqn, region,
            "Each device would call the host by itself, in no order.",
            "Drop ordered=True, or write the step for the whole batch, without collectives.",
        )  # fmt: skip
    if (rows := _looked_up(frame, eqn, ins, own)) is not None:
        return [rows]
    found = [frame.value(x, own) for x in frame.clone(eqn, [*map(frame.replica, ins)])]
    if _adds_rows(frame, eqn, ins):
        found[0].sum = functools.partial(_of_all_rows, frame, eqn, ins)
    return found


def _collective(
    frame: DeviceFrame, region: Region, written: WrittenStep, eqn: Eqn, ins: Sequence[DeviceValue]
) -> list[DeviceValue]:
    axes, name = written.axes(_jaxpr.axes_of(eqn)), eqn.primitive.name
    if name == "axis_index":
        return [frame.value(frame.index(axes), frozenset(axes))]
    if frame.diverges:
        raise cannot(
            "it is a collective inside a loop or branch in which not all devices are", eqn, region,
            "All devices must take part in a collective, or those that do would wait for ever.",
            "Move it out of there, or compute both branches and choose with jnp.where.",
        )  # fmt: skip
    grouped = eqn.params.get("axis_index_groups")
    op = None if grouped else _REDUCES.get(name)
    if op is not None and all(v.own.issubset(axes) for v in ins):
        each = zip(ins, eqn.outvars, strict=True)
        return [_reduced(frame, op, axes, v, out) for v, out in each]
    atoms, time = [*map(frame.replica, ins)], frame.over_time.intersection(axes)
    if time and name == "reduce_scatter" and not grouped:
        return [frame.value(_scattered(frame, eqn, axes, atoms[0]), frozenset(axes))]
    if time and (grouped or op is None and name not in GATHERS):
        raise cannot_in_time(
            f"it is a collective over {'groups of ' * bool(grouped)}{_jaxpr.axes_of(eqn)} that gives each "
            "device something else",
            eqn, region, "Drop microbatches, or use psum, pmean, all_gather, pmax or pmin.",
        )  # fmt: skip
    own = tuple(axis for axis in axes if axis not in time)
    if time and op is None:  # A gather comes first of all: one collective serves all microbatches.
        eqn, atoms = _gathered_over_time(frame, eqn, ins)
    key = "axes" if "axes" in eqn.params else "axis_name"
    outs, params = [*map(_jaxpr.new_var, eqn.outvars)], eqn.params | {key: own}
    frame.eqns.append(_jaxpr.equation(eqn.primitive, atoms, outs, frame.source, **params))
    made: Sequence[Atom] = outs
    if time and op is not None:
        partial = [Partial(axis, op) for axis in frame.over_time]
        layouts = [frame.replicated(x.aval.shape) for x in outs]
        made = [
            frame.convert(x, y.with_partial(*partial), y)
            for x, y in zip(outs, layouts, strict=True)
        ]
    return [frame.value(x, frozenset(axes)) for x in made]


def _scattered(frame: DeviceFrame, eqn: Eqn, axes: Sequence[str], x: Atom) -> Atom:
    replicated, dim = frame.replicated(x.aval.shape), eqn.params["scatter_dimension"]
    part = replicated.shard(dim, axes)
    own = frame.convert(x, replicated.with_partial(*map(Partial, axes)), part)
    return own if eqn.params["tiled"] else frame.reshape(own, eqn.outvars[0].aval.shape)


def _gathered_over_time(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]
) -> tuple[Eqn, list[Atom]]:
    """A gather over devices and microbatches: the devices gather each one's microbatches together."""
    (value,), dim, (time,) = ins, eqn.params["all_gather_dimension"], frame.over_time
    if not eqn.params["tiled"]:
        shape = (*value.aval.shape[:dim], 1, *value.aval.shape[dim:])
        value = frame.value(frame.reshape(frame.replica(value), shape), value.own)
    params = eqn.params | {"tiled": True, "axis_size": eqn.params["axis_size"] // frame.mesh[time]}
    return eqn.replace(params=params), [frame.replica(joined_over_time(frame, value, dim))]


def joined_over_time(frame: DeviceFrame, value: DeviceValue, dim: int) -> DeviceValue:
    """The device's microbatches, concatenated along a dim."""
    (axis,), shape = frame.over_time, [*value.aval.shape]
    shape[dim] *= frame.mesh[axis]
    replicated = frame.replicated(shape)
    joined = frame.convert(frame.replica(value), replicated.cut(dim, axis), replicated)
    return frame.value(joined, value.own - {axis})


def _reduced(
    frame: DeviceFrame, op: str, axes: Sequence[str], value: DeviceValue, out: Var
) -> DeviceValue:
    """A partial sum. Maxima and minima are reduced at once, since nothing is linear in them."""
    if not value.own:
        return _times(frame, value, value.layout.num(axes)) if op == "sum" else value
    if op == "sum" and value.sum is not None and _several(frame).issubset(axes):
        return value.sum(out)
    replicated = frame.replicated(value.aval.shape)
    layout = replicated.with_partial(*(Partial(axis, op) for axis in axes))
    x = frame.at(value, replicated)
    if op != "sum":
        x, layout = frame.convert(x, layout, replicated), replicated
    return DeviceValue(value.aval, layout, {layout: x})


def _looked_up(
    frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], own: frozenset[str]
) -> DeviceValue | None:
    """A look-up of rows in a sharded table, [Note: columns of tables]; None if it is none."""
    if eqn.primitive.name != "gather" or ins[0].own or not ins[0].layout.axes:
        return None
    if not _has_rows(frame, ins[1]) or frame.diverges:
        return None
    (var,), numbers = eqn.outvars, eqn.params["dimension_numbers"]
    dim = next(d for d in range(var.aval.ndim) if d not in numbers.offset_dims)
    out = _jaxpr.var_like(var.aval, _joined(frame, var, dim))
    found = _of_all_rows(frame, eqn, ins, out)
    x = frame.at(found, frame.replicated(out.aval.shape).shard(dim, frame.mesh))
    return frame.value(x, own)


def _adds_rows(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> bool:
    if eqn.primitive.name != "scatter-add" or not ins[0].is_zero or frame.diverges:
        return False
    numbers = eqn.params["dimension_numbers"]
    return 0 not in numbers.update_window_dims and all(_has_rows(frame, v) for v in ins[1:])


def _has_rows(frame: DeviceFrame, value: DeviceValue) -> bool:
    return value.aval.ndim > 1 and _several(frame).issubset(value.own)


def _of_all_rows(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue], out: Var) -> DeviceValue:
    """The equation on the rows of all devices, concatenated along dim 0 and sharded along it."""
    values = [ins[0]]
    for value in ins[1:]:
        aval = _jaxpr.var_like(value.aval, _joined(frame, value, 0)).aval
        layout = frame.replicated(aval.shape).shard(0, frame.mesh)
        values.append(DeviceValue(aval, layout, {layout: frame.replica(value)}, _several(frame)))
    others = [_jaxpr.var_like(v.aval) for v in values[1:]]
    joined = eqn.replace(invars=[eqn.invars[0], *others], outvars=[out])
    factors = [*_rules.factors_of(joined), *_look_ups.factors(frame, joined, values)]
    (found,) = ordinary(frame, joined, values, factors)
    return found


def _joined(frame: DeviceFrame, value: DeviceValue | Var, dim: int) -> tuple[int, ...]:
    """The shape of the concatenation of all devices' values."""
    shape, num = value.aval.shape, math.prod(frame.mesh.values())
    return (*shape[:dim], shape[dim] * num, *shape[dim + 1 :])


def _several(frame: DeviceFrame) -> frozenset[str]:
    return frozenset(axis for axis, num in frame.mesh.items() if num > 1)


def _times(frame: DeviceFrame, value: DeviceValue, num: int) -> DeviceValue:
    """The sum of a replicated value over devices: a product with their number."""
    factor = _jaxpr.scalar(num, value.aval.dtype)
    ins: list[Atom] = [_jaxpr.var_like(value.aval), factor]
    eqn = _jaxpr.equation(lax.mul_p, ins, [_jaxpr.var_like(value.aval)], frame.source)
    values, factors = [value, frame.literal(factor)], _rules.factors_of(eqn)
    if _lazy.may_wait(eqn, values):
        return _lazy.lazy(frame, eqn, values, factors)
    (found,) = ordinary(frame, eqn, values, factors)
    return found
