# SPDX-License-Identifier: Apache-2.0
"""`Filling`: writes a state to files, leaf by leaf, or finds files of the same step."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jzero._errors import OptionError, StateError, message
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._leaf_array import parts_for
from jzero.offload.memory._nvme_store import BUFFERS, NVMeStore, StoreSpec
from jzero.offload.memory._storage import HostPlacement, copy_parts, sizes_of
from jzero.offload.nvme import _making
from jzero.offload.nvme._aligned import Claim
from jzero.offload.nvme._files import TileAt, TileFiles, new_run
from jzero.offload.nvme._folders import GONE, MADE, RESUMED, Choice, Folder, GivenWrites, decide
from jzero.offload.nvme._header import Write
from jzero.offload.nvme._sweep import sweep
from jzero.offload.nvme._tile_layout import WHO
from jzero.processes import _agreement

_alive: weakref.WeakValueDictionary[Path, NVMeStore] = weakref.WeakValueDictionary()
# Folders that this process has made, with the id in the files and their names; and resumed.
_made: dict[Path, tuple[str, list[str]]] = {}
_gone_on: set[Path] = set()


class Filling:
    """Places leaves of one state in files of their own, or finds them there (`resumed`).

    Behaves like::

        with Filling(spec, paths, in_files) as filling:
            filling.start(writes)                       # the commit of each leaf that will be placed
            placed = filling.put(leaf, name, placement)
        # left without error: the files have the state; with one: there are no files
    """

    def __init__(self, spec: StoreSpec, paths: Mapping[int, str], in_files: Collection[int]):
        """`paths` are of the leaves that are placed, by index; `in_files` of them go into files."""
        self._spec, self.resumed = spec, False
        self._paths, self._in_files = paths, frozenset(in_files)
        self._store: NVMeStore | None = None
        self._claim: Claim | None = None  # on the buffers
        self._folder = Path()
        # A checksum of each extent that was written.
        self._written: dict[tuple[TileAt, int], int] = {}

    def start(self, writes: Sequence[Write | None]) -> None:
        """Opens or makes the files, for leaves of these commits; refuses files of another state or step."""
        others = {path: writes[i] for i, path in self._paths.items() if i not in self._in_files}
        of_files = {path: writes[i] for i, path in self._paths.items() if i in self._in_files}
        wanted = GivenWrites(others or of_files, [*of_files.values()])
        choice: list[Choice] = []
        with _agreement.alike(WHO, self._spec.mesh, lambda: {"files": [f"{choice}"]}):
            found, runs = _found_by_all(self._spec)
            choice.append(decide(found, self._path, self._spec.resume, wanted))
            self._start(choice[0], runs[0])

    def _start(self, choice: Choice, run: str) -> None:
        """Does what was chosen; what is written from here on belongs to this `run`."""
        spec = self._spec
        if choice.refusal is not None:
            there, rule, edit = choice.refusal
            kind = StateError if spec.resume else OptionError
            raise kind(message(WHO, there, rule, edit, things="folders", shown=8))
        self._folder = _base(spec) / f"state-{choice.number}"
        if choice.write is not None:
            files = TileFiles.open(self._folder, spec.files, spec.in_place, choice.write, run)
            self.resumed = True
            self._store = NVMeStore(spec, files)
            # They are the earlier run's: never to be removed for another state of this process.
            _gone_on.add(self._folder)
            _made.pop(self._folder, None)
        else:
            self._claim = spec.ring.claim()  # Before anything is made.
            if self._folder in _made:
                _remove(self._folder)

            def ready() -> None:
                _agreement.agree(WHO, spec.mesh, lambda: {"files": ["made"]})

            files = TileFiles.create(self._folder, spec.files, spec.in_place, run, ready)
            self._store = NVMeStore(spec, files)
            self._store.begin()
            _made[self._folder] = run, [*spec.files]
            _gone_on.discard(self._folder)
        _alive[self._folder] = self._store

    def _path(self, process: int, number: int) -> Path:
        """The folder of a state, of a process by its place among those that have files."""
        each = sorted({device.process_index for device in self._spec.mesh.devices.flat})
        return self._spec.path / f"process-{each[process]}" / f"state-{number}"

    def put(self, leaf: Any, name: str, placement: HostPlacement) -> FileStorage:
        """Puts any array in its place; of resumed files, `leaf` does not matter."""
        assert self._store is not None, "start comes first"
        if not self.resumed:
            parts = parts_for(leaf, placement)
            for file, box in enumerate(placement.boxes()):
                values = host_empty(sizes_of(box), placement.dtype)
                values[...] = 0
                copy_parts([(box, values)], parts, placement.shape)
                self._write(values.reshape(-1).view(np.uint8), file, name)
        return FileStorage(placement, self._store, name)

    def _write(self, values: np.ndarray, file: int, name: str) -> None:
        assert self._store is not None
        for place in self._spec.places(file, name, 0, len(values)):
            extent, buffer = place.extent, self._spec.ring.buffers[0]
            part = values[extent.start : extent.start + extent.nbytes]
            self._store.files.write_part(place.at, extent.offset, part, buffer)
            self._written[place.at, place.i] = zlib.crc32(part.data)

    def _complete(self) -> None:
        """Reads all tiles once: notes their checksums, and checks that leaves were written right."""
        assert self._store is not None
        files = self._store.files
        with sweep(files.tiles(), self._spec.ring, files.note_checksums) as tiles:
            for at, buffer in ((tile.at, tile.buffer) for tile in tiles):
                layout = files.layouts[at.file]
                for i, view in enumerate(layout.views(at.tile, buffer)):
                    if zlib.crc32(view.data) != self._written[at, i]:
                        self._damaged(at, layout.tiles[at.tile][i].leaf)
        files.commit(self._store.newest)

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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                with _agreement.alike(WHO, self._spec.mesh, lambda: {"files": ["complete"]}):
                    self._end(finish=True)
            else:
                self._end(finish=False)
        finally:
            if self._claim is not None:
                self._claim.release()
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
        self._store.files.close()
        _remove(self._folder)


def _remove(folder: Path) -> None:
    _, names = _made.pop(folder, ("", []))
    _making.remove(folder, names)


def _base(spec: StoreSpec) -> Path:
    return spec.path / f"process-{jax.process_index()}"


def _found_by_all(spec: StoreSpec) -> tuple[list[dict[int, Folder]], list[str]]:
    """Each process's folders, and an id that each has drawn."""
    there = _making.folders(_base(spec))
    own = {number: found for number, path in there if (found := _found(path))}
    brought = _agreement.gather(WHO, spec.mesh, {"folders": [*own.items()], "run": new_run()})
    folders = [{n: Folder.of_json(x) for n, x in each["folders"]} for each in brought]
    return folders, [each["run"] for each in brought]


def _found(folder: Path) -> Folder | None:
    """What is in a folder, and how states of this process use it."""
    if folder in _alive:
        return Folder(RESUMED if folder in _gone_on else MADE)
    found = _making.look(folder)
    # Another run may have gone on with them.
    is_ours = found and folder in _made and {*found.runs} == {_made[folder][0]}
    return found._replace(use=GONE) if found and is_ours else found
