# SPDX-License-Identifier: Apache-2.0
"""What the step says of layouts itself, by `jax.lax.with_sharding_constraint`.

[Note: requests] The dims that it shards over the mesh's data axes are requested: from there on the value has
them, as far as the devices divide them, and `describe` lists what that moves. Of dims that it does not shard
nothing is gathered. Parameters and their gradients lie as the stage says, a sum waits for what reads it, and
what has to do with microbatches stays. Over axes that are XLA's, the constraint stays where it is.
"""

from __future__ import annotations

import dataclasses

from jzero.ir._layout import Layout
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _call, _jaxpr
from jzero.tracing._types import Eqn


def constrained(frame: DeviceFrame, eqn: Eqn, value: DeviceValue) -> DeviceValue:
    """The value as a `sharding_constraint` equation asks for it."""
    if _may_be_asked(frame, value):
        layout, asked = _requested(frame, eqn, value.layout)
        if layout != value.layout:
            frame.reason, frame.shared.has_rows = "the step asks for it", True
            moved = asked & value.layout.axes
            atoms = {layout: frame.at(value, layout)}
            rows, displaced = value.rows | asked, value.displaced | moved
            value = DeviceValue(value.aval, layout, atoms, rows, displaced=displaced)
    return value if frame.shared.automatic is None else _of_other_axes(frame, eqn, value)


def _may_be_asked(frame: DeviceFrame, value: DeviceValue) -> bool:
    is_of_leaf = bool(frame.name(value)) or value.view is not None
    stays = is_of_leaf or value.layout.partial or value.layout.axes & frame.over_time
    return frame.shared.written is None and not stays


def _requested(frame: DeviceFrame, eqn: Eqn, layout: Layout) -> tuple[Layout, frozenset[str]]:
    """The layout with the dims sharded that the equation names, and the axes over which it has them anew."""
    spec = _jaxpr.constraint_spec(eqn, [*frame.mesh.keys() - frame.over_time])
    new, asked = layout, set[str]()
    for d, entry in enumerate(spec):
        for axis in _call.spec_axes(None if entry is spec.UNCONSTRAINED else entry):
            place = new.place(axis)
            if place is not None and place[0] == d:
                continue
            other = new.without([axis]).cut(d, axis)
            if other.dims[d].pad is None:
                new = other
                asked.add(axis)
    return new, frozenset(asked)


def _of_other_axes(frame: DeviceFrame, eqn: Eqn, value: DeviceValue) -> DeviceValue:
    """What the step says of axes over which XLA shards: of what a device has, too; a sum waits through it."""
    out = _jaxpr.var_like(value.aval, value.layout.local_shape)
    frame.clone(eqn, [frame.at(value, value.layout)], [out])
    return dataclasses.replace(
        value, atoms={value.layout: out}, scopes={}, casts={}, make=None, outer=None, view=None
    )
