"""Files of tiles: what is written is read again, and what is not as it was is named, and not overwritten."""

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import threading
import zlib

import numpy as np
import pytest

import faults
import jzero
import nvme_state
from faults import Fault
from faults._disk import make_disk, mounted, why_no_disk
from jzero.offload.nvme import _direct
from jzero.offload.nvme._aligned import TileRing, pages
from jzero.offload.nvme._checksum import checksum
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._file import headers
from jzero.offload.nvme._files import FileSpec, TileAt, TileFiles
from jzero.offload.nvme._header import Write
from jzero.offload.nvme._tile_layout import Extent, LeafRange, TileLayout
from nvme_state import (
    SPECS,
    check,
    create,
    disk_bytes,
    fill,
    made,
    new_ring,
    numbers,
    remove,
    reopen,
    step_bytes,
    train,
    why_not,
)

FIRST = next(iter(SPECS))
PAGE = 4096
KEPT_BYTES = 2 * 2 * PAGE + 4 * PAGE  # of the frozen file: tiles; headers, description, checksums


def path_of(root: pathlib.Path, name: str = FIRST) -> pathlib.Path:
    return root / "run" / name


def flip(path: pathlib.Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(at)
        file.write(bytes([byte]))


def content(root: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "run").iterdir()}


@pytest.fixture
def left(tmp_path):
    """What a run leaves that ended after step 1: in each file step 0 in slot 0, step 1 in slot 1."""
    with made(tmp_path):
        pass
    return tmp_path


def write_of(root: pathlib.Path, step: int, name: str = FIRST) -> Write:
    """The commit of a step."""
    with contextlib.closing(DirectFile(path_of(root, name))) as file:
        return next(header.write for header in headers(file) if header.step == step)


def refused(root: pathlib.Path, text: str, **options) -> None:
    """Opening is, with this text; nothing is overwritten."""
    before = content(root)
    with pytest.raises(jzero.StateError, match=text) as info:
        reopen(root, **options)
    assert str(info.value).startswith("jzero.NVMe: ")
    assert content(root) == before


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("in_place", [False, True])
def test_steps_go_round(in_place, tmp_path):
    with create(tmp_path, in_place) as files:
        assert files.step is None
        fill(files)
        for step in range(4):
            check(files, step)
            train(files)
        assert numbers(files.steps) == ((4,) if in_place else (3, 4))
    with reopen(tmp_path, in_place) as files:
        check(files, 4)
        train(files)
        check(files, 5)
    assert len(content(tmp_path)) == 3


def test_layout():
    layout = TileLayout.of([[("w", 0, 100), ("m", 0, 5000)], [("m", 5000, 1), ("w", 100, 28)]])
    assert layout.tiles[0] == (Extent("w", 0, 100, 0), Extent("m", 0, 5000, 128))
    assert layout.nbytes == [8192, 4096]
    assert layout.of_leaf("w") == [(0, 0), (1, 1)]
    assert layout.of_leaf("w", 0, 100) == [(0, 0)]
    assert layout.of_leaf("w", 100) == [(1, 1)]
    assert layout.of_leaf("m", 4999, 5001) == [(0, 1), (1, 0)]
    assert layout.of_leaf("m", 5001) == []
    assert layout.of_leaf("other") == []
    lone = TileLayout.of([[("w", 0, 100), ("m", 0, 5000, True), ("v", 0, 9, True), ("x", 0, 9)]])
    assert [x.offset for x in lone.tiles[0]] == [0, PAGE, 3 * PAGE, 4 * PAGE]
    ends = [0, PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE]
    assert lone.checked == [[*itertools.pairwise(ends)]]
    assert [lone.checksum_of(0, i) for i in (1, 2)] == [1, 2]
    assert lone.first_checksums == [0, 4]


