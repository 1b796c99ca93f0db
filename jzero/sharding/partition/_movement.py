# SPDX-License-Identifier: Apache-2.0
"""`Movement`: communication of batch-sharded values, for the report."""

from __future__ import annotations

import dataclasses

from jzero.sharding.partition._writer import OF_STATE, OF_SUM, DeviceMove

# The reason of a loop along the batch that is not a sum; the report also suggests what its rows may be.
ITERATIONS_DEPEND = "a loop along the batch whose iterations depend on each other"


@dataclasses.dataclass(frozen=True)
class Movement:
    """Communication of an operation that needs rows of other devices; see `describe`.

    Attributes:
      operation: the primitive.
      where: the user's line, `file.py:12 (train_step)`; of an output, its path.
      nbytes: of the result on a device.
      times: in a step.
      reason: what the operation needs.
      value: the type of the rows, `float32[16,64]`; '' for totals and ranks.
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
    """Whether it moves rows of the batch: it is not one of ZeRO's gathers and reductions."""
    return move.why not in (OF_STATE, OF_SUM)


def movement_of(move: DeviceMove) -> Movement:
    """The report's entry; `where` of an output is its number."""
    return Movement(move.operation, move.line, move.local_bytes, move.times, move.why, move.value)
