# SPDX-License-Identifier: Apache-2.0
"""Communication dtypes, in place of those that devices cannot gather or reduce; and fenced reshapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# XLA:CPU gathers other numbers of some of these, and reduces none of 2 bits (0.10.2).
SENT_AS = {
    **dict.fromkeys(["int2", "int4"], "int8"), **dict.fromkeys(["uint2", "uint4"], "uint8"),
    "float4_e2m1fn": "bfloat16",
}  # fmt: skip


def cast(dtype: DTypeLike, x: jax.Array) -> jax.Array:
    return x.astype(dtype)


def fenced(x: jax.Array) -> jax.Array:
    """`x`, which a reshape of jzero's has made, as a value of its own.

    [Note: reshapes before updates] XLA:CPU writes a `dynamic_update_slice` (or a scatter of one slice) over
    its operand in one loop with what makes the update. If the operand is a reshape, it does not see that the
    update reads rows that the loop has written already, and `x.at[1:].set(x[:-1])` repeats its first row.
    What a step itself reshapes is its own (`jax.jit` makes the same of it); of what jzero reshapes, a barrier
    hides it (test_starts.py::test_rows_that_are_shifted_in_their_place).
    """
    barred: jax.Array = lax.optimization_barrier(x)
    return barred


# [Note: extremes of floats]
# XLA's all-reduce takes NaN for no maximum and no minimum of others, and of -0.0 and 0.0 either one. So
# floats are reduced as integers in the same order, of which NaN is the outermost. Complex numbers, and what
# microbatches collect (`_collectives.all_reduce`), are gathered, one value of each device, and reduced by
# all of them (test_collected_rows.py::test_extremes_keep_nan_and_the_sign_of_zero).


def ordered_integers(kind: str, x: jax.Array) -> jax.Array:
    """Integers in the order of `x`, in which NaN is first for a 'min' and last for a 'max'."""
    x = x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    dtype = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits, most = lax.bitcast_convert_type(x, dtype), jnp.iinfo(dtype).max
    # Of negative numbers, the larger one has the smaller bits.
    ordered = jnp.where(bits < 0, bits ^ most, bits)
    return jnp.where(jnp.isnan(x), getattr(jnp.iinfo(dtype), kind), ordered)


def from_ordered(kind: str, dtype: DTypeLike, ordered: jax.Array) -> jax.Array:
    """The floats of which `ordered_integers` made integers."""
    info = jnp.iinfo(ordered.dtype)
    bits = jnp.where(ordered < 0, ordered ^ info.max, ordered)
    x = lax.bitcast_convert_type(bits, jnp.dtype(f"float{8 * ordered.dtype.itemsize}"))
    nan = jnp.asarray(jnp.nan, x.dtype)
    return jnp.where(ordered == getattr(info, kind), nan, x).astype(dtype)
