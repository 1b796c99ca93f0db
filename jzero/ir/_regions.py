# SPDX-License-Identifier: Apache-2.0
"""Regions: the programs inside a step's equations, and which value becomes which across their boundaries.

Loops, branches, `jax.checkpoint`, calls, custom derivatives and operations that JAX expands hold programs.
`edges` maps an equation's values to those of its programs, so that an analysis need not know these
operations.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias

from jax.typing import ArrayLike

from jzero.tracing import _jaxpr, _lines
from jzero.tracing._rewrite import Flat
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


@dataclasses.dataclass(eq=False)
class Region:
    """A program at one place: a function that is called twice is two regions."""

    jaxpr: Jaxpr
    consts: list[ArrayLike]
    autodiff: str | None = None  # The pass of `jax.grad` around it: 'forward' or 'backward'.
    around: tuple[Region, Eqn] | None = None  # The equation that holds it, with that one's region.

    def inner(self, eqn: Eqn) -> Sequence[Self]:
        """Regions of the programs inside an equation; a `while` has its condition first, then its body."""
        if id(eqn) not in self._inner:
            around, autodiff = (self, eqn), self.pass_of(eqn)
            found = [type(self)(*program, autodiff, around) for program in _programs(eqn)]
            self._inner[id(eqn)] = found
        return self._inner[id(eqn)]

    @functools.cached_property
    def _inner(self) -> dict[int, Sequence[Self]]:
        return {}

    def with_inner(self, eqn: Eqn, rewrite: Callable[[Self], Jaxpr]) -> Eqn:
        """The equation with its programs rewritten; itself if none changes."""
        inner = {id(each.jaxpr): each for each in self.inner(eqn)}

        def within(body: Jaxpr) -> Jaxpr:
            return rewrite(inner[id(body)]) if id(body) in inner else body

        return _jaxpr.with_inner(eqn, within)

    @functools.cached_property
    def readers(self) -> dict[Var, list[int]]:
        """Indices of the equations that read a variable; `len(eqns)` if it is returned."""
        readers: dict[Var, list[int]] = {}
        for i, atoms in enumerate([*(e.invars for e in self.jaxpr.eqns), self.jaxpr.outvars]):
            for var in variables(atoms):
                readers.setdefault(var, []).append(i)
        return readers

    @functools.cached_property
    def makers(self) -> dict[Var, int]:
        return {out: i for i, eqn in enumerate(self.jaxpr.eqns) for out in eqn.outvars}

    def pass_of(self, eqn: Eqn) -> str | None:
        """'forward' or 'backward' if JAX's AD wrote the equation, or the loop or call around it."""
        return self.autodiff or _jaxpr.autodiff_pass(eqn)

    def at_line(self, eqn: Eqn) -> str:
        """` at file.py:12 (train_step)`; for an equation inside a library, the user's call."""
        line = _lines.at_line(eqn)
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

    IN: an operand becomes an argument of a program inside. OUT: a program's output becomes a result. BACK: an
    iteration's output becomes an argument of the next. PAST: an operand becomes a result of a loop without
    iterations. PREDICATE: a condition decides which value a result or carry has.
    """

    IN, OUT, BACK, PAST, PREDICATE = range(5)


class Edge(NamedTuple):
    kind: EdgeKind
    source: ValueIn
    target: ValueIn
    shift: int = 0  # Dim d becomes dim `d + shift`: -1 where a loop slices, 1 where it stacks.


def edges(region: Region, eqn: Eqn) -> list[Edge]:
    """The edges across an equation; none if it holds no programs."""
    inner = region.inner(eqn)
    across = _EDGES.get(eqn.primitive.name, _call_edges)
    return [*across(region, eqn, inner)] if inner else []


def holder(region: Region, eqn: Eqn) -> Region:
    """The region of an equation, given that region or one inside the equation."""
    return region.around[0] if region.around is not None and region.around[1] is eqn else region


def region_of(eqns: Iterable[Eqn]) -> Region:
    return Region(Flat([], [], [], [*eqns]), [])


def trip_count(eqn: Eqn) -> int | None:
    """How often an equation runs its programs; None if unknown."""
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
