# SPDX-License-Identifier: Apache-2.0
"""`GradientWrites`: writes the gradients of one step to files as they arrive on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jzero._memory_kinds import PINNED
from jzero.offload.memory._nvme_store import NVMeStore
from jzero.offload.memory._pinned_leaf import is_pinned, view
from jzero.offload.nvme._files import TileAt
from jzero.offload.nvme._job_threads import Asked, Job, JobThreads
from jzero.offload.nvme._tile_layout import Extent, TileLayout, whole_pages
from jzero.offload.schedule._ops import Value, Wanted

# The parts of a step whose gradients are in memory at a time: two that are written, one that runs, and two
# that are copied to the host (`_layered.UNDER_WAY`).
PARTS = 5


class GradientWrites:
    """Writes gradients beside their tiles.

    Those of one arrival are written while the next part runs, so memory holds the gradients of few parts,
    whatever the depth of a model.
    """

    def __init__(
        self, store: NVMeStore, names: Mapping[Value, str], devices: Sequence[jax.Device],
        threads: JobThreads,
    ):  # fmt: skip
        self._store, self._names, self._devices, self._threads = store, names, devices, threads
        self._asked: Asked | None = None
        self._begun = False

    def write(self, wanted: Sequence[Wanted], arrays: Sequence[jax.Array]) -> None:
        """Has gradients, or slices of them, written, and waits for what arrived before them."""
        jobs: list[Job] = []
        for (value, at), x in zip(wanted, arrays, strict=True):
            if not is_pinned(x):
                self._from_devices(value, x)
                continue
            for file, part in enumerate(map(_bytes, self._shards(x))):
                first = (at or 0) * part.nbytes
                for tile, i, extent in self._extents(file, value, first, part.nbytes):
                    start = extent.start - first
                    jobs.append(self._job(tile, i, part[start : start + extent.nbytes]))
        self._ask(jobs)

    def _from_devices(self, value: Value, x: jax.Array) -> None:
        """Writes a gradient on the devices; one extent at a time comes to the host."""
        shards = self._shards(x)
        for tile, i, extent in self._extents(0, value, 0, shards[0].nbytes):
            first, num = (n // x.dtype.itemsize for n in (extent.start, extent.nbytes))
            places = [SingleDeviceSharding(d, memory_kind=PINNED) for d in self._devices]
            cut = [_cut(shard, jnp.int32(first), num) for shard in shards]
            parts = map(_bytes, jax.block_until_ready(jax.device_put(cut, places)))
            self._ask([self._job(TileAt(k, tile.tile), i, part) for k, part in enumerate(parts)])

    def end(self) -> None:
        self._ask([])
        self._ask([])

    def _ask(self, jobs: Sequence[Job]) -> None:
        if jobs and not self._begun:
            # Not before: a gradient of all processes is here, so all have committed the step before.
            self._store.files.begin_gradients()
            self._begun = True
        before, self._asked = self._asked, self._threads.ask(jobs)
        if before is not None:
            self._threads.wait(before)

    def _extents(
        self, file: int, value: Value, first: int, nbytes: int
    ) -> Iterator[tuple[TileAt, int, Extent]]:
        layout = self._store.spec.gradients
        for tile, i in layout.of_leaf(self._names[value], first, first + nbytes):
            yield TileAt(file, tile), i, layout.tiles[tile][i]

    def _shards(self, x: jax.Array) -> list[jax.Array]:
        there = {shard.device: shard.data for shard in x.addressable_shards}
        return [there[device] for device in self._devices]

    def _job(self, at: TileAt, i: int, values: np.ndarray) -> Job:
        return functools.partial(_write, self._store, at, i, values)


def _bytes(x: jax.Array) -> np.ndarray:
    return view(x).reshape(-1).view(np.uint8)


def _write(store: NVMeStore, at: TileAt, i: int, values: np.ndarray, buffer: np.ndarray) -> None:
    """Writes an extent, without a copy if its memory is aligned."""
    if not store.takes(values):
        pages = buffer[: whole_pages(len(values))]
        pages[: len(values)] = values
        pages[len(values) :] = 0
        values = pages
    store.files.write_gradients(at, i, values)


@functools.partial(jax.jit, static_argnums=2)
def _cut(x: jax.Array, first: jax.Array, num: int) -> jax.Array:
    return lax.dynamic_slice(x.reshape(-1), (first,), (num,))


def buffer_sizes(layout: TileLayout, host_bytes: int) -> list[int]:
    """Bytes of each buffer that gradients are written through: up to four, in a quarter of the memory."""
    most = max((whole_pages(x.nbytes) for tile in layout.tiles for x in tile), default=0)
    return [most] * max(1, min(4, host_bytes // 4 // most)) if most else []
