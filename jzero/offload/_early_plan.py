# SPDX-License-Identifier: Apache-2.0
"""Which updates the host starts while earlier layers still compute their backward pass.

An update whose gradients have arrived starts if nothing that it reads or overwrites is still to come: no
value of all gradients, such as their norm, and no later part of the step that fetches its parameters. Where
such a value only decides, as a clip does, the update starts as if it decided as in the last step.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._folded import listed
from jzero.offload._assumptions import Assumption, assumption_of
from jzero.offload._layered import LayeredSegment
from jzero.offload._slicing import obstacle_of
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Var, shard_of
from jzero.sharding.cut import _elementwise
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.sharding.plan._plan import StepPlan

_GRADIENTS = "its last part makes their gradients, or fetches them"
_SCALARS = "they read a number that comes at its end, as a clip's norm does"
_ASSUMED = (
    ", if the last step did not clip (or whatever else its end decides), and done again if this one "
    "does"
)


@dataclasses.dataclass(frozen=True, eq=False)
class EarlyBucket:
    """Subgraphs that start together, as one function of one device's shards; each is elementwise."""

    subgraphs: tuple[Subgraph, ...]
    part: int  # of the forward-backward program, by index, after which they start
    num_slices: int  # along dim 0, one after each iteration of that part; 0 for whole leaves
    leaves: tuple[int, ...]  # that they read and update, by index
    reads: tuple[Var, ...]  # gradients, and what else they read
    assumption: Assumption | None = None  # about numbers that they start without

    @property
    def begins_with(self) -> list[Var]:
        """What they read when they start: all that is not assumed."""
        assumed = self.assumption.numbers if self.assumption else ()
        return [v for v in self.reads if v not in assumed]


@dataclasses.dataclass(frozen=True)
class EarlyPlan:
    """The host's subgraphs: early buckets, and why each other one (by index) waits for all gradients."""

    buckets: tuple[EarlyBucket, ...]
    late: dict[int, str]

    @property
    def slices(self) -> set[Var]:
        return {
            v for bucket in self.buckets if bucket.num_slices for v in bucket.reads if v.aval.shape
        }

    @property
    def assumed(self) -> set[int]:
        return {i for bucket in self.buckets if bucket.assumption for i in bucket.leaves}

    def text(self, plan: StepPlan) -> list[str]:
        """Lines that say which updates start early, and why others do not."""
        paths = [leaf.path for leaf in plan.leaves]
        early: dict[tuple[int, bool], list[str]] = {}
        for bucket in self.buckets:
            key = bucket.num_slices, bucket.assumption is not None
            early.setdefault(key, []).extend(paths[i] for i in bucket.leaves)
        lines = [
            f"while earlier layers compute{f', in {num} slices' if num else ''}"
            f"{_ASSUMED if assumes else ''}: {listed(names)}"
            for (num, assumes), names in early.items()
        ]
        why: dict[str, list[str]] = {}
        for index, reason in self.late.items():
            why.setdefault(reason, []).extend(paths[i] for i in plan.update.subgraphs[index].leaves)
        return lines + [
            f"after the backward pass ({reason}): {listed(names)}" for reason, names in why.items()
        ]


def plan_early(
    planned: PlannedStep, layered: LayeredSegment, hosted: Collection[int], known: Collection[Var],
    kept: Collection[Var], assumes: bool = False, in_tiles: Collection[Var] | None = None,
) -> EarlyPlan:  # fmt: skip
    """Plans early updates of the subgraphs `hosted`, by index.

    `known` values exist before the forward-backward program runs, and devices read the gradients `kept`, too.
    If `assumes`, updates may start on an assumption. `in_tiles` are inputs that come in tiles, if leaves do:
    all others must exist, or be assumed, before the first tile.
    """
    return _Early(planned, layered, known, kept, in_tiles).plan(hosted, assumes)


