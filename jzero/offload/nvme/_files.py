# SPDX-License-Identifier: Apache-2.0
"""The files of tiles of one process, which go from step to step together."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jzero._errors import OptionError, StateError, message
from jzero.offload.nvme import _folders, _making
from jzero.offload.nvme._about import NOT_OVERWRITTEN, FileSpec
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._file import TileFile
from jzero.offload.nvme._folders import GivenWrites
from jzero.offload.nvme._header import Write
from jzero.offload.nvme._tile_layout import WHO

_POLL_SECONDS = 0.005


class TileAt(NamedTuple):
    file: int  # in the order of names as they were given
    tile: int


class TileFiles:
    """State on a disk in files, one for each device's shards; see the notes in `_header.py`.

    A step reads the committed tiles, and writes all of them anew::

        files.begin(step)
        with sweep(files.tiles(), ring, files.read, files.write) as loaded_tiles:
            for loaded in loaded_tiles:
                update(loaded.buffer)
        files.commit(step)                  # or files.abort(), after any error

    What reads and writes tiles, parts of them and gradients may be called by any thread, and so may
    `note_checksums`; the rest by one at a time. All of it raises a `StateError` if the disk fails, what was
    written is damaged, or the files are lost.
    """

    def __init__(self, files: Sequence[TileFile], in_place: bool) -> None:
        self._files, self._in_place = list(files), in_place
        self.layouts = [file.layout for file in files]
        self.committed: Write | None = None
        self._slots: list[int] = []  # The slot of `committed` in each file.
        self._writing: int | None = None
        # The step that left tiles of two steps in files with one slot.
        self._lost: int | None = None
        self._pins: weakref.WeakSet[Pin] = weakref.WeakSet()

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], specs: Mapping[str, FileSpec],
        in_place: bool = False, run: str | None = None, ready: Callable[[], None] | None = None,
    ) -> TileFiles:  # fmt: skip
        """Makes the files, without a step yet, and reserves their space; if it fails, it leaves nothing.

        A folder of a run that ended before its first step was complete is put aside, with a warning. `ready`
        returns when all processes, which have decided that they may, have made theirs; by default this one is
        alone, and decides. `run` is the id of all of them. Raises an `OptionError` if there is no room, or
        the folder is used.
        """
        folder = Path(folder)
        if ready is None:
            _check_alone(folder)
        made = _making.make(folder, specs, in_place, run or new_run(), ready or (lambda: None))
        return cls(made, in_place)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], specs: Mapping[str, FileSpec],
        in_place: bool = False, step: Write | None = None, run: str | None = None,
    ) -> TileFiles:  # fmt: skip
        """Opens what an earlier run has left, made with the same arguments; writes nothing.

        It reads `step`, by default the newest that all files have. Raises an `OptionError` if another run has
        the files, and a `StateError` if one is missing, cut, damaged, dirty, of another state, or has not
        that step.
        """
        run = run or new_run()
        with contextlib.ExitStack() as undo:
            made = []
            for name, spec in specs.items():
                file = DirectFile(Path(folder) / name)
                undo.callback(file.close)
                made.append(TileFile(file, spec, in_place, run))
                made[-1].open()
            files = cls(made, in_place)
            files.select(step)
            undo.pop_all()
        return files

    @property
    def step(self) -> int | None:
        return None if self.committed is None else self.committed.step

    @property
    def steps(self) -> tuple[Write, ...]:
        """The steps that all files have, in order."""
        return tuple(sorted(set.intersection(*(set(file.steps) for file in self._files))))

    @property
    def folder(self) -> Path:
        return self._files[0].path.parent

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def memory_alignment(self) -> int:
        return max(file.file.memory_alignment for file in self._files)

    @property
    def most_bytes(self) -> int:
        return max((layout.most_bytes for layout in self.layouts), default=0)

    def tiles(self) -> Iterator[TileAt]:
        """The tiles that a step writes: the first of each file, then the second of each, and so on."""
        for tile in range(max((x.num_tiles for x in self.layouts), default=0)):
            for file, layout in enumerate(self.layouts):
                if tile < layout.num_tiles and not self._files[file].is_filled:
                    yield TileAt(file, tile)

    def select(self, step: Write | None = None) -> None:
        """Before the first `begin`: reads another step from here on; None is the newest that all have."""
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            each = [f"{file.path} has {_listed(sorted(file.steps))}" for file in self._files]
            what = "A step" if step is None else f"{step}".capitalize()
            raise StateError(message(
                WHO, each,
                f"{what} is resumed if all files have it, complete. {NOT_OVERWRITTEN}",
                "Restore the last checkpoint into a new path, without resume=True.", things="files", shown=8,
            ))  # fmt: skip
        chosen = steps[-1] if step is None else step
        for file in self._files:
            file.load(chosen)
        self.committed, self._slots = chosen, [file.steps[chosen] for file in self._files]

    def begin(self, step: int) -> None:
        """Marks the other slot of each file, or the only one, as being written; waits for pins on it."""
        self._check()
        assert self._writing is None, "begin, without commit or abort of the step before"
        self._wait_for_pins(lambda pin: self._in_place or pin.step != self.step)
        self._writing = step
        for file in self._files:
            file.begin(step, self.committed)

    def begin_gradients(self) -> None:
        """Lets gradients be written, from the first on, where the next step will be; waits for pins."""
        self._check()
        assert self._writing is None, "begin_gradients, without commit or abort of the step before"
        assert self.committed is not None, "begin_gradients, before a step was committed"
        self._wait_for_pins(lambda pin: not self._in_place and pin.step != self.step)
        for file in self._files:
            file.begin_gradients(self.committed)

    def _wait_for_pins(self, are_in_the_way: Callable[[Pin], bool]) -> None:
        while any(map(are_in_the_way, list(self._pins))):
            time.sleep(_POLL_SECONDS)

    def commit(self, step: int) -> None:
        """Makes the step that was written the committed one, on all disks."""
        assert self._writing == step, f"commit of step {step}, and {self._writing} was begun"
        for file in self._files:
            file.sync()
        for file in sorted(self._files, key=lambda file: not file.frozen):
            file.complete(step)
        for file in self._files:
            file.committed(step)
        write, slots = Write(step, self._files[0].run), [file.target for file in self._files]
        self.committed, self._slots = write, slots  # An interrupt finds both or neither.
        self._writing = None

    def abort(self) -> None:
        """Forgets what was written since `begin`; files in one slot are lost by that."""
        if self._writing is not None and self._in_place:
            self._lost = self._writing
        self._writing = None

    def _check(self) -> None:
        if self._lost is not None:
            raise StateError(message(
                WHO, f"step {self._lost} failed while it was written over the step before, in "
                f"{self.folder}",
                "With in_place=True a step that does not end leaves tiles of two steps.",
                "Restore the last checkpoint into a new path; in_place=False costs twice the space, and "
                "survives.",
            ))  # fmt: skip

    def read(self, at: TileAt, buffer: np.ndarray) -> None:
        self._check()
        assert self.step is not None, "read, before a step was committed"
        self._files[at.file].read(self._slots[at.file], at.tile, buffer)

    def read_lone(self, at: TileAt, i: int, buffer: np.ndarray) -> None:
        self._check()
        assert self.step is not None, "read, before a step was committed"
        self._files[at.file].read_lone(self._slots[at.file], at.tile, i, buffer)

    def write(self, at: TileAt, buffer: np.ndarray) -> None:
        assert self._writing is not None, "write, before begin"
        assert not self._files[at.file].is_filled, "write, of a file that is frozen"
        self._files[at.file].write(at.tile, buffer)

    def write_gradients(self, at: TileAt, i: int, pages: np.ndarray) -> None:
        """Writes the pages of extent `i` of a tile's gradients, since `begin_gradients`."""
        self._files[at.file].gradients.write(at.tile, i, pages)

    def read_with_gradients(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile of the committed step into a buffer, and behind it the gradients that wait for it."""
        self.read(at, buffer)
        file = self._files[at.file]
        file.gradients.read(at.tile, buffer[file.layout.nbytes[at.tile] :])

    def write_part(self, at: TileAt, offset: int, values: np.ndarray, buffer: np.ndarray) -> None:
        """Writes bytes of a tile from `offset` on; at the end `note_checksums` completes the tile."""
        assert self._writing is not None, "write, before begin"
        self._files[at.file].write_part(at.tile, offset, values, buffer)

    def note_checksums(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile that was written part by part since `begin`, and notes its checksums."""
        self._files[at.file].note_checksums(at.tile, buffer)

    def pin(self) -> Pin:
        """Keeps the committed step readable, beyond the commit of the next one."""
        self._check()
        assert self.step is not None, "pin, before a step was committed"
        pin = Pin(self.step, list(zip(self._files, self._slots, strict=True)), self._pins)
        self._pins.add(pin)
        return pin

    def close(self) -> None:
        """Closes the files, and releases their locks; again, does nothing."""
        for file in self._files:
            file.file.close()

    def __enter__(self) -> TileFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pin:
    """The right to read one step, while it lives: `begin` of the step that would overwrite it waits."""

    def __init__(
        self, step: int, slots: Sequence[tuple[TileFile, int]], pins: weakref.WeakSet[Pin]
    ) -> None:
        self.step, self._slots, self._pins = step, slots, pins

    def read(self, at: TileAt, buffer: np.ndarray) -> None:
        assert self in self._pins, "read, after the pin was released"
        file, slot = self._slots[at.file]
        file.read(slot, at.tile, buffer)

    def read_lone(self, at: TileAt, i: int, buffer: np.ndarray) -> None:
        assert self in self._pins, "read, after the pin was released"
        file, slot = self._slots[at.file]
        file.read_lone(slot, at.tile, i, buffer)

    def release(self) -> None:
        """Lets steps overwrite it; again, does nothing."""
        self._pins.discard(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _listed(steps: Sequence[Write]) -> str:
    if not steps:
        return "no complete step"
    return f"step{'s' * (len(steps) > 1)} {' and '.join(str(write.step) for write in steps)}"


def new_run() -> str:
    return secrets.token_hex(16)


def _check_alone(folder: Path) -> None:
    found = _making.look(folder) if os.path.lexists(folder) else None
    choice = _folders.decide(
        [{0: found} if found else {}], lambda *_: folder, False, GivenWrites({})
    )
    if choice.refusal:
        there, rule, edit = choice.refusal
        raise OptionError(message(WHO, there, rule, edit))
