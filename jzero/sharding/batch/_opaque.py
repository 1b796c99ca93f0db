# SPDX-License-Identifier: Apache-2.0
"""Opaque calls: callbacks, FFI calls and kernels, of which JAX does not say what they do.

A device runs one on its own rows if the step promises that rows are apart (`jzero.per_example`), or if the
call itself proves it; that it *could* run on fewer rows proves nothing. Else the rows are gathered.
"""

from __future__ import annotations

from jzero._errors import StepError, describe_leaf, message
from jzero.ir._factors import Factor, Params
from jzero.sharding.batch import _cudnn, _pallas
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._equations import by_factor, gathered
from jzero.sharding.batch._rows import FULL, Rows, even_rows, is_of_iteration
from jzero.sharding.batch._values import BatchValue
from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval, Eqn

PROMISE = "nothing says that its rows are apart; jzero.per_example promises it"


def _call(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A call whose parameters hold the types of its results."""
    if not _has_rows(eqn, ins):
        return None
    promised = _promised(body, eqn, ins) if body.in_scope(_jaxpr.PER_EXAMPLE) else []
    return by_factor(body, eqn, ins, promised) or gathered(body, eqn, ins, _why(body))


def _kernel(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    if not _has_rows(eqn, ins):
        return None
    factors = _pallas.factors(eqn, promised=body.in_scope(_jaxpr.PER_EXAMPLE))
    uneven = (
        f"its rows are apart along another dim, or in blocks that {body.num} devices do not divide"
    )
    outs = by_factor(body, eqn, ins, factors)
    return outs or gathered(body, eqn, ins, uneven if factors else _why(body))


def _attention(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    if not _has_rows(eqn, ins):
        return None
    reason = "its rows are apart without dropout and packed sequences, along its batch"
    return _cudnn.on_rows(body, eqn, ins) or gathered(body, eqn, ins, reason)


def _has_rows(eqn: Eqn, ins: list[BatchValue]) -> bool:
    """Whether it is called with rows of the batch; inside a loop along it, and of effects, others decide."""
    forms = [value.form for value in ins]
    elsewhere = any(map(is_of_iteration, forms)) or _jaxpr.has_side_effects(eqn)
    return not elsewhere and any(isinstance(form, Rows) for form in forms)


def _why(body: Body) -> str:
    if not body.in_scope(_jaxpr.PER_EXAMPLE):
        return PROMISE
    return (
        "jzero.per_example does not cover it: rows lie along several dims, a result has none, another dim "
        "is as long, or a kernel's grid does not have them"
    )


def _promised(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[Factor]:
    """The rows' dim, if it is the same in all operands and results that have rows."""
    rows = [v for v in ins if isinstance(v.form, Rows)]
    held = {(v.form.dim, v.aval.shape[v.form.dim]) for v in rows if isinstance(v.form, Rows)}
    if len(held) != 1:
        return []
    ((dim, size),) = held

    def has_rows(aval: Aval) -> bool:
        return dim < len(aval.shape) and aval.shape[dim] == size

    types = eqn.params["result_avals"]
    if not all(map(has_rows, types)):
        return []
    # [Note: as long as the batch] Of a whole operand nobody knows then whether it has rows; nor, of two dims,
    # along which of them (test_opaque.py::test_what_shapes_contradict_is_gathered).
    shapes = [v.aval.shape for v in rows] + [t.shape for t in types]
    if any(size in v.aval.shape for v in ins if v not in rows) or any(
        size in (*s[:dim], *s[dim + 1 :]) for s in shapes
    ):
        return []
    # Nor of what a backward pass makes: the gradient of what all rows share may be as long, by chance
    # (test_a_gradient_that_looks_like_rows_is_refused).
    if body.in_scope("transpose") and any(
        all(t.shape != v.aval.shape for v in rows) for t in types
    ):
        return []

    def local(size: int, num: int) -> Params:
        shapes = [(*t.shape[:dim], size, *t.shape[dim + 1 :]) for t in types]
        avals = [_jaxpr.var_like(t, s).aval for t, s in zip(types, shapes, strict=True)]
        return {"result_avals": tuple(avals)}

    dims = tuple(dim if has_rows(value.aval) else None for value in ins)
    return [Factor(dims, (dim,) * len(types), local=local)]


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


HANDLERS: dict[str, BatchRule] = {
    "marked_rows": _mark,
    "pallas_call": _kernel,
    **dict.fromkeys(["pure_callback", "ffi_call"], _call),
    **dict.fromkeys(_cudnn.NAMES, _attention),
}
