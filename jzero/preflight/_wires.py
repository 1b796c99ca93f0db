# SPDX-License-Identifier: Apache-2.0
"""Compares quantized with exact communication, over networks of several speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jzero._blocks import Blocks
from jzero._errors import OptionError, message
from jzero._quantities import readable_bits, readable_bytes
from jzero._sharded_step import ShardedStep
from jzero.preflight._examined import Examined
from jzero.preflight._schedule import CompiledSchedule, schedule_of
from jzero.reports._tables import Block, Printed, Table
from jzero.sharding.plan._options import Options
from jzero.targets._links import level_along, level_of, with_links
from jzero.targets._target import Target, Topology

_GBITS = (12.5, 25, 50, 100, 200, 400)


class Wire(NamedTuple):
    """A communication format: how a step's parameters and gradients are sent."""

    name: str  # as tables have it
    options: Mapping[str, Any]  # fields of `Comm`

    @property
    def written(self) -> str:
        """The options, as they are written."""
        fields = ", ".join(f"{name}={_written(value)}" for name, value in self.options.items())
        return f"comm=jzero.Comm({fields})" if fields else ""


def formats(
    data_axes: Mapping[str, int], target: Target, topology: Topology, mesh: Mapping[str, int]
) -> list[Wire]:
    """Formats to compare: int8, and int4 where values travel least often and most slowly."""
    axes = [name for name, size in data_axes.items() if size > 1]
    between = [name for name in axes if level_along(mesh, name, target, topology) > 0]
    int8, int4 = Blocks("int8"), Blocks("int4", rotate=True)
    gathers = {"gather_dtype": int8}
    found = [
        Wire("int8 gathers", gathers),
        Wire("int8 gathers, reductions", {**gathers, "reduce_dtype": int8}),
    ]
    if between == axes:
        found.append(Wire("int8, reductions int4", {**gathers, "reduce_dtype": int4}))
    elif between:
        by_axis = {name: int4 if name in between else int8 for name in axes}
        found.append(Wire("int8, int4 on slower links", {**gathers, "reduce_dtype": by_axis}))
    return found


def rates_of(target: Target, topology: Topology) -> tuple[int, ...]:
    """The speeds of a table, slowest first: of networks, and the target's own; or of the innermost links."""
    level = level_of(range(topology.num_devices), target, topology)
    own = int(target.domains[level].bandwidth)
    return tuple(sorted({*(int(x * 1e9 / 8) for x in _GBITS), own})) if level else (own,)


class WireTime(NamedTuple):
    """The time of a step with a communication format."""

    wire: Wire  # the format
    peak_bytes: int  # on each device, of the step
    schedules: tuple[CompiledSchedule, ...]  # of the step, at each speed
    exact: CompiledSchedule  # of the step with exact communication, at any speed

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of a step at each speed."""
        return tuple(s.step_seconds for s in self.schedules)

    @property
    def exposed(self) -> tuple[float, ...]:
        """Seconds for which the device waits for collectives, at each speed."""
        return tuple(s.exposed_seconds for s in self.schedules)

    @property
    def coding(self) -> float:
        """Seconds of compute beyond those of exact communication; below 0 if they are less."""
        return self.schedules[0].compute_seconds - self.exact.compute_seconds

    @property
    def kernel_bytes(self) -> int:
        """Bytes that kernels read and write beyond those of exact communication; below 0 if less."""
        return self.schedules[0].kernel_bytes - self.exact.kernel_bytes


@dataclasses.dataclass(frozen=True)
class WireVerdict(Printed):
    """Whether quantized communication pays; `print` it."""

    # bytes per second of each device, slowest first, over the outermost links
    rates: tuple[int, ...]
    asked: int  # the index of the target's own rate
    links: str  # the name of these links
    times: tuple[WireTime, ...]  # of each communication format; exact first
    refused: tuple[tuple[str, str], ...] = ()  # names of formats that this step cannot use, and why

    @property
    def cheapest(self) -> WireTime:
        """The fastest format at the target's rate; exact if quantization gains nothing."""
        return min(self.times, key=lambda x: x.seconds[self.asked])

    @property
    def pays(self) -> bool:
        """Whether quantization gains anything at the target's rate."""
        return self.cheapest is not self.times[0]

    def pays_below(self, time: WireTime) -> float | None:
        """The rate up to which quantization gains, in bytes per second: inf for all columns, None for none.

        Between two columns both times are taken to be straight lines of the seconds that a byte takes.
        """
        gains = [x - y for x, y in zip(self.times[0].seconds, time.seconds, strict=True)]
        at = next((i for i, gain in enumerate(gains) if gain <= 0), None)
        if at is None:
            return float("inf")
        if at == 0:
            return None
        slow, fast = 1 / self.rates[at - 1], 1 / self.rates[at]
        share = gains[at - 1] / (gains[at - 1] - gains[at])
        return 1 / (slow + (fast - slow) * share)

    def to_dict(self) -> dict[str, Any]:
        """Rates in bytes per second, times in seconds; `pays_below` is None for none of the rates."""
        return {
            "rates": list(self.rates),
            "rate": self.rates[self.asked],
            "links": self.links,
            "pays": self.pays,
            "cheapest": self.cheapest.wire.name,
            "wires": [
                {"name": x.wire.name, "options": x.wire.written, "peak_bytes": x.peak_bytes,
                 "exposed_seconds": list(x.exposed), "coding_seconds": x.coding,
                 "kernel_bytes": x.kernel_bytes, "seconds": list(x.seconds),
                 "pays_below": None if (below := self.pays_below(x)) == float("inf") else below,
                 "pays_at_all_rates": below == float("inf")} for x in self.times
            ],
            "refused": dict(self.refused),
        }  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        """A table of times by speed; then what follows of it, and what in it is a model."""
        header = ("ms of a step over", *map(readable_bits, self.rates))
        rows = [(x.wire.name, *(f"{1000 * s:.1f}" for s in x.seconds)) for x in self.times]
        yield Table(header, rows)
        left_out = [f"Not for this step: {name}. {why}" for name, why in self.refused]
        yield [self._sentence(), *self._below(), *left_out, self._model()]

    def _sentence(self) -> str:
        exact, best = self.times[0], self.cheapest
        at = f"At {readable_bits(self.rates[self.asked])} of {self.links} for each device"
        if self.pays:
            return (
                f"{at} quantization pays: the fastest format takes {_ms(best, self.asked)} where exact "
                f"communication takes {_ms(exact, self.asked)}. Write {best.wire.written}."
            )
        quantized = min(self.times[1:], key=lambda x: x.seconds[self.asked], default=None)
        if quantized is None:
            return f"{at} exact communication takes {_ms(exact, self.asked)}."
        return (
            f"{at} quantization does not pay: exact communication takes {_ms(exact, self.asked)}, and the "
            f"fastest quantized format {_ms(quantized, self.asked)}."
        )

    def _below(self) -> Iterator[str]:
        for time in self.times[1:]:
            below = self.pays_below(time)
            if below is None:
                where = "at none of these speeds"
            elif below == float("inf"):
                where = "at all of these speeds"
            else:
                where = f"below {readable_bits(float(f'{8 * below:.2g}') / 8)}"
            yield f"{time.wire.written} pays {where}."

    def _model(self) -> str:
        coding = ", ".join(
            f"{1000 * max(x.coding, 0):.1f} ms for {readable_bytes(max(x.kernel_bytes, 0))}"
            for x in self.times[1:]
        )
        return (
            "Compiled: the order of all operations, and the bytes of all kernels. Modelled: their time, to "
            f"which quantization adds {coding} of memory traffic; and straight lines between columns. The "
            "effect of quantization on the training is not included."
        )


