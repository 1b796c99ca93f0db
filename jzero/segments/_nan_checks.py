# SPDX-License-Identifier: Apache-2.0
"""`jax_debug_nans` and `jax_debug_infs` for steps in several programs: checks the step's results only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._errors import message
from jzero._memory_kinds import DEVICE
from jzero.segments._whole import WholeStep
from jzero.sharding.plan._backend import Leaves, StepProgram
from jzero.tracing import _jax_state


def run(
    who: str, step: StepProgram, state: Sequence[Any], arrays: Sequence[Any], leaves: Leaves
) -> tuple[list[Any], list[jax.Array]]:
    """`step(state, arrays)`, with a check of what it returns.

    JAX's own check would fail for a program that returns a NaN which is never used (a constant of `jnp.var`),
    and could not run it again to find the line, because its operands are donated.
    """
    config: Any = jax.config
    nans, infs = bool(config.jax_debug_nans), bool(config.jax_debug_infs)
    if not (nans or infs):
        return step(state, arrays)
    with _jax_state.keeps_nan_checks():
        if isinstance(step, WholeStep):
            return _run_whole(who, step, state, arrays, leaves, nans, infs)
        with jax.debug_nans(False), jax.debug_infs(False):
            new, outs = step(state, arrays)
            found = _not_finite("output {} beside the state", outs, new, leaves, nans, infs)
    if found:
        raise FloatingPointError(message(
            who, found,
            "With jax_debug_nans or jax_debug_infs, what a step in parts returns on devices is looked at, "
            "when its state is consumed.", "Run a small model without memory=: JAX then "
            "names the line that made it.", things="values", shown=6))  # fmt: skip
    return new, outs


def _run_whole(
    who: str, step: WholeStep, state: Sequence[Any], arrays: Sequence[Any], leaves: Leaves,
    nans: bool, infs: bool,
) -> tuple[list[Any], list[jax.Array]]:  # fmt: skip
    """Runs one program, which JAX itself checks."""
    try:
        # Set again, because an eager `jax.shard_map` has dropped the check.
        with jax.debug_nans(nans), jax.debug_infs(infs):
            return step(state, arrays)
    except RecursionError:
        # JAX recurses when it looks for the line, if an argument of an eager `jax.shard_map` is not finite.
        with jax.debug_nans(False), jax.debug_infs(False):
            found = _not_finite("leaf {} of the batch", arrays, state, leaves, nans, infs)
        if not found:
            raise
    raise FloatingPointError(message(
        who, found, "With jax_debug_nans or jax_debug_infs, a step accepts finite values only.",
        "Look at where they come from: the data, or the step before.", things="values",
        shown=6))  # fmt: skip


def _not_finite(
    name: str, others: Sequence[Any], state: Sequence[Any], leaves: Leaves, nans: bool, infs: bool
) -> list[str]:
    """A line for each array of the state and `others` that is not finite."""
    tests = [test for on, test in ((nans, jnp.isnan), (infs, jnp.isinf)) if on]
    names = [name.format(i) for i in range(len(others))]
    names += [leaf.path for leaf in leaves[: len(state)]]
    return [
        f"{name} is not finite"
        for name, x in zip(names, [*others, *state], strict=True)
        if _is_looked_at(x) and any(jnp.any(test(x)) for test in tests)
    ]


def _is_looked_at(x: Any) -> bool:
    """Whether it is a float array on the devices; elsewhere its update may not have run yet."""
    here = isinstance(x, jax.Array) and x.sharding.memory_kind in (None, DEVICE)
    return here and jnp.issubdtype(x.dtype, jnp.inexact)
