"""A disk in a file, whose power can be cut: then it has what was synced, and nothing else.

It is an ext4 file system on a loop device. What a process writes stays in the cache of the mounted file
system until somebody syncs it, or for some seconds; only then does the loop device write it to the file.
So a copy of the file is the disk after a cut, as far as the disk itself has no cache. Mounting the copy
replays its journal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from ._children import Children
from ._library import Fault
from ._scenarios import SAVED, Scenario, judge_steps

_SIZE, _JOURNAL = "32M", "size=4"
# The journal is committed by a sync only. Pages that are written stay in memory for 30 seconds at least, by
# the kernel's default (vm.dirty_expire_centisecs), which is longer than a disk is mounted here.
_OPTIONS = "loop,commit=300,noatime"


@functools.cache
def why_no_disk() -> str | None:
    """Why there are no disks to be cut on this machine; None if there are."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if missing := [tool for tool in ("mkfs.ext4", "mount", "umount") if _tool(tool) is None]:
        return f"no {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        try:
            make_disk(path / "disk")
            with mounted(path / "disk", path / "at"):
                return None
        except subprocess.CalledProcessError as error:
            return f"{error.cmd[0]} is not permitted: {error.stderr.strip()}"


def make_disk(image: pathlib.Path) -> None:
    """An empty file system in the file `image`."""
    with image.open("wb") as file:
        file.truncate(int(_SIZE[:-1]) * 2**20)
    _run("mkfs.ext4", "-q", "-F", "-J", _JOURNAL, "-E", "lazy_itable_init=0", str(image))


@contextlib.contextmanager
def mounted(image: pathlib.Path, at: pathlib.Path) -> Iterator[pathlib.Path]:
    """The directory `at`, where the disk is mounted."""
    at.mkdir(exist_ok=True)
    _run("mount", "-o", _OPTIONS, str(image), str(at))
    try:
        yield at
    finally:
        _run("umount", str(at))


def copy(image: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """Copies a disk; one that is mounted, as it is after a cut: nobody may be writing."""
    _run("cp", "--sparse=always", "--reflink=never", str(image), str(to))
    return to


def steps_after_cut(
    children: Children, scenario: Scenario, disk: pathlib.Path, folder: pathlib.Path, fault: Fault
) -> list[str]:
    """Runs saves on a copy of a disk, and cuts its power at a fault; the promises that were broken then."""
    image, at = copy(disk, folder / "image"), folder / "at"
    with mounted(image, at) as root:
        script = f"faults._scripts:{scenario.script}"
        ended = children.run(script, root=str(root), fault=fault, **scenario.arguments)
        after = copy(image, folder / "after")
    complete = [said["complete"] for said in ended.said if "complete" in said]
    with mounted(after, at) as root:
        return judge_steps(children, root, max([*SAVED, *complete]))


def disk_with_steps(children: Children, scenario: Scenario, folder: pathlib.Path) -> pathlib.Path:
    """A disk with what is there before the script of a scenario."""
    make_disk(folder / "disk")
    with mounted(folder / "disk", folder / "at") as root:
        scenario.prepare(children, root)
    return folder / "disk"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _run(name: str, *arguments: str) -> None:
    command = [_tool(name) or name, *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
