# SPDX-License-Identifier: Apache-2.0
"""The backends of train steps, one for each memory in which optimizer state may be stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import HOST, NVME, PINNED
from jzero._policy import HostCPU, Memory, NoOffload, NVMe, PinnedHost, Policy
from jzero.offload import _tiers
from jzero.offload._device_step import DeviceStep
from jzero.offload._file_updates import FileUpdates
from jzero.offload._host_step import HostStep
from jzero.offload._memory_updates import MemoryUpdates
from jzero.offload._slicing import device_buckets
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.segments._planned import PlannedStep
from jzero.segments._whole import WholeStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.plan._backend import Backend, Leaves, Shared, StepProgram
from jzero.sharding.plan._interface import ProgramInterface
from jzero.sharding.plan._plan import Analysis, StepPlan, UpdateBucket
from jzero.sharding.plan._stages import StageAxes
from jzero.tracing import _call

WHO = _call.WHO
_DELAY_AFTER = 40  # ZeRO-Offload, section 5.2


class InTier(Backend):
    """What backends share. Parameters may be stored on the hosts with any of them, or in its files."""

    def check(self, stage_axes: StageAxes) -> None:
        if not self.streams:
            return
        if stage_axes.num_devices > 1 and not stage_axes.param_axes:
            raise OptionError(message(
                WHO, f"Memory(params={self.params!r}), and parameters are replicated",
                "Each device fetches its own shard of the parameters, and gathers.",
                "Use stage=3, or drop Memory(params=)."))  # fmt: skip
        if stage_axes.param_axes != stage_axes.shard_axes:
            raise OptionError(message(
                WHO, f"Memory(params={self.params!r}), parameters over {stage_axes.param_axes} and optimizer "
                f"state over {stage_axes.shard_axes}",
                "Parameters on the hosts are updated there, shard by shard of optimizer state.",
                "Use the same axes for Axes(params=) and Axes(optimizer=)."))  # fmt: skip
        if isinstance(self.state, HostCPU) and (self.state.delayed_update or self.state.ratio != 1):
            raise OptionError(message(
                WHO, f"{self}",
                "The host updates all parameters in their place, when the devices have computed with them.",
                "Drop delayed_update and ratio, or Memory(params=)."))  # fmt: skip

    def store(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, OptimizerProgram]:  # fmt: skip
        self.check(stage_axes)
        return _tiers.offloaded(self, leaves, frame, stage_axes)

    def buckets(
        self, leaves: Leaves, frame: Frame, update: OptimizerProgram, interface: ProgramInterface
    ) -> tuple[UpdateBucket, ...]:
        """What hosts and devices update; or, on the devices alone, as much at a time as there is room for."""
        if self.updates_on_host:
            return _tiers.buckets(leaves, update)
        return device_buckets(leaves, frame, update, interface, self.fetched_bytes)

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        return self.step(PlannedStep(plan, analysis, mesh), shardings, shared)

    def step(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], shared: Shared
    ) -> StepProgram:
        """One program, or parts and then buckets of the update; the devices update."""
        if not self.offloads:
            return WholeStep(planned, shardings)
        return DeviceStep(planned, shardings, self.window)


class OnDevices(InTier):
    """`NoOffload`: optimizer state on the devices."""


class InPinnedMemory(InTier):
    """`PinnedHost`: optimizer state in pinned memory, updated on the devices."""

    tier = PINNED

    @property
    def fetched_bytes(self) -> int:
        return self.state.device_bytes


class OnHostCPU(InTier):
    """`HostCPU`: optimizer state in the hosts' memory, updated there."""

    tier = HOST

    @property
    def share(self) -> Fraction | None:
        return None if self.state.ratio == "auto" else Fraction(str(self.state.ratio))

    @property
    def waits(self) -> bool:
        return self.state.delayed_update

    @property
    def delay_after(self) -> int | None:
        """How many steps are not delayed; None if none ever is."""
        after = _DELAY_AFTER if self.state.delay_after is None else self.state.delay_after
        return after if self.waits else None

    def store(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, OptimizerProgram]:  # fmt: skip
        """Optimizer state on the hosts, except what `ratio` leaves on the devices."""
        placed, update = super().store(leaves, frame, mesh, stage_axes)
        if self.waits:
            _tiers.check_delayed(leaves, frame, update)
        measured = self.state.ratio == "auto"
        if measured:
            ratio = _tiers.measured_share(placed, mesh, stage_axes, self.state.threads)
        else:
            ratio = float(self.state.ratio)
        return _tiers.shared(placed, update, ratio, measured), update

    def step(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], shared: Shared
    ) -> StepProgram:
        updates = functools.partial(
            MemoryUpdates, threads=self.state.threads, delay_after=self.delay_after, shared=shared
        )
        return HostStep(planned, shardings, self.window, updates)


