# SPDX-License-Identifier: Apache-2.0
"""`Movement`: communication of batch-sharded values and of sums over the batch, for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jzero.ir._rules import Cost, named
from jzero.sharding.partition._writer import OF_STATE, OF_SUM, OUTPUT, DeviceMove

# The reason of a loop along the batch that is not a sum; the report also suggests what its rows may be.
ITERATIONS_DEPEND = "a loop along the batch whose iterations depend on each other"
# It is not said of gradients of leaves, nor of weights that are computed from leaves.
REPLICATED = "every device gets an intermediate value whole"
LEAST_BYTES = 2**20  # of a replicated value that somebody would miss
_READ_WEIGHTS = named(Cost.PRODUCT, Cost.LOOKUP, Cost.ELEMENTWISE, Cost.CAST, Cost.VIEW)


@dataclasses.dataclass(frozen=True)
class Movement:
    """Communication of an operation that needs rows of other devices, or sums over them; see `describe`."""

    operation: str  # the primitive
    where: str  # the user's line, `file.py:12 (train_step)`; of an output, its path
    nbytes: int  # of the result on a device
    times: int  # in a step
    reason: str  # what the operation needs
    value: str = ""  # the type of the rows, `float32[16,64]`; '' for totals and ranks

    def __str__(self) -> str:
        times = f", {self.times} times a step" if self.times > 1 else ""
        return f"{self.operation} at {self.where}: {self.reason}{times}"


def is_of_rows(move: DeviceMove) -> bool:
    """Whether it moves rows of the batch: it is not one of ZeRO's gathers and reductions."""
    return move.why not in (OF_STATE, OF_SUM)


def is_replicated(move: DeviceMove) -> bool:
    """Whether it makes a large intermediate value whole on every device.

    ZeRO's own gathers are of leaves, or of weights computed from them, which products read; its large
    reductions are gradients of leaves.
    """
    if is_of_rows(move) or move.leaf or move.of is not None or move.local_bytes < LEAST_BYTES:
        return False
    reads_shards = move.operation in _READ_WEIGHTS or move.operation == OUTPUT
    return move.kind == "reduce" or move.kind == "gather" and not reads_shards


def movements(moves: Iterable[DeviceMove]) -> list[Movement]:
    """The report's entries; `where` of an output is its number."""
    found = []
    for move in moves:
        if is_of_rows(move) or is_replicated(move):
            why = move.why if is_of_rows(move) else REPLICATED
            where, nbytes, times = move.line, move.local_bytes, move.times
            found.append(Movement(move.operation, where, nbytes, times, why, move.value))
    return found
