"""Optimizer state in files, updated tile by tile: the same training, and where leaves are."""

import copy
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import optimizers
import small
import test_offload_params as infinity
import test_optimizers
import zoo
from jzero.checkpoint import _writing
from optimizers import ENTRIES
from test_host_cpu import NEEDS_OTHER_DEVICES, ROUNDED, rounded
from test_offload import BATCH, TX, WITH_STATE, make_step, new_state

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

HOST_BYTES = 2**16  # tiles of 4 KiB
NOT_ELEMENTWISE = NEEDS_OTHER_DEVICES | {"split_real_and_imaginary"}


def on_disk(folder: Any, **options: Any) -> jzero.NVMe:
    return jzero.NVMe(folder, **{"host_bytes": HOST_BYTES, **options})


def in_files(tree: Any) -> list[jzero.LeafArray]:
    return [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "where", "") == "in files"]


def on(num: int, folder: Any, tx: Any = TX, policy: Any = None, **options: Any) -> Any:
    return small.shard_train_step(
        make_step(tx), mesh=small.mesh(data=num), offload=policy or on_disk(folder), **options
    )


def batches(num: int) -> list[np.ndarray]:
    return [np.roll(BATCH, i, 0) * (1 + i / 3) for i in range(num)]


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.usefixtures("optax_promotions")
def test_optimizers_train_as_on_one_device(name: str, tmp_path: Path):
    """Or are refused: what is not elementwise is never half in files."""
    entry, mesh = ENTRIES[name], small.mesh(data=4)
    step_fn, batches = optimizers.make_step(entry), optimizers.make_batches(entry.poisoned)
    train_step = small.shard_train_step(step_fn, mesh=mesh, memory=on_disk(tmp_path))
    state: Any = optimizers.make_state(entry)
    if name in NOT_ELEMENTWISE:
        with pytest.raises(jzero.OptionError, match=r"between the devices|(whole,|updated) by XLA"):
            train_step.plan(state, batches[0])
        return
    expected = rounded(name) if name in ROUNDED else test_optimizers.one_device(name)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        state, metrics = train_step(state, batch)
        test_optimizers.assert_same((state, metrics), wanted, f"{name}, step {i}")
    assert in_files(state["opt"])


@pytest.mark.slow
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("num", "stage"), [(1, 3), (2, 1), (8, 3)])
def test_it_is_the_update_of_the_host_to_the_bit(
    masters: bool, num: int, stage: int, tmp_path: Path
):
    """Padded leaves, a clip by the norm of all gradients, masters: every leaf, after each step."""
    tx = jzero.master_weights(TX) if masters else TX
    start = new_state(tx, jnp.bfloat16 if masters else jnp.float32)
    one, other = on(num, tmp_path, tx, stage=stage), on(num, "", tx, jzero.HostCPU(), stage=stage)
    state, expected = one.shard(start, BATCH), other.shard(start, BATCH)
    assert len(in_files(state)) == 12 if masters else 8
    for x in batches(3):
        (state, metrics), (expected, wanted) = one(state, x), other(expected, x)
        small.assert_same((state, metrics), (expected, wanted))
    disk = [path.stat().st_size for path in tmp_path.rglob("*.tiles")]
    assert len(disk) == num
    assert sum(disk) >= 2 * sum(leaf.nbytes for leaf in in_files(state))


PARAMS = jzero.PinnedHost(device_bytes=2**14)


