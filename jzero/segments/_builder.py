# SPDX-License-Identifier: Apache-2.0
"""Builds the segments of a planned step: the forward-backward program, and buckets of the optimizer's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE
from jzero.ir._layout import Layout
from jzero.segments._given import (
    GivenStep,
    TypedPart,
    arguments,
    axes_of,
    function_of,
    given_step,
    reduced_hint,
    results,
    stored,
)
from jzero.segments._partitioned import PASSES, Partitioned, programs_of, time_of
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Arrays, Segment, Var
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.sharding.partition._partition import DeviceInput
from jzero.sharding.partition._time_axis import TimeAxis
from jzero.sharding.partition._values import Hint
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._interface import ValuePlan
from jzero.tracing import _rewrite, _traces


@dataclasses.dataclass(frozen=True)
class Builder:
    planned: PlannedStep
    shardings: Sequence[NamedSharding]  # Of the state's leaves, as they are stored.
    # Leaves on the devices enter and leave as they are passed between programs: sharded like gradients, with
    # unspecified padding.
    crosses: bool = False

    def forward_backward(self) -> tuple[Segment, Partitioned]:
        """The step without its optimizer program. A leaf that is returned unchanged is no output."""
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
        gives = list(plan.update.transferred)
        return self._segment("grad_part", eqns, consumes, reads, gives, outs, self._time)

    def buckets(self) -> tuple[Segment, ...]:
        plan = self.planned.plan
        packs = [[plan.update.subgraphs[i] for i in bucket.subgraphs] for bucket in plan.buckets]
        last = {v: i for i, pack in enumerate(packs) for subgraph in pack for v in subgraph.reads}
        return tuple(self.bucket(pack, i, last) for i, pack in enumerate(packs))

    def bucket(self, pack: Sequence[Subgraph], index: int, last: Mapping[Var, int]) -> Segment:
        """The subgraphs `pack` as bucket `index`; `last` has the last bucket that reads each variable."""
        frame, leaves = self.planned.frame, self.planned.plan.leaves
        invars = frame.jaxpr.invars
        eqns = sorted({i for subgraph in pack for i in subgraph.eqns})
        outs = sorted(i for subgraph in pack for i in subgraph.outs)
        gives = [var for subgraph in pack for var in subgraph.gives]
        # Without the values that subgraphs pass to each other within the bucket.
        reads = [*dict.fromkeys(v for subgraph in pack for v in subgraph.reads if v not in gives)]
        renewed = [invars[i] for i in outs if i < len(leaves)]
        offloaded = {invars[i] for i in outs if i < len(leaves) and leaves[i].tier != DEVICE}
        taken = dict.fromkeys([*reads, *(v for v in renewed if v not in offloaded)])
        # A later bucket fetches an offloaded leaf again, but reads the old value of one on the devices.
        consumes = [
            v for v in taken if v in renewed and (v in offloaded or last.get(v, index) == index)
        ]
        others = [v for v in reads if v not in consumes]
        segment, _ = self._segment("update", eqns, consumes, others, gives, outs)
        return segment

    def kept(self, outs: Sequence[int]) -> list[NamedSharding | None] | None:
        """`out_shardings` for these outputs; XLA would choose others over Auto axes, if there are any."""
        if not self.planned.plan.automatic:
            return None
        num_new = len(self.planned.plan.new_leaves)
        places = [s.with_memory_kind(DEVICE) for s in self.shardings]
        return [places[i] if i < num_new else None for i in outs]

    @functools.cached_property
    def _time(self) -> TimeAxis | None:
        return time_of(self.planned.plan, self.planned.mesh.axis_names)

    @functools.cached_property
    def _step(self) -> GivenStep:
        return given_step(self.planned.plan, self.planned.analysis, self._time)

    @functools.cached_property
    def _number(self) -> dict[Var, int]:
        return {var: i for i, var in enumerate(self._step.jaxpr.invars)}

    def _type(self, var: Var) -> ValuePlan:
        interface, leaves = self.planned.plan.interface, self.planned.plan.leaves
        i = self._number.get(var, len(leaves))
        if self.crosses and i < len(leaves) and leaves[i].tier == DEVICE:
            return interface.passed[var]
        return interface.of(var)

    def _segment(
        self, name: str, eqns: Sequence[int], consumes: Sequence[Var], reads: Sequence[Var],
        gives: Sequence[Var], outs: Sequence[int], time: TimeAxis | None = None,
    ) -> tuple[Segment, Partitioned]:  # fmt: skip
        """The equations `eqns` of the step as a program; see `Segment` for the others."""
        planned, plan, num = self.planned, self.planned.plan, len(gives)
        part = self._part(eqns, [*consumes, *reads], gives, outs, len(consumes), time)
        programs = programs_of(part, planned, time)
        if part.step.written is not None:
            # Its types name the mesh of its trace, and layers are evaluated in that of programs.
            inside = _traces.inside_of(planned.mesh, [axis for axis, _ in plan.axes])
            last = programs[PASSES[-1]]
            programs[PASSES[-1]] = dataclasses.replace(
                last, jaxpr=_traces.in_mesh(last.jaxpr, inside)
            )
        run = function_of(programs[PASSES[-1]], planned)

        def local(consumed: Arrays, read: Arrays) -> tuple[Arrays, Arrays]:
            made = run(*consumed, *read)
            return made[:num], made[num:]

        local.__name__ = name
        types = {var: self._type(var) for var in (*consumes, *reads, *gives)}
        new = self._step.jaxpr.invars[: len(plan.new_leaves)]
        layouts = [self._type(new[i]).layout if i < len(new) else plan.layouts[i] for i in outs]
        out_specs = (
            [types[var].spec for var in gives],
            [*map(_stored_layout.partition_spec, layouts)],
        )
        options: dict[str, Any] = {}
        if kept := self.kept(outs):
            options["out_shardings"] = ([None] * num, kept)
        jitted = jax.jit(local, donate_argnums=0, **options)
        segment = Segment(
            tuple(consumes), tuple(reads), tuple(gives), tuple(outs), types, planned.mesh, local, jitted,
            out_specs,
        )  # fmt: skip
        return segment, Partitioned(part, programs)

    def _part(
        self, eqns: Sequence[int], takes: Sequence[Var], gives: Sequence[Var], outs: Sequence[int],
        num_consumed: int, time: TimeAxis | None,
    ) -> TypedPart:  # fmt: skip
        """The function `takes -> [*gives, *outs]` of some equations, with its layouts."""
        plan, jaxpr = self.planned.plan, self._step.jaxpr
        mesh, num_new = axes_of(plan, time), len(plan.new_leaves)
        made = [*gives, *(jaxpr.outvars[i] for i in outs)]
        needed, _ = _rewrite.behind([self.planned.frame.jaxpr.eqns[i] for i in eqns], made)
        inputs = [*arguments(plan, self._step, mesh, time)]
        others = [*results(plan, self._step, mesh)]

        def layout_of(i: int) -> Layout:
            return stored(self._type(jaxpr.invars[i]), mesh) if i < num_new else others[i - num_new]

        given = [stored(self._type(var), mesh) for var in gives]
        paths = [self._type(var).path for var in gives]
        gradients = [
            Hint(layout, leaf=path) if path and layout.dims else None
            for path, layout in zip(paths, given, strict=True)
        ]
        hints = [reduced_hint(plan.leaves[i], mesh) if i < num_new else None for i in outs]
        return TypedPart(
            self._step.cut(takes, made, needed),
            [self._number.get(var) for var in takes],
            [self._input(var, inputs, mesh) for var in takes],
            [*[None] * len(gives), *outs],
            [*given, *map(layout_of, outs)],
            [*gradients, *hints],
            frozenset(range(num_consumed)),
            frozenset(range(len(made) if self.crosses else len(gives))),
        )

    def _input(self, var: Var, inputs: Sequence[DeviceInput], mesh: dict[str, int]) -> DeviceInput:
        number, plan, type_ = self._number.get(var), self.planned.plan, self._type(var)
        if number is None:
            return DeviceInput(stored(type_, mesh))
        if number >= len(plan.leaves) or type_ is plan.interface.stored[var]:
            return inputs[number]
        return DeviceInput(stored(type_, mesh), name=plan.leaves[number].path)
