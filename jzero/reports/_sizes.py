# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter, and the names that reports have for what lives within a step."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

GRADIENT, GATHERED, ACCUMULATOR = "gradient", "gathered parameter", "accumulator"
VISITING, RENEWED = "streamed optimizer state", "updated parameter"
WINDOW, ACTIVATION = "streamed parameter", "activation"
SECOND_SLOT, TILES = "second version", "tiles in transfer"
FETCHED = "parameters in transfer"
GATHERED_TILE, GRADIENT_TILE = "gathered tile", "tile of a gradient"


class RoleBytes(NamedTuple):
    """Bytes per parameter.

    Attributes:
      parameters: as they are stored.
      gradients: as the optimizer receives them.
      optimizer_state: masters included.
      compute: as a pass gathers parameters and reduces gradients.
      masters: of the optimizer state, what makes the stored parameter a copy that no update reads.
    """

    parameters: Fraction
    gradients: Fraction
    optimizer_state: Fraction
    compute: Fraction
    masters: Fraction


def transferred_gradients(sizes: RoleBytes) -> Fraction:
    """Bytes of a gradient of a step that is cut: it is returned before the update makes it wider.

    A loop over layers that casts float32 parameters stacks their gradients after the cast, in 4 bytes.
    """
    return min(sizes.gradients, sizes.compute)


def as_dtype(size: Fraction) -> str:
    """Of that many bytes per parameter; of state, all of its leaves together."""
    return f"{float(8 * size):g}-bit"
