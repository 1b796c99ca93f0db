# SPDX-License-Identifier: Apache-2.0
"""Steps in a bucket: what is acknowledged stays, whoever else writes there, and however a writer ends."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from etils import epath

import jzero
from faults import Proxy, RequestFault
from jzero.checkpoint import _bucket, _bucket_steps, _lock, _mirror, _seal, _temporary
from jzero.checkpoint._bucket import Bucket
from jzero.cli._main import main
from test_bucket import opened
from test_checkpoint_faults import (
    Place,
    assert_restored,
    new_state,
    refused,
    restore,
    save,
    step_fn,
)

WRITER = """
import sys, time, jzero
from test_checkpoint_faults import new_state, save, step_fn
from jzero.checkpoint import _seal
checkpointer = jzero.Checkpointer(sys.argv[1], jzero.shard_train_step(step_fn), staging=sys.argv[2])
save(checkpointer, 1)
text = _seal.text
def stop(*args):
    print("about to seal", flush=True)
    time.sleep(600)
_seal.text = stop
checkpointer.save(2, new_state())
time.sleep(600)
"""


@pytest.fixture(scope="module")
def train_step():
    return jzero.shard_train_step(step_fn)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What fails does so soon."""
    retries = {"max_retries": 2, "initial_delay": "10ms", "max_delay": "20ms"}
    monkeypatch.setattr(_bucket, "_RETRIES", retries)


@pytest.fixture
def proxy(s3, s3_endpoint, monkeypatch):
    """Before the server of the bucket."""
    with Proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def owner_in(bucket: Bucket) -> str | None:
    found = bucket.read("_JZERO_WRITER")
    return found and json.loads(found.data)["owner"]


def of_another_machine(url: str, beat: int = 7) -> None:
    """The lock of a writer of which nobody here can tell whether it runs."""
    owner = _lock.Owner("node7", "boot pid:[1]", 12, 34, "token")
    opened(url).write("_JZERO_WRITER", _lock._text(owner, beat, None))


# -- as in a directory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("asynchronous", "scheme"), [(True, "s3"), (False, "gs")])
def test_saves_and_restores(asynchronous, scheme, request, train_step, tmp_path):
    """Bit for bit, the iterator too; later trainings go on, and older steps go."""
    url = request.getfixturevalue(scheme)
    for steps in ((1, 2), (3, 4)):
        with jzero.Checkpointer(
            url, train_step, max_to_keep=3, asynchronous=asynchronous, staging=tmp_path
        ) as checkpointer:
            assert checkpointer.latest_step() == (steps[0] - 1 or None)
            for step in steps:
                assert checkpointer.save(step, new_state(), Place(step))
                assert not checkpointer.save(step, new_state(), Place(step))
            checkpointer.wait()
        assert not list(tmp_path.iterdir())
    with jzero.Checkpointer(epath.Path(url), train_step) as checkpointer:
        assert checkpointer.steps() == [2, 3, 4]
        place = Place(0)
        assert_restored(checkpointer.restore(new_state(), data_iterator=place))
        assert place.at == 4
        with refused(f"{url} has no step 7. It has the steps"):
            checkpointer.restore(new_state(), step=7)
        with refused(f"step 3 is not after step 4 of {url}"):
            checkpointer.save(3, new_state())
    assert_restored(jzero.restore(f"{url}/2", train_step, new_state()))
    assert_restored(jzero.restore(f"{url}/2/state", train_step, new_state()))
    assert not [name for name in opened(url).names() if name.startswith("1/")]


def test_copies_that_somebody_removed_are_made_again(s3, train_step):
    """As a cleaner of the temporary directory does, beside a training of weeks."""
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        checkpointer.save(1, new_state())
        checkpointer.wait()
        for _ in range(2):
            assert_restored(checkpointer.restore(new_state()))
            shutil.rmtree(_mirror._root())