def check_wire(who: str, options: Options) -> None:
    """Refuses a step whose quantized formats cannot be compared with exact communication."""
    given = [
        f"{name}={getattr(options.comm, name)}"
        for name, codes in (
            ("gather_dtype", options.comm.gather_dtype is not None),
            ("reduce_dtype", options.reduces_codes),
        )
        if codes
    ]
    if given:
        raise OptionError(message(
            who, f"search_wire=True, and the step has {' and '.join(given)}",
            "Quantized formats are compared with the step's exact communication.",
            f"Drop {' and '.join(x.split('=')[0] for x in given)} from the step, or drop search_wire."
        ))  # fmt: skip
    if options.stage == 0:
        raise OptionError(message(
            who, "search_wire=True and stage=0", "At stage 0 nothing is sent quantized.",
            "Use stage=1, 2 or 3, or drop search_wire."))  # fmt: skip


def compare_wires(
    step: ShardedStep, compiled: Callable[[ShardedStep], Examined], exact: Examined,
    target: Target, topology: Topology, under_way: int,
) -> WireVerdict:  # fmt: skip
    """Compiles the step, which communicates exactly, with each quantized format; times all at all speeds."""
    mesh, rates = dict(step.mesh.shape), rates_of(target, topology)
    level = level_of(range(topology.num_devices), target, topology)
    targets = [with_links(target, {level: rate}) for rate in rates]
    wires = [Wire("exact", {}), *formats(step._programs.config.axes, target, topology, mesh)]
    times, refused = list[WireTime](), list[tuple[str, str]]()
    for wire in wires:
        try:
            comm = dataclasses.replace(step._programs.options.comm, **wire.options)
            found = compiled(step.with_comm(comm)) if wire.options else exact
        except OptionError as error:  # Without masters, below stage 3.
            refused.append((wire.written, str(error).splitlines()[-1]))
            continue
        schedules = tuple(schedule_of(found.started, mesh, x, topology, under_way) for x in targets)
        first = times[0].exact if times else schedules[0]
        times.append(WireTime(wire, found.peak_bytes, schedules, first))
    asked = rates.index(int(target.domains[level].bandwidth))
    return WireVerdict(rates, asked, target.domains[level].name, tuple(times), tuple(refused))


def _ms(time: WireTime, at: int) -> str:
    return f"{1000 * time.seconds[at]:.1f} ms"


def _written(value: Any) -> str:
    """`jzero.Blocks(jnp.int4, rotate=True)`; just `jnp.int8` where that means the same."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_written(x)}" for name, x in value.items()) + "}"
    dtype = f"jnp.{value.dtype}"
    return f"jzero.Blocks({dtype}, rotate=True)" if value.rotate else dtype
