# SPDX-License-Identifier: Apache-2.0
"""One file of tiles: the state of one device's shards on a disk, in one or two slots."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jzero import _json
from jzero._errors import StateError, message
from jzero._json import Malformed
from jzero.offload.nvme import _header
from jzero.offload.nvme._about import NOT_OVERWRITTEN, FileSpec, listed, other_state, parsed
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._checksum import checksum
from jzero.offload.nvme._direct import BLOCK, DirectFile
from jzero.offload.nvme._gradients import WaitingGradients
from jzero.offload.nvme._header import COMPLETE, EMPTY, WRITING, Header, Places, Write
from jzero.offload.nvme._tile_layout import PAGE, WHO, whole_pages

_RESTORE = "Restore the last checkpoint into a new path, without resume=True."


class TileFile:
    """An open file of tiles; see [Note: slots] in `_header.py`."""

    def __init__(self, file: DirectFile, spec: FileSpec, in_place: bool, run: str) -> None:
        self.file, self.layout, self.run = file, spec.layout, run
        self.frozen = spec.frozen
        self._about, self._slots = spec.about(), 1 if in_place and not spec.frozen else 2
        self._tile_bytes = spec.layout.nbytes
        num = spec.layout.first_checksums[-1]
        own = 1 if spec.frozen else self._slots
        self.gradients = WaitingGradients(file, spec.gradients)
        # See [Note: gradients in files].
        joined: Callable[[int, int], int] = max if own == 2 else int.__add__
        rooms = [joined(n, self.gradients.nbytes(k)) for k, n in enumerate(self._tile_bytes)]
        self._places = Places.of(len(self._about), rooms, num, own)
        self._page = pages(PAGE)
        self._generation = 0
        self.target = -1  # the slot that is being written
        # The checksums of each slot, uint32, as the disk has them: in whole pages.
        size = _header.table_bytes(num)
        self._tables = [pages(max(size, PAGE))[:size] for _ in range(own)]
        if spec.frozen:  # See [Note: frozen files].
            self._places, self._tables = self._places.twice(), self._tables * 2
        self.size = self._places.size
        self._written = np.zeros(len(self._tile_bytes), bool)
        self._crcs: dict[int, int] = {}
        self.steps: dict[Write, int] = {}  # complete ones, and the slot of each

    @property
    def path(self) -> Path:
        return self.file.path

    def make(self) -> None:
        """Reserves the space of the empty file, and writes what it is."""
        self.file.resize(self.size)
        about = pages(whole_pages(len(self._about)))
        about[: len(self._about)] = np.frombuffer(self._about, np.uint8)
        self.file.write(about, 2 * PAGE, "its description")
        if self._slots == 2 and not self.frozen:
            # A first write into reserved space costs more than later ones. The first step fills slot 0.
            start = self._places.tiles[1][0] if self._tile_bytes else self.size
            zeros = pages(BLOCK)
            for at in range(start, self.size, BLOCK):
                self.file.write(zeros[: min(BLOCK, self.size - at)], at, "an empty tile")
        for k in range(2):
            self._put(EMPTY, k % self._slots, -1)
        self.file.sync()

    def open(self) -> None:
        """Reads which steps it has; refuses a damaged file, or one of another state or version."""
        found = headers(self.file)
        if len(found) == 1 and found[0].slots == 1:
            what = "with in_place=True it may have said that tiles are of two steps"
            raise self._damaged("has a damaged header", what)
        header = max(found, key=lambda header: header.generation)
        self._generation = header.generation
        if (actual := self.file.size) != header.size:
            what = f"it was made with {header.size}"
            raise (
                self.file.cut(what) if actual < header.size else self._damaged("is too long", what)
            )
        self._check_about(header)
        if header.slots != self._slots:
            here = header.slots == 1
            raise StateError(message(
                WHO, f"{self.path} was made with in_place={here}",
                f"With in_place=False a file has two slots. {NOT_OVERWRITTEN}",
                f"Use in_place={here}, or another path."))  # fmt: skip
        if self._slots == 2:
            self.steps = {x.write: x.slot for x in found if x.state == COMPLETE}
        elif header.state == COMPLETE:
            self.steps = {header.write: 0}
        elif header.state == WRITING:
            raise StateError(message(
                WHO, f"{self.path} is dirty: its run ended while step {header.step} was "
                "written over the step before",
                f"With in_place=True a step that does not end leaves tiles of two steps. {NOT_OVERWRITTEN}",
                "Restore the last checkpoint into a new path; in_place=False costs twice the space, and "
                "survives.",
            ))  # fmt: skip
        self._crcs = {x.slot: x.table_crc for x in found if x.state == COMPLETE}

    def _check_about(self, header: Header) -> None:
        if header.about_bytes > max(len(self._about), _json.MAX_BYTES):
            what = f"it has {header.about_bytes} bytes, more than {_json.MAX_BYTES}"
            raise self._damaged("has a description that is none", what)
        about = pages(whole_pages(max(header.about_bytes, 1)))
        self.file.read(about, 2 * PAGE, "its description")
        raw = about[: header.about_bytes].tobytes()
        if zlib.crc32(raw) != header.about_crc:
            raise self._damaged("has a damaged description", "its checksum is another one")
        if raw != self._about:
            try:
                there = parsed(raw)
            except Malformed as error:
                found = listed(error.args)
                raise self._damaged("has a description that is none", found) from error
            raise other_state(self.path, there, json.loads(self._about))

    def _damaged(self, what: str, found: str) -> StateError:
        return _damaged(self.file, what, found)

    def load(self, step: Write) -> None:
        slot = self.steps[step]
        table, what = self._tables[slot], f"checksums of step {step.step}"
        self.file.read(table, self._places.table[slot], f"the {what}")
        if zlib.crc32(table.data) != self._crcs[slot]:
            raise self._damaged(f"has damaged {what}", "theirs is another one")

    def begin(self, step: int, keep: Write | None) -> None:
        """Marks a slot as being written, on the disk; of two, not that of the step `keep`."""
        self.target = self._other_than(keep)
        if self.is_filled:
            return
        self.steps = {s: slot for s, slot in self.steps.items() if slot != self.target}
        if self._slots == 2:
            self._written[:] = False
        self._put(WRITING, self.target, step)
        self.file.sync()

    def begin_gradients(self, keep: Write) -> None:
        """From here on gradients may overwrite, of two slots, the one without this step."""
        if self.frozen or not self.gradients.layout.num_tiles:
            return
        target = self._other_than(keep)
        starts = self._places.tiles[target]
        if self._slots == 1:
            starts = tuple(a + n for a, n in zip(starts, self._tile_bytes, strict=True))
        else:
            self.steps = {s: slot for s, slot in self.steps.items() if slot != target}
            self._put(EMPTY, target, -1)
            self.file.sync()
        self.gradients.begin(starts)

    def _other_than(self, keep: Write | None) -> int:
        kept = self.steps.get(keep, -1) if keep is not None else -1
        return 1 - kept if self._slots == 2 and kept >= 0 else 0

    @property
    def is_filled(self) -> bool:
        """Whether its tiles will not change."""
        return self.frozen and bool(self.steps)

    def read(self, slot: int, tile: int, buffer: np.ndarray) -> None:
        at = self._places.tiles[slot][tile]
        self.file.read(buffer[: self._tile_bytes[tile]], at, f"tile {tile}")
        first = self.layout.first_checksums[tile]
        for number, (start, stop) in enumerate(self.layout.checked[tile], first):
            self._check(slot, number, f"a damaged tile {tile}", at + start, buffer[start:stop])

    def read_lone(self, slot: int, tile: int, i: int, buffer: np.ndarray) -> None:
        """Reads the pages of a tile's lone extent `i` into a buffer."""
        extent = self.layout.tiles[tile][i]
        start, stop = extent.pages
        at, part = self._places.tiles[slot][tile] + start, buffer[: stop - start]
        self.file.read(part, at, f"{extent.leaf} in tile {tile}")
        number = self.layout.checksum_of(tile, i)
        self._check(slot, number, f"damaged bytes of {extent.leaf} in tile {tile}", at, part)

    def _check(self, slot: int, number: int, what: str, at: int, part: np.ndarray) -> None:
        found, expected = checksum(part), int(self._tables[slot].view(np.uint32)[number])
        if found != expected:
            # The step that reads it may have begun to overwrite the step before.
            raise StateError(message(
                WHO, f"{self.path} has {what}, bytes {at} to {at + len(part)}: its checksum is "
                f"{found:08x}, and {expected:08x} was written",
                "What is on the disk is not what was written.", _RESTORE))  # fmt: skip

    def write(self, tile: int, buffer: np.ndarray) -> None:
        self._note(tile, buffer)
        tile_buffer = buffer[: self._tile_bytes[tile]]
        self.file.write(tile_buffer, self._places.tiles[self.target][tile], f"tile {tile}")
        self._written[tile] = True

    def write_part(self, tile: int, offset: int, values: np.ndarray, buffer: np.ndarray) -> None:
        """Writes some bytes of a tile through a buffer, without a checksum."""
        start, end = offset // PAGE * PAGE, offset + len(values)
        stop, what = whole_pages(end), f"tile {tile}"
        at, part = self._places.tiles[self.target][tile] + start, buffer[: stop - start]
        # The pages at the ends have parts of others.
        shared = [0] * (start < offset) + [len(part) - PAGE] * (end < stop)
        for page in dict.fromkeys(shared):
            self.file.read(part[page : page + PAGE], at + page, what)
        part[offset - start : end - start] = values
        self.file.write(part, at, what)

    def note_checksums(self, tile: int, buffer: np.ndarray) -> None:
        """Reads a tile that was written part by part into a buffer, and notes its checksums."""
        at = self._places.tiles[self.target][tile]
        self.file.read(buffer[: self._tile_bytes[tile]], at, f"tile {tile}")
        self._note(tile, buffer)
        self._written[tile] = True

    def _note(self, tile: int, buffer: np.ndarray) -> None:
        table, first = self._tables[self.target].view(np.uint32), self.layout.first_checksums[tile]
        for number, (start, stop) in enumerate(self.layout.checked[tile], first):
            table[number] = checksum(buffer[start:stop])

    def sync(self) -> None:
        """Writes the checksums of the step that is written, and syncs them and the tiles."""
        if self.is_filled:
            return
        missing = np.flatnonzero(~self._written)
        assert not len(missing), f"{self.path}: tiles {missing[:8]} were not written"
        self.file.write(self._tables[self.target], self._places.table[self.target], "the checksums")
        self.file.sync()

    def complete(self, step: int) -> None:
        self._put(COMPLETE, self.target, step, zlib.crc32(self._tables[self.target].data))
        self.file.sync()

    def committed(self, step: int) -> None:
        """Updates `steps`, once all files have this step."""
        kept = {s: slot for s, slot in self.steps.items() if slot != self.target}
        self.steps = kept | {Write(step, self.run): self.target}

    def _put(self, state: str, slot: int, step: int, table_crc: int = 0) -> None:
        """Writes a header page: the slot's, or the older one if there is one slot."""
        self._generation += 1
        header = Header(
            generation=self._generation, state=state, slot=slot, step=step, table_crc=table_crc,
            slots=self._slots, num_tiles=len(self._tile_bytes), about_bytes=len(self._about),
            about_crc=zlib.crc32(self._about), size=self.size, run=self.run,
        )  # fmt: skip
        header.pack(self._page)
        page = slot if self._slots == 2 else self._generation % 2
        self.file.write(self._page, page * PAGE, f"a header of step {step}")


