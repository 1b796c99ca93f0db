# SPDX-License-Identifier: Apache-2.0
"""The formulas of ZeRO, ZeRO-Offload and ZeRO-Infinity: bytes of each role, what a step moves, efficiency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from jzero._memory_kinds import PINNED
from jzero._numbers import Workload
from jzero.reports._sizes import (
    ACCUMULATOR,
    ACTIVATION,
    FETCHED,
    GATHERED,
    GATHERED_TILE,
    GRADIENT,
    GRADIENT_TILE,
    RENEWED,
    SECOND_SLOT,
    TILES,
    VISITING,
    WINDOW,
    RoleBytes,
    as_dtype,
    crossing_gradients,
)
from jzero.reports._tables import Memory
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._offload import Backend
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER, StageAxes


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
      on_disk: whether each device's disk holds it, and not the device.
    """

    role: str
    size: Fraction
    num_shards: int
    at_rest: bool
    note: str
    on_host: Fraction = Fraction(0)
    most: int | None = None
    on_disk: bool = False


def needs(options: Options, stage_axes: StageAxes, sizes: RoleBytes) -> Iterator[Need]:
    """The stage's row, by role (ZeRO, section 5), and what offload moves (ZeRO-Offload, section 3)."""
    backend, num_shards = options.offload, stage_axes.count(stage_axes.shard_axes)
    num_param_shards = stage_axes.count(stage_axes.param_axes)
    yield from _parameters(backend, sizes, num_param_shards)
    assert backend.share is not None, "estimate refuses what is measured"
    yield from _optimizer_state(backend, sizes, num_shards)
    yield _gradients(options, num_shards, sizes)
    if options.microbatches.num > 1 and not options.by_layer:
        size = Fraction(jnp.dtype(options.microbatches.dtype or jnp.float32).itemsize)
        num = 1 if options.reduce_once else num_shards
        yield Need(ACCUMULATOR, size, num, False, f"sums {options.microbatches.num} microbatches")
    if num_param_shards > 1 and options.keep_gathered:
        when = "the whole step" if options.gather_once else "each microbatch"
        yield Need(GATHERED, sizes.compute, 1, False, f"gathered during {when}")
    if most := backend.window.device_bytes:
        gathered = sizes.compute if num_param_shards > 1 else Fraction(0)
        size = sizes.parameters / num_param_shards + gathered
        yield Need(WINDOW, size, 1, False, "at a time, gathered ones included", most=most)
    yield from _tiles(options, num_param_shards, num_shards, sizes)
    if backend.tier == PINNED and (most := backend.visiting_bytes):
        yield Need(VISITING, sizes.optimizer_state, num_shards, False, "at a time", most=most)
    if backend.updates_on_host and not backend.streams:
        yield from _on_their_way(backend, sizes, num_shards)
    if backend.files and not backend.streams:
        note = "beside the old ones until all is written"
        yield Need(RENEWED, sizes.parameters, num_param_shards, False, note)


def _tiles(
    options: Options, num_param_shards: int, num_shards: int, sizes: RoleBytes
) -> Iterator[Need]:
    """Two tiles of a matrix and two of its gradient, neither of them whole (ZeRO-Infinity, section 5.1.3)."""
    if options.comm.tile_bytes is None:
        return
    most = 2 * options.comm.tile_bytes
    if num_param_shards > 1 and not options.offload.streams:  # of a window they are a part
        yield Need(GATHERED_TILE, sizes.compute, 1, False, "in use, and the next one", most=most)
    if num_shards > 1 and not (options.reduce_once and options.microbatches.num > 1):
        note = "as it is made, and as it is reduced"
        yield Need(GRADIENT_TILE, sizes.compute, 1, False, note, most=most)


def _parameters(backend: Backend, sizes: RoleBytes, num_shards: int) -> Iterator[Need]:
    """Where they rest; of a disk also what of them is in memory on its way."""
    size, most = sizes.parameters, backend.window.host_bytes
    if not most:
        yield Need(PARAMETER, size, num_shards, True, "", Fraction(int(backend.streams)))
        return
    yield Need(PARAMETER, size, num_shards, True, "", on_disk=True)
    yield Need(FETCHED, size, num_shards, True, "of each process", Fraction(1), most)


