# SPDX-License-Identifier: Apache-2.0
"""`EarlyUpdates`: the host updates what it can while earlier layers still compute their backward pass."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero._memory_kinds import HOST
from jzero.offload._early_turns import EarlyPlan, EarlyTurn, as_function, avals_of
from jzero.offload._host_engine import padding_of, zero_padding
from jzero.offload.kernels._host_update import (
    HostUpdate,
    UnderWay,
    default_threads,
    helping_threads,
)
from jzero.offload.memory._pinned_leaf import PinnedLeaf, renewed
from jzero.offload.memory._storage import places
from jzero.offload.schedule._ops import Update
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Var
from jzero.sharding.plan import _layout


class EarlyUpdates:
    """The early turns of a step, compiled.

    Attributes:
      turns: by the turn, what updates its leaves.
      leaves: all that they renew, by index.
      plans: of all leaves.
      devices: whose shards are updated; other local devices are their replicas.
      at: the places of these among the process's devices.
    """

    def __init__(
        self,
        planned: PlannedStep,
        plan: EarlyPlan,
        devices: Sequence[jax.Device],
        threads: int | None,
    ):
        self._planned, self.plans, self.devices = planned, planned.plan.leaves, devices
        self.leaves = [i for turn in plan.turns for i in turn.leaves]
        local = list(places(planned.mesh, planned.plan.stage_axes.shard_axes))
        self.at = [local.index(device) for device in devices]
        threads = threads or default_threads()
        # Of all turns: as many threads update as may.
        helpers = helping_threads(threads)
        self.turns = {
            turn: HostUpdate(
                as_function(planned, turn), *avals_of(planned, turn),
                names=[self.plans[i].path for i in turn.leaves],
                threads=threads, helpers=helpers,
            )
            for turn in plan.turns
        }  # fmt: skip

    def padding(self, index: int) -> list[Any]:
        """For each of `devices`, which part of its shard of a leaf is padding."""
        leaf, mesh = self.plans[index], self._planned.mesh
        at_rest = jax.sharding.NamedSharding(
            mesh, _layout.partition_spec(leaf.layout, leaf.automatic)
        )
        return padding_of(at_rest, leaf.padded_shape, leaf.shape, self.devices)

    def is_hosted(self, index: int) -> bool:
        """Whether a leaf is in ordinary memory of the host."""
        return self.plans[index].tier == HOST

    def var(self, index: int) -> Var:
        """The variable of a leaf."""
        return self._planned.frame.jaxpr.invars[index]


class EarlyRun:
    """The early updates of one step.

    A leaf is taken before the first byte of it is overwritten: from then on the old state is lost, by name.

    Attributes:
      made: leaves of the new state that have been taken, by index.
    """

    def __init__(
        self, updates: EarlyUpdates, state: Sequence[Any], num_steps: int,
        known: Mapping[Var, jax.Array], waits: bool,
    ):  # fmt: skip
        """Begins nothing.

        Args:
          updates: what can be done early.
          state: whose leaves are updated.
          num_steps: how many steps the new state has behind it.
          known: what is on its way to the host from the start.
          waits: everything begins with `finish` only.
        """
        self._updates, self._state, self._num_steps = updates, state, num_steps
        self._known, self._waits = dict(known), waits
        self._ready: list[tuple[EarlyTurn, HostUpdate, int | None, list[jax.Array]]] = []
        self._under_way: collections.deque[UnderWay] = collections.deque()
        self._memory: dict[int, PinnedLeaf] = {}
        self.made: dict[int, Any] = {}

    def begin(
        self, update: Update, at: int | None, arrays: Sequence[jax.Array]
    ) -> dict[Var, jax.Array]:
        """Begins an update, whose gradients have arrived; parameters that were taken by it.

        Later parts fetch these from there.
        """
        turn: EarlyTurn = update.begin
        here = self._known | dict(zip(turn.arriving(self._known), arrays, strict=True))
        reads = [here[var] for var in turn.reads]
        self._ready.append((turn, self._updates.turns[turn], at, reads))
        return {} if self._waits else self._begin()

    def _begin(self) -> dict[Var, jax.Array]:
        taken: dict[Var, jax.Array] = {}
        while self._under_way and self._under_way[0].is_over:
            self._under_way.popleft().finish()  # Its gradients are freed.
        for turn, update, at, reads in self._ready:
            taken |= self._take([i for i in turn.leaves if i not in self.made])
            memory = [self._memory[i].buffers for i in turn.leaves]
            states = [
                [of_leaf[k] if at is None else of_leaf[k][at] for of_leaf in memory]
                for k in range(len(self._updates.at))
            ]
            inputs = [[x.addressable_data(k) for x in reads] for k in self._updates.at]
            self._under_way.append(update.start(states, inputs))
        self._ready.clear()
        return taken

    def _take(self, indices: Sequence[int]) -> dict[Var, jax.Array]:
        """Leaves that are updated from here on; parameters among them, by variable."""
        updates = self._updates
        pinned = renewed(
            self._state, [i for i in indices if not updates.is_hosted(i)], updates.plans
        )
        for i in indices:
            if i in pinned:
                self.made[i], self._memory[i] = pinned[i], PinnedLeaf.of(pinned[i], updates.devices)
            else:
                self.made[i] = new = self._state[i].renewed(None, self._num_steps)
                self._memory[i] = PinnedLeaf([*new.buffers], [[] for _ in new.buffers])
        return {updates.var(i): x for i, x in pinned.items()}

    def finish(self) -> None:
        """Waits for what is under way."""
        self._begin()
        while self._under_way:
            self._under_way.popleft().finish()
        for index, memory in self._memory.items():
            zero_padding(memory.buffers, self._updates.padding(index))
            memory.copy_to_replicas()
