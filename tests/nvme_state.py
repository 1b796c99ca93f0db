"""A small state on a disk, for tests of `jzero.offload.nvme`: each tile says which one of which step it is.

Functions that take `say` are children's (`faults.Children`).
"""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import faults
from faults._library import armed
from jzero.offload.nvme._aligned import TileRing, pages
from jzero.offload.nvme._files import FileSpec, TileAt, TileFiles
from jzero.offload.nvme._header import Write
from jzero.offload.nvme._sweep import sweep
from jzero.offload.nvme._tile_layout import PAGE, TileLayout

NUM_TILES, PART = (
    5,
    3000,
)  # Two parts of so many bytes are a tile, of two pages; the second one is lone.
LAYOUT = TileLayout.of(
    [[(x, i * PART, PART, x == "v") for x in ("m", "v")] for i in range(NUM_TILES)]
)
# What no step changes, in the last file.
FROZEN = TileLayout.of([[(f"w{i}", 0, PART), (f"x{i}", 0, PART, True)] for i in range(2)])
# What waits in a file for the update of some tiles, as gradients do.
WITH_GRADIENTS = (0, 3)
GRADIENTS = TileLayout.of(
    [[("g", i * PART, PART, True)] * (i in WITH_GRADIENTS) for i in range(NUM_TILES)]
)
SPECS = {
    f"device-{k}.tiles": FileSpec(LAYOUT, {"mesh": {"data": 2}, "device": k}, gradients=GRADIENTS)
    for k in range(2)
} | {"kept.tiles": FileSpec(FROZEN, {"mesh": {"data": 2}}, frozen=True)}


def disk_bytes(files: TileFiles) -> int:
    return sum(path.stat().st_size for path in files.paths)


def remove(files: TileFiles) -> None:
    for path in files.paths:
        path.unlink(missing_ok=True)
    files.close()


def why_not(files: TileFiles) -> str:
    """Why transfers go through the page cache; empty if they do not."""
    return ", ".join({file.file.why_not for file in files._files} - {""})


def step_bytes(files: TileFiles) -> int:
    """Bytes that a step reads, and as many that it writes."""
    return sum(sum(file.layout.nbytes) for file in files._files if not file.frozen)


def new_ring() -> TileRing:
    size = LAYOUT.most_bytes + GRADIENTS.most_bytes
    return TileRing(4 * size, size)


def value(step: int, at: TileAt) -> int:
    return 1000 * step * (at.file < 2) + 10 * at.file + at.tile


def create(root: str | pathlib.Path, in_place: bool = False) -> TileFiles:
    return TileFiles.create(pathlib.Path(root) / "run", SPECS, in_place)


def reopen(
    root: str | pathlib.Path, in_place: bool = False, step: Write | None = None
) -> TileFiles:
    return TileFiles.open(pathlib.Path(root) / "run", SPECS, in_place, step)


def numbers(writes: Iterable[Write]) -> tuple[int, ...]:
    return tuple(sorted(write.step for write in writes))


def step_of(files: TileFiles) -> int:
    """The committed step."""
    assert files.step is not None
    return files.step


def fill(files: TileFiles, step: int = 0, ring: TileRing | None = None) -> None:
    """Writes a first step."""
    files.begin(step)
    with sweep(files.tiles(), ring or new_ring(), write=files.write) as visits:
        for visit in visits:
            visit.buffer.view(np.int64)[:] = value(step, visit.at)
    files.commit(step)


def train(files: TileFiles, ring: TileRing | None = None) -> None:
    """One step: writes a gradient for every tile, then reads, updates and writes it."""
    step = step_of(files) + 1
    files.begin_gradients()
    page = pages(PAGE)
    for at in files.tiles():
        if at.tile in WITH_GRADIENTS:
            page.view(np.int64)[:] = gradient(step, at)
            files.write_gradients(at, 0, page)
    files.begin(step)
    with sweep(files.tiles(), ring or new_ring(), files.read_with_gradients, files.write) as visits:
        for visit in visits:
            size = LAYOUT.nbytes[visit.at.tile]
            found = visit.buffer[size : size + PAGE].view(np.int64)
            if visit.at.tile in WITH_GRADIENTS:
                assert (found == gradient(step, visit.at)).all(), (step, visit.at)
            visit.buffer[:size].view(np.int64)[:] += 1000
    files.commit(step)


def gradient(step: int, at: TileAt) -> int:
    return -value(step, at) - 1


def check(files: TileFiles, step: int | None = None) -> None:
    """That every tile is of the committed step, in every word; and so is what is read without its tile."""
    step = files.step if step is None else step
    assert files.step == step is not None
    every = [*files.tiles(), *(TileAt(2, tile) for tile in range(FROZEN.num_tiles))]
    assert len({*every}) == NUM_TILES * 2 + FROZEN.num_tiles
    with sweep(every, new_ring(), files.read) as visits:
        for visit in visits:
            size = files.layouts[visit.at.file].nbytes[visit.at.tile]
            words = visit.buffer[:size].view(np.int64)
            assert (words == value(step, visit.at)).all(), (step, visit.at, set(words.tolist()))
    page = pages(PAGE)
    for at in every:
        files.read_lone(at, 1, page)
        assert (page.view(np.int64) == value(step, at)).all(), (step, at)


@contextlib.contextmanager
def made(root: pathlib.Path, in_place: bool = False, steps: int = 1) -> Iterator[TileFiles]:
    """Files after so many steps."""
    with create(root, in_place) as files:
        fill(files)
        for _ in range(steps):
            train(files)
        yield files


# ----------------------------------------------------------------------------------- in children


def step_in_child(
    say: Callable[[Any], None], root: str, in_place: bool, fault: list[Any], log: str | None = None
) -> None:
    """One step more, with a fault in it; what it raised, and the step after it."""
    with reopen(root, in_place) as files, armed(root, faults.Fault(*fault), log):
        _attempt(say, files)


def create_in_child(
    say: Callable[[Any], None], root: str, in_place: bool, fault: list[Any], log: str | None = None
) -> None:
    """The files are made, with a fault."""
    with armed(root, faults.Fault(*fault), log):
        try:
            with create(root, in_place) as files:
                say({"note": why_not(files)})
        except Exception as error:
            say({"error": type(error).__name__, "message": str(error)})


def train_in_child(say: Callable[[Any], None], root: str) -> None:
    """Steps without an end, each of them said when it is committed."""
    files, ring = reopen(root), new_ring()
    for _ in itertools.count():
        train(files, ring)
        say(files.step)


def _attempt(say: Callable[[Any], None], files: TileFiles) -> None:
    """A step; if it fails, the state must be as it was, and another try must do."""
    try:
        train(files)
    except Exception as error:
        faults._library.disarm()
        files.abort()
        say({"error": type(error).__name__, "message": str(error)})
    try:
        check(files)
        train(files)
        check(files)
        say({"step": files.step})
    except Exception as error:
        say({"lost": str(error)})
