# SPDX-License-Identifier: Apache-2.0
"""Kernels over blocks of leaves: which block is at which address, and the threads that share them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.offload.nvme._job_threads import Asked, JobThreads

# Elements of a block. AdamW reads 1 MB of it: enough that taking the next one costs nothing (half of it takes
# 1 to 2 % longer), and little enough that threads end together.
BLOCK = 1 << 16
# A counter is two numbers on cache lines of their own: which block is next, and, so many numbers behind it,
# how many are done.
FINISHED = 16
UPDATE = "jzero: update"  # as traces have it

# Works on some calls, as many threads as like to; returns how many of them are not done.
Drive = Callable[[int, int], int]

# Calls one kernel after the other. In LLVM, so that a thread is not held up between two of them by one that
# has the interpreter's lock.
DRIVE = """\
define i64 @drive(ptr %calls, i64 %num_calls) {
entry:
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %call ]
  %pending = phi i64 [ 0, %entry ], [ %pending.next, %call ]
  %more = icmp slt i64 %i, %num_calls
  br i1 %more, label %call, label %end
call:
  %at = getelementptr [5 x ptr], ptr %calls, i64 %i
  %kernel = load ptr, ptr %at
  %operands.at = getelementptr ptr, ptr %at, i64 1
  %operands = load ptr, ptr %operands.at
  %blocks.at = getelementptr ptr, ptr %at, i64 2
  %blocks = load ptr, ptr %blocks.at
  %num_blocks.at = getelementptr ptr, ptr %at, i64 3
  %num_blocks = load i64, ptr %num_blocks.at
  %counter.at = getelementptr ptr, ptr %at, i64 4
  %counter = load ptr, ptr %counter.at
  %done = call i64 %kernel(ptr %operands, ptr %blocks, i64 %num_blocks, ptr %counter)
  %less = icmp slt i64 %done, %num_blocks
  %one = zext i1 %less to i64
  %pending.next = add i64 %pending, %one
  %i.next = add i64 %i, 1
  br label %next
end:
  ret i64 %pending
}
"""


class KernelLoop(NamedTuple):
    """One kernel and all the leaves that it runs over.

    Attributes:
      kernel: address of `(operands, blocks, number of blocks, counter) -> blocks that are done`.
      sizes: elements of each leaf, or how many of them it runs over.
      slots: for each leaf, those of its operands.
      firsts: the first element of each leaf that is run over; 0 of each by default.
    """

    kernel: int
    sizes: Sequence[int]
    slots: Sequence[Sequence[int]]
    firsts: Sequence[int] = ()


class KernelLoops:
    """Chunks of loops over the leaves of several shards, all of the same shapes.

    Made once; what changes from call to call are addresses.
    """

    def __init__(self, chunks: Sequence[Sequence[KernelLoop]], num_shards: int, num_slots: int):
        loops = [loop for chunk in chunks for loop in chunk]
        self._ends = np.cumsum([0, *map(len, chunks)]).tolist()
        shards = np.arange(num_shards)[:, None, None] * num_slots
        slots = [(shards + np.array(loop.slots)[None]).reshape(-1) for loop in loops]
        self._slots = np.concatenate([np.zeros(0, np.int64), *slots])
        self._blocks = [_blocks(loop, num_shards) for loop in loops]
        # Kernel, where its operands begin among those of a call, blocks, number of blocks, counter.
        self._calls = np.zeros((len(loops), 5), np.int64)
        start = 0
        for row, loop, blocks, own in zip(self._calls, loops, self._blocks, slots, strict=True):
            row[:4] = loop.kernel, start, blocks.ctypes.data, len(blocks)
            start += own.nbytes
        self.num_blocks = int(self._calls[:, 3].sum())

    def start(self, addresses: np.ndarray, memory: Any) -> Calls:
        """What there is to do in a call; `addresses` are those of all slots, for each shard, in `memory`."""
        # Of its own: the call before may still be under way, on other memory.
        operands = addresses.reshape(-1)[self._slots]
        table = self._calls.copy()
        table[:, 1] += operands.ctypes.data
        return Calls(table, self._ends, (self, operands, memory))


class Calls:
    """The kernels of one call of an update, that threads may join at any time.

    A thread that comes when all is done finds counters that say so, which is why each call has its own. While
    one is at work nothing that kernels know by its address is freed, whoever was interrupted.
    """

    def __init__(self, table: np.ndarray, ends: Sequence[int], memory: Any):
        self._counters = np.zeros((len(table), 2 * FINISHED), np.int64)
        table[:, 4] = self._counters.ctypes.data + np.arange(len(table)) * self._counters.strides[0]
        self._table, self._ends, self._memory = table, ends, memory
        self._at, self._row = table.ctypes.data, table.strides[0]
        self._is_over = False

    def help(self, drive: Drive) -> None:
        """Works on all chunks, in order, until no block is left to take."""
        if self._is_over:  # One that comes late is no update in a trace (test_annotations.py).
            return
        with jax.profiler.TraceAnnotation(UPDATE):
            drive(self._at, len(self._table))

    def finish(self, drive: Drive, chunk: int) -> None:
        """Works on one chunk until all of it is done."""
        first, end = self._ends[chunk : chunk + 2]
        with jax.profiler.TraceAnnotation(UPDATE):
            while drive(self._at + first * self._row, end - first):
                time.sleep(0)  # Others are at their last blocks.
        self._is_over = end == len(self._table)

    def complete(self, drive: Drive) -> None:
        """Works on all chunks until all is done."""
        for chunk in range(len(self._ends) - 1):
            self.finish(drive, chunk)


def share(calls: Calls, drive: Drive, threads: JobThreads, helpers: int) -> Asked:
    """Lets other threads help; nobody has to wait for them to begin. All is done when all of them are."""
    threads.start()
    return threads.ask([lambda _: calls.help(drive)] * helpers)


def _blocks(loop: KernelLoop, num_shards: int) -> np.ndarray:
    """Rows of: which of the leaves of all shards, its first element, how many elements."""
    sizes = loop.sizes
    starts = [np.arange(0, size, BLOCK) for size in sizes]
    which = np.repeat(np.arange(len(sizes)), [len(x) for x in starts])
    first = np.concatenate(starts)
    count = np.minimum(BLOCK, np.array(sizes)[which] - first)
    first = first + np.array(loop.firsts or [0] * len(sizes))[which]
    shards = np.arange(num_shards)[:, None] * len(sizes)
    return np.stack(
        [(shards + which).ravel(), np.tile(first, num_shards), np.tile(count, num_shards)], axis=1
    ).astype(np.int64)