def _optimizer_state(backend: Backend, sizes: RoleBytes, num_shards: int) -> Iterator[Need]:
    """Where it rests; of a disk also what a step writes while it reads, and what of both is in memory."""
    size, files = sizes.optimizer_state, backend.files
    if not files:
        yield Need(OPTIMIZER, size, num_shards, True, "", backend.share or Fraction(0))
        return
    yield Need(OPTIMIZER, size, num_shards, True, "", on_disk=True)
    if not files.in_place:
        params = sizes.parameters if backend.window.host_bytes else 0
        yield Need(
            SECOND_SLOT, size + params, num_shards, True, "the new one beside the old", on_disk=True
        )
    yield Need(TILES, size, num_shards, True, "of each process", Fraction(1), files.host_bytes)


def _gradients(options: Options, num_shards: int, sizes: RoleBytes) -> Need:
    backend, size = options.offload, crossing_gradients(sizes)
    if backend.files and backend.files.gradients:
        note = "behind their tiles"
        if not backend.files.in_place:
            # Where the new state will be written: what has no room there is more.
            there = sizes.optimizer_state + (sizes.parameters if backend.window.host_bytes else 0)
            size, note = 2 * max(size - there, Fraction(0)), "in the version that is written"
        return Need(GRADIENT, size, num_shards, False, note, on_disk=True)
    if backend.streams:
        note = "pinned, each from when it is reduced"
        return Need(GRADIENT, size, num_shards, False, note, Fraction(1))
    size = size if options.offloads else sizes.gradients
    num = 1 if options.reduce_once else num_shards
    return Need(GRADIENT, size, num, False, _gradient_note(options))


def _on_their_way(backend: Backend, sizes: RoleBytes, num_shards: int) -> Iterator[Need]:
    """What the way to a host that updates takes, all of it in its pinned memory but one row."""
    there, share = Fraction(1), backend.share or Fraction(0)
    gradients, params = share * crossing_gradients(sizes), share * sizes.parameters
    if backend.waits:
        # One set is written while the devices may not have copied the other.
        yield Need("outgoing parameter", 2 * params, num_shards, True, "pinned, two sets", there)
        note = "pinned, for the next step"
        yield Need("delayed gradient", gradients, num_shards, True, note, there)
        yield Need(RENEWED, params, num_shards, False, "arrives while the old ones are used")
    else:
        yield Need("outgoing parameter", params, num_shards, True, "pinned", there)
    yield Need("incoming gradient", gradients, num_shards, False, "pinned", there)
    if not sizes.masters:
        yield Need("incoming parameter", params, num_shards, False, "pinned", there)


def kept_elements(workload: Workload) -> int:
    """Of the inputs of all layers, for all microbatches of a device (ZeRO-Infinity, section 3)."""
    counts: tuple[Any, ...] = workload.tokens, workload.layers, workload.width
    assert None not in counts, "checked by estimate"
    return math.prod(counts)


def activations(options: Options, workload: Workload, sizes: RoleBytes) -> Memory:
    """What forward loops keep on the host: inputs of layers (ZeRO-Infinity, section 3)."""
    share = 1 if options.by_layer else options.microbatches.num
    nbytes = math.ceil(sizes.compute * kept_elements(workload) / share)
    note = "pinned, of all microbatches" if options.by_layer else "pinned, of one microbatch"
    return Memory(
        ACTIVATION, nbytes, 0, False, note * (options.microbatches.num > 1) or "pinned", nbytes
    )


def memory(num_params: int, rows: Iterable[Need], model_parallel: int) -> tuple[Memory, ...]:
    """The needs of so many parameters, of which each place along the model's axis has a part; rounded up."""

    def row(need: Need) -> Memory:
        whole, num_shards = need.size * num_params, need.num_shards * model_parallel
        if need.most is not None:
            whole = min(whole, Fraction(need.most * num_shards))
        each = whole / num_shards
        disk = math.ceil(each) if need.on_disk else 0
        here = 0 if need.on_disk else math.ceil(each * (1 - need.on_host))
        there = math.ceil(each * need.on_host)
        return Memory(need.role, math.ceil(whole), here, need.at_rest, need.note, there, disk)

    return tuple(map(row, rows))


def traffic(
    num_params: int, options: Options, workload: Workload, stage_axes: StageAxes, sizes: RoleBytes
) -> Iterator[Collective]:
    """Gathers of the passes, reductions, and the gather of updated parameters (ZeRO, section 7)."""
    params, shards = stage_axes.param_axes, stage_axes.shard_axes
    outer = shards[len(params) :]  # `shard_axes` begins with `param_axes`.
    replicas = tuple(axis for axis, _ in stage_axes.axes if axis not in shards)
    rounds, codes = options.rounds, options.comm.gather_dtype
    gathered = sizes.compute if codes is None else codes.bytes_per_element
    for op, axes, held_over, size, times in (
        ("all-gather", params, (), gathered, _gathers(options, workload, rounds)),
        *_reductions(options, stage_axes, params, outer, replicas, sizes.compute),
        ("all-gather", outer, params, sizes.parameters, 1),
    ):
        if stage_axes.count(axes) > 1:
            elements = math.ceil(Fraction(num_params, stage_axes.count(held_over)))
            yield Collective(op, axes, as_dtype(size), float(size), elements, times, "")


