"""What a program holds when it holds most, from XLA's own dump of its assignment of buffers.

XLA writes where each value is (`*-buffer-assignment.txt`) and from which instruction to which it is alive
(`*-live-range.txt`). The peak is the moment at which most bytes are taken.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OPTIONS = {"xla_dump_hlo_as_text": True}  # with `xla_dump_to`
_VALUE = re.compile(r" value: <\d+ (\S+)[^>]*> \(size=(\d+),offset=(\d+)\): (\S+?)(?:{|$)")
_LIVE = re.compile(r"^    (\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)


class Value(NamedTuple):
    """A value in the program's temporary memory, alive from one instruction to another."""

    name: str
    nbytes: int
    offset: int
    shape: str
    start: int
    end: int


def held_at_peak(dump: Path, most: int = 10) -> list[dict[str, Any]]:
    """The largest temporary values at the peak of the largest program in a dump, arguments aside."""
    reports = dump.glob("*gpu_after_optimizations-live-range.txt")
    lives = max(reports, key=lambda path: path.stat().st_size)
    values = read(Path(str(lives).replace("live-range", "buffer-assignment")), lives)
    if not values:
        return []
    times = sorted({value.start for value in values})
    peak = max(times, key=lambda time: _taken(_alive(values, time)))
    places = {(value.offset, value.nbytes): value for value in _alive(values, peak)}
    largest = sorted(places.values(), key=lambda value: -value.nbytes)[:most]
    return [{"bytes": x.nbytes, "shape": x.shape, "name": x.name} for x in largest]


def read(assigned: Path, lives: Path) -> list[Value]:
    """The values of the largest temporary allocation."""
    found = _LIVE.findall(lives.read_text())
    ranges = {name: (int(start), int(end)) for name, start, end in found}
    values, temporary = [], False
    for line in assigned.read_text().splitlines():
        if line.startswith("allocation "):
            temporary = "preallocated-temp" in line
        elif temporary and (match := _VALUE.match(line)):
            name = match[1] if "{" in match[1] else match[1] + "{}"
            if name in ranges:
                sizes = int(match[2]), int(match[3])
                values.append(Value(match[1], *sizes, match[4], *ranges[name]))
    return values


def _alive(values: Iterable[Value], time: int) -> list[Value]:
    return [value for value in values if value.start <= time <= value.end]


def _taken(values: Sequence[Value]) -> int:
    """Bytes of the places that values take together; some share one."""
    taken = end = 0
    for value in sorted(values, key=lambda value: value.offset):
        last = value.offset + value.nbytes
        taken += max(0, last - max(end, value.offset))
        end = max(end, last)
    return taken
