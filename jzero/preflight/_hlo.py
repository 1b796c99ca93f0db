# SPDX-License-Identifier: Apache-2.0
"""A compiled program as XLA writes it: its computations, their instructions, and the bytes of shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

_HEADER = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
# How XLA marks host memory in a layout.
ON_HOST = "S(5)"
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    text: str


Computations: TypeAlias = Mapping[str, Sequence[Instruction]]


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[1], [])
            entry = header[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            name, shape, op, rest = match.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0]))
            lines.append(Instruction(name, shape, op, operands, rest))
    return computations, entry


def callees(line: Instruction) -> tuple[str, ...]:
    """Computations that the line runs: a loop's body, a conditional's branches."""
    if line.op == "while":
        return tuple(re.findall(r"body=%([\w.\-]+)", line.text))
    if line.op == "call":
        return tuple(re.findall(r"to_apply=%([\w.\-]+)", line.text)[:1])
    if line.op != "conditional":
        return ()
    branches = re.search(r"branch_computations=\{([^}]*)\}", line.text)
    named = branches[1] if branches else " ".join(re.findall(r"_computation=(%\S+)", line.text))
    return tuple(re.findall(r"%([\w.\-]+)", named))


def trips_of(line: Instruction) -> int | None:
    """How often a line runs what it calls; None for a loop of unknown length."""
    if line.op != "while":
        return 1
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.text)
    return int(trips[1]) if trips else None


def sizes(shape: str) -> list[int]:
    """Bytes of every array in a shape, which may be a tuple."""
    return [math.ceil(math.prod(dims) * bits / 8) for bits, dims in arrays(shape)]


def arrays(shape: str) -> list[tuple[int, list[int]]]:
    """Bits per element, and dims, of every array in a shape."""
    return [
        (8 if dtype == "pred" else int(digits[0]), [int(n) for n in dims.split(",") if n])
        for dtype, dims in _ARRAY.findall(shape)
        if dtype == "pred" or (digits := re.findall(r"\d+", dtype))
    ]
