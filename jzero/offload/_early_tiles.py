# SPDX-License-Identifier: Apache-2.0
"""`EarlyTiles`: state in files that is updated while earlier layers still compute their backward pass.

A step writes beside what the step before has written. So it keeps nothing of what is in files to undo an
update that has begun on a wrong `Assumption`: its tiles are read and written again. Of parameters in pinned
memory, which are updated in their place, it keeps old values.
"""

from __future__ import annotations

import queue
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero._thread_group import ThreadGroup
from jzero.offload._assumptions import History, numbers_of
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._host_bucket import HostBucket
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.kernels._tiled_update import Part
from jzero.offload.memory._nvme_store import NVMeStore
from jzero.offload.memory._pinned_leaf import LeafMemory, renewed
from jzero.offload.nvme._aligned import Claim
from jzero.offload.nvme._files import TileAt
from jzero.offload.nvme._sweep import sweep
from jzero.segments._segment import Var
from jzero.sharding.plan._leaves import LeafPlan


class EarlyTiles:
    """Which tiles of a step may be updated early, and in which order.

    Attributes:
      engine: updates them.
      takes: of each early update, what it takes.
      arriving: of all that, the gradients.
      residents: leaves in pinned memory, by index; the engine's index of each.
      inputs: of what the hosts read, by which index the engine knows it.
      buckets: of each tile that may be updated early, those that it is of.
      history: what numbers of assumptions were in the last steps.
      assumptions: of all buckets; None among them if one assumes nothing.
      keeps_old: whether an update may have to be undone.
      arrivals: what arrives by itself, in the order of the first step.
    """

    def __init__(
        self, engine: TiledEngine, host: HostBucket, takes: Mapping[EarlyBucket, Sequence[Var]],
        arriving: Collection[Var], residents: Mapping[int, int], old_bytes: int,
    ):  # fmt: skip
        self.engine, self.takes, self.arriving = engine, takes, arriving
        self.residents = {i: k for k, i in residents.items()}
        self._old_bytes = old_bytes  # of one device's old values of these, at most
        self.inputs = {var: i for i, var in enumerate(host.reads)}
        bucket_of = {i: bucket for bucket in takes for i in bucket.leaves}
        self.buckets: dict[int, set[EarlyBucket]] = {}
        for tile in range(engine.update.layout.num_tiles):
            leaves = [host.leaves[k] for k in engine.update.leaves(tile)]
            if all(i in bucket_of for i in leaves):
                self.buckets[tile] = {bucket_of[i] for i in leaves}
        self.history, self.assumptions = History(), {bucket.assumption for bucket in takes}
        self.keeps_old = any(self.assumptions)
        self.arrivals: list[Part] = []

    def order(self) -> list[TileAt]:
        """The tiles that may begin in this step, in the order in which what they need arrives."""
        place = {part: i for i, part in enumerate(self.arrivals)}
        if not place:  # Nobody knows before the first step is over.
            return []
        update = self.engine.update
        found = {
            tile: max((place[part] for part in update.needs(tile)), default=0)
            for tile, buckets in self.buckets.items()
            if all(self.history.allows(bucket.assumption) for bucket in buckets)
        }
        room, number = self._old_bytes, dict[int, int]()
        for tile in sorted(found, key=found.__getitem__):
            room -= update.resident_bytes(tile) * self.keeps_old
            if room < 0:
                break
            number[tile] = len(number)
        mine = [at for at in self.engine.tiles if at.tile in number]
        return sorted(mine, key=lambda at: (number[at.tile], at.file))


class _StoppedError(Exception):
    """The step has failed, or what was assumed is wrong."""


