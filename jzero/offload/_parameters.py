# SPDX-License-Identifier: Apache-2.0
"""`ParameterOffload`: parameters rest on the hosts, beside optimizer state that may, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero.offload import _tiers
from jzero.offload._host_step import HostStep
from jzero.offload._layered import Window
from jzero.offload._nvme import NVMe
from jzero.offload._policy import HostCPU, NoOffload, PinnedHost
from jzero.offload._slicing import Slicer
from jzero.offload._streamed import StreamedStep
from jzero.segments._planned import PlannedStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut import _subgraphs
from jzero.sharding.cut._subgraphs import UpdatePart
from jzero.sharding.plan import _leaves
from jzero.sharding.plan._boundary import Boundary
from jzero.sharding.plan._layout import Shard
from jzero.sharding.plan._offload import Leaves, Offload, Shared, StepProgram
from jzero.sharding.plan._plan import Analysis, StepPlan, Turn
from jzero.sharding.plan._stages import PARAMETER, StageAxes
from jzero.tracing import _call

WHO = _call.WHO
# Of parameters in files, where nothing else was said.
_DEVICE_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class ParameterOffload(Offload):
    """What `Memory` says of optimizer state and of parameters.

    Attributes:
      state: where optimizer state rests.
      params: where parameters rest, and how many bytes of them are on a device at a time.
    """

    state: Offload
    params: PinnedHost | NVMe

    def __str__(self) -> str:
        if not self.state.offloads:
            return f"Memory(params={self.params!r})"
        return f"Memory(params={self.params!r}, optimizer={self.state!r})"

    @property
    def tier(self) -> str:  # type: ignore[override]
        """Where optimizer state rests."""
        return self.state.tier

    @property
    def offloads(self) -> bool:
        """Parameters rest on the hosts."""
        return True

    @property
    def streams(self) -> bool:
        """Parameters rest on the hosts."""
        return True

    @property
    def slots(self) -> int:
        """How often a disk has optimizer state."""
        return self.state.slots

    @property
    def tiles_bytes(self) -> int:
        """The most bytes of it in a process's memory, if it rests on a disk."""
        return self.state.tiles_bytes

    @property
    def share(self) -> Fraction | None:
        """The share of optimizer state that is offloaded."""
        return self.state.share

    @property
    def visiting_bytes(self) -> int:
        """The most bytes that visit the devices for the update at any time."""
        return self.state.visiting_bytes or self.streamed_bytes

    @property
    def streamed_bytes(self) -> int:
        """The most bytes of parameters on each device at any time, gathered ones included."""
        return self.params.device_bytes or _DEVICE_BYTES

    @property
    def fetched_bytes(self) -> int:
        """The most bytes of a process's memory for parameters on their way from files."""
        return self.params.host_bytes if isinstance(self.params, NVMe) else 0

    @property
    def window(self) -> Window:
        """Both."""
        return Window(self.streamed_bytes, self.fetched_bytes)

    @property
    def gradients_in_files(self) -> bool:
        """As the other policy says."""
        return self.state.gradients_in_files

    @property
    def resumes(self) -> bool:
        """As of the files of either; both say the same."""
        return self.state.resumes or self.params.resumes

    @property
    def waits(self) -> bool:
        """Whether gradients of a step wait for the next one."""
        return self.state.waits

    def rest(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, UpdatePart]:  # fmt: skip
        """Parameters in shards, in pinned memory or in files; optimizer state as the other policy has it."""
        self.check(stage_axes)
        resting, moments = leaves, _tiers.optimizer_leaves(leaves, frame, stage_axes)
        if moments or not self.fetched_bytes:  # Files may have parameters alone.
            resting, _ = self.state.rest(leaves, frame, mesh, stage_axes)
        both = self.with_params_there(resting, stage_axes)
        params = [i for i, leaf in enumerate(both) if leaf.is_streamed]
        if not params:
            raise OptionError(message(
                WHO, f"Memory(params={self.params!r}), and no parameter is worth it",
                f"Those of Axes(min_shard_bytes={stage_axes.min_bytes}) that are sharded are meant, and "
                f"Axes(replicate={stage_axes.full!r}) finds those that rest whole.",
                "Change these, or drop Memory(params=)."))  # fmt: skip
        return both, _subgraphs.cut_update(frame, moments, params)

    def with_params_there(self, leaves: Leaves, stage_axes: StageAxes) -> Leaves:
        """The leaves with those parameters in their tier that rest in shards, and are worth it."""
        whole = [i for i, leaf in enumerate(leaves)
                 if stage_axes.num_devices > 1 and not isinstance(leaf.layout, Shard)]  # fmt: skip
        return _leaves.offload(leaves, self.params.tier, stage_axes.min_bytes, whole, PARAMETER)

    def check(self, stage_axes: StageAxes) -> None:
        """Raises an `OptionError` if it cannot be obeyed on these axes."""
        if stage_axes.num_devices > 1 and not stage_axes.param_axes:
            raise OptionError(message(
                WHO, f"Memory(params={self.params!r}), and parameters rest whole on every device",
                "Each device fetches its own shard of the parameters, and gathers.",
                "Use stage=3, or drop Memory(params=)."))  # fmt: skip
        if stage_axes.param_axes != stage_axes.shard_axes:
            raise OptionError(message(
                WHO, f"Memory(params={self.params!r}), parameters over {stage_axes.param_axes} and optimizer "
                f"state over {stage_axes.shard_axes}",
                "Parameters on the hosts are updated where they rest, shard by shard of optimizer state.",
                "Use the same axes for Axes(params=) and Axes(optimizer=)."))  # fmt: skip
        if isinstance(self.state, HostCPU) and (self.state.delayed_update or self.state.ratio != 1):
            raise OptionError(message(
                WHO, f"{self}",
                "The host updates all parameters in their place, when the devices have computed with them.",
                "Drop delayed_update and ratio, or Memory(params=)."))  # fmt: skip

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """The host's, or as many pieces at a time as there is room for on the devices."""
        if self.updates_on_host:
            return _tiers.turns(leaves, update)
        return Slicer(leaves, frame, update, boundary, self.visiting_bytes).turns()

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Layer by layer, and then the update where optimizer state rests."""
        planned, window = PlannedStep(plan, analysis, mesh), self.window
        if isinstance(self.state, HostCPU):
            return HostStep(planned, shardings, self.state.threads, None, shared, window)
        if isinstance(self.state, NVMe):
            return self.state.step(planned, shardings, shared, window)
        return StreamedStep(planned, shardings, window)

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> Any:  # fmt: skip
        """The files of a state of this step; None if none of it rests in some."""
        return self.state.files_of(step, leaves, shardings, shard_axes)

    @property
    def first_tier(self) -> str:
        """Where optimizer state rests before a step says which it is."""
        return self.state.first_tier


def policy_of(who: str, state: Any, params: Any) -> Any:
    """`Memory(optimizer=)` and `Memory(params=)` as one policy.

    Raises:
      OptionError: `params` is no policy for parameters, or does not fit `state`.
    """
    if isinstance(state, NVMe) and state.device_bytes is not None:
        raise OptionError(message(
            who, f"{state}", "device_bytes bounds parameters on a device, and this says where optimizer "
            "state is stored.", "Drop device_bytes, or move it to Memory(params=jzero.NVMe(...))."
        ))  # fmt: skip
    if isinstance(params, NoOffload):
        if isinstance(state, NVMe) and state.gradients:
            raise OptionError(message(
                who, f"{state}, and parameters are on the devices",
                "Gradients go into files layer by layer. With parameters on the devices one program makes "
                "all of them, and new parameters cross the host's memory, whole, too.",
                f"Write Memory(params=..., optimizer=...), both jzero.NVMe({state.path!r}, gradients=True), "
                "or drop gradients=True."
            ))  # fmt: skip
        return state
    check_params(who, params)
    if not isinstance(state, Offload):
        return state
    if isinstance(params, NVMe):
        _check_together(who, state, params)
    return ParameterOffload(state, params)


def check_params(who: str, params: Any) -> None:
    """Raises an `OptionError` unless parameters can rest as this policy says."""
    if not isinstance(params, PinnedHost | NVMe):
        raise OptionError(message(
            who, f"Memory(params={params!r})",
            "Parameters are on the devices, in pinned memory, or in files.",
            "Use Memory(params=jzero.PinnedHost(device_bytes=...)), jzero.NVMe(...), or drop it."
        ))  # fmt: skip


def _check_together(who: str, state: Offload, params: NVMe) -> None:
    """Parameters in files are updated with the optimizer state beside them."""
    if not isinstance(state, NVMe):
        raise OptionError(message(
            who, f"Memory(params={params!r}, optimizer={state!r})",
            "Parameters in files are read, updated and written with their optimizer state, tile by tile.",
            f"Use Memory(optimizer=jzero.NVMe({params.path!r})), too, or Memory(params=jzero.PinnedHost())."
        ))  # fmt: skip
    names = ("path", "in_place", "resume", "threads", "gradients")
    found = [
        f"{name}={getattr(state, name)!r} and {getattr(params, name)!r}"
        for name in names
        if getattr(state, name) != getattr(params, name)
    ]
    if found:
        raise OptionError(message(
            who, f"Memory(params=) and Memory(optimizer=) have {', '.join(found)}",
            "Parameters and optimizer state are in the same files.",
            "Give both the same; host_bytes and device_bytes may differ."))  # fmt: skip
