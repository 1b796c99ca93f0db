# SPDX-License-Identifier: Apache-2.0
"""What a step does beside computing (prints, callbacks): once, on whole values, by the first device.

[Note: the order of effects] What asks for an order waits, on the device that calls the host, for a number
that the one before it has returned: `DeviceFrame.effect_token`. Loops carry it; branches take and return it.
It is no value of the step's: devices that call nothing have any number.

[Note: effects in microbatches] The first device calls in its first microbatch. Outside of loops and branches
a call runs once, since whole values are the same in all microbatches: behind the loop over microbatches that
makes what it reads. In a loop or branch of the step, which microbatches run one after the other, it waits for
no other microbatch. What it returns there is a sum over them, to which the others add zero.
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
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


def once(frame: DeviceFrame, eqn: Eqn, ins: Sequence[DeviceValue]) -> list[DeviceValue]:
    """The equation on the first device; its results are sums over all.

    Errors are raised on all devices; not in microbatches, of which none may wait for another.
    """
    for value in ins:
        frame.reduce(value)
    frame.reason = WHOLE_ONCE
    if _jaxpr.PER_EXAMPLE in scopes_of(frame.region, eqn):
        frame.reason += "; jzero.per_example does not cover effects"
    atoms = [frame.at(v, frame.replicated(v.aval.shape)) for v in ins]
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
