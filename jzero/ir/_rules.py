# SPDX-License-Identifier: Apache-2.0
"""What jzero knows of each primitive: one table from its name to a rule.

A rule says along which dims an equation may run on blocks, in which operands it is linear, and its cost.
Everything else follows: dim maps, which equations run on shards and on a device's rows, which ones are cheap
to recompute, and which ones keep a partial sum. An equation without a rule takes its operands whole, so a
missing rule costs traffic, never correctness. How to add one: docs/design.md#how-to-add-a-rule.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jzero.ir import _factors
from jzero.ir._factors import DimMaps, Factor, FactorsOf
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Aval, Eqn


class Cost(enum.Enum):
    """What an equation does to elements, and so what it costs to recompute.

    IDENTITY: an operation that jzero drops. COPY: an identity that it keeps. VIEW: all elements of the
    operand, rearranged. PART: some of them. REPEAT: some of them, repeatedly. JOIN: elements of several
    operands. CAST: another dtype. ELEMENTWISE: each element depends on the operands' same element and on
    scalars. ALONG: also on others along a dim. REDUCTION: on all along some dims. SOURCE: on nothing. DRAW:
    on a key. TRANSFER: moves between memories. COLLECTIVE: between devices. LOOKUP: by indices. PRODUCT: sums
    of products. WHOLE: all others.
    """

    (
        IDENTITY, COPY, VIEW, PART, REPEAT, JOIN, CAST, ELEMENTWISE, ALONG, REDUCTION, SOURCE, DRAW, TRANSFER,
        COLLECTIVE, LOOKUP, PRODUCT, WHOLE,
    ) = range(17)  # fmt: skip


Linear = tuple[slice, ...]


class Rule(NamedTuple):
    factors: FactorsOf
    cost: Cost
    # Sets of operands, in each of which together the equation is linear:
    # f(a + c, b + d) = f(a, b) + f(c, d) if both operands are in one set.
    linear: Linear | Callable[[Eqn], Linear] = ()


TOGETHER = (slice(None),)
FIRST = (slice(1),)
EACH_OF_TWO = (slice(1), slice(1, 2))
_SUMS_AND_UPDATES = (slice(0, 3, 2),)

# These run on shards, and link the dims of their operands to those of their results. All others gather their
# operands.
_KEEPS_DIMS = frozenset({
    Cost.COPY, Cost.VIEW, Cost.PART, Cost.REPEAT, Cost.JOIN, Cost.CAST, Cost.ELEMENTWISE, Cost.ALONG,
    Cost.REDUCTION, Cost.TRANSFER,
})  # fmt: skip


def _quotient(eqn: Eqn) -> Linear:
    return FIRST if _is(eqn.invars[0], jnp.inexact) else ()  # Of integers it rounds.


def _cast(eqn: Eqn) -> Linear:
    """From float to float: a narrower one rounds a sum as it would round each term."""
    floats = all(_is(atom, jnp.floating) for atom in (*eqn.invars, *eqn.outvars))
    return TOGETHER if floats else ()


def _look_up(eqn: Eqn) -> Linear:
    """Each term of a sum would add the fill value, which is harmless only if it is 0 or NaN."""
    fill = eqn.params["fill_value"]
    none = _is(eqn.invars[0], jnp.inexact) if fill is None else fill == 0
    return FIRST if none or eqn.params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP else ()


def _is(atom: Atom, kind: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, kind)


def _all(names: str, *rule: Any) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Rule(*rule))


_STAY = _factors.leading(0)

RULES: dict[str, Rule] = {
    **_all("pvary pbroadcast sharding_constraint reshard", _factors.elementwise, Cost.IDENTITY, TOGETHER),
    **_all("copy name stop_gradient xla_metadata_value", _factors.elementwise, Cost.COPY, TOGETHER),
    **_all(
        """
        abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
        clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
        igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne
        nextafter not one_minus_square or polygamma polynomial population_count pow
        reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square tan tanh xor zeta
        """,
        _factors.elementwise, Cost.ELEMENTWISE),
    **_all("add add_any sub neg complex conj imag real", _factors.elementwise, Cost.ELEMENTWISE, TOGETHER),
    "mul": Rule(_factors.elementwise, Cost.ELEMENTWISE, EACH_OF_TWO),
    "div": Rule(_factors.elementwise, Cost.ELEMENTWISE, _quotient),
    "select_n": Rule(_factors.elementwise, Cost.ELEMENTWISE, (slice(1, None),)),
    "convert_element_type": Rule(_factors.elementwise, Cost.CAST, _cast),
    "device_put": Rule(_factors.elementwise, Cost.TRANSFER, TOGETHER),
    "transpose": Rule(_factors.mapped(_factors.permuted), Cost.VIEW, TOGETHER),
    "reshape": Rule(_factors.reshape, Cost.VIEW, TOGETHER),
    "squeeze": Rule(_factors.mapped(_factors.without("dimensions")), Cost.VIEW, TOGETHER),
    "slice": Rule(_factors.mapped(_factors.windowed, "limit_indices"), Cost.PART, TOGETHER),
    "dynamic_slice": Rule(_factors.mapped(_factors.windowed, "slice_sizes"), Cost.PART, FIRST),
    "split": Rule(_factors.mapped(_factors.all_but("axis")), Cost.PART, TOGETHER),
    "unstack": Rule(_factors.mapped(_factors.shifted("axis", -1)), Cost.PART, TOGETHER),
    "broadcast_in_dim": Rule(_factors.broadcast, Cost.REPEAT, FIRST),
    "tile": Rule(_factors.tile, Cost.REPEAT, TOGETHER),
    "concatenate": Rule(_factors.mapped(_factors.all_but("dimension")), Cost.JOIN, TOGETHER),
    "stack": Rule(_factors.mapped(_factors.shifted("axis", 1)), Cost.JOIN, TOGETHER),
    "pad": Rule(_factors.mapped(_factors.windowed), Cost.JOIN, TOGETHER),
    "dynamic_update_slice": Rule(_factors.mapped(_factors.windowed), Cost.JOIN, (slice(2),)),
    "rev": Rule(_factors.mapped(_factors.all_but("dimensions")), Cost.ALONG, TOGETHER),
    "cumsum": Rule(_factors.mapped(_factors.all_but("axis")), Cost.ALONG, TOGETHER),
    **_all("cumprod cummax cummin cumlogsumexp", _factors.mapped(_factors.all_but("axis")), Cost.ALONG),
    "sort": Rule(_factors.mapped(_factors.all_but("dimension")), Cost.ALONG),
    "reduce_sum": Rule(_factors.reduction("sum"), Cost.REDUCTION, TOGETHER),
    "reduce_prod": Rule(_factors.reduction("prod"), Cost.REDUCTION),
    "reduce_max": Rule(_factors.reduction("max"), Cost.REDUCTION),
    "reduce_min": Rule(_factors.reduction("min"), Cost.REDUCTION),
    "reduce_and": Rule(_factors.reduction("and", of_bools="min"), Cost.REDUCTION),
    "reduce_or": Rule(_factors.reduction("or", of_bools="max"), Cost.REDUCTION),
    **_all("argmax argmin reduce_xor", _factors.reduction(), Cost.REDUCTION),
    "reduce": Rule(_factors.mapped(_factors.without("dimensions")), Cost.WHOLE),
    "iota": Rule(_factors.iota, Cost.SOURCE),
    **_all("random_bits random_clone random_gamma random_seed random_split random_unwrap", _STAY, Cost.DRAW),
    "random_wrap": Rule(_factors.leading(1), Cost.DRAW),
    **_all("random_fold_in threefry2x32", _factors.elementwise, Cost.DRAW),
    **_all("rng_bit_generator rng_uniform", _factors.none, Cost.DRAW),
    **_all("psum psum_invariant", _STAY, Cost.COLLECTIVE, TOGETHER),
    **_all("pmax pmin layout_constraint", _STAY, Cost.COLLECTIVE),
    "all_gather": Rule(_factors.mapped(_factors.shifted("all_gather_dimension", 1)), Cost.COLLECTIVE),
    "reduce_scatter": Rule(_factors.mapped(_factors.shifted("scatter_dimension", -1)), Cost.COLLECTIVE),
    "gather": Rule(_factors.gather, Cost.LOOKUP, _look_up),
    **_all("scatter scatter-mul", _factors.scatter, Cost.LOOKUP),
    **_all("scatter-add scatter-sub", _factors.scatter, Cost.LOOKUP, _SUMS_AND_UPDATES),
    **_all("scatter-max scatter-min", _factors.scatter, Cost.LOOKUP),
    "dot_general": Rule(_factors.dot_general, Cost.PRODUCT, EACH_OF_TWO),
    "ragged_dot_general": Rule(_factors.ragged_dot, Cost.PRODUCT, EACH_OF_TWO),
    **_all("scaled_dot scaled_matmul_wrapper", _factors.scaled_dot, Cost.PRODUCT, EACH_OF_TWO),
    "bcoo_dot_general": Rule(_factors.sparse_dot, Cost.PRODUCT, (slice(1), slice(2, 3))),
    "bcoo_dot_general_sampled": Rule(_factors.sampled_dot, Cost.PRODUCT, EACH_OF_TWO),
    "bcoo_todense": Rule(_factors.sparse_to_dense, Cost.WHOLE, FIRST),
    "bcoo_extract": Rule(_factors.dense_to_sparse, Cost.WHOLE, (slice(1, 2),)),
    "bcoo_fromdense": Rule(_factors.sparse_of_dense, Cost.WHOLE),
    **_all("bcoo_sort_indices bcoo_sum_duplicates bcoo_transpose", _factors.sparse_rows, Cost.WHOLE),
    "bcoo_spdot_general": Rule(_factors.sparse_product, Cost.WHOLE),
    "conv_general_dilated": Rule(_factors.conv, Cost.PRODUCT, EACH_OF_TWO),
    "top_k": Rule(_factors.mapped(_factors.all_but("axis")), Cost.WHOLE),
    "approx_top_k": Rule(_factors.mapped(_factors.all_but("reduction_dimension")), Cost.WHOLE),
    "reduce_window_sum": Rule(_factors.window, Cost.WHOLE, TOGETHER),
    **_all(
        "reduce_window reduce_window_max reduce_window_min select_and_scatter select_and_scatter_add"
        " select_and_gather_add", _factors.window, Cost.WHOLE),
    "fft": Rule(_factors.leading(lambda eqn: len(eqn.params["fft_lengths"])), Cost.WHOLE, TOGETHER),
    **_all(
        "cholesky qr eig eigh svd lu geqrf geqp3 hessenberg schur tridiagonal householder_product ormqr"
        " symmetric_product", _factors.leading(2), Cost.WHOLE),
    "triangular_solve": Rule(_factors.triangular_solve, Cost.WHOLE, (slice(1, 2),)),
    "tridiagonal_solve": Rule(_factors.tridiagonal_solve, Cost.WHOLE, (slice(3, 4),)),
    "lu_pivots_to_permutation": Rule(_factors.leading(1), Cost.WHOLE),
}  # fmt: skip
_TO_OTHER_WIDTHS = Rule(_factors.bitcast, Cost.WHOLE)


def rule_of(eqn: Eqn) -> Rule | None:
    name = eqn.primitive.name
    if name == "bitcast_convert_type" and eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape:
        return _TO_OTHER_WIDTHS
    # A transfer to other devices, which are not in this step's mesh.
    if name == "device_put" and not _jaxpr.changes_memory(eqn) and not _jaxpr.puts_nowhere(eqn):
        return None
    return RULES.get(name)


def named(*costs: Cost) -> frozenset[str]:
    return frozenset(name for name, rule in RULES.items() if rule.cost in costs)


def costs(eqn: Eqn, *classes: Cost) -> bool:
    rule = rule_of(eqn)
    return rule is not None and rule.cost in classes


# jzero drops these: it keeps its own track of device-varying values, instead of JAX's types.
IDENTITIES = named(Cost.IDENTITY)
ADDS = frozenset({"add", "add_any"})  # AD writes the second one


# -- dims --------------------------------------------------------------------------------------------


def factors_of(eqn: Eqn) -> list[Factor]:
    """The factors of an equation; dims in none of them need the whole operand."""
    rule = rule_of(eqn)
    return [] if rule is None else rule.factors(eqn)


def keeps_dims(eqn: Eqn) -> bool:
    """Whether its operands may be shards."""
    rule = rule_of(eqn)
    return rule is not None and rule.cost in _KEEPS_DIMS


def dims_of(eqn: Eqn) -> DimMaps | None:
    """`dim_maps` of an equation that runs on shards; None if its operands are gathered first."""
    return dim_maps(eqn) if keeps_dims(eqn) else None


def dim_maps(eqn: Eqn) -> DimMaps:
    """For each dim of the operands, the dim of the results that it becomes by its factors, or None."""
    found: list[list[int | None]] = [[None] * getattr(a.aval, "ndim", 0) for a in eqn.invars]
    for factor in factors_of(eqn):
        for dims, dim in zip(found, factor.ins, strict=True):
            if dim is not None:
                dims[dim] = factor.outs[0]
    return [*map(tuple, found)]


def factor_of(eqn: Eqn, place: int, dim: int) -> Factor | None:
    return next((f for f in factors_of(eqn) if f.ins[place] == dim), None)


def factor_to(eqn: Eqn, dim: int) -> Factor | None:
    return next((f for f in factors_of(eqn) if f.outs[0] == dim), None)


# -- linearity ---------------------------------------------------------------------------------------


def linear_in(eqn: Eqn) -> list[range]:
    """The indices of `Rule.linear`."""
    rule = rule_of(eqn)
    linear = () if rule is None else rule.linear
    sets = linear(eqn) if callable(linear) else linear
    return [range(len(eqn.invars))[operands] for operands in sets]


def stays_partial(eqn: Eqn, partial: Collection[int], zero: Collection[int]) -> bool:
    """Whether the result is a partial sum, if the operands at `partial` are, and those at `zero` are 0."""
    fits = (set(partial) <= set(operands) <= {*partial, *zero} for operands in linear_in(eqn))
    return any(fits)


def is_float_cast(eqn: Eqn) -> bool:
    return costs(eqn, Cost.CAST) and bool(linear_in(eqn))


def keeps_dtype(eqn: Eqn) -> bool:
    """Whether it is a cast to the operand's own dtype, which JAX writes for carries of weak types."""
    return costs(eqn, Cost.CAST) and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def sum_waits(eqn: Eqn) -> bool:
    """Whether a partial sum costs as much to reduce after it; see `passes_partial` in the partitioner."""
    return is_float_cast(eqn) or costs(eqn, Cost.VIEW) or eqn.primitive.name == "add_any"


