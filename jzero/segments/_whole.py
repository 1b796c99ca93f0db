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
    """All of a step in one `jax.jit`, the state donated; one that evaluates, or keeps it, only reads it.

    Attributes:
      found: what the partitioner has written.
      run: the step as a function of whole arrays.
      jitted: the same, compiled.
    """

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding]):
        plan, self.found = planned.plan, partitioned(planned)
        self._plan = self.found.described(plan)
        self._unread = plan.unread
        # Else XLA would choose over the automatic axes, and the next step would move the state back.
        options: dict[str, Any] = {"out_shardings": (list(shardings), None)}
        options = options if plan.automatic and not plan.evaluates else {}
        donated = 0 if plan.donates and not plan.evaluates else ()
        run, num_new = function_of(self.found.program, planned), len(plan.new_leaves)
        taken = [i for i in self.found.part.taken if i is not None]

        # Named as profiles say it.
        def local_step(state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = [*state, *arrays]
            outs = run(*(given[i] for i in taken))
            return outs[:num_new], outs[num_new:]

        self.run = local_step
        self.jitted = jax.jit(local_step, donate_argnums=donated, **options)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step; the state is consumed, if the plan donates it and a new one is returned."""
        made: tuple[list[Any], list[jax.Array]] = self.jitted(self._read(state), arrays)
        return made

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        return self.jitted.trace(self._read(state), arrays)

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        return jax.make_jaxpr(self.jitted)(self._read(state), arrays)

    def _read(self, state: Sequence[Any]) -> Sequence[Any]:
        """The leaves that the program takes, and None for each other one."""
        if not self._unread:
            return state
        return [None if i in self._unread else leaf for i, leaf in enumerate(state)]

    def schedule(self) -> Schedule:
        return Schedule((*waits(self._plan), Run("the step")))

    def code_paths(self) -> str:
        """The host updates nothing."""
        return ""
