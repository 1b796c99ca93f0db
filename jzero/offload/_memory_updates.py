# SPDX-License-Identifier: Apache-2.0
"""`MemoryUpdates`: updates leaves in the hosts' memory, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jzero._errors import StateError, message
from jzero._memory_kinds import HOST
from jzero.offload._assumptions import History
from jzero.offload._early_plan import EarlyBucket, as_function, avals_of
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine, padding_of_leaf
from jzero.offload._host_updates import HostUpdates
from jzero.offload._memory_run import MemoryRun, Old
from jzero.offload.kernels._host_update import HostUpdate, default_threads, helping_threads
from jzero.offload.memory._storage import places
from jzero.offload.nvme._job_threads import JobThreads
from jzero.sharding.plan._backend import Shared
from jzero.tracing import _call

if TYPE_CHECKING:
    from jzero.offload._host_step import HostStep

WHO = _call.WHO


class MemoryUpdates(HostUpdates):
    """Updates leaves in ordinary memory, and parameters in pinned memory.

    Where parameters are stored on the hosts, the update starts layer by layer, as gradients arrive: from the
    second step on, when all programs are compiled. See `plan_early`.
    """

    # Whose shards are updated early; other local devices are their replicas.
    devices: Sequence[jax.Device]
    at: Sequence[int]  # their places among the process's devices
    padding: Mapping[int, Sequence[Any]]  # of each early leaf, in each of these shards

    store, consumes = HOST, True

    def __init__(
        self, step: HostStep, threads: int | None, delay_after: int | None, shared: Shared
    ):
        """`shared` has the engines of steps on batches of other shapes; equal ones are shared."""
        self._threads, self.delay_after, self._shared = threads, delay_after, shared
        self.has_run = False  # whether a step is over, so that all programs are compiled
        # Early updates, made in the first step. Those that start on an assumption also return old values.
        self.compiled: dict[EarlyBucket, HostUpdate] = {}
        self.keeping: dict[EarlyBucket, HostUpdate] = {}
        # Memory for old values, by bucket and slice. A run takes it, and keeps it if it fails, since its
        # threads may still write there.
        self.old: dict[tuple[EarlyBucket, int | None], Old] = {}
        self.history = History()
        super().__init__(step)
        self.early_leaves = frozenset(i for x in self.early.buckets for i in x.leaves)

    def _left(self, subgraphs: Sequence[int]) -> HostBucket | None:
        return HostBucket(self.step.builder, subgraphs) if subgraphs else None

    def pending(self, state: Sequence[Any]) -> tuple[Any, int]:
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
        if self.early.buckets and not self.compiled:
            self._compile(state[self.hosted[0]].placement.devices)
        return MemoryRun(self, state, num_steps)

    def _compile(self, devices: Sequence[jax.Device]) -> None:
        planned, leaves = self.step.planned, self.step.leaves
        self.padding = {
            i: padding_of_leaf(leaves[i], planned.mesh, devices) for i in self.early_leaves
        }
        local = list(places(planned.mesh, planned.plan.stage_axes.shard_axes))
        self.devices, self.at = devices, [local.index(device) for device in devices]
        # All buckets share them, so that no more threads update than may.
        helpers = helping_threads(self._threads or default_threads())
        for bucket in self.early.buckets:
            if bucket.assumption:
                self.keeping[bucket] = self._compiled(bucket, helpers, keeps=True)
            self.compiled[bucket] = self._compiled(bucket, helpers)

    def _compiled(
        self, bucket: EarlyBucket, helpers: JobThreads, keeps: bool = False
    ) -> HostUpdate:
        names, planned = [self.step.leaves[i].path for i in bucket.leaves], self.step.planned
        return HostUpdate(
            as_function(planned, bucket, keeps), *avals_of(planned, bucket),
            names=names + [f"the old {name}" for name in names] * keeps, threads=self._threads,
            helpers=helpers,
        )  # fmt: skip

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
