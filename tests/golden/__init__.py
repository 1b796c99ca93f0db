"""The golden net: what jzero does with some 200 rows (a step, options, a mesh), as text that a person reads.

`rows` lists them, `_record` writes the text of one, `_stored` keeps the texts in `stored/`, a file for each
theme, and `_judge` says what changed and whether it is better. `tests/run_golden.py` is the command.
"""

from ._judge import Verdict, compared
from ._record import record, values
from ._stored import FOLDER, read, with_tolerance, write
from .rows import ROWS, Row

__all__ = [
    "FOLDER",
    "ROWS",
    "Row",
    "Verdict",
    "compared",
    "read",
    "record",
    "values",
    "with_tolerance",
    "write",
]
