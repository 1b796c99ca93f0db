"""300 checkpoints that are damaged, or made to do harm, through everything that reads one.

Each is read right or refused by name, within seconds and in bounded memory; no process hangs or aborts.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostile_checkpoints
import jzero
from hostile_checkpoints import VALUES
from jzero.checkpoint import _chunks, _inspect, _seal
from jzero.cli._main import main
from jzero.weights import _export
from test_hostile_files import within

NUM = 330


def outcomes(folder: pathlib.Path, numbers: list[int]) -> dict[str, list[str]]:
    """What became of each case, by reader; a process that dies is an outcome, and the next goes on."""
    left, found = list(numbers), dict[str, list[str]]()
    while left:
        command = [sys.executable, hostile_checkpoints.__file__, str(folder), *map(str, left)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        name = ""
        for line in map(json.loads, done.stdout.splitlines()):
            if "case" in line:
                name = f"{line['case']}, {line['of']}"
                found[name] = []
                left.pop(0)
            else:
                found[name].append(line["outcome"])
        if done.returncode or not name:
            assert name, done.stderr[-2000:]
            found[name].append(f"DIED of {-done.returncode}: {done.stderr[-500:]}")
    return found


def environment() -> dict[str, str]:
    here = pathlib.Path(__file__).parent
    flags = "--xla_force_host_platform_device_count=2"
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}


@pytest.mark.slow
def test_mutated_checkpoints(tmp_path):
    found = outcomes(tmp_path, [*range(NUM)])
    counts = collections.Counter(outcome for each in found.values() for outcome in each)
    bad = {name: each for name, each in found.items() if not {*each} <= {"right", "named", "other"}}
    assert not bad, "\n".join(f"{name}: {each}" for name, each in bad.items())
    assert all(len(each) == 5 for each in found.values())
    print(f"{len(found)} checkpoints:", dict(counts))
    assert len(found) == NUM
    assert counts["right"] > NUM // 2
    assert counts["named"] > NUM


# ------------------------------------------------------------------------------- what is said of each


@pytest.fixture(params=["sealed", "orbax", "files", "files of zarr3"])
def step(request, tmp_path) -> pathlib.Path:
    hostile_checkpoints.make(request.param, tmp_path / "steps")
    return tmp_path / "steps" / "1"


@pytest.fixture(scope="module")
def train_step():
    return jzero.shard_train_step(hostile_checkpoints.step_fn)


def restore(step: pathlib.Path, train_step) -> None:
    state = jzero.restore(step, train_step, VALUES)
    for name, x in VALUES.items():
        np.testing.assert_array_equal(state[name], x)


def refused(step: pathlib.Path, train_step, text: str) -> str:
    """By everything that reads it, within seconds."""
    with within(5), pytest.raises(jzero.CheckpointError, match=text) as caught:
        jzero.restore(step, train_step, VALUES)
    with within(5), pytest.raises(jzero.CheckpointError, match=text):
        _export.export_weights(step, step.parent / "out.safetensors", select=".", overwrite=True)
    with within(5), pytest.raises(jzero.CheckpointError, match=text):
        _inspect.verify(_inspect.inspect(step)[1])
    assert str(caught.value).replace("\n", "").isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a pipe", "is a pipe"), ("a link to /dev/zero", "is a link to no file"),
     ("a link to nothing", "is a link to no file"), ("a link to a directory", "is a link to no file")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["sealed", "files"])
def test_what_is_no_file(kind, name, text, train_step, tmp_path):
    """In the place of the metadata that Orbax reads unasked, and of the data that tensorstore does."""
    hostile_checkpoints.make(kind, tmp_path / "steps")
    step = tmp_path / "steps" / "1"
    for path in [step / "state" / "_METADATA", max(step.glob("state/*/*"), key=str)]:
        path.rename(kept := tmp_path / "kept")
        hostile_checkpoints.NO_FILES[name](path)
        refused(
            step, train_step, f"{path.name} {text}. Its files are damaged, |is no checkpoint, nor"
        )
        path.unlink()
        kept.rename(path)
    restore(step, train_step)


def test_files_may_be_links(step, train_step, tmp_path):
    """All of them, as a snapshot in Hugging Face's cache has it; and the folder is behind a link, too."""
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(hostile_checkpoints.files_of(step)):
        path.rename(blob := tmp_path / "blobs" / str(number))
        path.symlink_to(blob)
    (tmp_path / "elsewhere").symlink_to(step.parent)
    restore(tmp_path / "elsewhere" / "1", train_step)
    assert not _inspect.verify(_inspect.inspect(step)[1]).damaged


def sealed_again(step: pathlib.Path, change: Callable[[Any], Any]) -> None:
    """A seal with a right digest that says something else."""
    file = step / _seal.NAME
    said = change(json.loads(file.read_bytes().partition(b"\n")[0]))
    text = json.dumps(said).encode()
    file.write_bytes(text + b"\n" + _seal._digest(text).encode() + b"\n")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"files": []}, "_JZERO_SEAL: files is \\[\\], not an object"),
        ({"format": "1"}, "format is '1', not an integer"),
        ({"files": {"a\u202eb": [1]}}, r"_JZERO_SEAL has \[1\] of a\\u202eb"),
        ({"files": {"\u001b[31m/../x": [1, None]}}, r"\\x1b\[31m/../x is missing"),
    ],
)  # fmt: skip
def test_seals_with_right_digests(changes, text, train_step, tmp_path):
    hostile_checkpoints.make("sealed", tmp_path)
    sealed_again(tmp_path / "1", lambda said: {**said, **changes})
    refused(tmp_path / "1", train_step, text)
    with (
        jzero.Checkpointer(tmp_path, train_step) as checkpointer,
        pytest.warns(match=f"1 does not count as a step: .*{text}"),
    ):
        assert checkpointer.latest_step() is None


