# SPDX-License-Identifier: Apache-2.0
"""Regions: the places where the programs of a step run, and which value is which across them.

A loop, a branch, a `jax.checkpoint`, a call, a custom derivative and an operation that JAX expands hold
programs of their own. `edges` says of each which of its values become which of theirs, so that what is
written on edges needs to know none of these operations.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias

from jax.typing import ArrayLike

from jzero.tracing import _jaxpr
from jzero.tracing._rewrite import Flat
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


@dataclasses.dataclass(eq=False)
class Region:
    """One place where a program runs: a function that is called twice is two regions.

    Attributes:
      jaxpr: the program.
      consts: values of its `constvars`.
      autodiff: the pass of `jax.grad` around it: 'forward' or 'backward'.
      around: the equation that holds it, and the region of that.
    """

    jaxpr: Jaxpr
    consts: list[ArrayLike]
    autodiff: str | None = None
    around: tuple[Region, Eqn] | None = None

    def inner(self, eqn: Eqn) -> Sequence[Self]:
        """Regions of the programs inside an equation; for a `while` the condition first, then the body."""
        if id(eqn) not in self._inner:
            around, autodiff = (self, eqn), self.pass_of(eqn)
            found = [type(self)(*program, autodiff, around) for program in _programs(eqn)]
            self._inner[id(eqn)] = found
        return self._inner[id(eqn)]

    @functools.cached_property
    def _inner(self) -> dict[int, Sequence[Self]]:
        return {}

    def with_inner(self, eqn: Eqn, rewrite: Callable[[Self], Jaxpr]) -> Eqn:
        """The equation with its programs rewritten; itself if all stay."""
        inner = {id(each.jaxpr): each for each in self.inner(eqn)}

        def within(body: Jaxpr) -> Jaxpr:
            return rewrite(inner[id(body)]) if id(body) in inner else body

        return _jaxpr.with_inner(eqn, within)

    @functools.cached_property
    def readers(self) -> dict[Var, list[int]]:
        """Indices of the equations that read a variable; the number of equations if it is returned."""
        readers: dict[Var, list[int]] = {}
        for i, atoms in enumerate([*(e.invars for e in self.jaxpr.eqns), self.jaxpr.outvars]):
            for var in variables(atoms):
                readers.setdefault(var, []).append(i)
        return readers

    @functools.cached_property
    def makers(self) -> dict[Var, int]:
        """The index of the equation that makes a variable; arguments and constants have none."""
        return {out: i for i, eqn in enumerate(self.jaxpr.eqns) for out in eqn.outvars}

    def pass_of(self, eqn: Eqn) -> str | None:
        """'forward' or 'backward' if JAX's AD made the equation, or the loop or call around it."""
        return self.autodiff or _jaxpr.autodiff_pass(eqn)

    def at_line(self, eqn: Eqn) -> str:
        """` at file.py:12 (train_step)`; for an equation inside a library, the user's call."""
        line = _jaxpr.at_line(eqn)
        if line or self.around is None:
            return line
        outer, call = self.around
        return outer.at_line(call)

    def walk(self) -> Iterator[tuple[Self, Eqn]]:
        """Every equation in pre-order, each with its region."""
        for eqn in self.jaxpr.eqns:
            yield self, eqn
            for each in self.inner(eqn):
                yield from each.walk()

    def regions(self) -> Iterator[Self]:
        yield self
        for eqn in self.jaxpr.eqns:
            for each in self.inner(eqn):
                yield from each.regions()


ValueIn: TypeAlias = tuple[Region, Atom]


class EdgeKind(enum.Enum):
    """How a value becomes another one across an equation.

    IN: an operand, an argument of a program inside. OUT: what a program returns, a result. BACK: what a
    iteration of a loop returns, an argument of the next. PAST: an operand, a result, if a loop has no
    iteration. PREDICATE: what decides which program runs, or whether an iteration does, and what thereby is
    one value or another.
    """

    IN, OUT, BACK, PAST, PREDICATE = range(5)


class Edge(NamedTuple):
    """One value that becomes another.

    Attributes:
      kind: how.
      source: the value.
      target: what it becomes.
      shift: its dim d is dim `d + shift` of the target: -1 where a loop slices a stack, 1 where it makes one.
    """

    kind: EdgeKind
    source: ValueIn
    target: ValueIn
    shift: int = 0


def edges(region: Region, eqn: Eqn) -> list[Edge]:
    """The edges across an equation; none if it has no inner jaxpr that is known."""
    inner = region.inner(eqn)
    if not inner:
        return []
    of = _EDGES.get(eqn.primitive.name, _call_edges)
    return [*of(region, eqn, inner)]


