# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is that a path does not name: what is around it, for the message."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from jzero._errors import first_of, named
from jzero.checkpoint import _seal
from jzero.checkpoint._orbax import NOTES, TREE

_LOOKED_AT = 200  # entries of a directory
_SHOWN = 6


def advice(path: Path) -> str:
    """What to name instead of a path where no checkpoint is, by what is around it."""
    path = Path(os.path.normpath(path))
    try:
        there = next(each for each in (path, *path.parents) if each.is_dir())
        if (step := step_of(there)) and step != path:
            return f"It is inside of the step {step}: name that."
        if steps := _steps_in(there):
            which = "steps" if len(steps) > 1 else "step"
            shown = ", ".join(map(str, steps[-_SHOWN:]))
            return f"{there} has the {which} {shown}: name one, or {there}."
        entries = _entries(there)
        below = [entry for folder in entries if folder.is_dir() for entry in _entries(folder)]
        folders = [folder for folder in (*entries, *below) if folder.is_dir()]
        if found := [str(x) for x in folders if (x / TREE).is_file() or _steps_in(x)]:
            return f"Checkpoints are in {first_of(found, _SHOWN)}."
    except OSError:
        return "Correct the path."
    has = f"has {first_of([named(entry.name) for entry in entries], _SHOWN)}"
    return f"Correct the path; {there} {has}." if entries else f"{there} is empty."


def step_of(path: Path) -> Path | None:
    """The step that a path is, or is inside of: what has a directory of steps above it."""
    return next((each for each in (path, *path.parents) if _is_step(each)), None)


def _entries(directory: Path) -> list[Path]:
    return sorted(itertools.islice(directory.iterdir(), _LOOKED_AT))


def _steps_in(directory: Path) -> list[int]:
    steps = (x.name for x in _entries(directory) if x.name.isdecimal() and _is_step(x))
    return sorted(map(int, steps))


def _is_step(path: Path) -> bool:
    return (path / _seal.NAME).is_file() or ((path / NOTES).is_file() and path.name.isdecimal())
