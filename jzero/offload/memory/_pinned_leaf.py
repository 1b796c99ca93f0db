# SPDX-License-Identifier: Apache-2.0
"""Leaves in pinned memory: read and written by their address, and donated."""

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

# What XLA says of an array that somebody has a view of.
_REFUSED = "Donation requested for buffer with external reference"


class LeafMemory(NamedTuple):
    """The memory of a leaf that the host updates where it is stored.

    Attributes:
      buffers: the memory of the shards that the host updates.
      replicas: for each of these, the memory of other devices that hold the same.
    """

    buffers: list[np.ndarray]
    replicas: list[list[np.ndarray]]

    @classmethod
    def of(cls, leaf: Any, devices: Sequence[jax.Device]) -> LeafMemory:
        """Of a leaf of which these devices have all different shards: an array, or a `HostStorage`."""
        if not isinstance(leaf, jax.Array):
            return cls([*leaf.buffers], [[] for _ in leaf.buffers])
        # What is still on its way would overwrite what the host writes.
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
        """Zeros where its shards are padded, and copies for replicas."""
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
    memory.owner = x  # A thread that is still at work on a view keeps the memory.
    return np.frombuffer(memory, x.dtype).reshape(x.shape)


def pinned_zeros(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array of its own memory for each device of this process, also if it is the same on all."""
    part = np.zeros(sharding.shard_shape(tuple(shape)), dtype)
    parts = [
        _own(part, SingleDeviceSharding(device, memory_kind=PINNED))
        for device in sharding.mesh.local_devices
    ]
    # Zeros that are still on their way would overwrite what the host writes.
    parts = jax.block_until_ready(parts)
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding.with_memory_kind(PINNED), parts
    )


def is_pinned(x: Any) -> bool:
    """Whether it is an array of JAX's in pinned memory, of which NumPy may have views."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == PINNED


def renewed(
    state: Mapping[int, jax.Array] | Sequence[jax.Array], indices: Sequence[int], plans: Sequence[LeafPlan]
) -> dict[int, jax.Array]:  # fmt: skip
    """Takes leaves in pinned memory: other arrays in the same memory, by index; the old ones are consumed.

    [Note: views of pinned memory] On a GPU, `np.asarray` of an array in pinned memory is a view of it, and so
    is what `print`, `device_get` and `memoryview` make. A view keeps its values: XLA refuses to donate the
    array, where its client for CPUs copies it without a word. So programs donate, and the host overwrites,
    what this function has returned, which is nobody else's. Of a shard with a view that is a copy, with a
    warning. Each device takes its shards in a program of its own: one over all of them would consume those of
    some devices when another has refused (test_views_of_pinned.py).
    """
    shards = {i: {x.device: x.data for x in state[i].addressable_shards} for i in indices}
    try:  # See [Note: locks and comprehensions] in `_host_updates.py`.
        for i in indices:
            _array_memory.forget_views(state[i])
        new, viewed = _taken_by_each(shards)
    except BaseException:
        for i in indices:  # Of which a part is gone. JAX looks at the first only.
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
    """Of each leaf its new shards, and the bytes that were copied, if any were."""
    new: dict[int, list[jax.Array]] = {i: [] for i in shards}
    viewed: dict[int, int] = {}
    for device in {device: None for of_leaf in shards.values() for device in of_leaf}:
        parts = {i: of_leaf[device] for i, of_leaf in shards.items() if device in of_leaf}
        for (i, old), x in zip(parts.items(), _taken([*parts.values()]), strict=True):
            if x is None:
                viewed[i] = viewed.get(i, 0) + old.nbytes
            new[i].append(_copied(old) if x is None else x)
    return new, viewed


def _taken(parts: Sequence[jax.Array]) -> list[jax.Array | None]:
    """Parts on one device as other arrays in the same memory; None for each that somebody has a view of."""
    try:
        with jax.set_mesh(None):  # A mesh around the step has other devices.
            taken = _same(parts[0].sharding)(parts)
    except jax.errors.JaxRuntimeError as error:
        if _REFUSED not in str(error):
            raise
        if len(parts) == 1:
            return [None]
        half = len(parts) // 2  # None is consumed: all of a device's arguments are, or none.
        return [*_taken(parts[:half]), *_taken(parts[half:])]
    return [x if old.is_deleted() else None for x, old in zip(taken, parts, strict=True)]


@functools.cache
def _same(sharding: Any) -> Any:
    return jax.jit(lambda xs: xs, donate_argnums=0, out_shardings=sharding)


def _copied(x: jax.Array) -> jax.Array:
    """The same values on the same device, in memory of their own."""
    return _own(view(jax.block_until_ready(x)), x.sharding)


def _own(values: np.ndarray, sharding: Any) -> jax.Array:
    """These values in memory that is JAX's alone.

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
