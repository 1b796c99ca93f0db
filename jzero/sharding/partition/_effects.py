# SPDX-License-Identifier: Apache-2.0
"""Side effects of a step (prints, callbacks): once, on replicated values, by the first device.

[Note: the order of effects] An ordered effect depends, on the device that calls the host, on a number that
the effect before it returned: `DeviceFrame.effect_token`. Loops carry the token; branches take and return it.
On other devices its value is arbitrary.

[Note: effects in microbatches] The first device calls in its first microbatch. Outside of loops and branches
of the step a call runs once, behind the loop over microbatches that computes its operands, since replicated
values are equal in all microbatches. Inside, where microbatches run one after the other, its result is a sum
over microbatches, to which all but the first add zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jzero.ir._effects import WHOLE_ONCE, HostCall
from jzero.ir._layout import Partial
from jzero.ir._opaque import scopes_of
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._values import DeviceValue
from jzero.tracing import _jaxpr, _local
from jzero.tracing._types import Eqn


def once(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> list[DeviceValue]:
    """Writes the equation for the first device; its results are partial sums to which others add zero.

    Errors are raised on all devices, but not with microbatches, where that would need a reduction over time.
    """
    for value in ins:
        frame.reduce(value)
    frame.reason = WHOLE_ONCE
    if _local.PER_EXAMPLE in scopes_of(frame.region, eqn):
        frame.reason += "; jzero.per_example does not cover effects"
    atoms = [*map(frame.replica, ins)]
    ordered = _jaxpr.has_ordered_effects(eqn)
    in_microbatches = frame.shared.time is not None
    axes = [axis for axis in frame.mesh if frame.outer is not None or axis not in frame.over_time]
    host = HostCall(eqn, raises=in_microbatches)
    first = frame.inline(_is_first, (), frame.index(axes))
    token = frame.effect_token if ordered else _jaxpr.scalar(0, np.int32)
    failed, *outs = host.write(frame, first, token, atoms)
    terms = [
        frame.replicated(x.aval.shape).with_partial(*map(Partial, sorted(axes)))
        for x in (failed, *outs)
    ]
    if not in_microbatches:
        failed = host.write_fail(frame, frame.convert(failed, terms[0], frame.replicated(())))
    frame.effect_token = failed if ordered else frame.effect_token
    return [
        DeviceValue(var.aval, layout, {layout: x})
        for var, layout, x in zip(eqn.outvars, terms[1:], outs, strict=True)
    ]


def _is_first(index: jax.Array) -> jax.Array:
    return index == 0
