# SPDX-License-Identifier: Apache-2.0
"""`NVMe`: the policy under which optimizer state rests in files and passes through the host's memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import HOST, NVME
from jzero._quantities import make_int
from jzero.offload import _file_layout, _tiers
from jzero.offload._layered import NO_WINDOW, Window
from jzero.offload._nvme_step import FilePolicy, NVMeStep
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.offload.nvme._layout import TileLayout
from jzero.segments._planned import PlannedStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import UpdatePart
from jzero.sharding.plan._boundary import Boundary
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._offload import Leaves, Offload, Shared, StepProgram
from jzero.sharding.plan._plan import Analysis, StepPlan, Turn
from jzero.sharding.plan._stages import StageAxes

_LEAST_BYTES = 2**16
_LEAST_SLICE = 2**16  # Bytes that are read by themselves at little cost.


@dataclasses.dataclass(frozen=True)
class NVMe(Offload):
    """Optimizer state rests in files, on NVMe disks, and is updated tile by tile by the host's processors.

    A tile is one range of elements of all leaves that are updated together. A step reads, updates and writes
    tile after tile, all three at the same time, in few buffers::

        gradients = grad part(parameters, batch)     # each goes to the host when it is reduced
        for tile in tiles:
            moments, masters = read(tile)            # ahead, in other threads
            moments, masters, parameters = update(moments, masters, gradients)
            write(tile)                              # behind, in other threads
            copy(parameters, host -> device)
        commit                                       # now the new state counts, and the old one is consumed

    Each process has a file for each of its devices, for that device's shards. The update is that of
    `jzero.HostCPU`, to the bit, by the same kernels (best with `pip install jzero[offload]`), for leaves that
    are updated element by element; what is not (Adafactor's factored moments, Muon's products) is refused by
    name, as are updates that need other devices' shards.

    Traffic per step and device, for Psi parameters in its shard: as with `HostCPU` between device and host,
    and between host and disk the whole optimizer state each way: 12 Psi bytes read and 12 Psi written for
    Adam with masters. `jzero.estimate(..., memory=jzero.NVMe(path), rates=jzero.Rates(disk="6GB/s", ...))`
    has the time that takes, and what is written in a day, which wears a disk out.

    Memory: on each device as with `HostCPU`, and the new parameters beside the old ones until all is
    written. On the host `host_bytes` of each process, and pinned memory for gradients and parameters on
    their way (2 Psi bytes each in bfloat16). On the disk 24 Psi bytes, or 12 with `in_place`.

    What is in which tile follows from the step. So `init`, and `shard` and `restore` without the step's
    other arguments, leave optimizer state in the host's memory until the first step, unless there is a plan:
    call `train_step.plan(state, batch)` first, with shapes, for a state that the host has no room for.

    Failures: files have two slots, and a step writes the one that it does not read. A step that fails before
    its commit (a full or broken disk, no memory, Ctrl-C) leaves the state as it was, on the devices, too; a
    process that is killed at any time leaves files of the old or of the new step. Damaged tiles are found by
    their checksums. With `in_place`, and with `Memory(params=jzero.PinnedHost())`, whose parameters are
    updated in their place, a step that fails while it writes loses the state, by name.

    Parameters rest in the same files with `Memory(params=jzero.NVMe(path, device_bytes=...,
    host_bytes=...), optimizer=jzero.NVMe(path))`, at stage 3 (ZeRO-Infinity). The step runs layer by layer,
    as with `PinnedHost`, and each device's shard of a layer is read ahead of its turn::

        file -> pinned memory, in threads            # as far ahead as host_bytes have room
        pinned memory -> device                      # while the layer before computes
        compute, gradients -> pinned memory
        for tile in tiles: read, update, write       # parameters in it, beside masters and moments

    They count in two slots and one commit with the rest: whatever fails before it leaves the whole state as
    it was, and a kill leaves one step or the other, parameters included. Nothing is resident: between steps
    neither devices nor host have any of them. Traffic with disks: 2 Psi bytes read for each pass, and with
    masters 14 Psi each way for the update. Parameters that a step does not change (the base under LoRA) are
    written once, when the state is placed, and only read. The two policies agree in all but `host_bytes` and
    `device_bytes`. `jzero.shard_eval_step(..., memory=jzero.NVMe(path))` reads parameters so.

    Gradients wait for the update in pinned memory, 2 Psi bytes in bfloat16, unless `gradients=True`. Then
    they are written as layers end, where the tiles that they belong to will be written, and read with these
    tiles. So the host's memory does not grow with the model: beside both `host_bytes` it has the gradients
    of five layers at a time. It costs 2 Psi bytes more each way (4 in float32), of which the backward pass
    hides those that it writes, as far as the disk keeps up, and no space; with `in_place`, as much space.
    A clip by the norm of all gradients stays what it is: the devices compute what an update needs of all
    gradients. Where gradients have room in memory, a step moves less with them there.

    The files are scratch for one run, and no checkpoint: `jzero.Checkpointer` saves and restores such a state
    like any other, 256 MiB or a leaf at a time, while steps go on; the step after the next one waits until
    what is saved has been read. Files stay when the process ends. Each state that is alive has files of its
    own.

    >>> import tempfile, jax, jax.numpy as jnp, optax, jzero
    >>> tx = jzero.master_weights(optax.adamw(1e-2))
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> folder = tempfile.TemporaryDirectory()  # of a disk: "/nvme/run"
    >>> train_step = jzero.shard_train_step(step_fn, memory=jzero.NVMe(folder.name, host_bytes=2**20))
    >>> w, batch = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    >>> w, opt_state = train_step((w, tx.init(w)), batch)
    >>> opt_state.masters
    LeafArray(shape=(64, 64), dtype=float32, in files)
    >>> [(x.what, x.elements) for x in train_step.describe((w, opt_state), batch).crossings
    ...  if x.direction == "to disk"]  # of one of 8 devices: a master and two moments
    [('optimizer state', 512), ('optimizer state', 512), ('optimizer state', 512)]

    Attributes:
      path: a folder on the disk, absolute or of the working directory; made if it is not there. Several
        processes may name the same one.
      host_bytes: the most bytes of the host's memory for tiles in each process, 1 GiB by default, at least
        64 KiB. A sixteenth of it, up to 32 MiB, is a tile. In `Memory(params=)`: of parameters between the
        disk and the devices, those of all of the process's devices, pinned, and what they are read through.
      in_place: whether the new state is written over the old one: half of the disk's space, and a step that
        fails while it writes loses the state.
      resume: whether a state that is placed takes its optimizer state from the files that an earlier run has
        left, whatever the state itself has of it. They must be of the same leaves, mesh, processes and
        `host_bytes` (by which tiles are cut), and of the same step as the rest of the state, which comes from
        a checkpoint: `jzero.Checkpointer` stores an id of the step that the files have, and `jzero.restore`
        returns a state that knows it. A state without one (from an initialiser, NumPy, an older checkpoint)
        and files of another step or state are refused, and never overwritten; where there are no files, new
        ones are made. Both slots count, so the step before the last can be resumed, too. In one process,
        too, a state that is placed goes on with the files of one that is gone. False (default): files of an
        earlier run are refused.
      threads: how many threads update; by default as many as `HostCPU` has.
      device_bytes: in `Memory(params=)`, the most bytes of parameters on each device at any time, gathered
        ones included; 1 GiB by default. In `Memory(optimizer=)` there is none.
      gradients: whether gradients wait for the update in the files, too, and not in the host's memory: see
        above. With `Memory(params=)`, and the same in both.

    Reference:
      Rajbhandari, Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale
      Deep Learning", 2021, sections 5.1.1 and 5.2.2.
    """

    path: str | os.PathLike[str]
    host_bytes: int = 2**30
    in_place: bool = False
    resume: bool = False
    threads: int | None = None
    device_bytes: int | None = None
    gradients: bool = False
    tier: ClassVar[str] = NVME

    def __post_init__(self) -> None:
        is_path = isinstance(self.path, str | os.PathLike) and bool(os.fspath(self.path))
        if not is_path or "\0" in str(os.fspath(self.path)):
            raise OptionError(message(
                "NVMe", f"path={self.path!r}", "It is a folder on a disk of the devices' host.",
                'Use jzero.NVMe("/nvme/run").'))  # fmt: skip
        object.__setattr__(self, "path", str(Path(os.fspath(self.path)).absolute()))
        make_int(
            self, "NVMe", "host_bytes", _LEAST_BYTES, None,
            "It is how many bytes of the host's memory hold tiles of state, an int from 65536.",
            "Use host_bytes=2**30, or drop it.",
        )  # fmt: skip
        for name in ("in_place", "resume", "gradients"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(message(
                    "NVMe", f"{name}={getattr(self, name)!r}", "It is True or False.",
                    f"Drop it, or use {name}=True."))  # fmt: skip
        if self.threads is not None:
            make_int(
                self, "NVMe", "threads", 1, None, "It is how many threads update, an int from 1.",
                "Drop it to use all processors that this process may use.",
            )  # fmt: skip
        if self.device_bytes is not None:
            make_int(
                self, "NVMe", "device_bytes", 1, None,
                "It is how many bytes of parameters may be on a device at a time, an int from 1.",
                "Use device_bytes=2**30, or drop it.",
            )  # fmt: skip

    @property
    def slots(self) -> int:
        """The old state and the new one, or one over the other."""
        return 1 if self.in_place else 2

    @property
    def tiles_bytes(self) -> int:
        """`host_bytes`."""
        return self.host_bytes

    @property
    def gradients_in_files(self) -> bool:
        """`gradients`."""
        return self.gradients

    @property
    def resumes(self) -> bool:
        """`resume`."""
        return self.resume

    @property
    def first_tier(self) -> str:
        """Ordinary memory of the host: what is in which tile the step says."""
        return HOST

    def rest(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, UpdatePart]:  # fmt: skip
        """Optimizer state in files."""
        return _tiers.offloaded(self, leaves, frame, stage_axes)

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """What the host updates, and what rests on the devices."""
        return _tiers.turns(leaves, update)

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Gradients on the devices, their update on the host, tile by tile."""
        return self.step(PlannedStep(plan, analysis, mesh), shardings, shared)

    def step(
        self,
        planned: PlannedStep,
        shardings: Sequence[NamedSharding],
        shared: Shared,
        window: Window = NO_WINDOW,
    ) -> StepProgram:
        """The same; parameters that rest away from the devices, too, come to them in a `window`."""
        return NVMeStep(planned, shardings, self._files, shared, window)

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> StoreSpec | None:  # fmt: skip
        """The files of a state of this step."""
        return step.spec if isinstance(step, NVMeStep) else None

    def files_to_read(
        self, leaves: Leaves, mesh: Any, shard_axes: tuple[str, ...]
    ) -> StoreSpec:  # fmt: skip
        """Files of leaves that no step changes; layers may fetch slices of them, or all."""
        slices = [_slices(leaf) for leaf in leaves]
        layout = _file_layout.layout_to_read(leaves, slices, self._files.tile_bytes)
        identity = _file_layout.identity_of(leaves, mesh, shard_axes)
        return StoreSpec(
            Path(self.path), self.host_bytes, False, False, TileLayout(()), identity, mesh, layout,
        )  # fmt: skip

    @property
    def _files(self) -> FilePolicy:
        return FilePolicy(
            Path(self.path), self.host_bytes, self.in_place, self.resume, self.threads,
            self.gradients,
        )  # fmt: skip


def _slices(leaf: LeafPlan) -> int:
    """In how many slices along dim 0 a leaf lies whose readers are not known: small ones lie together."""
    num = leaf.shape_per_device[0] if leaf.shape else 1
    return num if leaf.nbytes_per_device >= num * _LEAST_SLICE else 1
