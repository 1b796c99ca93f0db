# SPDX-License-Identifier: Apache-2.0
"""Evaluations whose parameters rest on the hosts: read layer by layer, from where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import DEVICE, NVME
from jzero.offload._layered import LayeredSegment, Window
from jzero.offload._nvme import NVMe
from jzero.offload._parameters import ParameterOffload, check_params
from jzero.offload._policy import NO_OFFLOAD, NoOffload, PinnedHost
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Values
from jzero.segments._whole import WholeStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import UpdatePart
from jzero.sharding.plan._boundary import Boundary
from jzero.sharding.plan._offload import Leaves, Offload, Shared, StepProgram
from jzero.sharding.plan._plan import Analysis, StepPlan, Turn
from jzero.sharding.plan._stages import StageAxes


class ReadFromHost(ParameterOffload):
    """What `Memory(params=)` says of a state that is read: nothing is updated."""

    @property
    def tier(self) -> str:  # type: ignore[override]
        """Where parameters rest."""
        return self.params.tier

    @property
    def first_tier(self) -> str:
        """The same."""
        return self.tier

    def rest(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes
    ) -> tuple[Leaves, UpdatePart]:  # fmt: skip
        """Parameters in their tier, and no update part; if some are in files already, those and no others."""
        self.check(stage_axes)
        there = any(leaf.tier == NVME for leaf in leaves)
        if not (there and self.tier == NVME):
            leaves = tuple(dataclasses.replace(leaf, tier=DEVICE) for leaf in leaves)
            leaves = self.with_params_there(leaves, stage_axes)
        return leaves, UpdatePart((), ())

    def files_of(
        self, step: StepProgram | None, leaves: Leaves, shardings: Sequence[NamedSharding],
        shard_axes: tuple[str, ...],
    ) -> StoreSpec | None:  # fmt: skip
        """Files of leaves that are written once, in one slot, each leaf by itself."""
        if not isinstance(self.params, NVMe):
            return None
        return self.params.files_to_read(leaves, shardings[0].mesh, shard_axes)

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """None."""
        return ()

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Part by part, if it reads such parameters."""
        planned = PlannedStep(plan, analysis, mesh)
        if not any(leaf.is_streamed for i, leaf in enumerate(plan.leaves) if i not in plan.unread):
            return WholeStep(planned, shardings)
        return LayeredEvaluation(planned, shardings, self.window)


class LayeredEvaluation:
    """An evaluation part by part; nothing is consumed."""

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window):
        """Makes the programs.

        Args:
          planned: the evaluation.
          shardings: where the state rests.
          window: how many bytes of parameters that rest away from the devices may be on each at a time.
        """
        builder = Builder(planned, shardings)
        self._invars, self._segment = planned.frame.jaxpr.invars, builder.grad_part()
        self.found = builder.found
        self._layered = LayeredSegment(planned, self._segment, (), window)

    def run(self, state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """See `StepProgram`."""
        outs = self._segment(self._values(state, arrays), self._segment.run)
        return [], [outs[i] for i in range(len(outs))]

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        """See `StepProgram`."""
        return jax.jit(self.run).trace(state, arrays)

    def roads(self) -> str:
        """The host updates nothing."""
        return ""

    def _values(self, state: Sequence[Any], arrays: Sequence[Any]) -> Values:
        return dict(zip(self._invars, [*state, *arrays], strict=True))

    def schedule(self) -> Schedule:
        """Its parts."""
        return Schedule(self._layered.ops, self._layered.buffers())

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`; of a `while` one turn."""
        return jax.make_jaxpr(self.__call__)(state, arrays)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs it."""
        _, outs = self._layered(self._values(state, arrays))
        return [], outs


def reading_policy(who: str, params: Any, trained: Offload | None) -> Offload:
    """`Memory(params=)` of an evaluation.

    Args:
      who: asks.
      params: what it was given; None if nothing.
      trained: where parameters of the train step rest whose state it reads; None if there is none.

    Raises:
      OptionError: it is no policy for parameters, or they rest on the devices.
    """
    chosen = params if params is not None else trained
    if chosen is None or isinstance(chosen, NoOffload):
        return NO_OFFLOAD
    check_params(who, chosen)
    if isinstance(trained, NoOffload):
        raise OptionError(message(
            who, f"memory={params!r}, and the parameters of the train step are on the devices",
            "With like=, a state is read where it is stored.",
            "Drop memory, or use mesh= in place of like= and place parameters with eval_step.shard."
        ))  # fmt: skip
    if trained is not None and trained.tier != chosen.tier:
        raise OptionError(message(
            who, f"memory={params!r}, and those of the train step are in {trained!r}",
            "With like=, a state is read where it is stored.",
            "Drop memory, use the train step's kind of policy, or mesh= in place of like=."
        ))  # fmt: skip
    if (
        params is not None
        and isinstance(params, NVMe)
        and (params.resume or params.in_place or params.gradients)
    ):
        raise OptionError(message(
            who, f"memory={params!r}", "An evaluation writes the files of its state once.",
            "Drop resume, in_place and gradients."))  # fmt: skip
    assert isinstance(chosen, PinnedHost | NVMe)
    return ReadFromHost(NO_OFFLOAD, chosen)
