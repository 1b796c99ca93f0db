# SPDX-License-Identifier: Apache-2.0
"""Elementwise update subgraphs, which can update any part of their leaves by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Atom, Var


def obstacle(frame: Frame, subgraph: Subgraph) -> str:
    """Why a subgraph cannot update a part of its leaves by itself; '' if it can.

    It can if all values but scalars have one shape, and every equation is elementwise.
    """
    eqns = [frame.jaxpr.eqns[i] for i in subgraph.eqns]
    for eqn in eqns:
        if not _rules.is_elementwise(eqn):
            where = _lines.summary(eqn)  # '' inside of JAX's own functions
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
    """The outputs of an elementwise subgraph by index, for equally shaped parts of its inputs."""
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
            outs = [jnp.broadcast_to(jnp.reshape(ins[0], ()), shape)]
        else:
            outs = _jaxpr.bind(eqn, *ins)
        values |= zip(eqn.outvars, outs, strict=True)
    atoms = {i: frame.jaxpr.outvars[i] for i in subgraph.outs}
    return {i: _of_type(jnp.broadcast_to(value(atom), shape), atom) for i, atom in atoms.items()}


def _of_type(x: jax.Array, atom: Atom) -> jax.Array:
    # Else a Python number in the state would change its type in a step.
    if not atom.aval.weak_type or jax.typeof(x).weak_type:
        return x
    weak: jax.Array = lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )
    return weak
