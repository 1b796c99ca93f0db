"""Opaque calls: callbacks, FFI calls and kernels, of which JAX does not say what they do.

A device runs one on its own rows if the step promises that rows are apart (`jzero.per_example`), or if the
call itself proves it; that it *could* run on fewer rows proves nothing. Else the rows are gathered.
"""

from __future__ import annotations

from jzero import _jaxpr
from jzero._jaxpr import Eqn
from jzero.batch import _cudnn, _pallas
from jzero.batch._body import Body, Handler, Value
from jzero.batch._equations import by_factor, gathered
from jzero.batch._factors import Factor
from jzero.batch._rows import FULL, OWN, SUM, Rows

PROMISE = "nothing says that its rows are apart; jzero.per_example promises it"


def _call(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """A call whose parameters hold the types of its results."""
    promised = body.in_scope(_jaxpr.PER_EXAMPLE)
    return _apart(body, eqn, ins, _promised(eqn, ins) if promised else [], PROMISE)


def _kernel(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    factors = _pallas.factors(eqn, promised=body.in_scope(_jaxpr.PER_EXAMPLE))
    return _apart(body, eqn, ins, factors, PROMISE)


def _attention(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    reason = "it draws its dropout for the whole batch, or packs sequences into rows"
    return _apart(body, eqn, ins, _cudnn.factors(eqn), reason)


def _apart(
    body: Body, eqn: Eqn, ins: list[Value], factors: list[Factor], reason: str
) -> list[Value] | None:
    """The call on rows, along one of the factors; else on all rows, gathered for that reason."""
    forms = [value.form for value in ins]
    if OWN in forms or SUM in forms or _jaxpr.has_side_effects(eqn):
        return None
    if not any(isinstance(form, Rows) for form in forms):
        return None
    outs = by_factor(body, eqn, ins, factors)
    if outs is not None:
        return outs
    if factors:
        reason = f"its rows are apart along another dim, or in blocks that {body.num} devices do not divide"
    elif reason is PROMISE and body.in_scope(_jaxpr.PER_EXAMPLE):
        reason = (
            "jzero.per_example does not cover it: rows lie along several dims, or a result has none"
        )
    return gathered(body, eqn, ins, reason)


def _promised(eqn: Eqn, ins: list[Value]) -> list[Factor]:
    """The rows' dim, if it is the same in all operands and results that have rows."""
    held = {(v.form.dim, v.aval.shape[v.form.dim]) for v in ins if isinstance(v.form, Rows)}
    if len(held) != 1:
        return []
    ((dim, size),) = held

    def has_rows(aval: object) -> bool:
        return dim < len(aval.shape) and aval.shape[dim] == size  # type: ignore[attr-defined]

    # Of a whole operand as long as the batch nobody knows whether it has rows, unless it is one number.
    unknown = [v for v in ins if has_rows(v.aval) and v.form is FULL and v.fill is None]
    types = eqn.params["result_avals"]
    if unknown or not all(map(has_rows, types)):
        return []

    def local(size: int, num: int) -> dict[str, object]:
        shapes = [(*t.shape[:dim], size, *t.shape[dim + 1 :]) for t in types]
        avals = [_jaxpr.var_like(t, s).aval for t, s in zip(types, shapes, strict=True)]
        return {"result_avals": tuple(avals)}

    dims = tuple(dim if has_rows(value.aval) else None for value in ins)
    return [Factor(dims, (dim,) * len(types), local=local)]


def _mark(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """Where rows enter a promise, they lie along a dim of which it speaks; what has none is whole."""
    (value,) = ins
    form, dims = value.form, eqn.params["along"]
    if not isinstance(form, Rows) or not eqn.params["enters"] or form.dim in dims:
        return ins
    reason = f"jzero.per_example has its rows along {f'dim {dims[0]}' if dims else 'no dim'}"
    return [Value(value.aval, FULL, {FULL: body.at(value, FULL, reason)})]


HANDLERS: dict[str, Handler] = {
    "marked_rows": _mark,
    "pallas_call": _kernel,
    **dict.fromkeys(["pure_callback", "ffi_call"], _call),
    **dict.fromkeys(_cudnn.NAMES, _attention),
}
