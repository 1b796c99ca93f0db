# SPDX-License-Identifier: Apache-2.0
"""`preflight`: compiles a step for devices that are not there, and reports its memory and time."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jzero._errors import BatchError, MeshError, OptionError, a_type, message
from jzero._memory_kinds import NVME, PINNED
from jzero._quantities import is_number, readable_bytes, readable_seconds
from jzero._sharded_step import ShardedStep
from jzero.preflight import _targets
from jzero.preflight._dispatches import Dispatches, read_dispatches
from jzero.preflight._examined import Examined, PartMemory, examine, examine_programs
from jzero.preflight._schedule import (
    CompiledSchedule,
    ScheduledCollective,
    hidden_share,
    read_program,
    schedule_of,
    without_times,
)
from jzero.preflight._tpu_text import read_tpu_program
from jzero.preflight._wires import WireVerdict, check_wire, compare_wires
from jzero.reports._describe import Report
from jzero.reports._tables import (
    Block,
    Memory,
    Printed,
    Table,
    memory_table,
    plain,
    transfer_table,
)
from jzero.segments._programs import stored_inputs
from jzero.targets._target import Target, Topology
from jzero.tracing._axis_types import takes_explicit_axes

WHO = "preflight"


@takes_explicit_axes
def preflight(
    train_step: ShardedStep | jax.stages.Lowered,
    *args: Any,
    target: str = "h200",
    topology: str = "1x8",
    axes: Mapping[str, int] | None = None,
    memory_fraction: float = 0.75,
    bandwidth: Mapping[str, int | str] | None = None,
    search_batch: bool = False,
    search_wire: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Preflight:
    """Compiles a step for GPUs or TPUs on a machine with none, and reports what it would need there.

    XLA's compiler for them runs as it would there, but for autotuning, which needs the device::

        program  = the step on (state, *args), compiled for the target
        memory   = what the program says of its buffers
        schedule = the order of its operations, and their time by a model: what hides behind what

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step_fn(w, batch):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    ...     return w - 0.1 * grad, loss
    >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> batch = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    >>> found = jzero.preflight(
    ...     jzero.shard_train_step(step_fn), w, batch, target="h100", topology="2x8"
    ... )
    >>> found.fits, found.at_rest == found.report.plan.nbytes_at_rest() == 4 * 1024 * 1024 // 16
    (True, True)

    Args:
      train_step: the sharded step; or any program as `jax.jit(...).lower(...)` gives it, lowered for a
        `jzero.target_mesh` of the same target, topology and axes (then without `args`).
      *args: the step's arguments, each an array or a `jax.ShapeDtypeStruct`, of whole shapes.
      target: 'h100', 'gb200-nvl72', 'tpu-v5e' ...: a file of `jzero/targets`; the error of another lists all.
      topology: 'HOSTSxDEVICES', the devices of one host: '8x8' are 64; of TPUs the chips of a slice, '4x4'.
      axes: names and sizes of the mesh's axes, hosts first. By default those of the step's mesh if it has
        as many devices, else its only axis.
      memory_fraction: the share of a device's memory that the process uses: JAX's default, or what
        XLA_PYTHON_CLIENT_MEM_FRACTION will be.
      bandwidth: what each device sends, and receives, along a mesh axis, `{'node': '100Gb/s', 'local':
        '450GB/s'}`; the data sheet's for axes that it leaves out.
      search_batch: also find the most rows of the batch for each device and microbatch that fit (ten to
        two dozen compilations).
      search_wire: also compile the step with gathers, and reductions, quantized to 8 and 4 bits, and say
        below which bandwidth they pay (two or three compilations; for a step that is not quantized itself).
      compiler_options: for `jax.stages.Lowered.compile`, such as XLA flags without the dashes.
      **kwargs: the step's keyword arguments.

    Returns:
      A `Preflight`; print it.

    Raises:
      OptionError: a target, topology, fraction, bandwidth or compiler option that does not exist; a
        program lowered for other devices.
      MeshError: `axes` do not make up the devices, or cannot be guessed; bandwidths of other axes.
      ImportError: `jzero[preflight]` is not installed.
    """
    if not (is_number(memory_fraction) and 0 < memory_fraction <= 1):
        raise OptionError(message(
            WHO, f"memory_fraction={memory_fraction!r}", "It is a share of a device's memory.",
            "Use a number above 0, up to 1."))  # fmt: skip
    gpu = _targets.compiled_target(WHO, target)
    grid = _targets.read_topology(WHO, gpu, topology)
    options = {"xla_gpu_autotune_level": 0} | _checked_options(compiler_options)
    if isinstance(train_step, ShardedStep):
        sizes = (
            _axes_for(train_step, grid) if axes is None else _targets.checked_axes(WHO, grid, axes)
        )
    elif isinstance(train_step, jax.stages.Lowered):
        if search_batch or search_wire:
            raise OptionError(message(
                WHO, f"{'search_batch' if search_batch else 'search_wire'}=True, and a lowered program",
                "A search compiles the step with other batch sizes, or other communication dtypes.",
                "Pass the sharded step and its arguments."))  # fmt: skip
        _targets.check_lowered(WHO, train_step, gpu, grid)
        sizes = _targets.checked_axes(WHO, grid, axes)
    else:
        raise OptionError(message(
            WHO, f"train_step is {a_type(train_step)}",
            "It is what shard_train_step or jax.jit(...).lower(...) returns.",
            "Write preflight(shard_train_step(step_fn), state, batch)."))  # fmt: skip
    gpu = _targets.with_bandwidth(WHO, gpu, grid, sizes, bandwidth)
    of_tpu = gpu.platform == "tpu"
    if of_tpu and search_wire:
        raise OptionError(message(
            WHO, f"search_wire=True, and target={target!r}", _TPU_TIMES,
            "Drop search_wire, or compile for GPUs."))  # fmt: skip
    read = read_tpu_program if of_tpu else read_program
    under_way = _under_way(options)

    def shown(report: Report | None, examined: Examined) -> Preflight:
        schedule = schedule_of(examined.started, sizes, gpu, grid, under_way)
        return Preflight(
            report, gpu, grid, examined.argument_bytes, examined.temporary_bytes,
            examined.peak_bytes, without_times(schedule) if of_tpu else schedule,
            examined.compile_seconds, examined.host_bytes, examined.parts, memory_fraction,
        )  # fmt: skip

    if isinstance(train_step, jax.stages.Lowered):
        return shown(None, examine(train_step, options, read))
    mesh = _targets.mesh_of(WHO, gpu, grid, sizes)
    train_step, args = train_step.unbound(), tuple(train_step._given(args))
    offloads = train_step._programs.options.offloads
    # An abstract mesh has all kinds of memory; devices that are not there list none.
    there = train_step.on_mesh(mesh.abstract_mesh if offloads else mesh)
    batch = there._programs.batch_of(WHO, args, kwargs)

    def compiled(step: ShardedStep, rows: int) -> Examined:
        if not offloads:
            return examine(batch.call(step.lower, rows), options, read)
        dispatches = batch.call(functools.partial(_dispatches_of, step), rows)
        examined = examine_programs(dispatches, mesh, options, read)
        fetched = step._programs.options.offload.window.host_bytes
        coming = -(-fetched // grid.per_host)  # bytes of buffers for parameters in files
        if step._programs.options.donate:
            return examined._replace(host_bytes=examined.host_bytes + coming)
        plan = batch.call(step.plan, rows)
        return examined._replace(  # The programs donate a copy of the state.
            peak_bytes=examined.peak_bytes + plan.nbytes_at_rest(),
            host_bytes=examined.host_bytes + coming + plan.nbytes_at_rest(tier=PINNED),
        )

    if search_batch and not batch.rows:
        raise BatchError(message(
            WHO, "search_batch=True, and no argument is sharded over the devices",
            "The search changes the number of rows of sharded arguments.",
            "Drop search_batch, or the in_specs that replicate the batch."))  # fmt: skip
    if search_wire:
        check_wire(WHO, there._programs.options)
    examined = compiled(there, batch.rows)
    found = shown(batch.call(there.describe, batch.rows), examined)
    if search_batch:
        largest = _largest_rows(
            lambda rows: compiled(there, rows).peak_bytes, batch.rows, found.peak_bytes,
            found.usable_bytes,
        )  # fmt: skip
        found = dataclasses.replace(found, rows=batch.rows, largest_rows=largest)
    if search_wire:
        wires = compare_wires(
            there, lambda step: compiled(step, batch.rows), examined, gpu, grid, under_way
        )
        found = dataclasses.replace(found, wires=wires)
    return found


@dataclasses.dataclass(frozen=True)
class Preflight(Printed):
    """What a step will need on devices that are not there; `print` it.

    Attributes:
      report: what `describe` says of the step; None for a program that is not jzero's.
      target: the device.
      topology: hosts, and devices on each.
      argument_bytes: on each device, of the program's arguments: the state, and its part of the batch.
      temporary_bytes: on each device, at most alive within a step in addition; within one program, if a step
        has several.
      peak_bytes: on each device, at the moment when most is alive.
      schedule: its collectives, and the time of a step by a model; of TPUs the collectives alone.
      compile_seconds: what the compilation took here.
      host_bytes: of pinned memory on the host, for each device, at the moment when most is alive.
      parts: of a step with offloaded state, the different programs that it starts; else none.
      memory_fraction: the share of a device's memory that may be used.
      rows: of the batch, on each device and for each microbatch (with `search_batch`).
      largest_rows: the most that fit; 0 if none do (with `search_batch`).
      wires: whether quantized communication pays (with `search_wire`).
    """

    report: Report | None
    target: Target
    topology: Topology
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    schedule: CompiledSchedule
    compile_seconds: float
    host_bytes: int
    parts: tuple[PartMemory, ...]
    memory_fraction: float
    rows: int | None = None
    largest_rows: int | None = None
    wires: WireVerdict | None = None

    @property
    def usable_bytes(self) -> int:
        """What the process may use of a device's memory."""
        return int(self.target.memory_bytes * self.memory_fraction)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable bytes."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def _timed(self) -> bool:
        return self.target.platform != "tpu"

    @property
    def at_rest(self) -> int | None:
        """Bytes of the state on each device; None for a program that is not jzero's."""
        return None if self.report is None else self.report.plan.nbytes_at_rest()

    @property
    def memory(self) -> tuple[Memory, ...]:
        """The stored roles, and what the program holds within a step, as `estimate` has them."""
        num = self.topology.num_devices
        peak, there = self.peak_bytes - self.argument_bytes, self.host_bytes
        if self.report is not None:
            there -= self.report.plan.nbytes_at_rest(tier=PINNED)
        note = "at the peak, besides the arguments"
        within = Memory("within a step", (peak + there) * num, peak, False, note, there)
        if self.report is None:
            return Memory(
                "arguments", self.argument_bytes * num, self.argument_bytes, True, ""
            ), within
        batch = self.argument_bytes - self.report.plan.nbytes_at_rest()
        rows = Memory("batch", batch * num, batch, False, "and counters of the program")
        return (*self.report.memory, rows, within)

    def nbytes(self, op: str) -> int:
        """Bytes that a step moves by `op`."""
        return sum(c.nbytes for c in self.schedule.collectives if c.op == op)

    def hidden(self, op: str | None = None) -> float | None:
        """Of the time that collectives take alone, all or those of `op`, the share that is not exposed.

        By the same model as the step's time: 1 if all run while the device computes, 0 if it waits
        for all of them. None if they take no time, and of TPUs.
        """
        return hidden_share([c for c in self.schedule.collectives if op in (None, c.op)])

    def to_dict(self) -> dict[str, Any]:
        """All that the text says, as plain types: `json.dumps` takes it. Bytes are ints, times seconds.

        Keys: target, hosts, devices_per_host; compile_seconds; argument_bytes, temporary_bytes, peak_bytes,
        host_bytes, usable_bytes, memory_fraction, fits; parts, the fields of each `PartMemory`; memory, as in
        `Report.to_dict`; collectives as compiled: op, axes, bytes, times, seconds (each time),
        exposed_seconds (of a step) and hidden, as in `ScheduledCollective`; hidden, of all; step_seconds,
        compute_seconds, product_seconds, exposed_seconds, exposed_copy_seconds, collective_seconds,
        to_host_seconds, from_host_seconds, kernel_bytes, as in `CompiledSchedule` (of TPUs None, as
        hidden), and unknown_loops; rows and largest_rows (None without `search_batch`); wires, as in
        `WireVerdict.to_dict` (None without `search_wire`); step, the `Report.to_dict` of the step (None for a
        program that is not jzero's).
        """
        times = {name: x for name, x in vars(self.schedule).items() if name != "collectives"}
        return {
            "target": self.target.name,
            "hosts": self.topology.hosts,
            "devices_per_host": self.topology.per_host,
            "compile_seconds": self.compile_seconds,
            "argument_bytes": self.argument_bytes,
            "temporary_bytes": self.temporary_bytes,
            "peak_bytes": self.peak_bytes,
            "usable_bytes": self.usable_bytes,
            "memory_fraction": self.memory_fraction,
            "fits": self.fits,
            "memory": [row._asdict() for row in self.memory],
            "collectives": [
                {"op": c.op, "axes": list(c.axes), "bytes": c.nbytes, "times": c.times,
                 "seconds": c.seconds, "exposed_seconds": c.exposed_seconds, "hidden": c.hidden}
                for c in self.schedule.collectives
            ],
            "hidden": self.hidden(),
            **times,
            "host_bytes": self.host_bytes,
            "parts": [*map(plain, self.parts)],
            "rows": self.rows,
            "largest_rows": self.largest_rows,
            "wires": None if self.wires is None else self.wires.to_dict(),
            "step": None if self.report is None else self.report.to_dict(),
        }  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        """Tables, and prose between them; what there is nothing to say of is empty."""
        grid, report = self.topology, self.report
        title = (
            f"jzero preflight: {grid.num_devices} x {self.target.name} ({grid.hosts} hosts of "
            f"{grid.per_host}), compiled in {self.compile_seconds:.0f} s"
        )
        yield [title, *([] if report is None else report.header())]
        yield memory_table(self.memory)
        yield self._verdict()
        yield from self._parts()
        yield self._collectives()
        yield [self._time()]
        yield from [] if self.wires is None else self.wires.blocks()
        if report is not None:
            yield transfer_table(report.transfers)
            yield report.gathered_rows()
        yield [(_LIMITS if self._timed else _TPU_LIMITS) + _LIMITS_OF_PARTS * bool(self.parts)]

    def _verdict(self) -> list[str]:
        spare = abs(self.usable_bytes - self.peak_bytes)
        verdict = "FITS, with" if self.fits else "DOES NOT FIT, by"
        lines = [
            f"{verdict} {readable_bytes(spare)}: the peak is {readable_bytes(self.peak_bytes)} of "
            f"{readable_bytes(self.usable_bytes)} ({self.memory_fraction:g} of a device's "
            f"{readable_bytes(self.target.memory_bytes)})"
        ]
        if self.largest_rows is not None:
            lines.append(
                f"The most rows for each device and microbatch that fit: {self.largest_rows} "
                f"(compiled: {self.rows})"
            )
        return lines

    def _parts(self) -> Iterator[Block]:
        if not self.parts:
            return
        columns = ("argument_bytes", "made_bytes", "temporary_bytes", "peak_bytes")
        largest = sorted(self.parts, key=lambda part: -part.peak_bytes)[:_MOST_PARTS]
        rows = [
            (part.name, str(part.times),
             *(readable_bytes(getattr(part, column)) for column in columns))
            for part in self.parts if part in largest
        ]  # fmt: skip
        header = ("program", "times", "arguments", "outputs", "temporaries", "then on a device")
        yield Table(header, rows)
        rest = len(self.parts) - len(rows)
        bad = [
            f"{part.name} ({', '.join(part.host_operations)})"
            for part in self.parts
            if part.host_operations
        ]
        on_host = "Pinned memory is only copied from and to: no program computes there."
        if bad:
            on_host = f"Programs that compute on pinned memory, which is slow: {'; '.join(bad)}."
        yield [*[f"And {rest} more programs, with less on a device."] * bool(rest), on_host]

    def _collectives(self) -> Block:
        if not self.schedule.collectives:
            return ["A step moves nothing between devices."]
        groups: dict[tuple[str, str], list[ScheduledCollective]] = {}
        for c in self.schedule.collectives:
            groups.setdefault((c.op, ",".join(c.axes)), []).append(c)
        rows = []
        for key, group in sorted(groups.items()):
            total = sum(c.nbytes for c in group)
            hidden = hidden_share(group)
            share = "-" if hidden is None else f"{100 * hidden:.0f} %"
            times = sum(c.times for c in group)
            seconds = sum(c.seconds * c.times for c in group)
            behind = (share,) if self._timed else ()
            rows.append((*key, readable_bytes(total), str(times), *behind, f"{1000 * seconds:.1f}"))
        behind = ("hidden",) if self._timed else ()
        return Table(("as compiled", "axes", "bytes", "times", *behind, "ms"), rows)

    def _time(self) -> str:
        loops = self.schedule.unknown_loops
        once = " {} of unknown length {} once.".format(
            *(("One loop", "counts") if loops == 1 else (f"{loops} loops", "count"))
        )
        once *= loops > 0
        if not self._timed:
            return _TPU_TIMES + once
        s, took = self.schedule, readable_seconds
        text = (
            f"By a model a step takes {took(s.step_seconds)}. The device computes {took(s.compute_seconds)}, "
            f"of these {took(s.product_seconds)} in matrix products and the like, and waits "
            f"{took(s.exposed_seconds)} for collectives, which take {took(s.collective_seconds)}."
        )
        if s.to_host_seconds or s.from_host_seconds:
            text += (
                f" It waits {took(s.exposed_copy_seconds)} for copies, which take {took(s.to_host_seconds)} "
                f"to the host and {took(s.from_host_seconds)} from it."
            )
        return text + once


