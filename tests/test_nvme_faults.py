"""Optimizer state in files: what fails, what is refused, what is gone on with; and what never is half new."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
from interrupting import Stop, failing
from jzero.offload.kernels._tiled_update import TiledUpdate
from jzero.offload.memory import _filling
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._files import TileFiles
from test_nvme import HOST_BYTES, batches, in_files, on, on_disk
from test_offload import BATCH, momentum, new_state

pytest.importorskip("llvmlite")


def to_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x), tree)


def end_of_process() -> None:
    """What is left of this process's states when it has ended: their files."""
    gc.collect()
    assert not list(_filling._alive)
    _filling._made.clear()
    _filling._gone_on.clear()


# -- failures --------------------------------------------------------------------------------------


FAULTS = {
    "the first tile is read": (TileFiles, "read", 0),
    "a tile is read": (TileFiles, "read", 4),
    "a tile is written": (TileFiles, "write", 2),
    "a tile is updated": (TiledUpdate, "update_tile", 3),
    "XLA's part": (TiledUpdate, "prepare", 0),
    "outputs": (TiledUpdate, "begin", 0),
    "the commit": (TileFiles, "commit", 0),
}


def test_an_interrupt_when_a_step_has_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Before anybody knows its number: the next one begins as if there had been none."""
    train_step, (first, second) = on(2, tmp_path), batches(2)
    state, _ = train_step(train_step.shard(new_state(), BATCH), first)
    before, begin = to_host(state), TileFiles.begin

    def interrupted(*args: Any) -> None:
        begin(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TileFiles, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_step(state, second)
    small.assert_same(to_host(state), before)
    train_step(state, second)


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_failed_step_leaves_the_state_as_it_was(what: str, tmp_path: Path):
    train_step = on(2, tmp_path)
    first, second, third = batches(3)
    state, _ = train_step(train_step.shard(new_state(), BATCH), first)
    before = to_host(state)
    with failing(*FAULTS[what]), pytest.raises(Stop):
        train_step(state, second)
    small.assert_same(state, before)
    state, _ = train_step(state, second)
    state, _ = train_step(state, third)
    expected = train_step.shard(before, BATCH)
    for x in (second, third):
        expected, _ = train_step(expected, x)
    small.assert_same(state, expected)


@pytest.mark.parametrize("what", ["a tile is written", "the commit"])
def test_in_place_a_failed_step_costs_the_state(what: str, tmp_path: Path):
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, in_place=True))
    state, _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    with failing(*FAULTS[what]), pytest.raises(Stop):
        train_step(state, BATCH)
    lost = r"failed while it was written over the step before(.|\n)*Restore the last checkpoint"
    with pytest.raises(jzero.StateError, match=lost):
        train_step(state, BATCH)
    with pytest.raises(jzero.StateError, match=lost):
        np.asarray(in_files(state)[0])


@pytest.mark.slow
def test_with_parameters_on_the_hosts_a_failed_step_costs_the_state(tmp_path: Path):
    """They are updated in their place, and would be half new."""
    train_step = on(2, tmp_path, offload_params=jzero.PinnedHost(device_bytes=2**16))
    state, _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    with failing(TiledUpdate, "prepare"), pytest.raises(Stop):
        train_step(state, BATCH)
    expected = to_host(state)  # Nothing was overwritten.
    with failing(TileFiles, "write"), pytest.raises(Stop):
        train_step(state, BATCH)
    with pytest.raises(jzero.StateError, match="leaves were already donated"):
        train_step(state, BATCH)
    state, _ = train_step(train_step.shard(expected, BATCH), BATCH)


# -- what a step consumes --------------------------------------------------------------------------


def test_leaves_of_two_states_are_not_one_state(tmp_path: Path):
    train_step = on(2, tmp_path)
    one, _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    other, _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    (params, (clip, (adam, *rest))) = one
    mixed = adam._replace(mu=other[1][1][0].mu)
    with pytest.raises(jzero.StateError, match="leaves in files come from 2 states"):
        train_step((params, (clip, (mixed, *rest))), BATCH)


@pytest.mark.slow
def test_each_state_has_files_of_its_own_and_new_ones_take_those_of_the_dead(tmp_path: Path):
    train_step = on(2, tmp_path)
    states = [train_step.shard(new_state(), BATCH) for _ in range(2)]
    moved, _ = train_step(states[0], BATCH)
    small.assert_same(in_files(states[1]), [0 * np.asarray(x) for x in in_files(moved)])
    names = sorted(path.name for path in (tmp_path / "process-0").iterdir())
    assert names == ["state-0", "state-1"]
    del states, moved
    gc.collect()
    state = train_step.shard(new_state(), BATCH)
    folder = in_files(state)[0].storage.store.files.folder
    assert os.path.samefile(folder, tmp_path / "process-0" / "state-0")


@pytest.mark.slow
def test_files_with_which_another_run_goes_on_are_not_taken(tmp_path: Path):
    """Neither while it has them, nor when it has trained them."""
    train_step = on(2, tmp_path)
    state = train_step.shard(new_state(), BATCH)
    files = in_files(state)[0].storage.store.files
    specs = in_files(state)[0].storage.store.spec.files
    folder, write = files.folder, files.committed
    del state, files
    gc.collect()
    with TileFiles.open(folder, specs, step=write) as other:
        with pytest.raises(jzero.OptionError, match="state-0: another run has .*shard-0.tiles"):
            train_step.shard(new_state(), BATCH)
        other.begin_gradients()
        other.begin(1)
        for at in other.tiles():
            other.write(at, pages(other.most_bytes))
        other.commit(1)
    with pytest.raises(jzero.OptionError, match="state-0 has step 0 of run .* and step 1 of run"):
        train_step.shard(new_state(), BATCH)


def test_a_failed_placement_leaves_no_files(tmp_path: Path):
    train_step = on(2, tmp_path)
    train_step.plan(new_state(), BATCH)
    with failing(TileFiles, "commit"), pytest.raises(Stop):
        train_step.shard(new_state(), BATCH)
    assert not list(tmp_path.rglob("*.tiles"))
    train_step.shard(new_state(), BATCH)


# -- resume ----------------------------------------------------------------------------------------


def trained(folder: Path, num: int = 2, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    """The state on the host after some steps, and after one more; the process has ended after the first.

    There is a checkpoint of what is not in files of each step.
    """
    train_step = on(num, folder, policy=on_disk(folder, resume=True), **options)
    state: Any = train_step.shard(new_state(), BATCH)
    with jzero.Checkpointer(folder / "steps", train_step, asynchronous=False) as checkpointer:
        for i, x in enumerate(batches(steps)):
            state, _ = train_step(state, x)
            assert checkpointer.save(i + 1, without_moments(state))
    before = to_host(state)
    del state
    end_of_process()
    after, _ = on(num, "", policy=jzero.HostCPU())(before, BATCH)
    return before, to_host(after)


def without_moments(state: Any) -> Any:
    """What a checkpoint of everything else would have: moments are zeros."""
    params, (clip, (adam, *rest)) = state
    zeros = jax.tree.map(np.zeros_like, (adam.mu, adam.nu))
    return params, (clip, (adam._replace(mu=zeros[0], nu=zeros[1]), *rest))


def restored(folder: Path, train_step: Any, *args: Any, step: int = 3) -> Any:
    """What a checkpoint of `trained` has."""
    shapes = jax.eval_shape(new_state)
    return jzero.restore(folder / "steps" / str(step), train_step, shapes, *args)


def test_a_second_try_in_the_same_process_resumes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the first one has read is still the earlier run's, and not for another state to replace."""
    _, after = trained(tmp_path)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    given = restored(tmp_path, train_step)
    with failing(TileFiles, "commit"):
        with pytest.raises(Stop) as kept:
            train_step(given, BATCH)
        # The exception has the state that failed; so there is nothing that a second one could go on with.
        if _filling._alive:
            with pytest.raises(jzero.StateError, match="a state of this process goes on with .*-0"):
                train_step(given, BATCH)
        del kept
    gc.collect()
    state, _ = train_step(given, BATCH)
    small.assert_same(state, after)
    del state
    gc.collect()
    # And what it has trained is gone on with, or refused; never begun anew.
    with pytest.raises(jzero.StateError, match="state-0 has step 3 of run .* and step 4 of run"):
        train_step(new_state(), BATCH)


