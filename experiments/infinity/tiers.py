"""The rows of this experiment: tiers as options of `shard_train_step`. A new option is a new line here."""

from typing import Any

import jzero

ONE_DEVICE = "jax.jit, one device"
PLAIN = "stage 3"
STATE = "optimizer state on the host"
ALL = "and parameters on the host"


def tiers(device_bytes: int) -> dict[str, dict[str, Any]]:
    """Options by name; at most so many bytes of parameters that rest on the hosts are on a device."""
    params = {"offload_params": jzero.PinnedHost(device_bytes)}
    return {
        PLAIN: {},
        STATE: {"offload": jzero.HostCPU()},
        ALL: {"offload": jzero.HostCPU()} | params,
        "parameters on the host, state on the devices": params,
        "parameters on the host, state in turns": {"offload": jzero.PinnedHost(device_bytes)}
        | params,
    }