_MOST_PARTS = 12
_MOST_COMPILATIONS = 24
_LIMITS = (
    "Not seen: buffers of NCCL and of the driver (1 to 2 GiB), fragmentation, kernels that autotuning would "
    "choose. The model assumes the data sheet's peaks for kernels, and no launch time. Bandwidths are the "
    "data sheet's, unless given."
)
_TPU_TIMES = "What overlaps a TPU's collectives is not read, so no step time is given."
_TPU_LIMITS = (
    "Not seen: memory of the runtime, fragmentation; wraparounds of a slice and its second dim, which make "
    "collectives faster. None of it has run. Bandwidths are those of the target's file, unless given."
)
_LIMITS_OF_PARTS = (
    " Also not seen, for a step of several programs: the time of an update on the hosts, and of the "
    "parameters that it fetches and sends back, a chunk at a time."
)
_OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"


def _checked_options(options: Any) -> dict[str, Any]:
    """`compiler_options` as a dict; only XLA knows the valid names."""
    if not isinstance(options, Mapping | None):
        raise OptionError(message(
            WHO, f"compiler_options={options!r}", "It maps names of XLA flags to their values.",
            f"Write compiler_options={{{_OVERLAP!r}: 2}}."))  # fmt: skip
    options = dict(options or {})
    if bad := [name for name in options if not isinstance(name, str) or name.startswith("-")]:
        raise OptionError(message(
            WHO, [f"compiler_options has {name!r}" for name in bad],
            "The name of an XLA flag is a string, here without the dashes before it.",
            f"Write {_OVERLAP!r}.", things="flags"))  # fmt: skip
    return options


