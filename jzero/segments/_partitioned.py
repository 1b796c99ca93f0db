# SPDX-License-Identifier: Apache-2.0
"""A step as one program of the partitioner, where `JZERO_PARTITION=1` asks for it and it can.

A developer's switch, until that engine runs all steps: every other step is interpreted as the plan says.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jzero._memory_kinds import DEVICE
from jzero.ir._layout import Layout, Pad, from_spec, replicated
from jzero.ir._rules import size_in_bytes
from jzero.ir._work import LEAST_SHARE, Repeated
from jzero.sharding.batch._body import Movement
from jzero.sharding.batch._trace import WHOLE, WholeBatch
from jzero.sharding.partition._errors import (
    CannotPartitionError,
    NeedsAllMicrobatchesError,
    cannot,
)
from jzero.sharding.partition._microbatches import Accumulation, in_loops
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram, partition
from jzero.sharding.partition._time import TimeAxis
from jzero.sharding.partition._writer import OF_STATE, OF_SUM, DeviceMove
from jzero.sharding.passes._after_loops import after_loops
from jzero.sharding.passes._inputs_first import inputs_first
from jzero.sharding.passes._keep_gathered import keep_gathered
from jzero.sharding.passes._loop_gathers import loop_gathers
from jzero.sharding.passes._order import order
from jzero.sharding.passes._prefetch import prefetch
from jzero.sharding.passes._reduce_dtype import reduce_dtype
from jzero.sharding.passes._whole_stacks import whole_stacks
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import Shard
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._offload import StepProgram
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stages import PARAMETER
from jzero.sharding.run import _devices
from jzero.sharding.run._run import Runner
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._rewrite import Flat
from jzero.tracing._types import Eqn, Jaxpr

SWITCH = "JZERO_PARTITION"
_PARTITION = "partition"
# In their order.
PASSES = (
    _PARTITION,
    "inputs_first",
    "reduce_dtype",
    "keep_gathered",
    "loop_gathers",
    "microbatches",
    "whole_stacks",
    "prefetch",
    "order",
    "after_loops",
)


def is_on() -> bool:
    """Whether steps are partitioned that can be."""
    return os.environ.get(SWITCH) == "1"


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A step that the partitioner runs.

    Attributes:
      programs: of one device, after each of `PASSES`; the last one runs.
      repeated: the flops of a step, and what the devices repeat of them.
      run: `(state leaves, argument leaves) -> (new state leaves, outputs)`, on whole arrays.
    """

    programs: Mapping[str, DeviceProgram]
    repeated: tuple[float, list[Repeated]]
    run: Callable[..., Any]

    def described(self, plan: StepPlan) -> StepPlan:
        """The plan, with the program's own loops over microbatches."""
        microbatches = dataclasses.replace(plan.microbatches, loops=self.program.loops)
        return dataclasses.replace(plan, microbatches=microbatches)

    @property
    def program(self) -> DeviceProgram:
        """What runs."""
        return self.programs[PASSES[-1]]

    @property
    def movements(self) -> tuple[Movement, ...]:
        """What it moves of the batch, and of what is computed of it; of a result, where is its number."""
        return tuple(
            Movement(move.operation, move.line, move.local_bytes, move.times, move.why, move.value)
            for move in filter(_is_of_rows, self.program.moves)
        )


