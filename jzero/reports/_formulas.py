"""The formulas of ZeRO and ZeRO-Offload: bytes of each role, on devices and hosts, and what a step moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp

from jzero._memory_kinds import HOST
from jzero.reports._tables import Memory
from jzero.sharding.analysis._traffic import Collective, Crossing
from jzero.sharding.plan._offload import Offload
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER, StageAxes

GRADIENT, GATHERED, ACCUMULATOR = "gradient", "gathered parameter", "accumulator"
VISITING, RENEWED = "visiting optimizer state", "renewed parameter"
WAYS = TO_HOST, TO_DEVICE = "to host", "to device"


class BytesPerParam(NamedTuple):
    """Bytes per parameter.

    Attributes:
      parameters: at rest.
      gradients: as the optimizer receives them.
      optimizer_state: masters included.
      compute: as a pass gathers parameters and reduces gradients.
      masters: of the optimizer state, what makes the parameter at rest a copy that no update reads.
    """

    parameters: Fraction
    gradients: Fraction
    optimizer_state: Fraction
    compute: Fraction
    masters: Fraction


class Need(NamedTuple):
    """What one role takes.

    Attributes:
      role: its name.
      size: bytes per parameter.
      num_shards: on how many devices they are divided.
      at_rest: held between steps too.
      note: what the number means.
      on_host: the share of it that each device's host holds, and not the device.
      most: bytes that are on each device at a time, if they are bounded.
    """

    role: str
    size: Fraction
    num_shards: int
    at_rest: bool
    note: str
    on_host: Fraction = Fraction(0)
    most: int | None = None


def needs(options: Options, stage_axes: StageAxes, sizes: BytesPerParam) -> Iterator[Need]:
    """The stage's row, by role (ZeRO, section 5), and what offload moves (ZeRO-Offload, section 3)."""
    num_shards = stage_axes.count(stage_axes.shard_axes)
    num_param_shards = stage_axes.count(stage_axes.param_axes)
    yield Need(PARAMETER, sizes.parameters, num_param_shards, True, "")
    on_host = share_on_host(options.offload)
    yield Need(OPTIMIZER, sizes.optimizer_state, num_shards, True, "", on_host)
    num = 1 if options.reduce_once else num_shards
    size = _crossing_gradients(sizes) if options.offloads else sizes.gradients
    yield Need(GRADIENT, size, num, False, _gradient_note(options))
    if options.accumulate > 1:
        size = Fraction(jnp.dtype(options.accumulate_dtype or jnp.float32).itemsize)
        yield Need(ACCUMULATOR, size, num, False, f"sums {options.accumulate} microbatches")
    if num_param_shards > 1 and options.keep_gathered:
        when = "the whole step" if options.gather_once else "each microbatch"
        yield Need(GATHERED, sizes.compute, 1, False, f"gathered during {when}")
    if most := options.offload.visiting_bytes:
        yield Need(VISITING, sizes.optimizer_state, num_shards, False, "in turns", most=most)
    if options.offload.tier == HOST:
        yield from _host_needs(on_host, options.offload.waits, sizes, num_shards)


def _host_needs(
    share: Fraction, waits: bool, sizes: BytesPerParam, num_shards: int
) -> Iterator[Need]:
    """What the way to the host and back takes, all of it in the host's pinned memory but one row."""
    there = Fraction(1)
    gradients, params = share * _crossing_gradients(sizes), share * sizes.parameters
    if waits:
        # One set is written while the devices may not have copied the other.
        yield Need("leaving parameter", 2 * params, num_shards, True, "pinned, two sets", there)
        note = "pinned, for the next step"
        yield Need("pending gradient", gradients, num_shards, True, note, there)
        yield Need(RENEWED, params, num_shards, False, "arrives while the old ones are used")
    else:
        yield Need("leaving parameter", params, num_shards, True, "pinned", there)
    yield Need("arriving gradient", gradients, num_shards, False, "pinned", there)
    if not sizes.masters:
        yield Need("arriving parameter", params, num_shards, False, "pinned", there)


