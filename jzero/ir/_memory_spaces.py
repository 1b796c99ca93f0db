# SPDX-License-Identifier: Apache-2.0
"""Copies between the device and pinned host memory inside a program; types hold the memory space."""

from __future__ import annotations

import jax
from jax import lax
from jax.typing import DTypeLike

from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval


def to_host(x: jax.Array) -> jax.Array:
    copy: jax.Array = jax.device_put(x, jax.memory.Space.Host)
    return copy


def to_device(x: jax.Array) -> jax.Array:
    copy: jax.Array = jax.device_put(x, jax.memory.Space.Device)
    return copy


def empty_stack(length: int, aval: Aval) -> jax.Array:
    """Zeros of shape `[length, *aval.shape]` in the memory space of `aval`."""
    if not _jaxpr.is_on_host(aval):
        return lax.full((length, *aval.shape), 0, aval.dtype)
    return empty_on_host(length, aval.shape, aval.dtype)


def empty_on_host(length: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    stack: jax.Array = lax.broadcast(_jaxpr.zero_on_host(dtype), (length, *shape))
    return stack


def is_sent(eqn: _jaxpr.Eqn) -> bool:
    return _jaxpr.changes_memory(eqn) and _jaxpr.is_on_host(eqn.outvars[0].aval)


def is_fetch(eqn: _jaxpr.Eqn) -> bool:
    return (
        _jaxpr.changes_memory(eqn)
        and _jaxpr.is_on_host(eqn.invars[0].aval)
        and not _jaxpr.is_on_host(eqn.outvars[0].aval)
    )
