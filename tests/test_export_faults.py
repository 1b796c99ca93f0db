"""Exports and imports that are killed, interrupted or fail: the older export or the new one, and no rest."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint import _stream
from jzero.weights import _export, _import, _publish

OLD, NEW = 1.0, 2.0  # the values of all parameters
PARTS = "100B"  # of one tensor each
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[float, pathlib.Path]:
    path = tmp_path_factory.mktemp("checkpoints")
    for value in (OLD, NEW):
        params = {name: np.full(25, value, np.float32) for name in "abc"}
        ocp.PyTreeCheckpointer().save(path / str(value), {"params": params})
    return {value: path / str(value) for value in (OLD, NEW)}


def export(
    checkpoint: pathlib.Path, out: pathlib.Path, parts: bool, overwrite: bool = True
) -> None:
    size = PARTS if parts else "1GB"
    _export.export_weights(
        checkpoint, out / "m.safetensors", max_file_size=size, overwrite=overwrite
    )


def value(tensors: dict[str, np.ndarray]) -> float:
    """That of all of them, which are complete and of one export."""
    assert sorted(tensors) == ["a", "b", "c"]
    (found,) = {float(x) for tensor in tensors.values() for x in tensor}
    return found


def of_file(out: pathlib.Path) -> float | None:
    """What a reader of the one file finds."""
    path = out / "m.safetensors"
    return value(load_file(path)) if path.exists() else None


def of_index(out: pathlib.Path) -> float | None:
    """What a reader of the index finds, which must not name what is not there."""
    path = out / "m.safetensors.index.json"
    if not path.exists():
        return None
    weight_map = json.loads(path.read_text())["weight_map"]
    return value({name: load_file(out / file)[name] for name, file in weight_map.items()})


def found(out: pathlib.Path) -> float | None:
    """What Hugging Face finds: the file if there is one, else the index; and each is complete."""
    file, index = of_file(out), of_index(out)
    return index if file is None else file


def names(out: pathlib.Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def check_names(out: pathlib.Path, parts: bool) -> None:
    """What there is belongs to one export; parts that replaced parts have longer names."""
    files = names(out)
    if not parts:
        assert files == ["m.safetensors"]
        return
    assert files[-1] == "m.safetensors.index.json"
    assert [file[:16] for file in files[:-1]] == [f"m-0000{i}-of-00003" for i in (1, 2, 3)]


class Killed(BaseException):
    pass


def after(monkeypatch, num: int, error: Callable[[], BaseException], *, once: bool) -> list[str]:
    """Lets `num` changes of files pass, then fails: at the next one, or as who is dead at all that follow."""
    seen: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == num + 1 or (len(seen) > num and not once):
                raise error()
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return seen


FORMS = [(None, False), (None, True), (False, False), (False, True), (True, False), (True, True)]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("before", "parts"), FORMS)
def test_killed_at_every_moment(before, parts, checkpoints, tmp_path):
    """The older export, or the new one; and the next export finds nothing in its way and leaves no rest."""
    if before is not None:
        (tmp_path / "old").mkdir()
        export(checkpoints[OLD], tmp_path / "old", before)
    expected, results = None if before is None else OLD, []
    for num in range(100):
        out = tmp_path / str(num)
        shutil.copytree(tmp_path / "old", out) if before is not None else out.mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = after(monkeypatch, num, Killed, once=False)
            try:
                export(checkpoints[NEW], out, parts, overwrite=before is not None)
            except Killed:
                pass
        results.append(found(out))
        assert of_file(out) in (expected, NEW, None)
        assert of_index(out) in (expected, NEW, None)
        export(checkpoints[NEW], out, parts, overwrite=results[-1] is not None)
        assert found(out) == NEW
        check_names(out, parts)
        if len(seen) <= num:
            break
    moment = results.index(NEW)
    assert 3 < moment < num < 99
    assert results == [expected] * moment + [NEW] * (len(results) - moment)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, lambda: OSError(28, "No space left on device")]
)
@pytest.mark.parametrize(("before", "parts"), FORMS)
def test_interrupted_at_every_moment(before, parts, error, checkpoints, tmp_path):
    """What fails before the new export is in place leaves the directory as it was, else it says so."""
    (tmp_path / "old").mkdir()
    if before is not None:
        export(checkpoints[OLD], tmp_path / "old", before)
    for num in range(100):
        out, said = tmp_path / str(num), ""
        shutil.copytree(tmp_path / "old", out)
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = after(monkeypatch, num, error, once=True)
            try:
                export(checkpoints[NEW], out, parts, overwrite=before is not None)
            except (KeyboardInterrupt, jzero.CheckpointError) as failed:
                said = str(failed)
        if NEW in (of_file(out), of_index(out)):
            assert said == "" or "The new one is complete" in said
        else:
            assert names(out) == names(tmp_path / "old")
            assert said == "" or "No space left on device" in said
        assert found(out) in (None if before is None else OLD, NEW)
        if len(seen) <= num:
            break
    assert 5 < num < 99


def test_what_is_older_cannot_be_removed(checkpoints, tmp_path, monkeypatch):
    export(checkpoints[OLD], tmp_path, False)
    unlink = os.unlink

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path) == str(tmp_path / "m.safetensors"):
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(jzero.CheckpointError) as caught:
        export(checkpoints[NEW], tmp_path, True)
    assert "the older export cannot be removed: [Errno 1] Operation not permitted" in str(
        caught.value
    )
    assert "The new one is complete. Remove the older one's files." in str(caught.value)
    assert (of_file(tmp_path), of_index(tmp_path)) == (OLD, NEW)


def test_everything_is_on_the_disk_before_it_is_found(checkpoints, tmp_path, monkeypatch):
    """Files before they move, the directory before and after the index does, and before parts go."""
    export(checkpoints[OLD], tmp_path, True)
    old = {name for name in names(tmp_path) if "-of-" in name}
    done: list[tuple[str, str]] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def call(at: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{at}") if name == "fsync" else str(at)
            done.append((name, pathlib.Path(path).name))
            return real(at, *args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace", "unlink"):
        note(name)
    export(checkpoints[NEW], tmp_path, True)
    index = "m.safetensors.index.json"
    commit = done.index(("replace", index))
    moves = [i for i, (name, _) in enumerate(done) if name == "rename"]
    removals = [i for i, (name, path) in enumerate(done) if name == "unlink" and path in old]
    assert len(moves) == len(removals) == 3
    for i in moves:
        assert done.index(("fsync", done[i][1])) < i
    assert done.index(("fsync", index)) < moves[0]
    directory = [i for i, what in enumerate(done) if what == ("fsync", tmp_path.name)]
    assert any(moves[-1] < i < commit for i in directory)
    assert any(commit < i < removals[0] for i in directory)


def test_one_at_a_time(checkpoints, tmp_path):
    """Neither export nor import touches what a living process is writing."""
    export(checkpoints[OLD], tmp_path, False)
    with _publish.private("test", tmp_path / "m.safetensors") as folder:
        with pytest.raises(
            jzero.CheckpointError, match="another process is writing it, in .*One writes"
        ):
            export(checkpoints[NEW], tmp_path, True)
        assert folder.exists()
    source, target = tmp_path / "m.safetensors", tmp_path / "ck"
    with _publish.private("test", target) as folder:
        with pytest.raises(
            jzero.CheckpointError, match="Wait until it is done; remove that folder if"
        ):
            _import.import_weights(source, target)
        assert folder.exists()
    assert names(tmp_path) == ["m.safetensors"]


def test_many_at_once(checkpoints, tmp_path):
    """Threads that write the same file: some are refused, and what is there is of one of them."""
    errors: list[Exception] = []

    def work(number: float) -> None:
        for parts in (True, False, True):
            try:
                export(checkpoints[number], tmp_path, parts)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in (OLD, NEW) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another process is writing it" in str(error) for error in errors)
    export(checkpoints[NEW], tmp_path, True)
    check_names(tmp_path, True)


def test_what_others_left_stays(checkpoints, tmp_path):
    """Only folders that have the name of this target are taken away."""
    for name in (".m.safetensors.tmp-12345678", ".other.safetensors.tmp-12345678"):
        (tmp_path / name / "files").mkdir(parents=True)
    export(checkpoints[NEW], tmp_path, False)
    assert names(tmp_path) == [".other.safetensors.tmp-12345678", "m.safetensors"]


def test_directories_are_not_overwritten(checkpoints, tmp_path):
    for name in ("m.safetensors", "m.safetensors.index.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(jzero.OptionError, match=f"{name} is a directory. An export is files."):
            export(checkpoints[NEW], tmp_path, True)
        (tmp_path / name).rmdir()


def test_links_are_replaced_and_not_followed(checkpoints, tmp_path):
    (tmp_path / "m.safetensors").symlink_to("nowhere")
    with pytest.raises(jzero.OptionError, match=r"there is .*m\.safetensors already"):
        export(checkpoints[NEW], tmp_path, False, overwrite=False)
    export(checkpoints[NEW], tmp_path, False)
    assert not (tmp_path / "m.safetensors").is_symlink()
    assert names(tmp_path) == ["m.safetensors"]


NOTES = {
    "unknown leaf": ({"params/a": "parameter", "params/x": "other"}, "'params/x' is noted, and not there"),
    "unknown role": ({"params/a": "paramater"}, "'params/a' is noted as 'paramater', not as one of param"),
    "no text": ({"params/a": 3}, "'params/a' is noted as 3, not as one of parameter, optimizer state, other"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_notes_that_do_not_add_up(name, checkpoints, tmp_path):
    roles, text = NOTES[name]
    shutil.copytree(checkpoints[NEW], tmp_path / "ck")
    notes = tmp_path / "ck" / "_CHECKPOINT_METADATA"
    notes.write_text(
        json.dumps({**json.loads(notes.read_text()), "custom_metadata": {"roles": roles}})
    )
    with pytest.raises(jzero.CheckpointError) as caught:
        export(tmp_path / "ck", tmp_path, False)
    assert text in str(caught.value)
    assert "The notes of a checkpoint have roles of its leaves. They are damaged" in str(
        caught.value
    )
    _export.export_weights(tmp_path / "ck", tmp_path / "m.safetensors", select="")
    assert found(tmp_path) == NEW


def test_leaves_without_a_role(checkpoints, tmp_path):
    """What is beside a parameter is one, too, whatever was noted."""
    shutil.copytree(checkpoints[NEW], tmp_path / "ck")
    notes = tmp_path / "ck" / "_CHECKPOINT_METADATA"
    custom = {"roles": {"params/a": "parameter", "params/b": "optimizer state"}}
    notes.write_text(json.dumps({**json.loads(notes.read_text()), "custom_metadata": custom}))
    export(tmp_path / "ck", tmp_path, False)
    assert list(load_file(tmp_path / "m.safetensors")) == ["a", "b", "c"]


def test_two_leaves_of_one_name(tmp_path):
    params = {"a": {"b": np.ones(1)}, "a.b": np.ones(1), "__metadata__": np.ones(1)}
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "ck", {"params": {**params, "c": np.ones(1)}})
    with pytest.raises(jzero.CheckpointError) as caught:
        export(tmp_path / "ck", tmp_path, False)
    assert "2 tensors fail:\n  - a.b would be 2 tensors\n" in str(caught.value)
    assert "  - __metadata__ would be a tensor, and is not a tensor's name" in str(caught.value)


# Imports.


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    path = tmp_path / "in.safetensors"
    save_file({name: np.full(5, NEW) for name in "ab"}, path)
    return path


def read(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return ocp.StandardCheckpointer().restore(directory)["params"]


@pytest.mark.slow
def test_import_killed_at_every_moment(source, tmp_path):
    """All of a checkpoint or none; and the next import finds nothing in its way and leaves no rest."""
    target, results = tmp_path / "ck", []
    for num in range(100):
        with pytest.MonkeyPatch.context() as monkeypatch:
            # Orbax's own changes come from other threads, and count.
            seen = after(monkeypatch, num, Killed, once=False)
            try:
                _import.import_weights(source, target)
            except Killed:
                pass
        results.append(target.exists())
        if not target.exists():
            _import.import_weights(source, target)
        assert sorted(read(target)) == ["a", "b"]
        shutil.rmtree(target)
        if len(seen) <= num:
            break
    assert (results[0], results[-1]) == (False, True)
    assert num < 99


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_failed_import_leaves_nothing(error, source, tmp_path, monkeypatch):
    def fail(directory: Any, tree: Any, notes: Any) -> None:
        write(directory, tree, notes)
        raise error

    write = _stream.write_leaves
    monkeypatch.setattr(_stream, "write_leaves", fail)
    with pytest.raises((KeyboardInterrupt, jzero.CheckpointError)):
        _import.import_weights(source, tmp_path / "new" / "folders" / "ck")
    assert names(tmp_path) == ["in.safetensors"]
    monkeypatch.undo()
    _import.import_weights(source, tmp_path / "new" / "folders" / "ck")
    assert names(tmp_path / "new" / "folders") == ["ck"]
    assert sorted(read(tmp_path / "new" / "folders" / "ck")) == ["a", "b"]


def test_source_that_becomes_shorter(source, tmp_path, monkeypatch):
    """Between its header and its data."""
    save_file({"a": np.ones(5)}, source)
    header = _import._safetensors.read_header

    def read_and_cut(who: str, file: Any) -> Any:
        tensors = header(who, file)
        os.truncate(file.path, file.path.stat().st_size - 8)
        return tensors

    monkeypatch.setattr(_import._safetensors, "read_header", read_and_cut)
    with pytest.raises(jzero.CheckpointError, match="it has no bytes .* was replaced meanwhile"):
        _import.import_weights(source, tmp_path / "ck")
    assert names(tmp_path) == ["in.safetensors"]


def test_source_that_is_replaced(source, tmp_path, monkeypatch):
    """Between its header and its data: what was opened is imported; and a part that is gone is named."""
    save_file({"a": np.full(5, 1.0)}, source)
    header = _import._safetensors.read_header

    def read_and_replace(who: str, file: Any) -> Any:
        tensors = header(who, file)
        save_file({"a": np.full(5, 2.0)}, tmp_path / "new")
        (tmp_path / "new").replace(file.path)
        return tensors

    with monkeypatch.context() as patch:
        patch.setattr(_import._safetensors, "read_header", read_and_replace)
        _import.import_weights(source, tmp_path / "ck")
    np.testing.assert_array_equal(read(tmp_path / "ck")["a"], np.full(5, 1.0))
    (tmp_path / "m.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(jzero.CheckpointError, match="gone.* do it again if it was replaced"):
        _import.import_weights(tmp_path / "m.json", tmp_path / "other")


# Real kills.

CHILD = """
    import itertools, pathlib, sys
    from jzero.weights import _export, _import
    old, new, out = map(pathlib.Path, sys.argv[1:])
    print("ready", flush=True)
    for i in itertools.count():
        size = "100B" if i // 2 % 2 else "1GB"
        path = (old, new)[i % 2]
        target = out / "m.safetensors"
        file = _export.export_weights(path, target, max_file_size=size, overwrite=True).files[-1]
        _import.import_weights(file, out / f"ck{i}")
        print(i, flush=True)
"""


@pytest.mark.slow
def test_kill_9(checkpoints, tmp_path):
    rng = random.Random(0)
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(30):
        code = [sys.executable, "-c", textwrap.dedent(CHILD), *checkpoints.values(), out]
        with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert child.stdout.readline() == "0\n"
            time.sleep(rng.uniform(0, 0.5))
            child.send_signal(signal.SIGKILL)
        assert found(out) in (OLD, NEW)
        assert of_index(out) in (OLD, NEW, None)
        assert all(value(read(path)) in (OLD, NEW) for path in out.glob("ck*"))
        export(checkpoints[NEW], out, True)
        for path in [*out.glob("ck*"), *out.glob(".ck*")]:
            # What is left of a killed import goes with the next one to the same name.
            ck = out / path.name.lstrip(".").split(".")[0]
            shutil.rmtree(ck, ignore_errors=True)
            _import.import_weights(out / "m.safetensors.index.json", ck)
            shutil.rmtree(ck)
        check_names(out, True)
