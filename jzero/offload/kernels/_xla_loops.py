# SPDX-License-Identifier: Apache-2.0
"""The loops of an update by XLA:CPU, where LLVM is not installed: the same numbers, a block at a time.

XLA writes into memory of its own, and each block is copied to its place: only one block exists twice, in
memory that the next block uses again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.offload.kernels._code_paths import Group
from jzero.offload.kernels._kernel import USUAL, divisor_of, divisors_of
from jzero.offload.kernels._loops import (
    UPDATE,
    BlockLoop,
    BlockLoops,
    Calls,
    blocks_of,
    operands_of,
)
from jzero.offload.kernels._machine import processor
from jzero.offload.kernels._ops import is_same
from jzero.offload.kernels._writer import dtype_of
from jzero.offload.memory._addresses import host_empty
from jzero.offload.nvme._job_threads import Asked, JobThreads
from jzero.tracing import _jaxpr

# Elements of a block. A call costs some 0.2 ms beside its arithmetic, a quarter of the largest block's time,
# whose results still fit into caches. The rest of a leaf is padded to the next size.
SIZES = (1 << 10, 1 << 14, 1 << 18)
# By LLVM IR and dtypes of operands; kept like machine code.
_programs: dict[tuple[str, tuple[str, ...]], XlaProgram] = {}


class XlaProgram:
    """What a group of equations computes, for blocks of up to the largest of `SIZES`."""

    def __init__(self, group: Group, device: jax.Device):
        self._group = group
        self._there = jax.sharding.SingleDeviceSharding(device)
        written = [atom for _, atom in group.writes]
        self.num_reads, self.num_leaves = len(group.reads), len(group.reads) + len(written)
        self.operands = [jnp.dtype(dtype_of(x)) for x in [*group.reads, *written, *group.scalars]]
        self._compiled: dict[int, Any] = {}
        # Results of calls, for the next ones to write in: fresh pages take longer than all else.
        self._free: dict[int, list[tuple[jax.Array, ...]]] = {}

    def compile(self, count: int) -> None:
        """Compiles the program for so many elements, and makes its memory, unless that was done before."""
        size = _size_for(count)
        if size in self._compiled:
            return
        leaves = [self._aval((size,), dtype) for dtype in self.operands[: self.num_leaves]]
        scalars = [self._aval((), dtype) for dtype in [np.int32, *self.operands[self.num_leaves :]]]
        reads, results = leaves[: self.num_reads], tuple(leaves[self.num_reads :])
        run = jax.jit(_function(self._group, size), donate_argnums=0, keep_unused=True)
        with jax.set_mesh(None), jax.transfer_guard("allow"):
            self._compiled[size] = run.lower(results, *scalars, *reads).compile()
            self._free[size] = [self._memory(size)]

    def _aval(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._there)

    def _memory(self, size: int) -> tuple[jax.Array, ...]:
        written = self.operands[self.num_reads : self.num_leaves]
        return tuple(jax.device_put(np.zeros(size, dtype), self._there) for dtype in written)

    def run(self, operands: Sequence[np.ndarray]) -> None:
        reads, writes = operands[: self.num_reads], operands[self.num_reads : self.num_leaves]
        count = len(writes[0])
        size = _size_for(count)
        try:
            results = self._free[size].pop()
        except IndexError:  # Other threads use all.
            results = self._memory(size)
        padded = reads if count == size else [_padded(x, size) for x in reads]
        scalars = operands[self.num_leaves :]
        results = self._compiled[size](results, np.int32(0), *scalars, *padded)
        for x, place in zip(jax.block_until_ready(results), writes, strict=True):
            np.copyto(place, np.asarray(x)[:count])
        self._free[size].append(results)


def _size_for(count: int) -> int:
    return next(size for size in SIZES if count <= size)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    padded = host_empty((size,), x.dtype)
    padded[: len(x)], padded[len(x) :] = x, 0
    return padded


class XlaLoops(BlockLoops):
    @staticmethod
    def program(text: str, dtypes: tuple[str, ...], group: Group) -> XlaProgram:
        if (text, dtypes) not in _programs:
            _programs[text, dtypes] = XlaProgram(group, processor())
        return _programs[text, dtypes]

    def __init__(self, portions: Sequence[Sequence[BlockLoop]], num_shards: int, num_slots: int):
        self._portions = [
            [
                (
                    x.program,
                    operands_of(x, num_shards, num_slots),
                    blocks_of(x, num_shards, SIZES[-1]),
                )
                for x in portion
            ]
            for portion in portions
        ]
        for program, _, blocks in (loop for portion in self._portions for loop in portion):
            for count in set(blocks[:, 2].tolist()):
                program.compile(count)

    def start(self, addresses: np.ndarray, memory: Any, pool: JobThreads) -> XlaCalls:
        at = addresses.reshape(-1)
        portions = [
            [(program, at[slots], blocks) for program, slots, blocks in portion]
            for portion in self._portions
        ]
        return XlaCalls(portions, memory, pool)


class XlaCalls(Calls):
    """Programs that another thread calls, so that no interrupt leaves a block half copied."""

    def __init__(
        self, portions: Sequence[Sequence[tuple[XlaProgram, np.ndarray, np.ndarray]]], memory: Any,
        pool: JobThreads,
    ):  # fmt: skip
        self._portions, self._memory, self._pool = portions, memory, pool
        self._done = [Asked(1) for _ in portions]
        self._todo = [None]  # taken by the thread that does it

    def share(self, threads: int, alone: bool) -> Asked:
        """One thread does it; XLA has threads of its own."""
        self._pool.start()
        return self._pool.ask([lambda _: self._run()])

    def finish(self, portion: int) -> None:
        self._pool.wait(self._done[portion])

    def complete(self) -> None:
        """Starts the programs, if nothing has, and waits for all."""
        if not all(done.is_done for done in self._done):
            self._pool.wait(self.share(1, alone=True))
        for portion in range(len(self._portions)):
            self.finish(portion)

    def _run(self) -> None:
        try:
            self._todo.pop()
        except IndexError:
            return
        with jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
            for loops, done in zip(self._portions, self._done, strict=True):
                with jax.profiler.TraceAnnotation(UPDATE):
                    for program, operands, blocks in loops:
                        for row, first, count in blocks.tolist():
                            program.run(_operands(program, operands[row].tolist(), first, count))
                done.one_is_done()


def _operands(program: XlaProgram, at: Sequence[int], first: int, count: int) -> list[np.ndarray]:
    """The operands of a block, in place: leaves that start at these addresses, and scalars."""
    found = []
    for k, (address, dtype) in enumerate(zip(at, program.operands, strict=True)):
        shape, start = ((count,), first) if k < program.num_leaves else ((), 0)
        nbytes = dtype.itemsize * (count if shape else 1)
        memory: Any = (ctypes.c_char * nbytes).from_address(address + start * dtype.itemsize)
        found.append(np.ndarray(shape, dtype, memory))
    return found


def _function(group: Group, size: int) -> Callable[..., tuple[jax.Array, ...]]:
    """`(memory for results, zero, scalars, blocks that are read) -> blocks that are written`."""

    def run(_: Any, zero: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        num = len(group.scalars)
        scalars = dict(zip(group.scalars, operands[:num], strict=True))
        leaves = dict(zip(group.reads, operands[num:], strict=True))
        return _Arithmetic(group, size, zero, scalars, leaves).results()

    return run


class _Arithmetic:
    """Equations as kernels compute them: one by one, each rounded to its dtype.

    XLA replaces operations that are equal in real numbers: it fuses a product into a sum, multiplies by a
    reciprocal, divides once by a product. So each result is hidden from it, by or-ing bits that are zero,
    which XLA does not know.
    """

    def __init__(
        self, group: Group, size: int, zero: jax.Array, scalars: dict[_jaxpr.Var, jax.Array],
        leaves: dict[_jaxpr.Var, jax.Array],
    ):  # fmt: skip
        self._group, self._scalars, self._values = group, scalars, dict(leaves)
        self._shape = (size,)
        # From a leaf: XLA computes what is the same for all elements once.
        bits = [_bits(x).astype(jnp.int32) for x in leaves.values()][:1]
        self._zeros = functools.reduce(jnp.bitwise_and, bits, jnp.broadcast_to(zero, self._shape))
        self._divisors = divisors_of(group)
        self._usual = jnp.asarray(True)
        for var in self._divisors.values():
            x = jnp.abs(scalars[var])
            self._usual &= (x >= USUAL[0]) & (x <= USUAL[1])

    def results(self) -> tuple[jax.Array, ...]:
        for eqn in self._group.eqns:
            self._values[eqn.outvars[0]] = self._result(eqn)
        # Copies, as JAX would return an operand in place, in memory that is overwritten.
        return tuple(jnp.copy(self._read(atom)) for _, atom in self._group.writes)

    def _read(self, atom: _jaxpr.Atom) -> jax.Array:
        if _jaxpr.is_literal(atom):
            return self._hidden(jnp.full(self._shape, _jaxpr.literal(atom), dtype_of(atom)))
        return self._values[atom] if atom in self._values else self._spread(self._scalars[atom])

    def _spread(self, scalar: jax.Array) -> jax.Array:
        return jnp.broadcast_to(scalar, self._shape)

    def _hidden(self, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = _bits(x)
        return lax.bitcast_convert_type(bits | self._zeros.astype(bits.dtype), x.dtype)

    def _result(self, eqn: _jaxpr.Eqn) -> jax.Array:
        args, name = [self._read(atom) for atom in eqn.invars], eqn.primitive.name
        if is_same(eqn):
            return args[0]
        if not jnp.issubdtype(args[-1].dtype, jnp.floating):
            return _jaxpr.bind(eqn, *args)[0]
        if name == "div":
            divisor = divisor_of(eqn)
            scalar = None if divisor is None else self._divisors.get(divisor)
            return self._quotient(args[0], args[1], scalar)
        if name == "rsqrt":
            wide = args[0].astype(jnp.float32)
            root = self._divided(jnp.ones_like(wide), lax.sqrt(wide))
            return self._hidden(root.astype(args[0].dtype))
        if name == "integer_pow":
            return self._power(args[0], eqn.params["y"])
        return self._hidden(_jaxpr.bind(eqn, *args)[0])

    def _quotient(self, x: jax.Array, y: jax.Array, scalar: _jaxpr.Var | None) -> jax.Array:
        divided = self._divided(x, y)
        if scalar is None:
            return divided
        product = self._hidden(x * self._spread(np.float32(1) / self._scalars[scalar]))
        return lax.select(self._spread(self._usual), product, divided)

    def _divided(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self._hidden(lax.div(x, self._hidden(y)))

    def _power(self, x: jax.Array, y: int) -> jax.Array:
        # In the order of kernels.
        one, left, result = jnp.ones_like(x), abs(y), None
        while left:
            if left & 1:
                result = x if result is None else self._hidden(result * x)
            x, left = self._hidden(x * x), left >> 1
        if result is None:
            return one
        return self._divided(one, result) if y < 0 else result


def _bits(x: jax.Array) -> jax.Array:
    """Floats as integers of as many bits; others as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.int32 if x.dtype.itemsize == 4 else jnp.int16)
