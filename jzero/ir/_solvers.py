# SPDX-License-Identifier: Apache-2.0
"""Linear solves, which JAX wraps for the sake of derivatives: these are taken already, the solver is left."""

from __future__ import annotations

from jax import lax

from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the solver in the place of each `lax.custom_linear_solve`, in loops and calls too."""
    eqns = [new for eqn in jaxpr.eqns for new in _equations(eqn)]
    same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
    return jaxpr if same else _jaxpr.replaced(jaxpr, eqns=eqns)


def _equations(eqn: Eqn) -> list[Eqn]:
    if eqn.primitive.name != "custom_linear_solve":
        return [_jaxpr.with_inner(eqn, opened)]
    solver, consts, operands = _jaxpr.solver_parts(eqn)
    assert not consts, "JAX hands a solver what it closes over"
    writer = JaxprWriter(eqn)
    outs = writer.write(opened(solver), consts, operands)
    for out, var in zip(outs, eqn.outvars, strict=True):
        writer.add(lax.copy_p, [out], [var])
    return [_jaxpr.with_line_of(each, eqn) for each in writer.eqns]
