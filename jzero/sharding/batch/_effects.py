# SPDX-License-Identifier: Apache-2.0
"""What a step does beside computing (prints, callbacks): once, on whole values, by the first device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jzero.ir._effects import WHOLE_ONCE, HostCall
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._equations import NotRowByRow
from jzero.sharding.batch._rows import FULL, is_of_iteration
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


def once(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """The equation on the first device; all get its results.

    Each effect that asks for an order waits for a number that the one before it has returned. Errors are
    raised on all devices; not in microbatches, of which none may wait for another.
    """
    if any(is_of_iteration(value.form) for value in ins):
        raise NotRowByRow
    reason = WHOLE_ONCE
    if body.in_scope(_jaxpr.PER_EXAMPLE):
        reason += "; jzero.per_example does not cover effects"
    atoms = [body.at(v, FULL, reason) for v in ins]
    ordered = _jaxpr.has_ordered_effects(eqn)
    if body.turn is None or not ordered:
        (turn,) = body.inline(_zero, ())
    else:
        turn = body.turn
    (first,) = body.inline(_is_first, (), body.index)
    host = HostCall(eqn, raises=not body.exchanges)
    outs = host.write(body, first, turn, atoms)
    results = [body.reduce(out, "max" if out.aval.dtype == np.bool_ else "sum") for out in outs]
    turn = host.write_fail(body, results[0]) if body.exchanges else results[0]
    body.turn = turn if ordered else body.turn
    return values_of(eqn.outvars, [FULL] * len(eqn.outvars), results[1:])


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _is_first(index: jax.Array) -> jax.Array:
    return index == 0


HANDLERS: dict[str, BatchRule] = dict.fromkeys(
    ["io_callback", "debug_callback", "debug_print"], once
)
