# SPDX-License-Identifier: Apache-2.0
"""The schedule of a compiled GPU program, read from XLA's text: which collectives hide behind products."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jzero.preflight._hlo import Instruction, arrays, callees, parse, sizes
from jzero.preflight._kernels import bytes_of
from jzero.preflight._links import collective_seconds, members
from jzero.preflight._targets import Target, Topology

_OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_PRODUCTS = re.compile(r'custom_call_target="[^"]*(gemm|matmul|cudnn)[^"]*"')


class ScheduledCollective(NamedTuple):
    """One collective of the compiled program (XLA may have combined several of the step's).

    Attributes:
      op: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute'.
      axes: the mesh axes it runs over.
      whole_bytes: of the whole value: gathered by an all-gather, reduced by a reduction.
      times: how often a step runs it: the trip counts of the loops around it.
      hidden: it starts before a matrix product and is awaited after it.
      seconds: what it takes once, by the target's bandwidths.
    """

    op: str
    axes: tuple[str, ...]
    whole_bytes: int
    times: int
    hidden: bool
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes a step moves through it."""
        return self.whole_bytes * self.times


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a step's schedule says of its time.

    Attributes:
      collectives: in the order of the program.
      product_seconds: its matrix products, at the target's peak: the least they can take.
      exposed_seconds: what is left of the collectives when products run at that peak and all else takes
        no time: no step waits longer, were bandwidths as the target says.
      kernel_bytes: that all kernels but products and collectives read and write in a device's memory.
    """

    collectives: tuple[ScheduledCollective, ...]
    product_seconds: float
    exposed_seconds: float
    kernel_bytes: int

    def repeated(self, times: int) -> Schedule:
        """That of a program that a step runs so many times."""
        return Schedule(
            tuple(c._replace(times=c.times * times) for c in self.collectives),
            self.product_seconds * times,
            self.exposed_seconds * times,
            self.kernel_bytes * times,
        )

    def __add__(self, other: Schedule) -> Schedule:
        """One program after the other: nothing of one hides behind the other."""
        return Schedule(
            self.collectives + other.collectives,
            self.product_seconds + other.product_seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.kernel_bytes + other.kernel_bytes,
        )


def schedule_of(
    programs: Iterable[tuple[str, int]], axes: Mapping[str, int], target: Target, topology: Topology
) -> Schedule:
    """That of a step which starts programs, each so many times, one after the other."""
    none = Schedule((), 0.0, 0.0, 0)
    found = (read_schedule(text, axes, target, topology).repeated(n) for text, n in programs)
    return sum(found, none)


def read_schedule(
    text: str, axes: Mapping[str, int], target: Target, topology: Topology
) -> Schedule:
    """Walks through the program once, loops multiplied out, with clocks for products and for the wire."""
    computations, entry = parse(text)
    reader = _Reader(computations, axes, target, topology)
    walk = reader.walk(entry, 1)
    return Schedule(tuple(reader.found), walk.products, walk.exposed, walk.kernel_bytes)


class _Walk(NamedTuple):
    """Of a computation: seconds of products, and of collectives that nothing hides; bytes of kernels."""

    products: float
    exposed: float
    num_products: int
    kernel_bytes: int


@dataclasses.dataclass
class _Flight:
    """A collective under way."""

    end: float
    num_products: int
    collective: ScheduledCollective


@dataclasses.dataclass
class _Reader:
    computations: Mapping[str, list[Instruction]]
    axes: Mapping[str, int]
    target: Target
    topology: Topology
    found: list[ScheduledCollective] = dataclasses.field(default_factory=list)

    def walk(self, name: str, times: int) -> _Walk:
        """Seconds of one run of a computation; its collectives are noted as run `times` times."""
        shapes = {line.name: line.shape for line in self.computations[name]}
        products = exposed = wire = 0.0
        num_products = kernel_bytes = 0
        flights: dict[str, _Flight] = {}
        for line in self.computations[name]:
            for callee, trips in callees(line):
                inner = self.walk(callee, times * trips)
                products += trips * inner.products
                exposed += trips * inner.exposed
                num_products += inner.num_products
                kernel_bytes += trips * inner.kernel_bytes
            flops = self._flops(line, shapes)
            if flops is not None:
                products += flops / self.target.bf16_flops
                num_products += 1
            collective = self._collective(line, shapes, times)
            if flops is None and collective is None:
                kernel_bytes += bytes_of(line, shapes, self.computations)
            if collective is not None:
                # One after the other: they share the wire.
                wire = max(wire, products + exposed) + collective.seconds
                flights[line.name] = _Flight(wire, num_products, collective)
            waits_for = line.name if line.op in _OPS else line.operands[0] if line.operands else ""
            if waits_for in flights and (line.op in _OPS or line.op.endswith("-done")):
                flight = flights.pop(waits_for)
                exposed += max(0.0, flight.end - products - exposed)
                hidden = num_products > flight.num_products
                self.found.append(flight.collective._replace(hidden=hidden))
        return _Walk(products, exposed, num_products, kernel_bytes)

    def _flops(self, line: Instruction, shapes: Mapping[str, str]) -> float | None:
        """Operations of a matrix product; None for anything else. Convolutions and fused attention are 0."""
        if line.op == "dot":
            return _dot_flops(line, shapes, r"lhs_contracting_dims=\{([\d,]*)\}")
        if line.op == "custom-call" and _PRODUCTS.search(line.text):
            return _dot_flops(line, shapes, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
        if line.op == "convolution":
            return 0.0
        if line.op != "fusion":
            return None
        inner = [self._inner_flops(name) for name in re.findall(r"calls=%([\w.\-]+)", line.text)]
        found = [flops for flops in inner if flops is not None]
        return sum(found) if found else None

    def _inner_flops(self, name: str) -> float | None:
        shapes = {line.name: line.shape for line in self.computations[name]}
        found = [self._flops(line, shapes) for line in self.computations[name]]
        products = [flops for flops in found if flops is not None]
        return sum(products) if products else None

    def _collective(
        self, line: Instruction, shapes: Mapping[str, str], times: int
    ) -> ScheduledCollective | None:
        op = next((op for op in _OPS if line.op in (op, f"{op}-start")), None)
        if op is None:
            return None
        # A start's shape holds operands and results; a plain one's only the results.
        whole = [sum(sizes(shapes[name])) for name in line.operands if name in shapes]
        results = sum(sizes(line.shape))
        if line.op.endswith("-start") and op != "all-reduce":
            results -= sum(whole)
        nbytes = max(sum(whole), results if op != "all-reduce" else 0)
        group = self._group(line.text)
        seconds = collective_seconds(op, group, nbytes, self.target, self.topology)
        return ScheduledCollective(op, self._axes(group), nbytes, times, False, seconds)

    def _group(self, text: str) -> set[int]:
        return _first_group(text) or set(range(math.prod(self.axes.values())))

    def _axes(self, group: set[int]) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ; of a permutation, sender and receiver."""
        places = np.unravel_index(sorted(group), tuple(self.axes.values()))
        differ = zip(self.axes, places, strict=True)
        return tuple(name for name, along in differ if len(set(along)) > 1)


def _dot_flops(line: Instruction, shapes: Mapping[str, str], contracted: str) -> float:
    match = re.search(contracted, line.text)
    if match is None or line.operands[0] not in shapes:
        return 0.0
    (_, lhs), *_ = arrays(shapes[line.operands[0]])
    (_, out), *_ = arrays(line.shape)
    dims = [int(n) for n in re.findall(r"\d+", match[1])]
    return 2.0 * math.prod(out) * math.prod(lhs[dim] for dim in dims)


def _first_group(text: str) -> set[int]:
    """The devices in the group of device 0; none if the text names no groups, which means all.

    Written as `{{0,1},{2,3}}`, as `[2,2]<=[4]`, a reshaped iota, or as `mesh['x'=2,'y'=2] {'y'}`.
    """
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
    if named:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return members(axes, re.findall(r"'(\w+)'", named[2]))
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)
    if pairs:
        return {int(pairs[1]), int(pairs[2])}
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
