# SPDX-License-Identifier: Apache-2.0
"""`EarlyUpdates`: the host updates what it can while earlier layers still compute their backward pass.

Some begin on an `Assumption`, and are undone if it does not hold: kernels write old values beside new ones.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero._memory_kinds import PINNED
from jzero.offload._assumptions import History, Numbers, numbers_of
from jzero.offload._early_plan import EarlyBucket, EarlyPlan, as_function, avals_of
from jzero.offload._host_engine import padding_of_leaf
from jzero.offload.kernels._host_update import (
    HostUpdate,
    UnderWay,
    default_threads,
    helping_threads,
)
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._pinned_leaf import LeafMemory, renewed
from jzero.offload.memory._storage import places
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Var


class Arrived(NamedTuple):
    """Gradients of a bucket, or of a slice of it."""

    bucket: EarlyBucket
    at: int | None  # which slice; None for whole leaves
    here: Mapping[Var, jax.Array]  # what is there of what the bucket reads


# Of one bucket, or of a slice of it, what it overwrites: of each device all leaves.
Old = list[list[np.ndarray]]


class EarlyUpdates:
    """The early buckets of a step, compiled.

    Attributes:
      buckets: by the bucket, what updates its leaves.
      keeping: the same of those that begin on an assumption: it hands out their old values.
      leaves: all that they renew, by index.
      padding: of each of these, which part of the shard of each of `devices` is padding.
      plans: of all leaves.
      devices: whose shards are updated; other local devices are their replicas.
      at: the places of these among the process's devices.
      history: what numbers of assumptions were in the last steps.
      old: memory for old values, by the bucket and its slice, unless a run has it. A run that fails keeps it:
        its threads may still write there.
      old_bytes: of it, of each device, at most.
    """

    def __init__(
        self, planned: PlannedStep, plan: EarlyPlan, devices: Sequence[jax.Device],
        threads: int | None, old_bytes: int = 0,
    ):  # fmt: skip
        self._planned, self.devices, self.old_bytes = planned, devices, old_bytes
        self.plans = planned.plan.leaves
        self.leaves = [i for bucket in plan.buckets for i in bucket.leaves]
        self.padding = {
            i: padding_of_leaf(self.plans[i], planned.mesh, devices) for i in self.leaves
        }
        local = list(places(planned.mesh, planned.plan.stage_axes.shard_axes))
        self.at = [local.index(device) for device in devices]
        self._threads = threads or default_threads()
        # Of all buckets: as many threads update as may.
        self._helpers = helping_threads(self._threads)
        self.buckets = {bucket: self._compiled(bucket, keeps=False) for bucket in plan.buckets}
        assuming = [bucket for bucket in plan.buckets if bucket.assumption]
        self.keeping = {bucket: self._compiled(bucket, keeps=True) for bucket in assuming}
        self.history = History()
        self.old: dict[tuple[EarlyBucket, int | None], Old] = {}

    def _compiled(self, bucket: EarlyBucket, keeps: bool) -> HostUpdate:
        names = [self.plans[i].path for i in bucket.leaves]
        return HostUpdate(
            as_function(self._planned, bucket, keeps), *avals_of(self._planned, bucket),
            names=names + [f"the old {name}" for name in names] * keeps,
            threads=self._threads, helpers=self._helpers,
        )  # fmt: skip


class EarlyRun:
    """The early updates of one step.

    A leaf is taken before the first byte of it is overwritten: from then on the old state is lost, by name.

    Attributes:
      made: leaves of the new state that have been taken, by index.
    """

    def __init__(
        self, updates: EarlyUpdates, state: Sequence[Any], num_steps: int, waits: bool
    ):  # fmt: skip
        self._updates, self._state, self._num_steps = updates, state, num_steps
        self._waits = waits  # with everything for `finish`
        self._ready: list[Arrived] = []
        self._late: list[Arrived] = []  # what begins when all numbers are there
        self._assumed: list[tuple[Arrived, Old]] = []  # what has begun on an assumption
        self._under_way: collections.deque[UnderWay] = collections.deque()
        self._memory: dict[int, LeafMemory] = {}
        self._history, self._old = updates.history, updates.old
        updates.old = {}
        self.made: dict[int, Any] = {}

    def begin(
        self, bucket: EarlyBucket, at: int | None, arrays: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Begins an update, of a slice at this place or of all; parameters that were taken by it, by index.

        `arrays` are what it begins with. Later parts fetch the parameters from where they are then.
        """
        here = dict(zip(bucket.begins_with, arrays, strict=True))
        self._ready.append(Arrived(bucket, at, here))
        return {} if self._waits else self._begin()

    def _begin(self) -> dict[int, jax.Array]:
        taken: dict[int, jax.Array] = {}
        while self._under_way and self._under_way[0].is_over:
            self._under_way.popleft().finish()  # Its gradients are freed.
        for arrived in self._ready:
            if arrived.bucket.assumption is None:
                taken |= self._start(arrived, {})
            elif (old := self._room(arrived)) is None:
                self._late.append(arrived)
            else:
                self._assumed.append((arrived, old))
                taken |= self._start(arrived, self._history.last, old)
        self._ready.clear()
        return taken

    def _room(self, arrived: Arrived) -> Old | None:
        """Memory for old values of an update that may begin on an assumption; None if it waits."""
        (bucket, at, _), updates, old = arrived, self._updates, self._old
        if not self._history.allows(bucket.assumption):
            return None
        if (bucket, at) not in old:
            outputs = updates.keeping[bucket].outputs
            held = sum(x.nbytes for found in old.values() for x in found[0])
            if held + sum(x.size * x.dtype.itemsize for x in outputs) > updates.old_bytes:
                return None
            old[bucket, at] = [[host_empty(x.shape, x.dtype) for x in outputs] for _ in updates.at]
        return old[bucket, at]

    def _start(
        self, arrived: Arrived, numbers: Numbers, old: Old | None = None
    ) -> dict[int, jax.Array]:
        """Starts an update with these numbers; parameters that were taken by it."""
        (bucket, _, here), updates = arrived, self._updates
        taken = self._take([i for i in bucket.leaves if i not in self.made])
        inputs = [
            [here[v].addressable_data(k) if v in here else numbers[v][i] for v in bucket.reads]
            for i, k in enumerate(updates.at)
        ]
        update = updates.buckets[bucket] if old is None else updates.keeping[bucket]
        self._under_way.append(update.start(self._places(arrived), inputs, old or ()))
        return taken

    def _places(self, arrived: Arrived) -> Old:
        """The memory that an update renews, of each device."""
        bucket, at, _ = arrived
        memory = [self._memory[i].buffers for i in bucket.leaves]
        return [
            [of_leaf[k] if at is None else of_leaf[k][at] for of_leaf in memory]
            for k in range(len(self._updates.at))
        ]

    def _take(self, indices: Sequence[int]) -> dict[int, jax.Array]:
        """Leaves that are updated from here on; parameters among them."""
        updates = self._updates
        in_pinned = [i for i in indices if updates.plans[i].tier == PINNED]
        pinned = renewed(self._state, in_pinned, updates.plans)
        for i in indices:
            new = pinned[i] if i in pinned else self._state[i].renewed(None, self._num_steps)
            self.made[i], self._memory[i] = new, LeafMemory.of(new, updates.devices)
        return pinned

    def finish(self, reads: Mapping[Var, jax.Array]) -> None:
        """Begins what has waited, waits for all, and does again what has begun on a wrong assumption.

        `reads` has all that the host reads besides its leaves; numbers are there.
        """
        updates = self._updates
        numbers = numbers_of([x.assumption for x in updates.buckets], reads, updates.at)
        self._begin()
        for arrived in self._late:
            self._start(arrived, numbers)
        self._end()
        for arrived in self._undone(numbers):
            self._start(arrived, numbers)
        self._end()
        for index, memory in self._memory.items():
            memory.complete(updates.padding[index])
        updates.history, updates.old = self._history.then(numbers), self._old

    def _end(self) -> None:
        while self._under_way:
            self._under_way.popleft().finish()

    def _undone(self, numbers: Numbers) -> list[Arrived]:
        """Updates that have begun on a wrong assumption; the memory is again as they found it."""
        wrong = [
            (arrived, old) for arrived, old in self._assumed
            if arrived.bucket.assumption and not arrived.bucket.assumption.holds(self._history.last, numbers)
        ]  # fmt: skip
        for arrived, old in wrong:
            self._restore(arrived, old)
        return [arrived for arrived, _ in wrong]

    def _restore(self, arrived: Arrived, old: Old) -> None:
        """Old values in the place of those that an update has made."""
        for memory, values in zip(self._places(arrived), old, strict=True):
            for place, value in zip(memory, values, strict=True):
                np.copyto(place, value)
