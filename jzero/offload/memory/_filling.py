# SPDX-License-Identifier: Apache-2.0
"""`Filling`: a state on its way into files, leaf by leaf; or files of the same step, found there."""

from __future__ import annotations

import itertools
import shutil
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np

from jzero._errors import JzeroError, StateError, message
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._away_array import Home, copy_parts, parts_for, sizes_of
from jzero.offload.memory._nvme_array import NVMeArray
from jzero.offload.memory._nvme_store import BUFFERS, WHO, NVMeStore, StoreSpec, counter_in
from jzero.offload.nvme._files import TileAt, TileFiles
from jzero.offload.nvme._sweep import sweep
from jzero.processes import _agreement

# The folders of states that are alive; and of all that this process has made, and what it has resumed.
_alive: weakref.WeakValueDictionary[Path, NVMeStore] = weakref.WeakValueDictionary()
_made: set[Path] = set()
_gone_on: set[Path] = set()


class Filling:
    """Places leaves of one state in files of their own.

    Behaves like::

        with Filling(spec) as filling:
            filling.start(leaves)                       # what is on the devices says of which step it is
            placed = filling.put(leaf, name, home)      # a leaf of a state of such a program
        # left without error: the files have the state; with one: there are no files

    Attributes:
      resumed: whether the files had the state already, so that leaves need not be given.
    """

    def __init__(self, spec: StoreSpec):
        self._spec, self.resumed = spec, False
        self._store: NVMeStore | None = None
        self._folder = Path()
        # Of each extent that was written, a checksum.
        self._written: dict[tuple[TileAt, int], int] = {}

    @property
    def started(self) -> bool:
        """Whether there are files."""
        return self._store is not None

    def start(self, leaves: Sequence[Any]) -> None:
        """Opens or makes the files.

        Args:
          leaves: of the state; those that the counter is made of must be there.

        Raises:
          OptionError: there is no room, or an earlier run has left files.
          StateError: files that are to be resumed are of another step or state, or damaged.
        """
        counter, mesh = self._spec.counter(leaves), self._spec.mesh
        with _agreement.alike(
            WHO, mesh, lambda: {"files": [f"resumed: {self.resumed}, {counter}"]}
        ):
            self._start(counter)

    def _start(self, counter: int) -> None:
        spec = self._spec
        base = spec.path / f"process-{jax.process_index()}"
        if spec.resume and (found := _resumed(spec, base, counter)) is not None:
            self._folder, files = found
            self.resumed = True
            self._store = NVMeStore(spec, files)
            # They are the earlier run's: never to be removed for another state of this process.
            _gone_on.add(self._folder)
            _made.discard(self._folder)
        else:
            self._folder = _next_folder(base)
            files = TileFiles.create(WHO, self._folder, spec.files, spec.in_place)
            self._store = NVMeStore(spec, files)
            self._store.first = self._store.begin(counter)
            _made.add(self._folder)
        _alive[self._folder] = self._store

    def put(self, leaf: Any, name: str, home: Home) -> NVMeArray:
        """A leaf in its place: an array of any kind; of files that were resumed, whatever it is."""
        assert self._store is not None, "start comes first"
        if not self.resumed:
            parts = parts_for(leaf, home)
            for file, box in enumerate(home.boxes()):
                values = host_empty(sizes_of(box), home.dtype)
                values[...] = 0
                copy_parts([(box, values)], parts, home.shape)
                self._write(values.reshape(-1).view(np.uint8), file, name)
        return NVMeArray(home, self._store, name)

    def _write(self, values: np.ndarray, file: int, name: str) -> None:
        assert self._store is not None
        for place in self._spec.places(file, name, 0, len(values)):
            extent, buffer = place.extent, self._spec.ring.buffers[0]
            part = values[extent.start : extent.start + extent.nbytes]
            self._store.files.write_part(place.at, extent.offset, part, buffer)
            self._written[place.at, place.i] = zlib.crc32(part.data)

    def _complete(self) -> None:
        """Reads all tiles once: their checksums are noted, and leaves are what was written of them."""
        assert self._store is not None
        files = self._store.files
        with sweep(files.tiles(), self._spec.ring, files.note_checksums) as visits:
            for at, buffer in ((visit.at, visit.buffer) for visit in visits):
                layout = files.layouts[at.file]
                for i, view in enumerate(layout.views(at.tile, buffer)):
                    if zlib.crc32(view.data) != self._written[at, i]:
                        self._damaged(at, layout.tiles[at.tile][i].leaf)
        files.commit(self._store.first)

    def _damaged(self, at: TileAt, leaf: str) -> NoReturn:
        assert self._store is not None
        path = self._store.files.paths[at.file]
        raise StateError(message(
            WHO, f"{leaf} in tile {at.tile} of {path} is not what was just written",
            "What is on the disk must be what was written.", "Look at the disk, or use another path."
        ))  # fmt: skip

    def __enter__(self) -> Filling:
        BUFFERS.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        try:
            if error is None:
                with _agreement.alike(WHO, self._spec.mesh, lambda: {"files": ["complete"]}):
                    self._end(finish=True)
            else:
                self._end(finish=False)
        finally:
            BUFFERS.release()

    def _end(self, finish: bool) -> None:
        if self._store is None or self.resumed:
            return
        try:
            if finish:
                self._complete()
        except BaseException:
            self._drop()
            raise
        if not finish:
            self._drop()

    def _drop(self) -> None:
        assert self._store is not None
        self._store.files.abort()
        self._store.files.remove()
        _remove(self._folder)


