"""Starts that are killed while they make files: every later one begins again, whatever they have left."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import faults
import jzero
import test_nvme_folders
import test_nvme_store
from faults import Fault
from faults._library import armed
from jzero.offload.memory._leaf_array import wrap
from jzero.offload.nvme import _folders
from test_nvme_store import filled, spec_in, values

pytestmark = [
    pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not())),
    pytest.mark.filterwarnings("ignore:.*is there, without a complete step:UserWarning"),
]


def place_in_child(
    say: Callable[[Any], None], root: str, fault: list[Any], log: str | None = None
) -> None:
    """A state is placed; with a fault."""
    with armed(root, Fault(*fault), log):
        filled(spec_in(Path(root) / "nvme"))
    say("placed")


PLACE = "test_nvme_starts:place_in_child"


@pytest.fixture(scope="module")
def children() -> Iterator[faults.Children]:
    with faults.Children(["test_nvme_starts"]) as children:
        yield children


def num_of_operations(children: faults.Children, root: Path) -> int:
    root.mkdir()
    log = str(root / "log")
    ended = children.run(PLACE, root=str(root), fault=Fault(), log=log)
    assert ended.said == ["placed"], ended.errors
    return max(x.number for x in faults.read_log(root / "log"))


def killed_at(children: faults.Children, root: Path, at: int) -> None:
    root.mkdir(exist_ok=True)
    ended = children.run(PLACE, root=str(root), fault=Fault("kill", at))
    assert ended.status == -signal.SIGKILL, ended


def begins_again(root: Path, resume: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a state can be placed; if not, that it is refused for a step that is there."""
    folder = root / "nvme" / "process-0" / "state-0"
    there = _folders.judge(test_nvme_folders.pages_in(folder)) if folder.exists() else None
    if there and there.writes:
        with pytest.raises(jzero.JzeroError, match="state-0 has step 0 of run"):
            filled(spec_in(root / "nvme", resume=resume))
        return False
    leaves = filled(spec_in(root / "nvme", resume=resume))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(wrap(leaf, leaf.shape)), values()[name])
    test_nvme_store.end_of_process(leaves, monkeypatch)
    names = {path.name for path in folder.parent.iterdir()}
    assert names <= {"state-0", *(f"state-0.aside-{k}" for k in range(9))}
    return True


def check_kills(
    children: faults.Children, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Kills at every so many operations, from the last one on."""
    num = num_of_operations(children, folder / "whole")
    found = []
    for at in range(num, 0, -step):
        killed_at(children, folder / f"{at}", at)
        again = []
        for resume in (False, True):
            copy = folder / f"{at}-{resume}"
            shutil.copytree(folder / f"{at}", copy)
            again.append(begins_again(copy, resume, monkeypatch))
            shutil.rmtree(copy)
        assert again[0] == again[1]
        found.append(again[0])
        shutil.rmtree(folder / f"{at}")
    return found


def test_killed_while_files_are_made(children, tmp_path, monkeypatch):
    found = check_kills(children, tmp_path, 37, monkeypatch)
    assert sum(found) >= 3


@pytest.mark.slow
def test_killed_at_every_operation_of_a_start(children, tmp_path, monkeypatch):
    """Only once the last header is written, there is a state of which nobody was told."""
    found = check_kills(children, tmp_path, 1, monkeypatch)
    print(f"{len(found)} kills, {sum(found)} of them begun again")
    assert found == sorted(found)
    assert found.index(True) == 1 + 2 * test_nvme_store.NUM  # it is synced, and files are closed


@pytest.mark.slow
def test_start_after_start_is_killed(children, tmp_path, monkeypatch):
    """Each goes as far as it can, over what the one before has left."""
    num = num_of_operations(children, tmp_path / "whole")
    for at in (num // 3, 9, num // 2, num // 2):
        killed_at(children, tmp_path / "run", at)
    assert begins_again(tmp_path / "run", True, monkeypatch)
    aside = list((tmp_path / "run").rglob("*.aside-*"))
    assert len(aside) <= 3
