"""What changed in a row, and whether that is better."""

import difflib
import re
from typing import NamedTuple

from ._record import Record
from ._stored import text, with_tolerance

# The sections of numbers of which less is better.
_MEASURES = (
    "traffic",
    "bytes at rest",
    "host transfers",
    "rows moved",
    "temporaries",
    "compiled",
)
# What no gain outweighs.
_SAME = {"values", "refused", "warnings", "aliased", "streamed"}
# The last number of a line: "sort: ranks of rows, 1,024 bytes x 3".
_NUMBER = re.compile(r"(\d[\d,]*)(?: bytes| us)?(?: x (\d+))?(?: in each iteration)?$")


class Verdict(NamedTuple):
    """How a row changed.

    Attributes:
      word: 'better' (no more bytes on any axis, no more collectives, no more temporaries or whatever else is
        measured, and less of one of them), 'update' (everything else), or 'failed' where there is no text.
      why: what is less, more, or different, with its numbers.
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
    return Verdict(*_word(old, new), diff)


def _word(old: Record, new: Record) -> tuple[str, str]:
    if "failed" in new:
        return "failed", "it has no text"
    if not old:
        return "update", "a new row"
    a, b = _numbers(old), _numbers(new)
    changed = {key: (a.get(key, 0), b.get(key, 0)) for key in sorted({*a, *b})}
    more = [f"{key} {x:,} -> {y:,}" for key, (x, y) in changed.items() if y > x]
    less = [f"{key} {x:,} -> {y:,}" for key, (x, y) in changed.items() if y < x]
    different = sorted(
        section for section in {*old, *new} - {*_MEASURES} if old.get(section) != new.get(section)
    )
    whys = {"more": more, "less": less, "different": different}
    why = "; ".join(f"{what}: {', '.join(each)}" for what, each in whys.items() if each)
    is_better = less and not more and _SAME.isdisjoint(different)
    return "better" if is_better else "update", why or "the same numbers, said in another way"


def _numbers(record: Record) -> dict[str, int]:
    """Every measure by name; `temporaries: 5,120 bytes` is 5120."""
    found: dict[str, int] = {}
    for section in _MEASURES:
        for line in record.get(section, []):
            key = f"{section}, {line.partition(':')[0]}"
            if section == "temporaries":
                key = section
            elif section == "traffic" and not line.startswith("bytes"):
                key = "collectives"
            number = _NUMBER.search(line)
            assert number is not None, line
            num = int(number.group(1).replace(",", "")) * int(number.group(2) or 1)
            found[key] = found.get(key, 0) + num
    return found
