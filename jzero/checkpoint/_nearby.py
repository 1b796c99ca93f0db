# SPDX-License-Identifier: Apache-2.0
"""What is near a path without a checkpoint, for the message."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from jzero._errors import first_of, named
from jzero.checkpoint import _seal
from jzero.checkpoint._orbax import NOTES

_LOOKED_AT = 200  # entries of a directory
_SHOWN = 6


def advice(path: Path) -> str:
    """What to name instead of a path without a checkpoint: what is in the nearest directory."""
    path = Path(os.path.normpath(path))
    try:
        there = next(each for each in (path, *path.parents) if each.is_dir())
        if (step := step_of(there)) and step != path:
            return f"It is inside of the step {step}: name that."
        entries = itertools.islice(there.iterdir(), _LOOKED_AT)
        names = sorted((named(entry.name) for entry in entries), key=lambda x: (len(x), x))
    except OSError:
        return "Correct the path."
    return f"Correct the path; {there} {f'has {first_of(names, _SHOWN)}' if names else 'is empty'}."


def step_of(path: Path) -> Path | None:
    for each in (path, *path.parents):
        if (each / _seal.NAME).is_file() or ((each / NOTES).is_file() and each.name.isdecimal()):
            return each
    return None
