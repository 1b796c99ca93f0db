# SPDX-License-Identifier: Apache-2.0
"""`EarlyTiles`: state in files that is updated while earlier layers still compute their backward pass.

A step writes beside what the step before has written, and so it keeps nothing to undo an update that has
begun on a wrong `Assumption`: its tiles are read and written again.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero._thread_group import ThreadGroup
from jzero.offload._assumptions import History, numbers_of
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._host_bucket import HostBucket
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.kernels._tiled_update import Part
from jzero.offload.memory._nvme_store import NVMeStore
from jzero.offload.nvme._files import TileAt
from jzero.offload.nvme._sweep import sweep
from jzero.offload.schedule._ops import Update
from jzero.segments._segment import Var


class EarlyTiles:
    """Which tiles of a step may be updated early, and in which order.

    Attributes:
      engine: updates them.
      takes: of each early update, what it takes of what arrives.
      inputs: of what the hosts read, by which index the engine knows it.
      history: what numbers of assumptions were in the last steps.
      assumptions: of all buckets; None among them if one assumes nothing.
      arrivals: what arrives by itself, in the order of the first step.
    """

    def __init__(
        self, engine: TiledEngine, host: HostBucket, takes: Mapping[EarlyBucket, Sequence[Var]]
    ):
        """Plans.

        Args:
          engine: of all tiles of the step.
          host: what it updates.
          takes: the early updates, and what each takes of what arrives.
        """
        self.engine, self.takes = engine, takes
        self.inputs = {var: i for i, var in enumerate(host.reads)}
        self.arrivals: list[Part] = []
        bucket_of = {i: bucket for bucket in takes for i in bucket.leaves}
        self._buckets: dict[int, set[EarlyBucket]] = {}
        for tile in range(engine.update.layout.num_tiles):
            leaves = [host.leaves[k] for k in engine.update.leaves(tile)]
            if all(i in bucket_of for i in leaves):
                self._buckets[tile] = {bucket_of[i] for i in leaves}
        self.assumptions = {bucket.assumption for bucket in takes}
        self.history = History()

    def order(self) -> list[TileAt]:
        """The tiles that may begin in this step, in the order in which what they need arrives."""
        place = {part: i for i, part in enumerate(self.arrivals)}
        if not place:  # Nobody knows before the first step is over.
            return []
        update = self.engine.update
        found = {
            tile: max((place[part] for part in update.needs(tile)), default=0)
            for tile, buckets in self._buckets.items()
            if all(self.history.allows(bucket.assumption) for bucket in buckets)
        }
        mine = [at for at in self.engine.tiles if at.tile in found]
        return sorted(mine, key=lambda at: (found[at.tile], at.tile, at.file))


class _StoppedError(Exception):
    """The step has failed, or what was assumed is wrong."""


class TileRun:
    """The early tiles of one step: a thread updates each when what it needs is there.

    Attributes:
      step: the number under which tiles are written; None while none is.
      arrived: the arrays of each shard, of what has arrived.
    """

    def __init__(self, early: EarlyTiles, store: NVMeStore):
        """Begins nothing."""
        self._early, self._store = early, store
        self._order = early.order()
        self._known: dict[Var, jax.Array] = {}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._group = ThreadGroup(lambda: self._news.put(None))
        self.step: int | None = None
        self.arrived: dict[Part, list[Any]] = {}

    def knows(self, known: Mapping[Var, jax.Array]) -> None:
        """Before the first arrival: what is on its way to the host from the start."""
        self._known = {**known}

    def begin(
        self, update: Update, at: int | None, arrays: Sequence[jax.Array]
    ) -> dict[Var, jax.Array]:
        """Takes gradients that have arrived; no leaf is another array because of that."""
        early, bucket = self._early, update.begin
        for var, x in zip(early.takes[bucket], arrays, strict=True):
            if not var.aval.shape:
                self._known[var] = x
                continue
            part = Part(early.inputs[var], at if bucket.num_slices else None)
            self.arrived[part] = early.engine.part(x)
        if self._order and self.step is None:
            self._start()
        self._news.put(None)
        return {}

    def _start(self) -> None:
        inputs, engine = self._early.inputs, self._early.engine
        known = {inputs[var]: x for var, x in self._known.items() if var in inputs}
        numbers = {inputs[var]: x for var, x in self._early.history.last.items()}
        engine.prepare_early(known, numbers)
        self.step = self._store.begin()
        self._group.start([(self._sweep,)])

    def finish(self, reads: Mapping[Var, jax.Array]) -> list[TileAt]:
        """Waits for the thread; the tiles that it has written, and nobody needs to write again.

        Args:
          reads: all that the host reads besides its leaves; numbers are there.

        Raises:
          StateError: the disk fails.
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
            if held and self._group.errors:
                raise self._group.errors[0]
            written = self._order if held else []
        early.history = last.then(numbers)
        early.arrivals = early.arrivals or [*self.arrived]
        return written

    def stop(self) -> None:
        """Returns when the thread has ended, whatever it has done."""
        self._group.end()

    # ------------------------------------------------------------------------------- in the thread

    def _sweep(self) -> None:
        ring, files, update = (
            self._store.spec.ring,
            self._store.files,
            self._early.engine.update,
        )
        with sweep(self._order, ring, files.read, files.write) as visits:
            for visit in visits:
                needs = update.needs(visit.at.tile)
                while self._group.stopped or not needs <= self.arrived.keys():
                    if self._group.stopped:
                        raise _StoppedError
                    self._news.get()
                update.update_tile(visit.at.file, visit.at.tile, visit.buffer, self.arrived)
