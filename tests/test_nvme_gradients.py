"""Gradients that wait in files for the update: the same training, in memory that does not grow with depth."""

import errno
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jzero
import small
import test_cli
import zoo
from interrupting import Stop, failing, from_the_first
from jzero.offload._gradient_writes import PARTS, GradientWrites
from jzero.offload.nvme._files import TileFiles
from jzero.offload.nvme._gradients import WaitingGradients
from small import grouped
from test_nvme import in_files
from test_nvme_params import on
from test_nvme_params_faults import threads_at_work
from test_offload_params import CLIPPED, batch, make_step, new_state, one_device

pytest.importorskip("llvmlite")

ROWS = {"node": 2, "local": 2}
BESIDE = {
    "offload": jzero.NVMe("/run", gradients=True),
    "offload_params": jzero.NVMe("/run", gradients=True),
}


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.slow(but=["one after the other"])
@pytest.mark.parametrize(
    ("axes", "scan", "options"),
    [
        ({"data": 1}, True, {}),
        ({"data": 4}, False, {}),
        (ROWS, True, dict(param_axes="local", optimizer_axes="local", in_place=True)),
        ({"data": 2}, True, dict(accumulate=2, layer_major=True)),
        # Sums over microbatches are on the devices until the last has run.
        ({"data": 2}, True, dict(accumulate=2, device_bytes=2**13)),
    ],
    ids=["scanned", "unrolled", "hybrid, in place", "layer by layer", "one after the other"],
)
def test_it_trains_as_on_one_device(axes: Any, scan: bool, options: Any, tmp_path: Path):
    """And as with gradients in memory, to the bit: clipped by the norm of all of them."""
    step, found = make_step(scan, CLIPPED), []
    for gradients in (True, False) if options.keys() == {"device_bytes", "accumulate"} else (True,):
        train_step = on(axes, step, tmp_path / str(gradients), gradients=gradients, **options)
        state = train_step.shard(new_state(scan, 4, CLIPPED), batch(0))
        for i, wanted in enumerate(one_device(scan, clipped=True)):
            state, metrics = train_step(state, batch(i))
            zoo.assert_trees_close(zoo.to_host((state, metrics)), wanted, zoo.FP32, f"step {i}")
        found.append(zoo.to_host(state))
    small.assert_same(found[0], found[-1])


# -- what it takes ---------------------------------------------------------------------------------


def test_memory_has_gradients_of_few_layers_at_any_depth(tmp_path: Path, monkeypatch: Any):
    """And the disk no byte more; with one slot, those of all layers."""
    slices: list[weakref.ref[Any]] = []
    most, old = [0], GradientWrites.write

    def arriving(writes: Any, wanted: Any, arrays: Any) -> Any:
        slices.extend(map(weakref.ref, arrays))
        found = old(writes, wanted, arrays)
        alive = sum(x.nbytes for ref in slices if (x := ref()) is not None)
        most[0] = max(most[0], alive)
        return found

    monkeypatch.setattr(GradientWrites, "write", arriving)
    peaks = []
    for depth in (4, 8):
        most[0] = 0
        folder = tmp_path / str(depth)
        train_step = on({"data": 2}, make_step(True, CLIPPED), folder, gradients=True)
        state = train_step.shard(new_state(True, depth, CLIPPED), batch(0))
        state, _ = train_step(state, batch(0))
        peaks.append(most[0])
        layer = sum(x.nbytes for x in jax.tree.leaves(state["params"]["layers"])) // depth
        assert layer <= most[0] <= PARTS * layer
        report = train_step.describe(state, batch(0))
        text = " ".join(str(report).split())
        assert "gradients wait there, too, where their tiles will be written" in text
        moved = {
            way: sum(x.nbytes for x in report.transfers if (x.direction, x.what) == (way, "gradient")
                     and x.elements > 1)
            for way in ("to host", "to disk", "from disk")
        }  # fmt: skip
        assert len({*moved.values()}) == 1
    assert peaks[0] == peaks[1]


def test_the_estimate_counts_them():
    def estimate(**options: Any) -> Any:
        policy = jzero.NVMe("x", **options)
        return jzero.estimate(
            "1T", devices=16, memory=jzero.Memory(optimizer=policy, params=policy)
        )

    without, twice = estimate(), estimate(gradients=True)
    once = estimate(gradients=True, in_place=True)
    each = 2 * 10**12 // 16
    assert twice.on_host == without.on_host - each
    assert twice.on_disk == without.on_disk == 28 * 10**12 // 16
    assert once.on_disk == 16 * 10**12 // 16
    for direction in ("to disk", "from disk"):
        found = [x for x in twice.transfers if (x.direction, x.what) == (direction, "gradient")]
        assert [x.nbytes for x in found] == [each]
    # Of gradients that are larger than the state, the rest has room of its own.
    memory = jzero.Memory(optimizer=jzero.NVMe("x", gradients=True), params=jzero.PinnedHost(2**20))
    sizes = jzero.BytesPerParam(params=2, gradients=2, optimizer=1)
    sgd = jzero.estimate(1000, devices=1, optimizer="sgd", bytes_per_param=sizes, memory=memory)
    assert sgd.on_disk == 2 * 1000 + 2 * 1000


def test_the_command_counts_them():
    flags = "--offload nvme --offload-params 2GiB --params-in-files --gradients-in-files --json"
    said = test_cli.output(*f"estimate --params 1T --devices 16 --stage 3 {flags}".split())
    (row,) = json.loads(said)["stages"]
    assert row["on_disk"] == 28 * 10**12 // 16
    assert {x["direction"] for x in row["transfers"] if x["what"] == "gradient"} == {
        "to host", "to disk", "from disk"
    }  # fmt: skip


