# SPDX-License-Identifier: Apache-2.0
"""`NVMeStep`: a step whose optimizer state is stored in files and is updated by the hosts' processors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, StateError, first_of, message
from jzero._memory_kinds import HOST, NVME, PINNED, HostNeed
from jzero._policy import NVMe
from jzero._quantities import readable_bytes
from jzero.ir._rules import size_in_bytes
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._early_tiles import EarlyTiles, TileRun
from jzero.offload._file_layout import identity_of, layout_to_read, tile_bytes
from jzero.offload._gradient_writes import PARTS, GradientWrites, buffer_sizes
from jzero.offload._host_step import UPDATING, HostStep, with_new
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.execute._executor import Arrivals
from jzero.offload.kernels._host_update import IN_ITS_MIDDLE
from jzero.offload.kernels._tiled_update import NOTHING, TiledUpdate
from jzero.offload.kernels._writer import TYPES
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._nvme_store import BUFFERS, NVMeStore, StoreSpec
from jzero.offload.memory._pinned_leaf import renewed
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._job_threads import JobThreads
from jzero.offload.nvme._layout import TileLayout
from jzero.offload.schedule._ops import Commit, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Values, Var
from jzero.sharding.plan._backend import Shared, Window
from jzero.tracing import _call

WHO = _call.WHO


class NVMeStep(HostStep):
    """A step in two parts: gradients on the devices, and their update on the host, tile by tile.

    Behaves like::

        gradients = forward_backward(parameters, batch)        # each travels to the host when it is reduced
        for tile in tiles:                              # read ahead, written behind, in few buffers
            moments, parameters = update(moments, gradients)
            send parameters to the devices
        commit                                          # now the new state counts

    Until the new state is committed, everything of the old one is kept, on the devices, too: a step that
    fails leaves the state as it was, unless files are written `in_place`, or parameters are stored on the
    hosts and are updated there, in their place, beside the tiles.
    """

    _store = NVME
    _consumes = False

    def __init__(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], policy: NVMe, shared: Shared,
        window: Window,
    ):  # fmt: skip
        """Builds the programs; arguments as of `HostStep`.

        Raises:
          OptionError: a leaf cannot be updated a tile at a time.
        """
        # The gradients that wait in files, and in how many slices each is made.
        self._waiting: dict[Var, int] = {}
        self._policy = policy
        super().__init__(planned, shardings, policy.threads, None, shared, window)
        # What a step leaves in files as it is.
        self._frozen = [i for i in self._hosted if i not in self.host.leaves]
        self._check_tiles()
        if policy.gradients:
            assert self._layered is not None, "refused where policies are made"
            known = {*self._known, *self._entered, *self._stays, *self._layered.literals}
            self._waiting = self._layered.hand_over([v for v in self._in_tiles() if v not in known])
            self._tell()
        self._writing: list[np.ndarray] = []  # The memory that gradients are written through.
        self._tiles: EarlyTiles | None = None
        self._run: TileRun | None = None  # Of the step that runs.

    @property
    def _begins_early(self) -> bool:
        """Where files have two versions; gradients that wait in files are read with their tiles."""
        return not (self._policy.in_place or self._policy.gradients)

    @property
    def _assumes(self) -> bool:
        return True

    def _in_tiles(self) -> Collection[Var]:
        found = self.host.traced.inputs_in_tiles(self._residents)
        return [var for i, var in enumerate(self.host.reads) if i in found]

    @functools.cached_property
    def _residents(self) -> dict[int, int]:
        """Those of the host's leaves that are in pinned memory, by their place among these; by index."""
        return {k: i for k, i in enumerate(self.host.leaves) if self.leaves[i].tier == PINNED}

    def _overwritten(self) -> Collection[int]:
        """Parameters in pinned memory: files have both versions."""
        return self._residents.values()

    def _takes(self, bucket: EarlyBucket) -> list[Var]:
        """Its gradients, and the numbers of all buckets: the first one begins with them."""
        every = [v for x in self._early_plan.buckets for v in super(NVMeStep, self)._takes(x)]
        mine = [v for v in super()._takes(bucket) if v.aval.shape]
        return mine + [v for v in dict.fromkeys(every) if not v.aval.shape]

    def _check_tiles(self) -> None:
        host = self.host
        if not (bad := host.traced.untiled(self._residents)):
            return
        self._check_dtypes()
        params = any(self.leaves[i].is_streamed for i in self._hosted)
        whole = (
            "memory=jzero.Memory(params=jzero.PinnedHost(), optimizer=jzero.HostCPU())" if params
            else "memory=jzero.HostCPU()")  # fmt: skip
        # A part of one element is updated as a number.
        single = any(x.size == 1 for x in host.traced.state)
        small = "; or leave min_shard_bytes at its default: a shard has one element" * single
        raise OptionError(message(
            WHO, bad, "State in files is updated in ranges of elements, each by itself, of gradients "
            "that have as many.", f"Use {whole}, which has whole leaves in memory{small}.", shown=6
        ))  # fmt: skip

    def _check_dtypes(self) -> None:
        """Refuses dtypes that no kernel computes with, once, and not each equation that has one."""
        traced = self.host.traced
        named = zip(traced.names, traced.state, strict=False)  # Those of outputs follow.
        found = {path: x.dtype.name for path, x in named if x.dtype.name not in TYPES}
        if found:
            raise OptionError(message(
                WHO, f"memory=jzero.NVMe, and {len(found)} of {len(traced.state)} leaves that the hosts "
                f"update are {' or '.join(sorted({*found.values()}))} ({first_of([*found])})",
                f"State in files is updated by kernels for processors, which know {', '.join(TYPES)}.",
                "Keep the state in one of these, as float32, or use memory=jzero.HostCPU(), where XLA "
                "updates the others."))  # fmt: skip

    @functools.cached_property
    def update(self) -> TiledUpdate:
        """What the host does, compiled."""
        host, policy, fetched = self.host, self._policy, self._fetched
        arriving = {
            v: max(bucket.num_slices, 1)
            for bucket in self._early_plan.buckets for v in self._takes(bucket) if v.aval.shape
        }  # fmt: skip
        return TiledUpdate(
            host.traced, tile_bytes=tile_bytes(policy), threads=policy.threads, resident=self._residents,
            lone={k: fetched[i] for k, i in enumerate(host.leaves) if i in fetched},
            gradients={i: self._waiting[v] for i, v in enumerate(host.reads) if v in self._waiting},
            arriving={i: arriving[v] for i, v in enumerate(host.reads) if v in arriving},
        )  # fmt: skip

    @functools.cached_property
    def _fetched(self) -> dict[int, int]:
        """Leaves that layers fetch from files, by index, and in how many slices."""
        slices = self._layered.num_slices() if self._layered else {}
        found = {self._segments.leaf_of[var]: num for var, num in slices.items()}
        return {i: num for i, num in found.items() if i in self._hosted}

    @functools.cached_property
    def spec(self) -> StoreSpec:
        policy, mesh, update = self._policy, self.host.mesh, self.update
        # What is in the files of leaves that no step changes.
        slices = [self._fetched.get(i, 0) for i in self._frozen]
        own = layout_to_read([self.leaves[i] for i in self._frozen], slices, tile_bytes(policy))
        kept = TileLayout(update.frozen.tiles + own.tiles)
        identity = identity_of([self.leaves[i] for i in self._hosted], mesh, self.host.shard_axes)
        return StoreSpec(
            Path(policy.path), policy.host_bytes, policy.in_place, policy.resume, update.layout, identity,
            mesh, kept, update.gradients, sum(buffer_sizes(update.gradients, policy.host_bytes)),
        )  # fmt: skip

    def schedule(self) -> Schedule:
        """As where the state is in memory; all of it that changes is read from the disk and written.

        Parameters also come from it for each part that fetches them.
        """
        return Schedule((*self._ops(), Commit(NVME)), self._buffers())

    @property
    def _moved(self) -> Sequence[int]:
        """Of the leaves that the hosts update, those in files: not parameters in pinned memory."""
        return [i for i in self._hosted if i in self.host.leaves]

    def _goes_to(self, var: Var) -> str:
        return NVME if var in self._waiting else PINNED

    def code_paths(self) -> str:
        """How the host updates each leaf, and what that takes of disk and memory."""
        policy = self._policy
        nbytes = sum(self.leaves[i].nbytes_per_device for i in self._moved)
        slots = "once, written over" if policy.in_place else "twice, the new one beside the old"
        most = self._layered.host_bytes if self._layered else 0
        lines = [
            "parameters come from there, read ahead of the part that fetches them, through "
            f"{readable_bytes(most)} of each process's memory"
        ] * bool(most)
        lines += self._gradient_lines()
        return "\n".join([
            f"tile by tile, each of up to {readable_bytes(tile_bytes(policy))}: read ahead, updated, written "
            f"behind, in {readable_bytes(policy.host_bytes)} of each process's memory",
            f"in {policy.path}: {readable_bytes((2 - policy.in_place) * nbytes)} for each device "
            f"({slots}); a step reads {readable_bytes(nbytes)} and writes {readable_bytes(nbytes)}",
            *lines,
            super().code_paths(),
        ])  # fmt: skip

    def _gradient_lines(self) -> list[str]:
        if not self._waiting:
            return []
        reads = zip(self.host.reads, self.host.traced.inputs, strict=False)
        nbytes = sum(size_in_bytes(x) for var, x in reads if var in self._waiting)
        where = (
            "behind their tiles" if self._policy.in_place else "where their tiles will be written"
        )
        return [
            f"gradients wait there, too, {where}: {readable_bytes(nbytes)} for each device, written as "
            "layers end, and read with their tiles"
        ]

    def _buffers(self) -> tuple[HostNeed, ...]:
        """Those of tiles, which the devices of a process share, and those that layers go through."""
        mesh = self.host.mesh
        num = len(mesh.local_devices) if isinstance(mesh, Mesh) else 1
        ring = HostNeed("tiles of optimizer state", HOST, -(-self._policy.host_bytes // num))
        arriving = PARTS * self._layered.arriving_bytes() if self._layered else 0
        gradients = HostNeed("gradients on their way to files", PINNED, arriving)
        return (ring, *super()._buffers(), gradients)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        if not self._early_plan.buckets:
            return super().__call__(state, arrays)
        # Early tiles use the buffers from the first layer on.
        with UPDATING, BUFFERS:
            if self._run is not None:
                raise StateError(IN_ITS_MIDDLE)
            return super().__call__(state, arrays)

    def _step(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        store = self._store_of(state)
        read = self.read_leaves(state)
        values = self._segments.values(state, arrays)
        try:
            self._run = run = self._tile_run(store, state)
            sent, (stays, outs) = self._written(store, state, values)
            made = dict(zip(self.grad.outs, outs, strict=True))
            reads = dict(zip(self._sent, sent, strict=True)) | read
            self.wait(state, reads)
            with UPDATING, BUFFERS:
                made |= self._update_on_devices(values, stays)
                hosted = self._updated(store, state, reads, made)
        except BaseException:
            if run := self._run:  # Else others may be writing these files.
                run.stop()
                store.files.abort()
            raise
        finally:
            self._run = None
        hosted |= {i: state[i].renewed() for i in self._hosted}
        for i in {*made}:
            if i < len(state):
                state[i].delete()
        return self._segments.in_order(made | hosted, state)

    def _updated(
        self,
        store: NVMeStore,
        state: Sequence[Any],
        reads: Mapping[Var, jax.Array],
        made: dict[int, jax.Array],
    ) -> dict[int, Any]:
        """The new leaves in pinned memory; what the update makes for the devices joins `made`."""
        engine, run = self._engine_of(state), self._run
        done = run.finish(reads) if run else ()
        taken: dict[int, Any] = run.made if run else {}
        self.prepare(with_new(state, taken), reads)
        # From here on they are nobody's, should the step fail: in their memory the host makes new ones.
        left = [i for i in self._streamed if i not in taken and i not in self._hosted]
        hosted = taken | renewed(state, left, self.leaves)
        self.place(hosted)
        try:
            step = store.begin() if run is None or run.step is None else run.step
            for chunk in engine.run_tiles(store, run.arrived if run else NOTHING, done):
                stored = self._stored(state, chunk)
                engine.sent(stored.values())
                made |= stored
            # The devices may have no room for them: then the old ones are what there is.
            jax.block_until_ready(list(made.values()))
            store.files.commit(step)
        except BaseException:
            store.files.abort()
            raise
        return hosted

    def _tile_run(self, store: NVMeStore, state: Sequence[Any]) -> TileRun | None:
        if not self._early_plan.buckets:
            return None
        if self._tiles is None:
            takes = {bucket: self._takes(bucket) for bucket in self._early_plan.buckets}
            self._tiles = EarlyTiles(
                self._engine_of(state), self.host, takes, self._residents, self._segments.invars,
                self._old_bytes,
            )  # fmt: skip
        return TileRun(self._tiles, store, state, self.leaves)

    def _written(
        self, store: NVMeStore, state: Sequence[Any], values: Values
    ) -> tuple[list[Any], Any]:
        """Runs the forward-backward program: what it sends, None of what waits in files, and all else."""
        if not self._waiting:
            return self._gradients(values, *self._told_of(self._run))
        devices = state[self._hosted[0]].placement.devices
        # A signal's handler that runs a step meanwhile has buffers of its own.
        buffers, self._writing = self._writing, []
        sizes = buffer_sizes(self.update.gradients, self._policy.host_bytes)
        buffers = buffers or [pages(size) for size in sizes]
        with JobThreads(buffers) as threads:
            writes = GradientWrites(store, self._gradient_names, devices, threads)
            sent, handed = self._gradients(values, Arrivals(write=writes.write))
            writes.end()
        self._writing = buffers
        return sent, handed

    @functools.cached_property
    def _gradient_names(self) -> dict[Value, str]:
        assert self._layered is not None
        names, gradients = self.update.gradient_names, self._layered.gradients
        return {gradients[var]: names[i] for i, var in enumerate(self.host.reads) if i in names}

    def _store_of(self, state: Sequence[Any]) -> NVMeStore:
        leaves: list[FileStorage] = [state[i] for i in self._hosted]
        stores = {id(leaf.store): leaf.store for leaf in leaves}
        if len(stores) > 1:
            raise StateError(message(
                WHO, f"leaves in files come from {len(stores)} states",
                "The files of a state go from step to step together.",
                "Use the state that one step has returned, or shard all of it, as NumPy arrays."
            ))  # fmt: skip
        return next(iter(stores.values()))

    def _engine_of(self, state: Sequence[Any]) -> TiledEngine:
        engine = super()._engine_of(state)
        assert isinstance(engine, TiledEngine)
        return engine

    def _new_engine(self, devices: Sequence[jax.Device]) -> TiledEngine:
        leaves = [self.leaves[i] for i in self.host.leaves]
        return TiledEngine(self.host, leaves, devices, self.update)
