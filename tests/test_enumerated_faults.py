"""Saves, exports, imports and restores keep their promises when an operation on a file fails, or is the last.

A sample of what experiments/checkpoint_faults/run.py runs in full.
"""

import errno
import random
from collections.abc import Iterator

import pytest

import faults
from faults import Fault

pytestmark = pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not()))

# How many faults of each script are tried: 24 in all.
SAMPLE = {
    "save, in the background": 8,
    "save, and wait": 2,
    "restore": 2,
    "export a file over a file": 2,
    "export files over a file": 2,
    "export a file over files": 2,
    "export files over files": 2,
    "import": 4,
}


@pytest.fixture(scope="module")
def children() -> Iterator[faults.Children]:
    with faults.Children(["faults._scripts"]) as children:
        yield children


@pytest.mark.parametrize("name", faults.SCENARIOS)
def test_promises_are_kept(name, children, tmp_path):
    scenario = faults.SCENARIOS[name]
    every = scenario.faults(scenario.operations(children, tmp_path))
    chosen = random.Random(0).sample(every, SAMPLE[name])
    outcomes = [scenario.meet(children, tmp_path, fault) for fault in chosen]
    broken = [str(outcome) for outcome in outcomes if outcome.broken]
    assert not broken, "\n".join(broken)
    assert any(outcome.operation for outcome in outcomes)


@pytest.mark.parametrize(
    ("fault", "ended", "name", "content"),
    [
        (Fault("tear", 2), (-9, []), "file.tmp", b"01234"),
        (Fault("fail", 3, "EIO"), (0, [{"errno": errno.EIO}]), "file.tmp", b"0123456789"),
        (Fault("fail_from", 2, "ENOSPC"), (0, [{"errno": errno.ENOSPC}]), "file.tmp", b""),
        (Fault("shorten", 2), (0, []), "file", b"0123456789"),
    ],
    ids=str,
)
def test_what_faults_do(fault, ended, name, content, children, tmp_path):
    assert write_file(children, tmp_path, fault) == ended
    assert [path.name for path in (tmp_path / "root").iterdir()] == [name]
    assert (tmp_path / "root" / name).read_bytes() == content


def write_file(children, folder, fault=Fault()) -> tuple[int | None, list]:  # noqa: B008
    (folder / "root").mkdir()
    root, log = str(folder / "root"), str(folder / "log")
    ended = children.run("faults._scripts:write_file", root=root, fault=fault, log=log)
    return ended.status, ended.said


@pytest.mark.slow
def test_what_hangs_is_killed(children, monkeypatch):
    monkeypatch.setattr(faults._children, "PATIENCE_SECONDS", 0.5)
    assert children.run("faults._scripts:hang").status is None
