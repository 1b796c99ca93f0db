# SPDX-License-Identifier: Apache-2.0
"""Whether a state continues the files of a folder, replaces them, has new ones made, or is refused.

[Note: folders] Each process P has the files of state N in `process-P/state-N`. A folder there is in one of
these states, and goes from one to the next only as the arrows say::

    (nothing) -> state-N.making    files are made in it, exclusively; nobody else ever looks into it
    state-N.making -> state-N      when every file of every process has two intact, synced header pages
    state-N: unfinished            no step is complete yet: pages say "empty", then one "writing"
    state-N: a state               after the first commit a page of each file says "complete", for good
    state-N -> state-N.aside-K     if it is unfinished, and a new `state-N` is about to take its place

A kill leaves any of these states. The next start removes `state-N.making`. It puts an unfinished `state-N`
aside, once all processes have looked, if the pages of all files are intact: those of one file say "complete"
nowhere, which proves that the first step was never complete in all files of all processes, so that no state
was ever returned. All else is kept. A folder with a damaged header, without steps that all files have, of
another version or another program counts neither as empty nor as a state of some step.

A kill between the renames of two processes leaves `state-N` unfinished in one and `state-N.making` in the
other, which counts as unfinished, too. No process completes a step before all have renamed.

[Note: writes] What is on the devices, or comes from a checkpoint, belongs to one commit to the files: a
`Write`. Its random id is drawn when files are made, and again whenever they are resumed, by one process for
all. So a run that resumes step t, and writes another t+1 than an earlier run has written, or than a run in a
copy of the folder writes, has another `Write` for it. Headers and checkpoints store it, and files are resumed
at the very `Write` of the rest of the state, in whichever slot it is, or not at all.

Held by tests/test_nvme_folders.py, which damages every bit of every header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jzero._json import Malformed
from jzero.offload.nvme import _header
from jzero.offload.nvme._header import COMPLETE, WRITING, Header, Write

# What a state of this process has to do with a folder.
FOREIGN, MADE, RESUMED, GONE = "", "made", "resumed", "gone"
_KEPT = "Nothing was overwritten."
PathOf: TypeAlias = Callable[[int, int], Path]


class Folder(NamedTuple):
    """What one process has found in a `state-N`, in which there are files."""

    # A live state of this process has `MADE` or `RESUMED` the files; or it made them and is `GONE`; or they
    # are `FOREIGN`.
    use: str = FOREIGN
    problem: str = ""  # why they are neither of a step nor unfinished; '' otherwise
    writes: tuple[Write, ...] = ()  # the commits that all files have
    last: int = -1  # the newest step in any file; -1 if there is none
    # Whether the pages of a file say that the first step was never complete.
    unfinished: bool = False
    intact: bool = True  # whether all pages are
    runs: tuple[str, ...] = ()  # the ids in all pages

    @classmethod
    def of_json(cls, value: Sequence[Any]) -> Folder:
        use, problem, writes, last, unfinished, intact, runs = value
        found = tuple(Write(*x) for x in writes)
        return cls(use, problem, found, last, unfinished, intact, tuple(runs))


class GivenWrites(NamedTuple):
    """The commit of each leaf of a state that is to be placed; None for a leaf without one."""

    # Leaves that do not go into files, by path; all leaves if all do.
    rest: Mapping[str, Write | None]
    files: Sequence[Write | None] = ()  # leaves that go into files

    @property
    def write(self) -> Write | None:
        """The commit that all of the rest belongs to."""
        found = {*self.rest.values()}
        return found.pop() if len(found) == 1 else None

    @property
    def is_partial(self) -> bool:
        """Whether leaves that go into files are not of the commit of the rest: these are not given."""
        of_rest = {*self.rest.values()} - {None}
        return bool(of_rest) and not {*self.files} <= of_rest


class Choice(NamedTuple):
    number: int = 0  # of the folder
    # The commit at which its files are resumed; None if new ones are made.
    write: Write | None = None
    replaces: bool = False  # whether these take the place of others
    refusal: tuple[list[str], str, str] | None = None  # what was found, the rule, and what to do


def judge(files: Mapping[str, Sequence[bytes]]) -> Folder:
    """What the header pages of all files of a folder say together; files that are too short have fewer."""
    found = {name: [_unpacked(page) for page in pages] for name, pages in files.items()}
    problems = [f"{name} {text}" for name, pages in found.items() if (text := _problem(pages))]
    intact = [[page for page in pages if isinstance(page, Header)] for pages in found.values()]
    each = [{page.write for page in pages if page.state == COMPLETE} for pages in intact]
    writes = sorted(set.intersection(*each)) if each else []
    # Damage in one page of two slots leaves what the other one says.
    bad = [problem for problem in problems if not writes or not problem.endswith(_HALF)]
    unfinished = not problems and not all(each)
    if not writes and not unfinished and not bad:
        bad = ["its files have no step that all of them have"]
    return Folder(
        problem="; ".join(bad), writes=() if bad else tuple(writes), unfinished=unfinished,
        last=max((write.step for file in each for write in file), default=-1),
        intact=not problems, runs=tuple(sorted({page.run for pages in intact for page in pages})),
    )  # fmt: skip


_HALF = "has a damaged header"


def _unpacked(page: bytes) -> Header | int | None:
    try:
        return _header.checked(np.frombuffer(page, np.uint8))
    except Malformed:
        return None


def _problem(pages: Sequence[Header | int | None]) -> str:
    """What is wrong with a file; '' if nothing is."""
    versions = [page for page in pages if isinstance(page, int)]
    if versions:
        return f"has version {max(versions)} of the format, and not {_header.VERSION}"
    intact = [page for page in pages if isinstance(page, Header)]
    if not intact:
        return "has no intact header"
    if len(intact) < 2 and intact[0].slots == 1:
        return "has a damaged header, which may have said that its tiles are of two steps"
    if len(intact) < 2:
        return _HALF
    newest = max(intact, key=lambda page: page.generation)
    if newest.slots == 1 and newest.state == WRITING and any(x.state == COMPLETE for x in intact):
        return f"is dirty: its run ended while step {newest.step} was written over the step before"
    return ""


def decide(
    found: Sequence[Mapping[int, Folder]], path: PathOf, resume: bool, wanted: GivenWrites
) -> Choice:
    """What all processes do, each of which decides by the same facts.

    `found` has, of each process, the folders by their numbers; `path` is what messages call a folder, by
    process and number; `wanted` is the commit of the state that is placed.
    """
    numbers = sorted({number for folders in found for number in folders})
    of = {number: [folders.get(number) for folders in found] for number in numbers}
    if resume:
        for number in numbers:
            if wanted.write and all(_has(folder, wanted.write) for folder in of[number]):
                return Choice(number, wanted.write)
        if obstacles := [number for number in numbers if _is_kept(of[number])]:
            return Choice(refusal=_not_resumed(of, obstacles, path, wanted))
        if wanted.is_partial:
            return Choice(refusal=_nowhere(path, wanted))
    for number in range(len(numbers) + 1):
        folders = [folder for folder in of.get(number, ()) if folder]
        if any(folder.use in (MADE, RESUMED) for folder in folders):
            continue
        foreign = [folder for folder in folders if folder.use == FOREIGN]
        if foreign and not _may_go(folders):
            return Choice(refusal=_there(of[number], number, path))
        return Choice(number, replaces=bool(foreign))
    raise AssertionError


def _has(folder: Folder | None, write: Write) -> bool:
    return folder is not None and folder.use in (FOREIGN, GONE) and write in folder.writes


def _is_kept(folders: Sequence[Folder | None]) -> bool:
    """Whether files are there that a state that is resumed could have meant."""
    there = [folder for folder in folders if folder]
    if any(folder.use == RESUMED for folder in there):
        return True
    return not any(folder.use == MADE for folder in there) and not _may_go(there)


def _may_go(folders: Sequence[Folder]) -> bool:
    """Whether these files belong to no state that was returned, or to a dropped one; see [Note: folders]."""
    if not all(folder.intact and not folder.problem for folder in folders):
        return False
    if all(folder.use == GONE and folder.last <= 0 for folder in folders):
        return True
    if not any(folder.unfinished for folder in folders):
        return False
    # Starts that were killed one after the other leave files of several runs, all without a step.
    runs = {run for folder in folders for run in folder.runs}
    last = max(folder.last for folder in folders)
    return last == -1 or (last == 0 and len(runs) == 1)


def _not_resumed(
    of: Mapping[int, Sequence[Folder | None]], obstacles: Sequence[int], path: PathOf, wanted: GivenWrites
) -> tuple[list[str], str, str]:  # fmt: skip
    found = []
    for number in obstacles:
        for process, folder in enumerate(of[number]):
            if folder is not None:
                found.append(_said(path(process, number), folder))
    given = _given(wanted)
    rule = (
        "With resume=True files and the rest of the state are of one step, by an id in both; steps count "
        f"from when the files were made. {_KEPT}"
    )
    changed = wanted.write is None and any(wanted.rest.values())
    return found, f"{given[0].upper()}{given[1:]}. {rule}", (
        "Restore a checkpoint that jzero.Checkpointer has saved of that step, and pass what restore "
        f"returned{_TO_CHANGE if changed else '.'} To start from this state, use another path, or remove "
        "the folder of each process."
    )  # fmt: skip


_TO_CHANGE = (
    "; to change leaves of it first, call train_step.plan(state, batch) before restore, which then resumes "
    "the files itself."
)


def _said(path: Path, folder: Folder) -> str:
    if folder.use == RESUMED:
        return (
            f"a state of this process goes on with {path}, and there are no others to go on with, unless it "
            "is let go of (an exception that is kept keeps it, too)"
        )
    if folder.problem:
        return f"{path}: {folder.problem}"
    if folder.unfinished:
        return f"{path} has no complete step"
    return f"{path} has {_listed(folder.writes)}"


def _listed(writes: Sequence[Write]) -> str:
    of = {run: [write for write in writes if write.run == run] for run in {x.run for x in writes}}
    return " and ".join(
        f"step{'s' * (len(x) > 1)} {' and '.join(str(w.step) for w in x)} of run {run[:8]}"
        for run, x in sorted(of.items(), key=lambda item: item[1])
    )


def _given(wanted: GivenWrites) -> str:
    if write := wanted.write:
        return f"the rest of the state is of {write}"
    without = [path for path, write in wanted.rest.items() if write is None]
    if len(without) == len(wanted.rest):
        return "the rest of the state is of no step of files: it comes from no checkpoint of such a state"
    if without:
        more = f" and {len(without) - 3} more" if len(without) > 3 else ""
        return f"{', '.join(without[:3])}{more} are not of the step of other leaves stored outside files"
    each = sorted({write for write in wanted.rest.values() if write})
    return f"leaves of the rest of the state are of {_listed(each)}"


def _nowhere(path: PathOf, wanted: GivenWrites) -> tuple[list[str], str, str]:
    where = path(0, 0).parent
    found = f"{_given(wanted)}, and what goes into files is not; its files are not in {where}"
    return [found], "What a checkpoint does not have comes from the files that it was saved beside.", (
        "Correct the path, or restore a checkpoint that has all leaves."
    )  # fmt: skip


def _there(
    folders: Sequence[Folder | None], number: int, path: PathOf
) -> tuple[list[str], str, str]:
    found = [
        _said(path(process, number), folder) for process, folder in enumerate(folders) if folder
    ]
    return found, f"A run starts with files of its own. {_KEPT}", (
        "Use resume=True to go on with a step of a training, remove the folder of each process, or use "
        "another path."
    )  # fmt: skip