@pytest.mark.slow(but=["1-True-options0"])
@pytest.mark.parametrize(
    ("num", "scan", "options"),
    [(1, True, {}), (2, False, {}), (4, True, dict(accumulate=2, layer_major=True))],
)
def test_parameters_on_the_hosts(num: int, scan: bool, options: Any, tmp_path: Path):
    """Updated in their place beside tiles; as on one device, and as `HostCPU` does it, to the bit."""
    params, mesh = infinity, small.mesh(data=num)
    step = params.make_step(scan, params.CLIPPED)
    one, other = (
        small.shard_train_step(step, mesh=mesh, offload=policy, offload_params=PARAMS, **options)
        for policy in (on_disk(tmp_path), jzero.HostCPU())
    )
    start = params.new_state(scan, 4, params.CLIPPED)
    state, same = one.shard(start, params.batch(0)), other.shard(start, params.batch(0))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state["params"])} == {"pinned_host"}
    assert len(in_files(state["opt_state"])) == len(jax.tree.leaves(start["opt_state"]))
    for i, wanted in enumerate(params.one_device(scan, clipped=True)):
        state, metrics = one(state, params.batch(i))
        same, _ = other(same, params.batch(i))
        small.assert_same(state, same)
        found = zoo.to_host((state, metrics))
        zoo.assert_trees_close(found, wanted, zoo.FP32, f"step {i}")


# -- where leaves are ------------------------------------------------------------------------------


@pytest.mark.slow
def test_leaves_wait_in_memory_until_a_step_says_which_are_in_files(tmp_path: Path):
    """And go straight into files if it has."""
    train_step = on(4, tmp_path)
    state = train_step.init(new_state)
    assert not in_files(state)
    assert not list(tmp_path.rglob("*"))
    assert any(getattr(leaf, "where", "") == "in host memory" for leaf in jax.tree.leaves(state))
    state, _ = train_step(state, BATCH)
    assert len(in_files(state)) == 8
    again = train_step.init(new_state)
    assert len(in_files(again)) == 8
    again, _ = train_step(again, BATCH)
    small.assert_same(again, state)


def test_a_state_is_read_and_moved(tmp_path: Path):
    """To the devices, to the host, into a copy, to another number of devices; nothing consumes it."""
    train_step = on(8, tmp_path)
    state, _ = train_step(new_state(), BATCH)
    values = jax.tree.map(np.asarray, state)
    whole, copied = train_step.unshard(state), copy.deepcopy(state)
    for other in (
        whole, copied, pickle.loads(pickle.dumps(jax.tree.leaves(state))),
        on(8, "", policy=jzero.HostCPU()).shard(state, BATCH), on(2, tmp_path).shard(state, BATCH),
        on(8, "", policy=jzero.NoOffload()).shard(state, BATCH),
    ):  # fmt: skip
        small.assert_same(other, values)
    norm = lambda state, x: optax.tree.norm(state[1][1][0].nu)  # noqa: E731
    norm_of = jzero.shard_eval_step(norm, like=train_step)
    wanted = optax.tree.norm(values[1][1][0].nu)
    np.testing.assert_allclose(norm_of(state, BATCH), wanted, rtol=1e-6)
    train_step(state, BATCH)


def deep(num: int) -> tuple[Any, Any]:
    """A step with so many layers of 256 KiB, and its state."""

    def step_fn(state: Any, x: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        updates, opt_state = TX.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def init() -> Any:
        params = [jnp.eye(256) * (1 + i / num) for i in range(num)]
        return params, TX.init(params)

    return step_fn, init


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of NumPy, in which `HostCPU` has the state: what placing, a step and a save take at most."""
    monkeypatch.setattr(_writing, "_TOGETHER", 2**18)
    peaks, x, host_bytes = [], np.ones((8, 256), np.float32), 2**20
    for i, num in enumerate((2, 2, 8)):  # The first also has what is made once.
        step_fn, init = deep(num)
        policy = on_disk(tmp_path, host_bytes=host_bytes)
        train_step = small.shard_train_step(step_fn, memory=policy)
        train_step(train_step.shard(init(), x), x)  # All is compiled.
        tracemalloc.start()
        state = train_step(train_step.init(init), x)
        with jzero.Checkpointer(tmp_path / f"{i}", train_step, asynchronous=False) as saver:
            saver.save(1, state)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        leaves = in_files(state)
        ring = leaves[0].storage.store.spec.ring
        assert sum(buffer.nbytes for buffer in ring.buffers) <= host_bytes
        assert sum(leaf.nbytes for leaf in leaves) == 2 * num * 2**18
    # Python has 0.5 MiB for six layers more, of which the state has grown by 3 MiB.
    assert peaks[2] < peaks[1] + 2**20, peaks
