# SPDX-License-Identifier: Apache-2.0
"""Compiler options of programs that copy from the host beside what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero.sharding.plan._host_memory import platform_of

ITERATION = "iteration_beside_copies"
# To XLA, slices that a GPU copies from the host's memory are asynchronous compute, of which few may run at a
# time: most copies of a layer's nine leaves would wait, behind its products (test_layers_on_gpus.py).
_OPTIONS: Mapping[str, Any] = {"xla_gpu_experimental_parallel_async_compute_limit": 64}


def options_of(program: str, mesh: Any) -> dict[str, Any]:
    return dict(_OPTIONS) if program == ITERATION and platform_of(mesh) == "gpu" else {}


def jitted(
    run: Callable[..., Any], name: str, mesh: Any, donate: tuple[int, ...]
) -> Callable[..., Any]:
    run.__name__ = name
    plain = jax.jit(run, donate_argnums=donate)
    if not (options := options_of(name, mesh)):
        return plain
    compiled = jax.jit(run, donate_argnums=donate, compiler_options=options)

    def call(*args: Any) -> Any:
        # In a trace of a step nothing is compiled, and JAX refuses options there.
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (plain if traced else compiled)(*args)

    return call
