"""What a step does beside computing (prints, callbacks): once, on whole values, by the first device.

Every device would else do it, and a host function that is not a function of its arguments would give each
another answer.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jzero import _jaxpr, _rewrite
from jzero._errors import StepError, message
from jzero._jaxpr import Eqn
from jzero.batch._body import Body, Handler, Value
from jzero.batch._equations import NotRowByRow
from jzero.batch._rows import FULL, OWN, SUM


def once(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """The equation on the first device; all get its results."""
    if any(value.form in (OWN, SUM) for value in ins):
        raise NotRowByRow
    if eqn.params.get("ordered"):
        raise StepError(message(
            "shard_train_step", f"an ordered {eqn.primitive.name} ({_jaxpr.summary(eqn)})",
            "JAX runs ordered effects on one device only.", "Drop ordered=True."))  # fmt: skip
    atoms = [body.at(v, FULL, "a callback gets whole values, once") for v in ins]
    (first,) = body.inline(_is_first, (), body.index)
    branches = (_nothing(eqn, atoms), _all(eqn, atoms))
    outs = [_jaxpr.var_like(var.aval) for var in eqn.outvars]
    cond = _jaxpr.equation(
        _jaxpr.PRIMITIVES["cond"], [first, *atoms], outs, body.source, branches=branches
    )
    body.eqns.append(cond.replace(effects=eqn.effects))
    values = []
    for var, out in zip(eqn.outvars, outs, strict=True):
        kind = "max" if var.aval.dtype == jnp.bool_ else "sum"
        values.append(Value(var.aval, FULL, {FULL: body.reduce(out, kind)}))
    return values


def _is_first(index: Any) -> Any:
    return (index == 0).astype(jnp.int32)


def _all(eqn: Eqn, atoms: list[Any]) -> _jaxpr.Closed:
    ins = [_jaxpr.var_like(atom.aval) for atom in atoms]
    outs = [_jaxpr.new_var(var) for var in eqn.outvars]
    again = eqn.replace(invars=ins, outvars=outs)
    return _jaxpr.Closed(_rewrite.Flat([], ins, outs, [again]), [])


def _nothing(eqn: Eqn, atoms: list[Any]) -> _jaxpr.Closed:
    ins = [_jaxpr.var_like(atom.aval) for atom in atoms]
    traced = _jaxpr.trace_here(
        lambda: [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
    )
    flat, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    return _jaxpr.Closed(_rewrite.Flat(flat.constvars, ins, flat.outvars, flat.eqns), consts)


HANDLERS: dict[str, Handler] = dict.fromkeys(
    ["pure_callback", "io_callback", "debug_callback", "debug_print"], once
)
