# SPDX-License-Identifier: Apache-2.0
"""`FileRun`: the updates of one step in files, tile by tile, some while earlier layers compute.

A step writes a second version of the files, so an update that started on a wrong `Assumption` needs no copy
of the old values: its tiles are read and written again. Of parameters in pinned memory, which are updated in
place, old values are kept.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from jzero._thread_group import ThreadGroup
from jzero.offload._assumptions import History, Numbers, numbers_of
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._gradient_writes import GradientWrites
from jzero.offload._host_updates import HostRun, with_new
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.execute._executor import New
from jzero.offload.kernels._tiled_update import Part
from jzero.offload.memory._nvme_store import NVMeStore
from jzero.offload.memory._pinned_leaf import LeafMemory, renewed
from jzero.offload.nvme._aligned import Claim
from jzero.offload.nvme._files import TileAt
from jzero.offload.nvme._sweep import sweep
from jzero.offload.schedule._ops import Update, Wanted
from jzero.segments._segment import Var

if TYPE_CHECKING:
    from jzero.offload._file_updates import FileUpdates


class EarlyTiles:
    """Which tiles of a step may be updated early, and in which order."""

    def __init__(self, updates: FileUpdates, engine: TiledEngine):
        self._engine, self._old_bytes = engine, updates.old_bytes
        buckets = updates.early.buckets
        # What each early update takes, and the gradients among all of that.
        self.takes = {bucket: updates.takes(bucket) for bucket in buckets}
        self.arriving = {var for bucket in buckets for var in updates.arriving(bucket)}
        bucket_of = {i: bucket for bucket in buckets for i in bucket.leaves}
        self.buckets: dict[int, set[EarlyBucket]] = {}  # of each early tile
        for tile in range(engine.update.layout.num_tiles):
            leaves = [updates.host.leaves[k] for k in engine.update.leaves(tile)]
            if all(i in bucket_of for i in leaves):
                self.buckets[tile] = {bucket_of[i] for i in leaves}
        self.history, self._assumptions = History(), {x.assumption for x in buckets}
        self.arrivals: list[Part] = []  # in the order of the first step

    @property
    def keeps_old(self) -> bool:
        """Whether an update may have to be undone."""
        return any(self._assumptions)

    def order(self) -> list[TileAt]:
        """The tiles that may start in this step, in the order in which what they need arrives."""
        place = {part: i for i, part in enumerate(self.arrivals)}
        if not place:  # The order is unknown in the first step.
            return []
        update = self._engine.update
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
        mine = [at for at in self._engine.tiles if at.tile in number]
        return sorted(mine, key=lambda at: (number[at.tile], at.file))

    def numbers(self, reads: Mapping[Var, jax.Array]) -> Numbers:
        return numbers_of(self._assumptions, reads, self._engine.at)

    def holds(self, numbers: Numbers) -> bool:
        last = self.history
        assumed = (each for each in self._assumptions if each and last.allows(each))
        return all(each.holds(last.last, numbers) for each in assumed)


class _StoppedError(Exception):
    """The step has failed, or an assumption is wrong."""


class FileRun(HostRun):
    """The updates of one step in these files; a thread updates early tiles as their inputs arrive."""

    def __init__(self, updates: FileUpdates, state: Sequence[Any], store: NVMeStore):
        self._updates, self._state, self._store = updates, state, store
        # The number under which tiles are written; whether that has begun, also if it was interrupted.
        self._step: int | None = None
        self._begins = False
        self._writing = contextlib.ExitStack()
        self._writes: GradientWrites | None = None
        engine = updates.engine_of(state)
        assert isinstance(engine, TiledEngine)
        self._engine = engine
        self._early = updates.early_tiles = updates.early_tiles or EarlyTiles(updates, self._engine)
        self._order = self._early.order()
        self._buckets = {bucket for at in self._order for bucket in self._early.buckets[at.tile]}
        # Leaves in pinned memory that early tiles have taken: from then on the old state is lost, by name, if
        # the step fails. Their memory, by the engine's index; what is overwritten there, and a copy of it.
        self._taken: dict[int, jax.Array] = {}
        self._memory: dict[int, list[np.ndarray]] = {}
        self._old: list[tuple[np.ndarray, np.ndarray]] = []
        self._known: dict[Var, jax.Array] = {}
        self._arrived: dict[Part, list[Any]] = {}  # the arrays of each shard
        self._done: Collection[TileAt] = ()  # tiles that are written for good
        self._claim: Claim | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._group = ThreadGroup(lambda: self._news.put(None))

    def __enter__(self) -> Self:
        updates = self._updates
        if updates.gradients_wait:
            self._writes = self._writing.enter_context(updates.writes(self._store, self._state))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._writing.__exit__(kind, error, trace)
        if kind is not None:
            self._stop()

    def _stop(self) -> None:
        self._group.end()
        self._release()
        if self._begins:  # Else others may be writing these files.
            self._store.files.abort()

    def _begin_step(self) -> None:
        self._begins = True
        self._step = self._store.begin()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def write(self, gradients: Sequence[Wanted], arrays: Sequence[Any]) -> None:
        if self._writes is not None:
            self._writes.write(gradients, arrays)

    def end_gradients(self) -> None:
        self._writing.close()

    def prepare(self, takes: Sequence[Any]) -> None:
        reads = dict(zip(self._updates.late_reads, takes, strict=True))
        if self._updates.early.buckets:
            self._done = self.finish(reads)
        self._updates.prepare(self, with_new(self._state, self._taken), reads)

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        """Lets the thread update early tiles whose inputs exist; or updates all other tiles."""
        updates = self._updates
        if update.bucket is not None:
            return New(updates.named(self.begin(update.bucket, place, takes)))
        # From here on they are lost if the step fails: the host overwrites their memory.
        left = [i for i in updates.streamed if i not in self._taken and i not in updates.hosted]
        hosted = self._taken | renewed(self._state, left, updates.step.leaves)
        updates.place(hosted)
        if self._step is None:
            self._begin_step()
        run = functools.partial(self._engine.run_tiles, self._store, self._arrived, self._done)
        return New(updates.named(hosted), updates.sent(self._state, run))

    def commit(self) -> Mapping[Any, Any]:
        assert self._step is not None
        self._store.files.commit(self._step)
        return self._updates.named({i: self._state[i].renewed() for i in self._updates.hosted})

    def begin(
        self, bucket: EarlyBucket, at: int | None, arrays: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Takes gradients that have arrived; returns the parameters that this took, by index."""
        updates, early, parts = self._updates, self._early, dict[Part, list[Any]]()
        for var, x in zip(early.takes[bucket], arrays, strict=True):
            if var in early.arriving:
                part = Part(updates.inputs[var], at if bucket.num_slices else None)
                parts[part] = self._engine.part(x)
            else:
                self._known[var] = x
        self._engine.claim(self)
        if self._order and self._step is None:
            self._start()
        taken = self._take(bucket) if bucket in self._buckets else {}
        self._arrived |= parts
        self._news.put(None)
        return taken

    def _take(self, bucket: EarlyBucket) -> dict[int, jax.Array]:
        updates, engine = self._updates, self._engine
        mine = [i for i in bucket.leaves if i in updates.residents and i not in self._taken]
        taken = renewed(self._state, mine, updates.step.leaves)
        self._taken |= taken
        for i, x in taken.items():
            place, shards = updates.residents[i], LeafMemory.of(x, engine.devices).buffers
            self._memory[place] = shards
            engine.update.place(place, shards)
        return taken

    def _start(self) -> None:
        inputs = self._updates.inputs
        known = {inputs[var]: x for var, x in self._known.items() if var in inputs}
        numbers = {inputs[var]: x for var, x in self._early.history.last.items()}
        self._engine.prepare_early(known, numbers)
        self._claim = self._store.spec.ring.claim()
        self._begin_step()
        self._group.start([(self._update_early,)])

    def finish(self, reads: Mapping[Var, jax.Array]) -> list[TileAt]:
        """Waits for the thread; returns the tiles that it has written for good. `reads` has all inputs."""
        early, written = self._early, list[TileAt]()
        numbers = early.numbers(reads)
        held = early.holds(numbers)
        if self._step is not None:
            self._group.end((lambda: None) if held else None)
            self._release()
            if held and self._group.errors:
                raise self._group.errors[0]
            written = self._order if held else []
        if not held:
            for memory, old in self._old:
                np.copyto(memory, old)
        early.history = early.history.then(numbers)
        early.arrivals = early.arrivals or [*self._arrived]
        return written

    def _update_early(self) -> None:
        ring, files, update = self._store.spec.ring, self._store.files, self._engine.update
        with sweep(self._order, ring, files.read, files.write) as loaded_tiles:
            for loaded in loaded_tiles:
                self._before(loaded.at)
                update.update_tile(loaded.at.file, loaded.at.tile, loaded.buffer, self._arrived)

    def _before(self, at: TileAt) -> None:
        """Waits for the inputs of a tile, and keeps old values of residents that it overwrites."""
        update = self._engine.update
        needs = update.needs(at.tile)
        while self._group.stopped or not needs <= self._arrived.keys():
            if self._group.stopped:
                raise _StoppedError
            self._news.get()
        for leaf, part in update.resident_ranges(at.tile) if self._early.keeps_old else ():
            memory = self._memory[leaf][at.file].reshape(-1)[part]
            self._old.append((memory, memory.copy()))
