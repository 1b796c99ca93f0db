"""What changed in a row, and whether that is better."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
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
_NUMBER = re.compile(r"(\d[\d,]*)(?: bytes| us)?(?: x (\d+))?(?: in each turn)?$")


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


def between_engines(old: Record, new: Record, axes: Mapping[str, int]) -> Verdict:
    """The verdict on a row that another engine ran than stored it.

    Its word is 'equal', 'better' or 'worse' (by the bytes that reach a device over each axis, the number of
    collectives, and temporaries: whatever is more is worse), 'falls back' (the stored engine ran it),
    'refused' (by both), 'differs' (in values, layouts at rest, or refused by one) or 'fails'.
    """
    new = with_tolerance(old, new)
    if "failed" in new:
        return Verdict("fails", new["failed"][-1], "\n".join(new["failed"][-7:-1]))
    if "refused" in old and old["refused"] == new.get("refused"):
        return Verdict("refused", "", "")
    if new.get("engine", ["partitioned"]) != ["partitioned"]:
        return Verdict("falls back", "; ".join(new["engine"]), "")
    for section in ("refused", "values", "layouts at rest"):
        if old.get(section) != new.get(section):
            a, b = old.get(section, []), new.get(section, [])
            diff = difflib.unified_diff(a, b, "stored", "now", n=0, lineterm="")
            return Verdict("differs", section, "\n".join(diff))
    was, now = (_moved(record, axes) for record in (old, new))
    both = sorted({*was, *now})
    whys = [f"{key} {was[key]:,} -> {now[key]:,}" for key in both if was[key] != now[key]]
    word = "worse" if any(now[key] > was[key] for key in now) else "better" if whys else "equal"
    return Verdict(word, "; ".join(whys), "")


_EVENT = re.compile(r"( *)([a-z-]+)[^:]* over ([^:]+?)(?: along \d+)?: .*?([\d,]+) bytes")
_LOOP = re.compile(r"( *)(?:scan x (\d+)|while|cond[^:]*):")


def _moved(record: Record, axes: Mapping[str, int]) -> Counter[str]:
    """Of a row's program: bytes that reach a device over each axis, collectives, and temporaries.

    A `while` counts as one iteration, a `cond` as all of its branches.
    """
    found, loops = Counter[str](), list[tuple[int, int]]()
    for line in record.get("program", []):
        depth = len(line) - len(line.lstrip())
        loops = [loop for loop in loops if loop[0] < depth]
        if (loop := _LOOP.fullmatch(line)) is not None:
            loops.append((depth, int(loop.group(2) or 1)))
        elif (event := _EVENT.match(line)) is not None:
            _, op, over, nbytes = event.groups()
            times = math.prod(num for _, num in loops)
            found["collectives"] += times
            for axis, num in _received(op, over.split(", "), int(nbytes.replace(",", "")), axes):
                found[f"bytes over {axis}"] += num * times
    for line in record.get("temporaries", []):
        found["temporaries"] = int(line.split()[0].replace(",", ""))
    return found


def _received(
    op: str, over: list[str], nbytes: int, axes: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """As `jzero.ir._layout` counts: an all-reduce is a reduce-scatter and an all-gather."""
    nbytes *= 2 if op == "all-reduce" else 1
    over = [axis for axis in axes if axis in over]
    sizes = [axes[axis] for axis in over]
    for i, axis in enumerate(over):
        inner = math.prod(sizes[i + 1 :])
        yield axis, nbytes * (sizes[i] - 1) * inner // math.prod(sizes)


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
