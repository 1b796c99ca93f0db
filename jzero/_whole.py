"""What a step written for one device may ask beyond its part of the batch: totals, weighted means, keys.

Each is the plain formula in every other step, which sees the whole batch.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jzero._errors import StepError, message

# Data axes as the step sees them, microbatches counted in; empty outside a step and on one device.
_axes: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar(
    "jzero_axes", default=MappingProxyType({})
)


@contextlib.contextmanager
def data_axes(axes: dict[str, int]) -> Iterator[None]:
    """While it is open, the functions below speak of these axes."""
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


def total(x: Any) -> jax.Array:
    """The sum of `x` over the devices, in a step written for one device (`axis_name`).

    For what is counted rather than averaged: tokens that are not padding, correct answers. With
    accumulation it is over the microbatches, too. Everywhere else it returns `x`: a step that sees the
    whole batch has summed over all of it.

    >>> import jax.numpy as jnp, jzero
    >>> jzero.total(jnp.sum(jnp.array([1, 1, 0]))).item()
    2

    Args:
      x: an array of any shape; a number type.

    Returns:
      The sum, with the shape and dtype of `x` (booleans become int32).

    Raises:
      StepError: a gradient is taken through it.
    """
    x = jnp.asarray(x)
    return _total(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x)


@jax.custom_jvp
def _total(x: jax.Array) -> jax.Array:
    axes = tuple(_axes.get())
    if not axes:
        return x
    return jax.lax.psum(x, axes)


def _total_jvp(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        raise StepError(message(
            "jzero.total", "a gradient is taken through it",
            "A total is a constant to the loss: counts and weights do not depend on parameters.",
            "Put jax.lax.stop_gradient around what goes in."))  # fmt: skip
    out = _total(*primals)
    return out, jax.custom_derivatives.SymbolicZero(jax.typeof(out).to_tangent_aval())


_total.defjvp(_total_jvp, symbolic_zeros=True)


def weighted_mean(values: Any, weights: Any) -> jax.Array:
    """The mean of `values` over the whole batch, weighted: for losses normalised by a count.

    Computes::

        sum(values * weights) / total(sum(weights))      # sums over the whole batch

    The plain formula in a step that sees the whole batch. In one written for one device (`axis_name`) it
    is this device's share, scaled so that the mean over devices and microbatches, which the step takes with
    `jax.lax.pmean`, is exactly the weighted one.

    >>> import jax.numpy as jnp, jzero
    >>> losses, mask = jnp.array([2.0, 4.0, 9.0]), jnp.array([1.0, 1.0, 0.0])
    >>> jzero.weighted_mean(losses, mask).item()
    3.0

    Args:
      values: per-token or per-example losses, any shape.
      weights: weights or a mask, of a shape that broadcasts to that of `values`. They may not depend on
        parameters.

    Returns:
      A scalar in the dtype of `values`; zero if all weights are.

    Raises:
      StepError: a gradient is taken through the weights.
    """
    values = jnp.asarray(values)
    weights = jnp.broadcast_to(weights, values.shape).astype(values.dtype)
    copies = math.prod(_axes.get().values())
    count = total(jnp.sum(weights.astype(jnp.promote_types(values.dtype, jnp.float32))))
    scale = copies / jnp.where(count == 0, 1, count)
    return jnp.sum(values * weights) * scale.astype(values.dtype)
