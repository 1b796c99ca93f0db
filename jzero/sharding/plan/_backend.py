# SPDX-License-Identifier: Apache-2.0
"""`Backend`: what the plan asks of a step's `Memory`, and the programs and streaming budget it is given.

`offload/_backends.py` has one for each memory; `offload/execute/_stream.py` streams within a `Window`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import MutableMapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from jzero._memory_kinds import DEVICE, HOST, NVME, PINNED
from jzero._policy import Memory, NVMe, PinnedHost
from jzero.offload.schedule._ops import Value, Wait
from jzero.offload.schedule._schedule import Schedule
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.plan._interface import ProgramInterface
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import Analysis, StepPlan, UpdateBucket
from jzero.sharding.plan._stages import StageAxes

Leaves = tuple[LeafPlan, ...]
_DEVICE_BYTES = 2**30  # of parameters in files, where nothing else was said
# What the programs of one step share, which are for batches of several shapes.
Shared = MutableMapping[Any, Any]


def waits(plan: StepPlan) -> tuple[Wait, ...]:
    """Activations that are offloaded by a program with both passes; separate programs send and fetch them."""
    if plan.in_parts:
        return ()
    # Layer by layer all microbatches pass a layer before the next one.
    copies = plan.accumulate if plan.microbatches.by_layer else 1
    return tuple(
        Wait(
            Value("activation", r.dtype, math.prod(r.shape), r.nbytes),
            r.times * plan.accumulate,
            copies,
        )
        for r in plan.activations or ()
    )


class StepProgram(Protocol):
    """A way to run a planned step. It decides nothing: it obeys the plan.

    Values are global arrays: those of the state as they are stored, padded. `found` is what the partitioner
    made of it (`Partitioned`); with offload, the program of the gradients.
    """

    @property
    def found(self) -> Any: ...

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step: `(state leaves, argument leaves) -> (state leaves, outputs)`; donates the state."""
        ...

    def run(self, state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """`__call__` as one function on the devices, to be traced into an outer program."""
        ...

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        """The trace of `run`, which processes compare before they call it."""
        ...

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """What a step starts on the devices, in order: a jaxpr of programs and of copies, of global arrays.

        The step is on an abstract mesh, and never runs: a trace may leave what it made in its caches.
        """
        ...

    def schedule(self) -> Schedule:
        """A step's transfers, memory and dependencies as data."""
        ...

    def code_paths(self) -> str:
        """How the host updates each leaf and sends its results; '' if it updates none."""
        ...


class Window(NamedTuple):
    """How much of the streamed parameters is on the devices, or on its way to them, at a time."""

    # The most bytes on each device, gathered ones included; 0 if all are stored on the devices.
    device_bytes: int = 0
    # The most bytes from files in this process's memory; 0 if nothing comes from files.
    host_bytes: int = 0

    @property
    def tier(self) -> str:
        return NVME if self.host_bytes else PINNED


@dataclasses.dataclass(frozen=True)
class Backend(abc.ABC):
    """What obeys the policies of a step, `memory`. It answers for them: nobody asks which one it is."""

    memory: Memory = Memory()
    tier: ClassVar[str] = DEVICE  # where offloaded optimizer state is stored

    def __str__(self) -> str:
        if not self.streams:
            return f"memory={self.state!r}"
        also = f", optimizer={self.state!r}" if self.tier != DEVICE else ""
        return f"Memory(params={self.params!r}{also})"

    @property
    def state(self) -> Any:
        return self.memory.optimizer

    @property
    def params(self) -> Any:
        return self.memory.params

    @property
    def window(self) -> Window:
        if isinstance(self.params, NVMe):
            return Window(self.params.device_bytes or _DEVICE_BYTES, self.params.host_bytes)
        return Window(self.params.device_bytes) if isinstance(self.params, PinnedHost) else Window()

    @property
    def streams(self) -> bool:
        """Whether parameters are stored on the hosts or in files."""
        return self.window.device_bytes > 0

    @property
    def offloads(self) -> bool:
        return self.tier != DEVICE or self.streams

    @property
    def updates_on_host(self) -> bool:
        """Whether the hosts update offloaded state."""
        return self.tier in (HOST, NVME)

    @property
    def first_tier(self) -> str:
        """Where leaves are stored before the step says which of them are offloaded."""
        return self.tier

    @property
    def files(self) -> NVMe | None:
        return self.state if isinstance(self.state, NVMe) else None

    @property
    def resumes(self) -> bool:
        """Whether placing a state resumes from existing files."""
        return any(isinstance(x, NVMe) and x.resume for x in (self.state, self.params))

    @property
    def share(self) -> Fraction | None:
        """The share of optimizer state, by bytes, that is offloaded; None before it is measured."""
        return Fraction(int(self.tier != DEVICE))

    @property
    def fetched_bytes(self) -> int:
        """The most bytes of offloaded state on each device at a time; 0 if updated where it is stored."""
        return self.window.device_bytes

    @property
    def waits(self) -> bool:
        """Whether gradients of a step are applied in the next one."""
        return False

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> Any:  # fmt: skip
        """The files of `leaves` (`StoreSpec`); None if they are in memory, or not known yet.

        step: what runs on it, if that is known; shard_axes: the mesh axes over which shards differ.
        """
        return None

    @abc.abstractmethod
    def store(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, OptimizerProgram]:
        """The leaves with their tiers, and the optimizer program: what depends on offloaded ones."""

    @abc.abstractmethod
    def buckets(
        self, leaves: Leaves, frame: Frame, update: OptimizerProgram, interface: ProgramInterface
    ) -> tuple[UpdateBucket, ...]:
        """The buckets in which the optimizer program runs."""

    @abc.abstractmethod
    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Runs the plan on a mesh, which may be abstract; `shardings` are of the state's stored leaves."""