def test_what_it_costs(tmp_path):
    """Two slots, of what is frozen one; headers, descriptions and checksums are a few pages."""
    with create(tmp_path) as files:
        assert step_bytes(files) == 2 * 5 * 2 * PAGE
        assert disk_bytes(files) == 2 * step_bytes(files) + 2 * 5 * PAGE + KEPT_BYTES
        sizes = {path.name: path.stat() for path in (tmp_path / "run").iterdir()}
        assert sum(stat.st_size for stat in sizes.values()) == disk_bytes(files)
        assert all(stat.st_blocks * 512 >= stat.st_size for stat in sizes.values())
        assert all(stat.st_mode & 0o777 == 0o600 for stat in sizes.values())
        assert list(files.tiles())[:4] == [*(TileAt(k, 0) for k in range(3)), TileAt(0, 1)]
    with create(tmp_path / "2", in_place=True) as files:
        gradients = 2 * len(nvme_state.WITH_GRADIENTS) * PAGE  # They have room in the other slot.
        assert disk_bytes(files) == step_bytes(files) + gradients + 2 * 4 * PAGE + KEPT_BYTES
        remove(files)
    assert not content(tmp_path / "2")


def test_a_step_is_written_part_by_part(tmp_path):
    """In any order; parts that share a page keep each other. What nobody has written is zero."""
    rng = np.random.default_rng(0)
    parts: list[LeafRange] = [("a", 0, 100), ("b", 0, 9000), ("c", 0, 3)]
    parts += [("d", 0, 5000, True), ("e", 0, 1, True)]
    layout = TileLayout.of([parts, parts[1:3]])
    specs = {"x.tiles": FileSpec(layout, {})}
    buffer, again = pages(layout.most_bytes), pages(layout.most_bytes)
    with TileFiles.create(tmp_path, specs) as files:
        files.begin(0)
        places = [(t, i) for t in range(2) for i in range(len(layout.tiles[t]))]
        expected = [np.zeros(layout.nbytes[t], np.uint8) for t in range(2)]
        for k in rng.permutation(len(places)):
            tile, i = places[k]
            extent = layout.tiles[tile][i]
            values = rng.integers(1, 256, extent.nbytes, np.uint8)
            expected[tile][extent.offset :][: extent.nbytes] = values
            files.write_part(TileAt(0, tile), extent.offset, values, buffer)
        for tile in range(2):
            files.note_checksums(TileAt(0, tile), buffer)
        files.commit(0)
        for tile in range(2):
            files.read(TileAt(0, tile), again)
            np.testing.assert_array_equal(again[: layout.nbytes[tile]], expected[tile])


def test_aborted_steps_are_forgotten_or_lost_in_place(tmp_path):
    with made(tmp_path / "two") as files:
        for _ in range(2):
            files.begin(2)
            files.write(TileAt(0, 0), new_ring().buffers[0])
            files.abort()
        check(files, 1)
        train(files)
        check(files, 2)
    with made(tmp_path, in_place=True) as files:
        files.begin(2)
        files.abort()
        with pytest.raises(jzero.StateError, match="step 2 failed while it was written over"):
            files.read(TileAt(0, 0), new_ring().buffers[0])
        with pytest.raises(jzero.StateError, match="step 2 failed while it was written over"):
            files.begin(2)
    refused(tmp_path, "is dirty: its run ended while step 2 was written over", in_place=True)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_pin_keeps_a_step(gradients, tmp_path):
    """Beyond the next commit; the step after that waits for it, also if it writes no gradients."""
    with made(tmp_path) as files:
        pin = files.pin()
        train(files)
        buffer, at = new_ring().buffers[0], TileAt(1, 4)
        act = (lambda: train(files)) if gradients else (lambda: files.begin(3))
        thread = threading.Thread(target=act)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert files.step == 2
        pin.read(at, buffer)
        assert (buffer[: 2 * PAGE].view(np.int64) == nvme_state.value(1, at)).all()
        pin.release()
        thread.join()
        if not gradients:
            files.abort()
        check(files, 3 if gradients else 2)


