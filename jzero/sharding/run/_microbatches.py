# SPDX-License-Identifier: Apache-2.0
"""Runs a step in microbatches: the phases of its cut, each with one loop that sums up reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jzero.ir._loops import MICROBATCHES
from jzero.sharding.analysis._frames import Frame, split
from jzero.sharding.analysis._kinds import COLLECTED
from jzero.sharding.cut._phases import Phase
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._interpret import Env, Interpreter
from jzero.sharding.run._values import (
    Arrays,
    FullValue,
    Settled,
    ShardValue,
    Unreduced,
    Value,
    in_order_made,
    waits,
)
from jzero.tracing import _jaxpr
from jzero.tracing._types import Aval


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How a step works through its microbatches.

    Attributes:
      num: how many microbatches each device works through.
      dims: of arguments that hold the batch, the dim along which it is cut.
      once: sum gradients up on each device and reduce them after the loop; else reduce each.
      dtype: in which floating gradients are summed up; None for the wider of float32 and their own.
      gather_once: gather what the microbatches need whole before their loop, not for each.
    """

    num: int
    dims: Mapping[_jaxpr.Var, int]
    once: bool
    dtype: DTypeLike | None
    gather_once: bool


def run_phases(
    interp: Interpreter, frame: Frame, env: Env, phases: Sequence[Phase], accumulation: Accumulation
) -> None:
    """Runs the frame's equations, like `Interpreter.run_equations`.

    Outputs that differ between microbatches are in `env.stacks`.
    """
    num = accumulation.num
    env.stacks |= {
        var: _in_microbatches(env.values[var], dim, num) for var, dim in accumulation.dims.items()
    }
    for phase in phases:
        for index in phase.before:
            if frame.jaxpr.eqns[index].primitive.name in COLLECTED:
                _collect(interp, frame, env, index, num)
            else:
                interp.run_equations(frame, [index], env)
        if phase.loop:
            _loop(interp, frame, env, phase, accumulation)


def _collect(interp: Interpreter, frame: Frame, env: Env, index: int, num: int) -> None:
    """Runs a gather, or takes a maximum, of what all microbatches of all devices have."""
    eqn = frame.jaxpr.eqns[index]
    with _jaxpr.source_of(eqn):
        for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
            x, name = of_all(interp, frame, env, atom, num), eqn.primitive.name
            if name in ("pmax", "pmin"):
                x = x.max(axis=0) if name == "pmax" else x.min(axis=0)
                x = interp.devices.all_reduce(x, interp.devices.axes, name[1:])
            else:
                x = _gathered(x, interp.devices, eqn)
            env.values[out] = FullValue(x)


def of_all(interp: Interpreter, frame: Frame, env: Env, atom: _jaxpr.Atom, num: int) -> jax.Array:
    """What all microbatches have of a value, [microbatches, ...]: after their loops."""
    if not _jaxpr.is_literal(atom) and atom in env.stacks:
        return env.stacks[atom]
    same = interp.devices.full(interp.read(frame, env, atom))
    return jnp.broadcast_to(same, (num, *same.shape))


def _gathered(stack: jax.Array, devices: Devices, eqn: _jaxpr.Eqn) -> jax.Array:
    """A gather of all microbatches' parts, [microbatches, ...] on each device, in the order of the batch.

    Microbatches lie along the last axis (`_ordinary._axis_index`): those of a device are neighbours.
    """
    parts = lax.all_gather(stack, devices.axes)
    parts = parts.reshape(parts.shape[0] * stack.shape[0], *stack.shape[1:])
    dim = eqn.params["all_gather_dimension"]
    whole = jnp.moveaxis(parts, 0, dim)
    if eqn.params["tiled"]:
        whole = whole.reshape(eqn.outvars[0].aval.shape)
    # XLA:CPU would update a reshape in place while it still reads it (`_sent.fenced`).
    fenced: jax.Array = lax.optimization_barrier(whole)
    return fenced


