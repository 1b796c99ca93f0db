# SPDX-License-Identifier: Apache-2.0
"""Leaves in pinned memory: read and written by address, and donated."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jzero._errors import STEP, describe_leaf, message, warn
from jzero._memory_kinds import PINNED
from jzero._quantities import readable_bytes
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _array_memory

# XLA's message for an array with a view.
_REFUSED = "Donation requested for buffer with external reference"


class LeafMemory(NamedTuple):
    buffers: list[np.ndarray]  # of the shards that the host updates
    replicas: list[list[np.ndarray]]  # of each shard, on other devices

    @classmethod
    def of(cls, leaf: Any, devices: Sequence[jax.Device]) -> LeafMemory:
        """For an array or a `HostStorage`, of which these devices have all different shards."""
        if not isinstance(leaf, jax.Array):
            return cls([*leaf.buffers], [[] for _ in leaf.buffers])
        # A copy that still runs would overwrite what the host writes.
        jax.block_until_ready(leaf)
        shards = {shard.device: shard for shard in leaf.addressable_shards}
        buffers = [view(shards[device].data) for device in devices]
        replicas: list[list[np.ndarray]] = [[] for _ in devices]
        first = {str(shards[device].index): i for i, device in reversed([*enumerate(devices)])}
        for device, shard in shards.items():
            if device not in devices:
                replicas[first[str(shard.index)]].append(view(shard.data))
        return cls(buffers, replicas)

    def complete(self, padding: Sequence[tuple[slice, ...] | None]) -> None:
        for buffer, others, index in zip(self.buffers, self.replicas, padding, strict=True):
            if index is not None:
                buffer[index] = 0
            for other in others:
                np.copyto(other, buffer)


def view(x: jax.Array) -> np.ndarray:
    """The memory of an array on the host, to be written."""
    if not x.nbytes:
        return np.zeros(x.shape, x.dtype)
    memory: Any = (ctypes.c_char * x.nbytes).from_address(x.unsafe_buffer_pointer())
    memory.owner = x  # A view keeps the memory alive, as in a thread that still writes.
    return np.frombuffer(memory, x.dtype).reshape(x.shape)


def pinned_zeros(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array with memory of its own for each device of this process, even if all hold the same."""
    part = np.zeros(sharding.shard_shape(tuple(shape)), dtype)
    parts = [
        _own(part, SingleDeviceSharding(device, memory_kind=PINNED))
        for device in sharding.mesh.local_devices
    ]
    # Or zeros would overwrite what the host writes.
    parts = jax.block_until_ready(parts)
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding.with_memory_kind(PINNED), parts
    )


def is_pinned(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding.memory_kind == PINNED


def renewed(
    state: Mapping[int, jax.Array] | Sequence[jax.Array], indices: Sequence[int], plans: Sequence[LeafPlan]
) -> dict[int, jax.Array]:  # fmt: skip
    """Takes leaves in pinned memory: new arrays in the same memory, by index; the old ones are consumed.

    [Note: views of pinned memory] On a GPU, `np.asarray` of an array in pinned memory is a view of it, and so
    is what `print`, `device_get` and `memoryview` make. A view keeps its values: XLA refuses to donate the
    array, where its client for CPUs silently copies it. So programs donate, and the host overwrites, only
    what this function has returned, which no user has. A shard with a view is copied, with a warning. Each
    device takes its shards in a program of its own: one over all of them would consume those of some devices
    when another has refused (test_views_of_pinned.py).
    """
    shards = {i: {x.device: x.data for x in state[i].addressable_shards} for i in indices}
    try:  # See [Note: locks and comprehensions] in `_host_updates.py`.
        for i in indices:
            _array_memory.forget_views(state[i])
        new, viewed = _taken_by_each(shards)
    except BaseException:
        for i in indices:  # Deletes leaves that lost a shard: JAX looks at the first only.
            if any(x.is_deleted() for x in shards[i].values()):
                state[i].delete()
        raise
    _array_memory.let_go([state[i] for i in indices])  # JAX keeps what was copied.
    if viewed:
        _warn_of_views([plans[i] for i in viewed], sum(viewed.values()))
    return {
        i: jax.make_array_from_single_device_arrays(state[i].shape, state[i].sharding, new[i])
        for i in indices
    }


def _taken_by_each(
    shards: Mapping[int, Mapping[jax.Device, jax.Array]],
) -> tuple[dict[int, list[jax.Array]], dict[int, int]]:
    """Each leaf's new shards, and the bytes that were copied, for leaves with any."""
    new: dict[int, list[jax.Array]] = {i: [] for i in shards}
    viewed: dict[int, int] = {}
    for device in {device: None for of_leaf in shards.values() for device in of_leaf}:
        parts = {i: of_leaf[device] for i, of_leaf in shards.items() if device in of_leaf}
        for (i, old), x in zip(parts.items(), _taken([*parts.values()]), strict=True):
            if x is None:
                viewed[i] = viewed.get(i, 0) + old.nbytes
            new[i].append(_own(view(jax.block_until_ready(old)), old.sharding) if x is None else x)
    return new, viewed


def _taken(parts: Sequence[jax.Array]) -> list[jax.Array | None]:
    """Parts on one device as new arrays in the same memory; None for each that has a view."""
    try:
        with jax.set_mesh(None):  # A mesh around the step has other devices.
            taken = _same(parts[0].sharding)(parts)
    except jax.errors.JaxRuntimeError as error:
        if _REFUSED not in str(error):
            raise
        if len(parts) == 1:
            return [None]
        half = len(parts) // 2  # A program that refuses one argument has consumed none.
        return [*_taken(parts[:half]), *_taken(parts[half:])]
    return [x if old.is_deleted() else None for x, old in zip(taken, parts, strict=True)]


@functools.cache
def _same(sharding: Any) -> Any:
    return jax.jit(lambda xs: xs, donate_argnums=0, out_shardings=sharding)


def _own(values: np.ndarray, sharding: Any) -> jax.Array:
    """These values in memory that only JAX has.

    `device_put` on a CPU keeps NumPy's memory where that is aligned to 64 bytes (`may_alias=False` changes
    nothing, JAX 0.10.2), and such an array is donated as a copy, at another address.
    """
    room = np.empty(values.nbytes + 64, np.uint8)
    start = (min(values.itemsize, 8) - room.ctypes.data) % 64
    copy = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return jax.device_put(copy, sharding)


def _warn_of_views(leaves: Sequence[LeafPlan], nbytes: int) -> None:
    names = [describe_leaf(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves[:3]]
    more = ", ..." * (len(leaves) > 3)
    warn(message(
        STEP, f"{readable_bytes(nbytes)} of pinned memory were copied, since somebody has a view of "
        f"{', '.join(names)}{more}",
        "A step updates leaves there in their place, and a view (np.asarray, jax.device_get, memoryview) "
        "keeps its values: the host has both until the view is dropped.",
        "Drop the view before the next step; np.array(leaf) is a copy that you can keep."))  # fmt: skip