def test_a_dropped_pin_keeps_nothing(tmp_path):
    with made(tmp_path, in_place=True) as files:
        pin = files.pin()
        del pin
        train(files)
        with files.pin() as pin:
            assert pin.step == 2
        train(files)
        check(files, 3)


# ----------------------------------------------------------------------------- files that were changed


@pytest.mark.parametrize("size", [0, PAGE, 5 * PAGE, -1])
def test_a_file_of_another_length(size, left):
    path = path_of(left)
    whole = path.stat().st_size
    os.truncate(path, whole + 1)
    refused(left, "is too long")
    os.truncate(path, size if size >= 0 else whole + size)
    refused(left, "it was cut")
    path.unlink()
    refused(left, "device-0.tiles is not there")


def test_a_file_that_is_cut_while_it_is_open(left):
    with reopen(left) as files:
        os.truncate(path_of(left), 20 * PAGE)
        told = r"tile [234] needs bytes \d+ to \d+: it was cut"
        with pytest.raises(jzero.StateError, match=told):
            check(files)
        told = r"v in tile 3 needs bytes \d+ to \d+: it was cut"
        with pytest.raises(jzero.StateError, match=told):
            files.read_lone(TileAt(0, 3), 1, pages(PAGE))


def test_one_damaged_header_costs_its_step(left):
    """The other slot is whole, and is of the step before."""
    flip(path_of(left), PAGE + 100)
    with reopen(left) as files:
        check(files, 0)


@pytest.mark.parametrize("at", [0, 100])
def test_damaged_headers(at, left):
    flip(path_of(left), at)
    flip(path_of(left), PAGE + at)
    refused(left, "has no intact header")


def test_another_programs_file(left):
    path_of(left).write_bytes(bytes(100 * PAGE))
    refused(left, "another program's file")
    with pytest.raises(jzero.OptionError, match="device-0.tiles has no intact header. A run start"):
        create(left)
    assert path_of(left).read_bytes() == bytes(100 * PAGE)


def test_another_version(left):
    raw = path_of(left).read_bytes()[:PAGE].rstrip(b"\0")
    _, _, text = raw.partition(b"\n")
    text = text.replace(b'"version": 3', b'"version": 7')
    with path_of(left).open("r+b") as file:
        file.write(b"jzero tiles %08x\n%s" % (zlib.crc32(text), text))
    refused(left, "has version 7 of the format. This version of jzero reads and writes version 3")
    with pytest.raises(jzero.OptionError, match="has version 7 of the format, and not 3"):
        create(left)


def test_damaged_checksums_and_descriptions(left):
    """Of slot 1, after those of slot 0; the step before can be asked for."""
    flip(path_of(left), 4 * PAGE + 8, 7)
    refused(left, "has damaged checksums of step 1")
    with reopen(left, step=write_of(left, 0)) as files:
        check(files, 0)
    flip(path_of(left), 2 * PAGE + 30)
    refused(left, "has a damaged description")


@pytest.mark.parametrize(
    ("byte", "file"), [(0, FIRST), (5000, FIRST), (2 * PAGE - 1, "device-1.tiles")]
)
def test_damaged_tiles(byte, file, left):
    at = 5 * PAGE + (5 + 3) * 2 * PAGE  # Tile 3 of slot 1.
    flip(path_of(left, file), at + byte, 5)
    with reopen(left) as files:
        page = at + byte // PAGE * PAGE  # The lone extent has a checksum of its own.
        text = f"{file} has a damaged tile 3, bytes {page} to {page + PAGE}: its checksum is"
        with pytest.raises(jzero.StateError, match=text):
            check(files)
        with pytest.raises(jzero.StateError, match=text):
            train(files)
        files.abort()
        assert files.step == 1
    with reopen(left) as files:
        assert numbers(files.steps) == (1,)


