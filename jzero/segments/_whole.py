# SPDX-License-Identifier: Apache-2.0
"""`WholeStep`: a step as one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero.offload.schedule._ops import Run
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._given import function_of
from jzero.segments._partitioned import partitioned
from jzero.segments._planned import PlannedStep
from jzero.sharding.plan._backend import waits


class WholeStep:
    """A step in one `jax.jit`; `found` is the partitioner's program, `run` a function of global arrays."""

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding]):
        plan, self.found = planned.plan, partitioned(planned)
        self._plan = self.found.described(plan)
        self._unread = plan.unread
        # Otherwise XLA would choose shardings over the Auto axes, and the next step would move the state
        # back.
        options: dict[str, Any] = {"out_shardings": (list(shardings), None)}
        options = options if plan.automatic and not plan.evaluates else {}
        donated = 0 if plan.donates and not plan.evaluates else ()
        run, num_new = function_of(self.found.program, planned), len(plan.new_leaves)
        taken = [i for i in self.found.part.taken if i is not None]

        def local_step(state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = [*state, *arrays]
            outs = run(*(given[i] for i in taken))
            return outs[:num_new], outs[num_new:]

        self.run = local_step
        self.jitted = jax.jit(local_step, donate_argnums=donated, **options)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step; the state is donated, if the plan says so and a new one is returned."""
        made: tuple[list[Any], list[jax.Array]] = self.jitted(self._read(state), arrays)
        return made

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        return self.jitted.trace(self._read(state), arrays)

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        return jax.make_jaxpr(self.jitted)(self._read(state), arrays)

    def _read(self, state: Sequence[Any]) -> Sequence[Any]:
        """The leaves, with None for those that the program does not read."""
        if not self._unread:
            return state
        return [None if i in self._unread else leaf for i, leaf in enumerate(state)]

    def schedule(self) -> Schedule:
        return Schedule((*waits(self._plan), Run("the step")))

    def code_paths(self) -> str:
        return ""