def test_steps_are_checkpoints_of_orbax(s3, s3_endpoint, train_step, tmp_path):
    """The same files as in a directory; Orbax reads a copy of them, and tensorstore the bucket."""
    for directory in (s3, tmp_path / "local"):
        with jzero.Checkpointer(directory, train_step) as checkpointer:
            checkpointer.save(1, new_state())
    bucket, local = opened(s3) / "1", tmp_path / "local" / "1"
    there = [str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()]
    assert sorted(re.sub(r"/d/\w+", "/d/", name) for name in there) == sorted(
        re.sub(r"/d/\w+", "/d/", name) for name in bucket.names()
    )
    bucket.download(bucket.names(), tmp_path / "copy")
    with ocp.PyTreeCheckpointer() as plain:
        assert_restored(plain.restore(tmp_path / "copy" / "state"))
    store = {"driver": "ocdbt", "base": bucket.spec("state")}
    spec = {"driver": "zarr3", "kvstore": {**store, "path": "w/"}}
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), new_state()["w"])


def test_several_processes(s3, tmp_path):
    """Each uploads its own part; no directory is seen by both. What a dead one has begun is replaced."""
    from test_processes import found_by

    processes = 2
    bucket = opened(s3) / "1"
    bucket.write("_JZERO_SEAL", _seal.claim("a process"))
    data, parts = f"state/d/{'0' * 32}", [f"state/ocdbt.process_{i}/" for i in range(processes + 1)]
    left = [data, *(f"{part}manifest.ocdbt" for part in ("state/", *parts))]
    for name in left:
        bucket.write(name, b"left")
    there = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    (tmp_path / "bucket.json").write_text(json.dumps([s3, there]))
    assert found_by("in_a_bucket", processes, 2, tmp_path) == [[[1, 2], True]] * processes
    found = {name: bucket.read(name) for name in left}
    assert [name for name, each in found.items() if each] == left[1:-1]
    assert all(each.data != b"left" for each in found.values() if each)


# -- one writer ---------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(s3, train_step):
    first, second = (jzero.Checkpointer(s3, train_step) for _ in range(2))
    save(first, 1)
    second.save(2, new_state())
    with refused(f"process {os.getpid()} on .* writes in {s3}, .*close it"):
        second.wait()
    assert_restored(second.restore(new_state(), step=1))
    first.close()
    assert owner_in(opened(s3)) is None
    assert second.save(2, new_state())
    second.close()


@pytest.mark.slow
def test_a_writer_elsewhere_is_watched(s3, train_step, monkeypatch, capsys):
    """One that shows that it lives is an error at once; one that does not is followed after the lease."""
    monkeypatch.setattr(_lock, "EXPIRES", 1.0)
    monkeypatch.setattr(_lock, "_MARGIN", 0.5)
    monkeypatch.setattr(_lock, "_LOOK", 0.05)
    of_another_machine(s3)
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        timer = threading.Timer(0.3, of_another_machine, (s3, 8))
        timer.start()
        text = f"process 12 on node7 writes in {s3}, .* 0 s ago.* python -m jzero unlock {s3}"
        checkpointer.save(1, new_state())
        with refused(text):
            checkpointer.wait()
        timer.join()
        start = time.monotonic()
        assert checkpointer.save(1, new_state())
        checkpointer.wait()
        assert time.monotonic() - start >= 1
    of_another_machine(s3)
    main(["unlock", s3])
    assert "process 12 on node7 may no longer write in it" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match="unlock: nobody writes in .*A writer has _JZERO_WRITER there"
    ):
        main(["unlock", s3])


def test_a_lock_that_nobody_understands(s3, train_step, monkeypatch):
    """May be of a later version: only a person ends it."""
    monkeypatch.setattr(_lock, "EXPIRES", 0.2)
    monkeypatch.setattr(_lock, "_LOOK", 0.05)
    opened(s3).write("_JZERO_WRITER", b"nothing")
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.save(1, new_state())


