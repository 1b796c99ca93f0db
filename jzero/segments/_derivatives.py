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
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from jzero._errors import STEP, StepError, called_as, message
from jzero.tracing import _jaxpr


def differentiable(
    run: Callable[..., Any], written: Callable[[], Callable[..., Any] | None],
    closes_over: Sequence[Any], place: NamedSharding, who: str,
) -> Callable[..., Any]:  # fmt: skip
    """`run`, with the derivatives of the step as it is written.

    Args:
      run: `(state leaves, argument leaves) -> (new state leaves, outputs)`, of whole arrays without padding.
      written: makes the same of the step as it is written, which also takes, first, values for what it closes
        over; None of a step that nobody has written for the whole batch.
      closes_over: values of an outer trace that the step reads.
      place: whole on the devices of the step.
      who: was called.

    Raises:
      StepError: when it is differentiated, if `written` makes nothing.
    """
    # A rule has no derivatives by what it closes over: that is an argument, and is there now to be traced.
    if closes_over:
        written()

    @jax.custom_jvp
    def called(_: Sequence[Any], state: list[Any], arrays: list[Any]) -> Any:
        return run(state, arrays)

    def rule(primals: Any, tangents: Any) -> Any:
        with called_as(who):
            step = written()
            if step is None:
                raise _refused()
        leaves, tree = jax.tree.flatten(primals)
        pairs = enumerate(jax.tree.leaves(tangents))
        moving = {i: tangent for i, tangent in pairs if not isinstance(tangent, SymbolicZero)}

        def moved(*values: Any) -> Any:
            new = dict(zip(moving, values, strict=True))
            given = [_on_devices(new.get(i, x), x, place) for i, x in enumerate(leaves)]
            return step(*jax.tree.unflatten(tree, given))

        return jax.jvp(moved, [leaves[i] for i in moving], [*moving.values()])

    called.defjvp(rule, symbolic_zeros=True)
    return lambda state, arrays: called(closes_over, state, arrays)


def _refused() -> StepError:
    return StepError(message(
        STEP, "a derivative is taken of a step with collectives of its own (axis_name)",
        "It is written for one device, and what can be differentiated is a step of the whole batch.",
        "Differentiate inside the step, or write it without collectives."))  # fmt: skip


def as_written(
    traced: _jaxpr.Traced, places: Sequence[NamedSharding], closes_over: Sequence[Any], num_new: int
) -> Callable[..., Any]:
    """A step as it is written, `(values, state leaves, argument leaves) -> (new state leaves, outputs)`.

    Args:
      traced: its trace, of the whole batch.
      places: the shardings of its leaves, in their true shapes.
      closes_over: those of its constants in whose place it takes the values.
      num_new: how many of its results are leaves of the state.
    """
    numbers = {id(x): i for i, x in enumerate(closes_over)}

    @jax.jit
    def written(values: Sequence[Any], state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        consts = [values[numbers[id(x)]] if id(x) in numbers else x for x in traced.consts]
        leaves = map(lax.with_sharding_constraint, [*state, *arrays], places)
        outs = _jaxpr.evaluate(traced.jaxpr, consts, *leaves)
        return outs[:num_new], outs[num_new:]

    return written


def _on_devices(x: Any, primal: Any, place: NamedSharding) -> Any:
    """A value in the memory of these devices, for XLA to lay it out there."""
    if _jaxpr.is_on_host(jax.typeof(x)):
        x = jax.device_put(x, jax.memory.Space.Device)
    is_bound = isinstance(primal, jax.Array) and not isinstance(primal, jax.core.Tracer)
    if not (is_bound and primal.committed) or primal.sharding.device_set == place.device_set:
        return x
    return jax.device_put(x, place)