def _next_folder(base: Path) -> Path:
    """Where the next state of this process goes: beside those that are alive, over those that are not."""
    for folder in _folders(base):
        if folder not in _alive:
            if folder in _made:
                _remove(folder)
            return folder
    raise AssertionError


def _remove(folder: Path) -> None:
    """What this process has made, and nobody has any more."""
    shutil.rmtree(folder, ignore_errors=True)
    _made.discard(folder)


def _folders(base: Path) -> Iterator[Path]:
    return (base / f"state-{number}" for number in itertools.count())


def _resumed(spec: StoreSpec, base: Path, counter: int) -> tuple[Path, TileFiles] | None:
    """The files that an earlier run has left of this state; None if there are none at all.

    Raises:
      JzeroError: there are some, and none is of this state and step.
    """
    failures: list[JzeroError] = []
    for folder in _folders(base):
        if folder in _alive:
            if folder in _gone_on:
                failures.append(_in_use(folder))
            continue
        if not folder.exists():
            break
        try:
            if TileFiles.never_complete(WHO, folder, spec.files):
                _remove(folder)
                continue
            return folder, _opened(spec, folder, counter)
        except JzeroError as error:
            failures.append(error)
    if failures:
        raise failures[-1]
    return None


def _in_use(folder: Path) -> StateError:
    return StateError(message(
        WHO, f"a state of this process goes on with {folder}, and there are no others to go on with",
        "With resume=True optimizer state comes from files, and not from what is given in its place. "
        "Nothing was overwritten.", "Use that state, or let go of it first (an exception that is kept keeps "
        "it, too); for another state, use another path."))  # fmt: skip


def _opened(spec: StoreSpec, folder: Path, counter: int) -> TileFiles:
    files = TileFiles.open(WHO, folder, spec.files, spec.in_place)
    steps = [step for step in files.steps if counter_in(step) == counter]
    if steps:
        files.select(steps[-1])
        return files
    found = " or ".join(str(counter_in(step)) for step in files.steps)
    files.close()
    raise StateError(message(
        WHO, f"{folder} has optimizer state of step {found}, and the rest of the state is of step {counter}",
        f"With resume=True both are of one step, by the sum of {' and '.join(spec.counter_paths)}. "
        "Nothing was overwritten.", f"Restore the checkpoint of step {found}; or, to start from this state, "
        "drop resume=True and remove the folder."))  # fmt: skip
