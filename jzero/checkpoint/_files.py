# SPDX-License-Identifier: Apache-2.0
"""Files that outlive a power cut, and directories that exist wholly or not at all.

A file's bytes are on the disk after `fsync` of the file, its name after `fsync` of the directory it is in.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jzero._errors import OptionError, message, named
from jzero._json import NotRegular

# Of a directory that is being written or removed; Orbax, too, takes such a one for unfinished.
UNFINISHED = ".orbax-checkpoint-tmp"
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def local(who: str, path: Any) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise OptionError(message(
            who, f"the path is {path!r:.80}", "It is a string or a pathlib.Path.", "Name a directory."
        ))  # fmt: skip
    return Path(path).expanduser().absolute()


def kind(path: Path) -> str:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return "nothing"
    known = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link",
             stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}  # fmt: skip
    return known.get(stat.S_IFMT(mode), "a device")


def files_below(directory: Path) -> Iterator[Path]:
    """The files in a directory and below, among them links to files, as Hugging Face's cache has them.

    Anything else is `NotRegular`: to open a pipe would wait for a writer, to read a device might never end,
    and a link to a directory may lead anywhere.
    """
    folders = [directory]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file():
                    yield path
                else:
                    where = " to no file" * entry.is_symlink()
                    found = f"{named(str(path.relative_to(directory)))} is {kind(path)}{where}"
                    raise NotRegular(errno.EINVAL, found)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # by a file system that cannot do so for directories
            raise
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def make_directory(directory: Path) -> None:
    """Makes a directory and those around it, if they do not exist, and syncs them."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def unfinished(final: Path) -> Path:
    """Where the directory is written that is to become `final`."""
    return final.with_name(final.name + UNFINISHED)


def publish(final: Path) -> None:
    """Gives what was written, and synced, in `unfinished(final)` its final name, and syncs that."""
    os.rename(unfinished(final), final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Removes a directory; an interrupted removal leaves nothing that looks like it."""
    trash = directory.with_name(f"{directory.name}.removed{UNFINISHED}")
    discard(trash)
    os.rename(directory, trash)
    sync(directory.parent)
    discard(trash)


def discard(path: Path) -> None:
    """Removes whatever is there; not what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def try_lock(fd: int) -> bool | None:
    """Whether this process locked an open file or directory; None on a file system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