def _under_way(options: Mapping[str, Any]) -> int:
    """How many collectives XLA runs at once; its compiler aborts the process if the limit is below one."""
    limit = options.get(_OVERLAP, 1)
    if not re.fullmatch(r"0*[1-9]\d*", str(limit)):
        raise OptionError(message(
            WHO, f"compiler_options={{{_OVERLAP!r}: {limit!r}}}", "It is a number of collectives.",
            "Use 1 or more."))  # fmt: skip
    return int(limit)


def _dispatches_of(step: ShardedStep, *args: Any, **kwargs: Any) -> Dispatches:
    call = step._programs.bind(args, kwargs)
    program = step._programs.of(call)
    state, arrays = stored_inputs(call, program)
    in_files = [
        i for i, leaf in enumerate(program.plan.leaves) if leaf.is_streamed and leaf.tier == NVME
    ]
    return read_dispatches(program.step.dispatched(state, arrays), [*state, *arrays], in_files)


def _axes_for(train_step: ShardedStep, topology: Topology) -> dict[str, int]:
    """The axes of the step's mesh if it has as many devices, else its one axis over all devices."""
    mesh = train_step.mesh
    if mesh is None:
        return {"data": topology.num_devices}
    if mesh.size == topology.num_devices:
        return dict(mesh.shape)
    if len(mesh.axis_names) > 1:
        raise MeshError(message(
            WHO,
            f"the step's mesh has {dict(mesh.shape)}, and the topology {topology.num_devices} devices",
            "Sizes of several axes cannot be guessed.",
            "Pass axes={'node': 8, 'local': 8}, hosts first."))  # fmt: skip
    return {mesh.axis_names[0]: topology.num_devices}


