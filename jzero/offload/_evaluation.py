# SPDX-License-Identifier: Apache-2.0
"""Evaluations whose parameters are stored on the hosts, and fetched layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import DEVICE, NVME
from jzero._policy import Memory, NoOffload, NVMe, Policy
from jzero.offload import _file_updates, _tiers
from jzero.offload._backends import InTier, OnDevices, check_params
from jzero.offload._device_step import DeviceStep
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.offload.nvme._tile_layout import TileLayout
from jzero.segments._planned import PlannedStep
from jzero.segments._whole import WholeStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.plan._backend import Backend, Leaves, Shared, StepProgram
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stages import StageAxes

_LEAST_SLICE = 2**16  # bytes that are worth a read of their own


class ReadFromHost(InTier):
    @property
    def tier(self) -> str:  # type: ignore[override]
        return self.window.tier

    def store(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, OptimizerProgram]:  # fmt: skip
        """Offloads parameters, unless they are in files already; there is no optimizer program."""
        self.check(stage_axes)
        there = any(leaf.tier == NVME for leaf in leaves)
        if not (there and self.tier == NVME):
            leaves = tuple(dataclasses.replace(leaf, tier=DEVICE) for leaf in leaves)
            leaves = _tiers.with_params(self, leaves, stage_axes)
        return leaves, OptimizerProgram((), ())

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> StoreSpec | None:  # fmt: skip
        """Files that are written once; layers may fetch slices of leaves, or whole ones."""
        policy, mesh = self.params, shardings[0].mesh
        if not isinstance(policy, NVMe):
            return None
        slices = [_slices(leaf) for leaf in leaves]
        layout = _file_updates.layout_to_read(leaves, slices, _file_updates.tile_bytes(policy))
        identity = _file_updates.identity_of(leaves, mesh, shard_axes)
        return StoreSpec(
            Path(policy.path), policy.host_bytes, False, False, TileLayout(()), identity, mesh, layout,
        )  # fmt: skip

    def step(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], shared: Shared
    ) -> StepProgram:
        plan = planned.plan
        if not any(leaf.is_streamed for i, leaf in enumerate(plan.leaves) if i not in plan.unread):
            return WholeStep(planned, shardings)
        return DeviceStep(planned, shardings, self.window)


def _slices(leaf: LeafPlan) -> int:
    """In how many slices along dim 0 a leaf is stored whose readers are not known; 1 for small slices."""
    num = leaf.shape_per_device[0] if leaf.shape else 1
    return num if leaf.nbytes_per_device >= num * _LEAST_SLICE else 1


def reading_backend(who: str, params: Any, trained: Policy | None) -> Backend:
    """What obeys an evaluation's `memory=` (`params`), given the train step's policy, if it has one."""
    chosen = params if params is not None else trained
    if chosen is None or isinstance(chosen, NoOffload):
        return OnDevices()
    check_params(who, chosen)
    if isinstance(trained, NoOffload):
        raise OptionError(message(
            who, f"memory={params!r}, and the parameters of the train step are on the devices",
            "With like=, a state is read where it is stored.",
            "Drop memory, or use mesh= in place of like= and place parameters with eval_step.shard."
        ))  # fmt: skip
    if trained is not None and type(trained) is not type(chosen):
        raise OptionError(message(
            who, f"memory={params!r}, and those of the train step are in {trained!r}",
            "With like=, a state is read where it is stored.",
            "Drop memory, use the train step's kind of policy, or mesh= in place of like=."
        ))  # fmt: skip
    if isinstance(params, NVMe) and (params.resume or params.in_place or params.gradients):
        raise OptionError(message(
            who, f"memory={params!r}", "An evaluation writes the files of its state once.",
            "Drop resume, in_place and gradients."))  # fmt: skip
    return ReadFromHost(Memory(params=chosen))
