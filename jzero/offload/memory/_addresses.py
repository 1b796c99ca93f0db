# SPDX-License-Identifier: Apache-2.0
"""Arrays in host memory: made so that JAX reads them in place; their addresses, and checks of both."""

from __future__ import annotations

import collections
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero._errors import StateError, describe_leaf, message
from jzero._memory_kinds import PINNED

HostMemory: TypeAlias = Sequence[Any]

WHO = "HostUpdate"  # in messages
_LINE = 64


def host_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array that starts on a cache line, so that JAX can read it in place."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def on_host(arrays: HostMemory) -> list[Any]:
    """The arrays, ready and in host memory; those that are there already are not copied."""
    arrays = jax.block_until_ready(list(arrays))
    # NumPy's view of a leaf takes 4 us, and hundreds of leaves come in every step.
    return [x if _lies_on_host(x) or is_key(x) else np.asarray(x, order="C") for x in arrays]


def _lies_on_host(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, SingleDeviceSharding):
        return False
    if sharding.memory_kind in (PINNED, "unpinned_host"):
        return True
    devices: Any = sharding.device_set
    return next(iter(devices)).platform == "cpu"


def address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.unsafe_buffer_pointer()


class Addresses:
    """Addresses of NumPy arrays, kept for as long as the same arrays are passed.

    NumPy takes a microsecond for each, and most callers pass the same memory in every call, or one of two
    sets of it in turn. No array is kept alive.
    """

    def __init__(self) -> None:
        self._known: collections.deque[tuple[list[weakref.ref[Any]], np.ndarray]]
        self._known = collections.deque(maxlen=2)

    def __call__(self, arrays: HostMemory, check: Callable[[], None]) -> np.ndarray:
        """The addresses; new arrays are checked first."""
        for refs, addresses in self._known:
            if len(refs) == len(arrays) and all(map(operator.is_, [ref() for ref in refs], arrays)):
                return addresses
        check()
        addresses = np.array([address(x) for x in arrays], np.int64)
        self._known.append(([weakref.ref(x) for x in arrays], addresses))
        return addresses


def check_kept(names: Sequence[str], state: HostMemory, new_state: HostMemory) -> None:
    found = [] if len(state) == len(new_state) else [f"{len(state)} leaves become {len(new_state)}"]
    for name, old, new in zip(names, state, new_state, strict=False):
        if is_key(old):
            found.append(f"{_described(name, old)} holds PRNG keys")
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            found.append(f"{_described(name, old)} becomes {_described('', new).strip()}")
    if found:
        raise StateError(message(
            WHO, found, "State on the host is updated in its place, in NumPy arrays.",
            "Let the update keep its dtypes, and keep keys on the devices."))  # fmt: skip


def check_given(
    names: Sequence[str], given: Sequence[HostMemory], wanted: HostMemory, write: bool
) -> None:
    """Checks shapes and dtypes, and that what is written is NumPy's, no two in the same memory."""
    found: list[str] = []
    shapes, dtypes = [x.shape for x in wanted], [x.dtype for x in wanted]
    owner: dict[int, str] = {}
    for shard, arrays in enumerate(given):
        where = f" of shard {shard}" if len(given) > 1 else ""
        if len(arrays) != len(wanted):
            found.append(f"{len(arrays)} arrays{where} instead of {len(wanted)}")
        if (
            not write
            and [x.shape for x in arrays] == shapes
            and [x.dtype for x in arrays] == dtypes
        ):
            continue  # The usual case, ten times as fast.
        for name, x, want in zip(names, arrays, wanted, strict=False):
            if x.shape != want.shape or x.dtype != want.dtype:
                wrong = f"instead of {_described('', want).strip()}"
            elif write and not (
                isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable
            ):
                wrong = "is no writable NumPy array in C order"
            elif write and x.size and owner.setdefault(address(x), name + where) != name + where:
                wrong = f"is in the memory of {owner[address(x)]}"
            else:
                continue
            found.append(f"{_described(name + where, x)} {wrong}")
    if found:
        raise StateError(message(
            WHO, found, "Kernels read and write memory by its address.",
            "Pass what the update was traced for; what is written, in arrays of host_empty."))  # fmt: skip


def _described(name: str, x: Any) -> str:
    return describe_leaf(name, x.shape, x.dtype)
