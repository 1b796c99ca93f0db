# SPDX-License-Identifier: Apache-2.0
"""Dataflow: facts about the values of a program, from equation to equation, to a fixed point in loops.

An analysis says what an equation does to facts, and what becomes of one along an edge; it gets them as a
mapping from values, and writes them nowhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from jzero._components import Components
from jzero.ir._regions import Edge, Region, Value, edges
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Literal, Var

Fact = TypeVar("Fact")
Node = TypeVar("Node", bound=Hashable)
Facts = Mapping[Value, Fact]
# What an equation that holds no programs makes of the facts of its operands; backward, of its results.
Step = Callable[[Region, Eqn, Sequence[Fact]], Sequence[Fact]]
Across = Callable[[Eqn, Edge, Fact], Fact]
Join = Callable[[Fact, Fact], Fact]


def forward(
    program: Region, facts: Facts[Fact], step: Step[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
    literal: Callable[[Literal], Fact] | None = None,
) -> dict[Value, Fact]:  # fmt: skip
    """The facts of all values, from those of the arguments on.

    Args:
      program: of which.
      facts: where they start.
      step: the facts of an equation's results, from those of its operands; never less if those are more.
      join: the fact of what may be either of two values; associative, and `nothing` adds nothing.
      nothing: the fact of values that are not in `facts`.
      across: what becomes of a fact along an edge.
      literal: the facts of constants that are written into equations; `nothing` if it is not given.
    """
    return _Flow(program, facts, step, join, nothing, across, literal, False).run()


def backward(
    program: Region, facts: Facts[Fact], step: Step[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
) -> dict[Value, Fact]:  # fmt: skip
    """The facts of all values, from those of the results back; `step` makes operands' of results'."""
    return _Flow(program, facts, step, join, nothing, across, None, True).run()


def union(
    program: Region, related: Callable[[Region, Eqn], Iterable[tuple[Node, Node]]],
    across: Callable[[Eqn, Edge], Iterable[tuple[Node, Node]]],
) -> Components[Node]:  # fmt: skip
    """The components of what equations, and edges across those that hold programs, relate."""
    found: Components[Node] = Components()
    for region in program.regions():
        for eqn in region.jaxpr.eqns:
            over = edges(region, eqn)
            pairs = [pair for edge in over for pair in across(eqn, edge)]
            for a, b in pairs if over else related(region, eqn):
                found.join(a, b)
    return found


class _Flow(Generic[Fact]):
    """What is due stands in the program's order: an equation, or (None) the other end of a region."""

    def __init__(
        self, program: Region, facts: Facts[Fact], step: Step[Fact], join: Join[Fact], nothing: Fact,
        across: Across[Fact], literal: Callable[[Literal], Fact] | None, is_backward: bool,
    ):  # fmt: skip
        self._found = dict(facts)
        self._step, self._join, self._nothing = step, join, nothing
        self._across, self._literal, self._backward = across, literal, is_backward
        self._items = [*self._items_of(program)]
        self._place = {(region, i): n for n, (region, i) in enumerate(self._items)}
        self._due = list(range(len(self._items)))
        self._is_due = set(self._due)
        self._edges: dict[tuple[Region, int], list[Edge]] = {}

    def _items_of(self, region: Region) -> Iterator[tuple[Region, int | None]]:
        places = range(len(region.jaxpr.eqns))
        for i in reversed(places) if self._backward else places:
            yield region, i
            inner = region.inner(region.jaxpr.eqns[i])
            for each in reversed(inner) if self._backward else inner:
                yield from self._items_of(each)
                yield each, None

    def run(self) -> dict[Value, Fact]:
        while self._due:
            number = heapq.heappop(self._due)
            self._is_due.remove(number)
            region, i = self._items[number]
            if i is not None:
                holder, eqn = region, region.jaxpr.eqns[i]
            else:
                assert region.around is not None
                holder, eqn = region.around
            over = self._edges_of(holder, eqn)
            for edge in over:
                start, end = (edge.target, edge.source) if self._backward else edge[1:3]
                if start[0] is region:
                    self._add(end, self._across(eqn, edge, self._fact(*start)))
            if not over and i is not None:
                read, made = eqn.invars, eqn.outvars
                given, results = (made, read) if self._backward else (read, made)
                facts = self._step(region, eqn, [self._fact(region, atom) for atom in given])
                for atom, fact in zip(results, facts, strict=True):
                    self._add((region, atom), fact)
        return self._found

    def _edges_of(self, region: Region, eqn: Eqn) -> list[Edge]:
        key = region, id(eqn)
        if key not in self._edges:
            self._edges[key] = edges(region, eqn)
        return self._edges[key]

    def _fact(self, region: Region, atom: Atom) -> Fact:
        if _jaxpr.is_literal(atom):
            return self._nothing if self._literal is None else self._literal(atom)
        return self._found.get((region, atom), self._nothing)

    def _add(self, value: Value, fact: Fact) -> None:
        region, atom = value
        if _jaxpr.is_literal(atom):
            return
        old = self._fact(region, atom)
        new = self._join(old, fact)
        if new != old:
            self._found[value] = new
            self._have_due(region, atom)

    def _have_due(self, region: Region, var: Var) -> None:
        num = len(region.jaxpr.eqns)
        if self._backward:
            places = [region.makers.get(var)]
        else:
            places = [None if i == num else i for i in region.readers.get(var, ())]
        for i in places:
            number = self._place.get((region, i))
            if number is not None and number not in self._is_due:
                self._is_due.add(number)
                heapq.heappush(self._due, number)
