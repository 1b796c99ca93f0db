"""Puts arrays where a program wants them, without consuming what the user still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jzero import _call
from jzero._errors import StateError, message

WHO = _call.WHO


def as_arrays(*lists: Sequence[Any]) -> list[list[Any]]:
    """Every leaf as a JAX array or tracer."""
    return [[jnp.asarray(leaf) for leaf in leaves] for leaves in lists]


def place(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Each leaf in its sharding; those that already are pass through untouched."""
    out = list(leaves)
    moves = [i for i, leaf in enumerate(leaves) if not _lies_right(leaf, shardings[i])]
    if moves:
        sources = [_own(leaves[i], shardings[i]) for i in moves]
        placed = jax.device_put(sources, [shardings[i] for i in moves])
        for i, x in zip(moves, placed, strict=True):
            out[i] = x
    return out


def _own(leaf: Any, sharding: NamedSharding) -> Any:
    """`leaf`, copied if its buffer would become a part of the placed array.

    A step donates what was placed, and must not consume what the user still holds.
    """
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf) if sharding.is_fully_replicated else leaf
    return jnp.asarray(leaf) if jnp.isscalar(leaf) else leaf


def _lies_right(leaf: Any, sharding: NamedSharding) -> bool:
    if not (isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)):
        return False
    return leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def check_alive(state: Any) -> None:
    """Refuses a state whose arrays an earlier step has consumed."""
    leaves = jax.tree.leaves(state)
    dead = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves]
    if any(dead):  # Paths cost more than the check, which every step makes.
        paths = _call.leaf_paths(state, "state")
        gone = [path for path, is_dead in zip(paths, dead, strict=True) if is_dead]
        shown = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
        raise StateError(message(
            WHO, f"{len(gone)} leaves were already donated: {shown}",
            "A step consumes its state.", "Use the state that the last step returned."))  # fmt: skip
