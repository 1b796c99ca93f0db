# SPDX-License-Identifier: Apache-2.0
"""Loops over microbatches: an axis in time becomes time.

The partitioner wrote what one device computes of one microbatch, and collectives over an axis that no device
has. What differs between microbatches runs in a loop over them, up to these collectives::

    y = psum(f(x), 'microbatch')          ->    for x in microbatches: y += f(x)
    y = all_gather(f(x), 'microbatch')    ->    y = [f(x) for x in microbatches]

What needs such a result runs behind the loop: once, or, if it differs again, in another loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jzero.ir import _rules
from jzero.ir._loops import CarryPort, ConstPort, Scan, SlicePort, StackPort
from jzero.ir._regions import Region, variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.batch._writer import cast, fenced
from jzero.sharding.cut._phases import SCOPE
from jzero.sharding.partition._loops_in_time import (
    REDUCES,
    LoopInTime,
    is_gather,
    is_over,
    loops_in_time,
)
from jzero.sharding.partition._partition import DeviceProgram, moves_of
from jzero.sharding.partition._time import TimeAxis, without_time
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class Accumulation(NamedTuple):
    """How a device works through its microbatches.

    Attributes:
      time: their axis.
      dtype: in which floats are summed up over them; None for the wider of float32 and their own.
      gather_once: one gather of the state serves all microbatches.
      devices: how many there are.
    """

    time: TimeAxis
    dtype: DTypeLike | None
    gather_once: bool
    devices: int


def in_loops(program: DeviceProgram, accumulation: Accumulation) -> DeviceProgram:
    """The program of one device for all its microbatches, of that for one.

    Raises:
      CannotPartitionError: its loops would run the products of the step many times.
    """
    name, writer = accumulation.time.name, _LoopsWriter(program, accumulation)
    jaxpr = writer.run()
    return dataclasses.replace(
        program,
        jaxpr=jaxpr,
        ins=tuple(without_time(layout, name) for layout in program.ins),
        outs=tuple(without_time(layout, name) for layout in program.outs),
        moves=moves_of(jaxpr, writer.by_result),
        by_result=writer.by_result,
    )


class _LoopsWriter:
    """Writes the program, its loops included; `by_result` gets what each collective moves."""

    def __init__(self, program: DeviceProgram, accumulation: Accumulation):
        self.accumulation, self.jaxpr = accumulation, program.jaxpr
        self.axis, self.num = accumulation.time.name, accumulation.time.num
        self.by_result = dict(program.by_result)
        self.dims: dict[Var, int] = {}  # of arguments with rows, the dim that time cuts
        for var, layout in zip(self.jaxpr.invars, program.ins, strict=True):
            if (place := layout.place(self.axis)) is not None:
                assert layout.local_outer(*place) == 1, "a device's rows are not in order of time"
                self.dims[var] = place[0]
        region = Region(self.jaxpr, [*program.consts])
        self.plan = loops_in_time(
            region, self.dims, self.axis, self.num, accumulation.devices, accumulation.gather_once
        )
        self.outer = JaxprWriter(_jaxpr.with_scope(self.jaxpr.eqns[0], SCOPE))
        self.whole = {var: self._whole(var) for var in self.dims}
        self.stacks: dict[Var, Var] = {}  # `[microbatches, ...]` of what loops hand out

    def _whole(self, var: Var) -> Var:
        """An argument with the rows of all microbatches."""
        shape = [*var.aval.shape]
        shape[self.dims[var]] *= self.num
        return _jaxpr.var_like(var.aval, shape)

    def run(self) -> Jaxpr:
        eqns = self.jaxpr.eqns
        for loop, once in zip([*self.plan.loops, None], self.plan.once, strict=True):
            self.outer.keep(eqns[i] for i in once)
            if loop is not None and (loop.ends or loop.lasts):
                self._write(loop)
        outs = [*map(self.outer.read, self.jaxpr.outvars)]
        live = _rewrite.without_unread(self.outer.eqns, outs, lambda _: True)
        invars = [self.whole.get(var, var) for var in self.jaxpr.invars]
        found: Any = _jaxpr.replaced(self.jaxpr, invars=invars, outvars=outs, eqns=live)
        written = _jaxpr.replaced(found, debug_info=found.debug_info.with_unknown_names())
        return written

    def _write(self, loop: LoopInTime) -> None:
        """One loop, and behind it the results of what ends it."""
        kept = [var for var in self.plan.kept if var not in self.stacks]
        body = _Microbatch(self, loop, kept)
        carries = [self._sum(eqn, body) for eqn in loop.ends if not is_gather(eqn)]
        carries += [self._last(var, body) for var in loop.lasts]
        gathers = [eqn for eqn in loop.ends if is_gather(eqn) and not self._is_given(eqn)]
        rows = variables(atom for eqn in gathers for atom in eqn.invars)
        made = [var for var in (*rows, *kept) if var in body.made or var in self.dims]
        made = [var for var in made if var not in self.stacks]
        ys = [StackPort(body.read(var), self._stack(var)) for var in dict.fromkeys(made)]
        if carries or ys:
            self._write_loop(body, carries, ys)
        sums = [eqn for eqn in loop.ends if not is_gather(eqn)]
        for (out,), port in zip((eqn.outvars for eqn in sums), carries, strict=False):
            if port.out is not out:
                self.outer.names[out] = self.outer.trace(cast, port.out, static=(out.aval.dtype,))[
                    0
                ]
        for eqn in loop.ends:
            if is_gather(eqn):
                self._gather(eqn)

    def _write_loop(
        self, body: _Microbatch, carries: Sequence[CarryPort], ys: Sequence[StackPort]
    ) -> None:
        numbers = self.outer.trace(_numbers, static=(self.num,))[0]
        xs = [SlicePort(numbers, body.number)]
        xs += [SlicePort(self.stacks[var], row) for var, row in body.rows.items()]
        template = _template().replace(source_info=self.outer.source.source_info)
        scan = dataclasses.replace(
            Scan.of(template), eqns=tuple(body.writer.eqns), carries=tuple(carries), xs=tuple(xs),
            consts=tuple(ConstPort(*port) for port in body.consts.items()), ys=tuple(ys), length=self.num,
        )  # fmt: skip
        self.outer.eqns.append(scan.equation())

    def _sum(self, eqn: Eqn, body: _Microbatch) -> CarryPort:
        """A running sum (maximum, minimum)."""
        (out,), op = eqn.outvars, REDUCES[eqn.primitive.name]
        dtype = out.aval.dtype
        if op == "sum" and jnp.issubdtype(dtype, jnp.inexact):
            wide = self.accumulation.dtype
            dtype = jnp.promote_types(dtype, jnp.float32) if wide is None else jnp.dtype(wide)
        same = dtype == out.aval.dtype
        before = _jaxpr.new_var(out) if same else _jaxpr.var_like(out.aval, dtype=dtype)
        init = self.outer.full(_rules.neutral(op, dtype), before.aval)
        term = body.read(eqn.invars[0])
        (after,) = body.writer.trace(_combined, before, term, static=(op,))
        return CarryPort(init, before, after, out if same else _jaxpr.new_var(before))

    def _last(self, var: Var, body: _Microbatch) -> CarryPort:
        """What each microbatch computes alike: the last one's."""
        before = _jaxpr.new_var(var)
        (init,) = self.outer.trace(_nothing, static=(var.aval.shape, var.aval.dtype))
        return CarryPort(init, before, body.read(var), var)

    def _stack(self, var: Var) -> Var:
        self.stacks[var] = stack = _jaxpr.var_like(var.aval, (self.num, *var.aval.shape))
        return stack

    def _is_given(self, eqn: Eqn) -> bool:
        """Whether a gather is of an argument, of which the device has the rows of all microbatches."""
        (atom,) = eqn.invars
        dim = None if _jaxpr.is_literal(atom) else self.dims.get(atom)
        return dim is not None and dim == int(eqn.params["all_gather_dimension"])

    def _gather(self, eqn: Eqn) -> None:
        """What all microbatches have, in their order along a dim."""
        (atom,), (out,), dim = eqn.invars, eqn.outvars, eqn.params["all_gather_dimension"]
        assert eqn.params["tiled"], "what the partitioner writes is tiled"
        found: Atom
        if self._is_given(eqn):
            found = self.whole[_jaxpr.variable(atom)]
        elif _jaxpr.is_literal(atom) or atom not in self.stacks:
            found = self.outer.trace(_repeated, self.outer.read(atom), static=(dim, self.num))[0]
        else:
            found = self.outer.trace(_in_order, self.stacks[atom], static=(dim,))[0]
        self.outer.names[out] = found


