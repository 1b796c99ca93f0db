# SPDX-License-Identifier: Apache-2.0
"""Runs the partitioner and all passes on a step, or a part of one: the program of one device after each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.ir._errors import NeedsAllMicrobatchesError
from jzero.ir._layout import Layout
from jzero.ir._work import Repeated
from jzero.segments._given import TypedPart, axes_of, of_all_devices, stored, whole_step
from jzero.segments._planned import PlannedStep, devices_of
from jzero.sharding.partition._matrix_buckets import DistributedUpdates
from jzero.sharding.partition._microbatches import MicrobatchLoops, in_loops
from jzero.sharding.partition._movement import Movement, movements
from jzero.sharding.partition._partition import DeviceProgram, partition
from jzero.sharding.partition._time_axis import TimeAxis
from jzero.sharding.partition._writer import OUTPUT
from jzero.sharding.passes._activations import activations, in_order
from jzero.sharding.passes._after_loops import after_loops
from jzero.sharding.passes._auto_axes import AutoAxes, auto_axes
from jzero.sharding.passes._auto_layouts import NO_SPECS, AutoLayouts
from jzero.sharding.passes._before_loops import before_loops
from jzero.sharding.passes._in_place import GATHERED_AT_ONCE, in_place
from jzero.sharding.passes._inputs_first import inputs_first
from jzero.sharding.passes._keep_gathered import gathered_once, keep_gathered
from jzero.sharding.passes._late_sums import late_sums
from jzero.sharding.passes._loop_gathers import loop_gathers
from jzero.sharding.passes._one_order import one_order
from jzero.sharding.passes._order import SMALLEST_GROUP, order
from jzero.sharding.passes._prefetch import prefetch
from jzero.sharding.passes._quantized_gathers import StoredCopy, quantize_gathers, quantize_renewals
from jzero.sharding.passes._quantized_reductions import QuantizedAxes, quantize_reductions
from jzero.sharding.passes._quantized_weights import QuantizedRows, dequantize_weights
from jzero.sharding.passes._reduce_dtype import reduce_dtype
from jzero.sharding.passes._tiles import tiles
from jzero.sharding.passes._whole_stacks import whole_stacks
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import Analysis, StepPlan
from jzero.sharding.plan._stored_layout import Shard, of_spec
from jzero.targets._links import AxisTimes, axis_times
from jzero.targets._target import target_of, topology_of
from jzero.tracing._types import Jaxpr

_PARTITION = "partition"
PASSES = (
    _PARTITION, "late_sums", "before_loops", "inputs_first", "keep_gathered", "loop_gathers", "microbatches",
    "tiles", "activations", "reduce_dtype", "weight_codes", "gather_codes", "reduce_codes", "whole_stacks",
    "prefetch", "order", "after_loops", "in_place", "one_order", "auto_axes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Partitioned:
    part: TypedPart  # All of a step, or its forward-backward program.
    programs: Mapping[str, DeviceProgram]  # After each of `PASSES`; the last one runs.

    def described(self, plan: StepPlan) -> StepPlan:
        """The plan with the program's loops, its residuals on the host, and the layouts of results."""
        program, num_new = self.program, len(plan.new_leaves)
        outputs = [*plan.outputs]
        for i, wanted, layout in zip(self.part.made, self.part.outs, program.outs, strict=True):
            if i is not None and wanted is None:
                outputs[i - num_new] = of_spec(layout.spec() or PartitionSpec())
        return dataclasses.replace(
            plan,
            microbatches=dataclasses.replace(plan.microbatches, loops=program.loops),
            activations=None if plan.activations is None else program.residuals,
            outputs=tuple(outputs),
        )

    @property
    def program(self) -> DeviceProgram:
        return self.programs[PASSES[-1]]

    @property
    def for_any_devices(self) -> DeviceProgram:
        """The program before the pass that only CPUs need."""
        return self.programs[PASSES[PASSES.index("one_order") - 1]]

    @property
    def movements(self) -> tuple[Movement, ...]:
        """Movements of the batch and of intermediate values; for a result, `where` is its index."""
        found = movements(self.program.moves)
        return tuple(self._of_step(m) if m.operation == OUTPUT else m for m in found)

    def repeated(self, plan: StepPlan, analysis: Analysis) -> tuple[float, list[Repeated]]:
        """The flops of the step, and those that its devices repeat."""
        whole = analysis.whole_batch
        if whole is None:
            return 0, []
        num = plan.num_devices * plan.accumulate
        work, again = whole.repeated(self.programs[_PARTITION].jaxpr, num)
        # Work that runs once for all microbatches is not repeated.
        if again and plan.accumulate > 1:
            looped = whole.repeated(self.programs["microbatches"].jaxpr, plan.num_devices)[1]
            again = min(again, looped, key=lambda each: sum(x.extra for x in each))
        return work, again

    def _of_step(self, movement: Movement) -> Movement:
        """The movement of a result, which is one of the step's, or a value that its update reads."""
        j = int(movement.where)
        if (i := self.part.made[j]) is not None:
            return dataclasses.replace(movement, where=str(i))
        hint = self.part.reduced[j]
        of = f"the gradient of {hint.leaf}" if hint is not None else "a value"
        return dataclasses.replace(movement, operation="the update", where=of)