class _Early:
    def __init__(
        self,
        planned: PlannedStep,
        layered: LayeredSegment,
        known: Collection[Var],
        kept: Collection[Var],
        in_tiles: Collection[Var] | None,
    ):
        self._in_tiles = in_tiles
        self._frame, self._plan, self._layered = planned.frame, planned.plan, layered
        self._known, self._kept = known, kept
        self._arrivals, self._last_reads = layered.arrivals(), layered.last_reads()
        self._users = collections.Counter(
            i for p in planned.plan.update.subgraphs for i in p.leaves
        )
        self._assumptions: dict[int, Assumption] = {}  # by the subgraph

    def plan(self, hosted: Collection[int], assumes: bool) -> EarlyPlan:
        plan, late = self._plan, dict[int, str]()
        begins: dict[int, int] = {}
        for index in hosted:
            subgraph = plan.update.subgraphs[index]
            if why := self._obstacle(subgraph):
                late[index] = why
                continue
            numbers = self._numbers_at_the_end(subgraph)
            found = assumption_of(self._frame, subgraph, numbers) if assumes and numbers else None
            if found:
                self._assumptions[index] = found
            begins[index] = self._begins(index)
        sliced = self._sliced(begins)
        last = len(self._layered.parts) - 1
        late |= {
            i: self._reason(i) for i, part in begins.items() if part >= last and i not in sliced
        }
        together: dict[tuple[int, bool, Assumption | None], list[Subgraph]] = {}
        for index, part in begins.items():
            if index not in late:
                key = part, index in sliced, self._assumptions.get(index)
                together.setdefault(key, []).append(plan.update.subgraphs[index])
        buckets = sorted(together.items(), key=lambda item: item[0][:2])
        return EarlyPlan(
            tuple(self._bucket(subgraphs, *key) for key, subgraphs in buckets),
            {i: late[i] for i in hosted if i in late},
        )

    def _obstacle(self, subgraph: Subgraph) -> str:
        plan = self._plan
        if found := obstacle_of(self._frame, plan.leaves, plan.update, plan.interface, subgraph):
            return found
        if any(out not in subgraph.leaves for out in subgraph.outs):
            return "they renew what is stored on the devices"
        if any(self._users[i] > 1 for i in subgraph.leaves):
            return "other updates read them, too"
        if self._in_tiles is not None and not self._is_there(subgraph):
            return "they read more than numbers that are there before the first gradient is"
        return ""

    def _is_there(self, subgraph: Subgraph) -> bool:
        """Whether all inputs outside of tiles exist before any gradient, or may be assumed."""
        in_tiles = self._in_tiles or ()
        first = min((part for v, part in self._arrivals.items() if v in in_tiles), default=0)
        others = {*self._others(subgraph)} - {*in_tiles, *self._known}
        others -= {*self._numbers_at_the_end(subgraph)}
        return all(not v.aval.shape and self._arrivals[v] < first for v in others)

    def _others(self, subgraph: Subgraph) -> list[Var]:
        own = {self._frame.jaxpr.invars[i] for i in subgraph.leaves}
        return [v for v in subgraph.reads if v not in own]

    def _numbers_at_the_end(self, subgraph: Subgraph) -> list[Var]:
        """Scalars that a subgraph reads and that the last part makes."""
        last = len(self._layered.parts) - 1
        numbers = [v for v in self._others(subgraph) if v not in self._known and not v.aval.shape]
        return [v for v in numbers if self._arrivals.get(v, last) >= last]

    def _awaited(self, index: int) -> list[Var]:
        """What a subgraph starts with, besides its leaves."""
        assumed = self._assumptions[index].numbers if index in self._assumptions else ()
        return [v for v in self._others(self._plan.update.subgraphs[index]) if v not in assumed]

    def _begins(self, index: int) -> int:
        """The part after which all inputs of a subgraph exist, and nothing else reads what it overwrites."""
        end, subgraph = len(self._layered.parts), self._plan.update.subgraphs[index]
        arrive = [
            -1 if v in self._known else self._arrivals.get(v, end) for v in self._awaited(index)
        ]
        params = [self._frame.jaxpr.invars[i] for i in subgraph.leaves]
        return max([*arrive, *(self._last_reads.get(v, -1) for v in params), 0])

    def _reason(self, index: int) -> str:
        waits = self._numbers_at_the_end(self._plan.update.subgraphs[index])
        several = len(self._layered.parts) > 1
        return _SCALARS if several and waits and index not in self._assumptions else _GRADIENTS

    def _sliced(self, begins: Mapping[int, int]) -> set[int]:
        """The subgraphs that are updated slice by slice: all readers of a gradient that comes in slices."""
        subgraphs = self._plan.update.subgraphs
        found = {i for i, part in begins.items() if self._fits_slices(i, part)}
        while True:
            read = {
                v for i, subgraph in enumerate(subgraphs) if i not in found for v in subgraph.reads
            }
            whole = {i for i in found if read & {v for v in subgraphs[i].reads if v in self._arrivals
                                                 and v.aval.shape}}  # fmt: skip
            if not whole:
                return found
            found -= whole

    def _fits_slices(self, index: int, part: int) -> bool:
        """Whether each iteration of a part brings all that a subgraph needs of a slice."""
        if part >= len(self._layered.parts):
            return False
        subgraph = self._plan.update.subgraphs[index]
        num, slices = self._layered.sliced(part)
        mine = [self._plan.leaves[i] for i in subgraph.leaves]
        if num < 2 or any(x.shape_per_device[:1] != (num,) or len(x.shape) < 2 for x in mine):
            return False
        for var in self._awaited(index):
            if var.aval.shape:
                if var not in slices or var in self._kept:
                    return False
            elif var not in self._known and self._arrivals[var] >= part:
                return False
        params = [self._frame.jaxpr.invars[i] for i in subgraph.leaves]
        reads = {v: self._last_reads[v] for v in params if v in self._last_reads}
        return all(at < part or v in slices for v, at in reads.items())

    def _bucket(
        self, subgraphs: Sequence[Subgraph], part: int, sliced: bool, assumption: Assumption | None
    ) -> EarlyBucket:
        leaves = dict.fromkeys(i for subgraph in subgraphs for i in subgraph.leaves)
        reads = dict.fromkeys(v for subgraph in subgraphs for v in self._others(subgraph))
        num = self._layered.sliced(part)[0] if sliced else 0
        return EarlyBucket(tuple(subgraphs), part, num, tuple(leaves), tuple(reads), assumption)


