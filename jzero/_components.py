# SPDX-License-Identifier: Apache-2.0
"""Connected components (union-find)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)
Thing = TypeVar("Thing")


class Components(Generic[Node]):
    """Union-find: every node is a component of its own, until some are joined.

    >>> components = Components()
    >>> components.join("a", "b")
    >>> components.of("a") == components.of("b"), components.of("a") == components.of("c")
    (True, False)
    """

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """The node that represents the component; it may change when more nodes are joined."""
        path = []
        while (parent := self._parent.get(node, node)) != node:
            path.append(node)
            node = parent
        for step in path:
            self._parent[step] = node
        return node

    def join(self, a: Node, b: Node) -> None:
        a, b = self.of(a), self.of(b)
        if a != b:
            self._parent[a] = b


def grouped(
    things: Sequence[Thing], keys_of: Callable[[Thing], Iterable[Hashable]]
) -> list[list[Thing]]:
    """The smallest groups of things such that no key is in two groups. Order is kept.

    >>> grouped(["ab", "c", "bd"], set)
    [['ab', 'bd'], ['c']]
    """
    components: Components[Hashable] = Components()
    for number, thing in enumerate(things):
        for key in keys_of(thing):
            components.join(("thing", number), ("key", key))
    groups: dict[Hashable, list[Thing]] = {}
    for number, thing in enumerate(things):
        groups.setdefault(components.of(("thing", number)), []).append(thing)
    return list(groups.values())
