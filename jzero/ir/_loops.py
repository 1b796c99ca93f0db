# SPDX-License-Identifier: Apache-2.0
"""`Scan`, a `lax.scan` taken apart; `ScanBuilder`, which changes it; and two transformations.

`opened` replaces stacks by whole arrays, in which an iteration reads and writes its row. `pipelined` has each
iteration compute ahead what the next one needs. Both keep the order of side effects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jzero.ir import _memory_spaces
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

MICROBATCHES = "jzero.microbatches"  # The name scope of loops over microbatches.


class ConstPort(NamedTuple):
    outer: Atom
    inner: Var


class CarryPort(NamedTuple):
    """A carry: its initial value, its name in the body, the body's result for it, and its final value."""

    init: Atom
    before: Var
    after: Atom
    out: Var


class SlicePort(NamedTuple):
    stack: Atom
    row: Var


class StackPort(NamedTuple):
    row: Atom
    stack: Var


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    eqn: Eqn  # The original loop: its line, its effects, and the constants of its body.
    eqns: tuple[Eqn, ...]  # The body's.
    consts: tuple[ConstPort, ...]
    carries: tuple[CarryPort, ...]
    xs: tuple[SlicePort, ...]
    ys: tuple[StackPort, ...]
    length: int
    reverse: bool
    before: tuple[Eqn, ...] = ()
    after: tuple[Eqn, ...] = ()

    @classmethod
    def of(cls, eqn: Eqn) -> Scan:
        parts = _jaxpr.scan_parts(eqn)
        first, last, num = parts.num_consts, parts.num_consts + parts.num_carry, parts.num_carry
        ins, outs = parts.body.invars, parts.body.outvars
        carries = zip(
            eqn.invars[first:last], ins[first:last], outs[:num], eqn.outvars[:num], strict=True
        )
        return cls(
            eqn, tuple(parts.body.eqns),
            tuple(map(ConstPort, eqn.invars[:first], ins[:first])),
            tuple(CarryPort(*each) for each in carries),
            tuple(map(SlicePort, eqn.invars[last:], ins[last:])),
            tuple(map(StackPort, outs[num:], eqn.outvars[num:])),
            parts.length, parts.reverse,
        )  # fmt: skip

    @property
    def body(self) -> Jaxpr:
        ins = [port.inner for port in self.consts]
        ins += [*(port.before for port in self.carries), *(port.row for port in self.xs)]
        outs = [*(port.after for port in self.carries), *(port.row for port in self.ys)]
        old = _jaxpr.scan_parts(self.eqn).body
        return _jaxpr.replaced(old, invars=ins, outvars=outs, eqns=[*self.eqns])

    def equation(self) -> Eqn:
        ins = [port.outer for port in self.consts]
        ins += [*(port.init for port in self.carries), *(port.stack for port in self.xs)]
        outs = [*(port.out for port in self.carries), *(port.stack for port in self.ys)]
        nums = len(self.consts), len(self.carries)
        return _jaxpr.scan_like(self.eqn, self.body, ins, outs, *nums, self.length, self.reverse)

    def equations(self) -> list[Eqn]:
        return [*self.before, self.equation(), *self.after]


class ScanBuilder:
    """Adds ports and equations to a loop.

    `first` and `last` write equations at both ends of the body, `before` and `after` those around the loop.
    `inner` maps loop constants to their names in the body.
    """

    def __init__(self, scan: Scan):
        self.scan, self.eqns = scan, scan.eqns
        self.first, self.last, self.before, self.after = (JaxprWriter(scan.eqn) for _ in range(4))
        self.consts, self.carries = [*scan.consts], [*scan.carries]
        literal = _jaxpr.is_literal
        self.inner = {p.outer: p.inner for p in reversed(scan.consts) if not literal(p.outer)}
        self.xs, self.ys = [*scan.xs], [*scan.ys]

    def whole(self, atom: Atom) -> Atom:
        """The name in the body of an atom, which becomes a loop constant."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self.inner:
            self.inner[atom] = _jaxpr.new_var(atom)
            self.consts.append(ConstPort(atom, self.inner[atom]))
        return self.inner[atom]

    def slice(self, stack: Var) -> Var:
        """The name in the body of an iteration's slice of a stack."""
        known = [port.row for port in self.xs if port.stack is stack]
        if not known:
            known.append(_jaxpr.var_like(stack.aval, stack.aval.shape[1:]))
            self.xs.append(SlicePort(stack, known[0]))
        return known[0]

    def sink(self, stack: Var, row: Callable[[Var], object]) -> None:
        """Replaces the slices of a stack by an equation in the body, which `row` writes."""
        for port in self.xs:
            if port.stack is stack:
                row(port.row)
        self.xs = [port for port in self.xs if port.stack is not stack]

    def carry(self, init: Atom, after: Callable[[Var], Atom], out: Var | None = None) -> Var:
        """Adds a carry, whose next value `after` writes. Returns its last value."""
        before = _jaxpr.new_var(init)
        out = _jaxpr.new_var(init) if out is None else out
        self.carries.append(CarryPort(init, before, after(before), out))
        return out

    def stack(self, row: Atom, out: Var | None = None) -> Var:
        out = _jaxpr.var_like(row.aval, (self.scan.length, *row.aval.shape)) if out is None else out
        self.ys.append(StackPort(row, out))
        return out

    def build(self, **changes: Any) -> Scan:
        assert not [*self.first.consts, *self.last.consts], "constants of an iteration have no port"
        return dataclasses.replace(
            self.scan,
            eqns=(*self.first.eqns, *self.eqns, *self.last.eqns),
            consts=tuple(self.consts), carries=tuple(self.carries),
            xs=tuple(self.xs), ys=tuple(self.ys),
            before=(*self.scan.before, *self.before.eqns),
            after=(*self.after.eqns, *self.scan.after), **changes,
        )  # fmt: skip


