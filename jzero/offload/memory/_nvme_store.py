# SPDX-License-Identifier: Apache-2.0
"""`NVMeStore`: the files of one state in this process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jzero.offload.nvme._about import FileSpec
from jzero.offload.nvme._aligned import TileRing, pages
from jzero.offload.nvme._files import Pin, TileAt, TileFiles
from jzero.offload.nvme._tile_layout import PAGE, Extent, TileLayout, whole_pages

# Buffers are one call's at a time.
BUFFERS = threading.RLock()
TileReader: TypeAlias = TileFiles | Pin  # any thread may use both


class ExtentAt(NamedTuple):
    """Where a part of a leaf is."""

    layout: TileLayout
    at: TileAt
    i: int

    @property
    def extent(self) -> Extent:
        return self.layout.tiles[self.at.tile][self.i]

    @property
    def read_bytes(self) -> int:
        extent, tile_bytes = self.extent, self.layout.nbytes[self.at.tile]
        return whole_pages(extent.nbytes) if extent.lone else tile_bytes

    def read(self, reader: TileReader, buffer: np.ndarray) -> np.ndarray:
        """Reads it into a buffer of `read_bytes`; returns its bytes there."""
        if self.extent.lone:
            reader.read_lone(self.at, self.i, buffer)
            return buffer[: self.extent.nbytes]
        reader.read(self.at, buffer)
        return self.layout.views(self.at.tile, buffer)[self.i]


@dataclasses.dataclass(frozen=True, eq=False)
class StoreSpec:
    path: Path
    host_bytes: int  # of all buffers together
    in_place: bool  # one version, which is overwritten
    resume: bool  # whether existing files are continued
    layout: TileLayout  # of each device's file
    identity: Mapping[str, Any]  # whose state each file has, by its name
    mesh: Any
    # Of a second file of each device, for leaves that no step changes.
    frozen: TileLayout = TileLayout(())
    # That wait for a tile's update, of each tile; no tiles if none wait.
    gradients: TileLayout = TileLayout(())
    writing_bytes: int = 0  # of `host_bytes`, those that gradients are written through

    @functools.cached_property
    def ring(self) -> TileRing:
        """Buffers for tiles, each with room for the gradients behind one."""
        both = itertools.zip_longest(self.layout.nbytes, self.gradients.nbytes, fillvalue=0)
        most = max(self.frozen.most_bytes, *map(sum, both), 0)
        return TileRing(self.host_bytes - self.writing_bytes, most)

    @property
    def files(self) -> dict[str, FileSpec]:
        """Each file: of each device what steps change, then of each what they do not, if there is any."""
        changed = {
            name: FileSpec(self.layout, whose, gradients=self.gradients)
            for name, whose in self.identity.items()
        }
        kept = {
            f"{Path(name).stem}.frozen{Path(name).suffix}": FileSpec(self.frozen, whose, True)
            for name, whose in self.identity.items()
        }
        return {name: file for name, file in (changed | kept).items() if file.layout.num_tiles}

    @property
    def layouts(self) -> tuple[TileLayout, ...]:
        """Of what steps change, of what they do not, and of gradients."""
        return self.layout, self.frozen, self.gradients

    def places(self, file: int, name: str, start: int, stop: int) -> Iterator[ExtentAt]:
        """Where bytes `start` to `stop` of a device's part of a leaf are."""
        frozen = name in self.frozen
        layout = self.frozen if frozen else self.layout
        first = len(self.identity) if frozen and self.layout.num_tiles else 0
        for tile, i in layout.of_leaf(name, start, stop):
            yield ExtentAt(layout, TileAt(first + file, tile), i)


class NVMeStore:
    def __init__(self, spec: StoreSpec, files: TileFiles):
        self.spec, self.files = spec, files
        weakref.finalize(self, files.close)

    @property
    def newest(self) -> int:
        """The number of the step of its leaves: the committed one, or the first."""
        return self.files.step or 0

    def begin(self) -> int:
        """Begins the next step, or the first one; returns its number."""
        step = 0 if self.files.step is None else self.files.step + 1
        self.files.begin(step)
        return step

    def buffer_bytes(self, name: str) -> int:
        places = self.spec.places(0, name, 0, sys.maxsize)
        return max((place.read_bytes for place in places), default=0)

    def read_range(
        self, out: np.ndarray, file: int, name: str, start: int, reader: TileReader,
        buffer: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Reads bytes `start` to `start + len(out)` of a device's part of a leaf; by any thread.

        Whole pages of a lone leaf are read into `out` (uint8[n]) without a copy, if it is aligned; all else
        through `buffer`, uint8[`buffer_bytes(name)`] on a page, which is made by default.
        """
        stop = start + len(out)
        for place in self.spec.places(file, name, start, stop):
            extent = place.extent
            first, last = max(start, extent.start), min(stop, extent.start + extent.nbytes)
            there = out[first - start : last - start]
            if len(there) == extent.nbytes and extent.lone and self.takes(there):
                reader.read_lone(place.at, place.i, there)
                continue
            if buffer is None:
                buffer = pages(self.buffer_bytes(name))
            found = place.read(reader, buffer)
            there[:] = found[first - extent.start : last - extent.start]

    def takes(self, memory: np.ndarray) -> bool:
        """Whether the disk can read straight into this memory, or write from it."""
        return memory.ctypes.data % self.files.memory_alignment == 0 and len(memory) % PAGE == 0
