# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a sharded step that a caller takes.

[Note: derivatives from outside] The program of one device cannot be differentiated: inlining calls has
removed their rules (`jax.custom_vjp`, `jax.custom_jvp`, a solver's), and a maximum over rows is a `pmax`,
whose derivative is zero in JAX. So a call is a `jax.custom_jvp`, whose rule is `jax.jvp` of the traced step
of the whole batch. XLA shards that by its operands: the result is exact, while memory and communication are
up to XLA (tests/test_derivatives.py).
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
    """`run`, `(state leaves, argument leaves) -> (new state leaves, outputs)`, with derivatives.

    `written` makes the same function from the traced step (see `as_written`), or returns None for a step that
    is written for one device, which is an error when a derivative is taken. `closes_over` are values of an
    outer trace that the step reads. `place` replicates a value on the step's devices.
    """
    # A rule has no derivatives by values that it closes over, so these are arguments; they can be traced now.
    if closes_over:
        written()

    @jax.custom_jvp
    def called(_: Sequence[Any], state: list[Any], arrays: list[Any]) -> Any:
        return run(state, arrays)

    def rule(primals: Any, tangents: Any) -> Any:
        with called_as(who):
            step = written()
            if step is None:
                raise StepError(message(
                    STEP, "a derivative is taken of a step with collectives of its own (axis_name)",
                    "It is written for one device, and what can be differentiated is a step of the whole "
                    "batch.", "Differentiate inside the step, or write it without collectives."))  # fmt: skip
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


def as_written(
    traced: _jaxpr.Traced, places: Sequence[NamedSharding], closes_over: Sequence[Any], num_new: int
) -> Callable[..., Any]:
    """The traced step as `(values, state leaves, argument leaves) -> (new state leaves, outputs)`.

    `values` replace the constants `closes_over`. `places` are the shardings of all leaves in their true
    shapes.
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
    """A value in the memory of the step's devices, which XLA may then reshard."""
    if _jaxpr.is_on_host(jax.typeof(x)):
        x = jax.device_put(x, jax.memory.Space.Device)
    is_bound = isinstance(primal, jax.Array) and not isinstance(primal, jax.core.Tracer)
    if not (is_bound and primal.committed) or primal.sharding.device_set == place.device_set:
        return x
    return jax.device_put(x, place)
