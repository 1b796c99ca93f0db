"""What changed in a row, and whether that is better."""

import difflib
import re
from typing import NamedTuple

from ._record import Record
from ._stored import text, with_tolerance

# The sections of numbers of which less is better; what the others say does not weigh.
_MEASURES = ("traffic", "bytes at rest", "host transfers", "rows moved", "temporaries")
# What may not change for the better.
_FIXED = ("values", "refused", "warnings")
# The last number of a line: "sort: ranks of rows, 1,024 bytes x 3".
_NUMBER = re.compile(r"(\d[\d,]*)(?: bytes)?(?: x (\d+))?(?: in each turn)?$")


class Verdict(NamedTuple):
    """How a row changed.

    Attributes:
      word: 'better' (no more bytes on any axis or at rest, no more collectives, no more temporaries, and less
        of something), 'equal' (of all as much) or 'worse'.
      why: what is less, more, or different.
      diff: of the stored text and the new one.
    """

    word: str
    why: str
    diff: str


def compared(name: str, old: Record, new: Record) -> Verdict | None:
    """The verdict on a row; None if it is as stored."""
    new = with_tolerance(old, new)
    if old == new:
        return None
    before, after = (text(name, record).splitlines() for record in (old, new))
    diff = "\n".join(difflib.unified_diff(before, after, "stored", "now", n=1, lineterm=""))
    if not old:
        return Verdict("equal", "a new row", diff)
    wrong = [section for section in _FIXED if old.get(section) != new.get(section)]
    a, b = _numbers(old), _numbers(new)
    more = [key for key in sorted({*a, *b}) if b.get(key, 0) > a.get(key, 0)]
    less = [key for key in sorted({*a, *b}) if b.get(key, 0) < a.get(key, 0)]
    whys = [
        f"{what}: {', '.join(keys)}"
        for what, keys in (("different", wrong), ("more", more), ("less", less))
        if keys
    ]
    word = "worse" if wrong or more else "better" if less else "equal"
    return Verdict(word, "; ".join(whys) or "as much of everything, in another way", diff)


def _numbers(record: Record) -> dict[str, int]:
    """Every measure by name; `temporaries: 5,120 bytes` is 5120."""
    found: dict[str, int] = {}
    for section in _MEASURES:
        for line in record.get(section, []):
            key = section if section == "temporaries" else f"{section}, {line.partition(':')[0]}"
            number = _NUMBER.search(line)
            assert number is not None, line
            num = int(number.group(1).replace(",", "")) * int(number.group(2) or 1)
            found[key] = found.get(key, 0) + num
    return found
