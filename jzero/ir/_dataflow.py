# SPDX-License-Identifier: Apache-2.0
"""Dataflow analysis: facts about a program's values, spread along equations to a fixed point in loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from jzero._components import Components
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn, edges
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Literal

Fact = TypeVar("Fact")
Item = TypeVar("Item")
Node = TypeVar("Node", bound=Hashable)
Facts = Mapping[ValueIn, Fact]
# From the facts of an equation's operands to those of its results; backward, the other way around.
# Equations that hold programs (loops, branches, calls) are followed along their edges instead.
Transfer = Callable[[Region, Eqn, Sequence[Fact]], Sequence[Fact]]
Across = Callable[[Eqn, Edge, Fact], Fact]
Join = Callable[[Fact, Fact], Fact]


def forward(
    program: Region, facts: Facts[Fact], step: Transfer[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
    literal: Callable[[Literal], Fact] | None = None,
) -> dict[ValueIn, Fact]:  # fmt: skip
    """The facts of all values that follow from `facts`.

    `join` merges the facts of a value that may be either of two; it is associative, with `nothing` as its
    neutral element. `across` maps a fact along an edge, `literal` gives those of literals (else `nothing`).
    """
    flow = _Flow(dict(facts), step, join, nothing, across, literal)
    flow.visit(program)
    return flow.found


def backward(
    program: Region, facts: Facts[Fact], step: Transfer[Fact], join: Join[Fact], nothing: Fact,
    across: Across[Fact] = lambda eqn, edge, fact: fact,
) -> dict[ValueIn, Fact]:  # fmt: skip
    """`forward` from results to operands."""
    flow = _Flow(dict(facts), step, join, nothing, across, backward=True)
    flow.visit(program)
    return flow.found


def union(
    program: Region, related: Callable[[Region, Eqn], Iterable[tuple[Node, Node]]],
    across: Callable[[Eqn, Edge], Iterable[tuple[Node, Node]]],
) -> Components[Node]:  # fmt: skip
    """Components of values that an equation relates, or an edge."""
    found: Components[Node] = Components()
    for region in program.regions():
        for eqn in region.jaxpr.eqns:
            over = edges(region, eqn)
            pairs = [pair for edge in over for pair in across(eqn, edge)]
            for a, b in pairs if over else related(region, eqn):
                found.join(a, b)
    return found


@dataclasses.dataclass
class _Flow(Generic[Fact]):
    found: dict[ValueIn, Fact]
    step: Transfer[Fact]
    join: Join[Fact]
    nothing: Fact
    across: Across[Fact]
    literal: Callable[[Literal], Fact] | None = None
    backward: bool = False

    def __post_init__(self) -> None:
        self._given = dict(self.found)

    def visit(self, region: Region) -> None:
        for eqn in self._in_order(region.jaxpr.eqns):
            if inner := region.inner(eqn):
                self._visit_programs(region, eqn, inner)
                continue
            ends: tuple[Sequence[Atom], Sequence[Atom]] = eqn.invars, eqn.outvars
            given, results = self._in_order(ends)
            facts = self.step(region, eqn, [self._fact(region, atom) for atom in given])
            for atom, fact in zip(results, facts, strict=True):
                self._note((region, atom), fact)

    def _visit_programs(self, region: Region, eqn: Eqn, inner: Sequence[Region]) -> None:
        ends = self._edges_to(region, eqn)
        into = {end: over for end, over in ends.items() if end[0] is not region}
        is_first = True
        while self._arrive(eqn, into) or is_first:
            is_first = False
            for each in self._in_order(inner):
                self.visit(each)
        self._arrive(eqn, {end: over for end, over in ends.items() if end not in into})

    def _edges_to(self, region: Region, eqn: Eqn) -> dict[ValueIn, list[Edge]]:
        """The edges across an equation, by the variables that they lead to."""
        found: dict[ValueIn, list[Edge]] = {}
        for edge in edges(region, eqn):
            end = edge.source if self.backward else edge.target
            if not _jaxpr.is_literal(end[1]):
                found.setdefault(end, []).append(edge)
        return found

    def _arrive(self, eqn: Eqn, ends: Mapping[ValueIn, Sequence[Edge]]) -> bool:
        """Updates the facts at the ends of edges; returns whether one changed."""
        is_new = False
        for end, over in ends.items():
            starts = (edge.target if self.backward else edge.source for edge in over)
            each = zip(over, starts, strict=True)
            facts = [self.across(eqn, edge, self._fact(*start)) for edge, start in each]
            goes_round = any(edge.kind is EdgeKind.BACK for edge in over)
            is_new |= self._note(end, functools.reduce(self.join, facts), goes_round)
        return is_new

    def _in_order(self, items: Sequence[Item]) -> Iterable[Item]:
        return reversed(items) if self.backward else items

    def _fact(self, region: Region, atom: Atom) -> Fact:
        if _jaxpr.is_literal(atom):
            return self.nothing if self.literal is None else self.literal(atom)
        return self.found.get((region, atom), self.nothing)

    def _note(self, value: ValueIn, fact: Fact, grows: bool = False) -> bool:
        """Updates a fact; returns whether it changed."""
        region, atom = value
        if _jaxpr.is_literal(atom):
            return False
        old = self._fact(region, atom)
        if grows or self.backward:  # Backward, others read it, too.
            fact = self.join(old, fact)
        elif value in self._given:
            fact = self.join(self._given[value], fact)
        if fact != old:
            self.found[value] = fact
        return bool(fact != old)
