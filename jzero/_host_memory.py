"""How much memory this machine has left, before state is put there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jzero._errors import OptionError, message
from jzero._quantities import readable_bytes

ROOT = Path("/")  # of the file system that tells


def shortage(num_bytes: int) -> str | None:
    """What speaks against needing so many bytes more, or None; each process counts for itself alone."""
    found = available() if num_bytes else None
    if found is None or num_bytes <= found:
        return None
    return (
        f"this process needs {num_bytes} bytes ({readable_bytes(num_bytes)}) of the host's memory for state, "
        f"and {found} ({readable_bytes(found)}) are available"
    )


def check(who: str, found: str | None) -> None:
    """Raises what `shortage` found."""
    if found is not None:
        raise OptionError(message(
            who, found, "With HostCPU, optimizer state rests in the memory of the host, all of it.",
            "Keep some of it on the devices (HostCPU(ratio=0.5)), shard it over more hosts, or use an "
            "optimizer with less state."))  # fmt: skip


def available() -> int | None:
    """Bytes that this process can still use: the machine's, or its control group's if that has less.

    Linux only; None elsewhere, and if nothing says it. Caches of files count as available.
    """
    machine = _numbers(ROOT / "proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [1024 * machine]
    return min([*found, *_left_in_groups()], default=None)


def _left_in_groups() -> Iterator[int]:
    """What is left of each limit that holds for this process: of its groups and of those around them."""
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if not kinds:  # version 2
            top, limit, used = "sys/fs/cgroup", "memory.max", "memory.current"
            caches = ("inactive_file", "active_file")
        elif "memory" in kinds.split(","):
            top, limit, used = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            caches = ("total_inactive_file", "total_active_file")
        else:
            continue
        # In a container the path may be the host's, and then only the root is there.
        inner = ROOT / top / path.strip("/")
        for group in [inner, *inner.parents]:
            if (number := "".join(_lines(group / limit))).isdecimal():
                held = int("".join(_lines(group / used)) or 0)
                stat = _numbers(group / "memory.stat")
                yield int(number) - held + sum(stat.get(name, 0) for name in caches)
            if group == ROOT / top:
                break


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(rest[0]) for name, *rest in map(str.split, _lines(file)) if rest}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
