# SPDX-License-Identifier: Apache-2.0
"""`TiledEngine`: runs a `HostBucket` over state in files, a tile at a time, read ahead and written behind."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine
from jzero.offload.kernels._tiled_update import NOTHING, Arrived, TiledUpdate
from jzero.offload.memory._addresses import on_host
from jzero.offload.memory._nvme_store import NVMeStore
from jzero.offload.nvme._files import TileAt
from jzero.offload.nvme._sweep import sweep
from jzero.sharding.plan._leaves import LeafPlan


class TiledEngine(HostEngine):
    """Updates the shards of this process's devices, tile by tile, all of them side by side."""

    update: TiledUpdate

    def __init__(
        self, bucket: HostBucket, leaves: Sequence[LeafPlan], devices: Sequence[jax.Device],
        update: TiledUpdate,
    ):  # fmt: skip
        super().__init__(bucket, leaves, devices, update)
        num = update.layout.num_tiles
        # Portion by portion, and in a portion the shards of all devices go ahead side by side.
        self.tiles = sorted(
            (TileAt(k, tile) for k in range(len(devices)) for tile in range(num)),
            key=lambda at: (update.tiles[at.tile].portion, at.tile, at.file),
        )
        self._left = collections.Counter(tile.portion for tile in update.tiles for _ in devices)

    def prepare_early(
        self, known: Mapping[int, jax.Array], numbers: Mapping[int, Sequence[np.ndarray]]
    ) -> None:
        """Like `prepare`, for tiles that need only `known` inputs, assumed `numbers`, and what arrives."""
        reads = [known.get(i) for i in range(len(self._bucket.reads))]
        inputs = self._inputs(reads)
        for i, values in numbers.items():
            for shard, value in zip(inputs, values, strict=True):
                shard[i] = value
        self.update.prepare((), inputs)

    def part(self, x: jax.Array) -> list[Any]:
        """The part of each of `devices` of an array in pinned memory."""
        return on_host([x.addressable_data(k) for k in self.at])

    def run_tiles(
        self, store: NVMeStore, arrived: Arrived = NOTHING, done: Collection[TileAt] = ()
    ) -> Iterator[dict[int, jax.Array]]:
        """Reads, updates and writes all tiles but those `done`; yields what a portion makes, in transfer."""
        update, left = self.update, self._left.copy()
        left.subtract(update.tiles[at.tile].portion for at in done)
        yield self._send(update.begin(self._memory_of_outputs()))
        # What reads no state is made first.
        for tile in range(update.layout.num_tiles, len(update.tiles)):
            for k in range(len(self.devices)):
                update.update_tile(k, tile)
                left[update.tiles[tile].portion] -= 1
        for portion in [portion for portion, num in left.items() if not num]:
            yield self._send(update.done[portion])
        order = [at for at in self.tiles if at not in done]
        files, ring = store.files, store.spec.ring
        claim = ring.claim()
        try:
            with sweep(order, ring, files.read_with_gradients, files.write) as loaded_tiles:
                for loaded in loaded_tiles:
                    update.update_tile(loaded.at.file, loaded.at.tile, loaded.buffer, arrived)
                    portion = update.tiles[loaded.at.tile].portion
                    left[portion] -= 1
                    if not left[portion]:
                        yield self._send(update.done[portion])
        finally:
            claim.release()
        update.end()
        self._complete(self._leaves)
        self._leaves = {}
