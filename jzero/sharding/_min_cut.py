"""The smallest cut of a graph whose vertices have sizes: the largest flow, and where it gets stuck."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Vertex = TypeVar("Vertex", bound=Hashable)
# A vertex is an edge as wide as its size, from where it is entered to where it is left.
ENTERED, LEFT, END = "entered", "left", "end"
# How much more may flow from one node to another: integers, or any amount.
Room = dict[Hashable, dict[Hashable, float]]


def min_cut(
    sizes: Mapping[Vertex, int], edges: Iterable[tuple[Vertex, Vertex]], starts: Iterable[Vertex],
    ends: Iterable[Vertex],
) -> set[Vertex]:  # fmt: skip
    """The vertices of least total size that every path from a start to an end passes.

    Of several such sets the one nearest to the starts. SciPy's `maximum_flow` counts in 32 bits, which a
    gradient's bytes may not fit.

    >>> sorted(min_cut({"a": 2, "b": 4, "c": 2}, [("a", "b"), ("b", "c")], ["a"], ["c"]))
    ['a']

    Args:
      sizes: of each vertex, at least 0.
      edges: pairs of vertices.
      starts: vertices where paths begin.
      ends: vertices where paths end.
    """
    room: Room = {END: {}}
    for vertex, size in sizes.items():
        room[ENTERED, vertex], room[LEFT, vertex] = {(LEFT, vertex): size}, {(ENTERED, vertex): 0}
    for a, b in edges:
        room[LEFT, a][ENTERED, b] = math.inf
        room[ENTERED, b].setdefault((LEFT, a), 0)
    for vertex in ends:
        room[LEFT, vertex][END] = math.inf
    reached: set[Hashable] = set()
    for start in starts:
        while END in (came_from := _search(room, (ENTERED, start))):
            _push(room, came_from)
        # Nothing leads out of here any more, so no later path comes through.
        reached |= came_from.keys()
    return {v for v in sizes if (ENTERED, v) in reached and (LEFT, v) not in reached}


def _search(room: Room, start: Hashable) -> dict[Hashable, Hashable]:
    """Each node to which more can flow from `start`, and from where; not all if the end is one."""
    came_from: dict[Hashable, Hashable] = {start: None}
    todo = deque([start])
    while todo and END not in came_from:
        node = todo.popleft()
        for other, more in room[node].items():
            if more and other not in came_from:
                came_from[other] = node
                todo.append(other)
    return came_from


def _push(room: Room, came_from: Mapping[Hashable, Hashable]) -> None:
    """Sends as much as fits along the path that was found."""
    path: list[tuple[Hashable, Hashable]] = [(came_from[END], END)]
    while (before := came_from[path[-1][0]]) is not None:
        path.append((before, path[-1][0]))
    most = min(room[a][b] for a, b in path)
    for a, b in path:
        room[a][b] -= most
        room[b][a] = room[b].get(a, 0) + most
