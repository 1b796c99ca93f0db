# SPDX-License-Identifier: Apache-2.0
"""Updates of matrices by owners: matrices in shards go to one device each, are updated there, and come back.

Shapes are those of matrices `[n, d]`, of which there are m, over k devices: a device has `[m, n/k, d]` of all
of them, and then `[m/k, n, d]`, its own whole. Both are layouts of one stack: to send it is to convert it. If
k does not divide m, padding repeats the last one, which can be inverted if any can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jzero.ir._layout import Dim, Layout
from jzero.ir._regions import Region
from jzero.sharding.partition._control import RunRegion
from jzero.sharding.partition._frame import DeviceFrame
from jzero.sharding.partition._matrix_owners import OwnedGroup, OwnedStack
from jzero.sharding.partition._values import DeviceValue
from jzero.sharding.partition._writer import OF_STATE
from jzero.sharding.passes._waits import OWNED
from jzero.tracing import _jaxpr
from jzero.tracing._rewrite import Flat
from jzero.tracing._types import Atom, Eqn, Var


def run_owned(
    frame: DeviceFrame, region: Region, eqn: Eqn, owners: OwnedGroup | OwnedStack,
    ins: Sequence[DeviceValue], run: RunRegion,
) -> list[DeviceValue]:  # fmt: skip
    """Writes a call that owners run; its results are in shards as they are wanted."""
    values = dict(zip(map(_jaxpr.variable, eqn.invars), ins, strict=True))
    for each in owners.regions:
        for var, dim in zip(each.reads, each.sharded, strict=True):
            if dim is not None:
                frame.reduce(values[var], _shards(frame, var.aval.shape, dim))
    if isinstance(owners, OwnedGroup):
        found = _group(frame, region, eqn, owners, values, run)
    else:
        found = _stack(frame, region, eqn, owners, values, run)
    return [found[out] for out in eqn.outvars]


def _shards(frame: DeviceFrame, shape: Sequence[int], dim: int | None) -> Layout:
    return frame.shared.owners.shards(shape, dim, frame.mesh)


def _group(
    frame: DeviceFrame, region: Region, eqn: Eqn, group: OwnedGroup, values: dict[Var, DeviceValue],
    run: RunRegion,
) -> dict[Var, DeviceValue]:  # fmt: skip
    """`m` of `[n/k, d]` -> `[m/k, n, d]`, updated -> `m` of `[n/k, d]`."""
    first, num = group.regions[0], len(group.regions)
    stacks = [
        None if same else _own(frame, [values[var] for var in slot], dim, first.name)
        for same, slot, dim in zip(group.shared, group.reads, first.sharded, strict=True)
    ]
    share = _shards(frame, [num], 0).local_shape[0]
    update = _update(region, eqn, group.update, [])
    made = list[list[Atom]]()
    # In turn, as on one device: what one update needs beside its matrix is alive once.
    for i in range(share):
        ins = [
            _replicated_value(frame, var, frame.at(values[var], frame.replicated(var.aval.shape)))
            if stack is None
            else _replicated_value(frame, var, _one(frame, stack, i))
            for var, stack in zip(first.reads, stacks, strict=True)
        ]
        outs = run(frame, update, ins)
        frame.source = eqn
        made.append([frame.at(v, frame.replicated(v.aval.shape)) for v in outs])
    found = dict[Var, DeviceValue]()
    wanted = zip(*(each.wanted for each in group.regions), strict=True)
    for slot, dims, xs in zip(group.gives, wanted, zip(*made, strict=True), strict=True):
        shape = slot[0].aval.shape
        one = _shards(frame, shape, dims[0] if len({*dims}) == 1 else None)
        (stack,) = frame.trace(_stacked, *xs)
        own = _shards(frame, (num, *shape), 0)
        x = frame.convert(stack, own, _of(num, one), why=OF_STATE, leaf=first.name)
        found |= {v: _at(v, one, _one(frame, x, i)) for i, v in enumerate(slot)}
    return found


def _update(region: Region, eqn: Eqn, program: Any, consts: list[ArrayLike]) -> Region:
    """The program of an update; passes know by a scope that it is none of `jax.grad`'s."""
    eqns = [_jaxpr.within_scope(each, OWNED) for each in program.eqns]
    flat: Any = Flat([*program.constvars], [*program.invars], [*program.outvars], eqns)
    return Region(flat, consts, None, (region, eqn))


def _own(
    frame: DeviceFrame, values: Sequence[DeviceValue], dim: int | None, name: str
) -> Atom:  # fmt: skip
    """This device's matrices of all, whole: `[m/k, n, d]`.

    What is whole is cut first: a stack of it would be one of whole matrices. Sums of which nobody needs
    shards are done by the owner.
    """
    shape, num = values[0].aval.shape, len(values)
    layouts = {v.layout for v in values if v.make is None}
    one = layouts.pop() if len(layouts) == 1 else frame.replicated(shape)
    one = one if one.axes or one.partial else _shards(frame, shape, dim)
    (stack,) = frame.trace(_stacked, *(frame.at(v, one) for v in values))
    own = _shards(frame, (num, *shape), 0)
    return frame.convert(stack, _of(num, one), own, why=OF_STATE, leaf=name)


def _of(num: int, one: Layout) -> Layout:
    """The layout of a stack of matrices that are laid out like one."""
    return dataclasses.replace(one, dims=(Dim(num), *one.dims))


def _one(frame: DeviceFrame, stack: Atom, i: int) -> Atom:
    """One matrix of a stack."""
    _, *shape = stack.aval.shape
    row = frame.slice(stack, (i, *[0] * len(shape)), (i + 1, *shape))
    return frame.reshape(row, shape)


def _replicated_value(frame: DeviceFrame, var: Var, x: Atom) -> DeviceValue:
    return _at(var, frame.replicated(var.aval.shape), x)


def _at(var: Var, layout: Layout, x: Atom) -> DeviceValue:
    return DeviceValue(var.aval, layout, {layout: x})


def _stacked(*xs: jax.Array) -> jax.Array:
    return jnp.stack(xs)


def _stack(
    frame: DeviceFrame, region: Region, eqn: Eqn, stack: OwnedStack, values: dict[Var, DeviceValue],
    run: RunRegion,
) -> dict[Var, DeviceValue]:  # fmt: skip
    """`[m, n/k, d] -> [m/k, n, d]`, updated `-> [m, n/k, d]`.

    Slices are rows: what is written for some of them is what devices do with rows of the batch.
    """
    (program,) = region.inner(eqn)
    update, ins = _update(region, eqn, program.jaxpr, program.consts), list[DeviceValue]()
    for var, dim in zip(stack.region.reads, stack.read_dims, strict=True):
        layout = _shards(frame, var.aval.shape, dim)
        value = _at(var, layout, frame.at(values[var], layout))
        ins.append(dataclasses.replace(value, rows=layout.axes))
    outs = run(frame, update, ins)
    frame.source = eqn
    found = dict[Var, DeviceValue]()
    for var, dim, value in zip(stack.region.gives, stack.region.wanted, outs, strict=True):
        frame.reduce(value)
        layout = _shards(frame, var.aval.shape, dim)
        value.rows, value.leaf = frozenset(), stack.region.name
        found[var] = _at(var, layout, frame.at(value, layout))
    return found
