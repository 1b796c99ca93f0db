# SPDX-License-Identifier: Apache-2.0
"""`StreamedStep`: a step whose optimizer state rests on the hosts and visits the devices in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE, PINNED
from jzero.offload._layered import NO_WINDOW, LayeredSegment, Window
from jzero.offload._pinned import Visit, free, stream
from jzero.offload._sliced import SlicedTurn
from jzero.offload.schedule._ops import Fetch, Loop, Op, Run, Send, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Compiled, Segment, Values
from jzero.segments._segmented import SegmentedStep
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.cut._crossing import is_scalar
from jzero.sharding.plan._offload import waits
from jzero.tracing import _jaxpr

Var = _jaxpr.Var


class _Homes(NamedTuple):
    """Where offloaded leaves rest.

    Attributes:
      of: each leaf's sharding, by its variable.
      kept: leaves that the new state has in the same place.
      last: for each variable, the last turn that takes it.
    """

    of: dict[Var, NamedSharding]
    kept: set[Var]
    last: dict[Var, int]


class StreamedStep:
    """A step as several programs: the grad part, and a turn of the update after the other.

    Attributes:
      grad: the grad part.
      turns: the programs of the update part, in the order of the plan's turns.
      compiled: those of whole turns, after a step.
    """

    def __init__(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window = NO_WINDOW
    ):
        """Makes the programs.

        Args:
          planned: the step.
          shardings: where its state rests.
          window: how many bytes of parameters that rest away from the devices may be on each at a time.
        """
        self._plan, self._invars = planned.plan, planned.frame.jaxpr.invars
        self._segments = SegmentedStep(Builder(planned, shardings))
        self.grad, self.turns = self._segments.grad, self._segments.turns
        self.run, self.trace = self._segments.run, self._segments.trace
        self.found = self._segments.found
        # Over automatic axes, equal programs may have to leave their leaves in different places.
        self.compiled = Compiled(share=not self._plan.automatic)
        leaves = self._plan.leaves
        pairs = zip(self._invars, shardings, leaves, strict=False)
        homes = {var: home for var, home, leaf in pairs if leaf.tier != DEVICE}
        self._layered = None
        if any(leaf.is_streamed for leaf in leaves):
            gradients = [var for var in self.grad.gives if not is_scalar(var)]
            self._layered = LayeredSegment(planned, self.grad, gradients, window)
            self.grad = self._segments.grad = self._layered.as_segment()
            homes |= {
                var: NamedSharding(planned.mesh, self.grad.types[var].spec, memory_kind=PINNED)
                for var in gradients
            }
        new = planned.frame.jaxpr.outvars[: len(leaves)]
        kept = {var for var, atom in zip(self._invars, new, strict=False) if atom is var}
        last = {var: i for i, turn in enumerate(self.turns) for var in turn.takes}
        self._homes = _Homes(homes, kept, last)
        self._sliced = {
            i: SlicedTurn(planned, turn, homes, {v for v in last if last[v] == i})
            for i, turn in enumerate(self._plan.turns)
            if turn.parts > 1
        }

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`."""
        return jax.make_jaxpr(self.__call__)(state, arrays)

    def collectives(self, index: int) -> tuple[Collective, ...]:
        """What the program of a turn moves between the devices."""
        return self.turns[index].collectives()

    def roads(self) -> str:
        """The host updates nothing."""
        return ""

    def schedule(self) -> Schedule:
        """The grad part, and each turn of the update: its leaves come, and go back."""
        leaves, homes = self._plan.leaves, self._homes.of
        leaf_of, values = self._segments.leaf_of, [*map(Value.of_leaf, leaves)]
        gradients = self._layered.gradients if self._layered else {}
        ops: list[Op] = [*waits(self._segments.plan)]
        if self._layered:
            ops += self._layered.ops(lambda var: PINNED)
        else:
            ops.append(Run("gradients"))
        for turn, num in zip(self.turns, (x.parts for x in self._plan.turns), strict=True):
            taken = [
                values[leaf_of[var]] if var in leaf_of else gradients[var]
                for var in turn.takes
                if var in homes
            ]
            given = [i for i in turn.outs if i < len(leaves) and self._invars[i] in homes]
            sliced = num > 1
            visit: tuple[Op, ...] = (
                *(Fetch(value, PINNED, sliced) for value in taken),
                Run("a turn of the update"),
                *(Send(values[i], PINNED, sliced, copies=0) for i in given),
            )
            ops += [Loop(visit, num, "")] if sliced else visit
        return Schedule(tuple(ops), self._layered.buffers() if self._layered else ())

    def __call__(
        self, state: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        values = self._segments.values(state, arrays)
        outs = self._grad_part(values)
        stream(self._visits(values, outs), self._plan.device_bytes)
        return self._segments.in_order(outs, state)

    def _grad_part(self, values: Values) -> dict[int, jax.Array]:
        """Adds gradients to the values; returns outputs."""
        if self._layered is None:
            return self.grad(values, self.grad.jitted)
        given, outs = self._layered(values)
        for var in self.grad.consumes:
            free(values.pop(var))
        values.update(zip(self.grad.gives, given, strict=True))
        return dict(zip(self.grad.outs, outs, strict=True))

    def _visits(self, values: Values, outs: dict[int, Any]) -> Iterator[Visit]:
        for index, (turn, plan) in enumerate(zip(self.turns, self._plan.turns, strict=True)):
            if index in self._sliced:
                for visit in self._sliced[index].visits(values, outs):
                    yield Visit(plan.nbytes_at_once, *visit)
            else:
                yield Visit(plan.nbytes_at_once, *self._visit(index, turn, values, outs))

    def _visit(
        self, index: int, turn: Segment, values: Values, outs: dict[int, Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], list[jax.Array]]]:
        homes, invars, num = self._homes, self._invars, len(self._plan.leaves)
        hosted = [var for var in turn.takes if var in homes.of]
        renewed = [invars[i] for i in turn.outs if i < num]
        overwritten = [var for var in renewed if var in homes.of and var not in homes.last]

        def fetch() -> list[jax.Array]:
            places = [homes.of[var].with_memory_kind(DEVICE) for var in hosted]
            arrays = jax.device_put([values[var] for var in hosted], places)
            for var in hosted:
                if homes.last[var] == index and var not in homes.kept:
                    free(values[var])  # Freed when it is copied: the host holds no second state.
            for var in overwritten:  # and nobody reads it
                free(values[var])
            return arrays

        def update(arrays: list[jax.Array]) -> list[jax.Array]:
            here = {var: values[var] for var in turn.takes}
            here |= zip(hosted, arrays, strict=True)
            made = turn(here, self.compiled.of(turn, here))
            given = [here[var] for var in turn.gives]
            values.update(zip(turn.gives, given, strict=True))
            for var in turn.takes:
                if homes.last[var] == index:
                    del values[var]  # A gradient's memory is free when its turn is over.
            back = [i for i in made if i < num and invars[i] in homes.of]
            copies = jax.device_put([made[i] for i in back], [homes.of[invars[i]] for i in back])
            outs.update(made)
            outs.update(zip(back, copies, strict=True))
            # All results of a program are there when one is; no later turn consumes what this one made.
            return copies or sorted([*given, *made.values()], key=lambda x: x.size)[:1]

        return fetch, update
