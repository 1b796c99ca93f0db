# SPDX-License-Identifier: Apache-2.0
"""`Movement`: rows of the batch that a program moves, as a report says it."""

from __future__ import annotations

import dataclasses

from jzero.sharding.partition._writer import OF_STATE, OF_SUM, DeviceMove

# The reason of a loop that is no sum over its rows; a report says what else they may be.
ITERATIONS_DEPEND = "a loop along the batch whose iterations depend on each other"


@dataclasses.dataclass(frozen=True)
class Movement:
    """Rows that move because an operation needs others than a device has; see `describe`.

    Attributes:
      operation: the primitive.
      where: the user's line, `file.py:12 (train_step)`; of an output, its path.
      nbytes: that a device then has of it.
      times: how often a step does it.
      reason: what the operation needs.
      value: whose rows they are, `float32[16,64]`; of totals and ranks nothing.
    """

    operation: str
    where: str
    nbytes: int
    times: int
    reason: str
    value: str = ""

    def __str__(self) -> str:
        times = f", {self.times} times a step" if self.times > 1 else ""
        return f"{self.operation} at {self.where}: {self.reason}{times}"


def is_of_rows(move: DeviceMove) -> bool:
    """Whether it moves rows of the batch, and is none of the gathers and reductions of ZeRO."""
    return move.why not in (OF_STATE, OF_SUM)


def movement_of(move: DeviceMove) -> Movement:
    """What a report says of it; of a result, where is its number."""
    return Movement(move.operation, move.line, move.local_bytes, move.times, move.why, move.value)