class TileRun:
    """The early tiles of one step: a thread updates each when what it needs is there.

    Attributes:
      step: the number under which tiles are written; None while none is.
      arrived: the arrays of each shard, of what has arrived.
      made: leaves of the new state in pinned memory that have been taken, by index: from then on the old
        state is lost, by name, should the step fail.
    """

    def __init__(
        self, early: EarlyTiles, store: NVMeStore, state: Sequence[Any], plans: Sequence[LeafPlan]
    ):
        self._early, self._store, self._state, self._plans = early, store, state, plans
        self._order = early.order()
        self._buckets = {bucket for at in self._order for bucket in early.buckets[at.tile]}
        self._memory: dict[int, list[np.ndarray]] = {}  # Of residents, by the engine's index.
        # What is overwritten there, and a copy.
        self._old: list[tuple[np.ndarray, np.ndarray]] = []
        self.made: dict[int, jax.Array] = {}
        self._known: dict[Var, jax.Array] = {}
        self._claim: Claim | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._group = ThreadGroup(lambda: self._news.put(None))
        self.step: int | None = None
        self.arrived: dict[Part, list[Any]] = {}

    def begin(
        self, bucket: EarlyBucket, at: int | None, arrays: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Takes gradients that have arrived; parameters that were taken by it, as of `EarlyRun`."""
        early, parts = self._early, dict[Part, list[Any]]()
        for var, x in zip(early.takes[bucket], arrays, strict=True):
            if var in early.arriving:
                part = Part(early.inputs[var], at if bucket.num_slices else None)
                parts[part] = early.engine.part(x)
            else:
                self._known[var] = x
        if self._order and self.step is None:
            self._start()
        taken = self._take(bucket) if bucket in self._buckets else {}
        self.arrived |= parts
        self._news.put(None)
        return taken

    def _take(self, bucket: EarlyBucket) -> dict[int, jax.Array]:
        early, engine = self._early, self._early.engine
        mine = [i for i in bucket.leaves if i in early.residents and i not in self.made]
        taken = renewed(self._state, mine, self._plans)
        self.made |= taken
        for i, x in taken.items():
            place, shards = early.residents[i], LeafMemory.of(x, engine.devices).buffers
            self._memory[place] = shards
            engine.update.place(place, shards)
        return taken

    def _start(self) -> None:
        inputs, engine = self._early.inputs, self._early.engine
        known = {inputs[var]: x for var, x in self._known.items() if var in inputs}
        numbers = {inputs[var]: x for var, x in self._early.history.last.items()}
        engine.prepare_early(known, numbers)
        self._claim = self._store.spec.ring.claim()
        self.step = self._store.begin()
        self._group.start([(self._update,)])

    def finish(self, reads: Mapping[Var, jax.Array]) -> list[TileAt]:
        """Waits for the thread; the tiles that it has written, and nobody needs to write again.

        `reads` has all that the host reads besides its leaves; numbers are there.
        """
        early, written = self._early, list[TileAt]()
        last = early.history
        numbers = numbers_of(early.assumptions, reads, early.engine.at)
        held = all(
            each.holds(last.last, numbers)
            for each in early.assumptions if each and last.allows(each)
        )  # fmt: skip
        if self.step is not None:
            self._group.end((lambda: None) if held else None)
            self._release()
            if held and self._group.errors:
                raise self._group.errors[0]
            written = self._order if held else []
        if not held:
            for memory, old in self._old:
                np.copyto(memory, old)
        early.history = last.then(numbers)
        early.arrivals = early.arrivals or [*self.arrived]
        return written

    def stop(self) -> None:
        """Returns when the thread has ended, whatever it has done."""
        self._group.end()
        self._release()

    def _release(self) -> None:
        """The buffers are whoever's comes next."""
        if self._claim is not None:
            self._claim.release()

    # ------------------------------------------------------------------------------- in the thread

    def _update(self) -> None:
        ring, files, update = self._store.spec.ring, self._store.files, self._early.engine.update
        with sweep(self._order, ring, files.read, files.write) as visits:
            for visit in visits:
                self._before(visit.at)
                update.update_tile(visit.at.file, visit.at.tile, visit.buffer, self.arrived)

    def _before(self, at: TileAt) -> None:
        """Waits for what a tile needs, and keeps old values of residents that it overwrites."""
        update = self._early.engine.update
        needs = update.needs(at.tile)
        while self._group.stopped or not needs <= self.arrived.keys():
            if self._group.stopped:
                raise _StoppedError
            self._news.get()
        for leaf, part in update.resident_ranges(at.tile) if self._early.keeps_old else ():
            memory = self._memory[leaf][at.file].reshape(-1)[part]
            self._old.append((memory, memory.copy()))
