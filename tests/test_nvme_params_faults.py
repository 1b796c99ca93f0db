"""Parameters in files, and a step that fails: the state is as it was, or consumed; no thread is left."""

import errno
import functools
import gc
import os
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jzero
import small
from interrupting import Stop, failing, from_the_first
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.nvme._job_threads import NO_BUFFER, JobThreads
from test_nvme_params import on
from test_offload_params import CLIPPED, batch, make_step, new_state
from test_offload_params_faults import Interrupted, prepared, survives

pytest.importorskip("llvmlite")

LAYERS = 3


def trained(folder: Path, num: int = 2, scan: bool = True, **options: Any) -> tuple[Any, Any]:
    train_step = on({"data": num}, make_step(scan, CLIPPED), folder, **options)
    state = train_step.shard(new_state(scan, LAYERS, CLIPPED), batch(0))
    return train_step, train_step(state, batch(0))[0]


def helps_with_updates(frame: types.FrameType | None) -> bool:
    """Whether it is of a thread without a buffer, which stays as long as its `HostUpdate`."""
    while frame is not None:
        if frame.f_locals.get("buffer") is NO_BUFFER:
            return True
        frame = frame.f_back
    return False


def threads_at_work() -> list[str]:
    """Threads other than this one that are in the files of readers and sweeps, and stay there.

    One that has said that it ends may still be in its last line.
    """
    mine, found = threading.get_ident(), list[str]()
    for _ in range(100):
        frames = [
            frame
            for i, frame in sys._current_frames().items()
            if i != mine and not helps_with_updates(frame)
        ]
        stacks = map(traceback.extract_stack, frames)
        found = [x.filename for stack in stacks for x in stack if "/offload/nvme/" in x.filename]
        if not found:
            break
        time.sleep(0.01)
    return found


# Of a step: the first read, one in the forward pass, one in the backward pass, the last.
@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 5, 11, -1])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_read_that_fails_in_a_thread(scan: bool, at: int, tmp_path: Path):
    train_step, state = trained(tmp_path, scan=scan)
    before = jax.tree.map(np.array, state)
    at = from_the_first(
        FileStorage, "read_range", at,
        lambda: train_step(train_step.shard(before, batch(0)), batch(1)),
    )  # fmt: skip
    with failing(FileStorage, "read_range", at), pytest.raises(Stop):
        train_step(state, batch(1))
    assert not threads_at_work()
    small.assert_same(state, before)
    expected, _ = train_step(train_step.shard(before, batch(0)), batch(1))
    small.assert_same(train_step(state, batch(1))[0], expected)


@pytest.mark.slow
def test_an_error_of_the_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: Any):
    """And what the state had is there again when the disk is."""
    train_step, state = trained(tmp_path)
    before, calls, old = jax.tree.map(np.array, state), [0], os.preadv

    def reading(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return old(*args)

    told = r"reading .* of .*shard-\d.tiles, failed: Input/output error"
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", reading)
        with pytest.raises(jzero.StateError, match=told):
            train_step(state, batch(1))
    assert not threads_at_work()
    small.assert_same(state, before)
    train_step(state, batch(1))


@pytest.mark.slow
def test_a_flipped_bit_is_found_before_anything_is_computed_with_it(tmp_path: Path):
    train_step, state = trained(tmp_path)
    path = sorted(tmp_path.rglob("*-0.tiles"))[0]
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data), 512):  # Behind the headers, in each page.
        data[at + 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(jzero.StateError, match=r"checksum|damaged"):
        train_step(state, batch(1))
    assert not threads_at_work()


@pytest.mark.slow
@pytest.mark.parametrize("stride", [37, 1])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_ctrl_c_in_any_call(scan: bool, stride: int, tmp_path: Path):
    """Until files are committed the state is as it was, parameters included."""
    train_step, state = trained(tmp_path, scan=scan, device_bytes=13000, gradients=scan)
    again, before, expected = prepared(train_step, state, batch(0))
    outcomes: list[bool] = []
    while True:
        state, interrupted = again(), Interrupted(stride * len(outcomes))
        if not interrupted(functools.partial(train_step, state, batch(0))):
            break
        assert not threads_at_work()
        outcomes.append(survives(train_step, state, [batch(0)], before, expected))
        assert outcomes == sorted(outcomes, reverse=True), interrupted.where
    assert 100 < stride * sum(outcomes)


@pytest.mark.slow
def test_threads_end_where_their_caller_is_interrupted():
    """A job that is under way is awaited; others do not begin."""
    seen: list[int] = []

    def interrupted() -> None:
        with JobThreads([np.zeros(4096, np.uint8)] * 3) as threads:
            threads.ask([lambda buffer: seen.append(len(buffer))] * 1000)
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert len(seen) <= 1000
    assert not threads_at_work()
    JobThreads([np.zeros(4096, np.uint8)])
    gc.collect()
    assert not threads_at_work()