_Moved = tuple[str, tuple[str, ...], tuple[str, ...], Fraction, int]


def _reductions(
    options: Options, stage_axes: StageAxes, params: tuple[str, ...], outer: tuple[str, ...],
    replicas: tuple[str, ...], compute: Fraction,
) -> Iterator[_Moved]:  # fmt: skip
    """Of each collective: what, over which axes, over which it was taken before, bytes, and how often."""
    times, dtype = 1 if options.reduce_once else options.rounds, options.reduce_float
    size = compute if dtype is None else Fraction(jnp.dtype(dtype).itemsize)
    shards, axes = (*params, *outer), [axis for axis, _ in stage_axes.axes]
    codes = options.reduce_codes(axes)
    if any(codes.get(axis) for axis in shards):
        over: tuple[str, ...] = ()
        for axis in reversed([axis for axis in axes if axis in shards]):
            chosen = codes[axis]
            op = "reduce-scatter" if chosen is None else "all-to-all"
            yield op, (axis,), over, size if chosen is None else chosen.bytes_per_element, times
            over = (*over, axis)
    elif shards == tuple(axis for axis in axes if axis in shards):
        yield "reduce-scatter", shards, (), size, times
    else:  # Shards lie in another order than the mesh's devices: one collective cannot make them.
        yield "reduce-scatter", params, (), size, times
        yield "reduce-scatter", outer, params, size, times
    exact = tuple(axis for axis in replicas if not codes.get(axis))
    for axis in replicas:  # after the last microbatch
        if (chosen := codes.get(axis)) is not None:
            yield "all-to-all", (axis,), shards, chosen.bytes_per_element, 1
            yield "all-gather", (axis,), shards, chosen.bytes_per_element, 1
    yield "all-reduce", exact, shards, size, 1


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The share of its time that a device computes, if it waits for all that it moves.

    `intensity * bandwidth / (intensity * bandwidth + peak)`, for a workload of `intensity` operations per
    byte moved, a link of `bandwidth` bytes per second and a device of `peak` operations per second.

    Reference:
      Rajbhandari et al.: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
      2021, section 4; the intensities below are its equations for a Transformer whose blocks are computed
      again in the backward pass: 8 operations per parameter and token.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(efficiency: float, intensity: float, peak: float) -> float:
    """Bytes per second at which a device is so efficient: `efficiency`, solved for the bandwidth."""
    return peak * efficiency / ((1 - efficiency) * intensity)


def intensity_of_parameters(batch: int, sequence: int) -> float:
    """Of parameters and gradients in 16 bits: loaded three times and stored once, 8 bytes a parameter."""
    return float(sequence * batch)


def intensity_of_optimizer_state(batch: int, sequence: int) -> float:
    """Of optimizer state, gradients and masters, read and written: 2 * 16 bytes a parameter."""
    return sequence * batch / 4


def intensity_of_activations(hidden: int, interval: int = 1) -> float:
    """Of inputs of every `interval`-th block in 16 bits, stored once and loaded once."""
    return 24.0 * hidden * interval


def _gathers(options: Options, workload: Workload, rounds: int) -> int:
    """How often a step gathers a parameter that rests in shards, if a pass runs so many times."""
    if options.gather_once:
        return 1
    return rounds if options.keep_gathered else gathers_per_round(options, workload) * rounds


def gathers_per_round(options: Options, workload: Workload) -> int:
    """How often the two passes gather a parameter, each for itself.

    A tile is freed when it was used: what the backward pass computes again gathers it once more. Most of a
    layer's products are, but not its last one, so this is an upper bound.
    """
    return 3 if options.comm.tile_bytes is not None and workload.recompute else 2


def _gradient_note(options: Options) -> str:
    if not options.reduce_once:
        return "sharded: reduced as they are produced"
    if options.microbatches.num == 1 and options.stage > 0:
        # Without microbatches there is nothing to wait for: jzero runs what it runs at stage 2.
        return "whole, as the paper counts; jzero reduces them as they are produced"
    return "whole until they are reduced"
