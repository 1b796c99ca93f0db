"""What is chosen by the header pages of files on a disk: damage never counts as emptiness, nor as a step."""

import contextlib
import errno
import os
import random
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import jzero
import nvme_state
from jzero.offload.nvme import _folders, _making
from jzero.offload.nvme._direct import DirectFile
from jzero.offload.nvme._file import header_pages
from jzero.offload.nvme._files import TileFiles, new_run
from jzero.offload.nvme._folders import GONE, MADE, RESUMED, Choice, Folder, GivenWrites, decide
from jzero.offload.nvme._header import Write
from nvme_state import SPECS, fill, train

Pages: TypeAlias = dict[str, list[bytes]]
PAGE = 4096
RUN = "0123456789abcdef" * 2
OTHER = Write(1, "f" * 32)


def pages_in(folder: Path) -> Pages:
    found = {}
    for path in sorted(folder.iterdir()):
        with contextlib.closing(DirectFile(path)) as file:
            found[path.name] = [page.tobytes() for page in header_pages(file)]
    return found


def chosen(
    each: Sequence[Mapping[int, Folder]], resume: bool, write: Write | None, files: Any = ()
) -> Choice:
    wanted = GivenWrites({"count": write}, files)
    return decide(
        each, lambda process, number: Path(f"process-{process}/state-{number}"), resume, wanted
    )


# ---------------------------------------------------------------------------------- what a run leaves


def nothing_written(files: TileFiles) -> None:
    """Killed when the folder has its name."""


def killed_in_the_first_step(files: TileFiles) -> None:
    files.begin(0)


def killed_between_the_first_headers(files: TileFiles) -> None:
    """The files of what is frozen are complete, and those of tiles are not."""
    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Stop):
        patched.setattr(files._files[0], "complete", stop)
        fill(files)


class Stop(BaseException):
    pass


def stop(*_: Any) -> None:
    raise Stop


def placed(files: TileFiles) -> None:
    fill(files)


def trained(files: TileFiles) -> None:
    fill(files)
    train(files)
    train(files)


def killed_in_a_step(files: TileFiles) -> None:
    trained(files)
    files.begin(3)


UNFINISHED = (nothing_written, killed_in_the_first_step, killed_between_the_first_headers)
LEFT: list[Callable[[TileFiles], None]] = [*UNFINISHED, placed, trained, killed_in_a_step]


def left(root: Path, run: Callable[[TileFiles], None], in_place: bool, who: str = RUN) -> Pages:
    with TileFiles.create(root, SPECS, in_place, who) as files:
        run(files)
    return pages_in(root)


