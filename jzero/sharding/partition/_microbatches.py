# SPDX-License-Identifier: Apache-2.0
"""Loops over microbatches: the time axis becomes loops.

The partitioner writes one device's program of one microbatch, with collectives over the time axis. Equations
that differ between microbatches run in a loop over them, up to these collectives::

    y = psum(f(x), 'microbatch')          ->    for x in microbatches: y += f(x)
    y = all_gather(f(x), 'microbatch')    ->    y = [f(x) for x in microbatches]

Readers of such a result run behind the loop: once, or in another loop if they differ between microbatches,
too. A loop or branch of the step with such collectives inside is opened: it runs once, around loops of its
own over the microbatches, and values that differ between microbatches are stacked in its operands, carries
and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jzero.ir import _rules
from jzero.ir._effects import without_calls
from jzero.ir._errors import cannot_in_time
from jzero.ir._loops import MICROBATCHES, CarryPort, ConstPort, Scan, SlicePort, StackPort, any_scan
from jzero.ir._regions import Region, ValueIn, variables
from jzero.ir._sent import cast, fenced
from jzero.ir._writer import JaxprWriter
from jzero.sharding.partition._loops_in_time import (
    REDUCES,
    LoopInTime,
    differing,
    is_over,
    is_stacked,
    loops_in_time,
)
from jzero.sharding.partition._partition import DeviceProgram, moves_of
from jzero.sharding.partition._saved import saved_value
from jzero.sharding.partition._time_axis import TimeAxis, without_time
from jzero.sharding.partition._writer import DeviceMove
from jzero.sharding.passes._waits import is_gather
from jzero.tracing import _jaxpr, _keys, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class MicrobatchLoops(NamedTuple):
    time: TimeAxis
    # Floats are accumulated in it; None is the wider of float32 and their own.
    dtype: DTypeLike | None
    gather_once: bool  # one gather of the state serves all microbatches
    devices: int


def in_loops(program: DeviceProgram, accumulation: MicrobatchLoops) -> DeviceProgram:
    """The program of one device for all its microbatches, from that for one."""
    axis, num, jaxpr = accumulation.time.name, accumulation.time.num, program.jaxpr
    rows = {}
    for var, layout in zip(jaxpr.invars, program.ins, strict=True):
        if (place := layout.place(axis)) is not None:
            assert layout.local_outer(*place) == 1, "a device's rows are not in order of time"
            shape = [*var.aval.shape]
            shape[place[0]] *= num
            rows[var] = _jaxpr.var_like(var.aval, shape), place[0]
    region, by_result = Region(jaxpr, [*program.consts]), dict(program.by_result)
    facts = differing(region, rows, axis)
    # A program without equations writes none.
    source: Any = _jaxpr.with_scope(jaxpr.eqns[0], MICROBATCHES) if jaxpr.eqns else None
    writer = _LoopsWriter(region, facts, accumulation, by_result, source)
    writer.rows |= rows
    writer.run()
    invars = [rows[var][0] if var in rows else var for var in jaxpr.invars]
    written = writer.closed(invars, [*map(writer.outer.read, jaxpr.outvars)])
    return dataclasses.replace(
        program,
        jaxpr=written,
        ins=tuple(without_time(layout, axis) for layout in program.ins),
        outs=tuple(without_time(layout, axis) for layout in program.outs),
        moves=moves_of(written, by_result),
        by_result=by_result,
        loops=dataclasses.replace(writer.plan.said, at_once=tuple(writer.at_once)),
    )


class _LoopsWriter:
    """Writes the loops of a program, and of programs inside it."""

    def __init__(
        self, region: Region, facts: Mapping[ValueIn, bool], accumulation: MicrobatchLoops,
        by_result: dict[Var, DeviceMove], source: Eqn,
    ):  # fmt: skip
        self.region, self.jaxpr, self.facts = region, region.jaxpr, facts
        self.accumulation, self.by_result = accumulation, by_result
        self.axis, self.num = accumulation.time.name, accumulation.time.num
        own = [var for (where, var), fact in facts.items() if fact and where is region]
        self.differs = set(variables(own))
        self.plan = loops_in_time(
            region, self.differs, self.axis, self.num, accumulation.devices,
            accumulation.gather_once,
        )  # fmt: skip
        self.at_once = [*self.plan.said.at_once]  # computed from all microbatches at once
        self.outer = JaxprWriter(source)
        # Arguments with the rows of all microbatches, and along which dim.
        self.rows: dict[Var, tuple[Var, int]] = {}
        # `[microbatches, ...]` of values that are returned or passed for each microbatch.
        self.stacks: dict[Var, Var] = {}

    def closed(self, invars: Sequence[Var], outs: Sequence[Atom]) -> Jaxpr:
        live = _rewrite.without_unread(self.outer.eqns, outs, lambda _: True)
        found: Any = _jaxpr.replaced(self.jaxpr, invars=[*invars], outvars=[*outs], eqns=live)
        return _jaxpr.replaced(found, debug_info=found.debug_info.with_unknown_names())

    def run(self) -> None:
        for loop, once in zip([*self.plan.loops, None], self.plan.once, strict=True):
            for eqn in (self.jaxpr.eqns[i] for i in once):
                if not is_stacked(eqn, self.axis):
                    self.outer.keep([eqn])
                elif is_gather(eqn):
                    self._gather(eqn)
                else:  # A loop or branch, which is opened.
                    opened = {"scan": self._scan, "while": self._while, "cond": self._cond}
                    opened[eqn.primitive.name](eqn)
            if loop is not None:
                self._write(loop)

    def _write(self, loop: LoopInTime) -> None:
        saved = [var for var in self.plan.saved if var not in self.stacks]
        body = _Microbatch(self, loop, [*saved, *loop.stacks])
        carries = [self._sum(eqn, body) for eqn in loop.sums]
        carries += [self._last(var, body) for var in loop.lasts]
        made = dict.fromkeys([*loop.stacks, *(var for var in saved if var in body.made)])
        ys = [StackPort(body.read(var), self._new_stack(var)) for var in made]
        acts = any(map(_jaxpr.has_side_effects, body.writer.eqns))
        if not carries and not ys and not acts:
            return
        numbers = self.outer.trace(_numbers, static=(self.num,))[0]
        xs = [SlicePort(numbers, body.number)]
        xs += [SlicePort(self.stacks[var], row) for var, row in body.rows.items()]
        template = any_scan(self.outer.source)
        scan = dataclasses.replace(
            Scan.of(template), eqns=tuple(body.writer.eqns), carries=tuple(carries), xs=tuple(xs),
            consts=tuple(ConstPort(*port) for port in body.consts.items()), ys=tuple(ys), length=self.num,
        )  # fmt: skip
        self.outer.eqns.append(scan.equation())
        for eqn, port in zip(loop.sums, carries, strict=False):
            (out,) = eqn.outvars
            if port.out is not out:
                (narrow,) = self.outer.trace(cast, port.out, static=(out.aval.dtype,))
                self.outer.names[out] = narrow

    def _sum(self, eqn: Eqn, body: _Microbatch) -> CarryPort:
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
        """A result that is equal in all microbatches: that of the last one."""
        before = _jaxpr.new_var(var)
        (init,) = self.outer.trace(_nothing, static=(var.aval.shape, var.aval.dtype))
        return CarryPort(init, before, body.read(var), var)

    # -- equations that need the values of all microbatches -------------------------------------------
    def _new_stack(self, var: Var) -> Var:
        self.stacks[var] = stack = _jaxpr.var_like(var.aval, (self.num, *var.aval.shape))
        return stack

    def stack(self, atom: Atom) -> Atom:
        if _jaxpr.is_literal(atom) or atom not in self.differs:
            return self.outer.trace(_repeated, self.outer.read(atom), static=(self.num,))[0]
        if atom not in self.stacks:
            whole, dim = self.rows[atom]
            (found,) = self.outer.trace(_apart, whole, static=(dim, self.num))
            self.stacks[atom] = _jaxpr.variable(found)
        return self.stacks[atom]

    def _gather(self, eqn: Eqn) -> None:
        """Concatenates the values of all microbatches along a dim."""
        (atom,), (out,), dim = eqn.invars, eqn.outvars, int(eqn.params["all_gather_dimension"])
        assert eqn.params["tiled"], "what the partitioner writes is tiled"
        whole = None if _jaxpr.is_literal(atom) else self.rows.get(atom)
        if whole is not None and whole[1] == dim:
            self.outer.names[out] = whole[0]
        else:
            stack = self.stack(atom)
            self.outer.names[out] = self.outer.trace(_in_order, stack, static=(dim,))[0]

    def _scan(self, eqn: Eqn) -> None:
        scan, (body,) = _jaxpr.scan_parts(eqn), self.region.inner(eqn)
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        ins, num = self._stacked(body, body.jaxpr.invars), scan.num_carry
        saved = self._stacked(body, body.jaxpr.outvars[num:])
        atoms = self._given(eqn.invars, ins)
        for k in range(last, len(atoms)):  # Iterations first.
            atoms[k] = self.outer.swapped(atoms[k]) if ins[k] else atoms[k]
        outs = [*ins[first:last], *saved]
        written = self._body(body, ins, outs)
        results = self._results(eqn.outvars, outs)
        swapped = {
            x: _jaxpr.var_like(x.aval, (scan.length, self.num, *x.aval.shape[2:]))
            for x, of_each in zip(results[num:], saved, strict=True)
            if of_each
        }
        # A stack of each iteration has the values of all microbatches.
        self.at_once += [saved_value(x, eqn) for x in swapped]
        made = [swapped.get(x, x) for x in results]
        self.outer.eqns.append(
            _jaxpr.scan_like(eqn, written, atoms, made, first, num, scan.length, scan.reverse)
        )
        for stack, x in swapped.items():
            self.outer.swapped(x, stack)

    def _while(self, eqn: Eqn) -> None:
        parts, (cond, body) = _jaxpr.while_parts(eqn), self.region.inner(eqn)
        first = parts.num_cond_consts
        if any(self._stacked(cond, cond.jaxpr.outvars)):
            raise cannot_in_time("each microbatch would stop by itself", eqn, self.region)
        tests = self._stacked(cond, cond.jaxpr.invars)
        ins = self._stacked(body, body.jaxpr.invars)
        carry = ins[parts.num_body_consts :]
        tests[first:] = carry
        new = [self._body(cond, tests, [False]), self._body(body, ins, carry)]
        names = "cond_jaxpr", "body_jaxpr"
        closed = {n: eqn.params[n].replace(jaxpr=x) for n, x in zip(names, new, strict=True)}
        atoms = self._given(eqn.invars, [*tests[:first], *ins])
        self.outer.clone(eqn, atoms, self._results(eqn.outvars, carry), params=eqn.params | closed)

    def _cond(self, eqn: Eqn) -> None:
        branches, (index, *operands) = self.region.inner(eqn), eqn.invars
        if any(self._stacked(self.region, [index])):
            raise cannot_in_time("each microbatch would take a branch by itself", eqn, self.region)
        ins = self._stacked(self.region, operands)
        outs = self._stacked(self.region, eqn.outvars)
        pairs = zip(eqn.params["branches"], branches, strict=True)
        new = tuple(x.replace(jaxpr=self._body(each, ins, outs)) for x, each in pairs)
        atoms = [self.outer.read(index), *self._given(operands, ins)]
        params = eqn.params | {"branches": new}
        self.outer.clone(eqn, atoms, self._results(eqn.outvars, outs), params=params)

    def _stacked(self, region: Region, atoms: Sequence[Atom]) -> list[bool]:
        """Which values are `[microbatches, ...]` in an opened equation."""
        own = (None if _jaxpr.is_literal(atom) else atom for atom in atoms)
        return [var is not None and self.facts.get((region, var), False) for var in own]

    def _given(self, atoms: Sequence[Atom], stacked: Sequence[bool]) -> list[Atom]:
        each = zip(atoms, stacked, strict=True)
        return [self.stack(atom) if of_each else self.outer.read(atom) for atom, of_each in each]

    def _results(self, outs: Sequence[Var], stacked: Sequence[bool]) -> list[Var]:
        each = zip(outs, stacked, strict=True)
        return [self._new_stack(var) if of_each else var for var, of_each in each]

    def _body(self, region: Region, ins: Sequence[bool], outs: Sequence[bool]) -> Jaxpr:
        assert not region.jaxpr.constvars, "constants of a body have no place"
        writer = _LoopsWriter(
            region, self.facts, self.accumulation, self.by_result, self.outer.source
        )
        invars = writer._results(region.jaxpr.invars, ins)
        writer.run()
        self.at_once += writer.at_once
        return writer.closed(invars, writer._given(region.jaxpr.outvars, outs))


class _Microbatch:
    """The equations of one microbatch in one loop."""

    def __init__(self, loops: _LoopsWriter, loop: LoopInTime, stacks: Sequence[Var]):
        self._loops = loops
        self.writer = JaxprWriter(loops.outer.source)
        self.number = _jaxpr.var_like(None, (), np.dtype(np.int32))
        self.consts: dict[Atom, Var] = {}  # values from outside, and their names inside
        # Slices of stacks that it reads, by the stacked variable.
        self.rows = {var: _jaxpr.new_var(var) for var in loop.reads}
        self.made = set[Var]()  # variables of the program that it computes
        self._names: dict[Var, Atom] = dict(self.rows)
        stacked = {*stacks}
        for index in loop.eqns:
            eqn = loops.jaxpr.eqns[index]
            self._run(without_calls(eqn) if index in loop.silent else eqn, stacked)

    def _run(self, eqn: Eqn, stacked: set[Var]) -> None:
        """One equation.

        A value of an earlier loop stays, although its equation is recomputed for other results. Values that
        later loops read are behind a barrier, so that readers here see the same bits.
        """
        self.made.update(eqn.outvars)
        if eqn.primitive.name == "axis_index" and is_over(eqn, self._loops.axis):
            self._names[eqn.outvars[0]] = self.number
            return
        outs = self.writer.clone(eqn, [*map(self.read, eqn.invars)])
        for old, new in zip(eqn.outvars, outs, strict=True):
            if (move := self._loops.by_result.get(old)) is not None:
                self._loops.by_result[new] = move
            if old not in self.rows:
                self._names[old] = self._held(new) if old in stacked else new

    def _held(self, x: Var) -> Atom:
        return self.writer.add(lax.optimization_barrier_p, [x], [_jaxpr.new_var(x)])[0]

    def read(self, atom: Atom) -> Atom:
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self._names:
            self._names[atom] = self._given(atom)
        return self._names[atom]

    def _given(self, var: Var) -> Atom:
        loops = self._loops
        if var in loops.rows:
            whole, dim = loops.rows[var]
            static = dim, loops.num
            return self.writer.trace(_rows_of, self._outside(whole), self.number, static=static)[0]
        if var in loops.stacks:
            self.rows[var] = row = _jaxpr.new_var(var)
            return row
        assert var not in loops.differs, (
            f"{var} differs between microbatches, and no loop returns it"
        )
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
        return _keys.wrapped_keys(dtype, jnp.zeros(words.shape, words.dtype))
    return jnp.zeros(shape, dtype)


def _rows_of(dim: int, num: int, x: jax.Array, number: jax.Array) -> jax.Array:
    """A microbatch's rows, as an element of `[num, rows]`.

    XLA would merge a slice of rows with the row that a step's scatter writes, and a row that the scatter
    should drop would be another microbatch's (`ir/_starts.py`).
    """
    shape = x.shape
    parts = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    own: jax.Array = lax.dynamic_index_in_dim(parts, number, dim, keepdims=False)
    return own


def _combined(op: str, total: jax.Array, x: jax.Array) -> jax.Array:
    combine = {"sum": lax.add, "max": lax.max, "min": lax.min}[op]
    return combine(total, x.astype(total.dtype))


def _in_order(dim: int, stack: jax.Array) -> jax.Array:
    num, *shape = stack.shape
    rows = jnp.moveaxis(stack, 0, dim)
    return fenced(rows.reshape(*shape[:dim], num * shape[dim], *shape[dim + 1 :]))


def _apart(dim: int, num: int, x: jax.Array) -> jax.Array:
    shape = x.shape
    parts = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    return fenced(jnp.moveaxis(parts, dim, 0))


def _repeated(num: int, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (num, *x.shape))
