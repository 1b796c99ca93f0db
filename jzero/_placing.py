"""Puts arrays where a program wants them, without consuming what the user still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import _call, _jaxpr, _padded
from jzero._errors import StateError, message
from jzero.sharding._plan import DEVICE, LeafPlan

WHO = _call.WHO


def as_arrays(*lists: Sequence[Any]) -> list[list[Any]]:
    """Every leaf as a JAX array or tracer."""
    return [[jnp.asarray(leaf) for leaf in leaves] for leaves in lists]


def pad(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """Each leaf of a state as a plain array of the shape in which it rests."""
    return [_padded.pad(x, leaf.padded_shape) for x, leaf in zip(leaves, plans, strict=True)]


def wrap(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """Each leaf of a state as a user gets it: a `PaddedArray` if it has padding."""
    return [_padded.wrap(x, leaf.shape) for x, leaf in zip(leaves, plans, strict=True)]


def born(
    traced: _jaxpr.Traced, plans: Sequence[LeafPlan], shardings: Sequence[NamedSharding],
    device_bytes: int,
) -> list[Any]:  # fmt: skip
    """What a traced function of no arguments returns, each leaf made in its layout.

    What rests on the devices is made by one program. Of what does not, at most `device_bytes` are made by
    one, and lie on the host before the next runs; each computes again what it needs of the others.
    """
    made: dict[int, Any] = {}
    for group in _groups(plans, device_bytes):
        wanted = [traced.jaxpr.outvars[i] for i in group]
        part = _jaxpr.part(traced.jaxpr, wanted, effects=plans[group[0]].tier == DEVICE)
        arrays = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        places = [shardings[i].with_memory_kind(DEVICE) for i in group]

        def run(consts: list[Any], part: Any = part, group: Sequence[int] = group) -> list[Any]:
            return pad(part.run(*consts), [plans[i] for i in group])

        fresh = jax.jit(run, out_shardings=places)([arrays[var] for var in part.reads])
        fresh = jax.block_until_ready(place(fresh, [shardings[i] for i in group]))
        made |= zip(group, fresh, strict=True)
    return [made[i] for i in range(len(plans))]


def _groups(plans: Sequence[LeafPlan], device_bytes: int) -> list[list[int]]:
    """Leaves that are made together: all that rest on the devices, then others up to so many bytes."""
    groups = [[i for i, plan in enumerate(plans) if plan.tier == DEVICE], []]
    total = 0
    for i, plan in enumerate(plans):
        if plan.tier == DEVICE:
            continue
        total += plan.nbytes_per_device
        if total > device_bytes and groups[-1]:
            groups.append([])
            total = plan.nbytes_per_device
        groups[-1].append(i)
    return [group for group in groups if group]


def constrain(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Under an outer `jax.jit`: over Explicit mesh axes, where JAX moves nothing by itself, reshards."""
    return [
        jax.reshard(x, s) if AxisType.Explicit in s.mesh.axis_types else x
        for x, s in zip(leaves, shardings, strict=True)
    ]


def unpad(
    leaves: Sequence[Any], plans: Sequence[LeafPlan], shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Under an outer `jax.jit`: each leaf of a state in its true shape; a padded one becomes full."""
    full = [
        NamedSharding(s.mesh, P()) if p.padding else s
        for p, s in zip(plans, shardings, strict=True)
    ]
    leaves = constrain(leaves, full)
    return [_padded.unpad(x, leaf.shape) for x, leaf in zip(leaves, plans, strict=True)]


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
    arrays = (jax.Array, _padded.PaddedArray)
    dead = [isinstance(leaf, arrays) and leaf.is_deleted() for leaf in leaves]
    if any(dead):  # Paths cost more than the check, which every step makes.
        paths = _call.leaf_paths(state, "state")
        gone = [path for path, is_dead in zip(paths, dead, strict=True) if is_dead]
        shown = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
        raise StateError(message(
            WHO, f"{len(gone)} leaves were already donated: {shown}",
            "A step consumes its state.", "Use the state that the last step returned."))  # fmt: skip
