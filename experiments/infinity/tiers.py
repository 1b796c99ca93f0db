"""The rows of this experiment: tiers as options of `shard_train_step`. A new option is a new line here."""

from typing import Any

import jzero

ONE_DEVICE = "jax.jit, one device"
PLAIN = "stage 3"
STATE = "optimizer state on the host"
ALL = "and parameters on the host"
ACTIVATIONS = "and activations on the host"
IN_TURN = "4 microbatches, one after the other"
LAYER_MAJOR = "4 microbatches, layer by layer"


def tiers(device_bytes: int) -> dict[str, dict[str, Any]]:
    """Options by name; at most so many bytes of parameters that rest on the hosts are on a device."""
    params = {"offload_params": jzero.PinnedHost(device_bytes)}
    everything = {
        "offload": jzero.HostCPU(), "offload_activations": jzero.PinnedHost(), **params,
    }  # fmt: skip
    return {
        PLAIN: {},
        STATE: {"offload": jzero.HostCPU()},
        ALL: {"offload": jzero.HostCPU()} | params,
        ACTIVATIONS: everything,
        IN_TURN: {"offload": jzero.HostCPU(), "accumulate": 4} | params,
        LAYER_MAJOR: everything | {"accumulate": 4, "layer_major": True},
        "parameters on the host, state on the devices": params,
        "parameters on the host, state in turns": {"offload": jzero.PinnedHost(device_bytes)}
        | params,
    }
