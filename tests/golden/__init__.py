"""The golden net: what jzero does with some 200 rows (a step, options, a mesh), as text that a person reads.

`rows` lists them, `_record` writes the text of one, `_stored` keeps the texts in `stored/`, a file for each
theme, and `_judge` says what changed and whether it is better. `_h200` compiles 20 more for H200s.
`tests/run_golden.py` is the command.
"""

from ._judge import Verdict, compared
from ._record import record, values
from ._stored import FOLDER, read, with_tolerance, write
from .rows import ROWS, Row


def themes() -> dict[str, list[str]]:
    """The names of rows by theme, in the order of the table."""
    found: dict[str, list[str]] = {}
    for row in ROWS.values():
        found.setdefault(row.theme, []).append(row.name)
    return found


def h200() -> dict[str, list[str]]:
    """The same of the rows that are compiled for H200s."""
    from ._h200 import H200_ROWS  # Its models need Flax.

    return {"h200": [*H200_ROWS]}


__all__ = [
    "FOLDER",
    "ROWS",
    "Row",
    "Verdict",
    "compared",
    "h200",
    "read",
    "record",
    "themes",
    "values",
    "with_tolerance",
    "write",
]