# -- cost --------------------------------------------------------------------------------------------


def is_elementwise(eqn: Eqn) -> bool:
    """Whether an element of the result depends on the same element of the operands, and on scalars."""
    if eqn.primitive.name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == 1
    return costs(eqn, Cost.COPY, Cost.CAST, Cost.ELEMENTWISE)


def compares(eqn: Eqn) -> bool:
    floats = any(_is(atom, jnp.inexact) for atom in eqn.invars)
    return floats and costs(eqn, Cost.ELEMENTWISE) and eqn.outvars[0].aval.dtype == bool


def size_in_bytes(aval: Aval) -> int:
    """Bytes of the global value; PRNG keys count as one word per element."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


# -- reductions --------------------------------------------------------------------------------------

BY_DEVICES = frozenset({"sum", "max", "min"})  # what devices can reduce
# How the results of two blocks are combined.
COMBINES: dict[str, Any] = {
    "sum": lax.add_p, "prod": lax.mul_p, "max": lax.max_p, "min": lax.min_p, "and": lax.and_p,
    "or": lax.or_p,
}  # fmt: skip


def neutral(reduces: str, dtype: DTypeLike) -> ArrayLike:
    if reduces in ("max", "min"):
        return extreme(dtype, "min" if reduces == "max" else "max")
    ones: ArrayLike = ~np.zeros((), dtype) if reduces == "and" else 1
    return {"sum": 0, "prod": 1, "and": ones, "or": 0}[reduces]


def extreme(dtype: DTypeLike, which: str) -> ArrayLike:
    """The 'max' or 'min' of a dtype, infinite if possible."""
    if dtype == jnp.bool_:
        return which == "max"
    if not jnp.issubdtype(dtype, jnp.inexact):
        most: ArrayLike = getattr(jnp.iinfo(dtype), which)
        return most
    infinity = jnp.inf if which == "max" else -jnp.inf
    has_infinity = np.isinf(np.asarray(infinity, dtype).astype(np.float32))  # some float8 have none
    return infinity if has_infinity else getattr(jnp.finfo(dtype), which)