@pytest.mark.slow
def test_one_state_goes_on_with_files_at_a_time(tmp_path: Path):
    before, _ = trained(tmp_path)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    state = train_step.shard(restored(tmp_path, train_step), BATCH)
    with pytest.raises(jzero.StateError, match="no others to go on with(.|\n)*another path"):
        with pytest.warns(UserWarning, match="may stand for state in files"):
            train_step.shard(restored(tmp_path, on(2, tmp_path)), BATCH)
    small.assert_same(state, before)


@pytest.mark.slow
def test_a_run_that_ended_while_it_placed_its_state_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    with failing(TileFiles, "commit"), monkeypatch.context() as patched:
        patched.setattr(_filling, "_remove", lambda folder: None)
        with pytest.raises(Stop):
            train_step.shard(new_state(), BATCH)
    (left,) = tmp_path.rglob("shard-0.tiles")
    end_of_process()
    old = left.read_bytes()
    with pytest.warns(UserWarning, match="gets the name state-0.aside-0"):
        state = train_step.shard(new_state(), BATCH)
    small.assert_same(state, to_host(new_state()))
    assert (left.parents[1] / "state-0.aside-0" / left.name).read_bytes() == old


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", ["before the first step", "before the plan", "with it", "when it is restored"]
)
def test_resume_goes_on_with_the_files_of_the_same_step(given: str, tmp_path: Path):
    before, after = trained(tmp_path)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    state = restored(tmp_path, train_step, *[BATCH] * (given == "when it is restored"))
    if given == "before the plan":
        # Moved, and of the same step.
        state = on(2, tmp_path, stage=1).shard(train_step.shard(state))
    if given == "before the first step":
        state = train_step.shard(state, BATCH)
    if given in ("before the first step", "when it is restored"):
        small.assert_same(state, before)
    state, _ = train_step(state, BATCH)
    small.assert_same(state, after)


