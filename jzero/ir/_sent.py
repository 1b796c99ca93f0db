# SPDX-License-Identifier: Apache-2.0
"""Dtypes for communication where devices cannot gather or reduce the value's own; and fenced reshapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# XLA:CPU gathers wrong numbers of some of these, and reduces none of 2 bits (0.10.2).
SENT_AS = {
    **dict.fromkeys(["int2", "int4"], "int8"), **dict.fromkeys(["uint2", "uint4"], "uint8"),
    "float4_e2m1fn": "bfloat16",
}  # fmt: skip


def cast(dtype: DTypeLike, x: jax.Array) -> jax.Array:
    return x.astype(dtype)


def fenced(x: jax.Array) -> jax.Array:
    """`x`, the result of a reshape that jzero adds, behind a barrier.

    [Note: reshapes before updates] XLA:CPU fuses a `dynamic_update_slice` (or a scatter of one slice) in
    place with the computation of the update. If the operand is a reshape, it overlooks that the update reads
    rows already written, and `x.at[1:].set(x[:-1])` repeats its first row. `jax.jit` does the same to a
    step's own reshapes; the barrier hides those that jzero adds
    (test_starts.py::test_rows_that_are_shifted_in_their_place).
    """
    barred: jax.Array = lax.optimization_barrier(x)
    return barred


# [Note: extremes of floats]
# XLA's all-reduce ignores NaN in a maximum or minimum, and does not order -0.0 and 0.0. So floats are reduced
# as integers of the same order, with NaN outermost. Complex numbers, and partial results that microbatches
# collect (`_collectives.all_reduce`), are gathered and reduced on every device
# (test_collected_rows.py::test_extremes_keep_nan_and_the_sign_of_zero).


def ordered_integers(kind: str, x: jax.Array) -> jax.Array:
    """Integers in the order of `x`; NaN is the smallest for `kind` 'min' and the largest for 'max'."""
    x = x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    dtype = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits, most = lax.bitcast_convert_type(x, dtype), jnp.iinfo(dtype).max
    # Of negative numbers, the larger one has the smaller bits.
    ordered = jnp.where(bits < 0, bits ^ most, bits)
    return jnp.where(jnp.isnan(x), getattr(jnp.iinfo(dtype), kind), ordered)


def from_ordered(kind: str, dtype: DTypeLike, ordered: jax.Array) -> jax.Array:
    info = jnp.iinfo(ordered.dtype)
    bits = jnp.where(ordered < 0, ordered ^ info.max, ordered)
    x = lax.bitcast_convert_type(bits, jnp.dtype(f"float{8 * ordered.dtype.itemsize}"))
    nan = jnp.asarray(jnp.nan, x.dtype)
    return jnp.where(ordered == getattr(info, kind), nan, x).astype(dtype)
