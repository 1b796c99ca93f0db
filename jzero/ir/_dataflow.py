# SPDX-License-Identifier: Apache-2.0
"""Dataflow: facts about the values of a program, from equation to equation, to a fixed point in loops.

An analysis says what an equation does to facts, and what becomes of one along an edge; it gets them as a
mapping from values, and writes them nowhere.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from jzero._components import Components
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn, edges
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Literal, Var

Fact = TypeVar("Fact")
Node = TypeVar("Node", bound=Hashable)
Facts = Mapping[ValueIn, Fact]
# What an equation that holds no programs makes of the facts of its operands; backward, of its results.
Transfer = Callable[[Region, Eqn, Sequence[Fact]], Sequence[Fact]]
Across = Callable[[Eqn, Edge, Fact], Fact]
Join = Callable[[Fact, Fact], Fact]


def forward(
    program: Region, facts: Facts[Fact], step: Transfer[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
    literal: Callable[[Literal], Fact] | None = None,
) -> dict[ValueIn, Fact]:  # fmt: skip
    """The facts of all values, from those of the arguments on.

    Args:
      program: of which.
      facts: where they start.
      step: the facts of an equation's results, from those of its operands.
      join: the fact of what may be either of two values; associative, and `nothing` adds nothing.
      nothing: the fact of values that are not in `facts`.
      across: what becomes of a fact along an edge.
      literal: the facts of constants that are written into equations; `nothing` if it is not given.
    """
    return _Flow(program, facts, step, join, nothing, across, literal).run()


def backward(
    program: Region, facts: Facts[Fact], step: Transfer[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
) -> dict[ValueIn, Fact]:  # fmt: skip
    """The facts of all values, backward from the results; `step` maps facts of results to operands."""
    return _Flow(program, facts, step, join, nothing, across, backward=True).run()


def union(
    program: Region, related: Callable[[Region, Eqn], Iterable[tuple[Node, Node]]],
    across: Callable[[Eqn, Edge], Iterable[tuple[Node, Node]]],
) -> Components[Node]:  # fmt: skip
    found: Components[Node] = Components()
    for region in program.regions():
        for eqn in region.jaxpr.eqns:
            over = edges(region, eqn)
            pairs = [pair for edge in over for pair in across(eqn, edge)]
            for a, b in pairs if over else related(region, eqn):
                found.join(a, b)
    return found


class _Item(NamedTuple):
    """An equation in the worklist; or the results of its programs in `region` (backward: arguments)."""

    region: Region
    holder: Region
    eqn: Eqn
    holds: bool  # whether it holds programs


@dataclasses.dataclass
class _Flow(Generic[Fact]):
    """A worklist in program order. Facts of carries only grow; all others are computed anew."""

    program: Region
    given: Facts[Fact]
    step: Transfer[Fact]
    join: Join[Fact]
    nothing: Fact
    across: Across[Fact]
    literal: Callable[[Literal], Fact] | None = None
    backward: bool = False

    def __post_init__(self) -> None:
        self._found = dict(self.given)
        self._items = [*self._items_of(self.program)]
        # All are due once, in their order; `_due` are those before `_next` that are due again.
        self._next, self._due = 0, list[int]()
        self._is_again = False  # Whether the one at hand is due again, and so what reads it may be.
        self._is_due = set[int]()
        self._over: dict[tuple[Region, int], dict[ValueIn, list[Edge]]] = {}

    @functools.cached_property
    def _places(self) -> dict[tuple[Region, int | None], int]:
        return {
            (item.region, id(item.eqn) if item.region is item.holder else None): number
            for number, item in enumerate(self._items)
        }

    def _items_of(self, region: Region) -> Iterator[_Item]:
        order = reversed if self.backward else iter
        for eqn in order(region.jaxpr.eqns):
            inner = region.inner(eqn)
            yield _Item(region, region, eqn, bool(inner))
            for each in order(inner):
                yield from self._items_of(each)
                yield _Item(each, region, eqn, True)

    def run(self) -> dict[ValueIn, Fact]:
        while self._due or self._next < len(self._items):
            self._is_again = bool(self._due)
            if self._is_again:
                number = heapq.heappop(self._due)
                self._is_due.remove(number)
            else:
                number, self._next = self._next, self._next + 1
            region, holder, eqn, holds = self._items[number]
            for end, over in self._edges_to(holder, eqn).items() if holds else ():
                starts = [each.target if self.backward else each.source for each in over]
                if any(start[0] is region for start in starts):
                    pairs = zip(over, starts, strict=True)
                    found = [self.across(eqn, each, self._fact(*start)) for each, start in pairs]
                    goes_round = any(each.kind is EdgeKind.BACK for each in over)
                    self._note(end, functools.reduce(self.join, found), goes_round)
            if not holds:
                ends: tuple[Sequence[Atom], Sequence[Atom]] = eqn.invars, eqn.outvars
                given, results = reversed(ends) if self.backward else ends
                facts = self.step(region, eqn, [self._fact(region, atom) for atom in given])
                for atom, fact in zip(results, facts, strict=True):
                    self._note((region, atom), fact)
        return self._found

    def _edges_to(self, region: Region, eqn: Eqn) -> dict[ValueIn, list[Edge]]:
        """The edges across an equation, by the variables at their ends."""
        if (key := (region, id(eqn))) not in self._over:
            found = self._over[key] = dict[ValueIn, list[Edge]]()
            for edge in edges(region, eqn):
                end = edge.source if self.backward else edge.target
                if not _jaxpr.is_literal(end[1]):
                    found.setdefault(end, []).append(edge)
        return self._over[key]

    def _fact(self, region: Region, atom: Atom) -> Fact:
        if _jaxpr.is_literal(atom):
            return self.nothing if self.literal is None else self.literal(atom)
        return self._found.get((region, atom), self.nothing)

    def _note(self, value: ValueIn, fact: Fact, gains: bool = False) -> None:
        region, atom = value
        if _jaxpr.is_literal(atom):
            return
        old = self._fact(region, atom)
        if gains or self.backward:  # Backward, others read it, too.
            fact = self.join(old, fact)
        elif value in self.given:
            fact = self.join(self.given[value], fact)
        if fact != old:
            self._found[value] = fact
            if gains or self._is_again:
                self._have_due(region, atom)

    def _have_due(self, region: Region, var: Var) -> None:
        eqns = region.jaxpr.eqns
        made = region.makers.get(var, len(eqns))
        for i in [made] if self.backward else region.readers.get(var, ()):
            number = self._places.get((region, id(eqns[i]) if i < len(eqns) else None), self._next)
            if number < self._next and number not in self._is_due:
                self._is_due.add(number)
                heapq.heappush(self._due, number)
