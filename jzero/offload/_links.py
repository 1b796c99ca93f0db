# SPDX-License-Identifier: Apache-2.0
"""Measured bandwidth between devices and their host, and among devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import PINNED

_TIMES = 3
_AXIS = "devices"
COLLECTIVES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "all-gather": functools.partial(lax.all_gather, axis_name=_AXIS, tiled=True),
    "reduce-scatter": functools.partial(lax.psum_scatter, axis_name=_AXIS, tiled=True),
}


def copied(
    devices: Sequence[jax.Device], nbytes: int, both_ways: bool = False
) -> tuple[float, float]:
    """Bytes per second of each device, to pinned memory and from it, while all of them copy.

    With `both_ways` each device copies in both directions at a time; both rates are then those of the slower.
    """
    here = [SingleDeviceSharding(device) for device in devices]
    there = [sharding.with_memory_kind(PINNED) for sharding in here]
    up = jax.device_put([np.zeros(nbytes, np.uint8)] * len(here), here)
    down = jax.block_until_ready(jax.device_put(up, there))

    def copy(arrays: Any, shardings: Any) -> float:
        return nbytes / seconds(lambda: jax.block_until_ready(jax.device_put(arrays, shardings)))

    if both_ways:
        rate = copy([*up, *down], [*there, *here])
        return rate, rate
    return copy(up, there), copy(down, here)


def collective(op: str, devices: Sequence[jax.Device], nbytes: int) -> float:
    """Algorithm bandwidth of a collective over at least two devices of this process, in bytes per second.

    It gathers, or reduces and scatters, a value of about `nbytes`.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))
    count = max(1, nbytes // len(devices) // 2) * len(devices)
    # In 16 bits, as weights and gradients travel; each device has its part, or a whole value.
    size = count if op == "all-gather" else count * len(devices)
    zeros = jax.jit(
        lambda: jnp.zeros(size, jnp.bfloat16), out_shardings=NamedSharding(mesh, P(_AXIS))
    )()
    run = jax.jit(jax.shard_map(COLLECTIVES[op], mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS)))
    return 2 * count / seconds(lambda: jax.block_until_ready(run(zeros)))


def seconds(run: Callable[[], Any]) -> float:
    """The least of some runs, after a warm-up."""
    run()
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
