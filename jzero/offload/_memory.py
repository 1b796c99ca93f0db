"""Arrays in host memory: made so that JAX reads them where they are, and where they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jzero._errors import StateError, describe_leaf, message

Arrays: TypeAlias = Sequence[Any]

_LINE = 64


def host_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array that starts on a cache line, so that JAX can read it where it is."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def is_key(x: Any) -> bool:
    """Whether an array holds PRNG keys, which NumPy does not know."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def on_host(arrays: Arrays) -> list[Any]:
    """The arrays, ready and in host memory; those that are there already are not copied."""
    arrays = jax.block_until_ready(list(arrays))
    return [x if _lies_on_host(x) else np.asarray(x, order="C") for x in arrays]


def _lies_on_host(x: Any) -> bool:
    # Its type first: hundreds of leaves are asked in every step, and NumPy's view of one takes 4 us.
    return isinstance(x, jax.Array) and (_is_host(x.sharding) or is_key(x))


@functools.cache
def _is_host(sharding: Any) -> bool:
    if len(sharding.device_set) > 1:
        return False
    (device,) = sharding.device_set
    return device.platform == "cpu" or sharding.memory_kind in ("pinned_host", "unpinned_host")


def addresses(arrays: Iterable[Any]) -> list[int]:
    """Where the arrays start; 0 for PRNG keys, which no kernel reads."""
    return [_address(x) for x in arrays]


def _address(x: Any) -> int:
    if isinstance(x, np.ndarray):
        return x.ctypes.data
    return 0 if is_key(x) else x.unsafe_buffer_pointer()


def check_state(who: str, names: Sequence[str], state: Arrays, new_state: Arrays) -> None:
    """Raises an error unless `new_state` can take the place of `state`."""
    found = [] if len(state) == len(new_state) else [f"{len(state)} leaves become {len(new_state)}"]
    for name, old, new in zip(names, state, new_state, strict=False):
        if not is_key(old) and not _writable(old):
            found.append(f"{_described(name, old)} is no writable NumPy array in C order")
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            found.append(f"{_described(name, old)} becomes {_described('', new).strip()}")
    found += [] if found else _shared(names, state)
    if found:
        raise StateError(message(
            who, found, "State on the host is updated in its place.",
            "Copy each leaf into an array of host_empty, and let the update keep its dtypes."))  # fmt: skip


def _shared(names: Sequence[str], state: Arrays) -> list[str]:
    owner: dict[int, str] = {}
    found = []
    for name, leaf, address in zip(names, state, addresses(state), strict=False):
        if address and leaf.size and owner.setdefault(address, name) != name:
            found.append(f"{_described(name, leaf)} is in the memory of {owner[address]}")
    return found


def check_given(who: str, what: str, given: Arrays, wanted: Arrays, write: bool) -> None:
    """Raises an error unless arrays have the shapes and dtypes that addresses are computed for."""
    found = [] if len(given) == len(wanted) else [f"{len(given)} {what} instead of {len(wanted)}"]
    for i, (x, want) in enumerate(zip(given, wanted, strict=False)):
        if x.shape != want.shape or x.dtype != want.dtype:
            found.append(
                f"{_described(f'{what}[{i}]', x)} instead of {_described('', want).strip()}"
            )
        elif write and not _writable(x):
            found.append(f"{_described(f'{what}[{i}]', x)} is no writable NumPy array in C order")
    if found:
        raise StateError(message(
            who, found, "Kernels read and write memory by its address.",
            "Pass what the update was traced for; make_outputs() makes outputs."))  # fmt: skip


def _writable(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable


def _described(name: str, x: Any) -> str:
    return describe_leaf(name, x.shape, x.dtype)
