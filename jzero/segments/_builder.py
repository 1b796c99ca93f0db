# SPDX-License-Identifier: Apache-2.0
"""Makes the segments of a planned step: forward and backward, and the buckets of the optimizer program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE
from jzero.segments._partitioned import Partitioned
from jzero.segments._parts import PartsOfStep
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Arrays, Segment, SegmentFn, Var
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.sharding.plan import _layout
from jzero.sharding.plan._interface import ValuePlan

_GRADIENTS = "grad_part"  # the name of the program, as profiles say it


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes segments.

    Attributes:
      planned: the step.
      shardings: where the leaves of the state are stored, for JAX.
      crosses: leaves that are stored on the devices are taken and made as they cross, in shards like
        gradients. What pads these is anything.
    """

    planned: PlannedStep
    shardings: Sequence[NamedSharding]
    crosses: bool = False

    @functools.cached_property
    def parts(self) -> PartsOfStep:
        """What the partitioner writes."""
        return PartsOfStep(self.planned)

    @property
    def found(self) -> Partitioned:
        """The forward-backward program, as the partitioner has written it."""
        assert self.parts.found is not None, "the forward-backward program is written first"
        return self.parts.found

    def grad_part(self) -> Segment:
        """The step without its optimizer program; a leaf that passes through unchanged is no output."""
        plan, jaxpr = self.planned.plan, self.planned.frame.jaxpr
        invars, outvars, leaves = jaxpr.invars, jaxpr.outvars, plan.leaves
        num_new = len(plan.new_leaves)
        outs = [i for i in range(len(outvars)) if i not in plan.update.outs]
        outs = [i for i in outs if i >= num_new
                or (leaves[i].tier == DEVICE and outvars[i] is not invars[i])]  # fmt: skip
        here = [
            v for i, v in enumerate(invars) if i not in plan.unread
            and (i >= len(leaves) or leaves[i].tier == DEVICE or leaves[i].is_streamed)
        ]  # fmt: skip
        own = {invars[i] for i in outs if i < num_new}
        read = {var for subgraph in plan.update.subgraphs for var in subgraph.reads}
        consumes = [var for var in here if var in own and var not in read]

        reads = [var for var in here if var not in consumes]
        eqns = [i for i in range(len(jaxpr.eqns)) if i not in plan.update.apart]
        ends = _Ends(_GRADIENTS, consumes, reads, list(plan.update.transferred), outs)
        return self._segment(ends, eqns)

    def buckets(self) -> tuple[Segment, ...]:
        """The buckets of the optimizer program, as the plan has them."""
        plan = self.planned.plan
        packs = [[plan.update.subgraphs[i] for i in bucket.subgraphs] for bucket in plan.buckets]
        last = {v: i for i, pack in enumerate(packs) for subgraph in pack for v in subgraph.reads}
        return tuple(self.bucket(pack, i, last) for i, pack in enumerate(packs))

    def bucket(self, pack: Sequence[Subgraph], index: int, last: Mapping[Var, int]) -> Segment:
        """Some subgraphs as one segment.

        Args:
          pack: the subgraphs.
          index: of their bucket.
          last: for each variable, the last bucket that reads it.
        """
        frame, leaves = self.planned.frame, self.planned.plan.leaves
        invars = frame.jaxpr.invars
        eqns = sorted({i for subgraph in pack for i in subgraph.eqns})
        outs = sorted(i for subgraph in pack for i in subgraph.outs)
        gives = [var for subgraph in pack for var in subgraph.gives]
        # Not what subgraphs of several levels hand to each other within the bucket.
        reads = [*dict.fromkeys(v for subgraph in pack for v in subgraph.reads if v not in gives)]
        renewed = [invars[i] for i in outs if i < len(leaves)]
        offloaded = {invars[i] for i in outs if i < len(leaves) and leaves[i].tier != DEVICE}
        taken = dict.fromkeys([*reads, *(v for v in renewed if v not in offloaded)])
        # A later bucket fetches an offloaded leaf for itself; what is stored on the devices it needs as it
        # was.
        consumes = [
            v for v in taken if v in renewed and (v in offloaded or last.get(v, index) == index)
        ]

        rest = [v for v in reads if v not in consumes]
        return self._segment(_Ends("update", consumes, rest, gives, outs), eqns)

    def kept(self, outs: Sequence[int]) -> list[NamedSharding | None] | None:
        """Where a program leaves these outputs, beside axes over which XLA would choose."""
        if not self.planned.plan.automatic:
            return None
        num_new = len(self.planned.plan.new_leaves)
        places = [s.with_memory_kind(DEVICE) for s in self.shardings]
        return [places[i] if i < num_new else None for i in outs]

    def _type(self, var: Var) -> ValuePlan:
        """How a value is taken or given."""
        interface = self.planned.plan.interface
        return interface.passed[var] if var in self._passed else interface.of(var)

    @functools.cached_property
    def _passed(self) -> set[Var]:
        """The leaves that are taken as they cross."""
        pairs = zip(self.planned.frame.jaxpr.invars, self.planned.plan.leaves, strict=False)
        return {var for var, leaf in pairs if self.crosses and leaf.tier == DEVICE}

    def _segment(self, ends: _Ends, eqns: Sequence[int]) -> Segment:
        planned = self.planned
        num_new = len(planned.plan.new_leaves)
        types = {var: self._type(var) for var in (*ends.consumes, *ends.reads, *ends.gives)}
        leaf_vars = planned.frame.jaxpr.invars[:num_new]
        layouts = [
            self._type(leaf_vars[i]).layout if i < num_new else planned.plan.layouts[i]
            for i in ends.outs
        ]
        out_specs = (
            [types[var].spec for var in ends.gives],
            [*map(_layout.partition_spec, layouts)],
        )
        run = self._partitioned(ends, eqns, types)
        options: dict[str, Any] = {}
        if kept := self.kept(ends.outs):
            options["out_shardings"] = ([None] * len(ends.gives), kept)
        jitted = jax.jit(run, donate_argnums=0, **options)
        return Segment(
            tuple(ends.consumes),
            tuple(ends.reads),
            tuple(ends.gives),
            tuple(ends.outs),
            types,
            planned.mesh,
            run,
            jitted,
            out_specs,
        )

    def _partitioned(
        self, ends: _Ends, eqns: Sequence[int], types: Mapping[Var, ValuePlan]
    ) -> SegmentFn:
        """The program of some equations, as the partitioner writes it."""
        invars, num_new = self.planned.frame.jaxpr.invars, len(self.planned.plan.new_leaves)
        renewed = (invars[i] for i in ends.outs if i < num_new)
        types = {**types, **{var: self._type(var) for var in renewed}}
        num, takes = len(ends.gives), [*ends.consumes, *ends.reads]
        run = self.parts.function(
            eqns, takes, ends.gives, ends.outs, types, range(len(ends.consumes)), not self.crosses,
            ends.name == _GRADIENTS,
        )  # fmt: skip

        def local(consumed: Arrays, read: Arrays) -> tuple[Arrays, Arrays]:
            made = run(*consumed, *read)
            return made[:num], made[num:]

        local.__name__ = ends.name  # as profiles say it
        return local


class _Ends(NamedTuple):
    """What a segment takes and gives.

    Attributes:
      name: of its program.
      consumes, reads, gives, outs: as of `Segment`.
    """

    name: str
    consumes: Sequence[Var]
    reads: Sequence[Var]
    gives: Sequence[Var]
    outs: Sequence[int]
