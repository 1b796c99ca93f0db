# SPDX-License-Identifier: Apache-2.0
"""HostTiers: what `estimate` is told of activations on the devices' hosts, and of the batch."""

from __future__ import annotations

import dataclasses

from jzero._policy import NO_OFFLOAD, PinnedHost, Policy


@dataclasses.dataclass(frozen=True)
class HostTiers:
    """Tiers that the options do not tell, and the shape of the batch as far as bytes go by it.

    Attributes:
      activations: where a forward loop keeps what its backward loop reads.
      tokens: of a step, on each device.
      layers: turns of the loop, each of which keeps its input.
      width: elements of that input for each token.
      recompute: whether the backward pass computes what is between these inputs again.
    """

    activations: Policy = NO_OFFLOAD
    tokens: int | None = None
    layers: int | None = None
    width: int | None = None
    recompute: bool = True

    @property
    def offloads_activations(self) -> bool:
        """Whether what a forward loop keeps goes to the hosts."""
        return isinstance(self.activations, PinnedHost)

    @property
    def kept_elements(self) -> int:
        """Of the inputs of all layers, for all microbatches of a device (ZeRO-Infinity, section 3)."""
        assert None not in (self.tokens, self.layers, self.width), "checked by estimate"
        return (self.tokens or 0) * (self.layers or 0) * (self.width or 0)
