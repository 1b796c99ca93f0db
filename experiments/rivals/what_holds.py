"""What a program holds when it holds most, by XLA's own report: its dump of the assignment of buffers.

XLA writes where each value lies (`*-buffer-assignment.txt`) and from which instruction to which it is alive
(`*-live-range.txt`). The peak is the moment at which most bytes are taken; its values are told apart by shape
and by the instruction that makes them. `at_scale.py` uses it.

python experiments/rivals/what_holds.py      # two tables in Markdown, of the latest results of at_scale.py
"""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.shared import records
from experiments.shared.gpt import GPT

RESULTS = Path(__file__).parent / "results" / "at_scale"

KINDS = (
    "state", "gradients in shards", "kept by the forward pass", "gathered parameters",
    "gradients, whole", "activations and the rest",
)  # fmt: skip

_VALUE = re.compile(r" value: <\d+ (\S+)([^>]*)> \(size=(\d+),offset=(\d+)\): (\S+?)(?:{|$)")
_LIVE = re.compile(r"^    (\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"allocation \d+: size (\d+), .*")


class Value(NamedTuple):
    """A value in the program's temporary memory, alive from one instruction to another."""

    name: str
    is_loops: bool
    nbytes: int
    offset: int
    shape: str
    start: int
    end: int


def held_at_peak(dump: Path, model: GPT) -> dict[str, int]:
    """Bytes of each kind on each device, at the peak of the largest program in a dump."""
    reports = dump.glob("*gpu_after_optimizations-live-range.txt")
    lives = max(reports, key=lambda path: path.stat().st_size)
    assigned = Path(str(lives).replace("live-range", "buffer-assignment"))
    values, arguments = read(assigned.read_text(), lives.read_text())
    times = sorted({value.start for value in values})
    peak = max(times, key=lambda time: _taken(alive(values, time)))
    held = dict.fromkeys(KINDS, 0) | {"state": arguments}
    seen: set[tuple[int, int]] = set()
    for value in alive(values, peak):
        if (place := (value.offset, value.nbytes)) not in seen:
            seen.add(place)
            held[kind(value, values, model)] += value.nbytes
    return held


def read(assigned: str, lives: str) -> tuple[list[Value], int]:
    """The temporary values, and the bytes of the arguments."""
    ranges = {name: (int(start), int(end)) for name, start, end in _LIVE.findall(lives)}
    values, arguments, temporary = [], 0, False
    for line in assigned.splitlines():
        if allocation := _ALLOCATION.match(line):
            temporary = "preallocated-temp" in line
            arguments += int(allocation[1]) if "parameter" in line else 0
        elif temporary and (found := _VALUE.match(line)):
            name = found[1] if "{" in found[1] else found[1] + "{}"
            if name in ranges:
                sizes = int(found[3]), int(found[4])
                values.append(Value(name, "phi" in found[2], *sizes, found[5], *ranges[name]))
    return values, arguments


def alive(values: Iterable[Value], time: int) -> list[Value]:
    return [value for value in values if value.start <= time <= value.end]


def _taken(values: Iterable[Value]) -> int:
    """Bytes of the places that values take together; some share one."""
    taken = end = 0
    for value in sorted(values, key=lambda value: value.offset):
        last = value.offset + value.nbytes
        taken += max(0, last - max(end, value.offset))
        end = max(end, last)
    return taken


def kind(value: Value, values: Iterable[Value], model: GPT) -> str:
    d = model.dim
    matrices = {(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d), (model.vocab, d)}
    dtype, _, dims = value.shape.rstrip("]").partition("[")
    shape = tuple(int(dim) for dim in dims.split(",") if dim)
    stacked = model.layers in shape and len(shape) > 1
    if stacked:
        in_shards = len(shape) == 3 and math.prod(shape[1:]) < d * d and dtype == "f32"
        return "gradients in shards" if in_shards else "kept by the forward pass"
    if shape not in matrices:
        return "activations and the rest"
    makers = [value.name]
    if value.is_loops:  # What a turn leaves in this place for the next one.
        makers = [
            other.name for other in values
            if not other.is_loops and other.shape == value.shape
            and other.offset == value.offset and other.end >= value.end
        ]  # fmt: skip
    gathered = any(re.match(r"all.gather|copy", name) for name in makers)
    return "gathered parameters" if gathered else "gradients, whole"


Row = dict[str, Any]


def pairs(rows: Sequence[Row]) -> dict[str, tuple[Row, Row]]:
    """`{cell: (jzero's, the annotated step's)}`, with a cell for each way to call jzero."""

    def place(row: Row) -> tuple[Any, ...]:
        return row["devices"], row["style"], row["sequences"]

    rivals = {place(row): row for row in rows if row["rival"] == "annotated jit"}
    found = {}
    for row in rows:
        name, _, option = row["rival"].partition(", ")
        if name == "jzero":
            style = ", ".join(filter(None, [row["style"], option and f"`{option}`"]))
            cell = f"{row['devices']} | {style} | {row['sequences']}"
            found[cell] = (row, rivals[place(row)])
    return found


def scores(cells: dict[str, tuple[Row, Row]]) -> str:
    lines = [
        "| devices | layers | sequences on each | peak, MiB | of annotated "
        "| state, gradients in shards, kept | moved, bytes per parameter "
        "| hidden | exposed ms | of products ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell, both in cells.items():
        ours, theirs = both
        # A loop's stacks live until it ends: there, no step holds less than these three.
        fixed = sum(max(row["held"][name] for row in both) for name in KINDS[:3])
        texts = [
            " / ".join(f"{row['peak_bytes'] / 2**20:.0f}" for row in both),
            f"{ours['peak_bytes'] / theirs['peak_bytes']:.3f}",
            f"{fixed / theirs['peak_bytes']:.3f}",
            " / ".join(f"{row['moved_bytes_per_parameter']:.2f}" for row in both),
            " / ".join(records.percent(row.get("hidden")) for row in both),
            " / ".join(f"{1000 * row['exposed_seconds']:.0f}" for row in both),
            f"{1000 * ours['product_seconds']:.0f}",
        ]
        lines.append(f"| {cell} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def tables(cells: dict[str, tuple[Row, Row]]) -> str:
    lines = [
        "| devices | layers | sequences on each | " + " | ".join(KINDS) + " |",
        "| --- " * (3 + len(KINDS)) + "|",
    ]
    for cell, both in cells.items():
        held = [[f"{row['held'][name] / 2**20:.0f}" for row in both] for name in KINDS]
        lines.append(f"| {cell} | " + " | ".join(" / ".join(two) for two in held) + " |")
    return "\n".join(lines)


def main() -> None:
    cells = pairs(records.read_lines(sorted(RESULTS.glob("*.jsonl"))[-1]))
    print(scores(cells), tables(cells), sep="\n\n")


if __name__ == "__main__":
    main()
