# SPDX-License-Identifier: Apache-2.0
"""Keys of a step written for one device, where devices would otherwise draw the same numbers."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax

# Data axes as the step sees them, microbatches counted in; empty outside a step and on one device.
_axes: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar(
    "jzero_axes", default=MappingProxyType({})
)


@contextlib.contextmanager
def data_axes(axes: dict[str, int]) -> Iterator[None]:
    """While it is open, keys are folded over these axes."""
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
