# SPDX-License-Identifier: Apache-2.0
"""Finds a step's state in its results, by the structure, shapes and dtypes of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero._errors import StateError, StepError, counted, describe_leaf, message
from jzero.tracing import _call
from jzero.tracing._state_arguments import StateArguments, Step, parts

WHO = _call.WHO


@jax.tree_util.register_pytree_with_keys_class
class Returned:
    """A step's results, as a pytree whose first leaves are the new state's.

    `nodes` are the new values of the state's arguments that have leaves, then all other results. `places` are
    their positions among the leaves of `tree`, the structure of the results.
    """

    def __init__(self, nodes: Sequence[Any], places: tuple[int, ...], tree: Any):
        self.nodes, self.places, self.tree = nodes, places, tree

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Step, Any]], tuple[Any, ...]]:
        paths = _call.structure_paths(self.tree, "")
        keyed = [(Step(paths[i]), node) for i, node in zip(self.places, self.nodes, strict=True)]
        return keyed, (self.places, self.tree)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], nodes: Iterable[Any]) -> Returned:
        return cls(list(nodes), *aux)

    def as_given(self) -> Any:
        outs = list(self.nodes)
        for i, node in zip(self.places, self.nodes, strict=True):
            outs[i] = node
        return jax.tree.unflatten(self.tree, outs)

    def apart(self, state: Any) -> tuple[Any, Any]:
        """The new state, in the form of `state`, and the results with None in its places."""
        nodes = iter(self.nodes)
        new = tuple([next(nodes) if jax.tree.leaves(value) else value for _, value in parts(state)])
        others = list(nodes)
        without = [None] * (len(self.nodes) - len(others)) + others
        rest = Returned(without, self.places, self.tree).as_given()
        return (new if isinstance(state, StateArguments) else new[0]), rest


def as_given(outs: Any) -> Any:
    return outs.as_given() if isinstance(outs, Returned) else outs


def new_state(outs: Any, state: Any) -> Any:
    """The new state among a step's results: alone or first; None if it is not there."""
    if isinstance(outs, Returned):
        return outs.apart(state)[0]
    tree: Any = jax.tree.structure(state)
    first = outs[0] if isinstance(outs, (tuple, list)) and outs else None
    return next((x for x in (first, outs) if jax.tree.structure(x) == tree), None)


def find_state(outs: Any, state: Any) -> Returned:
    """Finds the state among a step's results.

    The new value of an argument is the result with its structure, shapes and dtypes, wherever it is. If
    several arguments are alike, such as parameters and their average, they are returned in the same order. If
    there are more such results than arguments, such as gradients, the state must lead, in the order of its
    arguments. The choice decides how values are stored, not what is computed.

    Raises:
      StateError: an argument was returned with another shape or dtype.
      StepError: one was not returned, or its place is not clear.
    """
    try:
        return _find_state(outs, state, promotes=False)
    except (StateError, StepError):
        if not any(_call.abstract_leaf(x).weak_type for x in jax.tree.leaves(state)):
            raise
        with contextlib.suppress(StateError, StepError):
            return _find_state(outs, state, promotes=True)  # [Note: weak types]
        raise


def _find_state(outs: Any, state: Any, promotes: bool) -> Returned:
    wanted = [(name, value) for name, value in parts(state) if jax.tree.leaves(value)]
    alike = [Like(value, promotes) for _, value in wanted]
    nodes, tree = jax.tree.flatten(outs, is_leaf=lambda x: any(like(x) for like in alike))
    candidates = [[i for i, node in enumerate(nodes) if like(node)] for like in alike]
    same = [[_same(candidates, i, j) for j in range(len(wanted))] for i in range(len(wanted))]
    missing = [i for i, found in enumerate(candidates) if len(found) < sum(same[i])]
    if missing:
        there = [like for i, like in enumerate(alike) if i not in missing]
        names = [name for name, _ in parts(state)]
        _refuse_missing(outs, [wanted[i] for i in missing], there, names)
    unclear = [i for i, found in enumerate(candidates) if len(found) > sum(same[i])]
    if not unclear:
        places = [found[sum(same[i][:i])] for i, found in enumerate(candidates)]
    elif all(i in found for i, found in enumerate(candidates)):
        places = list(range(len(wanted)))
    else:
        paths = _call.structure_paths(tree, "output")
        shown = ", ".join(name for name, _ in wanted)
        raise StepError(message(
            WHO,
            [f"{wanted[i][0]} could come back as {' or '.join(paths[j] for j in candidates[i])}"
             for i in unclear],
            "The new value of an argument of the state is the result with its structure, shapes and dtypes.",
            f"Return the state first, in the order of its arguments: ({shown}, ...).",
            things="arguments"))  # fmt: skip
    places += [i for i in range(len(nodes)) if i not in places]
    return Returned([nodes[i] for i in places], tuple(places), tree)