@pytest.mark.parametrize("byte", [0, PAGE - 1])
def test_a_damaged_lone_extent(byte, left):
    """Is found when it is read alone, to its last page's end; what is around it can be damaged, too."""
    at = 5 * PAGE + (5 + 3) * 2 * PAGE + PAGE
    buffer = pages(PAGE)
    flip(path_of(left), at + byte, 3)
    text = f"{FIRST} has damaged bytes of v in tile 3, bytes {at} to {at + PAGE}: its checksum is"
    with reopen(left) as files:
        for read in (files.read_lone, files.pin().read_lone):
            with pytest.raises(jzero.StateError, match=text):
                read(TileAt(0, 3), 1, buffer)
            read(TileAt(0, 2), 1, buffer)
    flip(path_of(left), at + byte, 3)
    flip(path_of(left), at - 1, 3)
    with reopen(left) as files:
        files.read_lone(TileAt(0, 3), 1, buffer)
        assert (buffer.view(np.int64) == nvme_state.value(1, TileAt(0, 3))).all()
        with pytest.raises(jzero.StateError, match="has a damaged tile 3"):
            files.read(TileAt(0, 3), new_ring().buffers[0])


def test_damage_of_what_is_frozen(left):
    """Is found whichever of the two steps is read, and when it is read alone."""
    at = 4 * PAGE + 3 * PAGE  # The lone extent of the second tile.
    flip(path_of(left, "kept.tiles"), at)
    for step in (0, 1):
        with reopen(left, step=write_of(left, step)) as files:
            with pytest.raises(jzero.StateError, match=f"kept.* a damaged tile 1, bytes {at} "):
                files.read(TileAt(2, 1), new_ring().buffers[0])
            with pytest.raises(jzero.StateError, match="has damaged bytes of x1 in tile 1, bytes"):
                files.read_lone(TileAt(2, 1), 1, pages(PAGE))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_frozen_is_written_once(in_place, tmp_path):
    """After that only its headers, in turn; it has no second slot, in place or not."""
    path = path_of(tmp_path, "kept.tiles")
    with create(tmp_path, in_place) as files:
        fill(files)
        first = path.read_bytes()
        for step in (1, 2, 3):
            train(files)
            assert path.read_bytes()[2 * PAGE :] == first[2 * PAGE :]
            assert numbers(files._files[2].steps) == (step - 1, step)
    for step in [2, 3][in_place:]:
        with reopen(tmp_path, in_place, write_of(tmp_path, step, "kept.tiles")) as files:
            with files.pin() as pin:
                pin.read_lone(TileAt(2, 0), 1, pages(PAGE))
            train(files)
            check(files, step + 1)
    with reopen(tmp_path, in_place) as files:
        check(files, 4)
        files.begin(5)
        with pytest.raises(AssertionError, match="of a file that is frozen"):
            files.write(TileAt(2, 0), new_ring().buffers[0])
    if in_place:
        return
    specs = SPECS | {"kept.tiles": SPECS["kept.tiles"]._replace(frozen=False)}
    with pytest.raises(jzero.StateError, match="frozen is true there, and false here"):
        TileFiles.open(tmp_path / "run", specs)


