"""`OffloadedStep`: a step whose optimizer state rests in the hosts' memory, as a loop of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE
from jzero.offload._pinned import Visit, stream
from jzero.offload._slices import SlicedTurn
from jzero.reports._tables import Crossing
from jzero.segments._parts import Compiled, Part, Parts
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._plan import Turn
from jzero.tracing import _jaxpr

Var = _jaxpr.Var
Values = dict[Var, Any]


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


class OffloadedStep:
    """A step as several programs.

    Attributes:
      grad: the grad part.
      turns: the programs of the update part, in the order of the plan's turns.
      compiled: those of whole turns, after a step.
    """

    def __init__(
        self,
        parts: Parts,
        turns: Sequence[Turn],
        device_bytes: int,
        shardings: Sequence[NamedSharding],
    ):
        self._parts, runner = parts, parts.runner
        self._jaxpr, self._leaves = runner.frame.jaxpr, runner.leaves
        self._plans, self._device_bytes = turns, device_bytes
        self.grad, self.turns = parts.grad_part(), parts.turns()
        # Over automatic axes, equal programs may have to leave their leaves in different places.
        self.compiled = Compiled(share=not runner.setting.automatic)
        pairs = zip(self._jaxpr.invars, shardings, self._leaves, strict=False)
        homes = {var: home for var, home, leaf in pairs if leaf.tier != DEVICE}
        new = self._jaxpr.outvars[: len(self._leaves)]
        kept = {var for var, atom in zip(self._jaxpr.invars, new, strict=False) if atom is var}
        last = {var: i for i, turn in enumerate(self.turns) for var in turn.takes}
        self._homes = _Homes(homes, kept, last)
        self._sliced = {
            i: SlicedTurn(
                parts, parts.packs[i][0], plan.parts, homes, {v for v in last if last[v] == i}
            )
            for i, plan in enumerate(turns)
            if plan.parts > 1
        }

    def collectives(self, index: int) -> tuple[Collective, ...]:
        """What the program of a turn moves between the devices."""
        return self._parts.collectives(self.turns[index])

    def crossings(self) -> tuple[Crossing, ...]:
        """What a step copies to each device and back."""
        found, invars = [], self._jaxpr.invars
        for turn in self.turns:
            taken = [self._parts.leaf_of[var] for var in turn.takes if var in self._homes.of]
            given = [i for i in turn.outs if i < len(self._leaves) and invars[i] in self._homes.of]
            for direction, places in (("to device", taken), ("to host", given)):
                leaves = [self._leaves[i] for i in places]
                found += [
                    Crossing(direction, leaf.role, leaf.dtype, nbytes // leaf.itemsize, nbytes)
                    for leaf in leaves
                    for nbytes in [leaf.nbytes_per_device]
                ]
        return tuple(found)

    def run(self, state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The step on whole arrays as one function, to be read; nothing is copied to or from the host."""
        return self._parts.run((self.grad, *self.turns), state, arrays)

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Its trace as one program: what processes compare before they run it."""
        return self._parts.trace((self.grad, *self.turns), state, arrays)

    def __call__(
        self, state: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        values = dict(zip(self._jaxpr.invars, [*state, *arrays], strict=True))
        outs = self.grad(values, self.grad.jitted)
        stream(self._visits(values, outs), self._device_bytes)
        return self._parts.in_order(outs, state)

    def _visits(self, values: Values, outs: dict[int, Any]) -> Iterator[Visit]:
        for index, (turn, plan) in enumerate(zip(self.turns, self._plans, strict=True)):
            if index in self._sliced:
                for visit in self._sliced[index].visits(values, outs):
                    yield Visit(plan.nbytes_at_once, *visit)
            else:
                yield Visit(plan.nbytes_at_once, *self._visit(index, turn, values, outs))

    def _visit(
        self, index: int, turn: Part, values: Values, outs: dict[int, Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], list[jax.Array]]]:
        homes, invars = self._homes, self._jaxpr.invars
        hosted = [var for var in turn.takes if var in homes.of]
        renewed = [invars[i] for i in turn.outs if i < len(self._leaves)]
        overwritten = [var for var in renewed if var in homes.of and var not in homes.last]

        def fetch() -> list[jax.Array]:
            places = [homes.of[var].with_memory_kind(DEVICE) for var in hosted]
            arrays = jax.device_put([values[var] for var in hosted], places)
            for var in hosted:
                if homes.last[var] == index and var not in homes.kept:
                    values[var].delete()  # Freed when it is copied: the host holds no second state.
            for var in overwritten:  # and nobody reads it
                values[var].delete()
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
            back = [i for i in made if i < len(self._leaves) and invars[i] in homes.of]
            copies = jax.device_put([made[i] for i in back], [homes.of[invars[i]] for i in back])
            outs.update(made)
            outs.update(zip(back, copies, strict=True))
            # All results of a program are there when one is; no later turn consumes what this one made.
            return copies or sorted([*given, *made.values()], key=lambda x: x.size)[:1]

        return fetch, update
