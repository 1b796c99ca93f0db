# SPDX-License-Identifier: Apache-2.0
"""Minimum vertex cuts, by maximum flow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Vertex = TypeVar("Vertex", bound=Hashable)
# A vertex becomes an edge of its size, from a node where it is entered to one where it is left.
ENTERED, LEFT, END = "entered", "left", "end"
# How much more may flow from one node to another.
Capacity = dict[Hashable, dict[Hashable, float]]
Path = list[tuple[Hashable, Hashable]]


def min_cut(
    sizes: Mapping[Vertex, float], edges: Iterable[tuple[Vertex, Vertex]], starts: Iterable[Vertex],
    ends: Iterable[Vertex],
) -> set[Vertex]:  # fmt: skip
    """The set of least total size that every path from a start to an end passes.

    Of equal ones it is the one nearest to the starts. SciPy's `maximum_flow` counts in 32 bits, too few for a
    gradient's bytes.

    >>> sorted(min_cut({"a": 2, "b": 4, "c": 2}, [("a", "b"), ("b", "c")], ["a"], ["c"]))
    ['a']
    """
    cut = MinCut(sizes, edges, ends)
    cut.add(starts)
    return cut.found()


class MinCut(Generic[Vertex]):
    """A minimum cut to which starts are added, as long as it stays small.

    >>> cut = MinCut({"a": 2, "b": 4, "c": 3}, [("a", "c"), ("b", "c")], ["c"])
    >>> cut.add(["a"], most=2), cut.add(["b"], most=2), sorted(cut.found())
    (True, False, ['a'])
    """

    def __init__(
        self, sizes: Mapping[Vertex, float], edges: Iterable[tuple[Vertex, Vertex]],
        ends: Iterable[Vertex],
    ):  # fmt: skip
        self._vertices = list(sizes)
        self._room: Capacity = {END: {}}
        for vertex, size in sizes.items():
            self._room[ENTERED, vertex] = {(LEFT, vertex): size}
            self._room[LEFT, vertex] = {(ENTERED, vertex): 0}
        for a, b in edges:
            self._room[LEFT, a][ENTERED, b] = math.inf
            self._room[ENTERED, b].setdefault((LEFT, a), 0)
        for vertex in ends:
            self._room[LEFT, vertex][END] = math.inf
        self._size: float = 0
        # Nodes from which no more can flow to the end.
        self._closed: set[Hashable] = set()

    def add(self, starts: Iterable[Vertex], most: float = math.inf) -> bool:
        """Adds starts; returns False, and does nothing, if the cut would exceed `most`."""
        pushed: list[tuple[Path, float]] = []
        before, closed = self._size, set(self._closed)
        for start in starts:
            while END in (came_from := self._search((ENTERED, start))):
                path = _path(came_from)
                amount = min(self._room[a][b] for a, b in path)
                if self._size + amount > most or amount == math.inf:
                    for old, back in reversed(pushed):
                        self._push(old, -back)
                    self._size, self._closed = before, closed
                    return False
                self._push(path, amount)
                pushed.append((path, amount))
                self._size += amount
            self._closed |= came_from.keys()
        return True

    def found(self) -> set[Vertex]:
        inside = self._closed
        return {v for v in self._vertices if (ENTERED, v) in inside and (LEFT, v) not in inside}

    def _search(self, start: Hashable) -> dict[Hashable, Hashable]:
        """The nodes to which more can flow from `start`, each with its predecessor; stops at the end."""
        came_from: dict[Hashable, Hashable] = {start: None}
        todo = deque([start] if start not in self._closed else [])
        while todo and END not in came_from:
            node = todo.popleft()
            for other, more in self._room[node].items():
                if more and other not in came_from and other not in self._closed:
                    came_from[other] = node
                    todo.append(other)
        return came_from

    def _push(self, path: Path, amount: float) -> None:
        for a, b in path:
            self._room[a][b] -= amount
            self._room[b][a] = self._room[b].get(a, 0) + amount


def _path(came_from: Mapping[Hashable, Hashable]) -> Path:
    path: Path = [(came_from[END], END)]
    while (before := came_from[path[-1][0]]) is not None:
        path.append((before, path[-1][0]))
    return path