class InFiles(InTier):
    """`NVMe`: optimizer state in files, updated by the hosts."""

    tier = NVME

    @property
    def first_tier(self) -> str:
        """Ordinary memory: only the step knows the layout of the files."""
        return HOST

    def step(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], shared: Shared
    ) -> StepProgram:
        updates = functools.partial(FileUpdates, policy=self.state)
        return HostStep(planned, shardings, self.window, updates)

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> StoreSpec | None:  # fmt: skip
        updates = step.updates if isinstance(step, HostStep) else None
        return updates.spec if isinstance(updates, FileUpdates) else None


_BACKENDS: dict[type[Policy], type[InTier]] = {
    NoOffload: OnDevices,
    PinnedHost: InPinnedMemory,
    HostCPU: OnHostCPU,
    NVMe: InFiles,
}


def backend_of(who: str, memory: Memory) -> Backend:
    """What obeys the policies of a train step, or of an estimate, if these go together."""
    state: Any = memory.optimizer
    params: Any = memory.params
    if isinstance(state, NVMe) and state.device_bytes is not None:
        raise OptionError(message(
            who, f"memory={state!r}", "device_bytes bounds parameters on a device, and this says where "
            "optimizer state is stored.", "Drop device_bytes, or move it to Memory(params=jzero.NVMe(...))."
        ))  # fmt: skip
    if not isinstance(params, NoOffload):
        check_params(who, params)
        if isinstance(params, NVMe):
            _check_together(who, state, params)
    elif isinstance(state, NVMe) and state.gradients:
        raise OptionError(message(
            who, f"memory={state!r}, and parameters are on the devices",
            "Gradients go into files layer by layer. With parameters on the devices one program makes "
            "all of them, and new parameters cross the host's memory, whole, too.",
            f"Write Memory(params=..., optimizer=...), both jzero.NVMe({state.path!r}, gradients=True), "
            "or drop gradients=True."))  # fmt: skip
    return _BACKENDS[type(state)](memory)


def check_params(who: str, params: Any) -> None:
    if not isinstance(params, PinnedHost | NVMe):
        raise OptionError(message(
            who, f"Memory(params={params!r})",
            "Parameters are on the devices, in pinned memory, or in files.",
            "Use Memory(params=jzero.PinnedHost(device_bytes=...)), jzero.NVMe(...), or drop it."
        ))  # fmt: skip


def _check_together(who: str, state: Policy, params: NVMe) -> None:
    """Parameters in files are updated with the optimizer state beside them."""
    if not isinstance(state, NVMe):
        raise OptionError(message(
            who, f"Memory(params={params!r}, optimizer={state!r})",
            "Parameters in files are read, updated and written with their optimizer state, tile by tile.",
            f"Use Memory(optimizer=jzero.NVMe({params.path!r})), too, or Memory(params=jzero.PinnedHost())."
        ))  # fmt: skip
    names = ("path", "in_place", "resume", "threads", "gradients")
    found = [
        f"{name}={getattr(params, name)!r} and {getattr(state, name)!r}"
        for name in names
        if getattr(state, name) != getattr(params, name)
    ]
    if found:
        raise OptionError(message(
            who, f"Memory(params=) and Memory(optimizer=) have {', '.join(found)}",
            "Parameters and optimizer state are in the same files.",
            "Give both the same; host_bytes and device_bytes may differ."))  # fmt: skip