def opened(scan: Scan) -> Scan:
    """A loop without stacks: an iteration slices whole arrays, and updates those that it carries.

    The carries are the row's index, then the loop's own, then the stacks of results.
    """
    builder = ScanBuilder(scan)
    builder.xs, builder.ys, builder.carries = [], [], []
    place = _jaxpr.var_like(_place(0).aval)
    for port in scan.xs:
        row = builder.first.row(builder.whole(port.stack), place)
        builder.first.names[port.row] = row
    iteration = JaxprWriter(scan.eqn, builder.first.names)
    iteration.keep(scan.eqns)
    builder.eqns = tuple(iteration.eqns)
    following = _jaxpr.new_var(place)
    start, step = (_place(scan.length - 1), -1) if scan.reverse else (_place(0), 1)
    builder.carries.append(CarryPort(start, place, following, _jaxpr.new_var(place)))
    builder.carries += [port._replace(after=iteration.read(port.after)) for port in scan.carries]
    for made in scan.ys:
        old = _jaxpr.new_var(made.stack)
        new = builder.last.with_row(old, iteration.read(made.row), place)
        builder.carries.append(CarryPort(empty(builder.before, made.stack), old, new, made.stack))
    builder.last.add(lax.add_p, [place, _place(step)], [following])
    return builder.build(reverse=False)


def empty(writer: JaxprWriter, stack: Var) -> Var:
    """The initial value of a stack that a loop writes, in the stack's memory kind."""
    if _jaxpr.is_on_host(stack.aval):
        static = stack.aval.shape[0], stack.aval.shape[1:], stack.aval.dtype
        (made,) = writer.trace(_memory_spaces.empty_on_host, static=static)
        return _jaxpr.variable(made)
    zero = _jaxpr.scalar(0, stack.aval.dtype)
    return writer.broadcast(zero, _jaxpr.new_var(stack), ())