@pytest.mark.slow
def test_a_dead_process_is_followed(s3, train_step, tmp_path):
    """At once, on this machine; what it left half written goes, and what others have put there stays."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, s3, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "about to seal\n"
        with jzero.Checkpointer(s3, train_step, staging=tmp_path) as checkpointer:
            assert checkpointer.latest_step() == 1
            checkpointer.save(3, new_state())
            with refused(f"process {writer.pid} on .* End it, or"):
                checkpointer.wait()
        writer.kill()
        writer.wait()
        with jzero.Checkpointer(s3, train_step, staging=tmp_path) as checkpointer:
            opened(s3).write("9/notes", b"of a user")
            assert [name for name in opened(s3).names() if name.startswith("2/state/")]
            assert len(list(tmp_path.iterdir())) == 1
            assert checkpointer.save(3, new_state())
            checkpointer.wait()
            assert not [name for name in opened(s3).names() if name.startswith("2/")]
            assert checkpointer.steps() == [1, 3]
        assert opened(s3).read("9/notes")
        assert not list(tmp_path.iterdir())


@pytest.mark.slow(but=["True-files_in", "False-text"])
@pytest.mark.parametrize("where", ["text", "files_in"])
@pytest.mark.parametrize("saved_again", [True, False])
def test_a_writer_that_comes_back_to_life(where, saved_again, s3, train_step, monkeypatch):
    """Before it seals, or uploads: it fails, and changes nothing of what the new writer has written."""
    reached, goes_on = threading.Event(), threading.Event()
    act = getattr(_seal, where)

    def paused(*args):
        if "old" in threading.current_thread().name:
            reached.set()
            goes_on.wait(20)
        return act(*args)

    monkeypatch.setattr(_seal, where, paused)
    monkeypatch.setattr(_lock, "_MARGIN", _lock.EXPIRES)  # It has slept.
    start = _bucket_steps.BucketSteps.claim
    old = jzero.Checkpointer(s3, train_step)

    def claim(self, *args):
        if self is old._steps:
            threading.current_thread().name = "old"
        start(self, *args)

    monkeypatch.setattr(_bucket_steps.BucketSteps, "claim", claim)
    old.save(1, {**new_state(), "w": new_state()["w"] + 1})
    assert reached.wait(20)
    owner = old._steps.lock._owner
    assert owner is not None
    _lock._held.discard(owner.token)  # as if it were no process of here
    with jzero.Checkpointer(s3, train_step) as new:
        new.save(1 if saved_again else 2, new_state())
        new.wait()
        before = {name: opened(s3).read(name) for name in opened(s3).names()}
        goes_on.set()
        with refused("has taken over|was written by another"):
            old.wait()
        old.close()
        after = {name: opened(s3).read(name) for name in opened(s3).names()}
        assert {name: each for name, each in after.items() if name in before} == before
        assert new.steps() == [1 if saved_again else 2]
        assert_restored(new.restore(new_state()))
        assert new.save(3, new_state())


def test_a_writer_that_slept_too_long(s3, train_step, monkeypatch):
    """It asks before it acts, and finds another one."""
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        save(checkpointer, 1)
        of_another_machine(s3)
        checkpointer.save(2, new_state())
        text = f"process 12 on node7 has taken over {s3}. .* 120 s counts as dead"
        with refused(text):
            checkpointer.wait()
        assert checkpointer.steps() == [1]
        assert not [name for name in opened(s3).names() if name.startswith("2/")]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_step_that_another_one_has_written_since(is_closed, s3, train_step, monkeypatch):
    """This process has begun it, could not write it, and hides and removes none of another's."""

    def forbidden(*args):
        raise jzero.CheckpointError("forbidden by the test")

    first = jzero.Checkpointer(s3, train_step)
    save(first, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", forbidden)
        patch.setattr(Bucket, "remove", forbidden)
        first.save(2, new_state())
        with refused("forbidden by the test"):
            first.wait()
    assert first.steps() == [1]
    if is_closed:
        first.close()
    else:
        owner = first._steps.lock._owner
        assert owner is not None
        _lock._held.discard(owner.token)  # as if it were no process of here
    with jzero.Checkpointer(s3, train_step) as second:
        second.save(2, new_state())
    assert first.steps() == [1, 2]
    if is_closed:
        save(first, 3)
        assert first.steps() == [1, 2, 3]
        assert_restored(restore(s3, train_step, step=2))
    first.close()


# -- requests -----------------------------------------------------------------------------------------


def test_training_waits_for_no_request(s3, proxy, train_step, monkeypatch):
    """Of the first save neither, whose lock is still to be taken."""
    goes_on, claim = threading.Event(), _bucket_steps.BucketSteps.claim

    def late(*args):
        assert goes_on.wait(20)
        return claim(*args)

    monkeypatch.setattr(_bucket_steps.BucketSteps, "claim", late)
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (1, 2):
            goes_on.clear()
            proxy.arm(RequestFault())
            assert checkpointer.save(step, new_state())
            assert proxy.log == []
            goes_on.set()
            checkpointer.wait()
            assert len(proxy.log) > 10
    assert checkpointer.steps() == [1, 2]


def test_a_first_look_that_fails_loses_no_step(s3, proxy, train_step):
    """The lock is held by then, and is not taken for one that knows all steps."""
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, new_state())
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.latest_step() == 2
        proxy.arm(RequestFault("answer", 1, 403, only="GET 1/_JZERO_SEAL"))
        checkpointer.save(3, new_state())
        with refused("1/_JZERO_SEAL could not be read"):
            checkpointer.wait()
        save(checkpointer, 3)
        assert checkpointer.steps() == [1, 2, 3]


