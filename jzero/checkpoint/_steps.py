# SPDX-License-Identifier: Apache-2.0
"""Which steps in a directory are complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jzero import _json
from jzero._errors import CheckpointError, message, warn
from jzero.checkpoint import _seal
from jzero.checkpoint._orbax import NOTES, TREE
from jzero.checkpoint._seal import Broken

_said: set[tuple[str, str]] = set()  # Steps that are not whole, and why: each is said once.


def complete(directory: Path) -> list[int]:
    """The steps of a `Checkpointer` that are whole; of the others it says once what they lack.

    Raises:
      CheckpointError: it cannot be told, since something cannot be read now.
    """
    with _readable(directory):
        return sorted(step for step in _candidates(directory) if _is_whole(directory, step))


def damaged(directory: Path) -> list[int]:
    """The steps of a `Checkpointer` that are not whole."""
    return sorted({*_candidates(directory)} - {*complete(directory)})


def latest(directory: Path) -> int | None:
    """The last of them."""
    with _readable(directory):
        steps = sorted(_candidates(directory), reverse=True)
        return next((step for step in steps if _is_whole(directory, step)), None)


def check_whole(directory: Path) -> None:
    """That what a step's files say of it is there and can be read.

    Raises:
      Broken: it is not.
    """
    with _readable(directory):
        if directory.is_symlink():
            raise Broken("it is a link")
        if not directory.is_dir():
            raise Broken("it is no directory")
        if _seal.read(directory) is None:
            _check_unsealed(directory)


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """What cannot be read is not taken for what is not there."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(message(
            f"Checkpointer {directory}", f"could not be read: {type(error).__name__}: {error}",
            "Which of its steps are complete is not known.",
            "Check the path, its permissions, and the disk.")) from error  # fmt: skip


def _candidates(directory: Path) -> list[int]:
    """The numbers that names in a directory are."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    for name in names:
        if name.isdecimal() and not _is_step(name):
            _say(directory, name, "that is not how its number is written")
    return [int(name) for name in names if _is_step(name)]


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 20 and str(int(name)) == name


def _is_whole(directory: Path, step: int) -> bool:
    try:
        check_whole(directory / str(step))
    except Broken as error:
        _say(directory, str(step), str(error))
        return False
    except (CheckpointError, OSError):
        if os.path.lexists(directory / str(step)):
            raise
        return False  # It has just been removed.
    return True


def _say(directory: Path, name: str, reason: str) -> None:
    if (str(directory / name), reason) not in _said:
        _said.add((str(directory / name), reason))
        text = message(
            f"Checkpointer {directory}", f"{name} does not count as a step: {reason}",
            "What is not whole is left out.", "Look at it, and remove it.")  # fmt: skip
        warn(text)


def _check_unsealed(directory: Path) -> None:
    """Of a step without a seal, what every Orbax checkpoint has."""
    trees = [
        path for path in (directory / TREE, *sorted(directory.glob(f"*/{TREE}"))) if path.exists()
    ]
    if not trees:
        raise Broken(f"{TREE} is missing")
    for path in (*trees, directory / NOTES):
        with _seal.malformed_is_broken():
            found = _json.read("step", path, {}) if path.exists() else {}
        manifest = path.parent / "manifest.ocdbt"
        if found.get("use_ocdbt") and not (manifest.is_file() and manifest.stat().st_size):
            raise Broken(f"{manifest.relative_to(directory)} is missing")
