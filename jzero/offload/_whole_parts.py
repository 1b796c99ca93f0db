# SPDX-License-Identifier: Apache-2.0
"""Parts of a segment as one computation: to be read, counted and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jzero.segments._segment import Var
from jzero.sharding.cut._layer_parts import LayerPart, OuterLoop, StraightStage
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom


def evaluate_parts(parts: Sequence[LayerPart], values: Mapping[Var, Any]) -> dict[Var, Any]:
    """All that the parts make, in order, as one device computes it; a nested loop is a loop again.

    Args:
      parts: in the order in which they run.
      values: what they take, leaves and constants included.
    """
    env = dict(values)
    for part in parts:
        if isinstance(part, OuterLoop):
            last = _run_loop(part, env)
            env |= {v: x for v, x in zip(part.loop.results, last, strict=True) if v is not None}
        else:
            for eqn in part.eqns if isinstance(part, StraightStage) else [part.eqn]:
                outs = _jaxpr.evaluate_one(eqn, read(eqn.invars, env))
                env |= zip(eqn.outvars, outs, strict=True)
    return env


def read(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> list[Any]:
    """The values of atoms."""
    return [_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[_jaxpr.variable(a)] for a in atoms]


def _run_loop(part: OuterLoop, env: Mapping[Var, Any]) -> list[Any]:
    """The last carry: each iteration fetches, gathers and computes again what its parts do."""
    loop = part.loop

    def iteration(carry: list[Any]) -> list[Any]:
        made = evaluate_parts(part.parts, {**env, **dict(zip(loop.carry, carry, strict=True))})
        return read(loop.body.outvars, made)

    def goes_on(carry: list[Any]) -> Any:
        assert loop.goes_on is not None
        known = {**env, **dict(zip(loop.carry, carry, strict=True))}
        (asked,) = _jaxpr.evaluate(loop.goes_on, (), *read(loop.goes_on.invars, known))
        return asked

    init = read(loop.init, env)
    with _jaxpr.source_of(part.eqn):
        if loop.length is None:
            last: list[Any] = lax.while_loop(goes_on, iteration, init)
            return last
        return list(
            lax.scan(lambda carry, _: (iteration(carry), None), init, length=loop.length)[0]
        )