def pipelined(scan: Scan, ahead: Sequence[Var]) -> Scan:
    """Each iteration computes the next one's values `ahead`, which depend on slices and constants only.

    ::

        made = make(xs[0])
        for i in range(length - 1):
            made, (carry, ys[i]) = make(xs[i + 1]), body(carry, xs[i], made)
        carry, ys[-1] = body(carry, xs[-1], made)
    """
    assert not _jaxpr.scan_parts(scan.eqn).body_consts, "they are not in scope outside the loop"
    making, rest = _making(scan, ahead)
    loop = opened(dataclasses.replace(scan, xs=(), ys=(), eqns=()))
    builder = ScanBuilder(dataclasses.replace(loop, eqns=(), carries=()))
    places, step = loop.carries[0], -1 if scan.reverse else 1
    stacks = [(empty(builder.before, port.stack), port) for port in scan.ys]

    def written(
        writer: JaxprWriter, whole: Callable[[Atom], Atom], at: Atom, eqns: Sequence[Eqn],
        outs: Sequence[Atom], known: Mapping[Var, Atom],
    ) -> list[Atom]:  # fmt: skip
        read = set(variables([*(a for e in eqns for a in e.invars), *outs]))
        names: dict[Var, Atom] = {port.inner: whole(port.outer) for port in scan.consts}
        names |= {p.row: writer.row(whole(p.stack), at) for p in scan.xs if p.row in read}
        here = JaxprWriter(scan.eqn, {**names, **known})
        here.copy(eqns)
        writer.eqns += here.eqns
        return [*map(here.read, outs)]

    def made(writer: JaxprWriter, whole: Callable[[Atom], Atom], at: Atom) -> list[Atom]:
        return written(writer, whole, at, making, ahead, {})

    def iteration(
        writer: JaxprWriter, whole: Callable[[Atom], Atom], at: Atom, carry: Sequence[Atom],
        olds: Sequence[Atom], known: Sequence[Atom], results: Mapping[Var, Var],
    ) -> tuple[list[Atom], list[Atom]]:  # fmt: skip
        names = dict(zip(ahead, known, strict=True))
        names |= {p.before: atom for p, atom in zip(scan.carries, carry, strict=True)}
        outs = [*(p.after for p in scan.carries), *(p.row for p in scan.ys)]
        found = written(writer, whole, at, rest, outs, names)
        new, rows = found[: len(scan.carries)], found[len(scan.carries) :]
        ends = [results.get(p.stack) for p in scan.ys]
        made = zip(olds, rows, ends, strict=True)
        return new, [writer.with_row(old, row, at, out) for old, row, out in made]

    begun = made(builder.before, lambda atom: atom, places.init)
    at, following = places.before, _jaxpr.new_var(places.before)
    first = [_jaxpr.new_var(p.before) for p in scan.carries]
    olds = [_jaxpr.new_var(stack) for stack, _ in stacks]
    known = [_jaxpr.new_var(var) for var in ahead]
    builder.first.add(lax.add_p, [at, _place(step)], [following])
    new, news = iteration(builder.first, builder.whole, at, first, olds, known, {})
    next_made = made(builder.last, builder.whole, following)
    inits = [places.init, *(p.init for p in scan.carries), *(x for x, _ in stacks), *begun]
    befores, afters = [at, *first, *olds, *known], [following, *new, *news, *next_made]
    outs = [_jaxpr.new_var(var) for var in befores]
    builder.carries = [*map(CarryPort, inits, befores, afters, outs)]
    num, end = len(first), 1 + len(first)
    # A constant index, so that the last iteration's gathers need not wait for the loop.
    last_at, lasts = _place(0 if scan.reverse else scan.length - 1), outs[1:]
    on_host = {p.stack: p.stack for p in scan.ys if _jaxpr.is_on_host(p.stack.aval)}
    carry, made_stacks = iteration(
        builder.after, lambda atom: atom, last_at, lasts[:num],
        outs[end : end + len(olds)], outs[end + len(olds) :], on_host,
    )  # fmt: skip
    results = [*(p.out for p in scan.carries), *(p.stack for p in scan.ys)]
    for atom, out in zip([*carry, *made_stacks], results, strict=True):
        if out not in on_host:  # The host's processors would copy a stack there.
            builder.after.add(lax.copy_p, [atom], [out])
    return builder.build(length=scan.length - 1, reverse=False)


def _making(scan: Scan, ahead: Sequence[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that compute `ahead`, and those that the rest of an iteration needs."""
    given = {port.inner for port in scan.consts} | {port.row for port in scan.xs}
    wanted, making = set(ahead), list[Eqn]()
    for eqn in reversed(scan.eqns):
        if wanted.intersection(eqn.outvars):
            assert not _jaxpr.has_side_effects(eqn), f"{eqn.primitive} does more than compute"
            making.append(eqn)
            wanted.update(variables(eqn.invars))
    making.reverse()
    made = {out for eqn in making for out in eqn.outvars}
    assert wanted <= made | given, "what is ahead depends on a carry"
    outs = [*(p.after for p in scan.carries), *(p.row for p in scan.ys)]
    known, rest = set(ahead), list[Eqn]()
    needed = set(variables(outs)) - known
    for eqn in reversed(scan.eqns):
        if _jaxpr.has_side_effects(eqn) or needed.intersection(eqn.outvars):
            rest.append(eqn)
            needed.update(v for v in variables(eqn.invars) if v not in known)
    return making, rest[::-1]


def makes_keys(scan: Scan) -> bool:
    """Whether it stacks PRNG keys, which cannot be written with dynamic_update_slice."""
    kinds = [port.stack.aval.dtype for port in scan.ys]
    return any(jax.dtypes.issubdtype(kind, jax.dtypes.extended) for kind in kinds)


def _place(i: int) -> Atom:
    return _jaxpr.scalar(i, np.int32)


def any_scan(source: Eqn) -> Eqn:
    """A `scan` at the line of `source`, as a template for `Scan.of`."""
    return _template().replace(source_info=source.source_info)


@functools.cache
def _template() -> Eqn:
    def loop(x: jax.Array) -> Any:
        return lax.scan(lambda x, _: (x, None), x, None, length=1)

    traced = _jaxpr.trace_here(loop, jax.ShapeDtypeStruct((), np.dtype(np.int32)))
    (eqn,) = traced.jaxpr.eqns
    return eqn
