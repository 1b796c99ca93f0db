# SPDX-License-Identifier: Apache-2.0
"""Converts leaves on the devices from the layout in which they are stored to that of gradients, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jzero.segments._given import GivenStep, TypedPart, axes_of, function_of, stored
from jzero.segments._partitioned import PASSES, programs_of
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Arrays
from jzero.sharding.partition._partition import DeviceInput
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Var


def entering(planned: PlannedStep, variables: Sequence[Var]) -> Callable[..., Arrays] | None:
    """`leaves -> shards` from stored leaves to the gradients' layout; None if they already have it."""
    if _are_shards(planned, variables):
        return None
    interface, mesh = planned.plan.interface, axes_of(planned.plan, None)
    ins = [DeviceInput(stored(interface.of(var), mesh)) for var in variables]
    outs = [stored(interface.as_passed(var), mesh) for var in variables]
    none = [None] * len(variables)
    convert = _function(planned, TypedPart(_same(variables, variables), none, ins, none, outs))
    return lambda leaves: convert(*leaves)


def leaving(planned: PlannedStep, outs: Sequence[int]) -> Callable[..., Arrays] | None:
    """`(old leaves, shards) -> leaves` from updated shards to the stored layout; None if it is the same."""
    olds = [planned.frame.jaxpr.invars[i] for i in outs]
    if _are_shards(planned, olds):
        return None
    interface, mesh = planned.plan.interface, axes_of(planned.plan, None)
    leaves = [stored(interface.of(var), mesh) for var in olds]
    shards = [stored(interface.as_passed(var), mesh) for var in olds]
    new = [_jaxpr.new_var(var) for var in olds]
    part = TypedPart(
        _same([*olds, *new], new),
        [*outs, *[None] * len(olds)],
        [*map(DeviceInput, (*leaves, *shards))],
        outs,
        leaves,
        donated=frozenset(range(len(olds))),
    )
    convert = _function(planned, part)
    return lambda olds, shards: convert(*olds, *shards)


def _are_shards(planned: PlannedStep, variables: Sequence[Var]) -> bool:
    interface = planned.plan.interface
    pairs = [(interface.of(var), interface.as_passed(var)) for var in variables]
    return all((a.layout, a.automatic) == (b.layout, b.automatic) for a, b in pairs)


def _same(invars: Sequence[Var], outvars: Sequence[Var]) -> GivenStep:
    """A function that returns some of its inputs."""
    return GivenStep(_rewrite.Flat([], [*invars], [*outvars], []), [], [], None)


def _function(planned: PlannedStep, part: TypedPart) -> Callable[..., Arrays]:
    return function_of(programs_of(part, planned)[PASSES[-1]], planned)
