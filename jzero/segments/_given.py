# SPDX-License-Identifier: Apache-2.0
"""The partitioner's inputs from a planned step, and its output as a function of whole arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jzero.ir._errors import cannot
from jzero.ir._layout import Layout, Pad, from_spec, replicated
from jzero.segments._planned import PlannedStep
from jzero.sharding.partition._frame import WrittenStep
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram
from jzero.sharding.partition._time_axis import TimeAxis
from jzero.sharding.partition._values import Hint
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._interface import ValuePlan
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import Analysis, StepPlan
from jzero.sharding.plan._stages import PARAMETER
from jzero.sharding.plan._stored_layout import Shard
from jzero.tracing import _call, _jaxpr, _rewrite, _traces
from jzero.tracing._rewrite import Flat


class GivenStep(NamedTuple):
    jaxpr: Flat  # Of the whole batch; of one device if the step has collectives of its own.
    consts: list[Any]
    specs: Sequence[PartitionSpec]  # Of a whole batch's inputs, over the data axes.
    written: WrittenStep | None  # Given if the step has collectives of its own.

    def cut(
        self, takes: Sequence[_jaxpr.Var], gives: Sequence[_jaxpr.Atom], eqns: list[_jaxpr.Eqn]
    ) -> GivenStep:  # fmt: skip
        flat = self.jaxpr._replace(invars=[*takes], outvars=[*gives], eqns=eqns)
        written = self.written
        if written is not None:
            written = written._replace(frame=written.frame.of(flat))  # type: ignore[arg-type]
        return self._replace(jaxpr=flat, written=written)


class TypedPart(NamedTuple):
    """All of a step, or one of its programs, with layouts of inputs and results."""

    step: GivenStep
    taken: Sequence[
        int | None
    ]  # For each input its index in the step; None if another part computes it.
    ins: Sequence[DeviceInput]
    made: Sequence[
        int | None
    ]  # For each result its index in the step; None if another part reads it.
    outs: Sequence[Layout | None]  # None where the partitioner chooses.
    reduced: Sequence[
        Hint | None
    ] = ()  # Hints for the gradients of which the first results are made.
    donated: frozenset[int] = frozenset()  # Inputs, by index.
    unmasked: frozenset[int] = frozenset()  # Results, by index, whose padding need not be zero.

    def leaves(self, plan: StepPlan) -> dict[int, LeafPlan]:
        num = len(plan.leaves)
        return {k: plan.leaves[i] for k, i in enumerate(self.taken) if i is not None and i < num}

    def sharded_arguments(self, plan: StepPlan) -> list[frozenset[str]]:
        """The axes over which each input is a batch-sharded argument; they may have one device."""
        num = len(plan.leaves)
        specs = [plan.arguments[i - num] if i is not None and i >= num else () for i in self.taken]
        return [frozenset(itertools.chain(*map(_call.spec_axes, spec))) for spec in specs]

    def new_leaves(self, plan: StepPlan) -> list[tuple[int, int]]:
        """`(result, leaf)` indices of the results that are new leaves."""
        num = len(plan.new_leaves)
        return [(j, i) for j, i in enumerate(self.made) if i is not None and i < num]

    @property
    def olds(self) -> list[int | None]:
        """For each result the index of the donated input that it replaces, or None."""
        place = {i: k for k, i in enumerate(self.taken) if i is not None and k in self.donated}
        return [None if i is None else place.get(i) for i in self.made]


def axes_of(plan: StepPlan, time: TimeAxis | None) -> dict[str, int]:
    """The axes of a program: the data axes, and innermost that of microbatches."""
    return dict(plan.axes) | ({} if time is None else {time.name: time.num})


def whole_step(
    plan: StepPlan, analysis: Analysis, mesh: dict[str, int], time: TimeAxis | None
) -> TypedPart:  # fmt: skip
    step, num_new = given_step(plan, analysis, time), len(plan.new_leaves)
    taken = [i for i in range(len(step.jaxpr.invars)) if i not in plan.unread]
    ins = [*arguments(plan, step, mesh, time)]
    # Of a whole batch's step the partitioner knows best which results have rows.
    others = [None] * len(plan.outputs) if step.written is None else results(plan, step, mesh)
    outs = [*(stored(leaf, mesh) for leaf in plan.new_leaves), *others]
    reduced = [reduced_hint(leaf, mesh) for leaf in plan.new_leaves]
    donated = frozenset(k for k, i in enumerate(taken) if i < num_new)
    jaxpr = step.jaxpr
    step = step.cut([jaxpr.invars[i] for i in taken], jaxpr.outvars, jaxpr.eqns)
    ins = [ins[i] for i in taken]
    return TypedPart(step, taken, ins, range(len(outs)), outs, reduced, donated)


def given_step(plan: StepPlan, analysis: Analysis, time: TimeAxis | None) -> GivenStep:
    """The equations of a step to partition: those that its results need, if it is of the whole batch.

    A step with collectives of its own sees microbatches as further devices of the last data axis.
    """
    whole, frame = analysis.whole_batch, analysis.frame
    if whole is None:
        jaxpr = frame.jaxpr
        flat = Flat([*jaxpr.constvars], [*jaxpr.invars], [*jaxpr.outvars], [*jaxpr.eqns])
        last = plan.axes[-1][0]
        names = {
            name: (*axes, time.name) if time is not None and last in axes else axes
            for name, axes in plan.step_axes
        }
        return GivenStep(flat, frame.consts, [], WrittenStep(frame, names))
    eqns, read = _rewrite.behind(whole.jaxpr.eqns, whole.jaxpr.outvars)
    flat = whole.jaxpr._replace(eqns=eqns)
    if any(flat.invars[i] in read for i in plan.unread):
        raise cannot("it reads a leaf that the plan does not read")
    return GivenStep(flat, whole.consts, whole.specs, None)


def results(plan: StepPlan, step: GivenStep, mesh: dict[str, int]) -> Iterator[Layout]:
    """The layouts of results that are no state."""
    for atom, layout in zip(step.jaxpr.outvars[len(plan.new_leaves) :], plan.outputs, strict=True):
        shape, spec = [*atom.aval.shape], _stored_layout.partition_spec(layout)
        if step.written is not None:
            spec = PartitionSpec()
            if isinstance(layout, Shard):  # The shape is one device's in one microbatch.
                shape[layout.dim] *= plan.accumulate
        yield from_spec(shape, mesh, spec)


def of_all_devices(
    program: DeviceProgram, plan: StepPlan, part: TypedPart, time: TimeAxis | None
) -> DeviceProgram:
    """Converts layouts of one device's arguments and results to those of the global arrays."""
    num, num_new = len(plan.leaves), len(plan.new_leaves)
    ins, outs = [*program.ins], [*program.outs]
    for k, i in enumerate(part.taken):
        if i is not None and i >= num:
            ins[k] = _joined(ins[k], plan.arguments[i - num])
            if time is not None and (dim := plan.cut_dims[i - num]) is not None:
                shape = [*ins[k].shape]
                shape[dim] *= time.num
                ins[k] = from_spec(shape, dict(ins[k].mesh), _spec(ins[k])).cut(dim, time.name)
    for j, i in enumerate(part.made):
        if i is not None and i >= num_new:
            outs[j] = _joined(outs[j], _stored_layout.partition_spec(plan.outputs[i - num_new]))
    return dataclasses.replace(program, ins=tuple(ins), outs=tuple(outs))


