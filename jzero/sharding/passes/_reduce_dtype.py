# SPDX-License-Identifier: Apache-2.0
"""Casts gradients to a communication dtype around their sums over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jzero.ir._regions import Region
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _origins
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


def reduce_dtype(jaxpr: Jaxpr, dtype: DTypeLike, rows: Sequence[frozenset[str]]) -> Jaxpr:
    """One device's program whose gradients are cast before their sums over the devices, and back.

    Sums that a forward pass makes, such as losses and counts, stay as they are.
    """
    program, dtype = Region(jaxpr, []), jnp.dtype(dtype)
    found = _origins.origins(program, rows)
    sums = dict[Var, Atom]()  # in `dtype`: what is summed over several axes is cast once

    def cast_around(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        if eqn.primitive.name not in _origins.SUMS:
            return False
        floats = [jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars]
        ours = [
            found[region, x].is_gradient and is_float
            for x, is_float in zip(eqn.invars, floats, strict=True)
            if not _jaxpr.is_literal(x)
        ]
        if not ours or not all(ours) or all(x.aval.dtype == dtype for x in eqn.invars):
            return False
        ins = [sums[x] if x in sums else _cast(writer, writer.read(x), dtype) for x in eqn.invars]
        outs = [_jaxpr.var_like(out.aval, dtype=dtype) for out in eqn.outvars]
        for out, wide in zip(eqn.outvars, writer.clone(eqn, ins, outs), strict=True):
            sums[out] = wide
            _cast(writer, wide, out.aval.dtype, out)
        return True

    return _origins.rewritten(program, cast_around)


def _cast(writer: JaxprWriter, x: Atom, dtype: DTypeLike, out: Var | None = None) -> Atom:
    if x.aval.dtype == dtype:
        return x
    out = _jaxpr.var_like(x.aval, dtype=dtype) if out is None else out
    params: dict[str, Any] = dict(new_dtype=dtype, weak_type=out.aval.weak_type, sharding=None)
    return writer.add(lax.convert_element_type_p, [x], [out], **params)[0]
