# SPDX-License-Identifier: Apache-2.0
"""Messages about differences between processes."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence

from jzero._errors import message

# What a process is about to start: lines by heading, the most telling heading first.
Sections = Mapping[str, Sequence[str]]
# This heading differs whenever another one does.
PROGRAM = "program"
# Lines on the state's leaves; those under STATE say more, once a program is built.
SHAPES, STATE = "shapes of the state", "state"
RULE = "All processes run one program on the same shapes; only the rows of the batch are their own."


def named(processes: Sequence[int]) -> str:
    """`processes 0, 2, 3`."""
    shown = ", ".join(map(str, processes[:4]))
    more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
    return f"process{'es' * (len(processes) > 1)} {shown}{more}"


def before_a_call(who: str, unlike: Sequence[Sequence[int]], texts: Sequence[Sections]) -> str:
    """The message about two groups of processes that are about to start different things."""
    return message(
        who, _lines(unlike, texts), RULE,
        "Start them from the same code, configuration and versions.",
        things="comparisons of processes")  # fmt: skip


def in_a_call(
    who: str, call: int, unlike: Sequence[Sequence[int]], texts: Sequence[Sections]
) -> str:
    """The message about two groups of processes that have started different things."""
    common = [{name: text[name] for name in texts[0] if name in texts[1]} for text in texts]
    lines = _lines(unlike, common if common[0] != common[1] else texts)
    return message(
        who, [f"call {call}: {line}" for line in lines], RULE,
        "Pass batches of the same shapes, in the same order, on all processes: drop or pad the remainder on "
        "all of them. Continue from the last checkpoint.",
        things="comparisons of processes")  # fmt: skip


def pack(sections: Sections) -> bytes:
    return zlib.compress(json.dumps(sections).encode())


def unpack(packed: bytes) -> Sections:
    return json.loads(zlib.decompress(packed))


def _lines(unlike: Sequence[Sequence[int]], texts: Sequence[Sections]) -> list[str]:
    """For each heading the first line that differs."""
    found = {}
    for heading in dict.fromkeys([*texts[0], *texts[1]]):
        columns = [text.get(heading, []) for text in texts]
        for lines in itertools.zip_longest(*columns, fillvalue="nothing"):
            if lines[0] != lines[1]:
                told = [f"{line.strip():.200} on {named(group)}"
                        for line, group in zip(lines, unlike, strict=True)]  # fmt: skip
                found[heading] = f"{heading}: {', '.join(told)}"
                break
    if STATE in found:
        found.pop(SHAPES, None)
    if len(found) > 1:
        found.pop(PROGRAM, None)
    return list(found.values())
