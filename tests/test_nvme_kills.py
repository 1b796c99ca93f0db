"""State on a disk after a kill or a failure at every operation on a file: a step or the next, no mixture."""

import contextlib
import pathlib
import random
import signal
import time
from collections.abc import Iterator

import pytest

import faults
import jzero
import nvme_state
from faults import Fault
from faults._disk import copy, make_disk, mounted, why_no_disk
from faults._synced import Disk

pytestmark = pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not()))
BOTH = faults.CHANGES | faults.READS
STEP = 1  # The step that is there before.


@pytest.fixture(scope="module")
def children() -> Iterator[faults.Children]:
    with faults.Children(["nvme_state"]) as children:
        yield children


def operations(children, folder, script="step_in_child", in_place=False) -> list[faults.Operation]:
    """What a step does to files, or making them does."""
    (folder / "logged").mkdir()
    if script == "step_in_child":
        with nvme_state.made(folder / "logged", in_place):
            pass
    ended = children.run(
        f"nvme_state:{script}", root=str(folder / "logged"), in_place=in_place,
        fault=Fault(kinds=BOTH), log=str(folder / "log"),
    )  # fmt: skip
    assert ended.status == 0, ended.errors
    return [x for x in faults.read_log(folder / "log") if x.number]


def step(children, root, fault, in_place=False) -> faults.Ended:
    """A state, and a step of a child with a fault."""
    with nvme_state.made(root, in_place):
        pass
    return another_step(children, root, fault, in_place)


def another_step(children, root, fault, in_place=False) -> faults.Ended:
    return children.run("nvme_state:step_in_child", root=str(root), in_place=in_place, fault=fault)


def num_of_one_step(log: list[faults.Operation], in_place: bool = False) -> int:
    """How many operations there are until the first step of the child is complete."""
    # A step reads and writes; the child looks at it, and makes another one. With one slot gradients are
    # behind the tiles, and overwrite nothing that a header would have to tell of.
    return [x.number for x in log if x.name == "fdatasync"][6 if in_place else 8]


