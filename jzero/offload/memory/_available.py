"""How much memory this machine has left, before state is put there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jzero._errors import OptionError, message
from jzero._quantities import readable_bytes

ROOT = Path("/")  # of the file system that tells


def shortage(num_bytes: int, what: str = "state") -> str | None:
    """What speaks against needing so many bytes more, or None; each process counts for itself alone."""
    found = available() if num_bytes else None
    if found is None or num_bytes <= found:
        return None
    needed = f"{num_bytes} bytes ({readable_bytes(num_bytes)}) of the host's memory for {what}"
    return f"this process needs {needed}, and {found} ({readable_bytes(found)}) are available"


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


# Of control groups, version 1 and 2: where they are, the limit, what is used, and how caches are called.
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")


def _left_in_groups() -> Iterator[int]:
    """What is left of each limit that holds for this process: of its groups and of those around them."""
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, limit, used, prefix = _V1 if kinds else _V2
        # In a container the path may be the machine's, and then only the top is there.
        inner = ROOT / top / path.strip("/")
        for group in [inner, *inner.parents]:
            if (most := "".join(_lines(group / limit))).isdecimal():
                held, stat = (
                    int("".join(_lines(group / used)) or 0),
                    _numbers(group / "memory.stat"),
                )
                caches = [stat.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive")]
                yield int(most) - held + sum(caches)
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
