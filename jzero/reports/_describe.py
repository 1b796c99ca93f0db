# SPDX-License-Identifier: Apache-2.0
"""describe(): what is stored where, and what a step moves; bytes are counted by `analysis/_traffic.py`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero._errors import OptionError, counted, message
from jzero._folded import listed
from jzero._memory_kinds import PINNED
from jzero._numbers import Rates
from jzero._quantities import readable_bytes
from jzero.ir import _work
from jzero.ir._loops import MICROBATCHES
from jzero.ir._regions import Region
from jzero.ir._rows import looped_inputs
from jzero.offload.memory._leaf_array import CodingError, is_coded
from jzero.offload.schedule import _folds
from jzero.offload.schedule._folds import Transfer
from jzero.offload.schedule._schedule import Schedule, rows
from jzero.reports import _prose, _tables
from jzero.reports._prose import by_reason, first_lines
from jzero.reports._step_time import PART_OF, StepTime, step_time
from jzero.reports._tables import (
    Block,
    Memory,
    Printed,
    memory_of,
    memory_table,
    plain,
    traffic_rows,
    traffic_table,
    transfer_rows,
    transfer_table,
)
from jzero.segments._partitioned import Partitioned
from jzero.segments._program import Program
from jzero.segments._programs import placed_inputs
from jzero.sharding.analysis import _traffic, _untiled
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.analysis._untiled import Untiled
from jzero.sharding.partition._movement import REPLICATED, Movement
from jzero.sharding.partition._saved import Loops
from jzero.sharding.plan import _outputs, _stored_layout
from jzero.sharding.plan._extra_work import Extra
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER
from jzero.sharding.plan._stored_layout import Replicated, Shard
from jzero.tracing import _call, _jaxpr
from jzero.tracing._signature import Call
from jzero.tracing._types import Jaxpr

# The sharded dims; None for a replicated value.
SplitDims = int | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Report(Printed):
    """What a step stores on each device and moves between devices; `print` it."""

    plan: StepPlan  # layout and role of every leaf
    traffic: tuple[Collective, ...]  # the collectives of one step, loops multiplied out
    # arguments that are PRNG keys; each device folds its index into them
    keys: tuple[str, ...] = ()
    # on each device, of the sums of gradients and metrics over microbatches
    accumulator_bytes: int = 0
    # The operations of the step, in order; `print` it. One program if the state is on the devices.
    schedule: Schedule = Schedule(())
    # the code paths by which the host updates the state stored there; empty if it updates none
    code_paths: str = ""
    # operations that move rows of the batch between devices, or large values computed from them, because
    # nothing cheaper is exact
    movements: tuple[Movement, ...] = ()
    # arguments that are replicated, because the devices do not divide their batch dim
    whole_arguments: tuple[str, ...] = ()
    # the path of every leaf of the arguments other than the state
    argument_paths: tuple[str, ...] = ()
    argument_bytes: tuple[int, ...] = ()  # the global size of each
    # the path of every leaf that the step returns in addition to the state
    output_paths: tuple[str, ...] = ()
    # values gathered or reduced at once although they are larger than `tile_bytes`, and why
    untiled: tuple[Untiled, ...] = ()
    # rounding errors of the quantized leaves that were passed, by path
    coding: Mapping[str, CodingError] = dataclasses.field(default_factory=dict)
    # arguments over whose dim 0 every device loops, and whose dim 1 the devices divide
    looped: tuple[str, ...] = ()
    extra_work: tuple[Extra, ...] = ()  # computation that is repeated on several devices
    # the jaxpr of the step on one device
    program: Jaxpr | None = dataclasses.field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Report: {self._title()}; print it>"

    def blocks(self) -> Iterator[Block]:
        """Tables, and prose between them; what there is nothing to say of is empty."""
        yield self.header()
        yield memory_table(self.memory)
        yield traffic_table(self.traffic) or ["A step moves nothing between devices."]
        yield _prose.quantized(self.plan.leaves, self.traffic, self.coding)
        yield self._wire()
        yield _prose.tiles(self.plan, self.untiled)
        yield transfer_table(self.transfers)
        yield _prose.from_host(self.plan, self.transfers)
        yield _prose.activations(self.plan)
        yield self.gathered_rows()
        yield self._inputs_and_outputs()
        yield _prose.offloaded(self.plan, self.code_paths)
        yield _prose.owned(self.plan)
        # An evaluation does not choose how leaves are stored.
        full = [] if self.plan.evaluates else _prose.left_full(self.plan)
        leaves = self.plan.leaves
        yield [*full, *_prose.padded(leaves), *_prose.uncut(leaves)]

    def to_dict(self) -> dict[str, Any]:
        """All that the text says and more, as plain types: `json.dumps` takes it. Bytes are ints.

        Every key is there in every report::

            stage, devices       ints
            evaluates, updates   whether the state is only read; whether any leaf of it changes
            donates              whether a step consumes its state
            axes                 sizes of the data axes by name
            reductions           'whole batch', or 'written' (the step's own collectives)
            microbatches         num; reduce ('once', 'each'); accumulator_bytes, on each device; order
                                 ('microbatch', 'layer'); handed_bytes (passed between programs, on each
                                 device; 0 for a step of one program); loops over them; repeats (of
                                 matrix products); saved (for later loops): [what, where, nbytes];
                                 at_once: the same of values computed from all microbatches at once
            memory               of each role: role, whole, per_device, at_rest, note, on_host, on_disk
                                 (bytes)
            leaves               of the state: path, role, dtype, shape; dim and axes along and over which it
                                 is sharded (None and [] if replicated), num_shards; nbytes,
                                 nbytes_per_device, padded_shape; memory ('device', 'pinned_host', 'host',
                                 'nvme'); why_full (why it is replicated; '' if it is sharded)
            unread               paths of those that an evaluation does not read
            arguments, outputs   other than the state: path, and the sharded dim or None
            whole_arguments      paths of those whose batch dim the devices do not divide
            looped               arguments over whose dim 0 every device loops; in_specs could shard dim 1
            extra_work           computation repeated on several devices: what, why, fix; share of all that
                                 they compute; flops, of each device
            whole_argument_bytes  of all replicated arguments
            keys                 paths of PRNG keys into which each device folds its index
            wire                 gather, the quantized format in which passes gather parameters, and reduce,
                                 by axis that of gradients (None: not quantized); exact: [path, why] of
                                 parameters that are sent exactly nevertheless
            weights              coded, quantized leaves of an evaluation: path, dtype, shape, format;
                                 nbytes_per_device, and decoded_bytes, those without quantization;
                                 gathered_bytes, in one call, of a `while` in one iteration; rms_error,
                                 relative, and largest_error, relative to the largest element (None if only
                                 shapes were passed). exact: [path, why] of those that are not quantized
            owners               distributed updates of whole matrices: leaves, matrix (type and shape), num
                                 of them, each (how many a device updates), why (the update is replicated;
                                 else '')
            tile_bytes           None without tiles
            untiled              larger than these: leaf, what ('gathered', 'reduced'), nbytes, why, where (a
                                 line)
            traffic              in one step: op, dtype, axes, elements, bytes, times; each_iteration: whether
                                 these are of one iteration of a `while`
            transfers            between each device and its host: direction, what, dtype, elements, nbytes;
                                 each_iteration: whether these are of one iteration of a `while`
            schedule             the operations of a step, in order: operation, what; nbytes on each device
                                 (None if nothing moves), in a loop per iteration; link, from where to where;
                                 depth, the number of enclosing loops. Adjacent operations of one kind are
                                 one row
            activations          saved on the host for the backward pass: shape, dtype, nbytes, where,
                                 iterations (of the loop that stacks it; else 1), times; None without
                                 Memory(activations=)
            movements            of rows of the batch and of intermediate values: operation, where, reason,
                                 value (type and shape; ''), nbytes (once), times
            buckets, device_bytes
                                 in how many buckets offloaded leaves are streamed through a device, and the
                                 most bytes of them on it at a time
            host_updates         lines on how the host updates the state stored there

        >>> import jax, jax.numpy as jnp, jzero
        >>> def step_fn(w, batch):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        ...     return w - 0.1 * grad, loss
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> w, batch = jax.ShapeDtypeStruct((64, 64), jnp.float32), jnp.ones((8, 64))
        >>> found = jzero.shard_train_step(step_fn, mesh=mesh).describe(w, batch).to_dict()
        >>> found["leaves"][0]["nbytes_per_device"], found["outputs"]
        (2048, [{'path': 'output[1]', 'dim': None}])
        >>> [(row["op"], row["bytes"], row["times"]) for row in found["traffic"]]
        [('all-gather', 16384, 1), ('all-reduce', 4, 1), ('reduce-scatter', 16384, 1)]
        """
        plan, codes = self.plan, self.plan.exchange.gather_codes
        return {
            "stage": plan.stage,
            "evaluates": plan.evaluates,
            "updates": plan.updates,
            "donates": plan.donates,
            "devices": plan.num_devices,
            "axes": dict(plan.axes),
            "reductions": plan.reductions,
            "microbatches": _microbatches_row(plan, self.accumulator_bytes, self.handed_bytes),
            "memory": [row._asdict() for row in self.memory],
            "leaves": [_leaf_row(leaf) for leaf in plan.leaves],
            "unread": [plan.leaves[i].path for i in sorted(plan.unread)],
            "arguments": [{"path": path, "dim": dim} for path, dim in self.arguments],
            "outputs": [{"path": path, "dim": dim} for path, dim in self.outputs],
            "whole_arguments": list(self.whole_arguments),
            "looped": list(self.looped),
            "extra_work": [
                {name: getattr(each, name) for name in ("what", "why", "fix", "share", "flops")}
                for each in self.extra_work
            ],
            "whole_argument_bytes": self.whole_argument_bytes,
            "keys": list(self.keys),
            "wire": {
                "gather": codes and str(codes),
                "reduce": {axis: x and str(x) for axis, x in plan.exchange.reduce_codes},
                "exact": [list(pair) for pair in self.exact],
            },
            "weights": {
                "coded": _prose.quantized_leaves(plan.leaves, self.traffic, self.coding),
                "exact": [
                    [x.path, x.why_exact] for x in plan.leaves if plan.evaluates and x.why_exact
                ],
            },
            "owners": [*map(plain, plan.owned)],
            "tile_bytes": plan.exchange.tile_bytes,
            "untiled": [*map(plain, self.untiled)],
            "traffic": traffic_rows(self.traffic),
            "transfers": transfer_rows(self.transfers),
            "schedule": _schedule_rows(self.schedule),
            "activations": None if plan.activations is None else [*map(plain, plan.activations)],
            "movements": [*map(plain, self.movements)],
            "buckets": sum(bucket.parts for bucket in plan.buckets) if plan.device_bytes else 0,
            "device_bytes": plan.device_bytes,
            "host_updates": self.code_paths.splitlines(),
        }

    def _title(self) -> str:
        what = "evaluation" if self.plan.evaluates else f"stage {self.plan.stage}"
        return f"{what} over {counted(self.plan.num_devices, 'device', 'devices')}"

    def header(self) -> list[str]:
        """Lines on what runs: the stage, the devices, what is reduced when."""
        plan, unread = self.plan, len(self.plan.unread)
        axes = ", ".join(f"'{name}' of size {size}" for name, size in plan.axes)
        does = "computes" if plan.evaluates else "trains"
        reductions = _REDUCTIONS[plan.reductions].format(does=does)
        lines = [
            f"jzero: {self._title()} (data axes: {axes})",
            f"reductions: {reductions}",
            *_prose.microbatches(plan, self.accumulator_bytes, self.handed_bytes),
        ]
        if not plan.evaluates and not plan.updates:
            lines.append(
                "the step changes no leaf: jzero.shard_eval_step reads a state without consuming it"
            )
        elif unread:
            lines.append(
                f"{unread} of {len(plan.leaves)} leaves are not read, and stay where they are"
            )
        if not plan.evaluates and not plan.donates:
            here, pinned = plan.nbytes_at_rest(), plan.nbytes_at_rest(tier=PINNED)
            on_host = f" and {readable_bytes(pinned)} of its host" * bool(pinned)
            lines.append(
                "donate=False: a step keeps the state passed to it, which takes "
                f"{readable_bytes(here)} of each device{on_host} beside the new one"
            )
        return lines

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Copies between each device and its host in a step."""
        return _folds.transfers(self.schedule)

    @functools.cached_property
    def operations(self) -> Mapping[str, float]:
        """Floating-point operations of each device, by pass: 'forward', 'backward', '' (neither)."""
        # Lazy: counting takes as long as the rest of a description.
        return {} if self.program is None else _work.flops_by_pass(self.program)

    def time(self, rates: Rates) -> StepTime:
        """The least time of a step at these rates, and how much of its transfers no compute hides.

        The model is that of `jzero.estimate`: in each part of a step (forward pass, backward pass, update)
        compute and all links are busy at the same time, and the slowest counts.

        Args:
          rates: with `peak`; of links without a rate the result says that they are not counted.

        Raises:
          OptionError: no `peak` is given.

        >>> import jax, jax.numpy as jnp, jzero
        >>> def step_fn(w, batch):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        ...     return w - 0.1 * grad, loss
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> w, batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jnp.ones((512, 4096))
        >>> report = jzero.shard_train_step(step_fn, mesh=mesh).describe(w, batch)
        >>> print(report.time(jzero.Rates(peak="500TFLOP/s", interconnect="200GB/s")))
        time of a step   compute  between devices  not hidden
        forward pass      4.3 us           336 us      331 us
        backward pass     4.3 us           336 us      331 us
        update          0.008 us                -           -
        step              8.6 us           671 us      662 us
        <BLANKLINE>
        A step takes at least 671 us, and 1% of it is compute at 500 TFLOP/s; 1% if
          nothing overlapped.
        Rates: 200 GB/s of a whole value gathered or scattered.
        """
        if rates.peak is None:
            raise OptionError(message(
                "Report.time", f"rates={rates!r}", "The time of a step is that of its compute, and of what "
                "no compute hides.", "Give the peak of a device, as jzero.Rates(peak='989TFLOP/s')."
            ))  # fmt: skip
        operations = {PART_OF[of]: math.ceil(num) for of, num in self.operations.items()}
        return step_time(rates, operations, 0, self.traffic, self.schedule)

    @property
    def handed_bytes(self) -> int:
        """The most bytes on each device of values passed between layers, where a step runs layer by layer."""
        return _folds.handed_bytes(self.schedule)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Stored bytes of each role; what lives within a step is known to the compiler only."""
        rows, plan = [], self.plan
        read = [leaf for i, leaf in enumerate(plan.leaves) if i not in plan.unread]
        for role in (PARAMETER, OPTIMIZER, OTHER):
            if leaves := [leaf for leaf in read if leaf.role == role]:
                sharded = sum(not isinstance(leaf.layout, Replicated) for leaf in leaves)
                rows.append(memory_of(role, leaves, f"{sharded} of {len(leaves)} leaves sharded"))
        return tuple(rows)

    @property
    def loops(self) -> Loops | None:
        """The loops over microbatches, and what is saved between them; None without microbatches."""
        return self.plan.microbatches.loops

    @property
    def arguments(self) -> tuple[tuple[str, SplitDims], ...]:
        """The sharded dim, or dims, of each argument; None for a replicated one."""
        return tuple(zip(self.argument_paths, map(_split_dims, self.plan.arguments), strict=False))

    @property
    def whole_argument_bytes(self) -> int:
        """Bytes of replicated arguments, in addition to the device's part of the state."""
        pairs = zip(self.arguments, self.argument_bytes, strict=False)
        return sum(nbytes for (_, dim), nbytes in pairs if dim is None)

    @property
    def outputs(self) -> tuple[tuple[str, SplitDims], ...]:
        """The sharded dims of each output other than the state."""
        specs = map(_stored_layout.partition_spec, self.plan.outputs)
        return tuple(zip(self.output_paths, map(_split_dims, specs), strict=False))

    def elements(self, op: str, dtype: str | None = None) -> int:
        """Elements that a step moves by `op` ('all-gather', 'reduce-scatter', 'all-reduce')."""
        return _tables.elements(self.traffic, op, dtype)

    @property
    def exact(self) -> list[tuple[str, str]]:
        """Parameters that are sent exactly where others are sent quantized, and why."""
        if self.plan.evaluates:
            return []
        leaves, reduced = self.plan.leaves, dict(self.plan.exchange.reduce_codes)
        sent = collections.defaultdict[str, set[tuple[str, str]]](set)
        for each in self.traffic:
            if each.op == "all-gather" or any(reduced.get(axis) for axis in each.axes):
                sent[each.leaf].add((each.op, each.dtype))
        found = [(leaf.path, leaf.why_exact) for leaf in leaves if leaf.why_exact]
        for leaf in leaves:
            exact = {op for op, dtype in sent[leaf.path] if dtype != "uint8"}
            if not leaf.coded or self.plan.num_devices == 1:
                continue
            if not any(dtype == "uint8" for _, dtype in sent[leaf.path]):
                found.append((leaf.path, "no part of it is sent quantized"))
            elif exact & {"reduce-scatter", "all-reduce"}:
                found.append((leaf.path, "what is reduced is not its gradient alone"))
            elif self.plan.exchange.gather_codes is not None and "all-gather" in exact:
                found.append((leaf.path, "some of it is gathered unquantized"))
        return found

    def _wire(self) -> list[str]:
        """Lines on what is sent quantized, and on what is not."""
        exchange, codes = self.plan.exchange, self.plan.exchange.gather_codes
        passes = codes is not None and self.plan.stage == 3
        whats = [f"parameters are gathered as {codes}"] * passes
        renewed = sum(leaf.renewed_in_codes for leaf in self.plan.leaves)
        num = f"{renewed} new parameter{'s' * (renewed > 1)}"
        whats += [f"the difference of {num} is gathered as {codes}"] * bool(renewed)
        whats += [
            f"gradients are reduced over {axis} as {codes}"
            for axis, codes in exchange.reduce_codes
            if codes is not None
        ]
        if not whats:
            return []
        exact = self.exact
        lines = [f"quantized: {'; '.join(whats)}{'; these stay exact:' if exact else ''}"]
        return lines + by_reason(exact)

    def gathered_rows(self) -> list[str]:
        """Lines on operations that move rows of the batch; none if there are none."""
        lines = []
        if self.whole_arguments:
            lines.append(
                "Replicated, because the devices do not divide their batch dim: "
                f"{listed(self.whole_arguments, 8)}."
            )
        if self.movements:
            total = sum(m.nbytes * m.times for m in self.movements)
            num = counted(len(self.movements), "operation moves", "operations move")
            what = "rows of the batch"
            if any(m.reason == REPLICATED for m in self.movements):
                what += " or intermediate values"
            lines.append(f"{num} {what}, {readable_bytes(total)} to each device:")
            found = sorted(self.movements, key=lambda m: -m.nbytes * m.times)
            sizes = [readable_bytes(m.nbytes) + f" of {m.value}" * bool(m.value) for m in found]
            lines += first_lines(
                [f"  {size}  {m}" for size, m in zip(sizes, found, strict=True)], 20
            )
        lines += [
            f"Done more than once, {each.share:.0%} of what the devices compute: {each}"
            for each in self.extra_work
        ]
        if self.looped:
            axes = [name for name, _ in self.plan.axes]
            spec = f"P(None, {(axes[0] if len(axes) == 1 else tuple(axes))!r})"
            specs = ", ".join(f"{name!r}: {spec}" for name in self.looped)
            lines.append(
                f"Every device loops over dim 0 of {listed(self.looped)}, with all rows. If this dim counts "
                f"minibatches, shard the rows of each: in_specs={{{specs}}}."
            )
        return lines

    def _inputs_and_outputs(self) -> list[str]:
        lines = []
        for title, found in (("arguments", self.arguments), ("outputs", self.outputs)):
            layouts: dict[str, list[str]] = {}
            for path, dim in found:
                layout = "replicated" if dim is None else f"sharded along dim {dim}"
                if isinstance(dim, tuple):
                    layout = f"sharded along dims {' and '.join(map(str, dim))}"
                layouts.setdefault(layout, []).append(path)
            said = "; ".join(f"{listed(paths)} {layout}" for layout, paths in layouts.items())
            lines += [f"{title}: {said}"] if said else []
        if self.whole_argument_bytes >= _LARGE:
            lines.append(
                f"replicated arguments take {readable_bytes(self.whole_argument_bytes)} of each device, "
                "which the memory above does not count; a model that is only read can be carried in the "
                "state"
            )
        if self.keys:
            lines.append(f"PRNG keys, folded with the device's index: {listed(self.keys, 8)}")
        return lines


_LARGE = 2**20  # bytes of arguments that are worth a line
_REDUCTIONS = {
    "whole batch": "where the step sums over the batch; it {does} what jax.jit {does} on one device",
    "written": "the step's own collectives, as written",
}


def report_of(program: Program, call: Call) -> Report:
    """The report of a step on a call's shapes; nothing runs."""
    inputs = placed_inputs(call, program)
    jaxpr = jax.make_jaxpr(program.step.run)(*inputs)
    num_state = program.out_tree.num_leaves - len(program.plan.outputs)
    plan = program.plan
    written: Any = jaxpr
    if isinstance(found := program.step.found, Partitioned):
        plan, written = found.described(plan), found.for_any_devices.jaxpr
    return Report(
        plan,
        tuple(_traffic.collectives(jaxpr)),
        program.keys,
        _traffic.carried_bytes(jaxpr, MICROBATCHES),
        program.step.schedule(),
        program.step.code_paths(),
        program.movements,
        program.whole_arguments,
        tuple(_call.argument_paths(call.arrays)),
        tuple(x.size * x.dtype.itemsize for x in inputs[1]),
        tuple(_outputs.output_paths(program.out_tree, num_state)),
        _untiled.untiled(written, program.plan.exchange.tile_bytes, program.plan.stage == 3),
        {
            leaf.path: x.error
            for leaf, x in zip(plan.leaves, jax.tree.leaves(call.state), strict=True)
            if is_coded(x) and x.error is not None
        },
        () if plan.evaluates else _looped(program.step.found, call.arrays, plan),
        program.extra_work,
        _jaxpr.open_jaxpr(written)[0],
    )


def _looped(found: Any, arrays: Mapping[str, Any], plan: StepPlan) -> tuple[str, ...]:
    """Arguments over whose dim 0 a loop of the step runs on every device.

    Their dim 1 could be sharded: in a batch of minibatches it has the rows.
    """
    if not isinstance(found, Partitioned):
        return ()
    part, num = found.part, len(plan.leaves)
    looped = {part.taken[k] for k in looped_inputs(Region(part.step.jaxpr, [*part.step.consts]))}
    gathers = any(m.operation == "scan" for m in found.movements)

    def fits(i: int, x: Any) -> bool:
        dim, shape = _split_dims(plan.arguments[i]), jnp.shape(x)
        along = dim is None or (dim == 0 and gathers)
        return along and i + num in looped and len(shape) > 1 and not shape[1] % plan.num_devices

    leaves = itertools.count()
    whole = {
        name: [fits(next(leaves), x) for x in jax.tree.leaves(tree)]
        for name, tree in arrays.items()
    }
    return tuple(name for name, fitting in whole.items() if fitting and all(fitting))


def _split_dims(spec: PartitionSpec) -> SplitDims:
    dims = tuple(dim for dim, axes in enumerate(spec) if axes)
    return dims if len(dims) > 1 else dims[0] if dims else None


def _schedule_rows(found: Schedule) -> list[dict[str, Any]]:
    return [
        {"operation": row.op, "what": row.what, "nbytes": row.nbytes, "link": row.link,
         "depth": row.depth}
        for row in rows(found.ops)
    ]  # fmt: skip


def _leaf_row(plan: LeafPlan) -> dict[str, Any]:
    sharded = plan.layout if isinstance(plan.layout, Shard) else None
    return {
        "path": plan.path,
        "role": plan.role,
        "dtype": plan.dtype,
        "shape": list(plan.shape),
        "dim": None if sharded is None else sharded.dim,
        "axes": [] if sharded is None else list(sharded.axes),
        "num_shards": plan.num_shards,
        "nbytes": plan.nbytes,
        "nbytes_per_device": plan.nbytes_per_device,
        "padded_shape": list(plan.padded_shape),
        "memory": plan.tier,
        "why_full": plan.why_full,
    }


def _microbatches_row(plan: StepPlan, accumulator_bytes: int, handed_bytes: int) -> dict[str, Any]:
    loops = plan.microbatches.loops
    return {
        "num": plan.accumulate,
        "reduce": "once" if plan.reduce_once else "each",
        "accumulator_bytes": accumulator_bytes,
        "order": "layer" if plan.microbatches.by_layer else "microbatch",
        "handed_bytes": handed_bytes,
        "loops": 1 if loops is None else loops.num,
        "repeats": 1.0 if loops is None else float(loops.repeats),
        "saved": [*map(plain, () if loops is None else loops.saved)],
        "at_once": [*map(plain, () if loops is None else loops.at_once)],
    }
