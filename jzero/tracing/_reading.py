# SPDX-License-Identifier: Apache-2.0
"""Finds the arguments of a step that are its state, if not declared: the first, or those returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jzero._errors import StepError, describe_leaf, message
from jzero.tracing import _call
from jzero.tracing._returned import (
    Found,
    Like,
    changes,
    find_arguments,
    holds_floats,
    holds_optimizer_state,
    may_be_batch,
    results_like,
)
from jzero.tracing._signature import Signature
from jzero.tracing._state_arguments import parts

_SHOWN = 4  # leaves of an argument that a message names


class Unclear(StepError):
    """The results of a step do not tell which arguments are its state."""

    found: Found
    arguments: Mapping[str, Any]  # All that may be state, by name.


class Elsewhere(Exception):
    """The state is in the arguments `names`, not (only) the first one: the step is to be traced again."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__(names)
        self.names = names


def read(signature: Signature, outs: Any, state: Any, arrays: Mapping[str, Any]) -> None:
    """Checks that a step is `step(state, *args) -> (state, ...)`, or returns the state alone.

    It is if its first argument is returned first, with two exceptions: optax's optimizer state is returned
    beside it, or nothing in it is trained and something else is, as in `step(key, params, batch)`. `outs` are
    the step's results, `state` is its first argument, `arrays` are the others.

    Raises:
      Elsewhere: other arguments are the state.
      Unclear: several choices are possible.
    """
    first, arguments = signature.state_names[0], _arguments(signature, state, arrays)
    if _leads(outs, state):
        updated = [
            name for name, tree in arrays.items()
            if holds_optimizer_state(tree) and [*results_like(outs, tree)]
        ]  # fmt: skip
        trains = holds_floats(state)
        if updated or not (trains or signature.settled):
            found = find_arguments(outs, arguments, first if trains else None)
            is_clear = not (found.unclear or found.alike)
            if updated and not is_clear:
                refuse(signature, arguments, found)
            if found.state and is_clear:
                raise Elsewhere(found.state)
        return
    if isinstance(outs, tuple | list) and outs and _leads_changed(outs[0], state):
        return  # It is refused later, with the names of the changed leaves.
    found = find_arguments(outs, arguments)
    there = [Like(arguments[name]) for names in found for name in names]
    changed = [
        name for name, tree in arguments.items()
        if holds_optimizer_state(tree) and changes(outs, name, tree, there)
    ]  # fmt: skip
    if len(found.unclear) == 1 and not found.state and not found.alike:
        # It is the state if all others may be a batch; beside parameters it may be a batch like its
        # prediction.
        beside = [tree for name, tree in arguments.items() if name not in found.unclear]
        found = Found(found.unclear if all(map(may_be_batch, beside)) else ())
    if found.unclear or found.alike:
        refuse(signature, arguments, found)
    if found.state or changed:
        raise Elsewhere((*found.state, *changed))


def read_updated(
    signature: Signature, outs: Any, state: Any, arrays: Mapping[str, Any], updated: Collection[str]
) -> None:
    """Like `read`, for a step that is known to update the arguments `updated` beside the first one."""
    first, arguments = signature.state_names[0], _arguments(signature, state, arrays)
    found = find_arguments(outs, arguments, first)
    unclear = tuple([name for name in (*found.unclear, *found.alike) if name in updated])
    if unclear or signature.settled:
        refuse(signature, arguments, Found((first,), unclear or tuple(updated)))
    raise Elsewhere(found.state)


def read_trained(signature: Signature, trained: Any, state: Any, arrays: Mapping[str, Any]) -> None:
    """Like `read`, for an evaluation, whose state is like `trained`, a training's state, or a part of it."""
    found = [
        name for name, tree in _arguments(signature, state, arrays).items()
        if not jax.tree_util.all_leaves([tree]) and holds_floats(tree) and [*results_like(trained, tree)]
    ]  # fmt: skip
    if found and signature.state_names[0] not in found:
        raise Elsewhere(tuple(found))


def refuse(signature: Signature, arguments: Mapping[str, Any], found: Found) -> None:
    """Raises `Unclear` for a step whose returned arguments may be its state, or a batch."""
    lines = [
        f"{name} comes back, {_form(tree)}"
        + ", and may be a batch" * (name in found.unclear)
        + ", or an argument like it does" * (name in found.alike)
        for name, tree in arguments.items()
        if any(name in names for names in found)
    ]
    with_unclear = [*found.state, *found.unclear]
    choices = [[*with_unclear, name] for name in found.alike]
    if not choices:
        fewer = [[*found.state]] if found.state else [[name] for name in found.unclear]
        choices = [*fewer, with_unclear]
    shown = [*map(signature.argnums, choices)]
    error = Unclear(message(
        _call.WHO, lines,
        "The state is passed and returned with the same structure, shapes and dtypes; the rest is the batch, "
        "which is sharded over the devices along its rows.",
        f"Say what is state: {', or '.join(shown)}.", things="arguments", shown=8))  # fmt: skip
    error.found, error.arguments = found, arguments
    raise error


def refuse_anew(signature: Signature, names: Sequence[str]) -> None:
    """Refuses a step whose new values of `names`, found to be state, are computed without the old ones."""
    raise StepError(message(
        _call.WHO,
        [f"what comes back like {name} is computed without adding to it, as gradients are" for name in names],
        "A train step returns the new parameters.",
        f"Pass the whole step; or {signature.argnums(signature.state_names)} if it is the new state.",
        things="arguments"))  # fmt: skip


def leads(signature: Signature, outs: Any, state: Any, arrays: Collection[str]) -> bool:
    """Whether the step's first argument is in its state, and is returned first."""
    names, (_, first) = signature.state_names, parts(state)[0]
    return signature.in_order([*names, *arrays])[0] == names[0] and _leads(outs, first)


def _form(tree: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(tree)
    shown = [
        describe_leaf(jax.tree_util.keystr(path), leaf.shape, leaf.dtype).strip()
        for path, leaf in named[:_SHOWN]
    ]
    if len(named) == 1:
        return shown[0]
    more = f", and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return f"a {type(tree).__name__} of {len(named)} leaves ({', '.join(shown)}{more})"


def _arguments(signature: Signature, state: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments that may be state, in the order of the parameters. Those in `in_specs` are batch."""
    named = {signature.state_names[0]: state, **arrays}
    return {name: named[name] for name in signature.in_order(named) if name not in signature.specs}


def _leads(outs: Any, state: Any) -> bool:
    like = Like(state)
    return like(outs) or (isinstance(outs, tuple | list) and bool(outs) and like(outs[0]))


def _leads_changed(x: Any, state: Any) -> bool:
    """Whether `x` is `state` in other dtypes, or in other shapes while it cannot be a batch."""
    if not Like(state).in_structure(x):
        return False
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(x), strict=True))
    cast = holds_floats(state) and all(a.shape == getattr(b, "shape", ()) for a, b in pairs)
    return cast or not may_be_batch(state)
