# SPDX-License-Identifier: Apache-2.0
"""`Scan`, a loop taken apart, and `ScanBuilder`, which makes another of it; and what can be done to a loop.

Each operation takes a `Scan` and returns one that computes the same::

    sink         an iteration makes its slice of a stack, rather than taking it
    absorb       an iteration does what is done to the stacks that it makes
    opened       no stacks: an iteration reads and writes its place in whole ones
    pipelined    each iteration makes ahead what the next one needs, and the last iteration stands behind the
    loop sliced       some of its iterations

Of a loop whose iterations do more than compute, all keep the order of what they do.
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

# The name under which loops over microbatches are made.
MICROBATCHES = "jzero.microbatches"


class ConstPort(NamedTuple):
    """What each iteration reads whole, and its name in an iteration."""

    outer: Atom
    inner: Var


class CarryPort(NamedTuple):
    """A carry: its first value, its name in the body, what the body makes of it, and its last value."""

    init: Atom
    before: Var
    after: Atom
    out: Var


class SlicePort(NamedTuple):
    """A stack of which each iteration takes its slice."""

    stack: Atom
    row: Var


class StackPort(NamedTuple):
    """A stack that a loop makes of what each iteration has for it."""

    row: Atom
    stack: Var


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A `lax.scan` taken apart, and equations around it.

    Attributes:
      eqn: the loop as it was: its line, its effects, and the constants of its body.
      eqns: of an iteration.
      consts, carries, xs, ys: its ports.
      length: how many iterations.
      reverse: whether the last slice is the first iteration's.
      before, after: equations that stand around it.
    """

    eqn: Eqn
    eqns: tuple[Eqn, ...]
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
        """A `scan` equation taken apart."""
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
        """An iteration."""
        ins = [port.inner for port in self.consts]
        ins += [*(port.before for port in self.carries), *(port.row for port in self.xs)]
        outs = [*(port.after for port in self.carries), *(port.row for port in self.ys)]
        old = _jaxpr.scan_parts(self.eqn).body
        return _jaxpr.replaced(old, invars=ins, outvars=outs, eqns=[*self.eqns])

    def equation(self) -> Eqn:
        """The loop."""
        ins = [port.outer for port in self.consts]
        ins += [*(port.init for port in self.carries), *(port.stack for port in self.xs)]
        outs = [*(port.out for port in self.carries), *(port.stack for port in self.ys)]
        nums = len(self.consts), len(self.carries)
        return _jaxpr.scan_like(self.eqn, self.body, ins, outs, *nums, self.length, self.reverse)

    def equations(self) -> list[Eqn]:
        """The loop, and what stands around it."""
        return [*self.before, self.equation(), *self.after]


class ScanBuilder:
    """A loop while it changes: adds ports by name, and equations at both ends of the body and outside.

    Attributes:
      scan: the loop as it was.
      first, last: write equations of an iteration, before and behind those that it has.
      before, after: write equations around the loop.
      consts, carries, xs, ys: its ports.
      inner: of what each iteration reads whole, its name in an iteration.
    """

    def __init__(self, scan: Scan):
        self.scan, self.eqns = scan, scan.eqns
        self.first, self.last, self.before, self.after = (JaxprWriter(scan.eqn) for _ in range(4))
        self.consts, self.carries = [*scan.consts], [*scan.carries]
        literal = _jaxpr.is_literal
        self.inner = {p.outer: p.inner for p in reversed(scan.consts) if not literal(p.outer)}
        self.xs, self.ys = [*scan.xs], [*scan.ys]

    def whole(self, atom: Atom) -> Atom:
        """What each iteration reads whole."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self.inner:
            self.inner[atom] = _jaxpr.new_var(atom)
            self.consts.append(ConstPort(atom, self.inner[atom]))
        return self.inner[atom]

    def slice(self, stack: Var) -> Var:
        """An iteration's slice of a stack."""
        known = [port.row for port in self.xs if port.stack is stack]
        if not known:
            known.append(_jaxpr.var_like(stack.aval, stack.aval.shape[1:]))
            self.xs.append(SlicePort(stack, known[0]))
        return known[0]

    def sink(self, stack: Var, row: Callable[[Var], object]) -> None:
        """Takes no slices of a stack: `row` writes the equation that makes an iteration's."""
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
        """Makes a stack of what each iteration has."""
        out = _jaxpr.var_like(row.aval, (self.scan.length, *row.aval.shape)) if out is None else out
        self.ys.append(StackPort(row, out))
        return out

    def build(self, **changes: Any) -> Scan:
        """The loop; `changes` are those of other fields of it."""
        assert not [*self.first.consts, *self.last.consts], "constants of an iteration have no port"
        return dataclasses.replace(
            self.scan,
            eqns=(*self.first.eqns, *self.eqns, *self.last.eqns),
            consts=tuple(self.consts), carries=tuple(self.carries),
            xs=tuple(self.xs), ys=tuple(self.ys),
            before=(*self.scan.before, *self.before.eqns),
            after=(*self.after.eqns, *self.scan.after), **changes,
        )  # fmt: skip


def sink(scan: Scan, stack: Var, row: Callable[[ScanBuilder], Atom]) -> Scan:
    """An iteration makes its slice of a stack: `row` writes it, at the beginning of an iteration."""
    builder = ScanBuilder(scan)
    made = row(builder)
    builder.sink(stack, lambda out: builder.first.add(lax.copy_p, [made], [out]))
    return builder.build()


