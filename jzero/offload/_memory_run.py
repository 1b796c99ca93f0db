# SPDX-License-Identifier: Apache-2.0
"""`MemoryRun`: the updates of one step in the hosts' memory, some while earlier layers compute.

Some start on an `Assumption`, and are undone if it does not hold: kernels also write old values.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jzero._memory_kinds import PINNED
from jzero.offload._assumptions import Numbers, numbers_of
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._host_updates import HostRun
from jzero.offload.execute._executor import New
from jzero.offload.kernels._host_update import UnderWay
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._pinned_leaf import LeafMemory, renewed
from jzero.offload.schedule._ops import Update
from jzero.segments._segment import Var

if TYPE_CHECKING:
    from jzero.offload._memory_updates import MemoryUpdates


class Arrived(NamedTuple):
    """Gradients of a bucket, or of a slice of it, on the host."""

    bucket: EarlyBucket
    at: int | None  # which slice; None for whole leaves
    here: Mapping[Var, jax.Array]  # the inputs of the bucket that exist


# What a bucket, or a slice of it, overwrites: all leaves of each device.
Old = list[list[np.ndarray]]


class MemoryRun(HostRun):
    """The updates of one step. The old state is lost, by name, before its first byte is overwritten."""

    def __init__(self, updates: MemoryUpdates, state: Sequence[Any], num_steps: int):
        self._updates, self._state, self._num_steps = updates, state, num_steps
        self._ready: list[Arrived] = []
        self._late: list[Arrived] = []  # what starts when all numbers are there
        self._assumed: list[tuple[Arrived, Old]] = []  # what has started on an assumption
        self._under_way: collections.deque[UnderWay] = collections.deque()
        # Leaves of the new state that early updates have taken, and their memory.
        self._made: dict[int, Any] = {}
        self._memory: dict[int, LeafMemory] = {}
        self._history, self._old = updates.history, updates.old
        updates.old = {}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._updates.has_run = True

    def prepare(self, takes: Sequence[Any]) -> None:
        self._updates.prepare(self, self._state, self._named(takes))

    def _named(self, takes: Sequence[Any]) -> dict[Var, Any]:
        return dict(zip(self._updates.late_reads, takes, strict=True))

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        """Starts an early update, so that later parts fetch parameters from their new memory; or ends all."""
        updates = self._updates
        if update.bucket is not None:
            here = dict(zip(update.bucket.begins_with, takes, strict=True))
            self._ready.append(Arrived(update.bucket, place, here))
            # With the first step, when programs are compiled, all waits for the end.
            return New(updates.named(self._begin()) if updates.has_run else {})
        taken = self.take()
        updates.place(taken)  # JAX copies what is not its own, as NumPy's memory.
        if updates.early.buckets:
            self.finish(self._named(takes))
        sent = updates.sent(self._state, updates.engine_of(self._state).run) if updates.late else {}
        return New(updates.named(taken | self._made), sent)

    def take(self) -> dict[int, Any]:
        """Takes leaves before any is overwritten, so that no interruption leaves a half new state."""
        updates, state = self._updates, self._state
        others = [i for i in updates.hosted if i not in updates.early_leaves]
        hosted = {i: state[i].renewed(self.pending, self._num_steps) for i in others}
        streamed = [i for i in updates.streamed if i not in updates.early_leaves]
        return hosted | renewed(state, streamed, updates.step.leaves)

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
        """Memory for the old values of an update on an assumption; None if the update must wait."""
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
        """Starts an update with these numbers; returns the parameters that it took."""
        (bucket, _, here), updates = arrived, self._updates
        taken = self._take([i for i in bucket.leaves if i not in self._made])
        inputs = [
            [here[v].addressable_data(k) if v in here else numbers[v][i] for v in bucket.reads]
            for i, k in enumerate(updates.at)
        ]
        update = updates.compiled[bucket] if old is None else updates.keeping[bucket]
        self._under_way.append(update.start(self._places(arrived), inputs, old or ()))
        return taken

    def _places(self, arrived: Arrived) -> Old:
        bucket, at, _ = arrived
        memory = [self._memory[i].buffers for i in bucket.leaves]
        return [
            [of_leaf[k] if at is None else of_leaf[k][at] for of_leaf in memory]
            for k in range(len(self._updates.at))
        ]

    def _take(self, indices: Sequence[int]) -> dict[int, jax.Array]:
        """Takes leaves that are updated from here on; returns the parameters among them."""
        updates = self._updates
        leaves = updates.step.leaves
        pinned = renewed(self._state, [i for i in indices if leaves[i].tier == PINNED], leaves)
        for i in indices:
            new = pinned[i] if i in pinned else self._state[i].renewed(None, self._num_steps)
            self._made[i], self._memory[i] = new, LeafMemory.of(new, updates.devices)
        return pinned

    def finish(self, reads: Mapping[Var, jax.Array]) -> None:
        """Starts what has waited, waits for all, and does again what started on a wrong assumption."""
        updates = self._updates
        numbers = numbers_of([x.assumption for x in updates.early.buckets], reads, updates.at)
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
        """Updates that started on a wrong assumption; restores the memory that they overwrote."""
        wrong = [
            (arrived, old) for arrived, old in self._assumed
            if arrived.bucket.assumption and not arrived.bucket.assumption.holds(self._history.last, numbers)
        ]  # fmt: skip
        for arrived, old in wrong:
            self._restore(arrived, old)
        return [arrived for arrived, _ in wrong]

    def _restore(self, arrived: Arrived, old: Old) -> None:
        for memory, values in zip(self._places(arrived), old, strict=True):
            for place, value in zip(memory, values, strict=True):
                np.copyto(place, value)
