# SPDX-License-Identifier: Apache-2.0
"""`StepTime`: the time of a step at given rates, and how much of its transfers compute hides."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jzero._numbers import Rates, Workload
from jzero._quantities import readable_flops, readable_rate, readable_seconds, readable_size
from jzero.offload.schedule import _folds
from jzero.offload.schedule._ops import Update, flat
from jzero.offload.schedule._schedule import Schedule
from jzero.reports._sizes import ACTIVATION
from jzero.reports._tables import Block, Printed, Table
from jzero.sharding.analysis._traffic import Collective

BETWEEN, HOST_UPDATE, DISK = "between devices", "host update", "disk"
_DAY = 24 * 60 * 60
# What each part of a step computes for a parameter and a token: a product takes two operations, and its
# two derivatives as many each (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1).
_OPERATIONS = {_folds.FORWARD: 2, _folds.BACKWARD: 4, _folds.UPDATE: 0}
PART_OF = {"forward": _folds.FORWARD, "backward": _folds.BACKWARD, "": _folds.UPDATE}
# The time is a lower bound. It leaves out latencies of copies and collectives, attention's scores, operations
# of an update on a device (in an estimate), and that compute and copies share the memory's bandwidth.


class StepPart(NamedTuple):
    """How long one part of a step takes."""

    name: str  # 'forward pass', 'backward pass' or 'update'
    compute: float  # seconds of the device's operations; of an update none are counted
    # seconds of each link on which bytes move, all of them at the same time
    ways: Mapping[str, float]
    beside: float = 0.0  # seconds of the step's other parts, if this one runs beside them

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits: of the slowest link, what compute does not hide."""
        return max(0.0, max(self.ways.values(), default=0.0) - self.compute - self.beside)


@dataclasses.dataclass(frozen=True)
class StepTime(Printed):
    """The least time of a step at given rates; in each part of it all links are busy at the same time."""

    parts: tuple[StepPart, ...]  # of the step, in their order
    rates: Rates  # as given
    # by pass, the fewest tokens on each device whose compute hides all traffic of the pass; None if none
    # do, 0 if all of it grows with the tokens and is hidden
    hides_from: Mapping[str, int | None]
    untimed: tuple[str, ...]  # links on which bytes move, whose rate was not given
    written: int = 0  # bytes that a step writes to a disk, of each device

    @property
    def written_a_day(self) -> int:
        """Bytes that steps without a pause write to a disk in a day, for each device, which wears it out."""
        return int(self.written * _DAY / self.seconds)

    @property
    def compute(self) -> float:
        """Seconds of operations, at the peak."""
        return sum(part.compute for part in self.parts)

    @property
    def exposed(self) -> float:
        """Seconds in which a device waits."""
        return sum(part.exposed for part in self.parts)

    @property
    def seconds(self) -> float:
        """Seconds of a step: compute, and what it waits for."""
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """The share of its time that a device computes, at its peak."""
        return self.compute / self.seconds

    @property
    def efficiency_in_turn(self) -> float:
        """The same if nothing overlapped: the formula of ZeRO-Infinity, section 4."""
        moving = sum(seconds for part in self.parts for seconds in part.ways.values())
        return self.compute / (self.compute + moving)

    def to_dict(self) -> dict[str, Any]:
        """All that the text says, in seconds, bytes and operations per second, and shares."""
        return {
            "rates": dataclasses.asdict(self.rates),
            "parts": [{"part": p.name, "compute": p.compute, **p.ways, "exposed": p.exposed}
                      for p in self.parts],
            "seconds": self.seconds, "compute": self.compute, "exposed": self.exposed,
            "efficiency": self.efficiency, "efficiency_in_turn": self.efficiency_in_turn,
            "hides_from_tokens": dict(self.hides_from), "untimed": list(self.untimed),
            "written": self.written, "written_a_day": self.written_a_day,
        }  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        yield self.table()
        yield [*self.remarks()]

    def table(self) -> Table:
        ways = list(dict.fromkeys(way for part in self.parts for way in part.ways))
        rows = [
            (p.name, *_times([p.compute, *(p.ways.get(way) for way in ways), p.exposed]))
            for p in self.parts
        ]
        sums = [sum(p.ways.get(way, 0.0) for p in self.parts) for way in ways]
        rows.append(("step", *_times([self.compute, *sums, self.exposed])))
        return Table(("time of a step", "compute", *ways, "not hidden"), rows)

    def remarks(self) -> Iterator[str]:
        assert self.rates.peak is not None
        yield (
            f"A step takes at least {readable_seconds(self.seconds)}, and {self.efficiency:.0%} of it is "
            f"compute at {readable_flops(self.rates.peak)}; {self.efficiency_in_turn:.0%} if nothing "
            "overlapped."
        )
        for name, tokens in self.hides_from.items():
            if tokens is None:
                yield f"The {name} moves more for each token than its compute can hide."
            elif tokens:
                yield f"The {name} hides its traffic with {tokens:,} or more tokens on each device."
            else:
                yield f"The {name} hides its traffic with any number of tokens."
        given = [
            f"{readable_rate(rate)} {what}"
            for rate, what in (
                (self.rates.pcie, "in each direction between a device and its host"),
                (self.rates.interconnect, "of a whole value gathered or scattered"),
                (
                    self.rates.host_update,
                    "of optimizer state updated by a device's share of its host",
                ),
                (self.rates.disk, "read and written by a device's share of its host's disks"),
            )
            if rate
        ]
        if given:
            yield f"Rates: {'; '.join(given)}."
        if self.written:
            yield (
                f"Each step writes {readable_size(self.written)} to the disks for each device, "
                f"{readable_size(self.written_a_day)} a day, which wears them out."
            )
        if self.untimed:
            yield f"Not counted, because no rate was given: {', '.join(self.untimed)}."


