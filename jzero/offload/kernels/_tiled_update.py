# SPDX-License-Identifier: Apache-2.0
"""`TiledUpdate`: an optimizer's update of state that is in memory a tile at a time."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.offload.kernels import _tiles
from jzero.offload.kernels._code_paths import TracedUpdate, UpdateFn
from jzero.offload.kernels._host_update import WHO, HostUpdate
from jzero.offload.kernels._loops import BlockLoop, BlockLoops
from jzero.offload.kernels._tiles import Span, Tile, Together
from jzero.offload.memory._addresses import HostMemory, address, check_given, on_host
from jzero.offload.nvme._layout import TileLayout


class Part(NamedTuple):
    """A part of an input that arrives by itself.

    Attributes:
      input: which one, by index.
      at: which slice along dim 0; None for all of it.
    """

    input: int
    at: int | None


# Of each part that is there, the array of each shard.
Arrived = Mapping[Part, HostMemory]
NOTHING: Arrived = types.MappingProxyType({})


class TiledUpdate(HostUpdate):
    """Updates state that is stored elsewhere: whoever calls brings it, a tile at a time, in any order.

    Behaves like `HostUpdate`, one range of elements after the other:

        engine.prepare(residents, inputs)              # XLA's part; reads nothing that comes in tiles
        engine.begin(outputs)
        for shard, tile in ...:                        # each tile of each shard, once
            engine.update_tile(shard, tile, memory)    # memory has the tile, as `layout` says; in its place
        engine.end()

    Some leaves may be resident: in memory all the time, and updated there, range by range beside the others.
    What makes outputs without any state of a tile is in tiles of its own, which need no memory. Some inputs,
    gradients, may come with tiles, too: behind the state, as `gradients` says, or each by itself, as
    `arrivals` says. None is given in their place.

    Attributes:
      layout: which part of which leaf of the state is where in a tile; by the leaves' names.
      tiles: what is updated at a time, the same for each shard; first those of `layout`.
      gradients: which part of which input is where behind the state of a tile.
      done: by chunk, the outputs that are complete when all its tiles of all shards are.
      gradient_names: of these inputs, by index: what they are called there.
    """

    def __init__(
        self, update: UpdateFn | TracedUpdate, state: HostMemory = (), inputs: HostMemory = (), *,
        tile_bytes: int,
        resident: Collection[int] = (), lone: Mapping[int, int] | None = None,
        gradients: Mapping[int, int] | None = None, arriving: Mapping[int, int] | None = None,
        names: Sequence[str] | None = None, threads: int | None = None, chunk_bytes: int = 2**26,
    ):  # fmt: skip
        """Traces and compiles as `HostUpdate`, and cuts the state into tiles of up to `tile_bytes`.

        But for leaves that are `resident`, by index. Nothing may be `untiled` of it.

        Args, beside those of `HostUpdate`:
          tile_bytes: of a tile, at most.
          resident: which leaves are in memory.
          lone: which leaves are also read without the others in their tiles, by index, and of how many slices
            along dim 0 of a device's shard; 1 for a leaf that is read whole.
          gradients: which inputs come with tiles, of those that `inputs_in_tiles` finds, by index, and in how
            many slices along dim 0 they are made.
          arriving: which of these come by themselves, slice by slice, and in how many.
        """
        self._resident, self._lone = tuple(resident), dict(lone or {})
        self._tile_bytes, self._gradients = tile_bytes, dict(gradients or {})
        self._slices = {**self._gradients, **(arriving or {})}
        self._arriving = frozenset(arriving or ())
        super().__init__(
            update, state, inputs, names=names, threads=threads, chunk_bytes=chunk_bytes
        )
        self._members = [
            (self._chunk_of(slots, chunk), loop.program, size, slots)
            for chunk, loops in enumerate(self._chunks)
            for loop in loops
            for size, slots in zip(loop.sizes, loop.slots, strict=True)
        ]
        self._members.sort(key=lambda member: member[0])
        found = [self._together(slots, size, chunk) for chunk, _, size, slots in self._members]
        moved = {*self._resident, *(leaf for each in found for leaf in each.leaves)}
        self._frozen = [i for i in range(len(self._state)) if i not in moved]
        tiles = sorted(_tiles.cut(found, tile_bytes), key=lambda tile: not _reads(tile, found))
        self.tiles: tuple[Tile, ...] = tuple(tiles)
        in_files = [tile for tile in tiles if _reads(tile, found)]
        self.layout = _tiles.laid_out(in_files, found, self._names)
        self.gradient_names = {i: _gradient_name(i, found, self._names) for i in self._gradients}
        self.gradients = _tiles.gradients_of(in_files, found, self.gradient_names)
        self._ranges = [_tiles.ranges(tile, found) for tile in in_files]
        self._gradient_ranges = [_tiles.gradient_ranges(tile, found) for tile in in_files]
        self._arrivals = [[*self._arrivals_of(tile)] for tile in in_files]
        self._rows = [_tiles.rows(tile) for tile in tiles]
        self._tile_loops = [
            self._loops_of_tile(*pair) for pair in zip(tiles, self._rows, strict=True)
        ]
        self.done = [*self._done, []]
        self._to: Sequence[HostMemory] = ()

    @functools.cached_property
    def frozen(self) -> TileLayout:
        """Of leaves that no kernel reads or writes: stored in files of their own, in no tile."""
        return _tiles.of_whole_leaves(
            [self._state[i] for i in self._frozen],
            [self._lone.get(i, 0) for i in self._frozen],
            [self._names[i] for i in self._frozen],
            self._tile_bytes,
        )

    def prepare(self, states: Sequence[HostMemory], inputs: Sequence[HostMemory]) -> None:
        """What can fail, before any state is there; as `HostUpdate.prepare`.

        Args:
          states: of each shard, the resident leaves in order, writable, in C order; none at all if each comes
            later (`place`).
          inputs: of each shard; None of those that come with tiles, or that no tile needs that is updated.
        """
        self._check_idle()
        whole: list[list[Any]] = [[None] * len(self._state) for _ in inputs]
        at = np.zeros((len(inputs), len(self._state)), np.int64)
        for shard, leaves in enumerate(states):
            for i, x in zip(self._resident, leaves, strict=True):
                whole[shard][i], at[shard, i] = x, address(x)
        for i in {*self._resident} & {*self._xla.reads} if not states else ():
            for state in whole:  # XLA's results are of no use then, and nobody uses them.
                state[i] = np.zeros(self._state[i].shape, self._state[i].dtype)
        self._prepared = self._known(whole, at, inputs)

    def begin(self, outputs: Sequence[HostMemory]) -> list[int]:
        """Says where outputs go, for each shard, in writable NumPy arrays in C order.

        Returns:
          Which of them are complete: those that XLA has made.
        """
        prepared, self._to = self._with_outputs(outputs), outputs
        return self._copy_xla_outputs(prepared, outputs)

    def update_tile(
        self, shard: int, tile: int, memory: np.ndarray | None = None, arrived: Arrived = NOTHING
    ) -> None:
        """Updates what is in `memory` in its place, and makes what of outputs follows from it.

        Args:
          shard: whose tile.
          tile: which one.
          memory: has it, as `layout` says.
          arrived: has `needs(tile)`.
        """
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
            self._place_gradients(at, tile, address(memory) + self.layout.nbytes[tile])
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
        """As there, of what is given; of what is not, zeros where XLA reads it, and else None."""
        num = len(self._inputs)
        here = [i for i in range(num) if inputs[0][i] is not None]
        names, avals = [self._input_names[i] for i in here], [self._inputs[i] for i in here]
        shards = [[shard[i] for i in here] for shard in inputs]
        check_given(WHO, names, shards, avals, write=False)
        missing = {slot - len(self._state) for slot in self._xla.reads} & {*range(num)} - {*here}
        zeros = {i: np.zeros(self._inputs[i].shape, self._inputs[i].dtype) for i in missing}
        found = [zeros | dict(zip(here, on_host(shard), strict=True)) for shard in shards]
        return [[shard.get(i) for i in range(num)] for shard in found]

    def _place_gradients(self, at: np.ndarray, tile: int, memory: int) -> None:
        """The same of gradients, which begin at this address."""
        if not self.gradients.num_tiles:
            return
        extents, rows = self.gradients.tiles[tile], self._rows[tile]
        pairs = zip(self._gradient_ranges[tile], extents, strict=True)
        for (span, i, itemsize), extent in pairs:
            start = memory + extent.offset
            at[rows[span], len(self._state) + i] = start - span.first * itemsize

    def leaves(self, tile: int) -> set[int]:
        """The leaves of the state of which a tile updates elements, by index; residents among them."""
        slots = (
            slot for span in self.tiles[tile].spans for slot in self._members[span.together][3]
        )
        return {slot for slot in slots if slot < len(self._state)}

    def resident_ranges(self, tile: int) -> list[tuple[int, slice]]:
        """What a tile updates of residents: which one, by its index among leaves, and which elements."""
        return [
            (leaf, slice(span.first, span.first + span.num))
            for span in self.tiles[tile].spans
            for leaf in self._resident if leaf in self._members[span.together][3]
        ]  # fmt: skip

    def resident_bytes(self, tile: int) -> int:
        """Of these ranges, of one shard."""
        return sum(
            (part.stop - part.start) * self._state[leaf].dtype.itemsize
            for leaf, part in self.resident_ranges(tile)
        )

    def needs(self, tile: int) -> set[Part]:
        """What must have arrived before a tile is updated."""
        return {part for _, part, _ in self._arrivals[tile]}

    def _arrivals_of(self, tile: Tile) -> Iterator[tuple[Span, Part, int]]:
        """Of each range of a tile: the part of an input that it reads, and how many bytes come before it."""
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

    def _together(self, slots: Sequence[int], size: int, chunk: int) -> Together:
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
            leaves, itemsizes, size, chunk, frozenset(lone), math.lcm(*slices), gradients
        )

    def _chunk_of(self, slots: Sequence[int], chunk: int) -> int:
        """Its chunk, for what makes outputs; the last one, in which nobody waits, for all else.

        So tiles of all of that may be ordered as they are read.
        """
        makes = any(slot >= self._num_operands + self._num_made for slot in slots)
        return chunk if makes else len(self._chunks)

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


def _gradient_name(i: int, found: Sequence[Together], names: Sequence[str]) -> str:
    """What a gradient is called: by the first leaf of those that are updated with it, and its number."""
    leaves = next(x.leaves for x in found if i in (k for k, _ in x.gradients))
    return f"gradient {i}, of {names[leaves[0]]},"


def _reads(tile: Tile, found: Sequence[Together]) -> bool:
    """Whether a tile has state."""
    return any(found[span.together].leaves for span in tile.spans)
