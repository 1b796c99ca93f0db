"""Where leaves rest: `memory_kind`s of JAX, and the host's ordinary memory, which is none of them."""

from typing import NamedTuple

DEVICE, PINNED, HOST = "device", "pinned_host", "host"


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
