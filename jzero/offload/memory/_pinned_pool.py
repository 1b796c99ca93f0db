# SPDX-License-Identifier: Apache-2.0
"""`PinnedPool`: reusable arrays in pinned memory, within a budget."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.offload.memory._pinned_leaf import pinned_zeros, view


class PinnedBuffer(NamedTuple):
    """An array in pinned memory, each device's part in its own memory."""

    array: jax.Array
    views: dict[jax.Device, np.ndarray]  # each device's memory, `[n / devices, d]`
    key: Any  # for the pool

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.views.values())


def bytes_here(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> int:
    size = math.prod(sharding.shard_shape(shape)) * np.dtype(dtype).itemsize
    return size * len(sharding.addressable_devices)


class PinnedPool:
    """Makes buffers of at most `nbytes` together, and reuses those that were given back."""

    def __init__(self, nbytes: int):
        self.nbytes, self.made_bytes, self.lent_bytes = nbytes, 0, 0
        # The most recently used come last.
        self._free: collections.OrderedDict[Any, list[PinnedBuffer]] = collections.OrderedDict()

    def take(
        self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, kept: int = 0
    ) -> PinnedBuffer | None:
        """A buffer of any content; None if `kept` bytes would not be left."""
        key, nbytes = (shape, np.dtype(dtype), sharding), bytes_here(shape, dtype, sharding)
        if self.lent_bytes + nbytes > self.nbytes - kept:
            return None
        self.lent_bytes += nbytes
        if key in self._free:
            return self._pop(key)
        while self.made_bytes + nbytes > self.nbytes:
            self.made_bytes -= self._pop(next(iter(self._free))).nbytes
        self.made_bytes += nbytes
        array = pinned_zeros(shape, dtype, sharding)
        views = {shard.device: view(shard.data) for shard in array.addressable_shards}
        return PinnedBuffer(array, views, key)

    def _pop(self, key: Any) -> PinnedBuffer:
        found = self._free[key]
        buffer = found.pop()
        if not found:
            del self._free[key]
        return buffer

    def give(self, buffer: PinnedBuffer) -> None:
        self.lent_bytes -= buffer.nbytes
        self._free.setdefault(buffer.key, []).append(buffer)
        self._free.move_to_end(buffer.key)
