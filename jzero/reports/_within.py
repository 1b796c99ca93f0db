# SPDX-License-Identifier: Apache-2.0
"""The bytes that `estimate` reports, by role: of stored leaves, and within a step."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from jzero._memory_kinds import DEVICE, HOST, NVME
from jzero.offload.schedule._folds import TO_DEVICE, UPDATE, held, transfers
from jzero.reports import _sizes
from jzero.reports._scaled import ScaledStep
from jzero.reports._tables import Memory, memory_of
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER


def rows(step: ScaledStep) -> Iterator[Memory]:
    """The bytes of all roles."""
    yield memory_of(PARAMETER, [x for x in step.leaves if x.role == PARAMETER], "")
    yield memory_of(OPTIMIZER, [x for x in step.leaves if x.role == OPTIMIZER], "")
    yield from _files(step)
    yield from _gradients(step)
    yield from _on_hosts(step)
    yield from _gathered(step)
    yield from _at_a_time(step)
    yield from _updated(step)


def _files(step: ScaledStep) -> Iterator[Memory]:
    """The second version of files, and buffers for them."""
    sizes, files, window = step.sizes, step.options.offload.files, step.options.offload.window
    if window.host_bytes:
        size, most = sizes.parameters, window.host_bytes
        yield _row(
            step, _sizes.PARAM_BUFFERS, size, "of each process", tier=HOST, stays=True, most=most
        )
    if files:
        size = sizes.optimizer_state
        if not files.in_place:
            note = "the new one beside the old"
            yield _row(step, _sizes.SECOND_VERSION, _in_files(step), note, tier=NVME, stays=True)
        most = files.host_bytes
        yield _row(
            step, _sizes.TILE_BUFFERS, size, "of each process", tier=HOST, stays=True, most=most
        )


def _gradients(step: ScaledStep) -> Iterator[Memory]:
    """Gradients until they are used; in pinned memory, the rows of `_on_hosts` have them."""
    options, sizes = step.options, step.sizes
    files, num = options.offload.files, 1 if options.reduce_once else None
    if files and files.gradients:
        size, note = _sizes.transferred_gradients(sizes), "behind their tiles"
        if (
            not files.in_place
        ):  # They are written where the new state will be, which has room for so many.
            size = 2 * max(size - _in_files(step), Fraction(0))
            note = "in the version that is written"
        yield _row(step, _sizes.GRADIENT, size, note, tier=NVME)
    elif not options.offload.streams:
        # An offloaded step returns them before the update makes them wider.
        size = _sizes.transferred_gradients(sizes) if options.offloads else sizes.gradients
        yield _row(step, _sizes.GRADIENT, size, _gradient_note(options), num)
    if summed := step.accumulator:
        note = f"sums {options.microbatches.num} microbatches"
        yield _row(step, _sizes.ACCUMULATOR, summed[0], note, summed[1])


def _gathered(step: ScaledStep) -> Iterator[Memory]:
    exchange = step.abstract.report.plan.exchange
    if exchange.keep_gathered and _gathers(step):
        when = "the whole step" if exchange.gather_once else "each microbatch"
        yield _row(step, _sizes.GATHERED, step.sizes.compute, f"gathered during {when}", 1)


def _at_a_time(step: ScaledStep) -> Iterator[Memory]:
    """Budgets in bytes that the user gave."""
    options, sizes, sharding = step.options, step.sizes, step.sharding
    backend, gathered = options.offload, sizes.compute * _gathers(step)
    if most := backend.window.device_bytes:
        size = sizes.parameters / sharding.count(sharding.param_axes) + gathered
        yield _row(
            step, _sizes.STREAMED_PARAMS, size, "at a time, gathered ones included", 1, most=most
        )
    if options.comm.tile_bytes is not None:  # Two tiles of a matrix (ZeRO-Infinity, section 5.1.3).
        most = 2 * options.comm.tile_bytes
        if gathered and not backend.streams:  # A budget includes them.
            note = "in use, and the next one"
            yield _row(step, _sizes.GATHERED_TILE, gathered, note, 1, most=most)
        several = sharding.count(sharding.shard_axes) > 1
        if several and not (options.reduce_once and options.microbatches.num > 1):
            note = "as it is made, and as it is reduced"
            yield _row(step, _sizes.GRADIENT_TILE, sizes.compute, note, 1, most=most)
    if not backend.updates_on_host and (most := backend.fetched_bytes) and backend.tier != DEVICE:
        yield _row(step, _sizes.STREAMED_STATE, sizes.optimizer_state, "at a time", most=most)


def _on_hosts(step: ScaledStep) -> Iterator[Memory]:
    """What passes through pinned memory, by the schedule."""
    num, by_layer = step.options.microbatches.num, step.options.by_layer
    for what, does, nbytes, copies in held(step.schedule):
        note = "pinned, two sets" if copies > 1 else "pinned"
        role, devices = f"{does} {what}", _num_shards(step) * step.model_parallel
        if does == "delayed":
            note = "pinned, for the next step"
        elif what == _sizes.ACTIVATION:
            role, devices = _sizes.ACTIVATION, step.sharding.num_devices * step.model_parallel
            note += f", of {'all microbatches' if by_layer else 'one microbatch'}" * (num > 1)
        elif step.options.offload.streams:
            role, note = what, "pinned, each from when it is reduced"
        whole, stays = devices * nbytes, does in ("outgoing", "delayed")
        yield Memory(role, whole, 0, stays, note, nbytes)


def _updated(step: ScaledStep) -> Iterator[Memory]:
    """New parameters, where the old ones are still in use."""
    backend = step.options.offload
    if backend.waits:
        found = transfers(step.schedule)
        nbytes = sum(x.nbytes for x in found if x.direction == TO_DEVICE and x.part == UPDATE)
        whole = nbytes * _num_shards(step) * step.model_parallel
        yield Memory(_sizes.UPDATED, whole, nbytes, False, "arrives while the old ones are used")
    elif backend.files and not backend.streams:
        num, note = (
            step.sharding.count(step.sharding.param_axes),
            "beside the old ones until all is written",
        )
        yield _row(step, _sizes.UPDATED, step.sizes.parameters, note, num)


def _row(
    step: ScaledStep, role: str, size: Fraction, note: str, num: int | None = None,
    tier: str = DEVICE, stays: bool = False, most: int | None = None,
) -> Memory:  # fmt: skip
    """A row of `size` bytes per parameter over `num` devices, by default those of optimizer state.

    `most` bounds the bytes on each device.
    """
    leaf = step.leaf(role, size, num or _num_shards(step), tier)
    row = memory_of(role, [leaf], note, stays)
    if most is None:
        return row
    return row._replace(
        whole=min(row.whole, most * leaf.num_shards), per_device=min(row.per_device, most),
        on_host=min(row.on_host, most),
    )  # fmt: skip


def _num_shards(step: ScaledStep) -> int:
    return step.sharding.count(step.sharding.shard_axes)


def _gathers(step: ScaledStep) -> bool:
    """Whether parameters are stored sharded."""
    return step.sharding.count(step.sharding.param_axes) > 1


def _in_files(step: ScaledStep) -> Fraction:
    """Bytes per parameter of one version of the files."""
    sizes = step.sizes
    return sizes.optimizer_state + sizes.parameters * bool(step.options.offload.window.host_bytes)


def _gradient_note(options: Options) -> str:
    if not options.reduce_once:
        return "sharded: reduced as they are produced"
    if options.microbatches.num == 1 and options.stage > 0:
        # Without microbatches a gradient is reduced at once, as at stage 2.
        return "whole, as the paper counts; jzero reduces them as they are produced"
    return "whole until they are reduced"