def partitioned(planned: PlannedStep) -> Partitioned:
    plan = planned.plan
    time = time_of(plan, planned.mesh.axis_names)
    part = whole_step(plan, planned.analysis, axes_of(plan, time), time)
    return Partitioned(part, programs_of(part, planned, time))


def programs_of(
    part: TypedPart, planned: PlannedStep, time: TimeAxis | None = None
) -> dict[str, DeviceProgram]:
    """One device's program after each of `PASSES`; `time` is the axis of microbatches, if there are several.

    Raises:
      CannotPartitionError: the partitioner has no exact program.
    """
    plan, analysis, step = planned.plan, planned.analysis, part.step
    mesh, devices = axes_of(plan, time), devices_of(planned.mesh)
    links = axis_times(dict(planned.mesh.shape), target_of(devices), topology_of(devices))
    prices = tuple(each for each in links if each[0] in mesh)
    if prices and time is not None:
        # To keep a byte of all microbatches costs as much as to send one over the fastest links.
        byte = min(times.ring for _, times in prices)
        prices = *prices, (time.name, AxisTimes(0, byte, byte))
    automatic = None
    if plan.automatic:
        automatic = frozenset(leaf.path for leaf in plan.leaves if any(leaf.automatic))
    made = functools.partial(
        partition, step.jaxpr, step.consts, mesh, part.ins, part.outs, part.reduced, plan.reduce_once, prices,
        distributed=DistributedUpdates(analysis.distributed, plan.stage_axes.shard_axes),
        automatic=automatic, written=step.written, unmasked=part.unmasked,
    )  # fmt: skip
    try:
        program = made(time=time)
    except NeedsAllMicrobatchesError:
        program = made(time=time and time._replace(opens=True))
    if step.written is not None:
        program = of_all_devices(program, plan, part, time)
    return _passed(program, planned, part, time)


def time_of(plan: StepPlan, axes: Sequence[str]) -> TimeAxis | None:
    """The axis of microbatches, named unlike those of the mesh."""
    if plan.accumulate == 1:
        return None
    name = "microbatch"
    while name in axes:
        name += "_"
    return TimeAxis(name, plan.accumulate, plan.reduce_once)


