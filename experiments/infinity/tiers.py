"""The rows of this experiment: tiers as options of `shard_train_step`. A new option is a new line here."""

import dataclasses
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
    window = jzero.PinnedHost(device_bytes)
    state = jzero.Memory(params=window, optimizer=jzero.HostCPU())
    everything = dataclasses.replace(state, activations=jzero.PinnedHost())
    return {
        PLAIN: {},
        STATE: {"memory": jzero.HostCPU()},
        ALL: {"memory": state},
        ACTIVATIONS: {"memory": everything},
        IN_TURN: {"memory": state, "microbatches": jzero.Microbatches(4)},
        LAYER_MAJOR: {
            "memory": everything, "microbatches": jzero.Microbatches(4, order="layer"),
        },
        "parameters on the host, state on the devices": {"memory": jzero.Memory(params=window)},
        "parameters on the host, state in turns": {
            "memory": jzero.Memory(params=window, optimizer=window)
        },
    }  # fmt: skip
