# SPDX-License-Identifier: Apache-2.0
"""The pages at the start of a file of tiles: what it is, and of which step each slot has all tiles.

[Note: slots] A file has two slots, each with room for all tiles, and a header page for each slot. A step
reads one slot and writes the other::

    page of the other slot := "writing"; sync      # from here on its old tiles may be lost
    tiles and their checksums to the other slot; sync
    page of the other slot := "complete", its step; sync

A page that a kill or a power cut tears is not intact by its checksum, and counts as "writing". So at any
moment a slot that says "complete" is complete, and the slot that a step reads stays untouched until the
step after it.

With `in_place` there is one slot, whose pages are written in turn; the newer one counts. "writing" then means
that the tiles belong to no one step: the file is dirty. A page that is not intact may have said so.

[Note: several files] The files of a process are written together: all tiles of all files are synced before
the first header says "complete". A kill between two headers leaves files that have steps t and t+1 beside
files that have t (their other slot says "writing"). The newest step that all files have is chosen when they
are opened: t here, and never a mixture. Processes choose among the steps that each of them has (`decide` in
`_folders.py`); so no process may begin step t+2, which overwrites t, before all have committed t+1.

[Note: frozen files] Leaves that no step changes are in files of their own, whose tiles are written once, with
the first step. Their two slots are the same tiles, and a commit only writes the older header page:
"complete", its step. So the two last steps are there, as in files with two slots, whatever is killed when.
They go first: where files are written `in_place`, one that says t+1 has lost t.
Held by tests/test_nvme_kills.py, which kills at every operation on a file.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from jzero import _json
from jzero._json import Malformed
from jzero.offload.nvme._tile_layout import PAGE, whole_pages

VERSION = 3  # 2: lone extents, frozen files; 3: the id of the run
EMPTY, WRITING, COMPLETE = "empty", "writing", "complete"
_MAGIC = "jzero tiles"


class Write(NamedTuple):
    """One commit of a state to its files; see [Note: writes] in `_folders.py`."""

    step: int  # 0 for the one with which files are filled
    run: str  # the random id of whoever made it, 32 hexadecimal digits

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run[:8]}"


class Header(NamedTuple):
    """What one of the two pages says; the JSON has these names."""

    generation: int  # counts the pages that were written; the newer one has the higher
    state: str  # of the slot: `EMPTY`, `WRITING` or `COMPLETE`
    slot: int
    step: int  # that the slot has, or is to have; -1 if none
    table_crc: int  # CRC-32 of the slot's checksums
    slots: int
    num_tiles: int  # in each slot
    about_bytes: int  # of the JSON text that says what the file is, after the two pages
    about_crc: int
    size: int  # of the file, in bytes
    run: str  # the random id of whoever wrote the page
    version: int = VERSION  # of this format

    @property
    def of_file(self) -> tuple[int, ...]:
        """What both pages of a file say alike."""
        return self.slots, self.num_tiles, self.about_bytes, self.about_crc, self.size

    @property
    def write(self) -> Write:
        return Write(self.step, self.run)

    def pack(self, page: np.ndarray) -> None:
        """Fills a page: a line of the format's name and a checksum, and the fields as JSON."""
        text = json.dumps(self._asdict(), indent=1) + "\n"
        raw = f"{_MAGIC} {zlib.crc32(text.encode()):08x}\n{text}".encode()
        page[:] = 0
        page[: len(raw)] = np.frombuffer(raw, np.uint8)


def checked(page: np.ndarray) -> Header | int | None:
    """What a page says; the version, if another one; None if it is torn. Raises `Malformed` if it lies."""
    first, _, text = page.tobytes().rstrip(b"\0").partition(b"\n")
    if first != f"{_MAGIC} {zlib.crc32(text):08x}".encode():
        return None
    fields = _json.parse(text)
    if bad := _json.check(fields, {"version": int}):
        raise Malformed(*bad)
    if fields["version"] != VERSION:
        return int(fields["version"])
    if bad := _json.check(fields, _FORM) or _out_of_bounds(fields):
        raise Malformed(*bad)
    return Header(**fields)


_FORM = get_type_hints(Header)
_RUN = re.compile("[0-9a-f]{32}")
_MOST = {"slot": 2, "slots": 3, "table_crc": 2**32, "about_crc": 2**32}


def _out_of_bounds(fields: dict[str, Any]) -> list[str]:
    """What of fields of the right types no run has written: a checksum does not authenticate."""
    bad = [f"it has {_json.shown(name)}, which is no field" for name in fields if name not in _FORM]
    bad += [f"{name} is {_json.shown(value)}" for name, value in fields.items()
            if type(value) is int and not -(name == "step") <= value < _MOST.get(name, 2**63)]  # fmt: skip
    if bad:
        return bad
    at = Header(**fields)
    if at.state not in (EMPTY, WRITING, COMPLETE) or (at.state == EMPTY) != (at.step == -1):
        bad.append(f"its state is {_json.shown(at.state)}, with step {at.step}")
    if at.slot >= at.slots:
        bad.append(f"its slot is {at.slot}, of {at.slots}")
    if not _RUN.fullmatch(at.run):
        bad.append(f"its run is {_json.shown(at.run)}")
    if 2 * PAGE + whole_pages(at.about_bytes) > at.size:
        bad.append(f"its description has {at.about_bytes} bytes, and the file {at.size}")
    return bad


class Places(NamedTuple):
    """Where everything is in a file: bytes from its start, in whole pages."""

    table: tuple[int, ...]  # of the checksums of each slot, uint32[n]
    tiles: tuple[tuple[int, ...], ...]  # the start of each tile in each slot
    size: int

    @classmethod
    def of(cls, about_bytes: int, tile_bytes: list[int], num_checksums: int, slots: int) -> Places:
        at = 2 * PAGE + whole_pages(about_bytes)
        table = tuple(at + k * table_bytes(num_checksums) for k in range(slots))
        at += slots * table_bytes(num_checksums)
        tiles = []
        for _ in range(slots):
            starts = at + np.cumsum([0, *tile_bytes])
            tiles.append(tuple(starts[:-1].tolist()))
            at = int(starts[-1])
        return cls(table, tuple(tiles), at)

    def twice(self) -> Places:
        """The only slot, as two."""
        return self._replace(table=self.table * 2, tiles=self.tiles * 2)


def table_bytes(num_checksums: int) -> int:
    return whole_pages(4 * num_checksums)