def _largest_rows(peak: Callable[[int], int], rows: int, first: int, limit: int) -> int:
    """The most rows whose peak is within the limit, or 0; starts at `rows`, whose peak is `first`.

    A peak grows about linearly with the rows; each call of `peak` compiles the step.
    """
    known, unit = {rows: first}, 1
    for attempt in range(_MOST_COMPILATIONS):
        low = max((n for n, p in known.items() if p <= limit), default=0)
        high = min((n for n, p in known.items() if p > limit), default=None)
        if high is not None and high - low <= unit:
            break
        # Peaks grow in steps, which a line misses: near the limit, bisect.
        guess = (low + high) // 2 if high is not None and attempt > 3 else _guess(known, limit)
        guess = max(guess // unit * unit, low + unit)
        guess = guess if high is None else min(guess, high - unit)
        try:
            known[guess] = peak(guess)
        except (
            TypeError,
            ValueError,
        ):  # A step that splits its batch itself accepts only some sizes.
            if unit == rows:
                raise
            unit = rows
            known = {n: p for n, p in known.items() if n % unit == 0}
    return max((n for n, p in known.items() if p <= limit), default=0)


def _guess(known: Mapping[int, int], limit: int) -> int:
    """Where a line through the two points nearest to the limit meets it."""
    if len(known) == 1:
        ((rows, peak),) = known.items()
        return 2 * rows if peak <= limit else rows // 2
    (n, p), (m, q) = sorted(known.items(), key=lambda point: abs(point[1] - limit))[:2]
    slope = (q - p) / (m - n)
    return n + int((limit - p) // slope) if slope > 0 else 2 * max(known)