@dataclasses.dataclass
class _Sum:
    """One running sum `[n, d]` of the loop.

    It is a shard `[n/k, d]` along `dim` if it is reduced for each microbatch (over the axes beside those of
    a shard, after the loop); else it is whole, and reduced after the loop unless the body had reduced it
    already (`scale` None).
    """

    var: _jaxpr.Var
    dim: int | None
    dtype: DTypeLike
    leaf: str
    scale: float | None = None
    wire: DTypeLike | None = None
    coded: bool = False

    def start(self, devices: Devices) -> jax.Array:
        """Zeros, `[n/k, d]` or `[n, d]`."""
        return jnp.zeros(devices.shard_shape(self.var.aval.shape, self.dim), self.dtype)

    def add(self, inner: Interpreter, total: jax.Array, value: Value) -> jax.Array:
        """`total` and the microbatch's `value`, both `[n/k, d]` or both `[n, d]`."""
        if self.dim is not None:
            value = inner.devices.scatter(value)
        if waits(value) and value.scattered == (self.dim is not None):
            self.scale, self.wire, self.coded = value.scale, value.x.dtype, value.coded
            x = value.x
        elif self.dim is None and inner.hold:
            self.scale, self.wire = 1.0, self.var.aval.dtype
            x = inner.as_contribution(value, 1.0)
        else:
            x = inner.devices.as_dim(value, self.dim)
        return total + x.astype(total.dtype)

    def finish(self, devices: Devices, total: jax.Array) -> Value:
        """The sum over the microbatches, which may wait for that over the devices."""
        dtype, shape = self.var.aval.dtype, self.var.aval.shape
        if self.scale is None:
            return devices.value(total.astype(dtype), self.dim, shape, self.leaf)
        value = Unreduced(total.astype(self.wire), self.scale, dtype, self.leaf, coded=self.coded)
        if self.dim is None:
            return value
        return dataclasses.replace(value, dim=self.dim, size=shape[self.dim], scattered=True)


