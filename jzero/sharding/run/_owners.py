# SPDX-License-Identifier: Apache-2.0
"""Runs an update by owners: matrices in shards go to one device each, are updated there, and come back.

Shapes are those of matrices `[n, d]`, of which there are m, over k devices: a device has `[m, n/k, d]` of all
of them, and then `[m/k, n, d]`, its own whole; m is rounded up by sending the last one again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.partition._matrix_owners import OwnedGroup, OwnedStack
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._interpret import Interpreter
from jzero.sharding.run._values import FullValue, Settled, ShardValue, Value
from jzero.tracing import _rewrite
from jzero.tracing._types import Var

Known = dict[Var, Settled]


def can_run(interp: Interpreter) -> bool:
    """Whether all devices of a shard are here, each once."""
    devices = interp.devices
    return devices.num_shards > 1 and not devices.divergent and interp.microbatch is None


def run(
    interp: Interpreter, frame: Frame, owners: OwnedGroup | OwnedStack, ins: dict[Var, Value]
) -> Known:
    """The results of a group or stack, each in shards as it is wanted."""
    values = {var: interp.devices.settle(value) for var, value in ins.items()}
    if isinstance(owners, OwnedGroup):
        return _run_group(interp, frame, owners, values)
    return _run_stack(interp, frame, owners, values)


def _run_group(interp: Interpreter, frame: Frame, group: OwnedGroup, values: Known) -> Known:
    """`m` of `[n/k, d]` -> `[m/k, n, d]`, updated -> `m` of `[n/k, d]`."""
    devices, num = interp.devices, len(group.regions)
    args = [
        devices.full(values[slot[0]]) if same else _own(interp, frame, slot, values)
        for same, slot in zip(group.shared, group.reads, strict=True)
    ]
    update = _rewrite.function_of(group.update.eqns, group.update.invars, group.update.outvars)
    # In turn, as on one device: what one update needs beside its matrix is alive once.
    outs = [
        update(*(x if same else x[i] for x, same in zip(args, group.shared, strict=True)))
        for i in range(-(-num // devices.num_shards))
    ]
    name = _name(values, [region.reads for region in group.regions])
    found: Known = {}
    for slot, xs in zip(group.gives, zip(*outs, strict=True), strict=True):
        dim = _common({interp.dim_of(frame, var) for var in slot})
        own = ShardValue(jnp.stack(xs), 0, num, devices.shard_axes, name)
        stack = _returned(devices, own, None if dim is None else dim + 1)
        found |= {var: _one(stack, i) for i, var in enumerate(slot)}
    return found


def _own(interp: Interpreter, frame: Frame, slot: Sequence[Var], values: Known) -> jax.Array:
    """This device's matrices of all, whole: `[m/k, n, d]`."""
    devices, found = interp.devices, [values[var] for var in slot]
    dims: set[int | None] = {v.dim for v in found if isinstance(v, ShardValue)}
    dim = _common(dims or {interp.dim_of(frame, var) for var in slot})
    if dim is None:
        return devices.exchanged(FullValue(jnp.stack([devices.full(value) for value in found])), 0)
    # What is whole is cut: a stack of it would be one of whole matrices.
    shards = jnp.stack([devices.shard(value, dim) for value in found])
    name = next((value.name for value in found if value.name), "")
    size = slot[0].aval.shape[dim]
    return devices.exchanged(ShardValue(shards, dim + 1, size, devices.shard_axes, name), 0)


def _common(dims: set[int | None]) -> int | None:
    """The dim that all have; None if they differ."""
    return next(iter(dims)) if len(dims) == 1 else None


def _one(stack: FullValue | ShardValue, index: int) -> FullValue | ShardValue:
    """One matrix of a stack that is whole, or sharded along another dim."""
    if isinstance(stack, FullValue):
        return FullValue(stack.x[index])
    return ShardValue(stack.x[index], stack.dim - 1, stack.size, stack.axes)


def _name(values: Known, reads: Sequence[Sequence[Var]]) -> str:
    """For a profile: the first leaf of which something is sent."""
    names = (values[var].name for slot in reads for var in slot)
    return next((name for name in names if name), "")


def _run_stack(interp: Interpreter, frame: Frame, stack: OwnedStack, values: Known) -> Known:
    """`[m, n/k, d] -> [m/k, n, d]`, updated `-> [m, n/k, d]`."""
    devices = interp.devices
    args = [
        FullValue(devices.full(values[var]) if dim is None else devices.exchanged(values[var], dim))
        for var, dim in zip(stack.region.reads, stack.read_dims, strict=True)
    ]
    # In its frame the axes have the mesh's names, and no value is a shard.
    inner = dataclasses.replace(
        interp.inside(), axis_names={axis: (axis,) for axis in devices.shard_axes}
    )
    outs = inner.run(stack.frame, args)
    found: Known = {}
    for var, dim, out in zip(stack.region.gives, stack.give_dims, outs, strict=True):
        x = devices.full(out)
        if dim is None:
            found[var] = FullValue(x)
            continue
        name = _name(values, [stack.region.reads])
        own = ShardValue(x, dim, var.aval.shape[dim], devices.shard_axes, name)
        found[var] = _returned(devices, own, interp.dim_of(frame, var))
    return found


def _returned(devices: Devices, own: ShardValue, dim: int | None) -> FullValue | ShardValue:
    """Results that their owners have, in shards along the dim in which they are wanted, or whole for None."""
    if dim is None:
        return FullValue(devices.full(own))
    if dim == own.dim:
        return own
    size = own.x.shape[dim]
    return ShardValue(devices.exchanged(own, dim), dim, size, own.axes)
