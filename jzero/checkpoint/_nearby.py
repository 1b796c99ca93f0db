# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is that a path does not name: what is around it, for the message."""

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
    """What to name instead of a path where no checkpoint is: what is in the nearest directory."""
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
    """The step that a path is, or is inside of: what has a directory of steps above it."""
    return next((each for each in (path, *path.parents) if _is_step(each)), None)


def _is_step(path: Path) -> bool:
    return (path / _seal.NAME).is_file() or ((path / NOTES).is_file() and path.name.isdecimal())