# -- bad input ----------------------------------------------------------------------------------------


def test_a_bucket_that_cannot_be_used(s3, proxy, train_step, monkeypatch):
    """Each is found when the checkpointer is made, or the lock is taken."""
    with refused(r"(?s)s3://nothing/.* NoSuchBucket.*Check the bucket's"):
        jzero.Checkpointer("s3://nothing/steps", train_step)
    proxy.arm(RequestFault("answer", 1, 403, ever=True))
    with refused(r"(?s)AccessDenied.*what the credentials permit"):
        jzero.Checkpointer(s3, train_step)
    proxy.disarm()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with refused(r"Could not connect.*AWS_ENDPOINT_URL"):
        jzero.Checkpointer(s3, train_step)


def test_an_endpoint_that_ignores_conditions(s3, train_step, monkeypatch):
    """Two writers would both win; found before anything is written but the lock."""

    def write_if(self, name, data, version):
        return self.write(name, data)

    monkeypatch.setattr(Bucket, "write_if", write_if)
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        checkpointer.save(1, new_state())
        with refused("replaces an object .* conditional writes .If-None"):
            checkpointer.wait()
    assert opened(s3).names() == ["_JZERO_WRITER"]


def test_a_list_that_lags(s3, proxy, train_step):
    """The lock's object has the latest step; where that is gone, too, the step is still not replaced."""
    proxy.arm(RequestFault("stale", 1, ever=True))
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        checkpointer.save(1, new_state())
    assert "1/_JZERO_SEAL" not in opened(s3).names()
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert_restored(checkpointer.restore(new_state()))
        with refused("step 0 is not after step 1"):
            checkpointer.save(0, new_state())
    opened(s3).remove(["_JZERO_WRITER"])
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(1, {**new_state(), "w": new_state()["mu"]})
        with refused("1/_JZERO_SEAL was written by another process"):
            checkpointer.wait()
        proxy.disarm()
        assert checkpointer.steps() == [1]
        assert_restored(checkpointer.restore(new_state()))


def test_a_copy_of_a_step_never_counts(s3, train_step):
    """Beside others, and in the way of a later one: it has another step's values."""
    bucket = opened(s3)
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        checkpointer.save(1, new_state())
    for name, found in (bucket / "1").objects((bucket / "1").names()):
        bucket.write(f"3/{name}", found.data)
    for _ in range(2):
        with jzero.Checkpointer(s3, train_step) as checkpointer:
            assert checkpointer.latest_step() == 1
            checkpointer.save(3, new_state())
            with refused("/3 was written by another process"):
                checkpointer.wait()
            assert checkpointer.steps() == [1]
    (bucket / "3").remove([*(bucket / "3").names()])
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        save(checkpointer, 3)
        assert checkpointer.steps() == [1, 3]


def test_a_damaged_lock_hides_no_step(s3, train_step):
    bucket = opened(s3)
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        checkpointer.save(1, new_state())
        checkpointer.save(2, new_state())
    found = bucket.read("_JZERO_WRITER")
    assert found is not None
    assert b"[1, 2]" in found.data
    bucket.write("_JZERO_WRITER", found.data.replace(b"[1, 2]", b"[1, 3]"))
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        assert checkpointer.latest_step() == 2


