"""What changed in a row, and whether that is better."""

import difflib
import re
from typing import NamedTuple

from ._record import Record
from ._stored import text, with_tolerance

# The sections of numbers of which less is better; what the others say does not weigh.
_MEASURES = (
    "traffic",
    "bytes at rest",
    "host transfers",
    "rows moved",
    "temporaries",
    "compiled",
)
# The last number of a line: "sort: ranks of rows, 1,024 bytes x 3".
_NUMBER = re.compile(r"(\d[\d,]*)(?: bytes| us)?(?: x (\d+))?(?: in each turn)?$")


class Verdict(NamedTuple):
    """How a row changed.

    Attributes:
      word: 'better' (less of something that is measured and more of nothing), 'worse' (more of something,
        other values, or refused where it was not) or 'other'.
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
    if not old:
        return "other", "a new row"
    if "failed" in new:
        return "worse", "it fails"
    if "refused" in new and "refused" not in old:
        return "worse", "it is refused now"
    if "refused" in old and "refused" not in new:
        return "other", "it is no longer refused"
    a, b = _numbers(old), _numbers(new)
    changed = {key: (a.get(key, 0), b.get(key, 0)) for key in sorted({*a, *b})}
    more = [f"{key} {x:,} -> {y:,}" for key, (x, y) in changed.items() if y > x]
    less = [f"{key} {x:,} -> {y:,}" for key, (x, y) in changed.items() if y < x]
    different = sorted(
        section for section in {*old, *new} - {*_MEASURES} if old.get(section) != new.get(section)
    )
    whys = {"more": more, "less": less, "different": different}
    why = "; ".join(f"{what}: {', '.join(each)}" for what, each in whys.items() if each)
    if more or "values" in different:
        return "worse", why
    is_better = less and not {"refused", "warnings"} & {*different}
    return "better" if is_better else "other", why or "the same numbers, said in another way"


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