def _passed(
    program: DeviceProgram, planned: PlannedStep, part: TypedPart, time: TimeAxis | None
) -> dict[str, DeviceProgram]:
    plan = planned.plan
    exchange, mesh = plan.exchange, dict(program.ins[0].mesh) if program.ins else {}
    leaves = part.leaves(plan)
    # After the loops over microbatches, rows are sharded over devices only.
    rows = [each.rows & {*planned.mesh.axis_names} for each in part.ins]
    ins = tuple(
        stored(leaves[k], mesh) if k in leaves else layout for k, layout in enumerate(program.ins)
    )
    specs = _auto_specs(plan, part, dict(planned.mesh.shape))
    itemsize = 0 if exchange.reduce_dtype is None else jnp.dtype(exchange.reduce_dtype).itemsize
    passes: dict[str, Callable[[Jaxpr], Jaxpr]] = {
        "late_sums": late_sums,
        # Microbatches add to one running sum of a gradient; split in two parts there would be two.
        "before_loops": before_loops if time is None else lambda jaxpr: jaxpr,
        "inputs_first": lambda jaxpr: inputs_first(jaxpr, exchange.freed_first),
        "keep_gathered": lambda jaxpr: _gathered_once(jaxpr, plan),
        "loop_gathers": lambda jaxpr: (
            jaxpr if exchange.loop_bytes is None else loop_gathers(jaxpr, exchange.loop_bytes)
        ),
        "tiles": lambda jaxpr: (
            jaxpr
            if exchange.tile_bytes is None
            else tiles(jaxpr, exchange.tile_bytes, rows, itemsize, specs)
        ),
        "reduce_dtype": lambda jaxpr: (
            jaxpr
            if exchange.reduce_dtype is None
            else reduce_dtype(jaxpr, exchange.reduce_dtype, rows)
        ),
        "weight_codes": lambda jaxpr: _weights_in_codes(jaxpr, plan, leaves, ins),
        "gather_codes": lambda jaxpr: _in_codes(jaxpr, plan, part, rows, specs),
        "reduce_codes": lambda jaxpr: _reduced_in_codes(jaxpr, plan, rows, specs),
        "whole_stacks": lambda jaxpr: whole_stacks(
            jaxpr, min(SMALLEST_GROUP, exchange.tile_bytes or SMALLEST_GROUP)
        ),
        "prefetch": lambda jaxpr: prefetch(jaxpr, exchange.prefetch_bytes, planned.balance),
        "order": lambda jaxpr: order(jaxpr, exchange.reduced_together(plan.num_devices)),
        "after_loops": after_loops,
        "in_place": lambda jaxpr: in_place(
            jaxpr, _sliced(part.olds, leaves), planned.mesh, dict(plan.axes), GATHERED_AT_ONCE
        ),
        "one_order": one_order if planned.overtakes else lambda jaxpr: jaxpr,
        "auto_axes": lambda jaxpr: (
            auto_axes(jaxpr, AutoAxes(planned.mesh, tuple(dict(plan.axes)), planned.alone), specs)
            if plan.automatic
            else jaxpr
        ),
    }

    def looped(program: DeviceProgram) -> DeviceProgram:
        if time is None:
            return program
        dtype, once = exchange.accumulate_dtype, exchange.gather_once
        return in_loops(program, MicrobatchLoops(time, dtype, once, plan.num_devices))

    def on_host(program: DeviceProgram) -> DeviceProgram:
        if plan.activations is None:
            return dataclasses.replace(program, jaxpr=in_order(program.jaxpr, plan.in_parts))
        of_batch = rows if plan.num_devices > 1 else part.sharded_arguments(plan)
        jaxpr, residuals = activations(program.jaxpr, of_batch, plan.accumulate, plan.in_parts)
        return dataclasses.replace(program, jaxpr=jaxpr, residuals=residuals)

    of_programs: dict[str, Callable[[DeviceProgram], DeviceProgram]] = {
        "microbatches": looped,
        "activations": on_host,
    }
    found = {_PARTITION: program}
    for name in PASSES[1:]:
        if name in of_programs:
            program = of_programs[name](program)
        elif program.jaxpr.eqns:
            program = dataclasses.replace(program, jaxpr=passes[name](program.jaxpr))
        if name == "weight_codes" and any(leaf.codes for leaf in leaves.values()):
            program = dataclasses.replace(program, ins=ins)
        found[name] = program
    return found