def test_another_state(left):
    """Where the identities differ first is said."""
    for identity, text in [
        ({"mesh": {"data": 4}, "device": 0}, "identity.mesh.data is 2 there, and 4 here"),
        ({"mesh": {"data": 2}}, "identity is .* there, and .* here"),
        ({"mesh": {"data": 2}, "device": "x" * 99}, r"identity.device is 0 there, and \"x{76}\.\.\."),
    ]:  # fmt: skip
        specs = SPECS | {FIRST: SPECS[FIRST]._replace(identity=identity)}
        with pytest.raises(jzero.StateError, match=text):
            TileFiles.open(left / "run", specs)
    layout = TileLayout.of([[("m", 0, 3000)] * 2] * 5)
    specs = SPECS | {FIRST: SPECS[FIRST]._replace(layout=layout)}
    with pytest.raises(jzero.StateError, match=r'tiles\[0\]\[1\]\[0\] is "v" there, and "m" here'):
        TileFiles.open(left / "run", specs)
    with reopen(left) as files:
        check(files, 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_another_in_place(in_place, tmp_path):
    with made(tmp_path, in_place):
        pass
    refused(tmp_path, f"was made with in_place={in_place}", in_place=not in_place)


def test_steps_that_not_all_files_have(left):
    """One is asked for by its number, and none is ever mixed."""
    old, new = write_of(left, 0), write_of(left, 1)
    text = "Step 7 of run [0-9a-f]{8} is resumed if all files have it, complete"
    refused(left, text, step=new._replace(step=7))
    other_run = new._replace(run="0123456789abcdef" * 2)
    refused(left, "Step 1 of run 01234567 is resumed if", step=other_run)
    with reopen(left, step=old) as files:
        check(files, 0)
        files.select(new)
        check(files, 1)
        files.select()
        check(files, 1)
    path = path_of(left)
    path.unlink()
    with made(left / "2", steps=5) as _:
        pass
    path_of(left / "2").rename(path)
    each = r"device-0.tiles has steps 4 and 5\n.*device-1.tiles has steps 0 and 1\n.*kept.tiles has .*\n"
    refused(left, each + "A step")


def test_nothing_to_resume(tmp_path):
    create(tmp_path).close()
    refused(tmp_path, "has no complete step")


# ------------------------------------------------------------------------- what is there already


def test_a_state_is_not_overwritten(left):
    before = content(left)
    with pytest.raises(jzero.OptionError, match="run has steps 0 and 1 of run .* Use resume=True"):
        create(left)
    assert content(left) == before


def test_files_without_a_step_are_made_again(tmp_path):
    create(tmp_path).close()
    with pytest.warns(UserWarning, match="run is there, .* gets the name run.aside-0. Its run"):
        files = create(tmp_path)
    files.begin(0)
    files.close()
    (tmp_path / "run" / "a user's").write_text("file")
    with pytest.warns(UserWarning, match="gets the name run.aside-1"):
        files = create(tmp_path)
    assert (tmp_path / "run.aside-1" / "a user's").read_text() == "file"
    with files:
        fill(files)
        check(files, 0)


def in_another_process(root: pathlib.Path) -> str:
    try:
        reopen(root).close()
    except jzero.OptionError as error:
        return str(error)
    return ""


def test_a_second_run(left):
    """In the same process or in another one; none while files are made, either."""
    fork = multiprocessing.get_context("spawn")
    with reopen(left), fork.Pool(1) as pool:
        with pytest.raises(jzero.OptionError, match="another run has .*device-0.tiles"):
            reopen(left)
        with pytest.raises(jzero.OptionError, match="another run has .*device-0.tiles"):
            create(left)
        assert "another run has" in pool.apply(in_another_process, (left,))
    (left / "2" / "run.making").mkdir(parents=True)
    making = DirectFile(left / "2" / "run.making" / FIRST, create=True)
    with pytest.raises(jzero.OptionError, match="another run has .*run.making/device-0.tiles"):
        create(left / "2")
    making.close()
    with reopen(left) as files:
        check(files)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_children_keep_no_lock(left):
    """A data loader's process that outlives its parent must not keep the next run from the files."""
    files = reopen(left)
    (read, write), (hear, say) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.close(write)
        os.write(say, b"x")
        os.read(read, 1)  # Until its parent lets go, however it does.
        os._exit(0)
    try:
        os.read(hear, 1)
        for file in files._files:
            file.file.forget()  # As the parent's end would.
        reopen(left).close()
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        for fd in (read, hear, say):
            os.close(fd)


def test_a_file_that_has_just_got_another_name(tmp_path, monkeypatch):
    """Between its opening and its locking: then it is the state of whoever made it."""
    flock = fcntl.flock

    def rename(fd: int, how: int) -> None:
        (tmp_path / "a").rename(tmp_path / "b")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", rename)
    with pytest.raises(jzero.OptionError, match="another run has .*a. One run at a time"):
        DirectFile(tmp_path / "a", create=True)


def test_a_file_system_without_locks(left, monkeypatch):
    def fail(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(jzero.OptionError, match="cannot be locked: No locks available"):
        reopen(left)


def test_other_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(jzero.OptionError, match="this is darwin. State is kept in files by system"):
        create(tmp_path)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- disks that refuse


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(jzero.OptionError, match="files cannot be made in .*run/run: Not a dir"):
        create(tmp_path / "run")
    with pytest.raises(jzero.OptionError, match=r"run/device-0.tiles cannot be opened: Not a dir"):
        reopen(tmp_path)


def test_a_full_disk(tmp_path):
    """A real one: what is needed and what is free is said, and nothing is left behind."""
    if reason := why_no_disk():
        pytest.skip(reason)
    layout = TileLayout.of([[("m", i * 2**20, 2**20)] for i in range(7)])
    specs = {f"{k}.tiles": FileSpec(layout, k) for k in range(2)}
    make_disk(tmp_path / "disk")
    with mounted(tmp_path / "disk", tmp_path / "at") as root:
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        with pytest.raises(jzero.OptionError) as info:
            TileFiles.create(root / "a" / "b", specs)
        needed = 28 * 2**20 + 2 * 5 * PAGE
        text = rf"2 files in .*b need {needed} bytes \(28.0 MiB\), and {free} \(.*\) are free: No space"
        assert re.search(text, str(info.value))
        assert os.statvfs(root).f_bavail * os.statvfs(root).f_frsize == free
        assert not (root / "a").exists()
        with TileFiles.create(root / "a", specs, in_place=True) as files:
            assert not why_not(files)
            assert disk_bytes(files) < free


def test_a_file_that_is_closed_by_others(left, monkeypatch):
    """Any error of the system is named, with tile, byte and file."""
    with reopen(left) as files:
        file = files._files[0].file
        file.forget()
        monkeypatch.setattr(file, "_fd", 10**6)
        with pytest.raises(
            jzero.StateError, match=r"reading tile \d, byte \d+ of .*: Bad file des"
        ):
            check(files)
        with pytest.raises(jzero.StateError, match="writing a header of step 2, byte 0 .*: Bad"):
            files.begin(2)
        with pytest.raises(jzero.StateError, match="cannot be synced: Bad file descriptor"):
            file.sync()
        monkeypatch.undo()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_transfers_that_always_stop_short(call, left, monkeypatch):
    with reopen(left) as files:
        monkeypatch.setattr(os, call, lambda *_: 100)
        with pytest.raises(jzero.StateError, match="failed: transfers stop short"):
            train(files)


# ---------------------------------------------------------------------------- with and without O_DIRECT


def test_transfers_are_direct(left):
    with reopen(left) as files:
        if why_not(files):
            pytest.skip(why_not(files))
        assert not why_not(files)
        buffer = np.frombuffer(bytearray(2 * PAGE + 1), np.uint8)
        off_page = buffer[1 + (-buffer.ctypes.data) % 2 :][:PAGE]
        with pytest.raises(jzero.StateError, match="Invalid argument"):
            files._files[0].file.read(off_page, 0, "what")


def test_memory_is_no_disk():
    folder = pathlib.Path("/dev/shm")
    if not folder.is_dir() or _direct._file_system(os.open(folder, os.O_RDONLY)) != "tmpfs":
        pytest.skip("no tmpfs")
    with create(folder / f"jzero-{os.getpid()}") as files:
        try:
            assert why_not(files)
            assert "tmpfs is memory, and no disk" in why_not(files)
            fill(files)
            train(files)
            check(files, 1)
        finally:
            remove(files)
            files._files[0].path.parent.rmdir()
            files._files[0].path.parents[1].rmdir()


@pytest.mark.parametrize(
    ("asked", "text"), [(None, "no O_DIRECT for this file"), (2**16, "would need multiples of 65536")]
)  # fmt: skip
def test_without_direct_transfers(asked, text, tmp_path, monkeypatch):
    monkeypatch.setattr(_direct, "alignment", lambda fd: asked)
    with made(tmp_path) as files:
        assert text in why_not(files)
        flags = fcntl.fcntl(files._files[0].file._fd, fcntl.F_GETFL)
        assert not flags & os.O_DIRECT
        assert files.memory_alignment == 1
        check(files, 1)


@pytest.mark.slow
@pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not()))
def test_a_file_system_that_refuses_direct_transfers(tmp_path):
    """Opening with O_DIRECT fails there."""
    with faults.Children(["nvme_state"]) as children:
        fault = Fault("fail", 3, "EINVAL")  # After the folder is made and synced.
        script = "nvme_state:create_in_child"
        ended = children.run(script, root=str(tmp_path), in_place=False, fault=fault)
        (said,) = ended.said
    assert said["note"].endswith("the file system has no O_DIRECT")
    assert len(content(tmp_path)) == 3


