# SPDX-License-Identifier: Apache-2.0
"""Looks for folders of files, makes them, and puts them aside; see [Note: folders] in `_folders.py`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jzero._errors import JzeroError, OptionError, StateError, message, warn
from jzero._quantities import readable_bytes
from jzero.offload.nvme import _folders
from jzero.offload.nvme._about import FileSpec
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._file import TileFile, header_pages
from jzero.offload.nvme._folders import Folder
from jzero.offload.nvme._tile_layout import WHO

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SUFFIX = ".tiles"  # of every file of ours
_MAKING = ".making"
NAME = re.compile(r"state-(0|[1-9]\d{0,8})")


def folders(base: Path) -> list[tuple[int, Path]]:
    """The folders of states of one process, by number; raises an `OptionError` if they cannot be listed."""
    try:
        names = os.listdir(base)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OptionError(message(
            WHO, f"{base} cannot be read: {error.strerror}", "Files of an earlier run may be there.",
            "Use another path."))  from error  # fmt: skip
    found = [(match, base / name) for name in names if (match := NAME.fullmatch(name))]
    return [(int(match[1]), path) for match, path in found]


def look(folder: Path) -> Folder | None:
    """What is in a folder; None if no files of ours are. It raises nothing: others are told first."""
    if not folder.is_dir() or folder.is_symlink():
        return Folder(problem="it is no folder", intact=False)
    found: dict[str, Sequence[bytes]] = {}
    try:
        for path in _tiles_in(folder):
            with contextlib.closing(DirectFile(path)) as file:
                # One that was cut has no intact header.
                cut = file.size < 2 * len(_EMPTY)
                found[path.name] = (
                    [_EMPTY] * 2 if cut else [x.tobytes() for x in header_pages(file)]
                )
    except (JzeroError, OSError) as error:
        return Folder(problem=str(error).removeprefix(f"{WHO}: ").rstrip("."), intact=False)
    return _folders.judge(found) if found else None


_EMPTY = bytes(4096)


def _tiles_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIX))


def _regular_in(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in _tiles_in(folder) if stat.S_ISREG(path.lstat().st_mode)]


def make(
    folder: Path, specs: Mapping[str, FileSpec], in_place: bool, run: str,
    ready: Callable[[], None],
) -> list[TileFile]:  # fmt: skip
    """Makes the files of a folder, and those around it; reserves their space; puts aside what is there.

    If it fails, it leaves nothing of its own. `ready` returns when all processes have made theirs. Raises an
    `OptionError` if there is no room, or another run makes files there.
    """
    making, made = folder.with_name(folder.name + _MAKING), list[TileFile]()
    with contextlib.ExitStack() as undo, _named(folder, made):
        for path in reversed([path for path in folder.parents if not path.exists()]):
            path.mkdir(mode=0o700, exist_ok=True)
            undo.callback(_remove_folder, path)
            sync_folder(path.parent)
        clear(making)
        making.mkdir(mode=0o700)
        undo.callback(_remove_folder, making)
        for name, spec in specs.items():
            new = DirectFile(making / name, create=True)
            undo.callback(new.close)
            undo.callback(new.path.unlink, missing_ok=True)
            made.append(TileFile(new, spec, in_place, run))
        for file in made:  # The space of all, before any is filled.
            file.file.resize(file.size)
        for file in made:
            file.make()
        sync_folder(making)
        ready()
        if os.path.lexists(folder):
            put_aside(folder)
        os.rename(making, folder)
        undo.callback(_remove_folder, folder)
        for file in made:
            file.file.path = folder / file.path.name
            undo.callback(file.path.unlink, missing_ok=True)
        sync_folder(folder.parent)
        undo.pop_all()
    return made


def put_aside(folder: Path) -> None:
    """Gives a folder another name, and warns with it, unless it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        return
    with contextlib.ExitStack() as held:
        for path in _regular_in(folder):
            held.enter_context(contextlib.closing(DirectFile(path)))  # No other run has it.
        names = (folder.with_name(f"{folder.name}.aside-{k}") for k in itertools.count())
        aside = next(name for name in names if not os.path.lexists(name))
        # First, since filters may make it an error.
        warn(message(
            WHO, f"{folder} is there, without a complete step, and gets the name {aside.name}",
            "Its run ended before its first step was complete.", "Remove it when you do not need it."
        ))  # fmt: skip
        os.rename(folder, aside)
    sync_folder(folder.parent)


def clear(folder: Path) -> None:
    """Removes what a killed start has left of our files, and the folder; else puts it aside."""
    for path in _regular_in(folder):
        with contextlib.closing(DirectFile(path)):
            path.unlink()
    if os.path.lexists(folder):
        put_aside(folder)


def remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    _remove_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes the names of the files survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # Another process of the run has its files there.
        path.rmdir()


@contextlib.contextmanager
def _named(folder: Path, made: Sequence[TileFile]) -> Iterator[None]:
    """If the system refuses to make files, says what was needed, and what there was."""
    disk = None
    try:
        disk = os.statvfs(next(path for path in [folder, *folder.parents] if path.exists()))
        yield
    except (OSError, StateError) as error:
        cause = error.__cause__ if isinstance(error, StateError) else error
        if not isinstance(cause, OSError):
            raise
        if cause.errno not in _NO_ROOM or disk is None:
            raise OptionError(message(
                WHO, f"files cannot be made in {folder}: {cause.strerror}",
                "State is kept in files in this folder. Nothing was left behind.", "Use another path.",
            )) from error  # fmt: skip
        free, needed = disk.f_bavail * disk.f_frsize, sum(file.size for file in made)
        old = f"Remove {folder}, which has no complete step, or make" if folder.exists() else "Make"
        raise OptionError(message(
            WHO, f"{len(made)} files in {folder} need {needed} bytes ({readable_bytes(needed)}), and "
            f"{free} ({readable_bytes(free)}) are free: {cause.strerror}",
            "All of their space is reserved before the first step. Nothing was left behind.",
            f"{old} room, shard over more hosts, or use in_place=True, which needs half.",
        )) from error  # fmt: skip
