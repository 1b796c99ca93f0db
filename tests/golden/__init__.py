"""The golden net: what jzero does with some 300 rows (a step, options, a mesh), as text that a person reads.

`rows` lists them and `_record` writes the text of one; `_large` has those of large models, which are traced
alone, or compiled for H200s. `_stored` keeps the texts in `stored/`, a file for each theme, and `_judge` says
what changed and whether it is better. `tests/run_golden.py` is the command.
"""

from collections.abc import Mapping

from ._judge import Verdict, compared
from ._large import H200, LARGE, compiled, sharded, traced
from ._record import NUM_STEPS, Record, record, values
from ._stored import FOLDER, read, with_tolerance, write
from .rows import ROWS, Row


def themes() -> dict[str, list[str]]:
    """The names of rows by theme, in the order of the tables."""
    found: dict[str, list[str]] = {}
    for row in ROWS.values():
        found.setdefault(row.theme, []).append(row.name)
    return found | {"large": [*LARGE]}


def recorded(theme: str, name: str) -> Record:
    """The record of a row."""
    if theme == "large":
        return traced(name)
    return compiled(name) if theme == "h200" else record(ROWS[f"{theme}: {name}"])


def axes_of(theme: str, name: str) -> Mapping[str, int]:
    """The axes of a row's mesh, and their sizes."""
    if theme in ("large", "h200"):
        return LARGE[name].axes
    row = ROWS[f"{theme}: {name}"]
    return {**row.axes, "model": row.model}


__all__ = [
    "FOLDER",
    "ROWS",
    "axes_of",
    "Row",
    "Verdict",
    "compared",
    "H200",
    "LARGE",
    "NUM_STEPS",
    "read",
    "recorded",
    "sharded",
    "themes",
    "values",
    "with_tolerance",
    "write",
]
