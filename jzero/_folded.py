# SPDX-License-Identifier: Apache-2.0
"""Long lists of names made short: `['h_{0..11}']['w']` stands for twelve leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_WORD = re.compile(r"\w+")
_SHOWN = 6  # words in one pair of braces


class Folded(NamedTuple):
    text: str  # params['h_{0..11}']['{bias,scale}']
    num: int  # of the names that it stands for


Choices = tuple[str, ...]  # alternatives at one place of a name


def folded(names: Iterable[str]) -> list[Folded]:
    """Merges names that differ only in numbers or whole words; in the order of their first.

    Names are merged only if a group has all combinations that the braces say:

    >>> [each.text for each in folded(["h_0.w", "h_1.w", "h_2.w", "h_4.w", "h_0.b", "h_1.b"])]
    ['h_{0..2,4}.w', 'h_{0,1}.b']
    >>> folded(["a[0].x", "a[0].y", "a[1].x", "a[1].y"])
    [Folded(text='a[{0,1}].{x,y}', num=4)]
    """
    alike: dict[tuple[str, ...], list[tuple[Choices, ...]]] = {}
    for name in dict.fromkeys(names):
        fixed, places = _taken_apart(name)
        alike.setdefault(fixed, []).append(places)
    return [
        Folded(_written(fixed, places), math.prod(map(len, places)))
        for fixed, entries in alike.items()
        for places in _joined(fixed, entries)
    ]


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names, folded, in one line: `h_{0..11}.w, head.w and 3 more`."""
    found = folded(names)
    left = sum(each.num for each in found[most:])
    return ", ".join(each.text for each in found[:most]) + f" and {left} more" * bool(left)


def _taken_apart(name: str) -> tuple[tuple[str, ...], tuple[Choices, ...]]:
    """Splits a name into its fixed text and the numbers and words that may vary."""
    fixed, places, end = [], [], 0
    for start, stop in _places(name):
        fixed.append(name[end:start] + ("#" if _is_number(name[start]) else "$"))
        places.append((name[start:stop],))
        end = stop
    return (*fixed, name[end:]), tuple(places)


def _places(name: str) -> Iterator[tuple[int, int]]:
    """The spans of numbers, and of words without any digit."""
    for word in _WORD.finditer(name):
        numbers = list(re.finditer(r"[0-9]+", word.group()))
        spans = [match.span() for match in numbers] or [(0, len(word.group()))]
        yield from ((word.start() + a, word.start() + b) for a, b in spans)


def _joined(fixed: Sequence[str], entries: list[tuple[Choices, ...]]) -> list[tuple[Choices, ...]]:
    """Merges entries that are equal in all places but one; numbers first, since layers have them."""
    for at in sorted(range(len(fixed) - 1), key=lambda at: fixed[at][-1]):
        groups: dict[tuple[tuple[Choices, ...], tuple[Choices, ...]], list[Choices]] = {}
        for places in entries:
            groups.setdefault((places[:at], places[at + 1 :]), []).append(places[at])
        entries = [
            (*before, tuple(each for place in found for each in place), *after)
            for (before, after), found in groups.items()
        ]
    return entries


def _written(fixed: Sequence[str], places: Sequence[Choices]) -> str:
    parts = [text[:-1] + _braced(place) for text, place in zip(fixed, places, strict=False)]
    return "".join([*parts, fixed[-1]])


def _braced(place: Choices) -> str:
    if len(place) == 1:
        return place[0]
    if not _is_number(place[0]):
        return "{" + ",".join([*place[:_SHOWN], *["..."] * (len(place) > _SHOWN)]) + "}"
    return "{" + ",".join(_runs(sorted(place, key=lambda text: (int(text), text)))) + "}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _runs(numbers: Sequence[str]) -> Iterator[str]:
    """`["0..3", "7"]` for 0, 1, 2, 3, 7."""
    run: list[str] = []
    for text in [*numbers, ""]:
        if run and not (text and int(text) == int(run[-1]) + 1):
            yield from [f"{run[0]}..{run[-1]}"] if len(run) > 2 else run
            run = []
        run.append(text)