def test_memory_that_does_not_start_on_a_page(left):
    """Is read into where that is what the disk asks for."""
    with reopen(left) as files:
        start = files.memory_alignment
        memory = pages(2 * PAGE)[start % PAGE :][:PAGE]
        files.read_lone(TileAt(0, 3), 1, memory)
        assert (memory == np.full(512, nvme_state.value(1, TileAt(0, 3))).view(np.uint8)).all()


# ------------------------------------------------------------------------------------------ checksums


@pytest.mark.parametrize("num_pages", [1, 300])
def test_checksums_see_damage(num_pages):
    """A bit, a page of zeros, two pages or two words exchanged, a page of another tile."""
    rng = np.random.default_rng(0)
    tile = rng.integers(0, 256, num_pages * PAGE, np.uint8)
    before = checksum(tile)
    assert before == checksum(tile.copy())
    assert 0 <= before < 2**32
    damaged = [tile.copy() for _ in range(203)]
    for x in damaged[:200]:
        x[rng.integers(len(x))] ^= 1 << rng.integers(8)
    damaged[200][-PAGE:] = 0
    damaged[201].view(np.uint64)[[0, 1]] = tile.view(np.uint64)[[1, 0]]
    damaged[202][:PAGE] = rng.integers(0, 256, PAGE, np.uint8)
    if num_pages > 1:
        damaged.append(np.roll(tile, PAGE))
    assert before not in map(checksum, damaged)
    assert len(set(map(checksum, damaged))) > 190
    assert checksum(pages(PAGE)) != checksum(pages(2 * PAGE))


# ------------------------------------------------------------------------------------------- buffers


def test_buffers_stay_within_their_bytes():
    ring = TileRing(10 * PAGE + 1, 3 * PAGE)
    assert (ring.num, ring.nbytes) == (3, 3 * PAGE)
    assert all(x.ctypes.data % PAGE == 0 for x in ring.buffers)
    text = rf"host_bytes={8 * PAGE} hold 2 tiles of {3 * PAGE} bytes. .* Use host_bytes={9 * PAGE} "
    with pytest.raises(jzero.OptionError, match=text):
        TileRing(8 * PAGE, 3 * PAGE)


def test_the_format_is_what_it_is(left):
    """Files of this version must be read by every later one: what their first line and fields are."""
    first, _, text = path_of(left).read_bytes()[:PAGE].rstrip(b"\0").partition(b"\n")
    assert first == b"jzero tiles %08x" % zlib.crc32(text)
    assert json.loads(text) == {
        "generation": 4, "state": "complete", "slot": 0, "step": 0, "version": 3, "slots": 2, "num_tiles": 5,
        "size": 25 * PAGE, "run": write_of(left, 0).run,
        **{k: json.loads(text)[k] for k in ("table_crc", "about_bytes", "about_crc")},
    }  # fmt: skip
