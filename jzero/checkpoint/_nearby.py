# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is that a path does not name: what is around it, for the message."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from jzero._errors import first_of, named
from jzero.checkpoint import _seal
from jzero.checkpoint._orbax import NOTES, TREE

_LOOKED_AT = 200  # entries of a directory
_SHOWN = 6


def advice(path: Path) -> str:
    """What to name instead of a path where no checkpoint is, by what is around it."""
    try:
        return _advice(Path(os.path.normpath(path)))
    except OSError:
        return "Correct the path."


def step_of(path: Path) -> Path | None:
    """The step that a path is, or is inside of: what has a directory of steps above it."""
    return next((each for each in (path, *path.parents) if _is_step(each)), None)


def _advice(path: Path) -> str:
    there = next(each for each in (path, *path.parents) if each.is_dir())
    if (step := step_of(there)) and step != path:
        return f"It is inside of the step {step}: name that."
    if steps := _steps_in(there):
        wanted = int(path.name) if path.parent == there and path.name.isdecimal() else steps[-1]
        near = sorted(sorted(steps, key=lambda step: abs(step - wanted))[:_SHOWN])
        more = f" of {len(steps)}" * (len(steps) > len(near))
        which = "step" if len(steps) == 1 else "steps"
        return f"{there} has the {which} {', '.join(map(str, near))}{more}: name one, or {there}."
    names = [entry.name for entry in _entries(there)]
    others = [name for name in names if name != path.name]
    close = difflib.get_close_matches(path.name, others, 1) if path.parent == there else []
    if close:
        return f"Did you mean {there / named(close[0])}?"
    if found := list(itertools.islice(_checkpoints_in(there), _SHOWN)):
        return f"Checkpoints are in {', '.join(map(str, found))}."
    if not names:
        return f"{there} is empty."
    return f"Correct the path; {there} has {first_of([*map(named, names)], _SHOWN)}."


def _entries(directory: Path) -> list[Path]:
    return sorted(itertools.islice(directory.iterdir(), _LOOKED_AT))


def _steps_in(directory: Path) -> list[int]:
    return sorted(
        int(path.name) for path in _entries(directory) if path.name.isdecimal() and _is_step(path)
    )


def _is_step(path: Path) -> bool:
    return (path / _seal.NAME).is_file() or ((path / NOTES).is_file() and path.name.isdecimal())


def _checkpoints_in(directory: Path) -> Iterator[Path]:
    """Checkpoints and directories of steps among the entries of a directory, and among theirs."""
    folders = [path for path in _entries(directory) if path.is_dir()]
    below = [path for folder in folders for path in _entries(folder) if path.is_dir()]
    for path in (*folders, *below):
        if (path / TREE).is_file() or _steps_in(path):
            yield path
