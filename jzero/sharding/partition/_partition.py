# SPDX-License-Identifier: Apache-2.0
"""Partitions a step: the jaxpr of the whole batch becomes one device's, with explicit collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.ir._layout import Layout, Prices
from jzero.ir._regions import Region, trip_count
from jzero.sharding.analysis._residuals import Residual
from jzero.sharding.partition._frame import DeviceFrame, Partitioning, WrittenStep
from jzero.sharding.partition._hints import hints_of
from jzero.sharding.partition._matrix_buckets import NOT_DISTRIBUTED, DistributedUpdates
from jzero.sharding.partition._run import run
from jzero.sharding.partition._saved import Loops
from jzero.sharding.partition._time_axis import TimeAxis
from jzero.sharding.partition._values import DeviceValue, Hint
from jzero.sharding.partition._writer import DeviceMove
from jzero.sharding.partition._written import joined_over_time
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Jaxpr, Var


@dataclasses.dataclass(frozen=True)
class DeviceInput:
    """A leaf of the state, or an argument, where the program begins."""

    layout: Layout  # on the devices, padding included
    rows: frozenset[str] = frozenset()  # axes over which it is batch-sharded; none for state
    # Every device is passed padded dims gathered, so that none of them moves.
    padded_dims_gathered: bool = False
    name: str = ""  # of a leaf

    @property
    def given(self) -> Layout:
        """The layout in which the program is passed it."""
        if not self.padded_dims_gathered:
            return self.layout  # A parameter may have padding that only its moments need.
        padded = (dim for dim in self.layout.dims if dim.pad is not None)
        return self.layout.without([cut.axis for dim in padded for cut in dim.cuts])


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    jaxpr: Jaxpr  # with explicit collectives
    consts: list[Any]  # the values of the jaxpr's `constvars`
    ins: tuple[Layout, ...]  # layouts of the arguments
    outs: tuple[Layout, ...]  # layouts of the results
    # Every conversion that communicates, in order; of a result, `operation` is `OUTPUT` and `line` its
    # number.
    moves: tuple[DeviceMove, ...]
    by_result: Mapping[Var, DeviceMove]  # the same, by what the collective makes
    loops: Loops | None = None  # those over microbatches that are inside no other loop
    residuals: tuple[Residual, ...] = ()  # offloaded for the backward pass; of one microbatch


def partition(
    jaxpr: Jaxpr, consts: Sequence[Any], mesh: Mapping[str, int], ins: Sequence[DeviceInput],
    outs: Sequence[Layout | None], reduced: Sequence[Hint | None] = (), once: bool = True,
    prices: Prices = (), time: TimeAxis | None = None, distributed: DistributedUpdates = NOT_DISTRIBUTED,
    automatic: frozenset[str] | None = None, keeps_padding: bool = False,
    written: WrittenStep | None = None, unmasked: Collection[int] = (),
) -> DeviceProgram:  # fmt: skip
    """One device's program of a step; one microbatch's, if an axis of the mesh is time.

    ins: a layout for each argument; outs: for each result, None where the partitioner chooses.
    reduced: for the first results, how the gradients that they are made of are reduced, and for which leaf.
    once: gradients that a loop of the step accumulates are reduced behind the loop, not in each iteration.
    time: the innermost axis of the mesh, if it is that of microbatches and of no devices.
    automatic: names of the inputs that XLA shards over Auto axes; None without Auto axes.
    keeps_padding: the partitioner may choose layouts of results that no JAX array has.
    written: facts about a step with collectives of its own, whose shapes are one device's.
    unmasked: results, by index, whose padding may be anything; in others it is zero.

    Raises:
      CannotPartitionError: it has no exact program for it.
    """
    region = Region(jaxpr, [*consts]) if written is None else written.frame
    stored = [None if each.rows else each.layout for each in ins]
    hints = hints_of(region, stored, outs, reduced, distributed.hints(mesh))
    shared = Partitioning(
        mesh, hints, [each.name for each in ins], once, prices, any(each.rows for each in ins), time,
        automatic, distributed, written,
    )  # fmt: skip
    frame = DeviceFrame((jaxpr.eqns or _nothing().eqns)[0], shared, region)
    own = [
        _jaxpr.var_like(var.aval, each.given.local_shape)
        for var, each in zip(jaxpr.invars, ins, strict=True)
    ]
    values = [
        DeviceValue(var.aval, x.layout, {x.given: mine}, x.rows & x.layout.axes, origin=i)
        for i, (var, mine, x) in enumerate(zip(jaxpr.invars, own, ins, strict=True))
    ]
    results = run(frame, region, values)
    frame.source = jaxpr.eqns[-1] if jaxpr.eqns else frame.source
    frame.reason = frame.leaf = ""  # those of the last equation
    results = [_of_all_microbatches(frame, v, out) for v, out in zip(results, outs, strict=True)]
    layouts = [
        _returned(frame, v, out, keeps_padding) for v, out in zip(results, outs, strict=True)
    ]
    given, atoms = frozenset(own), list[Atom]()
    for j, (value, layout) in enumerate(zip(results, layouts, strict=True)):
        frame.returns = j
        x = frame.at(value, layout)
        # A literal has no padding, and that of an argument is zero already.
        if not (j in unmasked or _jaxpr.is_literal(x) or x in given):
            for d in range(len(layout.dims)):
                x = frame.masked(x, layout, d, "sum")
        atoms.append(x)
    made = frame.function(_nothing(), own, atoms)
    moves = moves_of(made, frame.moves)
    ins_ = tuple(each.given for each in ins)
    return DeviceProgram(made, frame.consts, ins_, tuple(layouts), moves, frame.moves)


def _of_all_microbatches(
    frame: DeviceFrame, value: DeviceValue, wanted: Layout | None
) -> DeviceValue:
    """The result, concatenated over microbatches if `wanted` is larger."""
    if wanted is None or not value.own & frame.over_time:
        return value
    pairs = zip(value.aval.shape, wanted.shape, strict=True)
    dim = next((d for d, (local, full) in enumerate(pairs) if local != full), None)
    return value if dim is None else joined_over_time(frame, value, dim)


def _returned(
    frame: DeviceFrame, value: DeviceValue, wanted: Layout | None, keeps_padding: bool
) -> Layout:
    """`wanted`, or else replicated unless the value is batch-sharded."""
    if wanted is not None:
        return wanted
    frame.reduce(value)
    layout, replicated = value.layout, frame.replicated(value.aval.shape)
    if not value.rows:
        return replicated
    if value.rows & frame.over_time:  # Microbatches are concatenated in the order of the batch.
        return _contiguous(frame, value)
    # JAX has no arrays with unequal shards, nor with cuts in blocks.
    is_padded = any(dim.pad is not None for dim in layout.dims)
    if layout.spec() is not None and (keeps_padding or not is_padded):
        return layout
    contiguous = _contiguous(frame, value)
    prices = [frame.price_from(value, layout, x) for x in (contiguous, replicated)]
    return contiguous if prices[0] < prices[1] else replicated


def _contiguous(frame: DeviceFrame, value: DeviceValue) -> Layout:
    """Batch-sharded in even contiguous shards, as far as the devices divide the dims."""
    found = frame.replicated(value.aval.shape)
    axes = [axis for axis in frame.mesh if axis in value.rows - frame.over_time]
    for d, dim in enumerate(value.layout.dims):
        own = [axis for axis in axes if any(cut.axis == axis for cut in dim.cuts)]
        if own and dim.true % value.layout.num(own) == 0:
            found = found.shard(d, own)
    return found


def moves_of(
    jaxpr: Jaxpr, by_result: Mapping[Var, DeviceMove], times: int = 1
) -> tuple[DeviceMove, ...]:
    """The moves of a program in order; those in a loop count for all its iterations."""
    found = list[DeviceMove]()
    for eqn in jaxpr.eqns:
        if eqn.outvars and (move := by_result.get(eqn.outvars[0])) is not None:
            found.append(move._replace(nbytes=move.nbytes * times, times=times))
        for inner in _jaxpr.inner_jaxprs(eqn):
            num = times * (trip_count(eqn) or 1)
            found += moves_of(_jaxpr.open_jaxpr(inner)[0], by_result, num)
    return tuple(found)


def _nothing() -> Jaxpr:
    """A program of one equation, whose line stands for those of a step without equations."""
    traced = _jaxpr.trace_here(lambda x: -x, jax.ShapeDtypeStruct((), jnp.int32))
    return _jaxpr.open_jaxpr(traced.jaxpr)[0]
