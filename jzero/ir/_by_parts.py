# SPDX-License-Identifier: Apache-2.0
"""Equations that run on shards over the mesh's Auto axes, each in a `shard_map` of its own."""

from __future__ import annotations

from typing import Any

from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


def inside(eqn: Eqn) -> Eqn:
    """The only equation in the `shard_map`; any other equation is returned as it is."""
    if eqn.primitive.name != "shard_map":
        return eqn
    jaxpr = _jaxpr.open_jaxpr(eqn.params["jaxpr"])[0]
    alone = len(jaxpr.eqns) == 1 and len(eqn.invars) == 1
    alone = alone and jaxpr.eqns[0].invars == jaxpr.invars
    return jaxpr.eqns[0] if alone and jaxpr.eqns[0].outvars == jaxpr.outvars else eqn


def cuts(eqn: Eqn, dim: int) -> bool:
    """Whether the `shard_map` shards `dim` of an operand or result."""
    if inside(eqn) is eqn:
        return False
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    return any(dim < len(spec) and spec[dim] is not None for spec in specs)


def with_rows(eqn: Eqn, size: int, params: dict[str, Any]) -> dict[str, Any]:
    """The equation's parameters for dims 0 of `size`, where the equation inside has `params`."""
    inner = inside(eqn)
    if inner is eqn:
        return params
    ins, outs = (
        [_jaxpr.var_like(x.aval, (size, *x.aval.shape[1:])) for x in ends]
        for ends in (inner.invars, inner.outvars)
    )
    jaxpr = _jaxpr.replaced(
        _jaxpr.open_jaxpr(eqn.params["jaxpr"])[0], invars=ins, outvars=outs,
        eqns=[inner.replace(invars=ins, outvars=outs, params=params)],
    )  # fmt: skip
    return {**eqn.params, "jaxpr": jaxpr}