def as_function(planned: PlannedStep, bucket: EarlyBucket, keeps: bool = False) -> Any:
    """A bucket's `(leaves, reads) -> (new leaves, old leaves if it keeps them)`, for `HostUpdate`."""
    frame = planned.frame
    invars = frame.jaxpr.invars
    variables = [*(invars[i] for i in bucket.leaves), *bucket.reads]

    def update(
        state: Sequence[jax.Array], inputs: Sequence[jax.Array]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        given, new = dict(zip(variables, [*state, *inputs], strict=True)), dict[int, jax.Array]()
        for subgraph in bucket.subgraphs:
            mine = {invars[i]: given[invars[i]] for i in subgraph.leaves}
            mine |= {var: given[var] for var in subgraph.reads}
            new |= _elementwise.outputs(frame, subgraph, mine)
        made = [new.get(i, old) for i, old in zip(bucket.leaves, state, strict=True)]
        return made, tuple(state) if keeps else ()

    return update


def avals_of(
    planned: PlannedStep, bucket: EarlyBucket
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
    """One device's shards, or slices, of a bucket's leaves and of what it reads."""
    leaves, interface = [planned.plan.leaves[i] for i in bucket.leaves], planned.plan.interface

    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sliced = bucket.num_slices and x.ndim
        return jax.ShapeDtypeStruct(x.shape[1:] if sliced else x.shape, x.dtype)

    state = [jax.ShapeDtypeStruct(x.shape_per_device, jnp.dtype(x.dtype)) for x in leaves]
    reads = [shard_of(interface.as_passed(var).aval(planned.mesh)) for var in bucket.reads]
    return [*map(part, state)], [*map(part, reads)]
