# SPDX-License-Identifier: Apache-2.0
"""A model of the time of a step, from its compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.preflight._clocks import COLLECTIVES, COMPUTE, FROM_HOST, TO_HOST, Clocks
from jzero.preflight._hlo import Computations, Instruction, callees, parse, sizes, trips_of
from jzero.preflight._kernels import KernelWork, work_of
from jzero.targets._links import CollectiveTime, collective_time, members
from jzero.targets._target import Target, Topology

_OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class ScheduledCollective(NamedTuple):
    """One collective of the compiled program (XLA may have combined several of the step's)."""

    op: str  # 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute'
    axes: tuple[str, ...]  # the mesh axes it runs over
    whole_bytes: int  # of the global value that is gathered or reduced
    times: int  # in a step: the product of the trip counts of the enclosing loops
    seconds: float  # of one run, by the target's bandwidths
    # Of a step's runs: the compute stream waits for them. Collectives that run at the same time share the
    # wait equally. None for TPUs.
    exposed_seconds: float | None

    @property
    def nbytes(self) -> int:
        """Bytes a step moves through it."""
        return self.whole_bytes * self.times

    @property
    def hidden(self) -> float | None:
        """The share of its seconds that is not exposed; of TPUs None."""
        return hidden_share([self])


def hidden_share(collectives: Collection[ScheduledCollective]) -> float | None:
    """The share of the time of these collectives that is not exposed.

    1 if all of them run while the device computes, 0 if it waits for all of them. None if they take no
    time, or if the exposed seconds are not known.
    """
    exposed = [c.exposed_seconds for c in collectives if c.exposed_seconds is not None]
    seconds = sum(c.seconds * c.times for c in collectives)
    if len(exposed) < len(collectives) or not seconds:
        return None
    # A collective that shares the links may be awaited for longer than it takes alone.
    return max(0.0, 1 - sum(exposed) / seconds)


@dataclasses.dataclass(frozen=True)
class CompiledSchedule:
    """The time of a step by a model of its device: see `schedule_of`. Times and bytes are None for TPUs."""

    collectives: tuple[ScheduledCollective, ...]  # in the order of the program
    step_seconds: float  # compute, and what it waits for
    compute_seconds: float  # The compute stream is busy.
    product_seconds: float  # of these, in matrix products, convolutions and fused attention
    exposed_seconds: float  # The compute stream waits for collectives.
    exposed_copy_seconds: float  # It waits for copies between the device and its host.
    collective_seconds: float  # of all collectives, as if each had the links for itself
    to_host_seconds: float  # of copies to the host
    from_host_seconds: float
    # read and written in a device's memory by all kernels but products and collectives
    kernel_bytes: int
    unknown_loops: int = 0  # loops whose number of iterations XLA does not say; they count once


class Copied(NamedTuple):
    """A value that a step copies between a device and its host."""

    source: Hashable  # a key
    made: Hashable  # a key
    stream: str  # `TO_HOST` or `FROM_HOST`
    nbytes: int  # of each device


class Started(NamedTuple):
    """Something that a step starts."""

    program: ScheduledProgram | None  # None for copies
    reads: tuple[Hashable, ...] = ()  # keys of the values that the program takes
    copies: tuple[Copied, ...] = ()  # between the device and its host, which run beside programs


def schedule_of(
    started: Iterable[Started], axes: Mapping[str, int], target: Target, topology: Topology,
    under_way: int = 1,
) -> CompiledSchedule:  # fmt: skip
    """Models the time of a step: a device runs what the step starts, in that order.

    Kernels of all programs run one after the other on one compute stream. Beside it run collectives,
    `under_way` at once, which share the links' bandwidth but not their latencies; and copies, one at a time
    to the host and one from it.

    A kernel takes its operations at the device's peak, or its bytes at the bandwidth of its memory, whichever
    is longer. A transfer runs from where the program starts it to where it is awaited: a program that only
    fetches a slice awaits it at once, and hides it behind nothing. Kernels that touch pinned memory are
    awaited at once, too. Of a conditional only the slowest branch runs, and is in the result.
    """
    clocks, counts = Clocks(under_way), dict[ScheduledProgram, int]()
    model = _Model(clocks, axes, target, topology)
    for each in started:
        for source, made, stream, nbytes in each.copies:
            clocks.begin(stream, made, nbytes / target.host.bandwidth, source)
        if each.program is not None:
            for key in each.reads:
                clocks.wait(key)
            model.run(model.taken(each.program))
            counts[each.program] = counts.get(each.program, 0) + 1
    clocks.finish()
    return CompiledSchedule(
        tuple(
            c
            for program, times in counts.items()
            for c in model.collectives(model.taken(program), times)
        ),
        clocks.now,
        clocks.busy[COMPUTE],
        clocks.busy[_PRODUCTS],
        clocks.waited[COLLECTIVES],
        clocks.waited[TO_HOST] + clocks.waited[FROM_HOST],
        clocks.busy[COLLECTIVES],
        clocks.busy[TO_HOST],
        clocks.busy[FROM_HOST],
        sum(times * _kernel_bytes(model.taken(program)) for program, times in counts.items()),
        sum(_unknown_loops(model.taken(program)) for program in counts),
    )


def without_times(schedule: CompiledSchedule) -> CompiledSchedule:
    """Only collectives and loops, for programs whose text does not say what else runs."""
    kept = ("collectives", "unknown_loops")
    nothing: dict[str, Any] = {name: None for name in vars(schedule) if name not in kept}
    collectives = tuple(c._replace(exposed_seconds=None) for c in schedule.collectives)
    return dataclasses.replace(schedule, collectives=collectives, **nothing)


def read_schedule(
    text: str, axes: Mapping[str, int], target: Target, topology: Topology, under_way: int = 1
) -> CompiledSchedule:
    """The schedule of a step that is one program."""
    return schedule_of([Started(read_program(text))], axes, target, topology, under_way)


# -- what a program does ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kernel:
    work: KernelWork


@dataclasses.dataclass(frozen=True, eq=False)
class _Collective:
    """The start of a collective: the group of device 0, or all pairs of a permutation."""

    op: str
    groups: tuple[frozenset[int], ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """The start of a copy that runs beside the compute stream."""

    work: KernelWork


@dataclasses.dataclass(frozen=True)
class _Wait:
    begun: _Collective | _Copy


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """The body of a loop or call; a loop of unknown length (`known` is false) counts once."""

    ops: tuple[_Op, ...]
    times: int
    known: bool = True


@dataclasses.dataclass(frozen=True)
class _Choice:
    branches: tuple[tuple[_Op, ...], ...]


_Op = _Kernel | _Collective | _Copy | _Wait | _Repeat | _Choice


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledProgram:
    """What a compiled program starts on a device, in order."""

    ops: tuple[_Op, ...]


def read_program(text: str) -> ScheduledProgram:
    return program_of(*parse(text))


def program_of(computations: Computations, entry: str) -> ScheduledProgram:
    return ScheduledProgram(tuple(_ops(entry, computations)))


def _ops(name: str, computations: Computations) -> Iterator[_Op]:
    lines = computations[name]
    shapes = {line.name: line.shape for line in lines}
    begun: dict[str, _Collective | _Copy] = {}
    for line in lines:
        called, trips = [tuple(_ops(name, computations)) for name in callees(line)], trips_of(line)
        if line.op == "conditional":
            yield _Choice(tuple(called))
        else:
            yield from (
                _Repeat(ops, 1 if trips is None else trips, trips is not None) for ops in called
            )
        if line.op.endswith("-done"):
            if line.operands and line.operands[0] in begun:
                yield _Wait(begun[line.operands[0]])
        elif collective := _collective(line, shapes):
            begun[line.name] = collective
            yield collective
            if line.op in _OPS:
                yield _Wait(collective)
        else:
            work = work_of(line, shapes, computations)
            if line.op.endswith("-start") and (work.from_host or work.to_host):
                copy = begun[line.name] = _Copy(work)
                yield copy
            elif any(work):
                yield _Kernel(work)


def _collective(line: Instruction, shapes: Mapping[str, str]) -> _Collective | None:
    op = next((op for op in _OPS if line.op in (op, f"{op}-start")), None)
    if op is None:
        return None
    # The shape of a start has operands and results; otherwise only the results.
    whole = [sum(sizes(shapes[name])) for name in line.operands if name in shapes]
    results = sum(sizes(line.shape))
    if line.op.endswith("-start") and op != "all-reduce":
        results -= sum(whole)
    nbytes = max(sum(whole), results if op != "all-reduce" else 0)
    return _Collective(op, groups_of(line.text), nbytes)


def _kernel_bytes(ops: Sequence[_Op]) -> int:
    return sum(
        op.work.nbytes if isinstance(op, _Kernel) and op.work.flops is None
        else op.times * _kernel_bytes(op.ops) if isinstance(op, _Repeat) else 0
        for op in ops
    )  # fmt: skip


def _unknown_loops(ops: Sequence[_Op]) -> int:
    """Loops of unknown length in which anything runs."""
    loops = [op for op in ops if isinstance(op, _Repeat) and op.ops]
    return sum((not op.known) + _unknown_loops(op.ops) for op in loops)


# -- how long it takes -----------------------------------------------------------------------------------

_PRODUCTS = "products"


class _Model:
    """Runs programs on the clocks of a device."""

    def __init__(self, clocks: Clocks, axes: Mapping[str, int], target: Target, topology: Topology):
        self._clocks, self._axes, self._target, self._topology = clocks, axes, target, topology
        self._time = functools.cache(self._time_of)
        self.taken = functools.cache(lambda program: tuple(self._taken(program.ops)))

    def _taken(self, ops: Iterable[_Op]) -> Iterator[_Op]:
        """The operations, with each conditional replaced by its slowest branch."""
        for op in ops:
            match op:
                case _Repeat():
                    yield dataclasses.replace(op, ops=tuple(self._taken(op.ops)))
                case _Choice(branches):
                    found = [tuple(self._taken(branch)) for branch in branches]
                    yield _Repeat(max(found, key=self._alone, default=()), 1)
                case _:
                    yield op

    def _alone(self, ops: Sequence[_Op]) -> float:
        """Seconds of these operations if nothing runs beside them."""
        clocks = Clocks()
        _Model(clocks, self._axes, self._target, self._topology).run(ops)
        clocks.finish()
        return clocks.now

    def run(self, ops: Sequence[_Op]) -> None:
        """Runs operations without conditionals."""
        clocks = self._clocks
        for op in ops:
            match op:
                case _Repeat(inner, times):
                    clocks.repeat(functools.partial(self.run, inner), times)
                case _Kernel(work):
                    self._copy(op, work)
                    seconds = work.seconds(self._target)
                    clocks.compute(seconds)
                    clocks.busy[_PRODUCTS] += seconds if work.flops is not None else 0.0
                    if work.from_host or work.to_host:  # XLA left it on the compute stream.
                        clocks.wait(op)
                case _Copy(work):
                    self._copy(op, work)
                case _Collective():
                    time = self._time(op)
                    clocks.begin(COLLECTIVES, op, time.wire, latency=time.latency)
                case _Wait(begun):
                    clocks.wait(begun)

    def _copy(self, key: Hashable, work: KernelWork) -> None:
        for stream, nbytes in ((TO_HOST, work.to_host), (FROM_HOST, work.from_host)):
            if nbytes:
                self._clocks.begin(stream, key, nbytes / self._target.host.bandwidth)

    def _time_of(self, op: _Collective) -> CollectiveTime:
        found = [
            collective_time(
                op.op, _group(group, self._axes), op.nbytes, self._target, self._topology
            )
            for group in op.groups
        ]
        return max(found, key=lambda time: time.seconds)

    def collectives(self, ops: Sequence[_Op], times: int) -> Iterator[ScheduledCollective]:
        """The collectives of operations that a step has run `times` times."""
        for op in ops:
            match op:
                case _Repeat(inner, trips):
                    yield from self.collectives(inner, times * trips)
                case _Collective():
                    yield ScheduledCollective(
                        op.op,
                        along(op.groups, self._axes),
                        op.nbytes,
                        times,
                        self._time(op).seconds,
                        self._clocks.exposed(COLLECTIVES, op),
                    )


def _group(group: frozenset[int], axes: Mapping[str, int]) -> frozenset[int]:
    """The group; an empty one means all devices."""
    return group or frozenset(range(math.prod(axes.values())))


def along(groups: Iterable[frozenset[int]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; for a permutation, sender and receiver."""
    found = set[str]()
    for group in groups:
        places = np.unravel_index(sorted(_group(group, axes)), tuple(axes.values()))
        differ = zip(axes, places, strict=True)
        found |= {name for name, place in differ if len(set(place)) > 1}
    return tuple(name for name in axes if name in found)


def groups_of(text: str) -> tuple[frozenset[int], ...]:
    """The group of device 0, since all are alike; for a permutation, each pair."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", text)
    if pairs is None:
        return (frozenset(_first_group(text)),)
    return tuple(
        frozenset(int(n) for n in pair) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    )


def _first_group(text: str) -> set[int]:
    """The devices in the group of device 0; empty if the text names no groups, which means all.

    Written as `{{0,1},{2,3}}`, as `[2,2]<=[4]`, a reshaped iota, or as `mesh['x'=2,'y'=2] {'y'}`.
    """
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
    if named:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return members(axes, re.findall(r"'(\w+)'", named[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return {int(n) for n in listed[1].split(",")}
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota is None:
        return set()
    size, dims = int(iota[2]), [int(n) for n in iota[3].split(",")]
    order = [int(n) for n in (iota[4] or "").split(",") if n] or list(range(len(dims)))
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    ranges = [range(0, dims[d] * strides[d], strides[d]) for d in order]
    return {sum(steps) for steps in itertools.islice(itertools.product(*ranges), size)}
