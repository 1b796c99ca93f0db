# SPDX-License-Identifier: Apache-2.0
"""`TiledUpdate`: an update of state that is in memory a tile at a time."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.offload.kernels import _tiles
from jzero.offload.kernels._code_paths import TracedUpdate, UpdateFn
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.kernels._loops import BlockLoop, BlockLoops
from jzero.offload.kernels._tiles import Span, Tile, Together
from jzero.offload.memory._addresses import HostMemory, address, check_given, on_host
from jzero.offload.nvme._tile_layout import TileLayout


class Part(NamedTuple):
    """A part of an input that arrives by itself."""

    input: int  # by index
    at: int | None  # a slice along dim 0; None for all of it


# The array of each shard, of each part that has arrived.
Arrived = Mapping[Part, HostMemory]
NOTHING: Arrived = types.MappingProxyType({})


class TiledUpdate(HostUpdate):
    """Updates state that is stored elsewhere: the caller brings it, a tile at a time, in any order.

    Behaves like `HostUpdate`, one range of elements after the other:

        engine.prepare(residents, inputs)              # XLA's part; reads nothing that comes in tiles
        engine.begin(outputs)
        for shard, tile in ...:                        # each tile of each shard, once
            engine.update_tile(shard, tile, memory)    # updates the tile in `memory`, as `layout` says
        engine.end()

    Resident leaves are always in memory, and updated beside the others. Tiles of outputs that need no state
    need no memory. Gradients, None among the inputs, come behind the state, or each by itself, as `needs`
    says.
    """

    def __init__(
        self, update: UpdateFn | TracedUpdate, state: HostMemory = (), inputs: HostMemory = (), *,
        tile_bytes: int,
        resident: Collection[int] = (), lone: Mapping[int, int] | None = None,
        gradients: Mapping[int, int] | None = None, arriving: Mapping[int, int] | None = None,
        threads: int | None = None, portion_bytes: int = 2**26,
    ):  # fmt: skip
        """Compiles like `HostUpdate`, and cuts the state into tiles of up to `tile_bytes`.

        By index: leaves that are always `resident`; `lone` leaves, which are also read by themselves, and in
        how many slices along dim 0; gradients behind the state, and `arriving` ones, and in how many slices
        they are made.
        """
        self._resident, self._lone = tuple(resident), dict(lone or {})
        self._tile_bytes, self._gradients = tile_bytes, dict(gradients or {})
        self._slices = {**self._gradients, **(arriving or {})}
        self._arriving = frozenset(arriving or ())
        super().__init__(update, state, inputs, threads=threads, portion_bytes=portion_bytes)
        outputs = self._num_operands + self._num_made  # the slot of the first
        self._members = [
            # In the last portion what makes no outputs, so that its tiles may be ordered as they are read.
            (k if max(slots) >= outputs else len(self._portions), loop.program, size, slots)
            for k, loops in enumerate(self._portions)
            for loop in loops
            for size, slots in zip(loop.sizes, loop.slots, strict=True)
        ]
        self._members.sort(key=lambda member: member[0])
        found = [self._together(slots, size, portion) for portion, _, size, slots in self._members]
        moved = {*self._resident, *(leaf for each in found for leaf in each.leaves)}
        self._frozen = [i for i in range(len(self._state)) if i not in moved]
        tiles = sorted(_tiles.cut(found, tile_bytes), key=lambda tile: not _reads(tile, found))
        self.tiles: tuple[Tile, ...] = tuple(tiles)  # of each shard; first those of `layout`
        in_files = [tile for tile in tiles if _reads(tile, found)]
        self.layout = _tiles.laid_out(in_files, found, self._names)
        # By number, and the first leaf that is updated with each.
        first = {i: each.leaves[0] for each in reversed(found) for i, _ in each.gradients}
        self.gradient_names = {
            i: f"gradient {i}, of {self._names[first[i]]}," for i in self._gradients
        }
        self.gradients = _tiles.gradients_of(in_files, found, self.gradient_names)
        self._ranges = [_tiles.ranges(tile, found) for tile in in_files]
        self._gradient_ranges = [_tiles.gradient_ranges(tile, found) for tile in in_files]
        self._arrivals = [[*self._arrivals_of(tile)] for tile in in_files]
        self._rows = [_tiles.rows(tile) for tile in tiles]
        self._tile_loops = [
            self._loops_of_tile(*pair) for pair in zip(tiles, self._rows, strict=True)
        ]
        self.done = [*self._done, []]  # by portion, the outputs that its tiles complete
        self._to: Sequence[HostMemory] = ()

    @functools.cached_property
    def frozen(self) -> TileLayout:
        """The layout of leaves that no kernel reads or writes: files of their own."""
        return _tiles.of_whole_leaves(
            [self._state[i] for i in self._frozen],
            [self._lone.get(i, 0) for i in self._frozen],
            [self._names[i] for i in self._frozen],
            self._tile_bytes,
        )

    def prepare(self, states: Sequence[HostMemory], inputs: Sequence[HostMemory]) -> None:
        """Does what can fail, before any state is there; see `HostUpdate.prepare`.

        `states` are each shard's resident leaves, or nothing if each comes later (`place`). Inputs that come
        with tiles, or that no updated tile needs, are None.
        """
        self._check_idle()
        whole: list[list[Any]] = [[None] * len(self._state) for _ in inputs]
        at = np.zeros((len(inputs), len(self._state)), np.int64)
        for shard, leaves in enumerate(states):
            for i, x in zip(self._resident, leaves, strict=True):
                whole[shard][i], at[shard, i] = x, address(x)
        for i in {*self._resident} & {*self._xla.reads} if not states else ():
            for state in whole:  # Nothing uses XLA's results then.
                state[i] = np.zeros(self._state[i].shape, self._state[i].dtype)
        self._prepared = self._known(whole, inputs, at)

    def begin(self, outputs: Sequence[HostMemory]) -> list[int]:
        """Sets the memory of outputs, for each shard; returns those that XLA has made, which are complete."""
        prepared, self._to = self._with_outputs(self._prepared, outputs), outputs
        return self._copy_xla_outputs(prepared, outputs)

    def update_tile(
        self, shard: int, tile: int, memory: np.ndarray | None = None, arrived: Arrived = NOTHING
    ) -> None:
        """Updates the tile in `memory` in place, and makes its outputs; `arrived` has its `needs`."""
        prepared = self._prepared
        assert prepared is not None, "prepare() comes first"
        rows = self._rows[tile]
        at = np.tile(prepared.addresses[shard], (1 + max(rows.values()), 1))
        if memory is not None:
            extents = self.layout.tiles[tile]
            for (span, leaf, itemsize), extent in zip(self._ranges[tile], extents, strict=True):
                # Where the leaf's first element would be: kernels count from there.
                start = address(memory) + extent.offset
                at[rows[span], leaf] = start - span.first * itemsize
            if self.gradients.num_tiles:
                behind = address(memory) + self.layout.nbytes[tile]
                pairs = zip(self._gradient_ranges[tile], self.gradients.tiles[tile], strict=True)
                for (span, i, itemsize), extent in pairs:
                    start = behind + extent.offset
                    at[rows[span], len(self._state) + i] = start - span.first * itemsize
            for span, part, before in self._arrivals[tile]:
                start = address(arrived[part][shard]) - before
                at[rows[span], len(self._state) + part.input] = start
        loops = self._tile_loops[tile]
        self._calls = calls = loops.start(at, (prepared, self._to, memory), self._helpers)
        try:
            self._running = True
            calls.share(self._threads, alone=False)
        finally:
            self._running = False
            calls.complete()
            self._calls = None

    def _ready(self, inputs: Sequence[HostMemory]) -> list[list[Any]]:
        """Given inputs, ready; for others, zeros where XLA reads them, else None."""
        num = len(self._inputs)
        here = [i for i in range(num) if inputs[0][i] is not None]
        names, avals = [self._input_names[i] for i in here], [self._inputs[i] for i in here]
        shards = [[shard[i] for i in here] for shard in inputs]
        check_given(names, shards, avals, write=False)
        missing = {slot - len(self._state) for slot in self._xla.reads} & {*range(num)} - {*here}
        zeros = {i: np.zeros(self._inputs[i].shape, self._inputs[i].dtype) for i in missing}
        found = [zeros | dict(zip(here, on_host(shard), strict=True)) for shard in shards]
        return [[shard.get(i) for i in range(num)] for shard in found]

    def leaves(self, tile: int) -> set[int]:
        """The indices of leaves of which a tile updates elements, residents among them."""
        slots = (
            slot for span in self.tiles[tile].spans for slot in self._members[span.together][3]
        )
        return {slot for slot in slots if slot < len(self._state)}

    def resident_ranges(self, tile: int) -> list[tuple[int, slice]]:
        """The residents that a tile updates, by index, and their elements."""
        return [
            (leaf, slice(span.first, span.first + span.num))
            for span in self.tiles[tile].spans
            for leaf in self._resident if leaf in self._members[span.together][3]
        ]  # fmt: skip

    def resident_bytes(self, tile: int) -> int:
        return sum(
            (part.stop - part.start) * self._state[leaf].dtype.itemsize
            for leaf, part in self.resident_ranges(tile)
        )

    def needs(self, tile: int) -> set[Part]:
        return {part for _, part, _ in self._arrivals[tile]}

    def _arrivals_of(self, tile: Tile) -> Iterator[tuple[Span, Part, int]]:
        """Each range of a tile, the part of an input that it reads, and that part's first byte."""
        first = len(self._state)
        for span in tile.spans:
            for i in {slot - first for slot in self._members[span.together][3]} & self._arriving:
                num, x = self._slices[i], self._inputs[i]
                size = x.size // num
                at = span.first // size
                part = Part(i, at if num > 1 else None)
                yield span, part, at * size * x.dtype.itemsize

    def end(self) -> None:
        self._prepared, self._to = None, ()

    def _together(self, slots: Sequence[int], size: int, portion: int) -> Together:
        state = (slot for slot in slots if slot < len(self._state) and slot not in self._resident)
        leaves = tuple(dict.fromkeys(state))
        itemsizes = tuple(self._state[i].dtype.itemsize for i in leaves)
        lone = self._lone.keys() & set(leaves)
        first, last = len(self._state), len(self._state) + len(self._inputs)
        inputs = dict.fromkeys(slot - first for slot in slots if first <= slot < last)
        mine = [i for i in inputs if i in self._gradients]
        slices = [*(self._lone[i] for i in lone), *(self._slices.get(i, 1) for i in inputs)]
        gradients = tuple((i, self._inputs[i].dtype.itemsize) for i in mine)
        return Together(
            leaves, itemsizes, size, portion, frozenset(lone), math.lcm(*slices), gradients
        )

    def _loops_of_tile(self, tile: Tile, rows: Mapping[Span, int]) -> BlockLoops:
        by_program: dict[Any, list[tuple[int, Sequence[int], int]]] = {}
        for span in tile.spans:
            _, program, _, slots = self._members[span.together]
            there = [rows[span] * self._num_slots + slot for slot in slots]
            by_program.setdefault(program, []).append((span.num, there, span.first))
        loops = [
            BlockLoop(program, *zip(*rows, strict=True)) for program, rows in by_program.items()
        ]
        return self._by([loops], 1, self._num_slots)


def _reads(tile: Tile, found: Sequence[Together]) -> bool:
    return any(found[span.together].leaves for span in tile.spans)