# -- failures --------------------------------------------------------------------------------------


def trained(folder: Path, **options: Any) -> tuple[Any, Any]:
    train_step = on({"data": 2}, make_step(True, CLIPPED), folder, gradients=True, **options)
    state, _ = train_step(train_step.shard(new_state(True, 4, CLIPPED), batch(0)), batch(0))
    return train_step, state


def goes_on(train_step: Any, state: Any, before: Any) -> None:
    """The state is what it was, and trains to the same."""
    assert not threads_at_work()
    small.assert_same(state, before)
    expected, _ = train_step(train_step.shard(before, batch(0)), batch(1))
    small.assert_same(train_step(state, batch(1))[0], expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_disk_that_fills_or_fails_is_told_with_the_gradient(in_place: bool, tmp_path: Path):
    """Nothing of the state was touched, with one slot neither."""
    train_step, state = trained(tmp_path, in_place=in_place)
    before = jax.tree.map(np.array, state)
    for error, at in ((errno.ENOSPC, 3), (errno.EIO, 8)):
        told = rf"writing gradient \d+, .*, in tile \d+, byte \d+ of .*failed: {os.strerror(error)}"
        with (
            failing(os, "pwrite", at, OSError(error, os.strerror(error))),
            pytest.raises(jzero.StateError, match=told),
        ):
            train_step(state, batch(1))
    goes_on(train_step, state, before)


def test_a_flipped_bit_of_a_gradient_is_found(tmp_path: Path, monkeypatch: Any):
    train_step, state = trained(tmp_path)
    before, old = jax.tree.map(np.array, state), GradientWrites.end

    def flipping(writes: Any) -> None:
        old(writes)
        file = writes._store.files._files[0]
        at = file.gradients._starts[1] + file.gradients.layout.tiles[1][0].offset
        data = bytearray(file.path.read_bytes())
        data[at + 5] ^= 1
        file.path.write_bytes(data)

    told = r"shard-0.tiles has damaged bytes of gradient \d+, of .*, in tile 1, \d+ to \d+: their checksum"
    with monkeypatch.context() as patched:
        patched.setattr(GradientWrites, "end", flipping)
        with pytest.raises(jzero.StateError, match=told):
            train_step(state, batch(1))
    goes_on(train_step, state, before)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_write_that_is_interrupted_in_a_thread(at: int, tmp_path: Path):
    train_step, state = trained(tmp_path)
    before = jax.tree.map(np.array, state)
    at = from_the_first(
        WaitingGradients, "write", at,
        lambda: train_step(train_step.shard(before, batch(0)), batch(1)),
    )  # fmt: skip
    with failing(WaitingGradients, "write", at), pytest.raises(Stop):
        train_step(state, batch(1))
    goes_on(train_step, state, before)


def test_writes_that_stop_short_go_on(tmp_path: Path, monkeypatch: Any):
    """Whole pages at a time, and the rest after them."""
    train_step, state = trained(tmp_path)
    before, old = jax.tree.map(np.array, state), os.pwrite
    expected, _ = train_step(train_step.shard(before, batch(0)), batch(1))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: old(fd, data[:4096], at))
    small.assert_same(train_step(state, batch(1))[0], expected)


@pytest.mark.slow
def test_gradients_are_written_when_all_processes_have_the_step_before(
    tmp_path: Path, monkeypatch: Any
):
    """Not when a step begins: a process that is behind would have no step in common with this one."""
    train_step, state = trained(tmp_path)
    before, seen = jax.tree.map(np.array, state), list[Any]()
    store = in_files(state)[0].storage.store

    def arriving(*_: Any) -> Any:
        seen.append(store.files.steps)
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(GradientWrites, "write", arriving)
        with pytest.raises(Stop):
            train_step(state, batch(1))
    assert [len(steps) for steps in seen] == [2]
    goes_on(train_step, state, before)


@pytest.mark.slow
def test_a_save_of_the_step_before_is_waited_for(tmp_path: Path, monkeypatch: Any):
    """Its tiles are where the gradients of the step after next go."""
    train_step, state = trained(tmp_path)
    files, order = in_files(state)[0].storage.store.files, list[str]()
    pin, old = files.pin(), TileFiles._wait_for_pins
    state, _ = train_step(state, batch(1))  # Over the step before the one that is pinned.

    def waiting(files: Any, are_in_the_way: Any) -> None:
        order.append("waits" if any(map(are_in_the_way, files._pins)) else "goes on")
        pin.release()
        old(files, are_in_the_way)

    monkeypatch.setattr(TileFiles, "_wait_for_pins", waiting)
    train_step(state, batch(2))
    assert order == ["waits", "goes on"]


# -- refusals --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "parameters on the devices": (
        {"offload_params": jzero.NoOffload()}, "both jzero.NVMe('/run', gradients=True)"),
    "one of both": ({"offload": jzero.NVMe("/run")}, "have gradients=True and False"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str):
    given, text = REFUSED[what]
    with pytest.raises(jzero.OptionError, match=re.escape(text)):
        jzero.shard_train_step(make_step(True, CLIPPED), **grouped(**BESIDE | given))


def test_it_is_true_or_false():
    with pytest.raises(jzero.OptionError, match="NVMe: gradients=1. It is True or False"):
        jzero.NVMe("/run", gradients=1)  # type: ignore[arg-type]
