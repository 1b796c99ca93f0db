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

Chunk = dict[int, jax.Array]


class TiledEngine(HostEngine):
    """Updates the shards of this process's devices, tile by tile, all of them side by side.

    Attributes:
      update: compiled; says what is where in a tile.
    """

    update: TiledUpdate

    def __init__(
        self, bucket: HostBucket, leaves: Sequence[LeafPlan], devices: Sequence[jax.Device],
        update: TiledUpdate,
    ):  # fmt: skip
        super().__init__(bucket, leaves, devices, update)
        chunks = [tile.chunk for tile in update.tiles]
        # Chunk by chunk, and in a chunk the shards of all devices go ahead side by side.
        self._order = sorted(
            (
                TileAt(k, tile)
                for k in range(len(devices))
                for tile in range(update.layout.num_tiles)
            ),
            key=lambda at: (chunks[at.tile], at.tile, at.file),
        )
        self._left = collections.Counter(tile for tile in chunks for _ in devices)

    @property
    def tiles(self) -> list[TileAt]:
        """All that are in files, as `run_tiles` visits them."""
        return self._order

    def prepare_early(
        self, known: Mapping[int, jax.Array], numbers: Mapping[int, Sequence[np.ndarray]]
    ) -> None:
        """As `prepare`, for tiles that need nothing but this, and what arrives.

        Args:
          known: of what the bucket reads, by index: is there, or comes soon.
          numbers: what is assumed of others, for each of `devices`.
        """
        reads = [known.get(i) for i in range(len(self._bucket.reads))]
        inputs = self._inputs(reads)
        for i, values in numbers.items():
            for shard, value in zip(inputs, values, strict=True):
                shard[i] = value
        self.update.prepare((), inputs)

    def part(self, x: jax.Array) -> list[Any]:
        """Of an array in pinned memory, each of `devices`' part."""
        return on_host([x.addressable_data(k) for k in self.at])

    def run_tiles(
        self, store: NVMeStore, arrived: Arrived = NOTHING, done: Collection[TileAt] = ()
    ) -> Iterator[Chunk]:
        """Reads, updates and writes tiles; yields what a chunk makes for the devices, on its way there.

        Args:
          store: has them.
          arrived: what has come by itself.
          done: tiles that are written already.

        Raises:
          StateError: the disk fails. What was written is of no use.
        """
        outputs, left = self._sets[-1], self._left.copy()
        left.subtract(self.update.tiles[at.tile].chunk for at in done)
        outputs.sent.clear()
        yield self._send(outputs, self.update.begin(self._views(outputs)))
        # What reads no state is made first.
        for tile in range(self.update.layout.num_tiles, len(self.update.tiles)):
            for k in range(len(self.devices)):
                self.update.update_tile(k, tile)
                left[self.update.tiles[tile].chunk] -= 1
        files = store.files
        for chunk in [chunk for chunk, num in left.items() if not num]:
            yield self._send(outputs, self.update.done[chunk])
        order, ring = [at for at in self._order if at not in done], store.spec.ring
        claim = ring.claim()
        try:
            with sweep(order, ring, files.read_with_gradients, files.write) as visits:
                for visit in visits:
                    self.update.update_tile(visit.at.file, visit.at.tile, visit.buffer, arrived)
                    chunk = self.update.tiles[visit.at.tile].chunk
                    left[chunk] -= 1
                    if not left[chunk]:
                        yield self._send(outputs, self.update.done[chunk])
        finally:
            claim.release()
        self.update.end()
        self._complete(self._leaves)
        self._leaves = {}
