# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a sharded step that are taken from outside: those of the step as it is written.

[Note: derivatives from outside] The program of one device computes a step, and is no text to differentiate.
Calls in it are replaced by their equations, so that rules of their own (`jax.custom_vjp`, `jax.custom_jvp`, a
solver's) are gone, and a maximum over rows is a `pmax`, whose derivative is zero in JAX. Therefore whoever
differentiates a call (`jax.grad`, `jvp`, `hessian`, under `jax.jit` or not) meets a `jax.custom_jvp`. Its
rule is `jax.jvp` of the step as it was traced, of the whole batch. XLA shards that by its operands: what it
computes is exact, and how it moves and keeps values is XLA's choice (tests/test_derivatives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import STEP, StepError, called_as, message
from jzero.segments._program import Program
from jzero.sharding.plan._trace import WRITTEN
from jzero.tracing import _jaxpr

# `(state leaves, argument leaves) -> (new state leaves, outputs)`, of whole arrays without padding.
RunOnLeaves: TypeAlias = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


def differentiable(run: RunOnLeaves, program: Program, who: str) -> RunOnLeaves:
    """`run` of a program, with the derivatives of the step as it is written; for `who` was called.

    Raises:
      StepError: when it is differentiated, if nobody has written it for the whole batch.
    """
    # A rule has no derivatives by what it closes over, so this is an argument: read it while it is traced.
    closed = program.closes_over
    if closed and program.plan.reductions != WRITTEN:
        program.as_written  # noqa: B018

    @jax.custom_jvp
    def called(_: Sequence[Any], state: list[Any], arrays: list[Any]) -> Any:
        return run(state, arrays)

    def rule(primals: Any, tangents: Any) -> Any:
        if program.plan.reductions == WRITTEN:
            with called_as(who):
                raise _refused()
        places = [*program.state_shardings, *program.argument_shardings]
        leaves, tree = jax.tree.flatten(primals)
        pairs = enumerate(jax.tree.leaves(tangents))
        moving = {i: tangent for i, tangent in pairs if not isinstance(tangent, SymbolicZero)}

        def moved(*values: Any) -> Any:
            new = dict(zip(moving, values, strict=True))
            given = [_on_devices(new.get(i, x), x, places[0]) for i, x in enumerate(leaves)]
            return program.as_written(*jax.tree.unflatten(tree, given))

        return jax.jvp(moved, [leaves[i] for i in moving], [*moving.values()])

    called.defjvp(rule, symbolic_zeros=True)
    return lambda state, arrays: called(closed, state, arrays)


def _refused() -> StepError:
    return StepError(message(
        STEP, "a derivative is taken of a step with collectives of its own (axis_name)",
        "It is written for one device, and what can be differentiated is a step of the whole batch.",
        "Take the derivative inside of the step, or write it without collectives."))  # fmt: skip


def _on_devices(x: Any, primal: Any, place: NamedSharding) -> Any:
    """A value in the memory of the devices of `place`, for XLA to lay it out there."""
    if _jaxpr.is_on_host(jax.typeof(x)):
        x = jax.device_put(x, jax.memory.Space.Device)
    is_bound = isinstance(primal, jax.Array) and not isinstance(primal, jax.core.Tracer)
    if not (is_bound and primal.committed) or primal.sharding.device_set == place.device_set:
        return x
    return jax.device_put(x, NamedSharding(place.mesh, PartitionSpec()))