def holder(region: Region, eqn: Eqn) -> Region:
    """The region of an equation, where `region` is that, or one inside the equation."""
    inside = region.around is not None and region.around[1] is eqn
    return region.around[0] if region.around is not None and inside else region


def region_of(eqns: Iterable[Eqn]) -> Region:
    return Region(Flat([], [], [], [*eqns]), [])


def trip_count(eqn: Eqn) -> int | None:
    """How often an equation runs its inner jaxprs; None if unknown."""
    if eqn.primitive.name == "while":
        return None
    return _jaxpr.scan_parts(eqn).length if eqn.primitive.name == "scan" else 1


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among some atoms, each once."""
    return list({atom: None for atom in atoms if not _jaxpr.is_literal(atom)})


def _programs(eqn: Eqn) -> list[tuple[Jaxpr, list[ArrayLike]]]:
    name = eqn.primitive.name
    if name == "scan":
        scan = _jaxpr.scan_parts(eqn)
        return [(scan.body, scan.body_consts)]
    if name == "while":
        loop = _jaxpr.while_parts(eqn)
        return [(loop.cond, loop.cond_consts), (loop.body, loop.body_consts)]
    if name == "cond":
        return _jaxpr.cond_parts(eqn)
    call = _jaxpr.call_parts(eqn)
    return [] if call is None else [call]


def _between(
    kind: EdgeKind, a: Region, xs: Sequence[Atom], b: Region, ys: Sequence[Atom], shift: int = 0
) -> Iterator[Edge]:
    for x, y in zip(xs, ys, strict=True):
        yield Edge(kind, (a, x), (b, y), shift)


def _call_edges(region: Region, eqn: Eqn, inner: Sequence[Region]) -> Iterator[Edge]:
    (child,) = inner
    yield from _between(EdgeKind.IN, region, eqn.invars, child, child.jaxpr.invars)
    yield from _between(EdgeKind.OUT, child, child.jaxpr.outvars, region, eqn.outvars)


def _cond_edges(region: Region, eqn: Eqn, inner: Sequence[Region]) -> Iterator[Edge]:
    choice, *operands = eqn.invars
    for child in inner:
        yield from _between(EdgeKind.IN, region, operands, child, child.jaxpr.invars)
        yield from _between(EdgeKind.OUT, child, child.jaxpr.outvars, region, eqn.outvars)
    for out in eqn.outvars:
        yield Edge(EdgeKind.PREDICATE, (region, choice), (region, out))


def _scan_edges(region: Region, eqn: Eqn, inner: Sequence[Region]) -> Iterator[Edge]:
    (body,), scan = inner, _jaxpr.scan_parts(eqn)
    first, last, num = scan.num_consts, scan.num_consts + scan.num_carry, scan.num_carry
    ins, outs = body.jaxpr.invars, body.jaxpr.outvars
    yield from _between(EdgeKind.IN, region, eqn.invars[:last], body, ins[:last])
    yield from _between(EdgeKind.IN, region, eqn.invars[last:], body, ins[last:], -1)
    yield from _between(EdgeKind.BACK, body, outs[:num], body, ins[first:last])
    yield from _between(EdgeKind.OUT, body, outs[:num], region, eqn.outvars[:num])
    yield from _between(EdgeKind.OUT, body, outs[num:], region, eqn.outvars[num:], 1)
    yield from _between(EdgeKind.PAST, region, eqn.invars[first:last], region, eqn.outvars[:num])


def _while_edges(region: Region, eqn: Eqn, inner: Sequence[Region]) -> Iterator[Edge]:
    (cond, body), loop = inner, _jaxpr.while_parts(eqn)
    first, last = loop.num_cond_consts, loop.num_cond_consts + loop.num_body_consts
    carry, outs = eqn.invars[last:], body.jaxpr.outvars
    yield from _between(EdgeKind.IN, region, [*eqn.invars[:first], *carry], cond, cond.jaxpr.invars)
    yield from _between(EdgeKind.IN, region, eqn.invars[first:], body, body.jaxpr.invars)
    carried = [(cond, v) for v in cond.jaxpr.invars[loop.num_cond_consts :]]
    carried += [(body, v) for v in body.jaxpr.invars[loop.num_body_consts :]]
    for out, target in zip([*outs, *outs], carried, strict=True):
        yield Edge(EdgeKind.BACK, (body, out), target)
    yield from _between(EdgeKind.OUT, body, outs, region, eqn.outvars)
    yield from _between(EdgeKind.PAST, region, carry, region, eqn.outvars)
    for target in [*((region, out) for out in eqn.outvars), *carried]:
        yield Edge(EdgeKind.PREDICATE, (cond, cond.jaxpr.outvars[0]), target)


_EDGES = {"scan": _scan_edges, "while": _while_edges, "cond": _cond_edges}
