# SPDX-License-Identifier: Apache-2.0
"""Leaves of the state from how they are stored to how they cross, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jzero.segments import _parts
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Arrays
from jzero.sharding.plan._interface import ValuePlan
from jzero.tracing import _jaxpr


def entering(planned: PlannedStep, variables: Sequence[_jaxpr.Var]) -> Callable[..., Arrays] | None:
    """`leaves -> shards`: leaves stored on the devices, sharded like gradients; None if they already are."""
    interface = planned.plan.interface
    rest = [interface.of(var) for var in variables]
    passed = [interface.as_passed(var) for var in variables]
    if _places(rest) == _places(passed):
        return None
    enter = _parts.entered(planned, variables)
    return lambda xs: enter(*xs)


def leaving(planned: PlannedStep, outs: Sequence[int]) -> Callable[..., Arrays] | None:
    """`(old leaves, shards) -> leaves`: updated shards as they are stored; None if that is the same."""
    interface, jaxpr = planned.plan.interface, planned.frame.jaxpr
    rest = [interface.of(jaxpr.invars[i]) for i in outs]
    passed = [interface.as_passed(jaxpr.invars[i]) for i in outs]
    if _places(rest) == _places(passed):
        return None
    leave = _parts.left(planned, outs)
    return lambda olds, shards: leave(*olds, *shards)


def _places(values: Sequence[ValuePlan]) -> list[Any]:
    return [(value.layout, value.automatic) for value in values]