def described_again(step: pathlib.Path, **changes: Any) -> None:
    """Other fields in what describes the array `w`, in the store or in its file."""
    store = hostile_checkpoints.Store(step)
    (key,) = [key for key in store.keys if key in ("w/.zarray", "w/zarr.json")]
    store.write(key, json.dumps({**json.loads(store.read(key)), **changes}).encode())


@pytest.mark.parametrize("kind", ["orbax", "files"])
def test_chunks_are_no_larger_than_leaves_and_memory(kind, train_step, tmp_path):
    hostile_checkpoints.make(kind, tmp_path)
    described_again(tmp_path / "1", chunks=[2**32, 4])
    refused(
        tmp_path / "1",
        train_step,
        "w: ValueError: a chunk of it would have 68719476736 bytes, and all",
    )
    described_again(tmp_path / "1", chunks=[2**38, 4], shape=[2**38, 4])
    with pytest.raises(jzero.CheckpointError, match=r"float32\[274877906944,4\] in the checkpoint"):
        jzero.restore(tmp_path / "1", train_step, VALUES)
    with pytest.raises(
        jzero.CheckpointError, match="so large that 4398046511104 bytes are read at once"
    ):
        _export.export_weights(tmp_path / "1", tmp_path / "out.safetensors", select=".")


def test_what_describes_an_array_is_not_deep(train_step, tmp_path):
    hostile_checkpoints.make("files", tmp_path)
    state = tmp_path / "1" / "state"
    (state / "w" / ".zarray").rename(kept := tmp_path / "kept")
    text = (state / "_METADATA").read_text()
    (state / "_METADATA").write_text(text.replace('"key": "w"', '"key": "w\\u001b[31m"'))
    with pytest.raises(jzero.CheckpointError, match=r"w\\x1b\[31m: ") as caught:
        jzero.restore(tmp_path / "1", train_step, VALUES)
    causes = traceback.format_exception(caught.value)
    assert all(line.isprintable() for line in "".join(causes).splitlines())
    (state / "_METADATA").write_text(text)
    kept.rename(state / "w" / ".zarray")
    deep = json.loads("[" * 150 + "]" * 150)
    described_again(tmp_path / "1", filters=deep)
    refused(tmp_path / "1", train_step, "w: .zarray is 151 values deep, more than 100")


def test_files_that_are_read_whole(train_step, tmp_path):
    for kind, name in (("orbax", "manifest.ocdbt"), ("files", "w/0.0")):
        hostile_checkpoints.make(kind, tmp_path / kind)
        os.truncate(tmp_path / kind / "1" / "state" / name, 2**40)
        refused(tmp_path / kind / "1", train_step, f"{name} has 1099511627776 bytes, ")
    (tmp_path / "files" / "1" / "state" / "_strings.json").write_bytes(b"[" * 200)
    refused(tmp_path / "files" / "1", train_step, "_strings.json is 200 values deep, more than 100")


def test_rows_that_a_description_claims_are_not_listed():
    box = next(_chunks.cut((slice(0, 2**62), slice(0, 3)), (1, 3), 4, 12))
    assert box == (slice(0, 1), slice(0, 3))


@pytest.mark.parametrize("name", ["../../other", "/etc/other"])
def test_leaves_are_in_the_checkpoint(name, train_step, tmp_path):
    hostile_checkpoints.make("files", tmp_path / "steps")
    file = tmp_path / "steps" / "1" / "state" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "w"', f'"key": "{name}"'))
    refused(
        tmp_path / "steps" / "1", train_step, f"a leaf of the name '{name}' would be somewhere else"
    )
    file.write_text(file.read_text().replace('"key_metadata"', '"keys"'))
    refused(tmp_path / "steps" / "1", train_step, "key_metadata is missing")


@pytest.mark.slow
def test_names_are_shown_escaped_and_in_part(train_step, tmp_path, capsys):
    """A terminal obeys none of them."""
    name = "\u202ew\u001b[31m\n" + "x" * 500
    tree = {name: np.ones(3, np.float32)}
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, tree)
    with pytest.raises(jzero.CheckpointError) as caught:
        jzero.restore(tmp_path / "1", train_step, VALUES)
    text = str(caught.value)
    assert "\\u202ew\\x1b[31m\\nxxx" in text
    assert len(text) < 1000
    assert all(line.isprintable() for line in text.splitlines())
    main(["inspect", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "\\u202ew\\x1b" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_time_that_no_calendar_has(tmp_path):
    hostile_checkpoints.make("orbax", tmp_path)
    notes = {"item_handlers": "x", "commit_timestamp_nsecs": 10**300}
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text(json.dumps(notes))
    assert _inspect.inspect(tmp_path / "1")[0].written is None


def test_places_of_iterators_that_are_none(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, VALUES, Batches())
        checkpointer.wait()
        (tmp_path / "1" / _seal.NAME).unlink()
        (tmp_path / "1" / "data" / "metadata").write_text('{"iterators": [{"bytes": "x"}]}')
        with pytest.raises(
            jzero.CheckpointError, match="metadata: .*base64.* Its files are damaged"
        ):
            checkpointer.restore(VALUES, data_iterator=Batches())
        place = {"index": 0, "count": 1, "data": 3, "next": 0}
        (tmp_path / "1" / "data" / "metadata").write_text(
            json.dumps({"iterators": [{"json": 1, "place": place}]})
        )
        with pytest.raises(jzero.CheckpointError, match="iterators.*0.*place"):
            checkpointer.restore(VALUES, data_iterator=Batches())


class Batches:
    def get_state(self):
        return {"at": 3}

    def set_state(self, state):
        raise AssertionError("not reached")
