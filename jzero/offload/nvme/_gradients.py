# SPDX-License-Identifier: Apache-2.0
"""Gradients that wait in a file of tiles until the update reads them with their tile.

[Note: gradients in files] A gradient waits where the new state of its tile will be written: in the slot that
the update does not read, or, with `in_place`, behind the tile. The update reads a tile and its gradients
before it writes that tile, so two slots need no more space. Gradients are of one run, and of no use after a
kill: the slot then says that it has no step (see [Note: slots] in `_header.py`), and no table of their
checksums is on the disk. They are checked all the same, from memory, since a flipped bit of a gradient
would be trained on, and not found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jzero._errors import StateError, message
from jzero.offload.nvme._checksum import checksum
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._tile_layout import WHO, TileLayout


class WaitingGradients:
    """Gradients in one file, extent by extent in any order; each extent has its own pages and checksum."""

    def __init__(self, file: DirectFile, layout: TileLayout) -> None:
        # `layout` is relative to the start of each tile's gradients.
        self._file, self.layout = file, layout
        num = layout.first_checksums[-1]
        self._checksums, self._there = np.zeros(num, np.uint32), np.zeros(num, bool)
        self._starts: Sequence[int] = ()

    def nbytes(self, tile: int) -> int:
        """Bytes of a tile's gradients on the disk: a multiple of 4096, or 0."""
        return self.layout.nbytes[tile] if self.layout.num_tiles else 0

    def begin(self, starts: Sequence[int]) -> None:
        """Forgets what was written; the gradients of each tile go to `starts` in the file."""
        self._starts = starts
        self._there[:] = False

    def write(self, tile: int, i: int, pages: np.ndarray) -> None:
        """Writes the pages of a tile's extent `i`; by any thread."""
        extent = self.layout.tiles[tile][i]
        start, stop = extent.pages
        assert len(pages) == stop - start
        self._file.write(pages, self._starts[tile] + start, self._what(tile, i))
        number = self.layout.checksum_of(tile, i)
        self._checksums[number] = checksum(pages)
        self._there[number] = True

    def read(self, tile: int, buffer: np.ndarray) -> None:
        """Reads all of a tile's gradients into the first `nbytes(tile)` of a buffer."""
        if not (size := self.nbytes(tile)):
            return
        self._file.read(buffer[:size], self._starts[tile], f"gradients of tile {tile}")
        for i, extent in enumerate(self.layout.tiles[tile]):
            number, (start, stop) = self.layout.checksum_of(tile, i), extent.pages
            assert self._there[number], f"{self._what(tile, i)} was never written"
            found, expected = checksum(buffer[start:stop]), int(self._checksums[number])
            if found != expected:
                at = self._starts[tile] + start
                raise StateError(message(
                    WHO, f"{self._file.path} has damaged bytes of {self._what(tile, i)}, {at} to "
                    f"{at + stop - start}: their checksum is {found:08x}, and {expected:08x} was written",
                    "What is on the disk is not what was written in this step.",
                    "Look at the disk and the kernel's log; the step before is still there, unless "
                    "in_place=True."))  # fmt: skip

    def _what(self, tile: int, i: int) -> str:
        return f"{self.layout.tiles[tile][i].leaf} in tile {tile}"
