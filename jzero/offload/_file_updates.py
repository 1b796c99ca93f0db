# SPDX-License-Identifier: Apache-2.0
"""`FileUpdates`: updates leaves in files a tile at a time, read ahead and written behind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero._errors import OptionError, StateError, describe_leaf, first_of, message
from jzero._memory_kinds import HOST, NVME, PINNED, HostNeed
from jzero._policy import NVMe
from jzero._quantities import readable_bytes
from jzero.ir._rules import size_in_bytes
from jzero.offload._early_plan import EarlyBucket
from jzero.offload._file_run import EarlyTiles, FileRun
from jzero.offload._gradient_writes import PARTS, GradientWrites, buffer_sizes
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_updates import HostUpdates
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.kernels._tiled_update import TiledUpdate
from jzero.offload.kernels._tiles import of_whole_leaves
from jzero.offload.kernels._writer import TYPES
from jzero.offload.memory import _storage
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._nvme_store import BUFFERS, NVMeStore, StoreSpec
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._job_threads import JobThreads
from jzero.offload.nvme._tile_layout import PAGE, TileLayout
from jzero.offload.schedule._ops import Value
from jzero.segments._segment import Var
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stored_layout import REPLICATED
from jzero.tracing import _call

if TYPE_CHECKING:
    from jzero.offload._host_step import HostStep

WHO = _call.WHO
# Tiles in the buffers: enough that the four reading and four writing threads of a sweep do not wait for room.
_TILES = 16
# Bytes of a tile with which a disk is as fast as it can be.
_TILE_BYTES = 2**25


class FileUpdates(HostUpdates):
    """Updates leaves in files tile by tile, and parameters in pinned memory in place, beside the tiles.

    Until the new state is committed, all of the old one is kept, on the devices, too: a step that fails
    leaves it as it was, unless files are written `in_place`, or parameters are stored in pinned memory.
    """

    store, consumes, assumes = NVME, False, True
    buffers = BUFFERS

    def __init__(self, step: HostStep, policy: NVMe):
        """Raises an `OptionError` if a leaf cannot be updated a tile at a time."""
        # Gradients that wait in files, and in how many slices each is made.
        self._waiting: dict[Var, int] = {}
        self._policy = policy
        self._memory: list[np.ndarray] = []  # Gradients are written through it.
        self.early_tiles: EarlyTiles | None = None  # made by the first run
        super().__init__(step)
        # Leaves in files that no step changes.
        self._frozen = [i for i in self.hosted if i not in self.host.leaves]
        self._check_tiles()
        if policy.gradients:
            layered = self.step.layered
            assert layered is not None, "refused where policies are made"
            mine = layered.gradients.keys() - {*step.stays, *layered.literals}
            self._waiting = layered.send_to_files([v for v in self.in_tiles() if v in mine])
            self.set_sends()

    @property
    def begins_early(self) -> bool:
        """Files with two versions only; gradients that wait in files are read with their tiles."""
        return not (self._policy.in_place or self._policy.gradients)

    def _left(self, subgraphs: Sequence[int]) -> HostBucket:
        return self.host  # Tiles that are updated already are left out.

    def in_tiles(self) -> Collection[Var]:
        found = self.host.traced.inputs_in_tiles(self.residents.values())
        return [var for i, var in enumerate(self.host.reads) if i in found]

    @functools.cached_property
    def residents(self) -> dict[int, int]:
        """The host's leaves in pinned memory: index to place among all leaves of the host."""
        leaves = self.step.leaves
        return {i: k for k, i in enumerate(self.host.leaves) if leaves[i].tier == PINNED}

    @property
    def overwritten(self) -> Collection[int]:
        """Parameters in pinned memory: files have both versions."""
        return self.residents

    @functools.cached_property
    def inputs(self) -> dict[Var, int]:
        return {var: i for i, var in enumerate(self.host.reads)}

    def arriving(self, bucket: EarlyBucket) -> list[Var]:
        return [v for v in bucket.begins_with if v.aval.shape and v not in self.step.known]

    def takes(self, bucket: EarlyBucket) -> list[Var]:
        """Its gradients, and all that the first tile needs: known values, and the numbers of all buckets."""
        every = [v for each in self.early.buckets for v in each.begins_with]
        others = [v for v in every if not v.aval.shape]
        return [*dict.fromkeys([*self.arriving(bucket), *others, *self.step.known])]

    @functools.cached_property
    def late_reads(self) -> list[Var]:
        return self.host.reads

    def goes_to(self, var: Var) -> str:
        return NVME if var in self._waiting else PINNED

    def _check_tiles(self) -> None:
        host, leaves = self.host, self.step.leaves
        if not (bad := host.traced.untiled(self.residents.values())):
            return
        self._check_dtypes()
        params = any(leaves[i].is_streamed for i in self.hosted)
        whole = (
            "memory=jzero.Memory(params=jzero.PinnedHost(), optimizer=jzero.HostCPU())" if params
            else "memory=jzero.HostCPU()")  # fmt: skip
        # A shard of one element is updated as a number.
        single = any(x.size == 1 for x in host.traced.state)
        small = "; or leave min_shard_bytes at its default: a shard has one element" * single
        raise OptionError(message(
            WHO, bad, "State in files is updated in ranges of elements, each by itself, of gradients "
            "that have as many.", f"Use {whole}, which has whole leaves in memory{small}.", shown=6
        ))  # fmt: skip

    def _check_dtypes(self) -> None:
        """Refuses dtypes that no kernel computes with: once, not for each equation that has one."""
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

    @property
    def moved(self) -> Sequence[int]:
        """The leaves in files: not parameters in pinned memory."""
        return [i for i in self.hosted if i in self.host.leaves]

    @functools.cached_property
    def update(self) -> TiledUpdate:
        host, policy, fetched = self.host, self._policy, self._fetched
        arriving = {
            v: max(bucket.num_slices, 1)
            for bucket in self.early.buckets for v in self.arriving(bucket)
        }  # fmt: skip
        return TiledUpdate(
            host.traced, tile_bytes=tile_bytes(policy), threads=policy.threads,
            resident=self.residents.values(),
            lone={k: fetched[i] for k, i in enumerate(host.leaves) if i in fetched},
            gradients={i: self._waiting[v] for i, v in enumerate(host.reads) if v in self._waiting},
            arriving={i: arriving[v] for i, v in enumerate(host.reads) if v in arriving},
        )  # fmt: skip

    @functools.cached_property
    def _fetched(self) -> dict[int, int]:
        """Leaves that layers fetch from files, by index, and in how many slices."""
        slices = self.step.layered.num_slices() if self.step.layered else {}
        found = {self.step.invars.index(var): num for var, num in slices.items()}
        return {i: num for i, num in found.items() if i in self.hosted}

    @functools.cached_property
    def spec(self) -> StoreSpec:
        policy, host, leaves, update = self._policy, self.host, self.step.leaves, self.update
        # The files of leaves that no step changes.
        slices = [self._fetched.get(i, 0) for i in self._frozen]
        own = layout_to_read([leaves[i] for i in self._frozen], slices, tile_bytes(policy))
        kept = TileLayout(update.frozen.tiles + own.tiles)
        identity = identity_of([leaves[i] for i in self.hosted], host.mesh, host.shard_axes)
        return StoreSpec(
            Path(policy.path), policy.host_bytes, policy.in_place, policy.resume, update.layout, identity,
            host.mesh, kept, update.gradients, sum(buffer_sizes(update.gradients, policy.host_bytes)),
        )  # fmt: skip

    def code_paths(self) -> str:
        policy, layered = self._policy, self.step.layered
        nbytes = sum(self.step.leaves[i].nbytes_per_device for i in self.moved)
        slots = "once, written over" if policy.in_place else "twice, the new one beside the old"
        most = layered.host_bytes if layered else 0
        lines = [
            "parameters come from there, read ahead of the part that fetches them, through "
            f"{readable_bytes(most)} of each process's memory"
        ] * bool(most)
        if self.gradients_wait:
            reads = zip(self.host.reads, self.host.traced.inputs, strict=False)
            waiting = sum(size_in_bytes(x) for var, x in reads if var in self._waiting)
            where = "behind their tiles" if policy.in_place else "where their tiles will be written"
            lines.append(
                f"gradients wait there, too, {where}: {readable_bytes(waiting)} for each device, written as "
                "layers end, and read with their tiles"
            )
        return "\n".join([
            f"tile by tile, each of up to {readable_bytes(tile_bytes(policy))}: read ahead, updated, written "
            f"behind, in {readable_bytes(policy.host_bytes)} of each process's memory",
            f"in {policy.path}: {readable_bytes((2 - policy.in_place) * nbytes)} for each device "
            f"({slots}); a step reads {readable_bytes(nbytes)} and writes {readable_bytes(nbytes)}",
            *lines,
            super().code_paths(),
        ])  # fmt: skip

    @property
    def gradients_wait(self) -> bool:
        return bool(self._waiting)

    def needs(self) -> tuple[HostNeed, ...]:
        """Memory for tiles, which the devices of a process share, and for gradients on their way to files."""
        mesh, layered = self.host.mesh, self.step.layered
        num = len(mesh.local_devices) if isinstance(mesh, Mesh) else 1
        ring = HostNeed("tiles of optimizer state", HOST, -(-self._policy.host_bytes // num))
        arriving = PARTS * layered.arriving_bytes() if layered else 0
        gradients = HostNeed("gradients on their way to files", PINNED, arriving)
        return (ring, *super().needs(), gradients)

    def run(self, state: Sequence[Any], num_steps: int = 0) -> FileRun:
        leaves: list[FileStorage] = [state[i] for i in self.hosted]
        stores = {id(leaf.store): leaf.store for leaf in leaves}
        if len(stores) > 1:
            raise StateError(message(
                WHO, f"leaves in files come from {len(stores)} states",
                "The files of a state go from step to step together.",
                "Use the state that one step has returned, or shard all of it, as NumPy arrays."
            ))  # fmt: skip
        return FileRun(self, state, next(iter(stores.values())))

    @contextlib.contextmanager
    def writes(self, store: NVMeStore, state: Sequence[Any]) -> Iterator[GradientWrites]:
        # A signal's handler that runs a step meanwhile has buffers of its own.
        buffers, self._memory = self._memory, []
        sizes = buffer_sizes(self.update.gradients, self._policy.host_bytes)
        buffers = buffers or [pages(size) for size in sizes]
        devices = state[self.hosted[0]].placement.devices
        with JobThreads(buffers) as threads:
            writes = GradientWrites(store, self._gradient_names, devices, threads)
            yield writes
            writes.end()
        self._memory = buffers

    @functools.cached_property
    def _gradient_names(self) -> dict[Value, str]:
        assert self.step.layered is not None
        names, gradients = self.update.gradient_names, self.step.layered.gradients
        reads = enumerate(self.host.reads)
        return {gradients[var]: names[i] for i, var in reads if i in names}

    def _new_engine(self, devices: Sequence[jax.Device]) -> TiledEngine:
        leaves = [self.step.leaves[i] for i in self.host.leaves]
        return TiledEngine(self.host, leaves, devices, self.update)


def tile_bytes(policy: NVMe) -> int:
    return min(policy.host_bytes // _TILES // PAGE * PAGE, _TILE_BYTES)


def layout_to_read(
    leaves: Sequence[LeafPlan], num_slices: Sequence[int], tile_bytes: int
) -> TileLayout:
    """The layout of leaves that nobody updates; layers fetch each in `num_slices`, or not at all (0)."""
    avals = [jax.ShapeDtypeStruct(x.shape_per_device, jnp.dtype(x.dtype)) for x in leaves]
    return of_whole_leaves(avals, num_slices, [x.path for x in leaves], tile_bytes)


def identity_of(
    leaves: Sequence[LeafPlan], mesh: Any, shard_axes: tuple[str, ...]
) -> dict[str, Any]:
    """Whose state each file of this process has, by its name."""
    place_of = _storage.places(mesh, shard_axes)
    described = []
    for leaf in leaves:
        # Over Auto axes its parts are in several files, too.
        spec = f" {_stored_layout.partition_spec(REPLICATED, leaf.automatic)}" * any(leaf.automatic)
        described.append(f"{describe_leaf(leaf.path, leaf.padded_shape, leaf.dtype)}{spec}")
    state = {
        "leaves": described,
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
    }
    return {
        f"shard-{i}.tiles": {**state, "place": list(place_of[device])}
        for i, device in enumerate(_storage.keepers(mesh, shard_axes))
    }
