"""A power cut loses nothing that was acknowledged: on a disk that is cut, and by the order of operations."""

import os
import pathlib
from collections.abc import Iterator

import pytest

import faults
from faults import Fault, Operation
from faults._disk import copy, disk_with_steps, mounted, steps_after_cut, why_no_disk
from faults._synced import Disk, unsynced_when_renamed

pytestmark = pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not()))
SAVE = faults.SCENARIOS["save, in the background"]
NUM_CUTS = 20


@pytest.fixture(scope="module")
def children() -> Iterator[faults.Children]:
    with faults.Children(["faults._scripts"]) as children:
        yield children


@pytest.fixture(scope="module")
def log(children, tmp_path_factory) -> list[Operation]:
    """What the saves of two steps do, each of which lets an older one go."""
    return SAVE.operations(children, tmp_path_factory.mktemp("log"))


# ------------------------------------------------------------------------------ disks that are cut


@pytest.fixture(scope="module")
def saved_disk(children, tmp_path_factory) -> pathlib.Path:
    """A disk with the steps that are there before."""
    if reason := why_no_disk():
        pytest.skip(reason)
    return disk_with_steps(children, SAVE, tmp_path_factory.mktemp("disk"))


@pytest.mark.slow
def test_a_cut_loses_what_was_not_synced(saved_disk, tmp_path):
    """So the test below sees it."""
    disk = copy(saved_disk, tmp_path / "disk")
    with mounted(disk, tmp_path / "at") as root:
        (root / "not synced").write_text("0123456789")
        with (root / "synced").open("w") as file:
            file.write("0123456789")
            file.flush()
            os.fsync(file.fileno())
            file.write("and more")
        (root / "synced").rename(root / "renamed")
        after = copy(disk, tmp_path / "after")
    with mounted(after, tmp_path / "at") as root:
        sizes = {path.name: path.stat().st_size for path in root.iterdir() if path.is_file()}
    assert sizes.pop("not synced", 0) == 0
    assert sizes == {"synced": 10}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [*range(NUM_CUTS), None],
)
def test_acknowledged_steps_survive(cut, saved_disk, log, children, tmp_path):
    """Cut during saves and deletions, at one operation after the other; and when all is acknowledged."""
    num_changes = sum(operation.number > 0 and not operation.reads for operation in log)
    fault = Fault() if cut is None else Fault("kill", 1 + cut * num_changes // NUM_CUTS)
    assert not steps_after_cut(children, SAVE, saved_disk, tmp_path, fault)


# ----------------------------------------------------------------------- the order of operations


@pytest.mark.parametrize("step", faults.SAVES)
def test_a_step_is_on_the_disk_before_it_has_its_name(step, log):
    assert not unsynced_when_renamed(log, f"steps/{step}")


@pytest.mark.parametrize("step", faults.SAVES)
def test_a_step_is_on_the_disk_before_it_is_acknowledged(step, log):
    (told,) = (op for op in log if (op.name, op.path) == ("note", f"complete {step}"))
    disk = Disk.before(log, told)
    assert not disk.unsynced(f"steps/{step}", with_name=True)


@pytest.mark.parametrize(("old", "new"), [*zip(faults.SAVED, faults.SAVES, strict=True)])
def test_an_older_step_goes_when_the_newer_is_on_the_disk(old, new, log):
    """And the first that happens to it is a rename: what is half removed is no step."""
    removals = [operation for operation in log if _removes(operation, f"steps/{old}")]
    disk = Disk.before(log, removals[0])
    assert not disk.unsynced(f"steps/{new}", with_name=True)
    assert (removals[0].name, removals[0].path) == ("rename", f"steps/{old}")


def _removes(operation: Operation, path: str) -> bool:
    inside = operation.path == path or operation.path.startswith(f"{path}/")
    return inside and operation.name in ("unlink", "rmdir", "rename")


@pytest.mark.slow(but=["export files over a file-exports/model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("export a file over files", "exports/model.safetensors"),
        ("export files over a file", "exports/model.safetensors.index.json"),
        ("import", "made"),
    ],
)
def test_what_is_written_is_on_the_disk_before_it_has_its_name(name, target, children, tmp_path):
    """And the name is, before the command ends."""
    operations = faults.SCENARIOS[name].operations(children, tmp_path)
    assert not unsynced_when_renamed(operations, target)
    assert not Disk.after(operations).unsynced(target, with_name=True)


@pytest.mark.slow
def test_what_a_log_says():
    """A file that is synced, in a directory that is not; and a change after the sync."""
    log = [
        ("create", "a/x.tmp", ""), ("write", "a/x.tmp", ""), ("fsync", "a/x.tmp", ""),
        ("rename", "a/x.tmp", "a/x"), ("note", "renamed", ""), ("fsync", "a", ""), ("note", "named", ""),
        ("write", "a/x", ""), ("note", "written", ""),
    ]  # fmt: skip
    operations = [
        Operation(i, 2 * i, 2 * i + 1, *fields, result=0, error=0) for i, fields in enumerate(log)
    ]
    assert unsynced_when_renamed(operations, "a/x") == []
    expected = {"renamed": ["the name x in a: rename"], "named": [], "written": ["a/x: write"]}
    for moment, unsynced in expected.items():
        (note,) = (operation for operation in operations if operation.path == moment)
        disk = Disk.before(operations, note)
        assert disk.unsynced("a/x", with_name=True) == unsynced
    assert unsynced_when_renamed(operations, "a/y") == ["nothing was renamed to a/y"]
