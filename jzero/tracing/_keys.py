# SPDX-License-Identifier: Apache-2.0
"""PRNG keys: numbers that differ between devices, and bits of any part of an array."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.tracing._internals import threefry2x32_p

# Data axes as the step sees them, microbatches counted in; empty outside a step and on one device.
_axes: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar(
    "jzero_axes", default=MappingProxyType({})
)


@contextlib.contextmanager
def data_axes(axes: dict[str, int]) -> Iterator[None]:
    """Within it, `fold_device_index` folds over these axes."""
    token = _axes.set(axes if math.prod(axes.values()) > 1 else {})
    try:
        yield
    finally:
        _axes.reset(token)


def fold_device_index(key: jax.Array) -> jax.Array:
    """Folds the device's index into a PRNG key, in a step written for one device (`axis_name`).

    There devices otherwise draw the same numbers from a key kept *in the state*::

        dropout_key = jzero.fold_device_index(jax.random.fold_in(state.key, state.step))

    Everywhere else it returns the key unchanged: a step that sees the whole batch draws for all of it.

    >>> import jax, jzero
    >>> key = jax.random.key(0)
    >>> bool(jzero.fold_device_index(key) == key)
    True

    Args:
      key: a typed key, or an old-style `uint32[2]` one; shape `()` or `(2,)`.

    Returns:
      A key of the same kind.
    """
    axes = tuple(_axes.get())
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def is_threefry(dtype: Any) -> bool:
    """Whether any part of these keys' bits can be computed by itself."""
    found = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and dtype._impl.name == "threefry2x32"
    return found and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def wrapped_keys(dtype: Any, words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=dtype._impl.name)


def threefry_bits(key: jax.Array, high: jax.Array, low: jax.Array, bit_width: int) -> jax.Array:
    """What `random_bits` returns at the flat indices `high * 2**32 + low`."""
    first, second = jax.random.key_data(key)
    shape = jnp.shape(low)
    b1, b2 = threefry2x32_p.bind(
        jnp.broadcast_to(first, shape), jnp.broadcast_to(second, shape), high, low
    )
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return lax.shift_left(b1.astype(dtype), jnp.asarray(32, dtype)) | b2.astype(dtype)
    return (b1 ^ b2).astype(dtype)
