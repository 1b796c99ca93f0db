# SPDX-License-Identifier: Apache-2.0
"""State in several arguments: a pytree whose leaves' paths begin with the arguments' names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


class Step(str):
    """A pytree key that prints as it is: the name of an argument, or a path in a result."""


@jax.tree_util.register_pytree_with_keys_class
class StateArguments:
    """The state of a step that takes it in several arguments, in the order of its parameters."""

    __slots__ = ("names", "values")

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...]):
        self.names, self.values = names, values

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return self.values, self.names

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Step, Any]], tuple[str, ...]]:
        return list(zip(map(Step, self.names), self.values, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> StateArguments:
        return cls(names, tuple(values))


def parts(state: Any) -> list[tuple[str, Any]]:
    """The arguments of a state by name; a state in one argument is called 'state'."""
    if isinstance(state, StateArguments):
        return list(zip(state.names, state.values, strict=True))
    return [("state", state)]
