# SPDX-License-Identifier: Apache-2.0
"""Which arguments of a step are its state, where the user did not say: the first, or those that come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    results_like,
)
from jzero.tracing._signature import Signature

_SHOWN = 4  # leaves of an argument that a message names


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

    Args:
      signature: how the step is called.
      outs: what it returned, of tracers.
      state: its first argument.
      arrays: the others, by name.

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
            if updated and found.unclear:
                refuse(signature, arguments, found)
            if found.state and not found.unclear:
                raise Elsewhere(found.state)
        return
    if isinstance(outs, tuple | list) and outs and _has_structure_of(state, outs[0]):
        return  # It led with another shape or dtype, which is refused by its leaves' names.
    found = find_arguments(outs, arguments)
    there = [Like(arguments[name]) for name in [*found.state, *found.unclear]]
    changed = [
        name for name, tree in arguments.items()
        if holds_optimizer_state(tree) and changes(outs, name, tree, there)
    ]  # fmt: skip
    if len(found.unclear) == 1 and not found.state and _has_rows(arguments, found.unclear):
        found = Found(found.unclear, ())
    if found.unclear:
        refuse(signature, arguments, found)
    if found.state:
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
    unclear = tuple([name for name in found.unclear if name in updated])
    if unclear:
        refuse(signature, arguments, Found(found.state, unclear))
    raise Elsewhere(found.state)


def refuse(signature: Signature, arguments: Mapping[str, Any], found: Found) -> None:
    """Refuses a step of which some arguments that come back may be its state, or a batch.

    Raises:
      StepError: in any case.
    """
    both = [name for name in arguments if name in {*found.state, *found.unclear}]
    lines = [
        f"{name} comes back, {_form(arguments[name])}" + ", and may be a batch" * (name in found.unclear)
        for name in both
    ]  # fmt: skip
    without = (
        f"{signature.argnums(found.state)}, or " if found.state else "of these arguments, for all "
    )
    raise StepError(message(
        _call.WHO, lines,
        "The state is what a step takes and returns with its structure, shapes and dtypes; the rest is the "
        "batch, which is split over the devices by its rows.",
        f"Say what is state: {without}{signature.argnums(both)}.",
        things="arguments", shown=8))  # fmt: skip


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


def _has_structure_of(state: Any, x: Any) -> bool:
    return not jax.tree_util.all_leaves([state]) and Like(state).in_structure(x)


def _has_rows(arguments: Mapping[str, Any], but: Collection[str]) -> bool:
    """Whether each other argument can be a batch: its arrays have one leading dim."""
    return all(
        len({x.shape[0] for x in jax.tree.leaves(tree) if x.shape}) <= 1
        for name, tree in arguments.items()
        if name not in but
    )
