# SPDX-License-Identifier: Apache-2.0
"""Which arguments of a step are its state, where the user did not say: the first, or those that come back."""

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
    """It cannot be told by what comes back which arguments are the state.

    Attributes:
      found: what was found of them.
      arguments: all that may be state, by name.
    """

    found: Found
    arguments: Mapping[str, Any]


class Elsewhere(Exception):
    """The state is not, or not only, the first argument: the step is to be read once more.

    Attributes:
      names: the arguments that are.
    """

    def __init__(self, names: tuple[str, ...]):
        super().__init__(names)
        self.names = names


def read(signature: Signature, outs: Any, state: Any, arrays: Mapping[str, Any]) -> None:
    """Whether a step for which nothing was said is `step(state, *args) -> (state, ...)`, or the state alone.

    It is, if its first argument comes back so, with two exceptions: optimizer state of optax comes back
    beside it, or nothing in it is trained and something else is, as in `step(key, params, batch)`.

    `outs`: what it returned, of tracers.
    `state`: its first argument.
    `arrays`: the others, by name.

    Raises:
      Elsewhere: it is not, and these arguments are its state.
      StepError: it cannot be told which arguments are.
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
        return  # Which is refused, by its leaves' names.
    found = find_arguments(outs, arguments)
    there = [Like(arguments[name]) for names in found for name in names]
    changed = [
        name for name, tree in arguments.items()
        if holds_optimizer_state(tree) and changes(outs, name, tree, there)
    ]  # fmt: skip
    if len(found.unclear) == 1 and not found.state and not found.alike:
        # Beside what may all be a batch it is the state; beside parameters a prediction is like its batch.
        beside = [tree for name, tree in arguments.items() if name not in found.unclear]
        found = Found(found.unclear if all(map(may_be_batch, beside)) else ())
    if found.unclear or found.alike:
        refuse(signature, arguments, found)
    if found.state or changed:
        raise Elsewhere((*found.state, *changed))


def read_updated(
    signature: Signature, outs: Any, state: Any, arrays: Mapping[str, Any], updated: Collection[str]
) -> None:
    """The same where the step is known to update arguments beside the first one.

    Raises:
      Elsewhere, StepError: as `read` does.
    """
    first, arguments = signature.state_names[0], _arguments(signature, state, arrays)
    found = find_arguments(outs, arguments, first)
    unclear = tuple([name for name in (*found.unclear, *found.alike) if name in updated])
    if unclear or signature.settled:
        refuse(signature, arguments, Found((first,), unclear or tuple(updated)))
    raise Elsewhere(found.state)


def read_trained(signature: Signature, trained: Any, state: Any, arrays: Mapping[str, Any]) -> None:
    """Whether an evaluation for which nothing was said takes the state of a training, or a part of it, first.

    `trained`: the training's state, of shapes.
    `state`: its first argument.
    `arrays`: the others, by name.

    Raises:
      Elsewhere: it takes it in these arguments.
    """
    found = [
        name for name, tree in _arguments(signature, state, arrays).items()
        if not jax.tree_util.all_leaves([tree]) and holds_floats(tree) and [*results_like(trained, tree)]
    ]  # fmt: skip
    if found and signature.state_names[0] not in found:
        raise Elsewhere(tuple(found))


def refuse(signature: Signature, arguments: Mapping[str, Any], found: Found) -> None:
    """Refuses a step of which some arguments that come back may be its state, or a batch.

    Raises:
      Unclear: in any case.
    """
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
    """Refuses a step whose state was found, and that computes these arguments of it without adding to them.

    Raises:
      StepError: in any case.
    """
    raise StepError(message(
        _call.WHO,
        [f"what comes back like {name} is computed without adding to it, as gradients are" for name in names],
        "A train step returns the new parameters.",
        f"Pass the whole step; or {signature.argnums(signature.state_names)} if it is the new state.",
        things="arguments"))  # fmt: skip


def leads(signature: Signature, outs: Any, state: Any, arrays: Collection[str]) -> bool:
    """Whether the step's first argument is of its state, and comes back first."""
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
    """All that may be state, in the order of the parameters; of what `in_specs` names the user has said."""
    named = {signature.state_names[0]: state, **arrays}
    return {name: named[name] for name in signature.in_order(named) if name not in signature.specs}


def _leads(outs: Any, state: Any) -> bool:
    like = Like(state)
    return like(outs) or (isinstance(outs, tuple | list) and bool(outs) and like(outs[0]))


def _leads_changed(x: Any, state: Any) -> bool:
    """Whether what comes first is the first argument in other dtypes, or plainly so in other shapes."""
    if not Like(state).in_structure(x):
        return False
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(x), strict=True))
    cast = holds_floats(state) and all(a.shape == getattr(b, "shape", ()) for a, b in pairs)
    return cast or not may_be_batch(state)
