"""State in files is updated while earlier layers compute: the same bits as if every tile had waited."""

import functools
import gc
import threading
from typing import Any

import jax
import optax
import pytest

import jzero
import small
import zoo
from interrupting import Stop, failing
from jzero.offload._file_run import FileRun
from jzero.offload._file_updates import FileUpdates
from jzero.offload._tiled_engine import TiledEngine
from jzero.offload.execute._executor import Execution
from jzero.offload.kernels._tiled_update import TiledUpdate
from jzero.offload.nvme._files import TileFiles
from test_early_updates import early
from test_nvme_params import policies
from test_offload_params import batch, make_step, new_state
from test_speculative_updates import (
    LARGE,
    LAYERS,
    OPTIMIZERS,
    PATTERNS,
    SMALL,
    assert_same_bits,
    expected_to_begin,
)

pytest.importorskip("llvmlite")


class Seen:
    """Of each step: whether tiles begin early, how many of these are kept, and tiles written in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[list[int]] = []
        self._num = 0
        write, finish, commit = TileFiles.write, FileRun.finish, TileFiles.commit
        lock = threading.Lock()

        def written(files: Any, at: Any, buffer: Any) -> None:
            with lock:
                self._num += 1
            write(files, at, buffer)

        def finished(run: Any, reads: Any) -> Any:
            found = finish(run, reads)
            self.steps.append([run._step is not None, len(found), 0])
            return found

        def committed(files: Any, step: int) -> None:
            commit(files, step)
            if self.steps:
                self.steps[-1][2] = self._num
            self._num = 0

        monkeypatch.setattr(TileFiles, "write", written)
        monkeypatch.setattr(FileRun, "finish", finished)
        monkeypatch.setattr(TileFiles, "commit", committed)

    @property
    def begun(self) -> list[bool]:
        return [begun > 0 for begun, *_ in self.steps]

    @property
    def kept(self) -> list[bool]:
        return [kept > 0 for _, kept, *_ in self.steps]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


PINNED = {"offload_params": jzero.PinnedHost(device_bytes=2**14)}


def step_of(scan: bool, tx: Any, num: int, folder: Any, **options: Any) -> Any:
    return small.shard_train_step(
        make_step(scan, tx), mesh=small.mesh(data=num), **policies(folder) | options
    )


def trained(train_step: Any, scan: bool, tx: Any, scales: Any) -> tuple[Any, Any]:
    """A new state's values and the metrics after each step, and the state at the end."""
    state = train_step.shard(new_state(scan, LAYERS, tx), batch(0))
    found = []
    for i, scale in enumerate(scales):
        state, metrics = train_step(state, batch(i) * scale)
        found.append(zoo.to_host((state, metrics)))
    return found, state


def check_same_bits(
    scan: bool, name: str, scales: Any, num: int, folder: Any, seen: Seen, **options: Any
) -> None:
    """As with updates that wait for all that they read; and some do not wait, and are made again."""
    tx = OPTIMIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileUpdates, "begins_early", False)
        waits = step_of(scan, tx, num, folder / "waits", **options)
        expected, state = trained(waits, scan, tx, scales)
        assert not early(waits, state).buckets
        assert not seen.steps
    train_step = step_of(scan, tx, num, folder / "early", **options)
    found, state = trained(train_step, scan, tx, scales)
    assert all(bucket.assumption for bucket in early(train_step, state).buckets)
    for i, pair in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(*pair, f"step {i}")
    begin, undone = expected_to_begin(name, scales)
    assert seen.begun == begin
    assert seen.kept == [a and not b for a, b in zip(begin, undone, strict=True)]


RUNS = [("adamw", "random"), ("clips and skips", "not finite")] + [
    pytest.param(name, pattern, marks=pytest.mark.slow)
    for name in ("adamw", "masters", "skips") for pattern in PATTERNS
    if (name, pattern) != ("adamw", "random")
]  # fmt: skip


@pytest.mark.parametrize(("name", "pattern"), RUNS)
def test_the_same_bits(name: str, pattern: str, seen: Seen, tmp_path: Any):
    check_same_bits(True, name, PATTERNS[pattern], 2, tmp_path, seen)


@pytest.mark.slow(but=[1, 4])
@pytest.mark.parametrize(
    ("scan", "name", "num", "options"),
    [
        (False, "adamw", 8, {}),
        (True, "adamw", 4, PINNED),
        (False, "masters", 2, PINNED),
        (True, "masters", 1, {}),
        (True, "adamw", 4, {"accumulate": 2, "layer_major": True}),
        (False, "clips and skips", 4, {"accumulate": 2}),
    ],
    ids=str,
)
def test_other_models_have_the_same_bits(
    scan: bool, name: str, num: int, options: Any, seen: Seen, tmp_path: Any
):
    check_same_bits(scan, name, PATTERNS["random"], num, tmp_path, seen, **options)


def test_without_a_clip_every_step_but_the_first_begins_early(seen: Seen, tmp_path: Any):
    """And keeps what it has begun; how much that is, `experiments/offload/early` measures."""
    tx = optax.adam(1e-3)
    train_step = step_of(True, tx, 2, tmp_path)
    found, state = trained(train_step, True, tx, [SMALL] * 3)
    assert not any(bucket.assumption for bucket in early(train_step, state).buckets)
    assert seen.begun == [False, True, True]
    assert seen.kept == seen.begun
    assert len({num for _, _, num in seen.steps}) == 1  # Each tile is written once.
    in_memory = step_of(True, tx, 2, tmp_path, **PINNED, offload=jzero.HostCPU())
    assert_same_bits(trained(in_memory, True, tx, [SMALL] * 3)[0], found)


