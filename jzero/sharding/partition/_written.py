# SPDX-License-Identifier: Apache-2.0
"""A step that is written for one device, with collectives of its own: what it computes of its rows.

[Note: values of a device's own] What differs between the devices of such a step has the shape that the step
gives it, and no layout says what it is a part of. Each equation that reads one is written as it is, on whole
operands; so what follows from the state alone stays in shards, and is gathered where it meets rows. A sum
over all axes along which a value differs is the partial sum that a sum over rows of the batch is, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jzero.ir._errors import cannot
from jzero.ir._layout import Partial
from jzero.ir._regions import Region
from jzero.sharding.analysis._frames import COLLECTIVES, NOWHERE, REDUCTIONS, Frame
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

_REDUCES = dict.fromkeys(REDUCTIONS, "sum") | {"pmax": "max", "pmin": "min"}


class Written(NamedTuple):
    """What is known of a step with collectives of its own.

    Attributes:
      frame: which of its values differ between devices.
      axis_names: the axes of the mesh behind each name that it uses.
    """

    frame: Frame
    axis_names: Mapping[str, tuple[str, ...]]

    def own(self, region: Region, atom: Atom) -> frozenset[str]:
        """The axes along which a value differs; none if it is not the step's, but was written for it."""
        if _jaxpr.is_literal(atom) or not isinstance(region, Frame):
            return NOWHERE
        return frozenset(self.axes(region.varying.get(atom, NOWHERE)))

    def axes(self, names: Sequence[str] | frozenset[str]) -> tuple[str, ...]:
        """The axes of the mesh behind these names."""
        return tuple(axis for name in names for axis in self.axis_names[name])


def equation(
    frame: DeviceFrame, region: Region, eqn: Eqn, ins: Sequence[DeviceValue]
) -> list[DeviceValue] | None:
    """A collective of the step's own, or an equation of what differs; None if it is none of these."""
    written: Written | None = frame.shared.written
    if written is None:
        return None
    if eqn.primitive.name in COLLECTIVES:
        return _collective(frame, region, written, eqn, ins)
    own = frozenset[str]().union(*(v.own for v in ins))
    acts = _jaxpr.has_side_effects(eqn)
    if not own and not acts:
        return None
    if acts and _jaxpr.has_ordered_effects(eqn):
        raise cannot("it is an ordered effect beside collectives of the step's own", eqn, region)
    return _values(frame, frame.again(eqn, _whole(frame, ins)), own)


def _collective(
    frame: DeviceFrame, region: Region, written: Written, eqn: Eqn, ins: Sequence[DeviceValue]
) -> list[DeviceValue]:
    axes, name = written.axes(_jaxpr.axes_of(eqn)), eqn.primitive.name
    if name == "axis_index":
        return _values(frame, [frame.index(axes)], frozenset(axes))
    if frame.diverges:
        raise cannot("it is a collective that not all devices run", eqn, region)
    grouped = eqn.params.get("axis_index_groups")
    op = None if grouped else _REDUCES.get(name)
    if op is not None and all(v.own.issubset(axes) for v in ins):
        return [_reduced(frame, op, axes, v) for v in ins]
    key = "axes" if "axes" in eqn.params else "axis_name"
    outs = [*map(_jaxpr.new_var, eqn.outvars)]
    params = eqn.params | {key: axes}
    frame.eqns.append(
        _jaxpr.equation(eqn.primitive, _whole(frame, ins), outs, frame.source, **params)
    )
    return _values(frame, outs, frozenset(axes))


def _reduced(frame: DeviceFrame, op: str, axes: Sequence[str], value: DeviceValue) -> DeviceValue:
    """A sum that is due; nothing is linear in maxima and minima: they are due now."""
    whole = frame.whole(value.aval.shape)
    x, layout = frame.at(value, whole), whole.summed(*(Partial(axis, op) for axis in axes))
    if op != "sum":
        x, layout = frame.convert(x, layout, whole), whole
    return DeviceValue(value.aval, layout, {layout: x})


def _whole(frame: DeviceFrame, values: Sequence[DeviceValue]) -> list[Atom]:
    return [frame.at(v, frame.whole(v.aval.shape)) for v in values]


def _values(frame: DeviceFrame, outs: Sequence[Any], own: frozenset[str]) -> list[DeviceValue]:
    layouts = [frame.whole(x.aval.shape) for x in outs]
    return [
        DeviceValue(x.aval, layout, {layout: x}, own=own)
        for x, layout in zip(outs, layouts, strict=True)
    ]
