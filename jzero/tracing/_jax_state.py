# SPDX-License-Identifier: Apache-2.0
"""JAX's own state: its configuration, backends and processes, and what it knows of a jitted function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jzero.tracing._internals import AxisEnv, api, config, distributed, internal, xla_bridge


@contextlib.contextmanager
def keeps_nan_checks() -> Iterator[None]:
    """Restores this thread's check for NaN on leaving.

    JAX drops a check that `jax.config.update` has installed when a `jax.debug_nans` context ends, as one does
    with every operation of an eager `jax.shard_map`.
    """
    hook: Any = api._post_hook_state
    before = hook.get_local()
    try:
        yield
    finally:
        hook.set_local(before)


def trace_settings() -> tuple[Hashable, ...]:
    """JAX's settings that change traces, as in the cache key of `jax.jit`, without meshes and axes."""
    return _without_meshes_and_axes(config.trace_context())


@functools.lru_cache(maxsize=64)  # Every call of a step asks: 0.5 µs in place of 7.
def _without_meshes_and_axes(context: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    return tuple([x for x in context if not isinstance(x, AbstractMesh | AxisEnv)])


def key_value_store() -> Any:
    """The key-value store of `jax.distributed`; None if it was not initialized."""
    return distributed.global_state.client


def has_backends() -> bool:
    """Whether JAX has started its backends. Takes no lock, which a forked child may never get."""
    return bool(xla_bridge._backends)


def devices_of(lowered: jax.stages.Lowered) -> list[jax.Device]:
    lowering: Any = lowered._lowering
    return list(lowering._device_list)


def static_arguments(fn: Callable[..., Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The `static_argnums` and `static_argnames` of `jax.jit` or `nnx.jit`, if it made `fn`."""
    info = getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)
    return getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())


def is_tracing() -> bool:
    return not internal.trace_state_clean()  # 0.11.0