@pytest.mark.slow
def test_a_whole_checkpoint_is_of_a_step_of_files_too(tmp_path: Path):
    """Its moments are not read where the files have them, and go to new files where there are none."""
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    state, _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    with jzero.Checkpointer(tmp_path / "steps", train_step, asynchronous=False) as checkpointer:
        assert checkpointer.save(3, state)
    before = to_host(state)
    del state
    end_of_process()
    for folder in (tmp_path, tmp_path / "other", tmp_path / "other"):
        again = on(2, tmp_path, policy=on_disk(folder, resume=True))
        state = restored(tmp_path, again, BATCH)
        small.assert_same(state, before)
        number = in_files(state)[0].storage.store.files.step
        assert number == (1 if folder == tmp_path else 0)
        del state
        end_of_process()
        if folder == tmp_path:
            continue
        # The files of a copy are another run's; they have no step of the checkpoint any more.
        with pytest.raises(jzero.StateError, match="other/process-0/state-0 has step 0 of run"):
            restored(tmp_path, again, BATCH)
        break


@pytest.mark.slow
def test_both_slots_can_be_resumed(tmp_path: Path):
    """A checkpoint may be of the step before the last."""
    before, _ = trained(tmp_path, steps=2)
    again, _ = trained(tmp_path / "other", steps=1)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    state = train_step.shard(restored(tmp_path, train_step, step=1), BATCH)
    small.assert_same(state, again)
    state, _ = train_step(state, batches(2)[1])
    small.assert_same(state, before)
    # The step that it has made again is another one than that of the checkpoint.
    del state
    end_of_process()
    with pytest.raises(jzero.StateError, match=r"state-0 has step 1 of run \w+ and step 2 of run"):
        train_step.shard(restored(tmp_path, train_step, step=2), BATCH)


