# SPDX-License-Identifier: Apache-2.0
"""Leaves in pinned memory that the host's processors update in their place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jzero._memory_kinds import PINNED


class PinnedLeaf(NamedTuple):
    """A leaf that rests in pinned memory, as the host updates it.

    Attributes:
      buffers: the memory of one device's shard for each different one.
      replicas: for each of these, the memory of other devices that hold the same.
    """

    buffers: list[np.ndarray]
    replicas: list[list[np.ndarray]]

    @classmethod
    def of(cls, leaf: jax.Array, devices: Sequence[jax.Device]) -> PinnedLeaf:
        """The memory of an array, of which these devices have all different shards."""
        shards = {shard.device: shard for shard in leaf.addressable_shards}
        alike: dict[Any, list[np.ndarray]] = {
            str(shards[device].index): [view(shards[device].data)] for device in devices
        }
        for device, shard in shards.items():
            if device not in devices:
                alike[str(shard.index)].append(view(shard.data))
        return cls([group[0] for group in alike.values()], [group[1:] for group in alike.values()])

    def copy_to_replicas(self) -> None:
        """Gives replicas what the first shard of each kind has."""
        for buffer, others in zip(self.buffers, self.replicas, strict=True):
            for other in others:
                np.copyto(other, buffer)


def view(x: jax.Array) -> np.ndarray:
    """The memory of an array on the host, to be written."""
    if not x.nbytes:
        return np.zeros(x.shape, x.dtype)
    memory: Any = (ctypes.c_char * x.nbytes).from_address(x.unsafe_buffer_pointer())
    memory.owner = x  # A thread that is still at work on a view keeps the memory.
    return np.frombuffer(memory, x.dtype).reshape(x.shape)


def pinned_zeros(shape: Sequence[int], dtype: Any, home: NamedSharding) -> jax.Array:
    """An array of its own memory for each device of this process, also if it is the same on all."""
    part = np.zeros(home.shard_shape(tuple(shape)), dtype)
    parts = [
        jax.device_put(part.copy(), SingleDeviceSharding(device, memory_kind=PINNED))
        for device in home.mesh.local_devices
    ]
    # Zeros that are still on their way would overwrite what the host writes.
    parts = jax.block_until_ready(parts)
    return jax.make_array_from_single_device_arrays(
        tuple(shape), home.with_memory_kind(PINNED), parts
    )


def renewed(leaf: jax.Array) -> jax.Array:
    """The same memory as another array; the old one is consumed."""
    new: jax.Array = _same(leaf.sharding)(leaf)
    jax.block_until_ready(new)
    leaf.delete()  # Donation leaves an array of which NumPy has a view.
    return new


@functools.cache
def _same(sharding: Any) -> Any:
    return jax.jit(lambda x: x, donate_argnums=0, out_shardings=sharding)