@pytest.mark.parametrize("options", [{"in_place": True}, {"gradients": True}], ids=str)
def test_what_has_one_version_waits(options: Any, seen: Seen, tmp_path: Any):
    """And what gradients in files are read with."""
    memory = policies(tmp_path, **options)
    tx = OPTIMIZERS["adamw"]
    train_step = small.shard_train_step(make_step(True, tx), mesh=small.mesh(data=2), **memory)
    state = train_step.shard(new_state(True, LAYERS, tx), batch(0))
    for i in range(2):
        state, _ = train_step(state, batch(i) * SMALL)
    assert not early(train_step, state).buckets
    assert not seen.steps


FAULTS = {
    "a layer, when tiles are written": (Execution, "_run", 13),
    "an early tile is read": (TileFiles, "read", 3),
    "an early tile is written": (TileFiles, "write", 3),
    "an early tile is updated": (TiledUpdate, "update_tile", 3),
    "early tiles begin": (TiledEngine, "prepare_early", 0),
    "the last gradients are there": (FileRun, "finish", 0),
    "the other tiles": (TiledEngine, "prepare", 0),
    "the commit": (TileFiles, "commit", 0),
}


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return step_of(True, OPTIMIZERS["adamw"], 2, tmp_path_factory.mktemp("adamw"))


@pytest.fixture(scope="module")
def in_pinned_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return step_of(True, OPTIMIZERS["adamw"], 2, tmp_path_factory.mktemp("pinned"), **PINNED)


@functools.cache
def never_failed(train_step: Any, last: float) -> Any:
    return trained(train_step, True, OPTIMIZERS["adamw"], [SMALL, SMALL, last])[0]


@pytest.mark.parametrize("what", FAULTS)
def test_a_failed_step_leaves_the_state_as_it_was(what: str, in_files: Any):
    """And can be run again, with the bits that it has where nothing fails."""
    # What fails of an update on a wrong assumption is no failure: it is made again.
    last = SMALL if "early tile" in what else LARGE
    expected = never_failed(in_files, last)
    found, state = trained(in_files, True, OPTIMIZERS["adamw"], [SMALL, SMALL])
    with failing(*FAULTS[what]) as calls, pytest.raises(Stop):
        in_files(state, batch(2) * last)
    assert next(calls) > FAULTS[what][2]
    assert_same_bits(zoo.to_host(state), found[-1][0])
    assert_same_bits(zoo.to_host(in_files(state, batch(2) * last)), expected[-1])
    assert threading.active_count() < 40


@pytest.mark.parametrize("what", ["a layer, when tiles are written", "the other tiles"])
def test_parameters_in_pinned_memory_are_lost_by_name(what: str, in_pinned_memory: Any):
    """They are updated in their place; the files have the old version, and the next state trains as ever."""
    tx, scales, train_step = OPTIMIZERS["adamw"], [SMALL, SMALL, LARGE], in_pinned_memory
    expected = never_failed(train_step, LARGE)
    _, state = trained(train_step, True, tx, scales[:2])
    with failing(*FAULTS[what]), pytest.raises(Stop):
        train_step(state, batch(2) * LARGE)
    assert any(x.is_deleted() for x in jax.tree.leaves(state["params"]))
    with pytest.raises(jzero.StateError, match="params"):
        train_step(state, batch(2) * LARGE)
    del state
    gc.collect()
    assert_same_bits(trained(train_step, True, tx, scales)[0], expected)


def test_a_step_within_itself_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """As a signal's handler may call it with another state, when early tiles have begun."""
    tx = OPTIMIZERS["adamw"]
    train_step = step_of(True, tx, 2, tmp_path)
    other, state = (train_step.shard(new_state(True, LAYERS, tx), batch(0)) for _ in range(2))
    for i in range(2):
        state, _ = train_step(state, batch(i) * SMALL)
    begin, errors = FileRun.begin, list[str]()

    def nested(run: Any, *args: Any) -> Any:
        found = begin(run, *args)
        with pytest.raises(jzero.StateError) as error:
            train_step(other, batch(2))
        errors.append(str(error.value))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(FileRun, "begin", nested)
        state, _ = train_step(state, batch(2) * SMALL)
    assert errors
    assert all("in the middle of its own update" in text for text in errors)
    state, _ = train_step(state, batch(3) * SMALL)


def test_a_handler_gets_no_buffers_that_have_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """A state that it shards would be written through them, and steps came out with wrong bits."""
    tx, scales = OPTIMIZERS["adamw"], [SMALL] * 3
    train_step = step_of(True, tx, 2, tmp_path)
    expected, _ = trained(train_step, True, tx, scales)
    _, state = trained(train_step, True, tx, scales[:2])
    begin, errors = FileRun.begin, list[str]()

    def interrupted(run: Any, *args: Any) -> Any:
        found = begin(run, *args)
        try:  # When all tiles are written, nobody has them.
            train_step.shard(new_state(True, LAYERS, tx), batch(0))
        except jzero.StateError as error:
            errors.append(str(error))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(FileRun, "begin", interrupted)
        found = zoo.to_host(train_step(state, batch(2) * SMALL))
    assert errors
    assert all("moves tiles through the same memory" in text for text in errors)
    assert_same_bits(found, expected[-1])
