# SPDX-License-Identifier: Apache-2.0
"""What an equation does to dim 0 of stacks `[iterations * k, ...]`, which hold one iteration after another.

The rules that say what stays local to devices also say what stays local to iterations.
"""

from __future__ import annotations

from typing import Any

from jzero.ir import _by_parts, _rules
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval, Eqn, Primitive


def stacked(eqn: Eqn, length: int) -> list[bool] | None:
    """For each operand whether iteration i reads only its own part, or else the whole.

    None if the equation cannot run iteration by iteration.
    """
    inner = _by_parts.inside(eqn)
    if _by_parts.cuts(eqn, 0):
        return None
    factor = _rules.factor_to(inner, 0) if _is_of_iterations(inner) else None
    outs = [out.aval.shape for out in eqn.outvars]
    if (
        factor is None
        or _jaxpr.has_side_effects(eqn)
        or not all(s and _cuts(s, length) for s in outs)
    ):
        return None
    own = [a for a, dim in zip(eqn.invars, factor.ins, strict=True) if dim is not None]
    if not {*factor.ins} <= {0, None} or not all(_cuts(atom.aval.shape, length) for atom in own):
        return None
    return [dim is not None for dim in factor.ins]


def _cuts(shape: tuple[int, ...], length: int) -> bool:
    return shape[0] > 0 and shape[0] % length == 0


def _is_of_iterations(eqn: Eqn) -> bool:
    """Whether iterations may run it on their parts: a product only if both operands have the batch dim 0."""
    if _rules.costs(eqn, Cost.PRODUCT):
        factor = _rules.factor_to(eqn, 0)
        return factor is not None and None not in factor.ins and not factor.groups
    return _rules.keeps_dims(eqn) or _rules.costs(eqn, Cost.COLLECTIVE, Cost.SOURCE)


def is_cheap(eqn: Eqn) -> bool:
    """Whether it may be recomputed: it is no product, no collective and no loop."""
    cheap = eqn.primitive.name == "iota" or _rules.keeps_dims(eqn)
    return cheap and not _jaxpr.has_side_effects(eqn)


def combines(eqn: Eqn) -> Primitive | None:
    """The primitive that combines the iterations' results, if the equation reduces dim 0 of all operands."""
    kind = _reduces(eqn)
    return None if kind is None else _rules.COMBINES[kind]


def neutral(eqn: Eqn) -> Any:
    kind = _reduces(eqn)
    assert kind is not None
    return _rules.neutral(kind, eqn.outvars[0].aval.dtype)


def _reduces(eqn: Eqn) -> str | None:
    return next((f.reduces for f in _rules.factors_of(eqn) if {*f.ins} == {0} and f.reduces), None)


def of_iteration(eqn: Eqn, size: int) -> dict[str, Any]:
    """The equation's parameters if dim 0 of its results is cut to `size`."""
    inner = _by_parts.inside(eqn)
    factor = _rules.factor_to(inner, 0)
    whole = eqn.outvars[0].aval.shape[0]
    params = inner.params | ({} if factor is None else factor.local(size, whole // size))
    return _by_parts.with_rows(eqn, size, params)


def rows_of(aval: Aval, length: int) -> tuple[int, ...]:
    """The shape `[k, ...]` of an iteration's part of a stack `[iterations * k, ...]`."""
    return (aval.shape[0] // length, *aval.shape[1:])