class _Microbatch:
    """The equations of one microbatch in one loop.

    Attributes:
      writer: of its equations; their variables are its own.
      number: of the microbatch.
      consts: what it reads of outside, and as what.
      rows: what it reads of its own that earlier loops have made, and as what.
      made: what it makes.
    """

    def __init__(self, loops: _LoopsWriter, loop: LoopInTime, kept: Sequence[Var]):
        self._loops, self._loop = loops, loop
        self.writer = JaxprWriter(loops.outer.source)
        self.number = _jaxpr.var_like(None, (), np.dtype(np.int32))
        self.consts: dict[Atom, Var] = {}
        self.rows = {var: _jaxpr.new_var(var) for var in loop.reads}
        self.made = set[Var]()
        self._names: dict[Var, Atom] = dict(self.rows)
        stacked = {*kept, *(a for e in loop.ends if is_gather(e) for a in variables(e.invars))}
        for index in loop.eqns:
            self._run(loops.jaxpr.eqns[index], stacked)

    def _run(self, eqn: Eqn, stacked: set[Var]) -> None:
        """One equation.

        What an earlier loop has made stays, though its maker runs again for others of its results. What later
        loops read is a value of its own: all that read it here see the bits that these will read.
        """
        if eqn.primitive.name == "axis_index" and is_over(eqn, self._loops.axis):
            self._names[eqn.outvars[0]] = self.number
            return
        outs = self.writer.again(eqn, [*map(self.read, eqn.invars)])
        for old, new in zip(eqn.outvars, outs, strict=True):
            if (move := self._loops.by_result.get(old)) is not None:
                self._loops.by_result[new] = move
            if old not in self.rows:
                self._names[old] = self._held(new) if old in stacked else new
        self.made.update(eqn.outvars)

    def _held(self, x: Var) -> Atom:
        return self.writer.add(lax.optimization_barrier_p, [x], [_jaxpr.new_var(x)])[0]

    def read(self, atom: Atom) -> Atom:
        """What stands for a value of the program in the loop."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._names:
            self._names[atom] = self._given(atom)
        return self._names[atom]

    def _given(self, var: Var) -> Atom:
        loops = self._loops
        if var in loops.dims:
            whole = self._outside(loops.whole[var])
            static = loops.dims[var], loops.num
            return self.writer.trace(_rows_of, whole, self.number, static=static)[0]
        return self._outside(loops.outer.read(var))

    def _outside(self, atom: Atom) -> Atom:
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self.consts:
            self.consts[atom] = _jaxpr.new_var(atom)
        return self.consts[atom]


# -- traced ------------------------------------------------------------------------------------------------
def _numbers(num: int) -> jax.Array:
    return lax.iota(jnp.int32, num)


def _nothing(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return _jaxpr.wrapped_keys(dtype, jnp.zeros(words.shape, words.dtype))
    return jnp.zeros(shape, dtype)


def _rows_of(dim: int, num: int, x: jax.Array, number: jax.Array) -> jax.Array:
    """A microbatch's rows: an element of `[num, rows]`, and not a slice of rows.

    XLA merges such a slice with the row that a step's scatter writes, and a row that the scatter should drop
    would be another microbatch's (`ir/_starts.py`).
    """
    shape = x.shape
    parts = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    own: jax.Array = lax.dynamic_index_in_dim(parts, number, dim, keepdims=False)
    return own


def _combined(op: str, total: jax.Array, x: jax.Array) -> jax.Array:
    combine = {"sum": lax.add, "max": lax.max, "min": lax.min}[op]
    return combine(total, x.astype(total.dtype))


def _in_order(dim: int, stack: jax.Array) -> jax.Array:
    """`[microbatches, ...]` as one dim."""
    num, *shape = stack.shape
    rows = jnp.moveaxis(stack, 0, dim)
    return fenced(rows.reshape(*shape[:dim], num * shape[dim], *shape[dim + 1 :]))


def _repeated(dim: int, num: int, x: jax.Array) -> jax.Array:
    return lax.concatenate([x] * num, dim)


@functools.cache
def _template() -> Eqn:
    """Any loop, in the place of whose parts others stand."""

    def loop(x: jax.Array) -> Any:
        return lax.scan(lambda x, _: (x, None), x, None, length=1)

    traced = _jaxpr.trace_here(loop, jax.ShapeDtypeStruct((), np.dtype(np.int32)))
    (eqn,) = traced.jaxpr.eqns
    return eqn