def test_resume_refuses_another_step(tmp_path: Path):
    trained(tmp_path)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    wrong = r"state-0 has steps 2 and 3 of run (\w{8})\. The rest of the state is of step 1 of run \1\. "
    with pytest.raises(jzero.StateError, match=wrong):
        train_step.shard(restored(tmp_path, train_step, step=1), BATCH)
    with pytest.raises(jzero.StateError, match="it comes from no checkpoint of such a state"):
        train_step.shard(new_state(), BATCH)
    with pytest.raises(jzero.StateError, match="it comes from no checkpoint of such a state"):
        train_step.init(new_state)


@pytest.mark.slow
def test_resume_refuses_leaves_of_two_steps(tmp_path: Path):
    trained(tmp_path)
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    params, opt_state = restored(tmp_path, train_step)
    old, _ = restored(tmp_path, train_step, step=2)
    with pytest.raises(jzero.StateError, match="Leaves of the rest .* are of steps 2 and 3 of run"):
        train_step.shard((old, opt_state), BATCH)
    with pytest.raises(jzero.StateError, match="are not of the step of other leaves stored out"):
        train_step.shard((to_host(params), opt_state), BATCH)
    # What another step has made of it is not of that step any more.
    plain = on(2, "", policy=jzero.HostCPU())
    state, _ = plain((params, opt_state), BATCH)
    with pytest.raises(jzero.StateError, match="it comes from no checkpoint of such a state"):
        train_step.shard(state, BATCH)


@pytest.mark.slow
def test_what_is_saved_beside_files_is_of_their_step(tmp_path: Path):
    """Parameters that a user has made anew since the last step come back with the moments of that step."""
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    (params, opt_state), _ = train_step(train_step.shard(new_state(), BATCH), BATCH)
    state = jax.tree.map(lambda x: 2 * x, params), opt_state
    with jzero.Checkpointer(tmp_path / "steps", train_step, asynchronous=False) as checkpointer:
        checkpointer.save(3, state)
    before = to_host(state)
    del state, params, opt_state
    end_of_process()
    train_step = on(2, tmp_path, policy=on_disk(tmp_path, resume=True))
    params, opt_state = restored(tmp_path, train_step)
    changed = jax.tree.map(lambda x: 2 * x, params), opt_state
    told = r"call train_step\.plan\(state, batch\) before restore, which then resumes"
    with pytest.raises(jzero.StateError, match=told):
        train_step.shard(changed, BATCH)
    train_step.plan(jax.eval_shape(new_state), BATCH)
    params, opt_state = restored(tmp_path, train_step)
    small.assert_same((params, opt_state), before)
    changed = jax.tree.map(lambda x: x / 2, params), opt_state
    after, _ = train_step(changed, BATCH)
    halved = jax.tree.map(lambda x: x / 2, before[0]), before[1]
    plain, _ = on(2, "", policy=jzero.HostCPU())(halved, BATCH)
    small.assert_same(after, to_host(plain))


def test_zeros_that_stand_for_files_are_warned_of(tmp_path: Path):
    """Without `resume=True` they are what trains."""
    trained(tmp_path)
    for policy in (on_disk(tmp_path / "other"), jzero.HostCPU()):
        told = "8 leaves of .*steps/3/state may stand for state in files"
        with pytest.warns(UserWarning, match=told) as said:
            restored(tmp_path, on(2, "", policy=policy), BATCH)
        assert {each.filename for each in said} == {__file__}


def test_resume_refuses_another_state(tmp_path: Path):
    trained(tmp_path)
    train_step = on(4, tmp_path, policy=on_disk(tmp_path, resume=True))
    with pytest.raises(jzero.StateError, match="shard-0.tiles"):
        restored(tmp_path, train_step, BATCH)


