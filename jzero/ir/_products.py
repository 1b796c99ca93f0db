# SPDX-License-Identifier: Apache-2.0
"""Counts the multiplications of matrix products and convolutions."""

from __future__ import annotations

import math

from jzero.ir import _rules
from jzero.ir._regions import Region, trip_count
from jzero.tracing._types import Eqn


def products(region: Region, eqn: Eqn) -> int:
    """Multiplications, also inside programs: a `while` counts once, a `cond` as its largest branch."""
    if eqn.primitive.name in COUNTS:
        return COUNTS[eqn.primitive.name](eqn)
    inner = [sum(products(child, e) for e in child.jaxpr.eqns) for child in region.inner(eqn)]
    if eqn.primitive.name == "cond":
        return max(inner)
    times = trip_count(eqn)
    return sum(inner) * (1 if times is None else times)


def _dot(eqn: Eqn) -> int:
    shape = eqn.invars[0].aval.shape
    summed = [shape[f.ins[0]] for f in _rules.factors_of(eqn) if f.reduces and f.ins[0] is not None]
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(summed)


def _sparse_dot(eqn: Eqn) -> int:
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    sizes = enumerate(eqn.invars[2].aval.shape)
    return eqn.invars[0].aval.size * math.prod(
        n for d, n in sizes if d not in (*contracted, *batch)
    )


def _ragged_dot(eqn: Eqn) -> int:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    sizes = enumerate(eqn.invars[1].aval.shape)
    others = {*summed, *batch, *numbers.rhs_group_dimensions}
    return eqn.invars[0].aval.size * math.prod(n for d, n in sizes if d not in others)


def _conv(eqn: Eqn) -> int:
    kernel = eqn.invars[1].aval.shape
    features: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(features, 1)


COUNTS = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "scaled_matmul_wrapper": _dot,
    "bcoo_dot_general": _sparse_dot,
    "bcoo_dot_general_sampled": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
}
