# SPDX-License-Identifier: Apache-2.0
"""The files of tiles of one process, which go from step to step together."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jzero._errors import OptionError, StateError, message
from jzero._quantities import readable_bytes
from jzero.offload.nvme._about import NOT_OVERWRITTEN, FileSpec
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._file import TileFile, headers
from jzero.offload.nvme._header import COMPLETE, shown

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFINISHED = ".unfinished"  # the end of a file's name until it is made
_POLL_SECONDS = 0.005


class TileAt(NamedTuple):
    """A tile of some file.

    Attributes:
      file: which one, in the order of the files' names as they were given.
      tile: its number in the file.
    """

    file: int
    tile: int


class TileFiles:
    """State on a disk in files, one for each device's shards; see the notes in `_header.py`.

    A step reads the committed tiles, and writes all of them anew::

        files.begin(step)
        with sweep(files.tiles(), ring, files.read, files.write) as visits:
            for visit in visits:
                update(visit.buffer)
        files.commit(step)                  # or files.abort(), after any error

    What reads and writes tiles, parts of them and gradients may be called by any thread, as `note_checksums`
    may, and the rest by one at a time.

    Attributes:
      layouts: of each file, what lies where in its tiles.
      step: the committed step, which is read; None if there is none yet.
    """

    def __init__(self, who: str, files: Sequence[TileFile], in_place: bool) -> None:
        """Use `create` or `open`."""
        self._who, self._files, self._in_place = who, list(files), in_place
        self.layouts = [file.layout for file in files]
        self.step: int | None = None
        self._slots: list[int] = []  # The slot of `step` in each file.
        self._writing: int | None = None
        self._lost: int | None = None  # The step at which files in one slot were left in between.
        self._pins: weakref.WeakSet[Pin] = weakref.WeakSet()

    @classmethod
    def create(
        cls, who: str, folder: str | os.PathLike[str], specs: Mapping[str, FileSpec],
        in_place: bool = False,
    ) -> TileFiles:  # fmt: skip
        """Makes the files, which have no step yet, and reserves all of their space.

        Files of a run that ended before its first step was complete are replaced. A call that fails leaves
        nothing behind.

        Args:
          who: what the user called; errors begin with it.
          folder: of the files; made if it is not there.
          specs: of each file its name, layout and identity.
          in_place: one slot instead of two.

        Raises:
          OptionError: there is no room, files with a step are there, or another run has them.
        """
        folder, made = Path(folder), list[TileFile]()
        with contextlib.ExitStack() as undo, _named(who, folder, made):
            _make_folder(folder, undo)
            for name, spec in specs.items():
                made.append(_started(who, folder / name, spec, in_place, undo))
            for old in [_replaceable(who, folder / name, undo) for name in specs]:
                if old is not None:
                    old.path.unlink()
                    old.close()
            for file in made:  # The space of all, before any is filled.
                file.file.resize(file.size)
            for file in made:
                file.make()
            for file, name in zip(made, specs, strict=True):
                undo.callback((folder / name).unlink, missing_ok=True)
                os.rename(file.path, folder / name)
                file.file.path = folder / name
            _sync_folder(folder)
            undo.pop_all()
        return cls(who, made, in_place)

    @classmethod
    def open(
        cls, who: str, folder: str | os.PathLike[str], specs: Mapping[str, FileSpec],
        in_place: bool = False, step: int | None = None,
    ) -> TileFiles:  # fmt: skip
        """Opens files that an earlier run has left. Nothing is written before `begin`.

        Args:
          who: what the user called; errors begin with it.
          folder: of the files.
          specs: of each file its name, layout and identity, which must be those that it was made with.
          in_place: as they were made.
          step: which one to read; None for the newest that all files have.

        Raises:
          OptionError: another run has them.
          StateError: a file is missing, cut, damaged, dirty, or of another state; or there is no such step.
        """
        with contextlib.ExitStack() as undo:
            made = []
            for name, spec in specs.items():
                made.append(TileFile(who, DirectFile(who, Path(folder) / name), spec, in_place))
                undo.callback(made[-1].file.close)
                made[-1].open()
            files = cls(who, made, in_place)
            files.select(step)
            undo.pop_all()
        return files

    @staticmethod
    def never_complete(
        who: str, folder: str | os.PathLike[str], specs: Mapping[str, FileSpec]
    ) -> bool:
        """Whether the run that has left files ended before its first step was complete in all of them.

        Raises:
          OptionError: another run has one.
          StateError: one has no intact header.
        """
        with contextlib.ExitStack() as undo:
            for path in (Path(folder) / name for name in specs):
                if not path.exists():
                    continue
                file = DirectFile(who, path)
                undo.callback(file.close)
                if all(header.state != COMPLETE for header in headers(who, file)):
                    return True
        return False

    # ------------------------------------------------------------------------------- what there is

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that all files have, in order; what processes compare to choose one that all have."""
        return tuple(sorted(set.intersection(*(set(file.steps) for file in self._files))))

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._files[0].path.parent

    @property
    def paths(self) -> list[Path]:
        """Each file."""
        return [file.path for file in self._files]

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache, in all files."""
        return all(file.file.direct for file in self._files)

    @property
    def memory_alignment(self) -> int:
        """Of memory that tiles are read into, in bytes."""
        return max(file.file.memory_alignment for file in self._files)

    @property
    def note(self) -> str:
        """What is to be said of the file system; empty if nothing is."""
        found = {file.file.why_not for file in self._files} - {""}
        if not found:
            return ""
        return (
            f"{self.folder} is read and written through the page cache, which is slower "
            f"and takes the host's memory: {', '.join(sorted(found))}."
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads, and as many that it writes."""
        moved = [file.layout for file in self._files if not file.frozen]
        return sum(x.nbytes(tile) for x in moved for tile in range(x.num_tiles))

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest tile of all files, a multiple of 4096."""
        return max((layout.most_bytes for layout in self.layouts), default=0)

    def tiles(self) -> Iterator[TileAt]:
        """Those that a step writes: of each file in turn its first, then of each its second, and so on.

        So the shards of all devices go ahead side by side. Of files that are frozen the first step's only.
        """
        for tile in range(max((x.num_tiles for x in self.layouts), default=0)):
            for file, layout in enumerate(self.layouts):
                if tile < layout.num_tiles and not self._files[file].is_filled:
                    yield TileAt(file, tile)

    # --------------------------------------------------------------------------------------- steps

    def select(self, step: int | None = None) -> None:
        """Reads another step from here on; None is the newest that all files have. Before the first `begin`.

        Raises:
          StateError: there is none, or its checksums are damaged.
        """
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            each = [f"{file.path} has {_listed(sorted(file.steps))}" for file in self._files]
            what = "A step" if step is None else f"Step {shown(step)}"
            raise StateError(message(
                self._who, each,
                f"{what} is resumed if all files have it, complete. {NOT_OVERWRITTEN}",
                "Restore the last checkpoint into a new path, without resume=True.", things="files", shown=8,
            ))  # fmt: skip
        chosen = steps[-1] if step is None else step
        for file in self._files:
            file.load(chosen)
        self.step, self._slots = chosen, [file.steps[chosen] for file in self._files]

    def begin(self, step: int) -> None:
        """Marks the other slot of each file, or the only one, as being written; waits for pins on it.

        Raises:
          StateError: the disk fails, or the files are lost.
        """
        self._check()
        assert self._writing is None, "begin, without commit or abort of the step before"
        self._wait_for_pins(lambda pin: self._in_place or pin.step != self.step)
        self._writing = step
        for file in self._files:
            file.begin(step, self.step)

    def begin_gradients(self) -> None:
        """Lets gradients be written, where the next step will be, or behind the only slot; waits for pins.

        Again, forgets those that were written: nothing else needs to be done if a step fails meanwhile.

        Raises:
          StateError: the disk fails, or the files are lost.
        """
        self._check()
        assert self._writing is None, "begin_gradients, without commit or abort of the step before"
        assert self.step is not None, "begin_gradients, before a step was committed"
        self._wait_for_pins(lambda pin: not self._in_place and pin.step != self.step)
        for file in self._files:
            file.begin_gradients(self.step)

    def _wait_for_pins(self, are_in_the_way: Callable[[Pin], bool]) -> None:
        while any(map(are_in_the_way, list(self._pins))):
            time.sleep(_POLL_SECONDS)

    def commit(self, step: int) -> None:
        """Makes the step that was written the committed one, on all disks.

        Raises:
          StateError: a disk fails; then the step before is still committed, with two slots.
        """
        assert self._writing == step, f"commit of step {step}, and {self._writing} was begun"
        for file in self._files:
            file.sync()
        for file in sorted(self._files, key=lambda file: not file.frozen):
            file.complete(step)
        for file in self._files:
            file.committed(step)
        self.step, self._slots = step, [file.target for file in self._files]
        self._writing = None

    def abort(self) -> None:
        """Forgets what was written since `begin`; files in one slot are lost by that."""
        if self._writing is not None and self._in_place:
            self._lost = self._writing
        self._writing = None

    def _check(self) -> None:
        if self._lost is not None:
            raise StateError(message(
                self._who, f"step {shown(self._lost)} failed while it was written over the step before, in "
                f"{self.folder}",
                "With in_place=True a step that does not end leaves tiles of two steps.",
                "Restore the last checkpoint into a new path; in_place=False costs twice the space, and "
                "survives.",
            ))  # fmt: skip

    # --------------------------------------------------------------------------------------- tiles

    def read(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile of the committed step into a buffer.

        Raises:
          StateError: it cannot be read, is not what was written, or the files are lost.
        """
        self._check()
        assert self.step is not None, "read, before a step was committed"
        self._files[at.file].read(self._slots[at.file], at.tile, buffer)

    def read_lone(self, at: TileAt, i: int, buffer: np.ndarray) -> None:
        """Reads the pages of a tile's extent `i`, which is lone, of the committed step, into a buffer.

        Raises:
          StateError: as of `read`.
        """
        self._check()
        assert self.step is not None, "read, before a step was committed"
        self._files[at.file].read_lone(self._slots[at.file], at.tile, i, buffer)

    def write(self, at: TileAt, buffer: np.ndarray) -> None:
        """Writes a tile of the step that was begun.

        Raises:
          StateError: it cannot be written.
        """
        assert self._writing is not None, "write, before begin"
        assert not self._files[at.file].is_filled, "write, of a file that is frozen"
        self._files[at.file].write(at.tile, buffer)

    def write_gradients(self, at: TileAt, i: int, pages: np.ndarray) -> None:
        """Writes the pages of extent `i` of a tile's gradients, since `begin_gradients`.

        Raises:
          StateError: they cannot be written.
        """
        self._files[at.file].gradients.write(at.tile, i, pages)

    def read_with_gradients(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile of the committed step into a buffer, and behind it the gradients that wait for it.

        Raises:
          StateError: as of `read`.
        """
        self.read(at, buffer)
        file = self._files[at.file]
        file.gradients.read(at.tile, buffer[file.layout.nbytes(at.tile) :])

    def write_part(self, at: TileAt, offset: int, values: np.ndarray, buffer: np.ndarray) -> None:
        """Writes some bytes of a tile of the step that was begun, from `offset` of the tile on.

        When all parts of it are written, `note_checksums` completes it.

        Raises:
          StateError: they cannot be written.
        """
        assert self._writing is not None, "write, before begin"
        self._files[at.file].write_part(at.tile, offset, values, buffer)

    def note_checksums(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile that was written part by part since `begin`, and notes its checksums.

        Raises:
          StateError: it cannot be read.
        """
        self._files[at.file].note_checksums(at.tile, buffer)

    def pin(self) -> Pin:
        """Keeps the committed step readable, beyond the commit of the next one."""
        self._check()
        assert self.step is not None, "pin, before a step was committed"
        pin = Pin(self.step, list(zip(self._files, self._slots, strict=True)), self._pins)
        self._pins.add(pin)
        return pin

    # ----------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Closes the files, and lets another run have them; again, does nothing."""
        for file in self._files:
            file.file.close()

    def remove(self) -> None:
        """Closes the files and removes them from the disk."""
        for file in self._files:
            file.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> TileFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pin:
    """The right to read one step, while it lives: `begin` of the step that would write over it waits.

    Attributes:
      step: which one.
    """

    def __init__(
        self, step: int, slots: Sequence[tuple[TileFile, int]], pins: weakref.WeakSet[Pin]
    ) -> None:
        self.step, self._slots, self._pins = step, slots, pins

    def read(self, at: TileAt, buffer: np.ndarray) -> None:
        """Reads a tile of the step into a buffer.

        Raises:
          StateError: it cannot be read, or is not what was written.
        """
        assert self in self._pins, "read, after the pin was released"
        file, slot = self._slots[at.file]
        file.read(slot, at.tile, buffer)

    def read_lone(self, at: TileAt, i: int, buffer: np.ndarray) -> None:
        """Reads the pages of a tile's extent `i`, which is lone, of the step, into a buffer.

        Raises:
          StateError: as of `read`.
        """
        assert self in self._pins, "read, after the pin was released"
        file, slot = self._slots[at.file]
        file.read_lone(slot, at.tile, i, buffer)

    def release(self) -> None:
        """Lets steps write over it; again, does nothing."""
        self._pins.discard(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# ------------------------------------------------------------------------------------------- making


@contextlib.contextmanager
def _named(who: str, folder: Path, made: Sequence[TileFile]) -> Iterator[None]:
    """Around the making of files: says what was needed, and what there was, if the system refuses it."""
    disk = None
    try:
        disk = os.statvfs(next(path for path in [folder, *folder.parents] if path.exists()))
        yield
    except (OSError, StateError) as error:
        cause = error.__cause__ if isinstance(error, StateError) else error
        if not isinstance(cause, OSError):
            raise
        if cause.errno not in _NO_ROOM or disk is None:
            raise OptionError(message(
                who, f"files cannot be made in {folder}: {cause.strerror}",
                "State is kept in files in this folder. Nothing was left behind.", "Use another path.",
            )) from error  # fmt: skip
        free, needed = disk.f_bavail * disk.f_frsize, sum(file.size for file in made)
        raise OptionError(message(
            who, f"{len(made)} files in {folder} need {needed} bytes ({readable_bytes(needed)}), and "
            f"{free} ({readable_bytes(free)}) are free: {cause.strerror}",
            "All of their space is reserved before the first step. Nothing was left behind.",
            "Make room, shard over more hosts, or use in_place=True, which needs half.",
        )) from error  # fmt: skip


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    """Makes a folder and those around it; those that it made go again if what follows fails."""
    for path in reversed([path for path in [folder, *folder.parents] if not path.exists()]):
        path.mkdir(exist_ok=True)
        undo.callback(_remove_folder, path)
        _sync_folder(path.parent)


def _remove_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # Another process of the run has its files there.
        path.rmdir()


def _replaceable(who: str, path: Path, undo: contextlib.ExitStack) -> DirectFile | None:
    """A file that is there, locked, if no step is in it; None if there is none.

    Raises:
      OptionError: a step may be in it.
    """
    if not path.exists():
        return None
    file = DirectFile(who, path)
    undo.callback(file.close)
    steps = [header.step for header in headers(who, file) if header.state == COMPLETE]
    if steps:
        raise OptionError(message(
            who, f"{path} has the state of step {shown(max(steps))}",
            f"A run starts with files of its own. {NOT_OVERWRITTEN}",
            "Use resume=True to go on with it, remove it, or use another path."))  # fmt: skip
    return file


def _started(
    who: str, path: Path, spec: FileSpec, in_place: bool, undo: contextlib.ExitStack
) -> TileFile:
    """A new file of another name, which nobody else is making."""
    private = path.with_name(path.name + _UNFINISHED)
    file = DirectFile(who, private, create=True)
    undo.callback(file.close)
    undo.callback(private.unlink, missing_ok=True)
    file.resize(0)  # What a run that was killed has left of it.
    return TileFile(who, file, spec, in_place)


def _sync_folder(folder: Path) -> None:
    """So that the names of the files survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "no complete step"
    return f"step{'s' * (len(steps) > 1)} {' and '.join(str(shown(step)) for step in steps)}"
