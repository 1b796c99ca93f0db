# SPDX-License-Identifier: Apache-2.0
"""Elementwise update subgraphs: any part of their leaves can be updated by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Var


def obstacle(frame: Frame, subgraph: Subgraph) -> str:
    """Why a part of a subgraph's leaves cannot be updated by itself; '' if it can.

    It can if all values but scalars have one shape, and every equation treats all elements alike.
    """
    eqns = [frame.jaxpr.eqns[i] for i in subgraph.eqns]
    for eqn in eqns:
        if not _rules.is_elementwise(eqn):
            where = _jaxpr.summary(eqn)  # '' inside of JAX's own functions
            return (
                f"{eqn.primitive.name}{where and f' ({where})'} does not treat every element alike"
            )
    atoms = [a for eqn in eqns for a in [*eqn.invars, *eqn.outvars]]
    atoms += [*subgraph.reads, *(frame.jaxpr.outvars[i] for i in subgraph.outs)]
    shapes = {a.aval.shape for a in atoms if a.aval.shape}
    constants = set(frame.jaxpr.constvars).intersection(variables(atoms))
    if len(shapes) != 1 or any(var.aval.shape for var in constants):
        return f"their update combines values of shapes {sorted(shapes)}, or large constants"
    if subgraph.gives or any(not frame.jaxpr.outvars[i].aval.shape for i in subgraph.outs):
        return "other leaves or outputs depend on their update"
    return ""


def outputs(
    frame: Frame, subgraph: Subgraph, given: Mapping[Var, jax.Array]
) -> dict[int, jax.Array]:
    """Outputs of an elementwise subgraph, by index, for parts of one shape of what it reads."""
    shape = next(x.shape for var, x in given.items() if var.aval.shape)
    values = dict(zip(frame.jaxpr.constvars, map(_jaxpr.constant, frame.consts), strict=True))
    values |= given

    def value(atom: Atom) -> jax.Array:
        found: jax.Array = _jaxpr.literal(atom) if _jaxpr.is_literal(atom) else values[atom]
        return found

    for index in subgraph.eqns:
        eqn = frame.jaxpr.eqns[index]
        ins = [*map(value, eqn.invars)]
        if eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.shape:
            outs = [jax.numpy.broadcast_to(jax.numpy.reshape(ins[0], ()), shape)]
        else:
            outs = _jaxpr.bind(eqn, *ins)
        values |= zip(eqn.outvars, outs, strict=True)
    atoms = {i: frame.jaxpr.outvars[i] for i in subgraph.outs}
    return {
        i: _jaxpr.with_type_of(jax.numpy.broadcast_to(value(atom), shape), atom)
        for i, atom in atoms.items()
    }
