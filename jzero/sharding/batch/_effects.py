# SPDX-License-Identifier: Apache-2.0
"""What a step does beside computing (prints, callbacks): once, on whole values, by the first device.

Every device would else do it, and a host function that is not a function of its arguments would give each
another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import ArrayLike

from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._equations import NotRowByRow
from jzero.sharding.batch._rows import FULL, is_of_iteration
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn

Shapes = list[jax.ShapeDtypeStruct]


def once(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """The equation on the first device; all get its results.

    JAX keeps an order of effects on one device only. So each that asks for one waits for a number that the
    one before it has returned.

    What the host raises, it raises on all devices: if the first one failed alone, the others would wait for
    it at their next collective, and XLA would end the process. So the number that comes back says if it did;
    not in microbatches, of which none may wait for another.
    """
    if any(is_of_iteration(value.form) for value in ins):
        raise NotRowByRow
    reason = "a callback gets whole values, once"
    if body.in_scope(_jaxpr.PER_EXAMPLE):
        reason += "; jzero.per_example does not cover effects"
    atoms = [body.at(v, FULL, reason) for v in ins]
    ordered = bool(eqn.params.get("ordered")) or "rdered" in str(eqn.params.get("effect", ""))
    if body.turn is None or not ordered:
        (turn,) = body.inline(_zero, ())
    else:
        turn = body.turn
    (first,) = body.inline(_is_first, (), body.index)
    shapes = [jax.ShapeDtypeStruct((), np.int32)]
    shapes += [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
    operands = [turn, *atoms]
    host = _Host(eqn, shapes, raises=not body.exchanges)
    branches = _branches(host, shapes, operands)
    outs = [_jaxpr.var_like(None, shape.shape, shape.dtype) for shape in shapes]
    cond = _jaxpr.equation(
        _jaxpr.PRIMITIVES["cond"], [first, *operands], outs, body.source, branches=branches
    )
    body.eqns.append(cond.replace(effects=eqn.effects))
    results = [body.reduce(out, "max" if out.aval.dtype == np.bool_ else "sum") for out in outs]
    turn = _failing(body, eqn, host, results[0]) if body.exchanges else results[0]
    body.turn = turn if ordered else body.turn
    return values_of(eqn.outvars, [FULL] * len(eqn.outvars), results[1:])


def _failing(body: Body, eqn: Eqn, host: _Host, failed: Atom) -> Atom:
    """Raises on each device what the first one's host has raised; gives 0, which is there afterwards."""
    shapes = [jax.ShapeDtypeStruct((), np.int32)]
    out = _jaxpr.var_like(failed.aval)
    branches = _branches(host.fail, shapes, [failed])
    cond = _jaxpr.equation(
        _jaxpr.PRIMITIVES["cond"], [failed, failed], [out], body.source, branches=branches
    )
    body.eqns.append(cond.replace(effects=eqn.effects))
    return out


class _Host:
    """What an equation does, as a function of arrays on the host; its first result says whether it failed."""

    def __init__(self, eqn: Eqn, shapes: Shapes, raises: bool):
        self._eqn, self._shapes, self._raises = eqn, shapes, raises
        self._error: Exception | None = None

    def __call__(self, turn: np.ndarray, *arrays: np.ndarray) -> list[ArrayLike]:
        """Does it; of what is raised, `fail` tells, unless it `raises`."""
        primitive, params = self._eqn.primitive, self._eqn.params
        try:
            if primitive.name == "io_callback":
                return [np.int32(0), *params["callback"](*arrays)]
            primitive.impl(*arrays, **params)
        except Exception as error:
            if self._raises:
                raise
            self._error = error
            failed, *others = self._shapes
            return [np.ones((), failed.dtype), *(np.zeros(x.shape, x.dtype) for x in others)]
        return [np.int32(0)]

    def fail(self, failed: np.ndarray) -> list[ArrayLike]:
        """Raises what was raised."""
        raise self._error or RuntimeError("a callback failed in the process of the first device")


def _call(
    host: Callable[..., list[ArrayLike]], shapes: Shapes, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    results: list[jax.Array] = io_callback(host, shapes, *operands)
    return results


def _branches(
    host: Callable[..., list[ArrayLike]], shapes: Shapes, operands: Sequence[Atom]
) -> tuple[_jaxpr.Closed, ...]:
    """Zeros, or what the host makes."""
    return (
        _branch(lambda *_: _zeros(shapes), operands),
        _branch(lambda *xs: _call(host, shapes, xs), operands),
    )


def _branch(fn: Callable[..., list[jax.Array]], operands: Sequence[Atom]) -> _jaxpr.Closed:
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
    traced = _jaxpr.trace_here(fn, *shapes)
    return _jaxpr.Closed(*_rewrite.flatten_calls(traced.jaxpr, traced.consts))


def _zeros(shapes: Shapes) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _is_first(index: jax.Array) -> jax.Array:
    return (index == 0).astype(jnp.int32)


HANDLERS: dict[str, BatchRule] = dict.fromkeys(
    ["io_callback", "debug_callback", "debug_print"], once
)
