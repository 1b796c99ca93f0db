# SPDX-License-Identifier: Apache-2.0
"""What each primitive does to dims: one table from primitive to rule.

A rule says, for every operand dim, which output dim it becomes. That one fact serves three readers: the
analysis (which dims are sharded together), the interpreter (an operation whose sharded dims line up runs
on shards), and gathers (a dim that does not survive is gathered first). A primitive without a rule
gathers its operands, so a missing rule costs traffic and never a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval, Eqn

Params = dict[str, Any]  # of an equation: what else it says beside its operands, by name
# For each operand, for each of its dims: the output dim it becomes, or None if it does not survive.
DimMaps = list[tuple[int | None, ...]]


class Rule(NamedTuple):
    """How a primitive acts on dims.

    Attributes:
      dims: the dim maps of an equation.
      local: parameter overrides when output dim `dim` is cut to `size`.
      linear: f(a + b) = f(a) + f(b), so that it may run before a pending reduction.
      reduces: 'sum', 'max' or 'min' if dims that do not survive are reduced that way.
    """

    dims: Callable[[Eqn], DimMaps]
    local: Callable[[Eqn, int, int], Params] = lambda eqn, dim, size: {}
    linear: bool = False
    reduces: str | None = None


def _shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in eqn.invars]


def _out_shape(eqn: Eqn) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape


def _same_dims(shape: Sequence[int], out: Sequence[int]) -> tuple[int | None, ...]:
    # Scalars and dims of size 1 are broadcast by elementwise primitives.
    return tuple(d if size == out[d] else None for d, size in enumerate(shape))


def _elementwise(eqn: Eqn) -> DimMaps:
    return [_same_dims(shape, _out_shape(eqn)) for shape in _shapes(eqn)]


def _broadcast_in_dim(eqn: Eqn) -> DimMaps:
    out, places = _out_shape(eqn), eqn.params["broadcast_dimensions"]
    operand, *dynamic = _shapes(eqn)
    kept = tuple(
        place if size == out[place] else None for size, place in zip(operand, places, strict=True)
    )
    return [kept, *((None,) * len(shape) for shape in dynamic)]


def _transpose(eqn: Eqn) -> DimMaps:
    permutation = eqn.params["permutation"]
    return [tuple(permutation.index(d) for d in range(len(permutation)))]


def _reshape(eqn: Eqn) -> DimMaps:
    # A dim's blocks stay blocks if as many elements stand before it as before an output dim.
    (shape, *_), out = _shapes(eqn), _out_shape(eqn)
    if eqn.params.get("dimensions") is not None or 0 in shape:
        return [(None,) * len(s) for s in _shapes(eqn)]
    starts = {math.prod(out[:d]): d for d, size in enumerate(out) if size > 1}
    return [
        tuple(
            starts.get(math.prod(shape[:d])) if size > 1 else None for d, size in enumerate(shape)
        )
    ]


def _without(ndim: int, gone: Sequence[int]) -> tuple[int | None, ...]:
    left = [d for d in range(ndim) if d not in gone]
    return tuple(left.index(d) if d in left else None for d in range(ndim))


def _reduction(eqn: Eqn) -> DimMaps:
    return [_without(len(shape), eqn.params["axes"]) for shape in _shapes(eqn)]


def _squeeze(eqn: Eqn) -> DimMaps:
    return [_without(len(shape), eqn.params["dimensions"]) for shape in _shapes(eqn)]


def _except(param: str) -> Callable[[Eqn], DimMaps]:
    def dims(eqn: Eqn) -> DimMaps:
        gone = eqn.params[param]
        gone = gone if isinstance(gone, tuple) else (gone,)
        return [tuple(None if d in gone else d for d in range(len(s))) for s in _shapes(eqn)]

    return dims


def _windowed(eqn: Eqn) -> DimMaps:
    # slice, dynamic_slice, dynamic_update_slice, pad: dims that are left whole survive; index
    # operands are scalars.
    kept = _same_dims(_shapes(eqn)[0], _out_shape(eqn))
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"] or (1,) * len(kept)
        kept = tuple(None if step != 1 else d for d, step in zip(kept, strides, strict=True))
    if eqn.primitive.name == "pad":
        config = eqn.params["padding_config"]
        kept = tuple(
            d if c == (0, 0, 0) else None for d, c in zip(kept, map(tuple, config), strict=True)
        )
    if eqn.primitive.name == "dynamic_update_slice":
        kept = _same_dims(_shapes(eqn)[1], _shapes(eqn)[0])
        return [kept, kept, *(() for _ in eqn.invars[2:])]
    return [kept, *(() for _ in eqn.invars[1:])]


def _cut_param(param: str) -> Callable[[Eqn, int, int], Params]:
    def local(eqn: Eqn, dim: int, size: int) -> Params:
        sizes = eqn.params[param]
        return {param: (*sizes[:dim], size, *sizes[dim + 1 :])}

    return local


ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt
    ceil clamp clz complex conj copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
    polynomial population_count pow random_gamma_grad real reduce_precision regularized_incomplete_beta
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xla_metadata_value xor zeta
""".split()

