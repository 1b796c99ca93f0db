# SPDX-License-Identifier: Apache-2.0
"""Simplifies `p + (n - p)` to `n`, where an optimizer computes the new parameters `n` itself.

The result of an optax transformation is added to the parameters. One that computes new parameters
(`master_weights`, `stochastic_rounding`) returns their difference to the old ones, in a dtype in which it is
exact. An offloaded update would read all old parameters only for that.

The two differ if `p` is not finite, or if `n` is so much smaller that their difference is not exact (by 2**16
for bfloat16 parameters and float32 differences); then, too, `n` is what the optimizer meant.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jzero.tracing import _jaxpr, _rewrite

CAST = "convert_element_type"


def without_differences(jaxpr: _rewrite.Flat) -> _rewrite.Flat:
    """The jaxpr with `n` for each `p + (n - p)` of upcast n and p whose result is cast down again."""
    makers: dict[_jaxpr.Var, _jaxpr.Eqn] = {}

    def made_anew(eqn: _jaxpr.Eqn) -> list[_jaxpr.Var] | None:
        found = _sum(eqn, makers)
        if found is not None:
            return [found]
        makers.update(dict.fromkeys(eqn.outvars, eqn))
        return None

    return _rewrite.without(jaxpr, made_anew)


def _sum(eqn: _jaxpr.Eqn, makers: dict[_jaxpr.Var, _jaxpr.Eqn]) -> _jaxpr.Var | None:
    """`n`, if the equation casts `p + (n - p)` to the dtype of n and p."""
    if eqn.primitive.name != CAST:
        return None
    out = eqn.outvars[0].aval
    total = _made_by("add", eqn.invars[0], makers)
    for p, difference in (total, total[::-1]) if total else ():
        terms = _made_by("sub", difference, makers)
        n, minus = [_cast_up(a, out, makers) for a in terms] if terms else (None, None)
        if n is not None and minus is not None and minus is _cast_up(p, out, makers):
            return n
    return None


def _maker(atom: _jaxpr.Atom, makers: dict[_jaxpr.Var, _jaxpr.Eqn]) -> _jaxpr.Eqn | None:
    """The equation that made a value, looking through casts that only change its weak type."""
    eqn = None if _jaxpr.is_literal(atom) else makers.get(atom)
    if eqn is None or eqn.primitive.name != CAST:
        return eqn
    same = eqn.invars[0].aval.dtype == atom.aval.dtype
    return _maker(eqn.invars[0], makers) if same else eqn


def _made_by(
    name: str, atom: _jaxpr.Atom, makers: dict[_jaxpr.Var, _jaxpr.Eqn]
) -> list[_jaxpr.Atom]:
    """The operands of the equation that made `atom`, if it has that name."""
    eqn = _maker(atom, makers)
    return eqn.invars if eqn is not None and eqn.primitive.name == name else []


def _cast_up(
    atom: _jaxpr.Atom, aval: Any, makers: dict[_jaxpr.Var, _jaxpr.Eqn]
) -> _jaxpr.Var | None:
    """The value of type `aval` that was cast to a wider floating dtype as `atom`."""
    operands = _made_by(CAST, atom, makers)
    if not operands or _jaxpr.is_literal(operand := operands[0]):
        return None
    alike = (operand.aval.dtype, operand.aval.weak_type) == (aval.dtype, aval.weak_type)
    wide, floating = atom.aval.dtype, jnp.issubdtype(aval.dtype, jnp.floating)
    widens = floating and wide != aval.dtype and jnp.promote_types(wide, aval.dtype) == wide
    return operand if alike and widens else None