def _joined(layout: Layout, spec: PartitionSpec) -> Layout:
    """The layout of a global array whose shards have the layout's shape."""
    mesh = dict(layout.mesh)
    names = [*map(_call.spec_axes, (*spec, *[None] * len(layout.dims)))]
    pairs = zip(layout.shape, names, strict=False)
    return from_spec([size * layout.num(axes) for size, axes in pairs], mesh, spec)


def arguments(
    plan: StepPlan, step: GivenStep, mesh: dict[str, int], time: TimeAxis | None
) -> Iterator[DeviceInput]:
    """Leaves as they are stored; arguments batch-sharded, or as one device has them."""
    num, dims = len(plan.leaves), plan.microbatches.dims
    yield from (DeviceInput(stored(leaf.decoded, mesh), name=leaf.path) for leaf in plan.leaves)
    if step.written is not None:
        for var in step.jaxpr.invars[num:]:
            own = step.written.own(step.written.frame, var)
            yield DeviceInput(replicated(var.aval.shape, mesh), own)
        return
    for var, spec, dim in zip(step.jaxpr.invars[num:], step.specs[num:], dims, strict=True):
        layout = from_spec(var.aval.shape, mesh, spec)
        if time is not None and dim is not None:
            layout = layout.cut(dim, time.name)
        # JAX has no shards of a dim that the devices do not divide.
        yield DeviceInput(layout, layout.axes, padded_dims_gathered=True)


def stored(value: LeafPlan | ValuePlan, mesh: Mapping[str, int]) -> Layout:
    """The layout of a value between programs, which may be padded for more axes than shard it."""
    layout = from_spec(value.shape, mesh, _stored_layout.partition_spec(value.layout))
    if not isinstance(value.layout, Shard) or value.padded_shape == value.shape:
        return layout
    dims, d = [*layout.dims], value.layout.dim
    dims[d] = dims[d]._replace(size=value.padded_shape[d], pad=Pad(1, value.shape[d]))
    return dataclasses.replace(layout, dims=tuple(dims))


def reduced_hint(leaf: LeafPlan, mesh: dict[str, int]) -> Hint | None:
    """The hint for a parameter's gradient; a scalar has none, as it may scale those of all leaves."""
    if leaf.role != PARAMETER or not leaf.shape:
        return None
    layout = from_spec(leaf.shape, mesh, _stored_layout.partition_spec(leaf.gradient))
    return Hint(layout, leaf=leaf.path)


def function_of(program: DeviceProgram, planned: PlannedStep) -> Callable[..., list[Any]]:
    """A program as a function of padded global arrays."""
    consts = [*map(_jaxpr.constant, program.consts)]
    local = _traces.shard_mapped(
        _traces.without_constants(program.jaxpr),
        planned.mesh,
        [*[PartitionSpec()] * len(consts), *map(_spec, program.ins)],
        [*map(_spec, program.outs)],
        [tuple(dim.size for dim in layout.dims) for layout in program.outs],
        [axis for axis, _ in planned.plan.axes],
    )
    return functools.partial(local, *consts)


def _spec(layout: Layout) -> PartitionSpec:
    spec = layout.spec()
    assert spec is not None, f"{layout} is no layout of a JAX array"
    return spec
