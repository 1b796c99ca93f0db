# SPDX-License-Identifier: Apache-2.0
"""Leaves of the state from how they rest to how they cross, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jzero.segments import _parts
from jzero.sharding.run._interpret import Env
from jzero.sharding.run._run import Runner, value_of
from jzero.sharding.run._values import Arrays, Value
from jzero.tracing import _jaxpr


def entering(runner: Runner, variables: Sequence[_jaxpr.Var]) -> Callable[..., Arrays] | None:
    """`leaves -> shards`: leaves that rest on the devices, in shards like gradients; None if they are."""
    boundary = runner.plan.boundary
    rest = [boundary.of(var) for var in variables]
    crossing = [boundary.crossed(var) for var in variables]
    if all(old.layout == new.layout for old, new in zip(rest, crossing, strict=True)):
        return None

    if runner.is_partitioned:
        enter = _parts.entered(runner, variables)
        return lambda xs: enter(*xs)

    def local(xs: Arrays) -> Arrays:
        devices = runner.interpreter().devices
        return [
            devices.as_dim(value_of(x, old), new.dim)
            for x, old, new in zip(xs, rest, crossing, strict=True)
        ]

    specs = [plan.spec for plan in rest]
    return runner.shard_map(local, (specs,), [plan.spec for plan in crossing])


def leaving(runner: Runner, outs: Sequence[int]) -> Callable[..., Arrays] | None:
    """`(old leaves, shards) -> leaves`: renewed shards like gradients, as they rest; None if they do."""
    boundary, jaxpr = runner.plan.boundary, runner.frame.jaxpr
    rest = [boundary.of(jaxpr.invars[i]) for i in outs]
    crossing = [boundary.crossed(jaxpr.invars[i]) for i in outs]
    if all(old.layout == new.layout for old, new in zip(rest, crossing, strict=True)):
        return None

    if runner.is_partitioned:
        leave = _parts.left(runner, outs)
        return lambda olds, shards: leave(*olds, *shards)

    def local(olds: Arrays, shards: Arrays) -> Arrays:
        interp, new = runner.interpreter(), []
        for i, plan, old, x in zip(outs, crossing, olds, shards, strict=True):
            atom = jaxpr.outvars[i]
            values: dict[_jaxpr.Var, Value] = (
                {} if _jaxpr.is_literal(atom) else {atom: value_of(x, plan)}
            )
            new.append(runner.out(interp, Env(values), i, old))
        return new

    specs = [plan.spec for plan in rest]
    return runner.shard_map(local, (specs, [plan.spec for plan in crossing]), specs)
