# SPDX-License-Identifier: Apache-2.0
"""`CallLog`: the calls of a process on a mesh of several processes; and where such logs differ.

All processes make the same calls in one order, so that logs can be compared call by call, as far as they go.
A log has an entry only where a call differs from the one before it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RUNS = "runs"  # All processes have agreed on it earlier.
MEETS = "meets"  # They agreed on it just before this call.
WAITS = "waits"  # It waits for the others to agree.
FAILS = "fails"  # It raised before it ran.
ENDS = "ends"  # No call: the process makes no more.
# Changes that are kept while some process has not come to them.
_MOST_ENTRIES = 4096


@dataclasses.dataclass
class Entry:
    """A call that differs from the one before it; calls until the next entry are like it."""

    call: int  # its number, from 1
    kind: str  # one of those above
    name: str  # of what is called, or a digest of its description


@dataclasses.dataclass(frozen=True)
class Copy:
    """A log as another process reads it."""

    calls: int
    entries: list[Any]  # `[call, kind, name]` of each entry

    def between(self, after: int, until: int) -> list[Any]:
        """Entries of calls in (after, until]."""
        return [entry for entry in self.entries if after < entry[0] <= until]


class CallLog:
    def __init__(self) -> None:
        self.calls = 0  # including the current one
        self.name: str | None = None  # of the last call; None if it is not agreed on yet
        self.history = ""  # digest of all completed calls
        self.meets_from = 0  # the first call before which another meeting takes little time
        self._entries: collections.deque[Entry] = collections.deque(maxlen=_MOST_ENTRIES)

    def runs(self, name: str) -> None:
        """Logs a call of something that all processes know."""
        if name != self.name:
            self._append(Entry(self.calls + 1, RUNS, name))
            self._remember(self.calls + 1, name)
        self.calls += 1

    def waits(self, name: str) -> Entry:
        """Logs a call that all processes have to agree on; `settle` completes it."""
        entry = Entry(self.calls + 1, WAITS, name)
        self._append(entry)
        self.name = None
        self.calls += 1
        return entry

    def ends(self, name: str) -> None:
        """Logs, in place of the next call, that there is none."""
        self._append(Entry(self.calls + 1, ENDS, name))
        self.calls += 1

    def settle(self, entry: Entry, kind: str, name: str) -> None:
        """Completes a call that had to be agreed on."""
        entry.kind, entry.name = kind, name
        self.name = name if kind == MEETS else None
        self._remember(entry.call, name if kind == MEETS else FAILS)

    def forget(self, call: int) -> None:
        """Drops entries up to a call up to which all processes are alike."""
        while len(self._entries) > 1 and self._entries[1].call <= call:
            self._entries.popleft()

    def copy(self) -> Copy:
        """A consistent copy while another thread may be writing."""
        calls = self.calls
        entries = [entry for entry in self._entries.copy() if entry.call <= calls]
        return Copy(calls, [[entry.call, entry.kind, entry.name] for entry in entries])

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.name = entry.name

    def _remember(self, call: int, name: str) -> None:
        text = f"{self.history} {call} {name}"
        self.history = hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A call that is not the same on all processes."""

    call: int
    # names of what was called, and the processes that called it; the fewest first
    groups: list[tuple[str, list[int]]]


def first_difference(logs: Mapping[int, Copy], after: int = 0) -> Difference | None:
    """The first call after `after` in which logs differ; up to `after` they are known to be alike."""
    if _all_alike(list(logs.values()), after):
        return None
    calls = {entry[0] for log in logs.values() for entry in log.entries}
    # Entries that a log has dropped were alike.
    for call in sorted(calls | {after + 1}):
        found = {process: state for process, log in logs.items() if (state := _at(log, call))}
        if call > after and _differ(found.values()):
            return Difference(call, _groups(found))
    return None


def _all_alike(logs: Sequence[Copy], after: int) -> bool:
    """Whether no log has an entry that the first one lacks, as far as both go; a fast check."""
    ends = [min(logs[0].calls, log.calls) for log in logs]
    return all(
        log.between(after, end) == logs[0].between(after, end)
        for log, end in zip(logs, ends, strict=True)
    )


def _at(log: Copy, call: int) -> tuple[str, str] | None:
    """Kind and name of a call; None if it is not in the log."""
    before = log.between(0, call)
    if call > log.calls or not before:
        return None
    number, kind, name = before[-1]
    return (kind if number == call else RUNS), name


def _differ(states: Iterable[tuple[str, str]]) -> bool:
    """Whether a call differs such that a process waits for ever, or goes on alone.

    Processes that wait to agree find out by themselves that they bring different things.
    """
    states = list(states)
    kinds = {kind for kind, _ in states}
    ran = {name for kind, name in states if kind in (RUNS, MEETS)}
    if ran:
        return len(ran) > 1 or not kinds.isdisjoint({FAILS, ENDS}) or {RUNS, WAITS} <= kinds
    return {WAITS, ENDS} <= kinds


def _groups(states: Mapping[int, tuple[str, str]]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for process, (_, name) in sorted(states.items()):
        groups.setdefault(name, []).append(process)
    return sorted(groups.items(), key=lambda group: len(group[1]))
