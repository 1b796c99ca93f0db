# SPDX-License-Identifier: Apache-2.0
"""What crosses between each device, its host and its disk, by the part of the step in which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from jzero._numbers import Workload
from jzero.offload.schedule._folds import Crossing
from jzero.reports._formulas import kept_elements
from jzero.reports._sizes import ACTIVATION, GRADIENT, RoleBytes, as_dtype, crossing_gradients
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER, StageAxes

PARTS = FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "update"
WAYS = TO_HOST, TO_DEVICE = "to host", "to device"
DISK_WAYS = FROM_DISK, TO_DISK = "from disk", "to disk"


class Haul(NamedTuple):
    """What crosses one way in one part of a step.

    Attributes:
      part: of the step: a pass, or the update.
      direction: 'to host' or 'to device'; or between host and disk, 'from disk' or 'to disk'.
      what: 'gradient', 'parameter', 'optimizer state' or 'activation'.
      size: bytes of an element; of optimizer state, of one parameter's.
      elements: of each device, in the whole step.
    """

    part: str
    direction: str
    what: str
    size: Fraction
    elements: Fraction

    @property
    def nbytes(self) -> int:
        """Bytes of each device."""
        return math.ceil(self.elements * self.size)


def hauls(
    num_params: int, options: Options, workload: Workload, stage_axes: StageAxes, sizes: RoleBytes
) -> Iterator[Haul]:
    """All that crosses in a step."""
    backend = options.offload
    assert backend.share is not None, "estimate refuses what is measured"
    count = Fraction(num_params, stage_axes.count(stage_axes.shard_axes))
    on_host = backend.share * count if backend.updates_on_host else Fraction(0)
    if backend.streams:
        yield from _with_params(options, sizes, count, on_host)
    elif backend.updates_on_host:
        # Each as soon as it is there; sums over microbatches are when the last of these has run.
        part = BACKWARD if options.microbatches.num == 1 else UPDATE
        yield Haul(part, TO_HOST, GRADIENT, crossing_gradients(sizes), on_host)
        yield Haul(part, TO_HOST, PARAMETER, _read(sizes), on_host)
        yield Haul(UPDATE, TO_DEVICE, PARAMETER, sizes.parameters, on_host)
    if backend.files or not backend.updates_on_host:
        for way in DISK_WAYS if backend.files else WAYS:
            yield Haul(UPDATE, way, OPTIMIZER, sizes.optimizer_state, backend.share * count)
            if backend.window.host_bytes:
                yield Haul(UPDATE, way, PARAMETER, sizes.parameters, count)
    if options.moves_activations:
        kept = Fraction(kept_elements(workload))
        yield Haul(FORWARD, TO_HOST, ACTIVATION, sizes.compute, kept)
        yield Haul(BACKWARD, TO_DEVICE, ACTIVATION, sizes.compute, kept)


def hosted_bytes(num_params: int, options: Options, stage_axes: StageAxes, sizes: RoleBytes) -> int:
    """Of optimizer state that a device's share of its host updates."""
    backend = options.offload
    share = backend.share if backend.updates_on_host and backend.share else 0
    return math.ceil(
        share * sizes.optimizer_state * num_params / stage_axes.count(stage_axes.shard_axes)
    )


def _with_params(
    options: Options, sizes: RoleBytes, count: Fraction, on_host: Fraction
) -> Iterator[Haul]:
    """Parameters come for each pass, and gradients leave; what the host updates does not cross again."""
    rounds = options.rounds
    for part in (FORWARD, BACKWARD):
        for way in (FROM_DISK, TO_DEVICE) if options.offload.window.host_bytes else (TO_DEVICE,):
            yield Haul(part, way, PARAMETER, sizes.parameters, rounds * count)
    yield Haul(BACKWARD, TO_HOST, GRADIENT, crossing_gradients(sizes), count)
    if options.offload.files and options.offload.files.gradients:
        yield Haul(BACKWARD, TO_DISK, GRADIENT, crossing_gradients(sizes), count)
        yield Haul(UPDATE, FROM_DISK, GRADIENT, crossing_gradients(sizes), count)
    on_device = count - on_host
    yield Haul(UPDATE, TO_DEVICE, GRADIENT, crossing_gradients(sizes), on_device)
    yield Haul(UPDATE, TO_DEVICE, PARAMETER, _read(sizes), on_device)
    yield Haul(UPDATE, TO_HOST, PARAMETER, sizes.parameters, on_device)


def crossings(found: Iterator[Haul]) -> Iterator[Crossing]:
    """The same for the whole step, by direction and role; of state, an element per parameter."""
    groups: dict[tuple[str, str, Fraction], Fraction] = {}
    for x in found:
        key = (x.direction, x.what, x.size)
        groups[key] = groups.get(key, Fraction(0)) + x.elements
    for (direction, what, size), count in groups.items():
        if size and count:
            nbytes = math.ceil(count * size)
            yield Crossing(direction, what, as_dtype(size), math.ceil(count), nbytes)


def _read(sizes: RoleBytes) -> Fraction:
    """Bytes of a parameter that its update reads: none if it has a master."""
    return Fraction(0) if sizes.masters else sizes.parameters