def test_resume_refuses_other_tiles(tmp_path: Path):
    trained(tmp_path)
    policy = on_disk(tmp_path, resume=True, host_bytes=4 * HOST_BYTES)
    tiles = r"up to \d+ bytes, without gradients"
    told = rf"has this state in tiles of {tiles}; here they are of {tiles}. host_bytes and gradients say"
    with pytest.raises(jzero.StateError, match=told):
        restored(tmp_path, on(2, tmp_path, policy=policy), BATCH)


def without_files(state: Any) -> Any:
    """What a checkpoint of everything else would have, of any optimizer."""
    return jax.tree.map(
        lambda x: np.zeros_like(x) if getattr(x, "where", "") == "in files" else x, state
    )


def test_no_leaf_says_which_step_it_is(tmp_path: Path):
    """The run ends before the last checkpoint is written: moments are of the step of the rest."""
    tx = optax.sgd(0.1, momentum=0.9)
    train_step = on(2, tmp_path, tx, on_disk(tmp_path, resume=True))
    state, found = train_step.shard(new_state(tx), BATCH), []
    with jzero.Checkpointer(tmp_path / "steps", train_step, asynchronous=False) as checkpointer:
        for i, x in enumerate(batches(3)):
            state, _ = train_step(state, x)
            found.append(to_host(state))
            checkpointer.save(i, without_files(state))
    del state
    shapes = jax.eval_shape(lambda: new_state(tx))
    for i in (2, 1):
        end_of_process()
        path = tmp_path / "steps" / str(i)
        small.assert_same(jzero.restore(path, train_step, shapes, BATCH), found[i])


# -- refusals --------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "path": (dict(path=""), "path=''. It is a folder"),
    "NUL": (dict(path="a\0b"), "path='a\\x00b'. It is a folder"),
    "a number": (dict(path=3), "path=3. It is a folder"),
    "host_bytes": (dict(path="x", host_bytes=1000), "host_bytes=1000"),
    "in_place": (dict(path="x", in_place=1), "in_place=1. It is True or False"),
    "resume": (dict(path="x", resume="yes"), "resume='yes'. It is True or False"),
    "threads": (dict(path="x", threads=0), "threads=0"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options(what: str):
    options, text = OPTIONS[what]
    with pytest.raises(jzero.OptionError, match=re.escape(f"NVMe: {text}")):
        jzero.NVMe(**options)


def test_a_dtype_that_no_kernel_has_is_refused_once(tmp_path: Path):
    with jax.enable_x64(True):
        w = jnp.ones((64, 64))
        train_step = small.shard_train_step(momentum, memory=on_disk(tmp_path))
        with pytest.raises(jzero.OptionError) as error:
            train_step.plan((w, w), jnp.ones((8, 64)))
    assert re.search(
        r"1 of 1 leaves that the hosts update are float64 \(state\[1\]\). .*kernels for processors, which "
        "know float32, .* Keep the state in one of these, as float32, or use memory=jzero.HostCPU",
        str(error.value),
    )
    assert str(error.value).count("float64") == 1


def test_what_is_updated_whole_is_refused(tmp_path: Path):
    """On one device, where the host could otherwise do it."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)
    told = r"is updated by XLA(.|\n)*Use memory=jzero.HostCPU\(\)"
    with pytest.raises(jzero.OptionError, match=told):
        on(1, tmp_path, tx).plan(new_state(tx), BATCH)


def test_buffers_must_hold_tiles(tmp_path: Path):
    """Leaves that are updated together are in a tile together, however many there are."""

    def step_fn(state, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        many = [0.9 * m + grad for m in state["m"]]
        return {"w": state["w"] - sum(many), "m": many}

    state = {"w": jnp.ones((64, 16)), "m": [jnp.ones((64, 16))] * 100}
    train_step = small.shard_train_step(step_fn, memory=jzero.NVMe(tmp_path, host_bytes=HOST_BYTES))
    with pytest.raises(jzero.OptionError, match=rf"host_bytes={HOST_BYTES} hold 2 tiles"):
        train_step(state, BATCH)
    assert not list(tmp_path.rglob("*.tiles"))