def step_time(
    rates: Rates, operations: Mapping[str, int], tokens: int, traffic: Iterable[Collective],
    schedule: Schedule,
) -> StepTime:  # fmt: skip
    """The least time of a step with these `operations` by part; `tokens` is 0 if unknown."""
    assert rates.peak is not None
    speeds = {
        **dict.fromkeys(_folds.WAYS, rates.pcie),
        BETWEEN: rates.interconnect,
        HOST_UPDATE: rates.host_update,
        DISK: rates.disk,
    }
    copied = _folds.transfers(schedule)
    moved = _moved(traffic, copied, _folds.updated_bytes(schedule))
    ways = {
        name: {way: n / speed for way, n in moved[name].items() if n and (speed := speeds[way])}
        for name in _folds.PARTS
    }
    parts = [StepPart(name, operations[name] / rates.peak, ways[name]) for name in _folds.PARTS]
    if any(isinstance(op, Update) and op.delayed for op, _ in flat(schedule.ops)):
        # It runs beside the next step.
        passes = [part.compute + part.exposed for part in parts[:2]]
        parts[2] = parts[2]._replace(beside=sum(passes))
    hides = dict[str, int | None]()
    for name in (_folds.FORWARD, _folds.BACKWARD):
        if ways[name] and tokens:
            compute = Fraction(operations[name], tokens * rates.peak)
            activations = [x for x in copied if x.part == name and x.what == ACTIVATION]
            hides[name] = _hides_from(compute, tokens, moved[name], speeds, activations)
    untimed = [
        way for way in speeds if not speeds[way] and any(moved[x].get(way) for x in _folds.PARTS)
    ]
    return StepTime(
        tuple(part for part in parts if part.compute or part.ways),
        rates,
        hides,
        tuple(untimed),
        sum(x.nbytes for x in copied if x.direction == _folds.TO_DISK),
    )


def operations_of(num_params: int, workload: Workload) -> dict[str, int]:
    """Operations of each device by part."""
    recomputed = {_folds.BACKWARD: 2 * workload.recompute}
    return {
        part: (each + recomputed.get(part, 0)) * num_params * (workload.tokens or 0)
        for part, each in _OPERATIONS.items()
    }


def _moved(
    traffic: Iterable[Collective], copied: Iterable[_folds.Transfer], updated: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Bytes of each device, by part and link."""
    moved: dict[str, dict[str, int]] = {part: collections.Counter() for part in _folds.PARTS}
    for x in copied:
        # Reads and writes share a disk.
        moved[x.part][DISK if x.direction in _folds.DISK_WAYS else x.direction] += x.nbytes
    for c in traffic:
        # Reductions after the last microbatch belong to the backward pass, too.
        part = PART_OF[c.autodiff] if c.op == "all-gather" else _folds.BACKWARD
        # An all-reduce is a reduce-scatter and an all-gather.
        moved[part][BETWEEN] += c.nbytes * (2 if c.op == "all-reduce" else 1)
    for part, n in updated.items():
        moved[part][HOST_UPDATE] += n
    return moved


def _hides_from(
    compute: Fraction, tokens: int, moved: Mapping[str, int], speeds: Mapping[str, int | None],
    activations: Sequence[_folds.Transfer],
) -> int | None:  # fmt: skip
    """The fewest tokens with which a pass hides all its transfers; `compute` is seconds per token.

    Activations grow with the tokens; everything else does not depend on them.
    """
    least = 0
    for way, n in moved.items():
        if not (speed := speeds[way]):
            continue
        grows = sum(x.nbytes for x in activations if x.direction == way)
        each = compute - Fraction(grows, tokens * speed)
        if each <= 0:
            return None
        least = max(least, math.ceil(Fraction(n - grows, speed) / each))
    return least


def _times(seconds: Iterable[float | None]) -> list[str]:
    return [readable_seconds(s) if s else "-" for s in seconds]