def memory(num_params: int, rows: Iterable[Need]) -> tuple[Memory, ...]:
    """The needs of so many parameters; bytes are rounded up."""

    def row(need: Need) -> Memory:
        whole = need.size * num_params
        if need.most is not None:
            whole = min(whole, Fraction(need.most * need.num_shards))
        each = whole / need.num_shards
        here, there = math.ceil(each * (1 - need.on_host)), math.ceil(each * need.on_host)
        return Memory(need.role, math.ceil(whole), here, need.at_rest, need.note, there)

    return tuple(map(row, rows))


def traffic(
    num_params: int, options: Options, stage_axes: StageAxes, sizes: BytesPerParam
) -> Iterator[Collective]:
    """Gathers of the passes, reductions, and the gather of updated parameters (ZeRO, section 7)."""
    params, shards = stage_axes.param_axes, stage_axes.shard_axes
    outer = shards[len(params) :]  # `shard_axes` begins with `param_axes`.
    replicas = tuple(axis for axis, _ in stage_axes.axes if axis not in shards)
    reductions = 1 if options.reduce_once else options.accumulate
    dtype = options.reduce_dtype
    reduced = sizes.compute if dtype is None else Fraction(jnp.dtype(dtype).itemsize)
    for op, axes, held_over, size, times in (
        ("all-gather", params, (), sizes.compute, _gathers(options)),
        ("reduce-scatter", params, (), reduced, reductions),
        ("reduce-scatter", outer, params, reduced, reductions),
        ("all-reduce", replicas, shards, reduced, 1),  # after the last microbatch
        ("all-gather", outer, params, sizes.parameters, 1),
    ):
        if stage_axes.count(axes) > 1:
            elements = math.ceil(Fraction(num_params, stage_axes.count(held_over)))
            yield Collective(op, axes, _dtype(size), float(size), elements, times, "")


def crossings(
    num_params: int, options: Options, stage_axes: StageAxes, sizes: BytesPerParam
) -> Iterator[Crossing]:
    """What crosses between each device and its host: state there and back, or gradients and parameters."""
    rows = [(way, OPTIMIZER, sizes.optimizer_state) for way in (TO_HOST, TO_DEVICE)]
    if options.offload.tier == HOST:
        read = Fraction(0) if sizes.masters else sizes.parameters
        rows = [
            (TO_HOST, GRADIENT, _crossing_gradients(sizes)),
            (TO_HOST, PARAMETER, read),
            (TO_DEVICE, PARAMETER, sizes.parameters),
        ]
    count = share_on_host(options.offload) * num_params / stage_axes.count(stage_axes.shard_axes)
    for direction, what, size in rows:
        if size and count:
            nbytes = math.ceil(count * size)
            yield Crossing(direction, what, _dtype(size), math.ceil(count), nbytes)


def share_on_host(policy: Offload) -> Fraction:
    """The share of the optimizer state that rests on the host."""
    assert policy.share is not None, "estimate refuses what is measured"
    return policy.share


def _crossing_gradients(sizes: BytesPerParam) -> Fraction:
    """Bytes of a gradient of a step that is cut: it is handed out before the update makes it wider."""
    return min(sizes.gradients, sizes.compute)


def _dtype(size: Fraction) -> str:
    """Of that many bytes per parameter; of state, all of its leaves together."""
    return f"{float(8 * size):g}-bit"


def _gathers(options: Options) -> int:
    """How often a step gathers a parameter that rests in shards."""
    if options.gather_once:
        return 1
    return options.accumulate if options.keep_gathered else 2 * options.accumulate


def _gradient_note(options: Options) -> str:
    if not options.reduce_once:
        return "in shards: reduced as they are produced"
    if options.accumulate == 1 and options.stage > 0:
        # Without microbatches there is nothing to wait for: jzero runs what it runs at stage 2.
        return "whole, as the paper counts; jzero reduces them as they are produced"
    return "whole until they are reduced"