class Found(NamedTuple):
    """The arguments of a step that are returned with their structure, shapes and dtypes."""

    state: tuple[str, ...]  # State beyond doubt.
    unclear: tuple[
        str, ...
    ] = ()  # State, or a batch like a result (a reconstruction, a hidden state).
    alike: tuple[str, ...] = ()  # Arguments like each other, more than there are results like them.


def find_arguments(outs: Any, arguments: Mapping[str, Any], first: str | None = None) -> Found:
    """Finds the arguments that are state, by the step's results.

    A coincidence must not make a batch the state: scalars and keys are never state, because any loss is a
    scalar; a bare array, and a tree whose arrays all have the batch's leading dim, are not state beyond
    doubt. As many results as arguments must be alike. `first` is state whatever it holds: the step takes and
    returns it first.
    """
    likes = {
        name: Like(tree)
        for name, tree in arguments.items()
        if _arrays(tree) or _optimizer_states(tree)
    }
    nodes = jax.tree.leaves(outs, is_leaf=lambda x: any(like(x) for like in likes.values()))
    missing, alike = set[str](), list[str]()
    for name, like in likes.items():
        same = {other for other in likes if like(arguments[other])}
        num = sum(map(like, nodes))
        if num == 0 or (num == 1 and first in same - {name}):
            missing.add(name)
        elif num < len(same) and name != first:
            alike.append(name)
    there = {name: arguments[name] for name in likes if name not in missing}
    batch = [arguments[name] for name in missing if may_be_batch(arguments[name])]
    rows = {x.shape[0] for tree in batch for x in _arrays(tree)}
    moments = {
        x.shape
        for tree in there.values()
        if holds_optimizer_state(tree)
        for x in jax.tree.leaves(tree)
    }
    one_each = {name: tree for name, tree in there.items() if name not in alike}
    sure = [
        name for name, tree in one_each.items() if name == first or _is_state(tree, rows, moments)
    ]
    unclear = [name for name in one_each if name not in sure]
    return Found(tuple(sure), tuple(unclear), tuple(alike))


def _is_state(tree: Any, rows: Collection[int], moments: Collection[tuple[int, ...]]) -> bool:
    """Whether a returned argument is state beyond doubt.

    `rows` are leading dims of arguments that may be the batch, `moments` shapes of returned optimizer states.
    """
    if _optimizer_states(tree):
        return True
    arrays, is_tree = _arrays(tree), not jax.tree_util.all_leaves([tree])
    has_rows = may_be_batch(tree) and (not rows or arrays[0].shape[0] in rows)
    if {x.shape for x in arrays} <= set(moments):
        return is_tree or not has_rows
    return is_tree and not has_rows and any(map(_is_float, arrays))


def of_batch(found: Found, arguments: Mapping[str, Any]) -> list[str]:
    """The returned arguments that are a batch, given that others are state beyond doubt.

    They have as many rows as the arguments that are not returned, and other shapes than the state. A mistake
    costs no correctness: a step of the whole batch computes the same whether an argument is split or not.
    """
    if not found.state:
        return []
    shapes = {x.shape for name in found.state for x in jax.tree.leaves(arguments[name])}
    open_names = [*found.unclear, *found.alike]
    candidates = [name for name in open_names if may_be_batch(arguments[name])]
    beside = [name for name in arguments if name not in (*found.state, *open_names)]
    batch = [x for name in beside or candidates for x in _arrays(arguments[name])]
    rows = {x.shape[0] for x in batch}
    return [
        name
        for name in candidates
        if {x.shape[0] for x in _arrays(arguments[name])} == rows
        and not {x.shape for x in _arrays(arguments[name])} <= shapes
    ]


def may_be_batch(tree: Any) -> bool:
    """Whether all arrays of a tree have the same leading dim, and none is optax's."""
    return not _optimizer_states(tree) and len({x.shape[0] for x in _arrays(tree)}) <= 1


def _arrays(tree: Any) -> list[Any]:
    """The leaves that are neither scalars nor keys."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if getattr(x, "shape", ()) and not _call.is_key(x.dtype, x.shape)]


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def holds_floats(tree: Any) -> bool:
    return any(map(_is_float, _arrays(tree)))


def holds_optimizer_state(tree: Any) -> bool:
    """Whether a tree has nodes of optax's own types with arrays in them."""
    return any(map(_arrays, _optimizer_states(tree)))