def _sliced(
    olds: Sequence[int | None], leaves: Mapping[int, LeafPlan]
) -> list[int | None]:  # fmt: skip
    """The arguments that results may replace slice by slice: none that XLA shards along dim 0."""
    return [
        None if old is None or old in leaves and any(leaves[old].automatic[:1]) else old
        for old in olds
    ]


def _auto_specs(plan: StepPlan, part: TypedPart, mesh: Mapping[str, int]) -> AutoLayouts:
    """How XLA shards inputs and results over axes that are not the program's."""
    if not plan.automatic:
        return NO_SPECS
    ins = {k: leaf.automatic for k, leaf in part.leaves(plan).items() if leaf.automatic}
    new = ((j, plan.leaves[i]) for j, i in part.new_leaves(plan))
    own = {axis for axis, _ in plan.axes}
    sizes = {axis: num for axis, num in mesh.items() if axis not in own}
    return AutoLayouts(sizes, ins, {j: leaf.automatic for j, leaf in new if leaf.automatic})


def _gathered_once(jaxpr: Jaxpr, plan: StepPlan) -> Jaxpr:
    """Gathers each leaf once for all equations that read it, if the plan has memory for that."""
    if not plan.exchange.keep_gathered:
        return jaxpr
    return keep_gathered(jaxpr, plan.evaluates) if plan.stage == 3 else gathered_once(jaxpr)


def _weights_in_codes(
    jaxpr: Jaxpr, plan: StepPlan, leaves: Mapping[int, LeafPlan], ins: Sequence[Layout]
) -> Jaxpr:  # fmt: skip
    """Dequantizes quantized leaves; loops may then gather codes, of which `loop_bytes` has room for more."""
    coded = {
        k: (QuantizedRows(form.blocks, form.dtype, form.part, form.dim, form.num_stacked), ins[k].local_shape)
        for k, leaf in leaves.items() if (form := leaf.codes)
    }  # fmt: skip
    jaxpr, most = dequantize_weights(jaxpr, coded), plan.exchange.loop_bytes
    return jaxpr if most is None or not coded else loop_gathers(jaxpr, most)


def _in_codes(
    jaxpr: Jaxpr, plan: StepPlan, part: TypedPart, rows: Sequence[frozenset[str]], specs: AutoLayouts
) -> Jaxpr:  # fmt: skip
    """Quantizes gathers of parameters, and their renewals, if asked for."""
    codes = plan.exchange.gather_codes
    if codes is None:
        return jaxpr
    leaves = part.leaves(plan)
    coded = [k for k, leaf in leaves.items() if leaf.coded]
    places = {part.taken[k]: k for k in leaves}
    copies = [
        StoredCopy(
            places[i], j, leaf.layout.axes if isinstance(leaf.layout, Shard) else (), leaf.shape
        )
        for j, i in part.new_leaves(plan)
        if (leaf := plan.leaves[i]).renewed_in_codes and i in places
    ]
    jaxpr = quantize_renewals(jaxpr, codes, copies, dict(plan.axes), specs)
    return quantize_gathers(jaxpr, codes, coded, rows, specs)


def _reduced_in_codes(
    jaxpr: Jaxpr, plan: StepPlan, rows: Sequence[frozenset[str]], specs: AutoLayouts
) -> Jaxpr:  # fmt: skip
    """Quantizes reductions of gradients, if asked for."""
    formats = dict(plan.exchange.reduce_codes)
    if not any(formats.values()):
        return jaxpr
    coded = [leaf.path for leaf in plan.leaves if leaf.coded]
    replicas = [axis for axis, _ in plan.axes if axis not in plan.stage_axes.shard_axes]
    axes = QuantizedAxes(dict(plan.axes), formats, replicas)
    return quantize_reductions(jaxpr, axes, coded, rows, specs=specs)
