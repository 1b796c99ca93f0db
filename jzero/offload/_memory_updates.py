# SPDX-License-Identifier: Apache-2.0
"""`MemoryUpdates`: leaves in the hosts' memory are updated there, in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from jzero._errors import StateError, message
from jzero._memory_kinds import HOST
from jzero.offload._early_run import EarlyRun, EarlyUpdates
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine
from jzero.offload._host_updates import Hosted, HostRun, HostUpdates
from jzero.offload.execute._executor import New
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory._pinned_leaf import renewed
from jzero.offload.schedule._ops import Update
from jzero.sharding.plan._backend import Shared
from jzero.tracing import _call

WHO = _call.WHO


class MemoryUpdates(HostUpdates):
    """Of leaves in ordinary memory, and of parameters in pinned memory.

    Of parameters that are stored on the hosts the update begins layer by layer, as gradients come: with the
    second step, when all programs are compiled. See `plan_early`.
    """

    store, consumes = HOST, True

    def __init__(self, step: Hosted, threads: int | None, delay_after: int | None, shared: Shared):
        """Plans them.

        Args:
          step: whose they are.
          threads: how many update; None for all processors.
          delay_after: how many steps are not delayed; None if none ever is.
          shared: engines in use by steps on batches of other shapes; they share what is the same.
        """
        self._threads, self.delay_after, self._shared = threads, delay_after, shared
        self._early: EarlyUpdates | None = None
        self._has_run = False
        super().__init__(step)

    def _left(self, subgraphs: Sequence[int]) -> HostBucket | None:
        return HostBucket(self.step.builder, subgraphs) if subgraphs else None

    def history(self, state: Sequence[Any]) -> tuple[Any, int]:
        """See `HostUpdates`.

        Raises:
          StateError: leaves are of several steps.
        """
        found, mine = {state[i].pending for i in self.hosted}, self.step
        for pending in found:
            other = pending.step if pending else mine
            if len(found) > 1 or (other.leaves, other.shardings) != (mine.leaves, mine.shardings):
                raise StateError(message(
                    WHO, "leaves on the host come from different steps, and some wait for gradients",
                    "Gradients are applied to the state that they were computed with.",
                    "Flush a state with the train_step that returned it, before you change it."))  # fmt: skip
        return found.pop(), max(state[i].num_steps for i in self.hosted)

    def run(self, state: Sequence[Any], num_steps: int = 0) -> MemoryRun:
        return MemoryRun(self, state, num_steps, self._early_run(state, num_steps))

    def _early_run(self, state: Sequence[Any], num_steps: int) -> EarlyRun | None:
        if not self.early.buckets:
            return None
        if self._early is None:
            devices = state[self.hosted[0]].placement.devices
            self._early = EarlyUpdates(
                self.step.planned, self.early, devices, self._threads, self.old_bytes
            )
        return EarlyRun(self._early, state, num_steps, waits=not self._has_run)

    def has_run(self) -> None:
        """A step is over: all programs are compiled."""
        self._has_run = True

    def _new_engine(self, devices: Sequence[jax.Device]) -> HostEngine:
        bucket, num_sets = self.late, self.num_sets
        assert bucket is not None
        leaves = [self.step.leaves[i] for i in bucket.leaves]
        identity = bucket.identity()
        key = (identity, tuple(leaves), tuple(devices), self._threads, num_sets)
        engine = self._shared.get(key) if identity else None
        if engine is None:
            update = HostUpdate(bucket.traced, threads=self._threads)
            engine = HostEngine(bucket, leaves, devices, update, num_sets)
            if identity:
                self._shared[key] = engine
        return engine

    def taken(self, state: Sequence[Any], pending: Any, num_steps: int) -> dict[int, Any]:
        """The leaves on the hosts as the new state has them, in the same memory, but for early ones.

        Before any is overwritten, so that an interruption leaves no state that is half a step old.
        """
        mine = {i for bucket in self.early.buckets for i in bucket.leaves}
        hosted = {i: state[i].renewed(pending, num_steps) for i in self.hosted if i not in mine}
        streamed = [i for i in self.streamed if i not in mine]
        return hosted | renewed(state, streamed, self.step.leaves)

    def updating(self, state: Sequence[Any]) -> dict[int, jax.Array]:
        """Runs what is prepared; what it makes, on its way to the devices, a chunk at a time."""
        made: dict[int, jax.Array] = {}
        if self._engine is None:  # All of it is done.
            return made
        for chunk in self._engine.run():
            stored = self.stored(state, chunk)
            # Not the chunk, which a program may have consumed that has yet to run.
            self._engine.sent(stored.values())
            made |= stored
        return made


class MemoryRun(HostRun):
    """One step's."""

    def __init__(
        self, updates: MemoryUpdates, state: Sequence[Any], num_steps: int, early: EarlyRun | None
    ):
        self._updates, self._state, self._num_steps, self._early = updates, state, num_steps, early

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if kind is None:
            self._updates.has_run()

    def prepare(self, update: Update, takes: Sequence[Any]) -> None:
        self._updates.prepare(self._state, self._named(takes))

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        """Starts an early update, or makes the late one and ends all.

        The early ones' leaves are taken before the first byte of them is overwritten, those of the late one
        before the first of it is: from then on the old state is lost, by name.
        """
        updates, named, early = self._updates, self._updates.step.named, self._early
        if update.bucket is not None:
            return New(named(early.begin(update.bucket, place, takes)) if early else {})
        taken = self.take()
        updates.place(taken)  # JAX copies what is not its own, as NumPy's memory.
        if early:
            early.finish(self._named(takes))
            taken |= early.made
        return New(named(taken), self._on_devices(updates.updating(self._state)))

    def take(self) -> dict[int, Any]:
        """The leaves on the hosts, as the new state has them, by index, but for those of early updates."""
        return self._updates.taken(self._state, self.pending, self._num_steps)

    def _named(self, takes: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(self._updates.late_reads, takes, strict=True))

    def _on_devices(self, made: Mapping[int, Any]) -> dict[Any, Any]:
        return {self._updates.step.gives[i]: x for i, x in made.items()}
