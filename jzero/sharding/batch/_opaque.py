# SPDX-License-Identifier: Apache-2.0
"""Opaque calls, and marks of their promises: on each device's rows, or on those of all."""

from __future__ import annotations

from jzero._errors import StepError, describe_leaf, message
from jzero.ir import _opaque
from jzero.sharding.batch import _cudnn
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._equations import by_factor, gathered
from jzero.sharding.batch._rows import FULL, Rows, even_rows, is_of_iteration
from jzero.sharding.batch._values import BatchValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


def _call(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    if not _has_rows(eqn, ins):
        return None
    rows = [value.form.dim if isinstance(value.form, Rows) else None for value in ins]
    scopes = [*filter(body.in_scope, (_jaxpr.PER_EXAMPLE, "transpose"))]
    factors = _opaque.factors(eqn, rows, scopes)
    apart = _cudnn.on_rows if eqn.primitive.name in _opaque.ATTENTION else by_factor
    reason = _opaque.why_gathered(eqn, factors, scopes, body.num)
    return apart(body, eqn, ins, factors) or gathered(body, eqn, ins, reason)


def _has_rows(eqn: Eqn, ins: list[BatchValue]) -> bool:
    """Whether it is called with rows of the batch; inside a loop along it, and of effects, others decide."""
    forms = [value.form for value in ins]
    elsewhere = any(map(is_of_iteration, forms)) or _jaxpr.has_side_effects(eqn)
    return not elsewhere and any(isinstance(form, Rows) for form in forms)


def _mark(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """Where rows enter a promise, they lie along a dim of which it speaks; what has none is whole.

    What leaves and has none is the gradient of what all rows share. Rows that a call made are no sum.
    """
    (value,) = ins
    form, dim, vmapped = value.form, eqn.params["dim"], eqn.params["vmapped"]
    elsewhere = isinstance(form, Rows) and form.dim not in (dim, *vmapped)
    if not eqn.params["enters"]:
        if elsewhere and dim is None and FULL not in value.atoms:
            raise _refusal(eqn, value)
        return ins
    if elsewhere:
        reason = f"jzero.per_example has its rows along {'no dim' if dim is None else f'dim {dim}'}"
        value = BatchValue(value.aval, FULL, {FULL: body.at(value, FULL, reason)})
    if value.form is FULL and dim is not None:  # So that what follows from it has rows, too.
        rows = even_rows(dim, value.aval.shape[dim], body.num)
        return [
            BatchValue(value.aval, rows, {**value.atoms, rows: body.at(value, rows)}, value.make)
        ]
    return [value]


def _refusal(eqn: Eqn, value: BatchValue) -> StepError:
    leaf = describe_leaf("a gradient", value.aval.shape, value.aval.dtype)
    return StepError(message(
        "jzero.per_example", f"{leaf} of what has no rows is as long as the batch{_jaxpr.at_line(eqn)}",
        "A call of a backward pass may have made it; then nobody can tell it from one with rows.",
        "If it has rows, make it an argument, and name their dim in in_axes; else use another number of "
        "rows, or keep such calls out of fn."))  # fmt: skip


HANDLERS: dict[str, BatchRule] = {"marked_rows": _mark, **dict.fromkeys(_opaque.NAMES, _call)}
