# SPDX-License-Identifier: Apache-2.0
"""Measured bandwidth of host, device and link: what `HostCPU(ratio="auto")` goes by."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero.offload import _links
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory._addresses import host_empty

# Elements of each array: far more than caches hold, and a fraction of a second in all.
_SIZE = 2**24


class Bandwidths(NamedTuple):
    """Bytes per second, of one device and its share of the host's processors."""

    host: float  # optimizer state updated by the host
    device: float  # the same by the device
    link: float  # device to host or back, the slower of both


def share(bandwidths: Bandwidths, state_bytes: float, transfer_bytes: float) -> float:
    """The share of optimizer state with which host and device end together.

    `transfer_bytes` cross if all of it is on the host. Copies run beside the update, so the slower counts.
    """
    on_host = max(state_bytes / bandwidths.host, transfer_bytes / bandwidths.link)
    on_device = state_bytes / bandwidths.device
    return on_device / (on_host + on_device)


@functools.cache
def measure(device: jax.Device, num_devices: int, threads: int | None) -> Bandwidths:
    """Measures on a device of this process, which has `num_devices`; takes about a second, once."""
    with jax.set_mesh(None):  # One around the call has other devices.
        link = min(_links.copied([device], 2 * _SIZE))  # gradients in bfloat16
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

    return sum(x.nbytes for x in state) / _links.seconds(update)


def device_update(device: jax.Device) -> float:
    here = SingleDeviceSharding(device)
    held = jax.device_put([jnp.zeros(_SIZE), jnp.zeros(_SIZE)], here)
    arrival = jax.device_put(jnp.zeros(_SIZE, jnp.bfloat16), here)
    program = jax.jit(_moments, donate_argnums=0)

    def update() -> None:
        nonlocal held
        held, _ = jax.block_until_ready(program(held, [arrival]))

    return sum(x.nbytes for x in held) / _links.seconds(update)


def _moments(state: Any, inputs: Any) -> Any:
    """Adam's arithmetic, as far as memory traffic is concerned."""
    (m, v), (g,) = state, inputs
    g = g.astype(m.dtype)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return [m, v], [(m / (jnp.sqrt(v) + 1e-8)).astype(jnp.bfloat16)]
