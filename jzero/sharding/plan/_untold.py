# SPDX-License-Identifier: Apache-2.0
"""State that a step updates beside its first argument: it would be split as a batch is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.sharding.batch._trace import TracedStep
from jzero.tracing import _jaxpr
from jzero.tracing._returned import results_like
from jzero.tracing._types import Jaxpr


def _split(arrays: Mapping[str, Any], are_split: Iterable[bool]) -> dict[str, Any]:
    """The arguments of which a leaf is split, given that of each leaf."""
    left = iter(are_split)
    of = {name: itertools.islice(left, len(jax.tree.leaves(tree))) for name, tree in arrays.items()}
    return {name: arrays[name] for name, its in of.items() if any(list(its))}


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
        for at, node in results_like(outs, tree):
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
