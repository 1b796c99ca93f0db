# SPDX-License-Identifier: Apache-2.0
"""Loops over blocks of leaves: the addresses of blocks, and the threads that share them.

LLVM, where llvmlite is installed, compiles what runs over a block, and is called here; elsewhere XLA:CPU does
(`_xla_loops.py`). Both take the same groups of equations and the same tables of addresses, and make the same
bits.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.offload.kernels._machine import callable_at, compiled
from jzero.offload.nvme._job_threads import Asked, JobThreads

# Elements of a block. AdamW reads 1 MB of it: so much that taking the next block costs nothing (half of it
# takes 1 to 2 % longer), and so little that threads end together.
BLOCK = 1 << 16
# A counter is two numbers on cache lines of their own: the next block and, so many numbers behind it, the
# number of finished blocks.
FINISHED = 16
UPDATE = "jzero: update"  # in traces
UPDATE_FUNCTION = "update"  # the name of a kernel in LLVM IR

# Calls one kernel after the other; in LLVM, so that no thread waits for the interpreter's lock between two.
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


class BlockLoop(NamedTuple):
    # Of LLVM: the address of `(operands, blocks, number of blocks, counter) -> blocks that are done`; of
    # XLA: an `XlaProgram`.
    program: Any
    sizes: Sequence[int]  # elements of each leaf, or how many of them are run over
    slots: Sequence[Sequence[int]]  # of each leaf's operands
    firsts: Sequence[int] = ()  # the first element of each leaf; 0 by default


class Calls(abc.ABC):
    """The loops of one call of an update. While they run, nothing that they read or write is freed."""

    @abc.abstractmethod
    def share(self, threads: int, alone: bool) -> Asked:
        """Starts up to `threads` threads, one of which is the caller unless `alone`."""

    @abc.abstractmethod
    def finish(self, portion: int) -> None:
        pass

    @abc.abstractmethod
    def complete(self) -> None:
        """Returns when all is done, even if it was interrupted before."""


class BlockLoops(abc.ABC):
    """Portions of loops over the leaves of several shards; only addresses change from call to call."""

    @abc.abstractmethod
    def __init__(
        self, portions: Sequence[Sequence[BlockLoop]], num_shards: int, num_slots: int
    ): ...

    @staticmethod
    @abc.abstractmethod
    def program(text: str, dtypes: tuple[str, ...], group: Any) -> Any:
        """The program of a group of equations, compiled once for equal texts and dtypes of operands."""

    @abc.abstractmethod
    def start(self, addresses: np.ndarray, memory: Any, pool: JobThreads) -> Calls:
        """The loops of a call, shared by a pool; `addresses` of all slots, by shard, are in `memory`."""


class KernelLoops(BlockLoops):
    @staticmethod
    def program(text: str, dtypes: tuple[str, ...], group: Any) -> Any:
        return compiled(text, UPDATE_FUNCTION)

    def __init__(self, portions: Sequence[Sequence[BlockLoop]], num_shards: int, num_slots: int):
        loops = [loop for portion in portions for loop in portion]
        self._ends = np.cumsum([0, *map(len, portions)]).tolist()
        slots = [operands_of(loop, num_shards, num_slots).reshape(-1) for loop in loops]
        self._slots = np.concatenate([np.zeros(0, np.int64), *slots])
        self._blocks = [blocks_of(loop, num_shards, BLOCK) for loop in loops]
        # Kernel, where its operands begin among those of a call, blocks, number of blocks, counter.
        self._calls = np.zeros((len(loops), 5), np.int64)
        start = 0
        for row, loop, blocks, own in zip(self._calls, loops, self._blocks, slots, strict=True):
            row[:4] = loop.program, start, blocks.ctypes.data, len(blocks)
            start += own.nbytes

    def start(self, addresses: np.ndarray, memory: Any, pool: JobThreads) -> KernelCalls:
        # Tables of its own: the call before may still run, on other memory.
        operands = addresses.reshape(-1)[self._slots]
        table = self._calls.copy()
        table[:, 1] += operands.ctypes.data
        return KernelCalls(table, self._ends, (self, operands, memory), pool)


@functools.cache
def _drive() -> Callable[[int, int], int]:
    """Works on some calls, with any number of threads; returns how many of them are not done."""
    return callable_at(compiled(DRIVE, "drive"))


class KernelCalls(Calls):
    """Kernels that threads may join at any time: a late one finds counters that say that all is done."""

    def __init__(self, table: np.ndarray, ends: Sequence[int], memory: Any, pool: JobThreads):
        self._counters = np.zeros((len(table), 2 * FINISHED), np.int64)
        table[:, 4] = self._counters.ctypes.data + np.arange(len(table)) * self._counters.strides[0]
        self._table, self._ends, self._memory = table, ends, memory
        self._at, self._row = table.ctypes.data, table.strides[0]
        self._drive, self._pool, self._is_over = _drive(), pool, False

    def share(self, threads: int, alone: bool) -> Asked:
        self._pool.start()
        num = min(threads, int(self._table[:, 3].sum())) - (not alone)
        return self._pool.ask([lambda _: self._help()] * num)

    def _help(self) -> None:
        if self._is_over:  # A late thread shows no update in a trace (test_annotations.py).
            return
        with jax.profiler.TraceAnnotation(UPDATE):
            self._drive(self._at, len(self._table))

    def finish(self, portion: int) -> None:
        first, end = self._ends[portion : portion + 2]
        with jax.profiler.TraceAnnotation(UPDATE):
            while self._drive(self._at + first * self._row, end - first):
                time.sleep(0)  # Other threads run their last blocks.
        self._is_over = end == len(self._table)

    def complete(self) -> None:
        for portion in range(len(self._ends) - 1):
            self.finish(portion)


def operands_of(loop: BlockLoop, num_shards: int, num_slots: int) -> np.ndarray:
    """The slots of each leaf of each shard, among those of all shards."""
    shards = np.arange(num_shards)[:, None, None] * num_slots
    slots = shards + np.array(loop.slots, np.int64)[None]
    return slots.reshape(-1, slots.shape[-1])


def blocks_of(loop: BlockLoop, num_shards: int, block: int) -> np.ndarray:
    """Rows of: which of the leaves of all shards, its first element, how many elements."""
    sizes = loop.sizes
    starts = [np.arange(0, size, block) for size in sizes]
    which = np.repeat(np.arange(len(sizes)), [len(x) for x in starts])
    first = np.concatenate(starts)
    count = np.minimum(block, np.array(sizes)[which] - first)
    first = first + np.array(loop.firsts or [0] * len(sizes))[which]
    shards = np.arange(num_shards)[:, None] * len(sizes)
    return np.stack(
        [(shards + which).ravel(), np.tile(first, num_shards), np.tile(count, num_shards)], axis=1
    ).astype(np.int64)