RULES: dict[str, Rule] = {
    **{name: Rule(_elementwise) for name in ELEMENTWISE},
    "convert_element_type": Rule(_elementwise, linear=True),
    "add_any": Rule(_elementwise, linear=True),
    "broadcast_in_dim": Rule(_broadcast_in_dim, _cut_param("shape")),
    "transpose": Rule(_transpose, linear=True),
    "reshape": Rule(_reshape, _cut_param("new_sizes"), linear=True),
    "squeeze": Rule(_squeeze, linear=True),
    "reduce_sum": Rule(_reduction, reduces="sum"),
    "reduce_max": Rule(_reduction, reduces="max"),
    "reduce_min": Rule(_reduction, reduces="min"),
    "reduce_prod": Rule(_reduction),
    "reduce_and": Rule(_reduction, reduces="min"),
    "reduce_or": Rule(_reduction, reduces="max"),
    "argmax": Rule(_reduction),
    "argmin": Rule(_reduction),
    **{n: Rule(_except("axis")) for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "rev": Rule(_except("dimensions")),
    "sort": Rule(_except("dimension")),
    "concatenate": Rule(_except("dimension")),
    "split": Rule(_except("axis")),
    "slice": Rule(_windowed, _cut_param("limit_indices")),
    "pad": Rule(_windowed),
    "dynamic_slice": Rule(_windowed, _cut_param("slice_sizes")),
    "dynamic_update_slice": Rule(_windowed),
    "device_put": Rule(_elementwise),
}

# Primitives that leave the value as it is; jzero's own variance takes the place of JAX's types.
IDENTITIES = frozenset(
    {"pvary", "pcast", "pbroadcast", "sharding_constraint", "mesh_cast", "reshard"}
)


def rule_for(eqn: Eqn) -> Rule | None:
    """The rule of the equation's primitive; None means: gather its operands."""
    rule = RULES.get(eqn.primitive.name)
    if eqn.primitive.name == "bitcast_convert_type":
        same = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        return rule if same else None
    if (
        eqn.primitive.name == "device_put"
    ):  # To other devices: theirs is no part of this step's mesh.
        return rule if _jaxpr.changes_memory(eqn) else None
    if eqn.primitive.name in ("reduce_and", "reduce_or") and eqn.invars[0].aval.dtype != bool:
        return RULES["reduce_prod"]  # Of integers, it is no minimum or maximum.
    return rule


def is_linear(eqn: Eqn) -> bool:
    """Whether it may run before a sum that is due; so may the narrowing of a float, which rounds."""
    rule = rule_for(eqn)
    if eqn.primitive.name == "convert_element_type":
        dtypes = (eqn.invars[0].aval.dtype, eqn.params["new_dtype"])
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return rule is not None and rule.linear


def is_elementwise(eqn: Eqn) -> bool:
    """Whether an element of the result depends on the same element of the operands, and on scalars."""
    if eqn.primitive.name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == 1
    return eqn.primitive.name in {*ELEMENTWISE, "convert_element_type"}


def size_in_bytes(aval: Aval) -> int:
    """Bytes of a whole value; extended dtypes (keys) count as one word an element."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


def extreme(dtype: DTypeLike, which: str) -> ArrayLike:
    """The 'max' or 'min' that a dtype has; infinite, if it has that."""
    if dtype == jnp.bool_:
        return which == "max"
    if not jnp.issubdtype(dtype, jnp.inexact):
        most: ArrayLike = getattr(jnp.iinfo(dtype), which)
        return most
    infinity = jnp.inf if which == "max" else -jnp.inf
    has_infinity = np.isinf(np.asarray(infinity, dtype).astype(np.float32))  # some float8 have none
    return infinity if has_infinity else getattr(jnp.finfo(dtype), which)
