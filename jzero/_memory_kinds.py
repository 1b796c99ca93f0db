# SPDX-License-Identifier: Apache-2.0
"""Where leaves are stored: memory kinds of JAX, the host's ordinary memory, and files."""

from typing import NamedTuple

DEVICE, PINNED, HOST, NVME = "device", "pinned_host", "host", "nvme"


class HostNeed(NamedTuple):
    """Memory of the devices' host that is about to be allocated."""

    what: str  # 'optimizer state', 'parameters', 'gradients' or 'activations'
    tier: str  # 'pinned_host' or 'host'
    nbytes: int  # of all devices of this process, or of one, as the caller says