class PartitionedStep:
    """A step on whole arrays, partitioned when it is first asked for; interpreted if it cannot be."""

    __name__ = "local_step"  # as profiles say it

    def __init__(self, runner: Runner):
        self._runner = runner

    def __call__(self, state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs it."""
        made: tuple[list[Any], list[Any]] = self._run(state, arrays)
        return made

    @functools.cached_property
    def found(self) -> Partitioned | CannotPartitionError:
        """What runs it, or why the partitioner does not."""
        try:
            return _partitioned(self._runner)
        except CannotPartitionError as error:
            return error.with_traceback(None)  # Its frames hold tracers.

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        found = self.found
        return found.run if isinstance(found, Partitioned) else self._runner.whole_step()


def of_step(step: StepProgram) -> Partitioned | CannotPartitionError | None:
    """What the partitioner made of a step, or why it made nothing; None if nobody asked."""
    return step.run.found if isinstance(step.run, PartitionedStep) else None


def _partitioned(runner: Runner) -> Partitioned:
    plan, whole = runner.plan, runner.analysis.whole
    why = next(_reasons(plan, whole), None)
    if why is not None or whole is None:
        raise cannot(why or "it has no jaxpr of the whole batch")
    mesh, time = dict(runner.mesh.shape), _time(plan, runner.mesh.axis_names)
    mesh |= {} if time is None else {time.name: time.num}
    flat, rows = _read_only(whole, plan)
    taken = [i for i in range(len(rows)) if i not in plan.unread]
    inputs = [*_inputs(plan, flat, rows, mesh, time)]
    outs = [_leaf(leaf, mesh) for leaf in plan.new_leaves]
    outs += [
        from_spec(atom.aval.shape, mesh, _layout.partition_spec(layout))
        for atom, layout in zip(flat.outvars[len(outs) :], plan.outputs, strict=True)
    ]
    ordered = flat._replace(invars=[flat.invars[i] for i in taken])  # type: ignore[arg-type]
    names = [leaf.path if leaf.role == PARAMETER else "" for leaf in plan.new_leaves]
    given = ordered, whole.consts, mesh, [inputs[i] for i in taken], outs, names, plan.reduce_once
    try:
        program = partition(*given, time)
    except NeedsAllMicrobatchesError:
        program = partition(*given, time and time._replace(opens=True))
    programs = _passed(program, plan, [inputs[i].rows for i in taken], time)
    repeated = _checked(programs, whole, runner)
    return Partitioned(programs, repeated, _run_of(programs[PASSES[-1]], runner, taken))


def _time(plan: StepPlan, axes: Sequence[str]) -> TimeAxis | None:
    """The axis of microbatches, with a name that the mesh has not."""
    if plan.accumulate == 1:
        return None
    name = "microbatch"
    while name in axes:
        name += "_"
    return TimeAxis(name, plan.accumulate, plan.reduce_once)


def _handed(plan: StepPlan) -> int | None:
    """Twice the bytes that the interpreter's loops over microbatches would hand out; None if it has none."""
    if plan.microbatches.refused is not None:
        return None
    stacks = (var for phase in plan.microbatches.phases for var in phase.stacks)
    return 2 * plan.accumulate * sum(size_in_bytes(var.aval) for var in stacks)


def _checked(
    programs: Mapping[str, DeviceProgram], whole: WholeBatch, runner: Runner
) -> tuple[float, list[Repeated]]:
    """The flops of the step, and what its devices repeat of them.

    Raises:
      CannotPartitionError: the interpreter repeats less, or gathers fewer rows where that is limited.
    """
    program = programs[_PARTITION]
    most = max((m.local_bytes for m in program.moves if _is_of_rows(m)), default=0)
    if most > runner.plan.exchange.max_gather_bytes:
        raise cannot("it gathers more rows at once than max_gather_bytes")
    if any(map(_gathers_in_slices, _returned(program.jaxpr)[: len(runner.plan.new_leaves)])):
        raise cannot("a new parameter is gathered into the old one in slices")
    num = runner.plan.num_devices * runner.plan.accumulate
    work, again = whole.repeated(program.jaxpr, num)
    if (
        again and runner.plan.accumulate > 1
    ):  # What runs once for all microbatches is no repetition.
        looped = whole.repeated(programs["microbatches"].jaxpr, runner.plan.num_devices)[1]
        again = min(again, looped, key=lambda each: sum(x.extra for x in each))
    others = whole.repeated(runner.frame.jaxpr, num)[1] if again else []
    more = sum(x.extra for x in again) - sum(x.extra for x in others)
    if more > LEAST_SHARE * work and runner.plan.microbatches.refused is None:
        raise cannot(f"its devices would do {more / work:.0%} more than the interpreter's")
    return work, again


def _returned(jaxpr: Jaxpr) -> list[Eqn | None]:
    """The equations that make a program's results."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    return [None if _jaxpr.is_literal(x) else makers.get(x) for x in jaxpr.outvars]


def _gathers_in_slices(eqn: Eqn | None) -> bool:
    """Whether the interpreter would: [Note: layouts at rest]."""
    if eqn is None or eqn.primitive.name != "all_gather":
        return False
    large = size_in_bytes(eqn.outvars[0].aval) > _devices.GATHERED_AT_ONCE
    return large and bool(eqn.params["all_gather_dimension"])


def _is_of_rows(move: DeviceMove) -> bool:
    """Whether it moves rows of the batch, and is none of the gathers and reductions of ZeRO."""
    return move.why not in (OF_STATE, OF_SUM)


def _passed(
    program: DeviceProgram, plan: StepPlan, rows: Sequence[frozenset[str]], time: TimeAxis | None
) -> dict[str, DeviceProgram]:  # fmt: skip
    """The program after each pass: its collectives where the interpreter of the plan would have them.

    `rows` are the axes over which each argument differs because rows of the batch do.
    """
    exchange = plan.exchange
    passes: dict[str, Callable[[Jaxpr], Jaxpr]] = {
        "inputs_first": lambda jaxpr: inputs_first(jaxpr, exchange.freed_first),
        "reduce_dtype": lambda jaxpr: (
            jaxpr
            if exchange.reduce_dtype is None
            else reduce_dtype(jaxpr, exchange.reduce_dtype, rows)
        ),
        "keep_gathered": lambda jaxpr: (
            keep_gathered(jaxpr, plan.evaluates)
            if plan.stage == 3 and exchange.keep_gathered
            else jaxpr
        ),
        "loop_gathers": lambda jaxpr: (
            jaxpr if exchange.loop_bytes is None else loop_gathers(jaxpr, exchange.loop_bytes)
        ),
        "whole_stacks": whole_stacks,
        "prefetch": lambda jaxpr: prefetch(jaxpr, exchange.prefetch_bytes),
        "order": lambda jaxpr: order(jaxpr, exchange.reduced_together(plan.num_devices)),
        "after_loops": after_loops,
    }
    found = {_PARTITION: program}
    for name in PASSES[1:]:
        if name in passes:
            program = dataclasses.replace(program, jaxpr=passes[name](program.jaxpr))
        elif time is not None:
            program = in_loops(
                program,
                Accumulation(
                    time,
                    exchange.accumulate_dtype,
                    exchange.gather_once,
                    plan.num_devices,
                    _handed(plan),
                ),
            )
        found[name] = program
    return found


def may_run(plan: StepPlan, whole: WholeBatch | None) -> bool:
    """Whether steps are partitioned, and the plan says nothing against this one."""
    return is_on() and next(_reasons(plan, whole), None) is None


def _reasons(plan: StepPlan, whole: WholeBatch | None) -> Iterator[str]:
    """Why the partitioner does not run a step: what its options ask for, or what the step does."""
    exchange = plan.exchange
    asked = {
        "collectives of its own": plan.reductions != WHOLE or whole is None,
        "mesh axes beside the data axes": bool(plan.automatic),
        "offload": bool(plan.turns) or any(leaf.tier != DEVICE for leaf in plan.leaves),
        "offload_activations": plan.activations is not None,
        "gather_dtype": exchange.gather_codes is not None,
        "reduce_dtype": any(codes is not None for _, codes in exchange.reduce_codes)
        or exchange.reduce_dtype is not None
        and plan.accumulate > 1,
        "weight_dtype": any(leaf.codes for leaf in plan.leaves),
        "tile_bytes": exchange.tile_bytes is not None,
        "owners of matrices": any(not each.why for each in plan.owned),
        "effects": whole is not None and any(map(_jaxpr.has_side_effects, whole.jaxpr.eqns)),
    }
    yield from (reason for reason, is_so in asked.items() if is_so)


def _read_only(whole: WholeBatch, plan: StepPlan) -> tuple[Flat, tuple[int | None, ...]]:
    """The step without the equations of which nothing is returned.

    Raises:
      CannotPartitionError: it reads a leaf that the plan does not read.
    """
    flat = whole.jaxpr
    flat = flat._replace(
        eqns=_rewrite.without_unread(flat.eqns, flat.outvars, lambda _: True),
    )
    read = {atom for eqn in flat.eqns for atom in _jaxpr.variables_read(eqn)}
    read |= {atom for atom in flat.outvars if not _jaxpr.is_literal(atom)}
    if any(flat.invars[i] in read for i in plan.unread):
        raise cannot("it reads a leaf that the plan does not read")
    return flat, whole.rows


def _inputs(
    plan: StepPlan,
    flat: Flat,
    rows: Sequence[int | None],
    mesh: dict[str, int],
    time: TimeAxis | None,
) -> Iterator[DeviceInput]:
    """Leaves as they are stored; arguments in rows."""
    axes = tuple(axis for axis, _ in plan.axes)
    axes += () if time is None else (time.name,)
    yield from (DeviceInput(_leaf(leaf, mesh), name=leaf.path) for leaf in plan.leaves)
    for var, dim in zip(flat.invars[len(plan.leaves) :], rows[len(plan.leaves) :], strict=True):
        layout = replicated(var.aval.shape, mesh)
        if dim is None:
            yield DeviceInput(layout)
            continue
        for axis in axes:
            layout = layout.cut(dim, axis)
        # What the devices do not divide cannot come in shards.
        comes_whole = layout.dims[dim].pad is not None
        yield DeviceInput(layout, frozenset(axes), comes_whole=comes_whole)


def _leaf(leaf: LeafPlan, mesh: dict[str, int]) -> Layout:
    """A leaf's layout at rest; it may be padded for more axes than it is sharded over."""
    layout = from_spec(leaf.shape, mesh, _layout.partition_spec(leaf.layout))
    if not isinstance(leaf.layout, Shard) or not leaf.padding:
        return layout
    dims, d = [*layout.dims], leaf.layout.dim
    dims[d] = dims[d]._replace(size=leaf.padded_shape[d], pad=Pad(1, leaf.shape[d]))
    return dataclasses.replace(layout, dims=tuple(dims))


def _run_of(program: DeviceProgram, runner: Runner, taken: Sequence[int]) -> Callable[..., Any]:
    """The program as a function of whole arrays, those of leaves padded."""
    plan, consts = runner.plan, [*map(_jaxpr.constant, program.consts)]
    num_new = len(plan.new_leaves)
    local = _jaxpr.shard_mapped(
        _jaxpr.without_constants(program.jaxpr),
        runner.mesh,
        [*[PartitionSpec()] * len(consts), *map(_spec, program.ins)],
        [*map(_spec, program.outs)],
        [tuple(dim.size for dim in layout.dims) for layout in program.outs],
    )

    def step(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [*state, *arrays]
        outs = local(*consts, *(given[i] for i in taken))
        return outs[:num_new], outs[num_new:]

    return step


def _spec(layout: Layout) -> PartitionSpec:
    spec = layout.spec()
    assert spec is not None, f"{layout} is no layout of a JAX array"
    return spec
