# SPDX-License-Identifier: Apache-2.0
"""How much an equation multiplies: matrix products, convolutions, and loops and branches with some inside."""

from __future__ import annotations

import math

from jzero.ir._regions import Region, turns
from jzero.tracing._types import Eqn


def products(region: Region, eqn: Eqn) -> int:
    """Multiplications in an equation's products; a `while` counts one turn, a `cond` its longest branch."""
    if eqn.primitive.name in _COUNTS:
        return _COUNTS[eqn.primitive.name](eqn)
    inner = [sum(products(child, e) for e in child.jaxpr.eqns) for child in region.inner(eqn)]
    if eqn.primitive.name == "cond":
        return max(inner)
    times = turns(eqn)
    return sum(inner) * (1 if times is None else times)


def _dot(eqn: Eqn) -> int:
    contracted: tuple[int, ...] = eqn.params["dimension_numbers"][0][0]
    shape = eqn.invars[0].aval.shape
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)


def _ragged_dot(eqn: Eqn) -> int:
    return math.prod(eqn.invars[0].aval.shape) * eqn.invars[1].aval.shape[-1]


def _conv(eqn: Eqn) -> int:
    kernel = eqn.invars[1].aval.shape
    features: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(features, 1)


_COUNTS = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
}
