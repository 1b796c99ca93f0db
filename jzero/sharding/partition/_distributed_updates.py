# SPDX-License-Identifier: Apache-2.0
"""Distributed updates of whole matrices: an all-to-all gives each device some, another one returns shards.

Shapes are those of m matrices `[n, d]` over k devices: a device holds `[m, n/k, d]`, a shard of each, and
after the all-to-all `[m/k, n, d]`, some of them replicated. Both are layouts of one batch of matrices, so
that the all-to-all is a layout conversion. If k does not divide m, padding repeats the last matrix, which can
be inverted if any can.
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
from jzero.sharding.partition._matrix_buckets import MatrixBatch, MatrixBucket
from jzero.sharding.partition._values import DeviceValue
from jzero.sharding.partition._writer import OF_STATE
from jzero.sharding.passes._waits import OWNED
from jzero.tracing import _jaxpr
from jzero.tracing._rewrite import Flat
from jzero.tracing._types import Atom, Eqn, Var


def run_distributed(
    frame: DeviceFrame, region: Region, eqn: Eqn, distributed: MatrixBucket | MatrixBatch,
    ins: Sequence[DeviceValue], run: RunRegion,
) -> list[DeviceValue]:  # fmt: skip
    """Writes an update call: each device runs a part of it, and the results are sharded."""
    values = dict(zip(map(_jaxpr.variable, eqn.invars), ins, strict=True))
    for each in distributed.subgraphs:
        for var, dim in zip(each.reads, each.sharded, strict=True):
            if dim is not None:
                frame.reduce(values[var], _shards(frame, var.aval.shape, dim))
    if isinstance(distributed, MatrixBucket):
        found = _bucket(frame, region, eqn, distributed, values, run)
    else:
        found = _batch(frame, region, eqn, distributed, values, run)
    return [found[out] for out in eqn.outvars]


def _shards(frame: DeviceFrame, shape: Sequence[int], dim: int | None) -> Layout:
    return frame.shared.distributed.shards(shape, dim, frame.mesh)


def _bucket(
    frame: DeviceFrame, region: Region, eqn: Eqn, bucket: MatrixBucket, values: dict[Var, DeviceValue],
    run: RunRegion,
) -> dict[Var, DeviceValue]:  # fmt: skip
    """`m` of `[n/k, d]` -> `[m/k, n, d]`, updated -> `m` of `[n/k, d]`."""
    first, num = bucket.subgraphs[0], len(bucket.subgraphs)
    stacks = [
        None if same else _own(frame, [values[var] for var in slot], dim, first.name)
        for same, slot, dim in zip(bucket.shared, bucket.reads, first.sharded, strict=True)
    ]
    share = _shards(frame, [num], 0).local_shape[0]
    update = _update(region, eqn, bucket.update, [])
    made = list[list[Atom]]()
    # One after the other, as on one device: temporaries of only one update are alive at a time.
    for i in range(share):
        ins = [
            _replicated_value(frame, var, frame.replica(values[var]))
            if stack is None
            else _replicated_value(frame, var, _one(frame, stack, i))
            for var, stack in zip(first.reads, stacks, strict=True)
        ]
        outs = run(frame, update, ins)
        frame.source = eqn
        made.append([*map(frame.replica, outs)])
    found = dict[Var, DeviceValue]()
    wanted = zip(*(each.wanted for each in bucket.subgraphs), strict=True)
    for slot, dims, xs in zip(bucket.gives, wanted, zip(*made, strict=True), strict=True):
        shape = slot[0].aval.shape
        one = _shards(frame, shape, dims[0] if len({*dims}) == 1 else None)
        (stack,) = frame.trace(_stacked, *xs)
        own = _shards(frame, (num, *shape), 0)
        x = frame.convert(stack, own, _of(num, one), why=OF_STATE, leaf=first.name)
        found |= {v: _at(v, one, _one(frame, x, i)) for i, v in enumerate(slot)}
    return found


def _update(region: Region, eqn: Eqn, program: Any, consts: list[ArrayLike]) -> Region:
    """The program of an update; a scope tells passes that it is no part of `jax.grad`."""
    eqns = [_jaxpr.within_scope(each, OWNED) for each in program.eqns]
    flat: Any = Flat([*program.constvars], [*program.invars], [*program.outvars], eqns)
    return Region(flat, consts, None, (region, eqn))


def _own(frame: DeviceFrame, values: Sequence[DeviceValue], dim: int | None, name: str) -> Atom:
    """This device's matrices: `[m/k, n, d]`.

    Replicated matrices are sliced first, so that no device stacks all of them. Partial sums whose shards
    nobody reads are reduced by the same all-to-all.
    """
    shape, num = values[0].aval.shape, len(values)
    layouts = {v.layout for v in values if v.make is None}
    one = layouts.pop() if len(layouts) == 1 else frame.replicated(shape)
    one = one if one.axes or one.partial else _shards(frame, shape, dim)
    (stack,) = frame.trace(_stacked, *(frame.at(v, one) for v in values))
    own = _shards(frame, (num, *shape), 0)
    return frame.convert(stack, _of(num, one), own, why=OF_STATE, leaf=name)


def _of(num: int, one: Layout) -> Layout:
    return dataclasses.replace(one, dims=(Dim(num), *one.dims))


def _one(frame: DeviceFrame, stack: Atom, i: int) -> Atom:
    _, *shape = stack.aval.shape
    row = frame.slice(stack, (i, *[0] * len(shape)), (i + 1, *shape))
    return frame.reshape(row, shape)


def _replicated_value(frame: DeviceFrame, var: Var, x: Atom) -> DeviceValue:
    return _at(var, frame.replicated(var.aval.shape), x)


def _at(var: Var, layout: Layout, x: Atom) -> DeviceValue:
    return DeviceValue(var.aval, layout, {layout: x})


def _stacked(*xs: jax.Array) -> jax.Array:
    return jnp.stack(xs)


def _batch(
    frame: DeviceFrame, region: Region, eqn: Eqn, stack: MatrixBatch, values: dict[Var, DeviceValue],
    run: RunRegion,
) -> dict[Var, DeviceValue]:  # fmt: skip
    """`[m, n/k, d] -> [m/k, n, d]`, updated like any step, slices as rows of the batch, `-> [m, n/k, d]`."""
    (program,) = region.inner(eqn)
    update, ins = _update(region, eqn, program.jaxpr, program.consts), list[DeviceValue]()
    for var, dim in zip(stack.subgraph.reads, stack.read_dims, strict=True):
        layout = _shards(frame, var.aval.shape, dim)
        value = _at(var, layout, frame.at(values[var], layout))
        ins.append(dataclasses.replace(value, rows=layout.axes))
    outs = run(frame, update, ins)
    frame.source = eqn
    found = dict[Var, DeviceValue]()
    for var, dim, value in zip(stack.subgraph.gives, stack.subgraph.wanted, outs, strict=True):
        frame.reduce(value)
        layout = _shards(frame, var.aval.shape, dim)
        value.rows, value.leaf = frozenset(), stack.subgraph.name
        found[var] = _at(var, layout, frame.at(value, layout))
    return found
