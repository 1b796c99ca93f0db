# SPDX-License-Identifier: Apache-2.0
"""What an equation does to dim 0 of stacks `[turns * k, ...]`, whose turns come one after the other.

To a loop over layers, a layer is a device in time: the rules that say which dims stay local to devices say
what stays local to turns.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from jzero.sharding.analysis import _rules
from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval, Eqn, Primitive

# What puts together the results that a reduction has of two parts.
_TOGETHER: dict[str, Primitive] = {
    "reduce_sum": lax.add_p, "reduce_prod": lax.mul_p, "reduce_max": lax.max_p,
    "reduce_min": lax.min_p, "reduce_and": lax.and_p, "reduce_or": lax.or_p,
    "dot_general": lax.add_p,
}  # fmt: skip
# Keep all dims: what each device does, it does with any part.
_ALONE = frozenset({"psum", "psum_invariant", "pmax", "pmin", "layout_constraint"})
_ALONG = {"reduce_scatter": "scatter_dimension", "all_gather": "all_gather_dimension"}
# Make equal parts of what has none.
_SOURCES = frozenset({"broadcast_in_dim", "iota"})


def stacked(eqn: Eqn, turns: int) -> list[bool] | None:
    """Which operands give turn i of dim 0 of the results by their own turn i; None if that is not all.

    Others are read whole in each turn.
    """
    dims = _dims(eqn)
    outs = [out.aval.shape for out in eqn.outvars]
    if dims is None or _jaxpr.has_side_effects(eqn) or not all(s and _cuts(s, turns) for s in outs):
        return None
    gives = [0 in each for each in dims]
    whole = [a for a, given in zip(eqn.invars, gives, strict=True) if given]
    if any(each.index(0) != 0 for each in dims if 0 in each):
        return None
    if not all(_cuts(atom.aval.shape, turns) for atom in whole):
        return None
    return gives if whole or eqn.primitive.name in _SOURCES else None


def _cuts(shape: tuple[int, ...], turns: int) -> bool:
    return shape[0] > 0 and shape[0] % turns == 0


def _dims(eqn: Eqn) -> _rules.DimMaps | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return [] if params["dimension"] != 0 else None
    if name == "dot_general":
        _, batch = params["dimension_numbers"]
        first = all(dims[:1] == (0,) for dims in map(tuple, batch))
        return [(0,) + (None,) * (atom.aval.ndim - 1) for atom in eqn.invars] if first else None
    if name in _ALONE or (name in _ALONG and params[_ALONG[name]] != 0):
        return [tuple(range(atom.aval.ndim)) for atom in eqn.invars]
    rule = _rules.rule_for(eqn)
    return None if rule is None else rule.dims(eqn)


def is_cheap(eqn: Eqn) -> bool:
    """Whether it may be done again: it is no product, no collective and no loop."""
    return _rules.rule_for(eqn) is not None and not _jaxpr.has_side_effects(eqn)


def makes_less(eqn: Eqn) -> bool:
    """Whether it reduces dims, whichever these are."""
    return eqn.primitive.name.startswith(("reduce_", "arg")) and eqn.primitive.name not in (
        "reduce_precision",
        "reduce_scatter",
    )


def combines(eqn: Eqn) -> Primitive | None:
    """What puts the turns' results together, if it reduces dim 0 of all its operands; else None."""
    name = eqn.primitive.name
    if name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        return _TOGETHER[name] if (0, 0) in zip(*contracted, strict=True) else None
    return _TOGETHER.get(name) if 0 in eqn.params.get("axes", ()) else None


def neutral(eqn: Eqn) -> Any:
    """What such a reduction has of nothing."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name in ("reduce_max", "reduce_min"):
        return _rules.extreme(dtype, "min" if name == "reduce_max" else "max")
    if name == "reduce_and":
        return ~dtype.type(0)  # of Booleans, True
    return 1 if name == "reduce_prod" else 0


def of_turn(eqn: Eqn, size: int) -> dict[str, Any]:
    """The equation's parameters where dim 0 of its results is cut to `size`."""
    rule = _rules.rule_for(eqn)
    if eqn.primitive.name == "iota":
        return eqn.params | {"shape": (size, *eqn.params["shape"][1:])}
    return eqn.params | (rule.local(eqn, 0, size) if rule is not None else {})


def rows_of(aval: Aval, turns: int) -> tuple[int, ...]:
    """`[turns * k, ...] -> [k, ...]`."""
    return (aval.shape[0] // turns, *aval.shape[1:])