@pytest.mark.slow(but=["tear-True"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("action", ["kill", "tear"])
def test_killed_at_every_operation(action, in_place, children, tmp_path):
    log = operations(children, tmp_path, in_place=in_place)
    steps, dirty, num = [], 0, num_of_one_step(log, in_place)
    for at in range(1, num + 2):
        root = tmp_path / str(at)
        ended = step(children, root, Fault(action, at, kinds=BOTH), in_place)
        assert ended.status == -signal.SIGKILL, ended
        if is_dirty(root, in_place):
            dirty += 1
            continue
        with nvme_state.reopen(root, in_place) as files:
            nvme_state.check(files)
            steps.append(nvme_state.step_of(files))
            nvme_state.train(files)
            nvme_state.check(files, steps[-1] + 1)
    # Both happen, one after the other; what is dirty lies between.
    assert steps == sorted(steps)
    assert set(steps) == {STEP, STEP + 1}
    assert (dirty > nvme_state.NUM_TILES) == in_place


def is_dirty(root: pathlib.Path, in_place: bool) -> bool:
    """Whether files in one slot are refused for that."""
    try:
        nvme_state.reopen(root, in_place).close()
    except jzero.StateError as error:
        text = f"is dirty: its run ended while step {STEP + 1} was written"
        if not in_place or text not in str(error):
            raise
        return True
    return False


def test_killed_between_two_headers(children, tmp_path):
    """One file has both steps then, the other one only the step before, which is chosen; again and again."""
    log = operations(children, tmp_path)
    syncs = [x.number for x in log if x.name == "fdatasync"]
    with nvme_state.made(tmp_path):
        pass
    for at, first in [(7, [STEP, STEP + 1]), (6, [STEP]), (7, [STEP, STEP + 1])]:
        another_step(children, tmp_path, Fault("kill", syncs[at] + 1, kinds=BOTH))
        with nvme_state.reopen(tmp_path) as files:
            frozen = [STEP, STEP + 1]
            assert [[*nvme_state.numbers(x.steps)] for x in files._files] == [first, [STEP], frozen]
            assert (nvme_state.numbers(files.steps), files.step) == ((STEP,), STEP)
            nvme_state.check(files)


@pytest.mark.parametrize("in_place", [False, True])
def test_made_again_after_a_kill(in_place, children, tmp_path):
    """Files that were being made are made again, and nothing else is left."""
    num = len(operations(children, tmp_path, "create_in_child", in_place))
    for at in range(1, num + 1):
        root = tmp_path / str(at)
        root.mkdir()
        fault = Fault("kill", at, kinds=BOTH)
        script = "nvme_state:create_in_child"
        ended = children.run(script, root=str(root), in_place=in_place, fault=fault)
        assert ended.status == -signal.SIGKILL, ended
        # Once it has its name, what a run has left is put aside.
        warned = pytest.warns(UserWarning, match="is there, without a complete step, and gets the")
        with warned if (root / "run").exists() else contextlib.nullcontext():
            files = nvme_state.create(root, in_place)
        with files:
            nvme_state.fill(files)
            nvme_state.check(files, 0)
        assert {path.name for path in (root / "run").iterdir()} == set(nvme_state.SPECS)
        assert {path.name for path in root.iterdir()} <= {"run", "run.aside-0"}


@pytest.mark.slow
def test_killed_at_any_time(children, tmp_path):
    rng = random.Random(0)
    with nvme_state.made(tmp_path):
        pass
    last = STEP
    for _ in range(15):
        child = children.start("nvme_state:train_in_child", root=str(tmp_path))
        for _ in range(rng.randint(1, 4)):
            last = child.hear()
        time.sleep(rng.uniform(0, 0.02))
        child.send(signal.SIGKILL)
        ended = child.wait()
        assert ended.status == -signal.SIGKILL, ended.errors
        last = max([last, *ended.said])
        with nvme_state.reopen(tmp_path) as files:
            assert files.step in (last, last + 1)
            nvme_state.check(files)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_failure_at_every_operation(error, in_place, children, tmp_path):
    """It is named; the state is as it was, and a step more works, unless it was written over."""
    log = operations(children, tmp_path, in_place=in_place)
    text = {"EIO": "Input/output error", "ENOSPC": "No space left on device"}[error]
    for at in range(1, num_of_one_step(log, in_place) + 1):
        root = tmp_path / str(at)
        failed, then = step(children, root, Fault("fail", at, error, BOTH), in_place).said
        assert failed["error"] == "StateError"
        assert any(f"{root}/run/{name}" in failed["message"] for name in nvme_state.SPECS)
        assert text in failed["message"]
        assert "step before is still there, unless in_place=True" in failed["message"]
        gradients = 2 * len(
            nvme_state.WITH_GRADIENTS
        )  # In one slot they come first, and cost nothing.
        if in_place and at > gradients:
            assert "failed while it was written over the step before" in then["lost"]
        else:
            assert then == {"step": STEP + 1}


@pytest.mark.slow
def test_writes_that_stop_short_go_on(children, tmp_path):
    log = operations(children, tmp_path)
    for at in range(1, num_of_one_step(log) + 1):
        ended = step(children, tmp_path / str(at), Fault("shorten", at, kinds=BOTH))
        assert ended.said == [{"step": STEP + 2}], ended


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EIO", "EACCES"])
def test_what_cannot_be_made_leaves_nothing(error, children, tmp_path):
    """Whichever operation is refused."""
    log = operations(children, tmp_path, "create_in_child")
    for operation in log:
        if operation.name == "close":
            continue
        root = tmp_path / str(operation.number)
        root.mkdir()
        fault = Fault("fail", operation.number, error, BOTH)
        script = "nvme_state:create_in_child"
        (said,) = children.run(script, root=str(root), in_place=False, fault=fault).said
        assert said["error"] in ("OptionError", "StateError"), (operation, said)
        assert str(root) in said["message"]
        assert not list(root.iterdir()), (operation, said)


# -------------------------------------------------------------------------------------- power cuts


def test_tiles_are_on_the_disk_before_the_header_says_so(children, tmp_path):
    """And before a gradient is written where a step was, that it is there no more is."""
    log = operations(children, tmp_path)
    log = log[: num_of_one_step(log)]
    writes = [x for x in log if x.name.startswith("pwrite")]
    tiles = nvme_state.NUM_TILES * 2
    gradients = 2 * len(nvme_state.WITH_GRADIENTS)
    first_gradient, first_complete = writes[2], writes[2 + gradients + 2 + tiles + 2]
    for moment in (first_gradient, first_complete):
        disk = Disk.before(log, moment)
        assert not disk.unsynced("run")
    assert not Disk.after(log).unsynced("run")
    # Of each file: marked, gradients written, marked, gradients and tiles read, tiles written, checksums,
    # synced, complete; a frozen one: complete.
    assert sum(x.name.startswith("preadv") for x in log) == tiles + gradients
    assert len(writes) == tiles + gradients + 2 * 4 + 1
    assert sum(x.name == "fdatasync" for x in log) == 2 * 4 + 1


@pytest.fixture(scope="module")
def disk_with_state(tmp_path_factory) -> pathlib.Path:
    if reason := why_no_disk():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("disk")
    make_disk(folder / "disk")
    with mounted(folder / "disk", folder / "at") as root, nvme_state.made(root):
        pass
    return folder / "disk"


@pytest.mark.slow(but=["0", "2", "4"])
@pytest.mark.parametrize("part", range(8))
def test_a_power_cut(part, disk_with_state, children, tmp_path):
    """The step that is there is whole; an ended one is there."""
    at = 1 + 6 * part
    disk = copy(disk_with_state, tmp_path / "disk")
    with mounted(disk, tmp_path / "at") as root:
        ended = another_step(children, root, Fault("tear", at, kinds=BOTH))
        assert ended.status == -signal.SIGKILL
        after = copy(disk, tmp_path / "after")
    with mounted(after, tmp_path / "at") as root, nvme_state.reopen(root) as files:
        assert files.step in (STEP, STEP + 1)
        nvme_state.check(files)