def _optimizer_states(tree: Any) -> list[Any]:
    def is_optax(x: Any) -> bool:
        return type(x).__module__.partition(".")[0] == "optax"

    return [*filter(is_optax, jax.tree.leaves(tree, is_leaf=is_optax))]


def results_like(outs: Any, tree: Any, *others: Any) -> Iterator[tuple[int, Any]]:
    """`(index of first leaf, result)` for each result like `tree`, except within results like `others`."""
    at, likes = 0, [*map(Like, (tree, *others))]
    for node in jax.tree.leaves(outs, is_leaf=lambda x: any(like(x) for like in likes)):
        if likes[0](node):
            yield at, node
        at += len(jax.tree.leaves(node))


def _same(candidates: Sequence[list[int]], i: int, j: int) -> bool:
    """Whether two arguments of the state are alike: then they have the same candidates."""
    return i == j or (bool(candidates[i]) and candidates[i] == candidates[j])


class Like:
    """Compares trees with `value`: their structure, and their leaves' shapes and dtypes.

    With `promotes`, a weakly typed leaf of `value` may have been promoted.
    """

    def __init__(self, value: Any, promotes: bool = False):
        # Once: every node of a step's results is compared.
        self._promotes = promotes
        self._leaves: list[Any] = jax.tree.leaves(value)
        self._tree: Any = jax.tree.structure(value)

    def __call__(self, x: Any) -> bool:
        is_one = _gives_way if self._promotes else _one_type
        return self.in_structure(x) and all(map(is_one, jax.tree.leaves(x), self._leaves))

    def in_structure(self, x: Any) -> bool:
        return bool(jax.tree.structure(x) == self._tree)


def is_same_static(x: Any, y: Any) -> bool:
    """Whether a program compiled for one of two non-array leaves is right for the other."""
    return x is y or (type(x) is type(y) and bool(x == y))


def _one_type(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if not hasattr(x, "dtype") and not hasattr(y, "dtype"):  # Numbers and functions of a module.
        return is_same_static(x, y)
    try:
        a, b = _call.abstract_leaf(x), _call.abstract_leaf(y)
    except (TypeError, ValueError):
        return False
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _gives_way(x: Any, y: Any) -> bool:
    """Whether `x` has the type of `y`, or one to which a weakly typed `y` is promoted."""
    if _one_type(x, y) or not (hasattr(x, "dtype") and _call.abstract_leaf(y).weak_type):
        return _one_type(x, y)
    return bool(x.shape == y.shape and jnp.result_type(x, y) == x.dtype)


def _refuse_missing(
    outs: Any, missing: Sequence[tuple[str, Any]], there: Sequence[Like], names: Sequence[str]
) -> None:
    changed = [line for name, value in missing for line in changes(outs, name, value, there)]
    if changed:
        raise StateError(message(
            WHO, changed, "A step must keep every state leaf's shape and dtype.",
            "Cast it back (.astype) before returning, or initialise it with the new dtype.",
        ))  # fmt: skip
    returned = f"{len(outs)} results" if isinstance(outs, (tuple, list)) else "one result"
    raise StepError(message(
        WHO,
        [f"{name} (a tree of {counted(len(jax.tree.leaves(value)), 'leaf', 'leaves')}) is not among the "
         f"{returned} of step_fn" for name, value in missing],
        "A step returns the new value of every argument of its state, with its structure, shapes and dtypes.",
        f"Return ({', '.join(names)}, ...), or leave out of state= what the step does not update.",
        things="arguments"))  # fmt: skip


def changes(outs: Any, name: str, value: Any, there: Sequence[Like]) -> list[str]:
    """A line for each leaf returned with another shape or dtype, if one result has the argument's structure.

    Results that are like one of `there` are none: moments have the structure of the parameters.
    """
    fits = Like(value).in_structure
    if fits(0):  # One array: any result has its structure.
        return []
    nodes = jax.tree.leaves(outs, is_leaf=lambda x: fits(x) or any(like(x) for like in there))
    found = [node for node in nodes if fits(node) and not any(like(node) for like in there)]
    if len(found) != 1:
        return []
    named = zip(
        _call.leaf_paths(value, name),
        jax.tree.leaves(value),
        jax.tree.leaves(found[0]),
        strict=True,
    )
    return [
        f"{describe_leaf(path, old.shape, old.dtype)} became {new.dtype}{list(new.shape)}"
        for path, old, new in named
        if hasattr(new, "dtype") and not _one_type(old, new)
    ]