def _loop(
    interp: Interpreter, frame: Frame, env: Env, phase: Phase, accumulation: Accumulation
) -> None:
    """Runs a phase's loop, and adds what it hands out to `env`."""
    hold = accumulation.once or interp.devices.num == 1

    def make_sum(var: _jaxpr.Var, dim: int | None) -> _Sum:
        dtype = _sum_dtype(var.aval, accumulation.dtype)
        return _Sum(var, dim, dtype, interp.links.leaf_of(frame, var))

    sums = [make_sum(var, None if hold else interp.dim_of(frame, var)) for var in phase.sums]
    last_dims = [interp.dim_of(frame, var) for var in phase.lasts]
    captured = _captured(interp, frame, env, phase, accumulation.gather_once)

    def body(carry: Arrays, own: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
        index, kept = own
        inner = dataclasses.replace(
            interp.inside(), microbatch=index, hold=hold, in_parts=interp.in_parts
        )
        values = _detached(captured)
        for var, dim in accumulation.dims.items():
            values[var] = FullValue(_slice(env.values[var], dim, index, accumulation.num))
        given: dict[_jaxpr.Var, Value] = {
            var: FullValue(x) for var, x in zip(phase.kept, kept, strict=True)
        }
        local = Env(values | given)
        _run_turn(inner, frame, local, phase)
        terms = [local.values[s.var] for s in sums]
        totals = carry[: len(terms)]
        inner.devices.queue.expect(terms)
        for i in in_order_made(terms):
            totals[i] = sums[i].add(inner, totals[i], terms[i])
        lasts = [
            inner.devices.as_dim(local.values[var], dim)
            for var, dim in zip(phase.lasts, last_dims, strict=True)
        ]
        return [*totals, *lasts], [inner.devices.full(local.values[v]) for v in phase.stacks]

    starts = [s.start(interp.devices) for s in sums]
    starts += [
        jnp.zeros(interp.devices.shard_shape(var.aval.shape, dim), var.aval.dtype)
        for var, dim in zip(phase.lasts, last_dims, strict=True)
    ]
    with jax.named_scope(MICROBATCHES):
        own = (jnp.arange(accumulation.num), [env.stacks[var] for var in phase.kept])
        carry, stacks = lax.scan(body, starts, own)
    totals, lasts = split(carry, len(sums))
    finished = [s.finish(interp.devices, x) for s, x in zip(sums, totals, strict=True)]
    interp.bind(frame, env, [s.var for s in sums], finished)
    for var, dim, x in zip(phase.lasts, last_dims, lasts, strict=True):
        env.values[var] = interp.devices.value(x, dim, var.aval.shape)
    env.stacks |= zip(phase.stacks, stacks, strict=True)


def _run_turn(inner: Interpreter, frame: Frame, local: Env, phase: Phase) -> None:
    """One microbatch's iteration of the loop.

    What is there at its start stays, though its maker may run again for others of its results: what was kept,
    and sums of all microbatches, of which this one has a term (test_loops.py::test_a_sum_stays_whole).
    """
    given = dict(local.values)
    for index in phase.loop:
        inner.silent = index in phase.again
        inner.run_equations(frame, [index], local)
        for var in frame.jaxpr.eqns[index].outvars:
            if var in given:
                local.values[var] = given[var]
            elif var in phase.stacks:
                # All that read it here see the bits that later loops will read.
                x = inner.devices.full(local.values[var])
                local.values[var] = FullValue(lax.optimization_barrier(x))


def _captured(
    interp: Interpreter, frame: Frame, env: Env, phase: Phase, gather: bool
) -> dict[_jaxpr.Var, Settled]:
    """What the loop reads from before it; reductions among it run now, not once a microbatch."""
    captured: dict[_jaxpr.Var, Settled] = {}
    loop = frozenset(phase.loop)
    for atom in [atom for index in phase.loop for atom in frame.jaxpr.eqns[index].invars]:
        if _jaxpr.is_literal(atom) or atom in captured or atom not in env.values:
            continue
        value = interp.devices.settle(env.values[atom])
        if gather and isinstance(value, ShardValue) and atom in frame.needs_full:
            value = interp.gathered(frame, atom, value, loop)
        captured[atom] = value
    return captured


def _detached(values: Mapping[_jaxpr.Var, Settled]) -> dict[_jaxpr.Var, Value]:
    """Copies that remember no gathers: those of the loop's body must not outlive its trace."""
    copies: dict[int, ShardValue] = {}

    def copy(value: ShardValue) -> ShardValue:
        if id(value) not in copies:
            origin = value.view_of
            if origin is not None and isinstance(origin[0], ShardValue):
                origin = copy(origin[0]), origin[1]
            new = dataclasses.replace(value, view_of=origin, gathered={}, views={})
            copies[id(value)] = new
        return copies[id(value)]

    return {
        var: copy(value) if isinstance(value, ShardValue) else value
        for var, value in values.items()
    }


def _in_microbatches(value: Value, dim: int, num: int) -> jax.Array:
    """All microbatches of an argument, [num, ...]."""
    assert isinstance(value, FullValue)
    shape = value.x.shape
    return jnp.moveaxis(value.x.reshape(*shape[:dim], num, -1, *shape[dim + 1 :]), dim, 0)


def _slice(value: Value, dim: int, index: jax.Array, num: int) -> jax.Array:
    assert isinstance(value, FullValue)
    # An element of [num, ...], and not a slice of rows: XLA merges such a slice with the row that a step's
    # scatter writes, and a row that the scatter should drop would be another microbatch's
    # (`ir/_starts.py`).
    shape = value.x.shape
    parts = value.x.reshape(*shape[:dim], num, -1, *shape[dim + 1 :])
    own: jax.Array = lax.dynamic_index_in_dim(parts, index, dim, keepdims=False)
    return own


def _sum_dtype(aval: Aval, dtype: DTypeLike | None) -> DTypeLike:
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return aval.dtype
    return jnp.promote_types(aval.dtype, jnp.float32) if dtype is None else dtype
