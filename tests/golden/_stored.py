"""The stored texts: a file for each theme, its rows one after the other."""

import math
import pathlib
import re
from collections.abc import Mapping

from ._record import Record

FOLDER = pathlib.Path(__file__).parent / "stored"
# XLA:CPU gives threads of other processors other buffers.
TEMPORARIES = 0.1
RTOL = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "float16": 1e-2}
_VALUE = re.compile(r"(.*  (\w+)\[[\d,]*\]): norm (\S+), mixed ([^\s,]+)(.*)")


def read(theme: str) -> dict[str, Record]:
    """The records of a theme, by name."""
    path = FOLDER / f"{theme}.txt"
    found: dict[str, Record] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("== "):
            record = found.setdefault(line.removeprefix("== "), {})
        elif line.startswith("    "):
            lines.append(line[4:])
        elif line:
            lines = record.setdefault(line.removesuffix(":"), [])
    return found


def text(name: str, record: Record) -> str:
    """A row as it is stored."""
    parts = [
        f"{section}:\n" + "".join(f"    {x}\n" for x in lines) for section, lines in record.items()
    ]
    return "".join([f"== {name}\n", *parts])


def write(theme: str, records: Mapping[str, Record]) -> None:
    """Writes a theme anew."""
    FOLDER.mkdir(exist_ok=True)
    texts = [text(name, records[name]) for name in records]
    (FOLDER / f"{theme}.txt").write_text("\n".join(texts))


def with_tolerance(old: Record, new: Record) -> Record:
    """The new record, with the old lines where both are equal within tolerance."""
    return {
        section: _near_lines(section, old.get(section, []), lines) for section, lines in new.items()
    }


def _near_lines(section: str, old: list[str], new: list[str]) -> list[str]:
    near = {"values": _values_near, "temporaries": _temporaries_near}.get(section)
    if near is None or len(old) != len(new):
        return new
    return [a if near(a, b) else b for a, b in zip(old, new, strict=True)]


def _values_near(old: str, new: str) -> bool:
    a, b = _VALUE.fullmatch(old), _VALUE.fullmatch(new)
    if a is None or b is None or a.group(1, 5) != b.group(1, 5):
        return False
    numbers = [float(x) for m in (a, b) for x in m.group(3, 4)]
    if not all(map(math.isfinite, numbers)):  # Squares may be larger than floats.
        return a.groups() == b.groups()
    bound = RTOL.get(a.group(2), 3e-2 if "float" in a.group(2) else 0.0) * abs(numbers[0]) + 1e-12
    return all(abs(x - y) <= bound for x, y in zip(numbers[:2], numbers[2:], strict=True))


def _temporaries_near(old: str, new: str) -> bool:
    a, b = (int(line.split()[0].replace(",", "")) for line in (old, new))
    return abs(a - b) <= max(TEMPORARIES * a, 1024)
