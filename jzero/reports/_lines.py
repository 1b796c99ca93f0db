# SPDX-License-Identifier: Apache-2.0
"""Lines of a report: none is longer than a terminal is wide, and no number is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

WIDTH = 80  # columns of a terminal, unless someone says otherwise
_KEPT = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?)?B\b|[KMGTP]?FLOP/s|Psi\b|[mu]?s\b|tokens\b|x )")
# Where a path that is longer than a line may be broken: before a key, never in a number.
_JOINT = re.compile(r"(?=\[)|(?<!\.)(?=\.(?![\d.]))|(?<=/)")


def wrapped(
    text: str, indent: str = "", width: int = WIDTH, first: str = "", cut: bool = True
) -> list[str]:
    """Wraps one line of prose at `width` columns; `first` begins the first line, `indent` the others.

    Numbers stay with their units. A word that is too long for any line, such as the path of a leaf, is cut,
    before a key if possible and never between digits, unless `cut` is false.

    >>> wrapped("1 of 2 leaves stays full: state['table']['rows'] float32[10,64]", "  ", width=40)
    ['1 of 2 leaves stays full:', "  state['table']['rows'] float32[10,64]"]
    """
    lines, begun = [first], False
    for word in _UNIT.sub(_KEPT, text).split(" "):
        fits = not cut or len(indent) + len(word) <= width
        parts = [word] if fits else _pieces(word, width - len(indent))
        for i, part in enumerate(parts):
            part = " " * (begun and not i) + part
            if len(lines[-1]) + len(part) > width and begun:
                lines.append(indent)
                part = part.lstrip(" ")
            lines[-1] += part
            begun = True
    return [line.replace(_KEPT, " ").rstrip() for line in lines]


def prose(lines: Iterable[str], width: int = WIDTH) -> list[str]:
    """Wraps lines; continuation lines are indented by two more columns."""
    found = list[str]()
    for line in lines:
        text = line.lstrip(" ")
        first = " " * (len(line) - len(text))
        found += wrapped(text, f"{first}  ", width, first)
    return found


def _pieces(word: str, room: int) -> Iterator[str]:
    """Cuts a word into pieces of at most `room`: at joints if possible, never in a number."""
    for part in _JOINT.split(word):
        while len(part) > room and (at := _cut(part, room)):
            yield part[:at]
            part = part[at:]
        yield part


def _cut(text: str, room: int) -> int:
    """Where to cut: after a comma, else at most at `room`; 0 if everything up to there is a number."""
    in_number = re.compile(r"[\d.,_]{2}")
    fits = [at for at in range(room, 0, -1) if not in_number.match(text, at - 1)]
    return next((at for at in fits if text[at - 1] == ","), fits[0] if fits else 0)
