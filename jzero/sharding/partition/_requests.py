# SPDX-License-Identifier: Apache-2.0
"""The step's own sharding constraints, `jax.lax.with_sharding_constraint`.

[Note: requests] A constraint that shards dims over data axes is obeyed where the devices divide the dims, and
`describe` lists what that moves. Dims that it does not shard are not gathered for it. Parameters and their
gradients keep the stage's layout, partial sums stay partial until they are read, and the time axis of
microbatches stays. Over Auto axes the constraint remains in the program.
"""

from __future__ import annotations

import dataclasses

from jzero.ir._layout import Layout
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _call, _jaxpr
from jzero.tracing._types import Eqn


def constrained(frame: DeviceFrame, eqn: Eqn, value: DeviceValue) -> DeviceValue:
    is_of_leaf = bool(frame.name(value)) or value.view is not None
    stays = is_of_leaf or value.layout.partial or value.layout.axes & frame.over_time
    if frame.shared.written is None and not stays:
        layout, asked = _requested(frame, eqn, value.layout)
        if layout != value.layout:
            frame.reason, frame.shared.has_rows = "the step asks for it", True
            moved = asked & value.layout.axes
            atoms = {layout: frame.at(value, layout)}
            rows, exchanged = value.rows | asked, value.exchanged | moved
            value = DeviceValue(value.aval, layout, atoms, rows, exchanged=exchanged)
    return value if frame.shared.automatic is None else _of_other_axes(frame, eqn, value)


def _requested(frame: DeviceFrame, eqn: Eqn, layout: Layout) -> tuple[Layout, frozenset[str]]:
    """The layout that a constraint asks for, and the axes that it changes."""
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
    """The constraint on Auto axes, which holds for a device's shard too, and passes partial sums."""
    out = _jaxpr.var_like(value.aval, value.layout.local_shape)
    frame.clone(eqn, [frame.at(value, value.layout)], [out])
    return dataclasses.replace(
        value, atoms={value.layout: out}, scopes={}, casts={}, make=None, outer=None, view=None
    )
