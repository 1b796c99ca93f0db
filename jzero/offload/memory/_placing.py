# SPDX-License-Identifier: Apache-2.0
"""Puts arrays where a program wants them, without consuming what the user still has."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jzero._errors import CONSUMED, BatchError, StateError, describe_leaf, first_of, message
from jzero._in_turn import groups
from jzero._memory_kinds import DEVICE, HOST, NVME, HostNeed
from jzero.offload.memory import _coding, _host_storage, _leaf_array, _storage
from jzero.offload.memory._addresses import is_key
from jzero.offload.memory._filling import Filling
from jzero.offload.memory._leaf_array import LeafArray, spans_processes, storage_of
from jzero.offload.memory._pinned_pool import bytes_here
from jzero.offload.memory._storage import HostPlacement, Storage
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER
from jzero.tracing import _call, _jaxpr, _rewrite

WHO = _call.WHO
# Bytes on each device of leaves for the host that are made together, where no policy sets a limit.
_BORN_TOGETHER = 2**28
_NAMES = {PARAMETER: "parameters", OPTIMIZER: "optimizer state", OTHER: "state"}


def as_arrays(*lists: Sequence[Any]) -> list[list[Any]]:
    return [[jnp.asarray(leaf) for leaf in leaves] for leaves in lists]


def pad(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    return [_leaf_array.pad(x, leaf.padded_shape) for x, leaf in zip(leaves, plans, strict=True)]


class Place(NamedTuple):
    plan: LeafPlan
    sharding: NamedSharding  # of a leaf on the host, as it is stored on its way there
    placement: HostPlacement | None  # of a leaf on the host; None for others


def places(
    plans: Sequence[LeafPlan], shardings: Sequence[NamedSharding], axes: tuple[str, ...]
) -> list[Place]:
    """Where each leaf is stored; replicas over other axes than `axes` share what is on the host."""
    found = []
    for plan, sharding in zip(plans, shardings, strict=True):
        hosted = plan.tier in (HOST, NVME)
        placement = _host_placement(plan, sharding, axes) if hosted else None
        found.append(Place(plan, sharding, placement))
    return found


@functools.cache
def _host_placement(
    plan: LeafPlan, sharding: NamedSharding, axes: tuple[str, ...]
) -> HostPlacement:
    stored = NamedSharding(sharding.mesh, sharding.spec)
    devices = _storage.keepers(sharding.mesh, axes)
    return HostPlacement(plan.shape, plan.padded_shape, jnp.dtype(plan.dtype), stored, devices)


def host_needs(places: Sequence[Place], leaves: Sequence[Any] | None = None) -> list[HostNeed]:
    """What this process needs on the host for a state, except for leaves that are stored there already."""
    there, found = leaves or [None] * len(places), collections.Counter[tuple[str, str]]()
    for x, target in zip(there, places, strict=True):
        plan = target.plan
        if plan.tier not in (DEVICE, NVME) and not _is_there(x, target):
            found[_NAMES[plan.role], plan.tier] += _bytes_here(target)
    return [HostNeed(*key, nbytes) for key, nbytes in found.items()]


def _is_there(x: Any, target: Place) -> bool:
    if target.placement is not None:
        return _host_storage.is_stored_in(x, target.placement)
    whole = storage_of(x)
    return np.shape(whole) == target.plan.padded_shape and has_sharding(whole, target.sharding)


def _bytes_here(target: Place) -> int:
    """Bytes of a stored leaf on the host of this process's devices."""
    plan, sharding, placement = target
    if placement is not None:
        return placement.nbytes
    return bytes_here(plan.padded_shape, plan.dtype, sharding)


