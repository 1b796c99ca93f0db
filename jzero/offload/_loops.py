"""Kernels over pieces of leaves: which piece is at which address, and the threads that share them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Elements of a piece. AdamW reads 512 KB of it: enough that taking the next one costs nothing, and little
# enough that threads end together.
PIECE = 1 << 15


class Loop(NamedTuple):
    """One kernel and all the pieces that it runs over.

    Attributes:
      function: `(address of rows, number of rows, address of a counter)`.
      rows: for each piece the number of elements, then the address of each operand.
      slots: for each of these, whose address it is...
      offsets: ... and the bytes from there to the piece.
    """

    function: Callable[[int, int, int], None]
    rows: np.ndarray
    slots: np.ndarray
    offsets: np.ndarray


def make_loop(
    function: Callable[[int, int, int], None],
    leaves: Sequence[tuple[int, Sequence[int], Sequence[int]]],
) -> Loop:
    """A loop over `leaves`, each given as its size, its operands' slots, and the bytes of their elements.

    Those of a scalar count as none: it is where it is for every piece.
    """
    rows, slots, offsets = [], [], []
    for size, operands, itemsizes in leaves:
        starts = np.arange(0, size, PIECE)
        rows.append(np.minimum(PIECE, size - starts))
        slots.append(np.tile(np.array(operands, np.int64), (len(starts), 1)))
        offsets.append(np.outer(starts, np.array(itemsizes, np.int64)))
    table = np.zeros((sum(map(len, rows)), 1 + len(leaves[0][1])), np.int64)
    table[:, 0] = np.concatenate(rows)
    return Loop(function, table, np.concatenate(slots), np.concatenate(offsets))


def run_loops(
    loops: Sequence[Loop], addresses: np.ndarray, pool: concurrent.futures.Executor, threads: int
) -> None:
    """Runs all pieces of all loops; the thread that calls is one of `threads`.

    `addresses` are those of all slots, in this step.
    """
    for loop in loops:
        np.add(addresses[loop.slots], loop.offsets, out=loop.rows[:, 1:])
    counters = np.zeros(len(loops), np.int64)

    def work() -> None:
        for i, loop in enumerate(loops):
            loop.function(loop.rows.ctypes.data, len(loop.rows), counters[i:].ctypes.data)

    helpers = min(threads, sum(len(loop.rows) for loop in loops)) - 1
    others = [pool.submit(work) for _ in range(helpers)]
    work()
    for other in others:
        other.result()
