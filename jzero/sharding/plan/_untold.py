# SPDX-License-Identifier: Apache-2.0
"""State that a step updates beside its state, without having said so: it would be split as a batch is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jzero._errors import StepError, message
from jzero.sharding.batch._trace import TracedStep
from jzero.tracing import _call, _jaxpr
from jzero.tracing._returned import Like
from jzero.tracing._signature import Signature
from jzero.tracing._types import Jaxpr


def check_returned(signature: Signature, outs: Any, arrays: Mapping[str, Any]) -> None:
    """Refuses optimizer state of optax that comes back and is not said to be state.

    Args:
      signature: how the step is called.
      outs: what it returned, of tracers.
      arrays: its arguments beside the state, by name.

    Raises:
      StepError: it is none.
    """
    refuse(signature, [
        name for name, tree in arrays.items() if holds_optimizer_state(tree) and [*_results(outs, tree)]
    ])  # fmt: skip


def check_split(signature: Signature, arrays: Mapping[str, Any], specs: Sequence[P]) -> None:
    """The same of a step with collectives of its own, before it sees a part of each leaf that is split."""
    trees = _split(arrays, map(any, specs))
    refuse(signature, [name for name, tree in trees.items() if holds_optimizer_state(tree)])


def _split(arrays: Mapping[str, Any], are_split: Iterable[bool]) -> dict[str, Any]:
    """The arguments of which a leaf is split, given that of each leaf."""
    left = iter(are_split)
    of = {name: itertools.islice(left, len(jax.tree.leaves(tree))) for name, tree in arrays.items()}
    return {name: arrays[name] for name, its in of.items() if any(list(its))}


def holds_optimizer_state(tree: Any) -> bool:
    """Whether a tree has nodes of optax's own types, and arrays that could be split."""

    def is_optax(x: Any) -> bool:
        return type(x).__module__.partition(".")[0] == "optax"

    nodes = jax.tree.leaves(tree, is_leaf=is_optax)
    return any(leaf.shape for node in nodes if is_optax(node) for leaf in jax.tree.leaves(node))


def like_state(
    traced: TracedStep, state: Any, arrays: Mapping[str, Any], are_split: Iterable[bool]
) -> dict[str, list[range]]:
    """Arguments that a step may update as state, by what it says: an average of the parameters, moments.

    They are split, their floats have shapes that the state has, and they come back, computed of themselves,
    of the state and of another argument. A hidden state of a recurrent network may be all of this, by chance.

    Args:
      traced: the step.
      state: its state, of shapes.
      arrays: its arguments beside the state, of shapes, by name.
      are_split: whether each of their leaves is, by its rows.

    Returns:
      For each, the numbers of the leaves of those results.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    split = _split(arrays, are_split)
    suspects = {name: tree for name, tree in split.items() if _has_only(tree, shapes)}
    if not suspects:
        return {}
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    inputs, num_state = [("", state), *arrays.items()], len(jax.tree.leaves(state))
    owners = [name for name, tree in inputs for _ in jax.tree.leaves(tree)]
    sources = _sources(traced.frame.jaxpr, owners)
    found: dict[str, list[range]] = {}
    for name, tree in suspects.items():
        for at, node in _results(outs, tree):
            numbers = range(at, at + len(jax.tree.leaves(node)))
            of = set[str]().union(*(sources[i] for i in numbers))
            if at >= num_state and {"", name} < of:  # The state comes first.
                found.setdefault(name, []).append(numbers)
    return found


def _has_only(tree: Any, shapes: Collection[tuple[int, ...]]) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape]
    return bool(leaves) and all(
        leaf.shape in shapes and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves
    )


def _results(outs: Any, tree: Any) -> Iterator[tuple[int, Any]]:
    """What a step returned that is like an argument, with the number of its first leaf."""
    at, like = 0, Like(tree)
    for node in jax.tree.leaves(outs, is_leaf=like):
        if like(node):
            yield at, node
        at += len(jax.tree.leaves(node))


def _sources(jaxpr: Jaxpr, owners: Sequence[str]) -> list[set[str]]:
    """Of which arguments each output is computed; an equation is, of all that it reads."""
    known: dict[Any, frozenset[str]] = {
        var: frozenset([owner]) for var, owner in zip(jaxpr.invars, owners, strict=True)
    }

    def read(atom: Any) -> frozenset[str]:
        return frozenset() if _jaxpr.is_literal(atom) else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        of = frozenset[str]().union(*map(read, eqn.invars))
        known |= dict.fromkeys(eqn.outvars, of)
    return [set(read(atom)) for atom in jaxpr.outvars]


def check_like_state(
    signature: Signature, suspects: Mapping[str, list[range]],
    has_rows: Callable[[str, range], bool],
) -> None:  # fmt: skip
    """Refuses those arguments that come back without rows of the batch: hidden states have them.

    Args:
      signature: how the step is called.
      suspects: as `like_state` has them.
      has_rows: whether results have rows of the batch, if an argument has none.

    Raises:
      StepError: there are some.
    """
    refuse(signature, [
        name for name, results in suspects.items()
        if any(not has_rows(name, numbers) for numbers in results)
    ])  # fmt: skip


def refuse(signature: Signature, names: Sequence[str]) -> None:
    """Refuses a step that updates these arguments beside its state.

    Raises:
      StepError: unless there are none.
    """
    if names and signature.takes_objects:
        given = ", ".join(signature.state_names)
        raise StepError(message(
            _call.WHO, [f"{name} is updated and comes back, beside NNX objects ({given})" for name in names],
            "Where a step takes NNX objects they are its state, and all else is the batch.",
            f"Write step_fn, state = jzero.from_nnx(step, {given}), and say of step_fn what else is state: "
            f"state_argnames=('state', {', '.join(map(repr, names))}).", things="arguments"))  # fmt: skip
    if names:
        argnums = signature.argnums([*signature.state_names, *names])
        raise StepError(message(
            _call.WHO,
            [f"{name} is updated and comes back as the state does, and only "
             f"{signature.state_names[0]} is said to be state" for name in names],
            "Arguments beside the state are the batch, and split over the devices by their rows.",
            f"Say what is state: {argnums}; or, if nothing else is, state_argnums=0.",
            things="arguments"))  # fmt: skip