def headers(file: DirectFile) -> list[Header]:
    """The intact header pages of a file, one or two; else raises a `StateError`."""
    found, versions = [], set()
    for k, page in enumerate(header_pages(file)):
        try:
            header = _header.checked(page)
        except Malformed as error:
            what = listed(error.args)
            raise _damaged(file, f"has a header {k + 1} that is none", what) from error
        if isinstance(header, Header):
            if k != (header.slot if header.slots == 2 else header.generation % 2):
                what = f"it is of slot {header.slot}, generation {header.generation}"
                raise _damaged(file, f"has the other header in the place of {k + 1}", what)
            found.append(header)
        elif header is not None:
            versions.add(header)
    if versions:
        raise StateError(message(
            WHO, f"{file.path} has version {max(versions)} of the format",
            f"This version of jzero reads and writes version {_header.VERSION}. {NOT_OVERWRITTEN}",
            "Use the version of jzero that made it, or another path."))  # fmt: skip
    if not found:
        what = "both are damaged, or it is another program's file"
        raise _damaged(file, "has no intact header", what)
    if len({header.of_file for header in found}) > 1:
        raise _damaged(file, "has headers of two files", "they differ in more than the step")
    complete = [header for header in found if header.state == COMPLETE and header.slots == 2]
    if len({header.step for header in complete}) < len(complete):
        what = f"both are of step {complete[0].step}"
        raise _damaged(file, "has headers that are none", what)
    return found


def header_pages(file: DirectFile) -> list[np.ndarray]:
    if file.size < 2 * PAGE:
        raise file.cut(f"its headers end at {2 * PAGE}")
    found = [pages(PAGE) for _ in range(2)]
    for k, page in enumerate(found):
        file.read(page, k * PAGE, "a header")
    return found


def _damaged(file: DirectFile, what: str, found: str) -> StateError:
    return StateError(message(
        WHO, f"{file.path} {what}: {found}",
        f"What is on the disk is not what was written. {NOT_OVERWRITTEN}", _RESTORE))  # fmt: skip
