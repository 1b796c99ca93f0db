# SPDX-License-Identifier: Apache-2.0
"""Measured bandwidth of host, devices and links: what `HostCPU(ratio="auto")` goes by."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import PINNED
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory._addresses import host_empty

# Elements of each array: far more than caches hold, and a fraction of a second in all.
_SIZE = 2**24
_TIMES = 3
_AXIS = "devices"
COLLECTIVES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "all-gather": functools.partial(lax.all_gather, axis_name=_AXIS, tiled=True),
    "reduce-scatter": functools.partial(lax.psum_scatter, axis_name=_AXIS, tiled=True),
}


class Bandwidths(NamedTuple):
    """Bytes per second, of one device and its share of the host's processors."""

    host: float  # optimizer state updated by the host
    device: float  # the same by the device
    link: float  # device to host or back, the slower of both


def share(bandwidths: Bandwidths, state_bytes: float, transfer_bytes: float) -> float:
    """The share of optimizer state with which host and device end together."""
    # Copies run beside the update, so the slower of both counts.
    on_host = max(state_bytes / bandwidths.host, transfer_bytes / bandwidths.link)
    on_device = state_bytes / bandwidths.device
    return on_device / (on_host + on_device)


@functools.cache
def measure(device: jax.Device, num_devices: int, threads: int | None) -> Bandwidths:
    """Measures on a device of this process, which has `num_devices`; takes about a second, once."""
    with jax.set_mesh(None):  # One around the call has other devices.
        link = min(copied([device], 2 * _SIZE))  # gradients in bfloat16
        # The devices of a host share its processors.
        return Bandwidths(host_update(threads) / num_devices, device_update(device), link)


def host_update(threads: int | None) -> float:
    """Bytes of optimizer state that this process's host updates in a second."""
    avals = [jax.ShapeDtypeStruct((_SIZE,), np.float32)] * 2
    gradient = jax.ShapeDtypeStruct((_SIZE,), jnp.bfloat16)
    engine = HostUpdate(_moments, avals, [gradient], threads=threads)
    state = [host_empty(x.shape, x.dtype) for x in avals]
    for x in state:
        x.fill(0)
    given, outputs = [np.zeros(_SIZE, jnp.bfloat16)], [engine.make_outputs()]

    def update() -> None:
        engine.prepare([state], [given])
        list(engine.run(outputs))

    return sum(x.nbytes for x in state) / seconds(update)


def device_update(device: jax.Device) -> float:
    here = SingleDeviceSharding(device)
    held = jax.device_put([jnp.zeros(_SIZE), jnp.zeros(_SIZE)], here)
    arrival = jax.device_put(jnp.zeros(_SIZE, jnp.bfloat16), here)
    program = jax.jit(_moments, donate_argnums=0)

    def update() -> None:
        nonlocal held
        held, _ = jax.block_until_ready(program(held, [arrival]))

    return sum(x.nbytes for x in held) / seconds(update)


def _moments(state: Any, inputs: Any) -> Any:
    """Adam's arithmetic, as far as memory traffic is concerned."""
    (m, v), (g,) = state, inputs
    g = g.astype(m.dtype)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return [m, v], [(m / (jnp.sqrt(v) + 1e-8)).astype(jnp.bfloat16)]


def copied(
    devices: Sequence[jax.Device], nbytes: int, both_ways: bool = False
) -> tuple[float, float]:
    """Bytes per second of each device to pinned memory and from it, while all of them copy."""
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
    """Algorithm bandwidth, in bytes per second, of a collective on about `nbytes` over these devices."""
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
