# SPDX-License-Identifier: Apache-2.0
"""How much memory this machine has left, before anything is put there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jzero._errors import OptionError, message
from jzero._memory_kinds import PINNED, HostNeed
from jzero._quantities import readable_bytes

ROOT = Path("/")  # tests have another one
# Backends with one pool of bounded size for all pinned memory of a process (XLA's `GetGpuHostAllocator`).
POOLED = ("gpu",)
# By XLA's sources the pool doubles when it grows, so it may take twice what is asked of it.
POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_LESS = (
    "Offload less (HostCPU(ratio=0.5) keeps half of the optimizer state on the devices), shard over more "
    "hosts, use an optimizer with less state, or keep fewer activations (jax.checkpoint, microbatches)."
)


class Shortage(NamedTuple):
    """A memory that would not suffice, in the words of an error."""

    found: str  # what is needed, and what is left
    rule: str
    edit: str


def shortage(needs: Sequence[HostNeed], mesh: Mesh) -> Shortage | None:
    pinned = [need for need in needs if need.tier == PINNED]
    most, pool = sum(need.nbytes for need in needs), sum(need.nbytes for need in pinned)
    if most and (left := available()) is not None and most > left:
        return Shortage(
            _described(needs, most, "the host's memory", left),
            "What is offloaded is in the memory of the devices' host, all of it.", _LESS,
        )  # fmt: skip
    if pool and (left := left_in_pool(mesh.devices.flat[0].platform)) is not None and pool > left:
        more = -(left - pool) // 2**30 + 1
        return Shortage(
            _described(pinned, pool, "pinned memory", left),
            f"XLA's client for GPUs pins no more than {POOL_LIMIT} GiB in a process, {_pool()} here.",
            f"Set {POOL_LIMIT}={_pool() + more} before JAX starts. Else: {_LESS[0].lower()}{_LESS[1:]}",
        )  # fmt: skip
    return None


def _described(needs: Sequence[HostNeed], num_bytes: int, memory: str, left: int) -> str:
    each = ", ".join(
        f"{need.nbytes} {'pinned ' * (need.tier == PINNED)}for {need.what}" for need in needs
    )
    return (
        f"this process needs {num_bytes} bytes ({readable_bytes(num_bytes)}) of {memory} ({each}), "
        f"and {left} ({readable_bytes(left)}) are available"
    )


def check(who: str, found: Shortage | None) -> None:
    if found is not None:
        raise OptionError(message(who, *found))


def left_in_pool(platform: str) -> int | None:
    """Bytes that this process can still pin; None if only the host's memory limits them."""
    if platform not in POOLED:
        return None
    return max(0, _pool() * 2**30 - pinned_bytes(platform))


def pinned_bytes(platform: str) -> int:
    found: dict[int, int] = {}
    for x in jax.live_arrays(platform):
        if x.sharding.memory_kind == PINNED:
            # An array and that of one of its shards are one buffer.
            for shard in x.addressable_shards:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


def _pool() -> int:
    """GiB that XLA's client for GPUs pins at most."""
    given = os.environ.get(POOL_LIMIT, "")
    if given.isdecimal():
        return int(given)
    return 16 if os.environ.get(_PREALLOCATE, "").lower() in ("1", "true") else 64


def available() -> int | None:
    """Bytes that this process, or its control group, can still use; None if nothing says it."""
    machine = _numbers(ROOT / "proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [1024 * machine]
    return min([*found, *_left_in_groups()], default=None)


# Control groups of version 1 and 2: where they are, files of limit and use, and the prefix of cache sizes.
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")


def _left_in_groups() -> Iterator[int]:
    """What is left of each limit of this process: of its control groups and those around them."""
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, limit, used, prefix = _V1 if kinds else _V2
        # In a container the path may be the machine's, and then only the top is there.
        inner = ROOT / top / path.strip("/")
        for group in [inner, *inner.parents]:
            if (most := "".join(_lines(group / limit))).isdecimal():
                held = int("".join(_lines(group / used)) or 0)
                stat = _numbers(group / "memory.stat")
                caches = [stat.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive")]
                yield int(most) - held + sum(caches)
            if group == ROOT / top:
                break


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(rest[0]) for name, *rest in map(str.split, _lines(file)) if rest}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