def test_objects_that_are_cut_short_or_missing(s3, train_step):
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, new_state())
    bucket = opened(s3)
    data = [name for name in bucket.names("2/") if "/d/" in name]
    found = bucket.read(f"2/{data[0]}")
    assert found is not None
    bucket.write(f"2/{data[0]}", found.data[:-5])
    bucket.remove([f"3/{name}" for name in bucket.names("3/") if "/d/" in name])
    bucket.write("4/_JZERO_SEAL", b"{}")
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        with pytest.warns(UserWarning, match="4 does not count as a step: _JZERO_SEAL is damaged"):
            assert checkpointer.steps() == [1, 2, 3]
        for step, text in ((2, data[0]), (3, "state/.*d/"), (4, "_JZERO_SEAL is damaged")):
            with refused(text):
                checkpointer.restore(new_state(), step=step)
            with refused(f"{s3}/{step}.*{text}"):
                jzero.restore(f"{s3}/{step}", train_step, new_state())
        assert_restored(checkpointer.restore(new_state(), step=1))


@pytest.mark.slow
def test_a_save_that_fails_is_done_again(s3, proxy, train_step):
    """The next call raises it; what was complete is."""
    with jzero.Checkpointer(s3, train_step, max_to_keep=2) as checkpointer:
        save(checkpointer, 1)
        proxy.arm(RequestFault("count"))
        save(checkpointer, 2)
        for number in range(1, len(proxy.log) + 1):
            step, told = number + 2, ""
            proxy.arm(RequestFault("answer", number, 403, ever=number % 2 == 0))
            try:
                save(checkpointer, step)
            except jzero.CheckpointError as error:
                told = str(error)
            assert ("a fault of the tests" in told) == (proxy.hit() is not None), told
            proxy.disarm()
            # It is complete if only older ones could not be removed.
            complete = checkpointer.latest_step() == step
            assert complete or checkpointer.latest_step() == step - 1
            assert checkpointer.save(step, new_state()) != complete
            checkpointer.wait()
            assert checkpointer.latest_step() == step
    assert_restored(restore(s3, train_step))


def test_staging(s3, train_step, tmp_path, monkeypatch):
    """One without room is refused; what dead processes left goes, and the folders of others stay."""
    other = _temporary.Temporary("jzero-staging-", tmp_path)
    (tmp_path / "jzero-staging-dead").mkdir()
    with jzero.Checkpointer(s3, train_step, staging=tmp_path) as checkpointer:
        monkeypatch.setattr(
            _bucket_steps.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 17})
        )
        checkpointer.save(1, new_state())
        text = "has 17 bytes free, and this process writes 19,204. .* name another directory by staging="
        with refused(text):
            checkpointer.wait()
        monkeypatch.undo()
    assert [*tmp_path.iterdir()] == [other.path]
    other.close()


def test_a_folder_that_is_removed_before_it_is_locked(tmp_path, monkeypatch):
    """Another process takes it for one that a dead process left."""
    make, made = tempfile.mkdtemp, list[str]()

    def removed_once(*args: Any, **kwargs: Any) -> str:
        made.append(make(*args, **kwargs))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_once)
    own = _temporary.Temporary("own-", tmp_path)
    assert [str(own.path)] == made[1:]
    assert own.path.is_dir()
    own.close()


@pytest.mark.filterwarnings("ignore:os.fork")
def test_staging_of_a_process_with_a_child(s3, train_step, tmp_path):
    """A child that closes takes no folder from its parent; one that is gone is made again."""
    with jzero.Checkpointer(s3, train_step, staging=tmp_path) as checkpointer:
        save(checkpointer, 1)
        if (child := os.fork()) == 0:
            steps: Any = checkpointer._steps
            steps._staging.close()
            os._exit(0)
        os.waitpid(child, 0)
        (folder,) = tmp_path.iterdir()
        folder.rmdir()
        save(checkpointer, 2)
        assert checkpointer.steps() == [1, 2]


def test_a_lock_that_was_removed_is_taken_again(s3, train_step):
    """With the first save after the one that noticed."""
    with jzero.Checkpointer(s3, train_step) as checkpointer:
        save(checkpointer, 1)
        opened(s3).remove(opened(s3).names())
        checkpointer.save(2, new_state())
        with refused("_JZERO_WRITER was removed"):
            checkpointer.wait()
        save(checkpointer, 2)
        assert checkpointer.steps() == [2]


def test_a_server_that_does_not_answer(s3, train_step, monkeypatch):
    monkeypatch.setattr(_bucket, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with refused("there was no answer for 0 s"):
            jzero.Checkpointer(s3, train_step)
