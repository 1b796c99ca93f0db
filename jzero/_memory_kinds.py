# SPDX-License-Identifier: Apache-2.0
"""Where leaves are stored: memory kinds of JAX, the host's ordinary memory, and files."""

from typing import NamedTuple

DEVICE, PINNED, HOST, NVME = "device", "pinned_host", "host", "nvme"


class HostNeed(NamedTuple):
    """Memory of the devices' host that is about to be taken.

    Attributes:
      what: that will be there: 'optimizer state', 'parameters', 'gradients', 'activations'.
      tier: 'pinned_host' or 'host'.
      nbytes: of all devices of this process, or of one, as who gives it says.
    """

    what: str
    tier: str
    nbytes: int
