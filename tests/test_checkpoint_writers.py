"""One writer in a directory, and nothing that it was asked to save is lost: retries, and who comes next."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from jzero.checkpoint import _lock, _seal, _writing
from jzero.cli._main import main
from test_checkpoint_faults import assert_restored, new_state, refused, restore, save, step_fn

WRITER = """
import sys, time, jzero
from test_checkpoint_faults import save, step_fn
checkpointer = jzero.Checkpointer(sys.argv[1], jzero.shard_train_step(step_fn))
save(checkpointer, 1)
print("saved", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def train_step():
    return jzero.shard_train_step(step_fn)


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 4 KiB: what the kernel then says is EFBIG, where a full disk has ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def fail(checkpointer, step) -> None:
    """Begins to save a step that cannot be written, and lets that happen in the background."""
    with small_files():
        checkpointer.save(step, new_state())
        while any("jzero saves" in thread.name for thread in threading.enumerate()):
            time.sleep(0.01)


NEXT = {
    "save of the same step": lambda c: c.save(2, new_state()),
    "save of a later step": lambda c: c.save(3, new_state()),
    "is_due": lambda c: c.is_due(2),
    "latest_step": lambda c: c.latest_step(),
    "restore": lambda c: c.restore(new_state()),
}


@pytest.mark.slow(but=["save of a later step"])
@pytest.mark.parametrize("call", NEXT)
def test_a_failure_in_the_background_is_raised_by_the_next_call(call, train_step, tmp_path):
    """Once; and saving the same step again saves it."""
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        save(checkpointer, 1)
        fail(checkpointer, 2)
        with refused(r"(?s)could not be .*File too large.*complete b"):
            NEXT[call](checkpointer)
        assert checkpointer.steps() == [1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "_JZERO_WRITER"]
        assert checkpointer.is_due(2)
        assert checkpointer.save(2, new_state())
        checkpointer.wait()
        assert not checkpointer.save(2, new_state())
    assert_restored(restore(tmp_path, train_step, step=2))


def test_close_raises_it_too_and_lets_others_write(train_step, tmp_path, capfd):
    checkpointer = jzero.Checkpointer(tmp_path, train_step)
    fail(checkpointer, 1)
    with refused("File too large"):
        checkpointer.close()
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in capfd.readouterr().err


def test_a_save_that_fails_at_once_is_done_again(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step, asynchronous=False) as checkpointer:
        with small_files(), pytest.raises(jzero.CheckpointError, match="File too large"):
            checkpointer.save(1, new_state())
        assert checkpointer.save(1, new_state())
    assert_restored(restore(tmp_path, train_step))


def test_warnings_name_the_callers_line(train_step, tmp_path):
    (tmp_path / "007").mkdir()
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        with pytest.warns(match="not how its number is written") as said:
            checkpointer.latest_step()
    assert said[0].filename == __file__


def test_a_directory_that_was_removed(train_step, tmp_path, monkeypatch):
    """Between saves, it is made again; while a step is written, that fails, and can be done again."""
    with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
            shutil.rmtree(tmp_path / "steps")
        assert checkpointer.steps() == []
        checkpointer.save(3, new_state())
        (tmp_path / "steps" / "_JZERO_WRITER").unlink()
        with refused("_JZERO_WRITER was removed. A process that shows"):
            checkpointer.wait()
        assert checkpointer.save(3, new_state())
    assert_restored(restore(tmp_path / "steps", train_step, step=3))


def test_steps_that_cannot_be_removed_are_no_reason_to_save_again(
    train_step, tmp_path, monkeypatch
):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with jzero.Checkpointer(tmp_path, train_step, max_to_keep=1) as checkpointer:
        save(checkpointer, 1)
        monkeypatch.setattr("jzero.checkpoint._files.remove", refuse)
        checkpointer.save(2, new_state())
        with refused("Permission denied"):
            checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        assert not checkpointer.save(2, new_state())
        monkeypatch.undo()
        save(checkpointer, 3)
        assert checkpointer.steps() == [3]


UNSAVABLE = {
    "uint4": (
        {"w": jnp.zeros(3, jnp.uint4)},
        r"w uint4\[3\] has a dtype that cannot be written. A ch",
    ),
    "dates": (
        {"w": np.zeros(3, "datetime64[s]")},
        r"w datetime64\[s\]\[3\] has a dtype that cannot",
    ),
    "text": ({"a": {"b": "text"}}, "a/b is a str. A checkpoint holds arrays and numbers"),
    "a key that ends in a slash": ({"a/": jnp.zeros(3)}, "has the key 'a/'. A checkpoint holds"),
    "a key without a name": ({"": jnp.zeros(3)}, "has the key ''. A checkpoint holds"),
    "a number for which JAX has no room": (
        {"a": 5_000_000_000, "b": np.int64(7)},
        "a has values beyond int32, as which JAX restores it without jax_enable_x64. A",
    ),
    "a key with half a pair": ({"\udc80": jnp.zeros(3)}, "has the key '.udc80'"),
    "nothing": ({}, "the state is {}, without leaves. A checkpoint holds arrays"),
    "no arrays": ({"a": None}, "the state is {'a': None}, without leaves"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_states_that_cannot_be_saved(name, train_step, tmp_path):
    """All leaves that are the reason, before anything is written."""
    state, text = UNSAVABLE[name]
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        with pytest.raises(jzero.StateError, match=f"Checkpointer.save: .*{text}"):
            checkpointer.save(1, state)
        assert checkpointer.save(1, new_state())


def test_numbers_of_all_kinds(train_step, tmp_path):
    state = {
        "a": 1 + 2j,
        "b": np.bool_(True),
        "c": True,
        "d": np.int8(3),
        "e": 2.5,
        "f": np.float16(1),
    }
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(state)
    for name, value in state.items():
        np.testing.assert_array_equal(restored[name], value)


@pytest.mark.parametrize("path", [5, b"x", "", "hdfs://steps", "s3://", "gs://b/../c"])
def test_paths_that_are_none(path, train_step):
    text = "the path is .*. It is (a string|one in a file system, s3://bucket/path or gs://bucket/path. Cor)"
    with pytest.raises(jzero.OptionError, match=f"Checkpointer: {text}"):
        jzero.Checkpointer(path, train_step)
    with pytest.raises(jzero.OptionError, match=f"restore: {text}"):
        jzero.restore(path, train_step, new_state())


def test_home_is_the_users(train_step, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with jzero.Checkpointer("~/steps", train_step) as checkpointer:
        checkpointer.save(1, new_state())
    assert_restored(restore(tmp_path / "steps", train_step))


def test_step_numbers(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        for call in (lambda step: checkpointer.save(step, new_state()),
                     lambda step: checkpointer.restore(new_state(), step=step)):  # fmt: skip
            for step in ("2", 2.0, 2**31, -1, True):
                with pytest.raises(
                    jzero.OptionError, match="It counts steps. Pass an integer from 0"
                ):
                    call(step)


def test_threads_that_save_with_one_checkpointer(train_step, tmp_path):
    """One after the other: what was said to be saved is, and a step that comes too late is refused."""
    told: dict[int, bool] = {}

    def run(step):
        try:
            told[step] = checkpointer.save(step, new_state())
        except jzero.CheckpointError as error:
            told[step] = "is not after step" in str(error)  # False would be another error

    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        threads = [threading.Thread(target=run, args=(step,)) for step in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        checkpointer.wait()
        assert len(told) == 12
        assert all(told.values())
        assert checkpointer.steps()


def test_ctrl_c_while_it_waits(train_step, tmp_path, monkeypatch):
    """The save goes on, and nobody else may write; `wait` still waits for it."""
    goes_on, write = threading.Event(), _seal.write
    monkeypatch.setattr(_seal, "write", lambda *args: (goes_on.wait(), write(*args)))
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, new_state())
        for call in (
            checkpointer.wait,
            checkpointer.close,
            lambda: checkpointer.restore(new_state()),
        ):
            main_thread = threading.main_thread().ident
            timer = threading.Timer(0.2, signal.pthread_kill, (main_thread, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            timer.join()
            assert (tmp_path / "_JZERO_WRITER").exists()
        goes_on.set()
        checkpointer.wait()
        assert checkpointer.steps() == [1]
        assert not checkpointer.save(1, new_state())


# -- one writer --------------------------------------------------------------------------------------


def test_a_second_writer_of_this_process_is_refused(train_step, tmp_path):
    first, second = (jzero.Checkpointer(tmp_path, train_step) for _ in range(2))
    save(first, 1)
    text = (
        rf"Checkpointer.save: process {os.getpid()} on .* writes in .*, and showed it \d+ s ago. One process "
        "at a time saves steps in a directory. This process has another Checkpointer for it: close it, or"
    )
    with refused(text):
        second.save(2, new_state())
    assert_restored(second.restore(new_state(), step=1))  # Who reads needs no right.
    first.close()
    assert second.save(2, new_state())
    second.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_threads_that_come_together(train_step, tmp_path):
    """Of many that want to write at the same time one may."""
    barrier, found = threading.Barrier(8), []

    def run():
        checkpointer = jzero.Checkpointer(tmp_path, train_step)
        barrier.wait()
        try:
            checkpointer.save(1, new_state())
            found.append(checkpointer)
        except jzero.CheckpointError as error:
            assert "close it, or save to another" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    found[0].close()
    assert_restored(restore(tmp_path, train_step))


def test_another_process_is_refused_while_it_runs_and_followed_when_it_is_dead(
    train_step, tmp_path
):
    folder = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": folder}
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
            with refused(rf"process {writer.pid} on .* End it, or save"):
                checkpointer.save(2, new_state())
            with pytest.raises(
                SystemExit, match=f"unlock: process {writer.pid} on .* runs. Two writers"
            ):
                main(["unlock", str(tmp_path)])
            writer.kill()
            writer.wait()
            (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # what it may have left
            (tmp_path / "3.orbax-checkpoint-tmp").write_text("")
            assert checkpointer.save(2, new_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert_restored(restore(tmp_path, train_step))


def of_another_machine(directory: pathlib.Path, age: float) -> pathlib.Path:
    """The file of a writer elsewhere, who showed that it lives so many seconds ago."""
    path = directory / "_JZERO_WRITER"
    path.write_text(json.dumps(["node7", "boot pid:[1]", 12, 34, "token"]))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_writer_of_another_machine(train_step, tmp_path, capsys):
    """It is believed to live for two minutes; a person may know better."""
    of_another_machine(tmp_path, 100)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        text = (
            r"process 12 on node7 writes in .* 10\d s ago. .* if that process is dead, wait 120 s, or take "
            rf"over with python -m jzero unlock {tmp_path}"
        )
        with refused(text):
            checkpointer.save(1, new_state())
        main(["unlock", str(tmp_path)])
        assert "process 12 on node7" in capsys.readouterr().out
        assert checkpointer.save(1, new_state())
    with pytest.raises(SystemExit, match="unlock: nobody writes in"):
        main(["unlock", str(tmp_path)])
    of_another_machine(tmp_path, 130)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        assert checkpointer.save(2, new_state())
    (tmp_path / "_JZERO_WRITER").mkdir()
    with pytest.raises(
        SystemExit, match="unlock: .*_JZERO_WRITER cannot be removed: Is a directory"
    ):
        main(["unlock", str(tmp_path)])
    (tmp_path / "_JZERO_WRITER").rmdir()
    for text in ("", "[1, 2]", "{}", "nothing", '["a", 1, 2, 3, 4]'):  # Whoever wrote that.
        (tmp_path / "_JZERO_WRITER").write_text(text)
        with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
            with refused("save: somebody writes in .* unlock"):
                checkpointer.save(3, new_state())
        (tmp_path / "_JZERO_WRITER").unlink()


def test_a_writer_shows_that_it_lives(train_step, tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "BEAT", 0.05)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, new_state())
        file = tmp_path / "_JZERO_WRITER"
        os.utime(file, (0, 0))
        deadline = time.monotonic() + 30
        while file.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_who_was_taken_for_dead_writes_no_more(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        save(checkpointer, 1)
        path = of_another_machine(tmp_path, 0)
        with refused("process 12 on node7 has taken over .* 120 s count"):
            checkpointer.save(2, new_state())
        assert checkpointer.steps() == [1]
    assert path.exists()  # It is not ours.


def test_a_right_that_could_not_be_given_back(train_step, tmp_path, monkeypatch):
    """Whoever fails to take it, and to remove the file, is not locked out by it."""

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        monkeypatch.setattr(_lock.threading, "Thread", refuse)
        monkeypatch.setattr(pathlib.Path, "unlink", refuse)
        with refused("No space left"):
            checkpointer.save(1, new_state())
        monkeypatch.undo()
        assert (tmp_path / "_JZERO_WRITER").exists()
        assert checkpointer.save(1, new_state())


def test_file_systems_without_hard_links(train_step, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with jzero.Checkpointer(tmp_path, train_step) as first:
        first.save(1, new_state())
        with jzero.Checkpointer(tmp_path, train_step) as second:
            with refused("One process at a time"):
                second.save(2, new_state())


# -- what does not count as a step ---------------------------------------------------------------------


def test_names_that_are_no_steps(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(3, new_state())
    for name in ("007", "٤", "9" * 200):
        (tmp_path / name).mkdir()
    for name in ("12a", "-5", "readme", "8.removed.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "10").write_text("")
    (tmp_path / "11").symlink_to(tmp_path / "3")
    (tmp_path / "12").mkdir()
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        with pytest.warns() as said:
            assert checkpointer.latest_step() == 3
        assert checkpointer.steps() == [3]
    reasons = {str(each.message).partition(tmp_path.name + ": ")[2].split(" ")[0]: str(each.message)
               for each in said}  # fmt: skip
    assert sorted(reasons) == sorted(["007", "٤", "9" * 200, "10", "11", "12"])
    assert "not how its number is written" in reasons["007"]
    assert "it is no directory" in reasons["10"]
    assert "it is a link" in reasons["11"]
    assert "_METADATA is missing" in reasons["12"]


# -- steps of earlier versions -------------------------------------------------------------------------

STORED = pathlib.Path(__file__).parent / "stored"


@pytest.mark.parametrize("version", sorted(path.name for path in STORED.iterdir()))
def test_steps_of_earlier_versions(version):
    """Every leaf bit for bit, and where the iterator stood."""
    expected = dict(np.load(STORED / version / "values.npz"))

    class Place:
        def set_state(self, state):
            self.state = state

    train_step, place = jzero.shard_train_step(step_fn), Place()
    params = {"w": jnp.zeros((37, 12)), "b": jnp.zeros(5, jnp.bfloat16)}
    state = {
        "params": params, "opt_state": optax.adam(1e-2).init(params), "key": jax.random.key(3), "step": 7,
        "host": np.zeros((2, 3), np.int16), "lr": 0.0,
    }  # fmt: skip
    with jzero.Checkpointer(STORED / version / "steps", train_step) as checkpointer:
        assert checkpointer.steps() == [7, 8]
        restored = checkpointer.restore(state, step=7, data_iterator=place)
    assert place.state == {"at": 11}
    for path, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]:
        leaf = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        value, wanted = (
            np.asarray(leaf),
            expected[jax.tree_util.keystr(path, simple=True, separator="/")],
        )
        value = value.view(np.uint16) if value.dtype == jnp.bfloat16 else value
        np.testing.assert_array_equal(value, wanted)
    assert sum(leaf.nbytes for leaf in expected.values()) > 5000


def test_a_save_that_is_interrupted_writes_no_later_state(tmp_path):
    """While the state is still copied: the caller goes on, and `HostCPU` overwrites what is read."""
    step = jzero.shard_train_step(host_step, memory=jzero.HostCPU())
    state, batch = step.shard(new_host_state()), jnp.ones((8, 256))
    with jzero.Checkpointer(tmp_path / "steps", step, save_bytes=2**16) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        copy_slowly = _writing._on_host

        def interrupt(*args):
            _writing._on_host = copy_slowly
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            return copy_slowly(*args)

        _writing._on_host = interrupt
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(2, state)
        state = step(state, batch)
        checkpointer.wait()  # Whoever was interrupted knows it.
        assert checkpointer.steps() == [1]
        assert checkpointer.save(2, state)


def host_step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state[0])
    updates, inner = optax.adamw(1e-2).update(grads, state[1], state[0])
    return optax.apply_updates(state[0], updates), inner


def new_host_state():
    w = jnp.ones((256, 256))
    return w, optax.adamw(1e-2).init(w)


@pytest.mark.slow
def test_nodes_that_orbax_cannot_read_are_refused(train_step, tmp_path):
    """Numbers beside names, also those of empty nodes: such a step was saved, and never read again."""

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])

    step = jzero.shard_train_step(step_fn)
    with jzero.Checkpointer(tmp_path / "steps", step) as checkpointer:
        with pytest.raises(
            jzero.StateError, match=r"layers'? has names and numbers .* save nnx\.state"
        ):
            checkpointer.save(1, (Model(),))
        assert checkpointer.save(1, nnx.state((Model(),)))
