"""Which engine runs a step."""

import re
from typing import Any

from jzero.segments._partitioned import Partitioned


def why_not(step: Any) -> list[str]:
    """Why the partitioner does not run some programs of a step that was called; nothing if it runs all."""
    found = [each.step.found for each in step._programs.built.values()]
    whys = [
        "JZERO_PARTITION=0" if each is None else str(each)
        for each in found
        if not isinstance(each, Partitioned)
    ]
    return [*dict.fromkeys(whys)]


def without_line(why: str) -> str:
    """A reason without the line of the step."""
    return re.sub(r" at \S+:\d+\S*( \([^)]*\))?", "", why)