def damaged(page: bytes, bits: Iterator[int]) -> Iterator[bytes]:
    """A page without these bits as they were, each by itself; and one of zeros."""
    yield bytes(len(page))
    for bit in bits:
        there = bytearray(page)
        there[bit // 8] ^= 1 << bit % 8
        yield bytes(there)


def check_damage(each: list[Pages], bits_of: Callable[[], Iterator[int]]) -> dict[str, int]:
    """No damage of a page of any file makes files be replaced, or resumed at a step that they have not.

    Returns:
      How often each thing was chosen.
    """
    whole = [_folders.judge(pages) for pages in each]
    commits = sorted({write for folder in whole for write in folder.writes})
    common = [w for w in commits if all(w in folder.writes for folder in whole)]
    tally = {"refused": 0, "resumed": 0}
    for process, pages in enumerate(each):
        for name, both in pages.items():
            for k in range(2):
                for page in damaged(both[k], bits_of()):
                    there = pages | {name: [page, both[1]] if k == 0 else [both[0], page]}
                    found = [*whole]
                    found[process] = _folders.judge(there)
                    folders = [{0: folder} for folder in found]
                    assert chosen(folders, False, None).refusal, (name, k)
                    for wanted in (None, OTHER, *commits):
                        choice = chosen(folders, True, wanted)
                        if choice.refusal:
                            tally["refused"] += 1
                            continue
                        assert choice == Choice(0, wanted), (name, k)
                        assert wanted in common
                        tally["resumed"] += 1
    return tally


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("run", LEFT)
def test_some_damage(run, in_place, tmp_path):
    rng = random.Random(0)
    pages = left(tmp_path / "state-0", run, in_place)
    text = max(len(page.rstrip(b"\0")) for both in pages.values() for page in both)
    some = [*range(0, 8 * text, 97), *(rng.randrange(8 * PAGE) for _ in range(10))]
    tally = check_damage([pages], lambda: iter(some))
    # Of two slots damage leaves the other one; what is frozen has two in any case.
    has_two = run not in UNFINISHED and not (in_place and run is killed_in_a_step)
    assert (tally["resumed"] > 0) == has_two


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("run", LEFT)
def test_every_damage(run, in_place, tmp_path):
    """Every bit of every page of every file, of one process and of two."""
    pages = left(tmp_path / "state-0", run, in_place)
    tally = check_damage([pages], lambda: iter(range(8 * PAGE)))
    print(f"{run.__name__}, in_place={in_place}: {tally}")


@pytest.mark.slow
@pytest.mark.parametrize("other", LEFT)
@pytest.mark.parametrize("run", LEFT)
def test_damage_in_one_of_two_processes(run, other, tmp_path):
    one = left(tmp_path / "0" / "state-0", run, False)
    two = left(tmp_path / "1" / "state-0", other, False)
    tally = check_damage([one, two], lambda: iter(range(0, 8 * PAGE, 5)))
    print(f"{run.__name__}, {other.__name__}: {tally}")


# -------------------------------------------------------------------------------------- what is whole


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("run", LEFT)
def test_what_is_whole(run, in_place, tmp_path):
    """Is replaced as long as no state was there, is gone on with at its steps, and else is refused."""
    folder = _folders.judge(left(tmp_path / "state-0", run, in_place))
    there: list[Mapping[int, Folder]] = [{0: folder}]
    expected = {placed: [0], trained: [2] if in_place else [1, 2],
                killed_in_a_step: [] if in_place else [2]}.get(run, [])  # fmt: skip
    assert [write.step for write in folder.writes] == expected
    for write in (None, OTHER):
        for resume in (False, True):
            choice = chosen(there, resume, write)
            if run in UNFINISHED:
                assert choice == Choice(0, replaces=True)
            else:
                assert choice.refusal
    for write in folder.writes:
        assert chosen(there, True, write) == Choice(0, write)
        assert chosen(there, False, write).refusal


def test_a_kill_between_two_processes(tmp_path):
    """Whatever each of them had come to, they begin again together, or go on together."""
    found = {run: _folders.judge(left(tmp_path / run.__name__, run, False)) for run in LEFT}
    for run in LEFT:
        # One has no folder yet, or had only begun to make it.
        for each in ([{0: found[run]}, {}], [{}, {0: found[run]}]):
            for write in (None, Write(0, RUN), Write(2, RUN)):
                choice = chosen(each, True, write)
                assert choice == Choice(0, replaces=True) if run in UNFINISHED else choice.refusal
            assert bool(chosen(each, False, None).refusal) == (run not in UNFINISHED)
    for run in LEFT:
        for other in LEFT:
            each = [{0: found[run]}, {0: found[other]}]
            both = {*found[run].writes} & {*found[other].writes}
            for write in (Write(0, RUN), Write(1, RUN), Write(2, RUN)):
                choice = chosen(each, True, write)
                if write in both:
                    assert choice == Choice(0, write)
                elif {run, other} & {*UNFINISHED} and {run, other} <= {*UNFINISHED, placed}:
                    assert choice == Choice(0, replaces=True)
                else:
                    assert choice.refusal
    # An unfinished start of another run proves nothing of this one.
    strange = _folders.judge(left(tmp_path / "strange", killed_in_the_first_step, False, new_run()))
    for resume in (False, True):
        assert chosen([{0: found[placed]}, {0: strange}], resume, None).refusal
        # Starts that were killed one after the other have nothing that could be lost.
        each = [{0: found[nothing_written]}, {0: strange}]
        assert chosen(each, resume, None) == Choice(0, replaces=True)


def test_states_of_this_process():
    """Those that are alive keep their folders; those that are gone leave them to new ones."""
    commit, run = Write(4, RUN), (RUN,)
    alive, resumed = Folder(MADE), Folder(RESUMED)
    gone = Folder(GONE, writes=(commit,), last=4, runs=run)
    new = Folder(GONE, writes=(Write(0, RUN),), last=0, runs=run)
    for resume in (False, True):
        assert chosen([{0: alive, 1: alive}], resume, None) == Choice(2)
        assert chosen([{0: alive}, {}], resume, None) == Choice(1)
        assert chosen([{0: new}], resume, None) == Choice(0)
        assert chosen([{0: new}, {0: alive}], resume, None) == Choice(1)
        assert chosen([{}], resume, None) == Choice(0)
        assert chosen([{5: alive}], resume, None) == Choice(0)
    assert chosen([{0: gone}], False, None) == Choice(0)
    assert chosen([{0: resumed}], False, None) == Choice(1)
    assert chosen([{0: gone}], True, None).refusal
    assert chosen([{0: gone}], True, commit) == Choice(0, commit)
    assert chosen([{0: resumed, 1: gone}], True, commit) == Choice(1, commit)
    refusal = chosen([{0: resumed}], True, commit).refusal
    assert refusal
    assert "process-0/state-0, and there are no others to go on with" in refusal[0][0]


@pytest.mark.parametrize(
    ("rest", "files", "text"),
    [
        ({"w": None, "count": None}, [None], ""),
        ({"w": OTHER, "count": OTHER}, [OTHER], ""),
        ({"w": OTHER, "count": None}, [OTHER], ""),
        (
            {"w": OTHER, "count": OTHER},
            [None, OTHER],
            "step 1 of run ffffffff, and what goes into files",
        ),
        ({"w": OTHER, "count": None}, [None], "w is not"),
        ({"w": OTHER, "count": OTHER}, [Write(0, RUN)], "is not; its files are not in process-0"),
    ],
)
def test_where_there_are_no_files(rest, files, text):
    """New ones are made of a state that is all there, and of none of which a part must come from files."""
    where = lambda process, number: Path(f"process-{process}/state-{number}")  # noqa: E731
    choice = decide([{}, {}], where, True, GivenWrites(rest, files))
    assert bool(choice.refusal) == bool(text)
    if choice.refusal and text != "w is not":
        assert text in choice.refusal[0][0]
    assert decide([{}, {}], where, False, GivenWrites(rest, files)) == Choice(0)


# ----------------------------------------------------------------------------------------- on a disk


def test_what_is_no_file_of_ours(tmp_path):
    """Links, pipes and folders where files belong are never opened for what they lead to."""
    with nvme_state.made(tmp_path):
        pass
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_bytes(bytes(100 * PAGE))
    name = next(iter(SPECS))
    for make in (
        lambda path: path.symlink_to(victim),
        lambda path: path.symlink_to(tmp_path / "nothing"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    ):
        path = run / name
        path.unlink() if not path.is_dir() else path.rmdir()
        make(path)
        found = _making.look(run)
        assert found
        assert re.search(f"{name} cannot be opened", found.problem)
        with pytest.raises(jzero.OptionError, match="cannot be opened"):
            nvme_state.reopen(tmp_path)
        with pytest.raises(jzero.OptionError, match="cannot be opened"):
            nvme_state.create(tmp_path)
    assert victim.read_bytes() == bytes(100 * PAGE)
    assert not (tmp_path / "nothing").exists()


def test_planted_links_are_not_followed(tmp_path):
    """Whoever can write in the folder cannot make a run write elsewhere."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "device-0.tiles").write_text("a user's")
    (tmp_path / "run.making").symlink_to(victim)
    with pytest.warns(UserWarning, match="gets the name run.making.aside-0"):
        nvme_state.create(tmp_path).close()
    assert (victim / "device-0.tiles").read_text() == "a user's"
    other = tmp_path / "other"
    other.mkdir()
    (other / "run").symlink_to(victim)
    with pytest.raises(jzero.OptionError, match="other/run: it is no folder"):
        nvme_state.create(other)
    left = tmp_path / "left" / "run.making"
    left.mkdir(parents=True)
    (left / "device-0.tiles").symlink_to(victim / "device-0.tiles")
    (left / "kept.tiles").write_bytes(b"of a start that was killed")
    (left / "notes").write_text("a user's")
    with pytest.warns(UserWarning, match="gets the name run.making.aside-0"):
        nvme_state.create(tmp_path / "left").close()
    aside = left.parent / "run.making.aside-0"
    assert {path.name for path in aside.iterdir()} == {"device-0.tiles", "notes"}
    assert (victim / "device-0.tiles").read_text() == "a user's"


def test_files_are_private(tmp_path):
    before = os.umask(0)
    try:
        nvme_state.create(tmp_path / "path" / "process-0").close()
    finally:
        os.umask(before)
    for path in (tmp_path / "path").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / "path").stat().st_mode) == 0o700


def test_a_file_is_made_once(tmp_path):
    (tmp_path / "x").write_text("a user's")
    with pytest.raises(jzero.OptionError, match="x cannot be opened: File exists"):
        DirectFile(tmp_path / "x", create=True)


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(jzero.OptionError, match="process-0 cannot be read: Permission denied"):
        _making.folders(tmp_path / "process-0")


def test_no_room_beside_what_is_left(tmp_path, monkeypatch):
    """What is there stays where it is, and the message says what to remove."""
    nvme_state.create(tmp_path).close()
    before = pages_in(tmp_path / "run")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(jzero.OptionError, match="Remove .*run, which has no complete step, or"):
        nvme_state.create(tmp_path)
    monkeypatch.undo()
    assert pages_in(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