def absorb(scan: Scan, rows: Callable[[ScanBuilder], Mapping[Var, Atom]]) -> Scan:
    """An iteration does what is done to the stacks: `rows` writes it, by the stack that it is for."""
    builder = ScanBuilder(scan)
    for stack, row in rows(builder).items():
        builder.stack(row, stack)
    return builder.build()


def opened(scan: Scan) -> Scan:
    """A loop without stacks: an iteration slices whole arrays, and updates those that it carries.

    The first carry is an iteration's place; then come the loop's own, and then the stacks that it makes.
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
    """What a stack is before a loop has written it, in the memory where it lies."""
    if _jaxpr.is_on_host(stack.aval):
        static = stack.aval.shape[0], stack.aval.shape[1:], stack.aval.dtype
        (made,) = writer.trace(_memory_spaces.empty_on_host, static=static)
        return _jaxpr.variable(made)
    zero = _jaxpr.scalar(0, stack.aval.dtype)
    return writer.broadcast(zero, _jaxpr.new_var(stack), ())


def sliced(scan: Scan, start: int, stop: int) -> Scan:
    """The iterations with the slices from `start` to `stop`, as a loop with new results."""
    assert not [*scan.before, *scan.after], "some of its iterations, and not what stands around it"
    builder = ScanBuilder(scan)
    builder.xs = [
        SlicePort(_part(builder.before, port.stack, start, stop), port.row) for port in scan.xs
    ]
    builder.carries = [port._replace(out=_jaxpr.new_var(port.out)) for port in scan.carries]
    shapes = [(stop - start, *port.stack.aval.shape[1:]) for port in scan.ys]
    builder.ys = [
        port._replace(stack=_jaxpr.var_like(port.stack.aval, shape))
        for port, shape in zip(scan.ys, shapes, strict=True)
    ]
    return builder.build(length=stop - start)


def _part(writer: JaxprWriter, stack: Atom, start: int, stop: int) -> Var:
    shape = stack.aval.shape
    return writer.slice(stack, (start, *(0 for _ in shape[1:])), (stop, *shape[1:]))


def pipelined(scan: Scan, ahead: Sequence[Var]) -> Scan:
    """Each iteration makes for the next one what is `ahead`, which follows from its slices and consts alone.

    It runs like this, and nothing is made more often than it was::

        made = make(xs[0])
        for i in range(length - 1):
            made, (carry, ys[i]) = make(xs[i + 1]), body(carry, xs[i], made)
        carry, ys[-1] = body(carry, xs[-1], made)
    """
    _check_closed(scan)
    making, rest = _making(scan, ahead)
    loop = opened(dataclasses.replace(scan, xs=(), ys=(), eqns=()))
    builder = ScanBuilder(dataclasses.replace(loop, eqns=(), carries=()))
    places, step = loop.carries[0], -1 if scan.reverse else 1
    stacks = [(empty(builder.before, port.stack), port) for port in scan.ys]

    def written(
        writer: JaxprWriter, whole: Callable[[Atom], Atom], at: Atom, eqns: Sequence[Eqn],
        outs: Sequence[Atom], known: Mapping[Var, Atom],
    ) -> list[Atom]:  # fmt: skip
        """Writes equations of the iteration `at` a place, and returns what stands for `outs`."""
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
    # A place that is known, so that what the last iteration gathers need not wait for the loop.
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
    """The equations that make `ahead`, and those of the rest of an iteration."""
    given = {port.inner for port in scan.consts} | {port.row for port in scan.xs}
    wanted, making = set(ahead), list[Eqn]()
    for eqn in reversed(scan.eqns):
        if wanted.intersection(eqn.outvars):
            assert not _jaxpr.has_side_effects(eqn), f"{eqn.primitive} does more than compute"
            making.append(eqn)
            wanted.update(variables(eqn.invars))
    making.reverse()
    made = {out for eqn in making for out in eqn.outvars}
    assert wanted <= made | given, "what is ahead needs what iterations hand on"
    outs = [*(p.after for p in scan.carries), *(p.row for p in scan.ys)]
    known, rest = set(ahead), list[Eqn]()
    needed = set(variables(outs)) - known
    for eqn in reversed(scan.eqns):
        if _jaxpr.has_side_effects(eqn) or needed.intersection(eqn.outvars):
            rest.append(eqn)
            needed.update(v for v in variables(eqn.invars) if v not in known)
    return making, rest[::-1]


def _check_closed(scan: Scan) -> None:
    consts = _jaxpr.scan_parts(scan.eqn).body_consts
    assert not consts, "an iteration's equations are to stand where its constants are not"


def makes_keys(scan: Scan) -> bool:
    """Whether it makes stacks of keys, which nothing can be written into."""
    kinds = [port.stack.aval.dtype for port in scan.ys]
    return any(jax.dtypes.issubdtype(kind, jax.dtypes.extended) for kind in kinds)


def _place(i: int) -> Atom:
    return _jaxpr.scalar(i, np.int32)


def any_scan(source: Eqn) -> Eqn:
    """A loop at the line of `source`, in the place of whose parts others are to stand."""
    return _template().replace(source_info=source.source_info)


@functools.cache
def _template() -> Eqn:
    def loop(x: jax.Array) -> Any:
        return lax.scan(lambda x, _: (x, None), x, None, length=1)

    traced = _jaxpr.trace_here(loop, jax.ShapeDtypeStruct((), np.dtype(np.int32)))
    (eqn,) = traced.jaxpr.eqns
    return eqn
