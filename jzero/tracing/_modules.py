# SPDX-License-Identifier: Apache-2.0
"""Equinox modules as arguments of a step: everything in them but arrays is compiled into the program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jzero._errors import STEP, StepError, message
from jzero.tracing._returned import as_given, is_same_static
from jzero.tracing._state_arguments import Step

_ARRAY = object()  # in the place of arrays among leaves
_NUMBERS = (bool, int, float, complex)


def is_made_by(transform: str, fn: Any) -> bool:
    """Whether Equinox's `filter_jit`, or another transform, made a function."""
    eqx = sys.modules.get("equinox")
    return eqx is not None and isinstance(fn, type(getattr(eqx, transform)(lambda: None)))


def check_no_pmap(step_fn: Any, who: str) -> None:
    if is_made_by("filter_pmap", step_fn):
        raise StepError(message(
            who, "the step was made by eqx.filter_pmap", "jzero runs the step on all devices itself.",
            "Pass the function inside, with its axis_name= in axes=jzero.Axes(...)."))  # fmt: skip


def is_filtered(step_fn: Any) -> bool:
    """Whether `eqx.filter_jit` made a function; refuses one made by `eqx.filter_pmap`."""
    check_no_pmap(step_fn, STEP)
    return is_made_by("filter_jit", step_fn)


def check_unbound(step_fn: Any, who: str) -> None:
    """Refuses a bound method of a module, whose arrays are no arguments."""
    eqx = sys.modules.get("equinox")
    bound = getattr(step_fn, "__wrapped__", step_fn) if eqx and is_filtered(step_fn) else step_fn
    if eqx and isinstance(bound, eqx.Module) and hasattr(bound, "__self__"):
        name = f"{type(bound.__self__).__name__}.{bound.__name__}"
        raise StepError(message(
            who, f"step_fn is the method {name} of a module", "The arrays of the module are its state.",
            f"Pass the function of the class: shard_train_step({name}), and call step(module, ...).",
        ))  # fmt: skip


def holds_modules(tree: Any) -> bool:
    eqx = sys.modules.get("equinox")
    if eqx is None:
        return False

    def is_module(x: Any) -> bool:
        return isinstance(x, eqx.Module)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


class Static:
    """A tree without its arrays, a part of a program's cache key as for `eqx.filter_jit`."""

    def __init__(self, tree: Any, leaves: list[Any]):
        self._tree, self._leaves = tree, leaves

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self._tree == other._tree
            and all(map(is_same_static, self._leaves, other._leaves))
        )

    def __hash__(self) -> int:
        return hash((self._tree, *map(type, self._leaves)))

    def whole(self, arrays: Any) -> Any:
        left: Iterator[Any] = iter(jax.tree.leaves(arrays))
        leaves = [next(left) if x is _ARRAY else x for x in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)


def apart(tree: Any, numbers: bool = False) -> tuple[Any, Static | None]:
    """Like `eqx.partition`: the tree with None for non-arrays, and those, or None if all leaves are arrays.

    With `numbers`, Python's numbers count as arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    kept = [_ARRAY if _is_array(x) or (numbers and isinstance(x, _NUMBERS)) else x for x in leaves]
    if all(x is _ARRAY for x in kept):
        return tree, None
    pairs = zip(leaves, kept, strict=True)
    arrays = jax.tree.unflatten(treedef, [leaf if x is _ARRAY else None for leaf, x in pairs])
    return arrays, Static(treedef, kept)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def apart_modules(tree: Any) -> tuple[Any, Static | None]:
    """`apart` for a tree with Equinox modules; any other one stays as it is."""
    return apart(tree) if holds_modules(tree) else (tree, None)


@jax.tree_util.register_pytree_with_keys_class
class Filtered:
    """What a step with modules returned: its arrays, and the rest as static data."""

    def __init__(self, arrays: Any, static: Static):
        self.arrays, self.static = arrays, static

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(Step(""), self.arrays)], self.static

    def as_given(self) -> Any:
        return self.static.whole(as_given(self.arrays))

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Filtered:
        (arrays,) = children
        return cls(arrays, static)


def arrays_of(outs: Any) -> Any:
    return outs.arrays if isinstance(outs, Filtered) else outs
