# SPDX-License-Identifier: Apache-2.0
"""`jax_debug_nans` and `jax_debug_infs` of steps in parts: what it returns is looked at, and no part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._errors import message
from jzero._memory_kinds import DEVICE
from jzero.offload.memory._away_array import AwayArray
from jzero.segments._whole import WholeStep
from jzero.sharding.plan._offload import Leaves, StepProgram


def run(
    who: str, step: StepProgram, state: Sequence[Any], arrays: Sequence[Any], leaves: Leaves
) -> tuple[list[Any], list[jax.Array]]:
    """`step(state, arrays)`. JAX would stop at a part that hands on a NaN which nobody selects.

    `jnp.var` has such a constant, and the part cannot run again to find a line: it has consumed its operands.

    Args:
      who: asks.
      step: to be run.
      state: leaves of it.
      arrays: leaves of the other arguments.
      leaves: the plan of the state's leaves.

    Raises:
      FloatingPointError: JAX is asked to look for what is not finite, and a step in parts returns it.
    """
    config: Any = jax.config
    asked = (config.jax_debug_nans, jnp.isnan), (config.jax_debug_infs, jnp.isinf)
    bad = [test for on, test in asked if on]
    if not bad or isinstance(step, WholeStep):
        return step(state, arrays)
    with jax.debug_nans(False), jax.debug_infs(False):
        new, outs = step(state, arrays)
        names = [f"output {i} beside the state" for i in range(len(outs))]
        names += [leaf.path for leaf in leaves[: len(new)]]
        found = [
            name
            for name, x in zip(names, [*outs, *new], strict=True)
            if _is_looked_at(x) and any(jnp.any(test(x)) for test in bad)
        ]
    if found:
        raise FloatingPointError(message(
            who, [f"{name} is not finite" for name in found],
            "With jax_debug_nans or jax_debug_infs, what a step in parts returns on devices is looked at, "
            "when its state is consumed.", "Run a small model without offload and offload_params: JAX then "
            "names the line that made it.", things="values", shown=6))  # fmt: skip
    return new, outs


def _is_looked_at(x: Any) -> bool:
    """Whether it is of floats, on the devices."""
    if isinstance(x, AwayArray):  # It may still wait for an update.
        return False
    here = isinstance(x, jax.Array) and x.sharding.memory_kind in (None, DEVICE)
    return here and jnp.issubdtype(x.dtype, jnp.inexact)