def place_state(
    leaves: Sequence[Any], places: Sequence[Place], held: Collection[int] = (),
    filling: Filling | None = None, errors: dict[int, Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Each leaf of a state in its place, padded; those that are there already pass through untouched.

    A leaf that is to be quantized is quantized by itself: no two are whole on the devices. Leaves that nobody
    reads are None. `held` are the indices of leaves that every process has whole, and has compared. `filling`
    writes leaves to files, unless these are there already. `errors` receives those of quantized leaves, by
    index.
    """
    out, held = list(leaves), set(held)
    here = [i for i, target in enumerate(places) if target.placement is None and out[i] is not None]
    for i, (leaf, (plan, sharding, placement)) in enumerate(zip(leaves, places, strict=True)):
        if leaf is None:
            continue
        if plan.codes is not None and errors is not None and i not in errors:
            leaf, errors[i] = _in_codes(leaf, plan, sharding, i in held)
            held.discard(i)
        if placement is not None:
            if plan.tier == HOST:
                out[i] = _host_storage.on_host(leaf, placement)
            else:
                out[i] = filling.put(leaf, plan.path, placement) if filling else storage_of(leaf)
            continue
        out[i] = _leaf_array.pad(_from_host(leaf, plan, sharding), plan.padded_shape)
        if i in held:
            out[i] = take_shards(out[i], sharding)
        elif plan.codes is not None and not has_sharding(out[i], sharding):
            out[i] = jax.block_until_ready(jax.device_put(out[i], sharding))
    shardings = [places[i].sharding for i in here]
    placed = place([out[i] for i in here], shardings, lambda: [places[i].plan.path for i in here])
    for i, x in zip(here, placed, strict=True):
        out[i] = x
    return out


def _in_codes(
    leaf: Any, plan: LeafPlan, sharding: NamedSharding, held: bool
) -> tuple[jax.Array, jax.Array]:
    """A leaf's rows on the devices, and its error; see `_coding.encoded`."""
    form, exact = plan.codes, plan.decoded
    assert form is not None
    stored = NamedSharding(sharding.mesh, sharding.spec)
    there = _coding.plain_sharding(form, stored)
    x = _leaf_array.pad(_from_host(leaf, exact, there), exact.padded_shape)
    x = take_shards(x, there) if held else x
    (x,) = place([x], [there], lambda: [plan.path])
    return jax.block_until_ready(_coding.encoded(x, form, stored))


def _from_host(leaf: Any, plan: LeafPlan, sharding: NamedSharding) -> Any:
    """A leaf as JAX or NumPy has it; an offloaded one in its new place, if this process has all of it."""
    storage = storage_of(leaf)
    if not isinstance(storage, Storage):
        return leaf
    if leaf.is_fully_addressable:
        return _storage.on_devices(storage, plan.padded_shape, sharding)
    stored = storage.sharding
    way = NamedSharding(stored.mesh, stored.spec, memory_kind=sharding.memory_kind)
    return _leaf_array.wrap(_storage.on_devices(storage, sharding=way), leaf.shape)


def wrap(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """Each leaf of a state as a user gets it: a `LeafArray` if it is no array of its shape."""
    return [
        x if leaf.codes else _leaf_array.wrap(x, leaf.shape)
        for x, leaf in zip(leaves, plans, strict=True)
    ]


def born(
    traced: _jaxpr.Traced,
    places: Sequence[Place],
    device_bytes: int,
    filling: Filling | None = None,
) -> list[Any]:
    """The results of a traced function of no arguments, each leaf made in its layout.

    One program makes all that is stored on the devices. Of other leaves, one program makes at most
    `device_bytes` (256 MiB if that is 0), which are on the host before the next runs; each computes again
    what it needs of others.
    """
    made: dict[int, Any] = {}
    if filling:
        filling.start([None] * len(places))
    for group in _groups([target.plan for target in places], device_bytes or _BORN_TOGETHER):
        wanted = [traced.jaxpr.outvars[i] for i in group]
        targets = [places[i] for i in group]
        part = _rewrite.excerpt(traced.jaxpr, wanted, effects=targets[0].plan.tier == DEVICE)
        arrays = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        shardings = [target.sharding.with_memory_kind(DEVICE) for target in targets]

        def run(consts: list[Any], part: Any = part, targets: Sequence[Place] = targets) -> Any:
            return pad(part.run(*consts), [target.plan for target in targets])

        with jax.transfer_guard("allow"):  # What it closes over, as a key, may be on one device.
            fresh = jax.jit(run, out_shardings=shardings)([arrays[var] for var in part.reads])
        fresh = jax.block_until_ready(place_state(fresh, targets, filling=filling))
        made |= zip(group, fresh, strict=True)
    return [made[i] for i in range(len(places))]


def _groups(plans: Sequence[LeafPlan], device_bytes: int) -> list[list[int]]:
    """Leaves that are made together: all on the devices, then others up to `device_bytes`."""
    here = [i for i, plan in enumerate(plans) if plan.tier == DEVICE]
    there = [i for i, plan in enumerate(plans) if plan.tier != DEVICE]
    rest = groups(there, device_bytes, lambda i: plans[i].nbytes_per_device)
    return [here, *rest] if here else list(rest)


def unpad(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """Under an outer `jax.jit`: each leaf of a state in its true shape."""
    return [_leaf_array.unpad(x, leaf.shape) for x, leaf in zip(leaves, plans, strict=True)]


def place(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Callable[[], Sequence[str]]
) -> list[Any]:
    """Each leaf in its sharding; refuses leaves of which processes have different values."""
    out = list(leaves)
    moves = [i for i, leaf in enumerate(leaves) if not has_sharding(leaf, shardings[i])]
    if moves:
        try:
            sources = [_own(leaves[i], shardings[i]) for i in moves]
        except OverflowError as error:  # Of a Python number.
            big = [i for i in moves if isinstance(leaves[i], int) and leaves[i].bit_length() > 31]
            raise BatchError(message(
                WHO, [f"{paths()[i]} is {leaves[i]}" for i in big], f"It fits no array: {error}.",
                "Pass a float, or set jax.config.update('jax_enable_x64', True).")) from None  # fmt: skip
        targets = [shardings[i] for i in moves]
        if targets[0].is_fully_addressable:
            placed = jax.device_put(sources, targets)
        else:
            names = paths()
            placed = [
                _put_across(x, s, names[i]) for i, x, s in zip(moves, sources, targets, strict=True)
            ]
        for i, x in zip(moves, placed, strict=True):
            out[i] = x
    return out


def apart(
    state: list[Any], arrays: list[Any], plans: Sequence[LeafPlan]
) -> tuple[list[Any], list[Any]]:
    """Leaves and arguments with copies for those that come twice, as a program donates an array once."""
    ids = set(map(id, state))
    if not ids.isdisjoint(map(id, arrays)):
        arrays = [_copy(x) if id(x) in ids else x for x in arrays]
    if len(ids) < len(state):
        first = {id(x): i for i, x in reversed(list(enumerate(state)))}
        if twice := [(i, first[id(x)]) for i, x in enumerate(state)
                    if first[id(x)] != i and isinstance(x, Storage)]:  # fmt: skip
            raise StateError(message(
                WHO, [f"{plans[i].path} is the array of {plans[k].path}" for i, k in twice],
                "A leaf on the host or in files has memory of its own, which a step writes over.",
                "Put a copy there: jax.tree.map(jnp.copy, ...)."))  # fmt: skip
        state = [x if first[id(x)] == i else _copy(x) for i, x in enumerate(state)]
    return state, arrays


def _copy(leaf: Any) -> Any:
    """A copy; an offloaded leaf, which reports itself when consumed, as it is."""
    return copied([leaf])[0] if isinstance(leaf, jax.Array) else leaf


def copied(leaves: list[jax.Array], sharding: Sharding | None = None) -> list[jax.Array]:
    """Arrays of the same values in memory of their own; in their own shardings by default."""
    if not leaves:
        return []
    made: list[jax.Array] = jax.jit(
        _copied, out_shardings=sharding or [x.sharding for x in leaves]
    )(leaves)
    return made


def _copied(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in leaves]


def _put_across(leaf: Any, sharding: NamedSharding, path: str) -> Any:
    """`jax.device_put` to devices of several processes, which must all have the same whole leaf."""
    if is_key(leaf):
        data = _put_across(jax.random.key_data(leaf), sharding, path)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    what = describe_leaf(path, leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array) and leaf.committed and leaf.is_fully_addressable:
        raise _unlike(f"{what} is on devices of process {jax.process_index()} alone")
    try:
        return jax.device_put(leaf, sharding)
    except AssertionError as error:  # JAX gathers it from all processes to compare.
        raise _unlike(f"{what} has other values on other processes") from error


def _unlike(found: str) -> BatchError:
    return BatchError(message(
        WHO, found, "A NumPy array, or a JAX array on no device in particular, stands for the whole: "
        "every process has the same one.", "Make one array of every process's own rows: jax.make_array_"
        "from_process_local_data(jax.NamedSharding(mesh, jax.P(mesh.axis_names)), rows)."))  # fmt: skip


def held_whole(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[int]:
    """The indices of leaves that this process has whole, though several processes will share them."""
    if not leaves or shardings[0].is_fully_addressable:
        return []
    given = [(i, leaf) for i, leaf in enumerate(leaves) if leaf is not None]
    return [i for i, leaf in given if not spans_processes(leaf)]


def take_shards(leaf: Any, sharding: NamedSharding) -> Any:
    """An array over processes that all have `leaf` whole, of which each copies its part."""
    # What is weak is a Python number, mostly: device_put keeps its type.
    if _call.abstract_leaf(leaf).weak_type or spans_processes(leaf):
        return leaf
    if is_key(leaf):
        data = take_shards(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # `jax.device_put` would gather the leaf from all processes onto every device, to compare them.
    host = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _own(leaf: Any, sharding: NamedSharding) -> Any:
    """`leaf`, copied if its buffer would become part of the placed array, which a step donates."""
    if isinstance(leaf, jax.Array):
        if not leaf.committed:  # and a copy of it shall not be
            return jnp.copy(leaf) if sharding.is_fully_replicated else leaf
        stays = sharding.is_fully_replicated or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        return copied([leaf])[0] if stays else leaf
    return jax.device_put(leaf) if jnp.isscalar(leaf) else leaf


def has_sharding(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf is one of JAX's own arrays, in this sharding."""
    if isinstance(leaf, LeafArray) or not isinstance(leaf, jax.Array):
        return False
    if not isinstance(leaf.sharding, NamedSharding):
        return False
    if leaf.sharding == sharding:
        return True
    # XLA ends the process where one program takes arrays of meshes of several shapes beside its own axes.
    old, new = leaf.sharding.mesh, sharding.mesh
    alike = (old.axis_types, old.axis_sizes) == (new.axis_types, new.axis_sizes)
    return alike and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def check_alive(state: Any, leaves: Sequence[Any], who: str = WHO) -> None:
    dead = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves]
    if any(dead):  # Paths cost more than the check, which every step makes.
        paths = _call.leaf_paths(state, "state")
        gone = [path for path, is_dead in zip(paths, dead, strict=True) if is_dead]
        num = sum(leaf is not None for leaf in leaves)
        raise StateError(message(
            who, f"{len(gone)} of {num} leaves were already donated: {first_of(gone)}", *CONSUMED,
        ))  # fmt: skip


def check_flushed(
    who: str, state: Any, leaves: Sequence[Any], places: Sequence[Place] | None = None
) -> None:
    """Refuses to read leaves that wait for a delayed update, unless they stay in their `places`."""
    late = [
        i
        for i, leaf in enumerate(leaves)
        if _host_storage.pending_of(leaf) is not None
        and not (places and _host_storage.is_stored_in(leaf, places[i].placement))
    ]  # fmt: skip
    if late:
        paths = _call.leaf_paths(state, "state")
        raise StateError(message(
            who, [f"{paths[i]} still waits for the last step's update" for i in late],
            "With HostCPU(delayed_update=True) a leaf is updated while the next step runs.",
            "Call state = train_step.flush(state) first.", shown=3))  # fmt: skip
