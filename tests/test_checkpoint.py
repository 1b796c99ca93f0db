"""Checkpoints: restored in any layout, read and written by Orbax alone, and continued to the bit."""

import asyncio
import functools
import itertools
import json
import subprocess
import sys
import textwrap
import threading
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jzero
from jzero.checkpoint import _restore, _saver
from small import grouped

ROWS, WIDTH = 40, 52  # of 8 devices, the first is divided evenly, and the second not


class State(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array
    step: jax.Array


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def new_state(dtype=jnp.float32, tx=TX) -> State:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": jax.random.normal(keys[0], (ROWS, 16), dtype),
        "odd": jax.random.normal(keys[1], (WIDTH - 1, 7), dtype),
        "layers": [jax.random.normal(keys[2], (16, WIDTH - 1), dtype), jnp.ones((3,), dtype)],
    }
    return State(params, tx.init(params), jax.random.key(7), jnp.int32(0))


def make_step(tx=TX):
    def step_fn(state, batch):
        def loss_fn(p):
            x = jnp.tanh(batch @ p["embed"].astype(jnp.float32))
            x = x @ p["layers"][0].astype(jnp.float32) @ p["odd"].astype(jnp.float32)
            return jnp.mean(x**2) + p["layers"][1].astype(jnp.float32).sum() ** 2

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.key, state.step + 1), {"loss": loss}

    return step_fn


def batch(i: int) -> np.ndarray:
    return np.random.default_rng(i).standard_normal((120, ROWS)).astype(np.float32)


def sharded(
    stage: int, shape: tuple[int, ...], names: tuple[str, ...] = ("data",), tx=TX, **options
):
    num = int(np.prod(shape))
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:num], shape), names)
    return jzero.shard_train_step(
        make_step(tx), stage=stage, mesh=mesh, **grouped(min_shard_bytes=0, **options)
    )


SETTINGS: dict[str, Any] = {
    "stage 0 on 1": dict(stage=0, shape=(1,)),
    "stage 1 on 2": dict(stage=1, shape=(2,)),
    "stage 2 on 3": dict(stage=2, shape=(3,)),
    "stage 3 on 8": dict(stage=3, shape=(8,)),
    "stage 3 on 5": dict(stage=3, shape=(5,), names=("batch",)),
    "stage 3 on 2x4": dict(stage=3, shape=(2, 4), names=("node", "local"), param_axes="local"),
    "stage 3 and a tensor axis": dict(
        stage=3, shape=(4, 2), names=("data", "model"), axis_names="data",
        auto_specs={"embed": P(None, "model")},
    ),
    "stage 3 on 8, offloaded": dict(stage=3, shape=(8,), offload=jzero.PinnedHost(2**16)),
    "stage 1 on 2, offloaded": dict(stage=1, shape=(2,), offload=jzero.PinnedHost(2**10)),
    "stage 3 on 8, on the host": dict(stage=3, shape=(8,), offload=jzero.HostCPU()),
    "stage 1 on 2x4, on the host": dict(
        stage=1, shape=(2, 4), names=("node", "local"), optimizer_axes="local", offload=jzero.HostCPU()
    ),
}  # fmt: skip


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit, every leaf."""

    def check(x: Any, y: Any) -> None:
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, actual, expected)  # which refuses trees of different structures


@pytest.fixture(scope="module")
def trained() -> Any:
    """A state of two steps on one device, on the host."""
    train_step = jax.jit(make_step())
    state = new_state()
    for i in range(2):
        state, _ = train_step(state, batch(i))
    return state


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Any:
    """Where a checkpoint of that state by a setting is, by its name."""

    @functools.cache
    def saved(name: str) -> Any:
        path, train_step = tmp_path_factory.mktemp("saved"), sharded(**SETTINGS[name])
        with jzero.Checkpointer(path, train_step, asynchronous=False) as checkpointer:
            assert checkpointer.save(2, train_step.shard(trained, batch(0)))
        return path

    return saved


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [*itertools.product(SETTINGS, SETTINGS)])
def test_restored_in_any_layout(source, target, saved, trained):
    train_step = sharded(**SETTINGS[target])
    with jzero.Checkpointer(saved(source), train_step) as checkpointer:
        state = checkpointer.restore(jax.eval_shape(new_state), batch(0))
    placed = train_step.shard(trained, batch(0))
    at_rest = [type(getattr(x, "storage", x)) for x in jax.tree.leaves(placed)]
    assert [type(getattr(x, "storage", x)) for x in jax.tree.leaves(state)] == at_rest
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
        in_memory = getattr(x, "where", "") == "in host memory"
        x, y = (getattr(leaf, "storage", leaf) for leaf in (x, y))  # the padding, too, is the same
        if in_memory:
            assert x.placement == y.placement
            x, y = x.buffers, y.buffers
        else:
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)  # of the same tier, too
        assert_same(x, y)
    assert_same(train_step.unshard(state), trained)


def on_host(**options: Any) -> Any:
    return sharded(3, (8,), offload=jzero.HostCPU(), **options)


def test_restored_to_the_host_in_groups(saved, trained, monkeypatch):
    monkeypatch.setattr(_restore, "_TO_HOST", 4000)  # one large leaf, or several small ones
    train_step = on_host()
    with jzero.Checkpointer(saved("stage 3 on 8"), train_step) as checkpointer:
        state = checkpointer.restore(jax.eval_shape(new_state))  # roles unknown: all of it
    assert getattr(state.params["odd"], "where", "") == "in host memory"
    assert_same(state, trained)


@pytest.mark.slow
def test_host_buffers_may_change_while_they_are_written(tmp_path, trained):
    train_step = on_host()
    state = train_step.shard(trained)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, state)
        for leaf in jax.tree.leaves(state):
            for buffer in getattr(leaf, "buffers", ()):
                buffer[...] = 0
        assert_same(checkpointer.restore(jax.eval_shape(new_state)), trained)


def test_a_delayed_update_is_saved_when_it_is_done(tmp_path):
    policy = jzero.HostCPU(delayed_update=True, delay_after=0)
    train_step = sharded(3, (8,), offload=policy)
    state, _ = train_step(new_state(), batch(0))
    text = (
        r"Checkpointer.save: 8 leaves fail:(?s:.*)mu\['embed'\] still waits for the last step's update"
        r"(?s:.*)Call state = train_step.flush\(state\) first"
    )
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        with pytest.raises(jzero.StateError, match=text):
            checkpointer.save(1, state)
        assert checkpointer.latest_step() is None
        state = train_step.flush(state)
        checkpointer.save(1, state)
        assert_same(checkpointer.restore(jax.eval_shape(new_state), batch(0)), state)


@pytest.mark.slow(but=["stage 1 on 2, offloaded"])
@pytest.mark.parametrize("name", ["stage 1 on 2, offloaded", "stage 1 on 2x4, on the host"])
def test_interrupted_training_is_continued_to_the_bit(name, tmp_path):
    setting = SETTINGS[name]
    train_step = sharded(**setting)
    whole = train_step.shard(new_state(), batch(0))
    with jzero.Checkpointer(tmp_path, train_step, save_interval_steps=2) as checkpointer:
        for i in range(6):
            whole, _ = train_step(whole, batch(i))
            due = checkpointer.save(i + 1, whole)
            assert due == (i == 0 or (i + 1) % 2 == 0)
    train_step = sharded(**setting)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        assert checkpointer.latest_step() == 6
        state = checkpointer.restore(jax.eval_shape(new_state), step=4)
    for i in range(4, 6):
        state, _ = train_step(state, batch(i))
    assert_same(train_step.unshard(state), train_step.unshard(whole))


def test_master_weights_come_and_go(tmp_path):
    mixed_tx = optax.chain(optax.clip_by_global_norm(1.0), jzero.master_weights(optax.adamw(1e-2)))
    mixed, plain = sharded(3, (8,), tx=mixed_tx), sharded(1, (4,))
    bf16 = jax.eval_shape(lambda: new_state(jnp.bfloat16, mixed_tx))
    state = mixed.init(lambda: new_state(jnp.bfloat16, mixed_tx))
    for i in range(2):
        state, _ = mixed(state, batch(i))
    expected = mixed.unshard(state)
    with jzero.Checkpointer(tmp_path / "mixed", mixed) as checkpointer:
        checkpointer.save(2, state)
    masters = expected.opt_state[1].masters
    without = State(masters, (expected.opt_state[0], expected.opt_state[1].inner), *expected[2:])

    with jzero.Checkpointer(tmp_path / "mixed", plain) as checkpointer:
        state = checkpointer.restore(jax.eval_shape(new_state))
    assert_same(plain.unshard(state), without)

    with jzero.Checkpointer(tmp_path / "plain", plain) as checkpointer:
        checkpointer.save(2, state)
    with jzero.Checkpointer(tmp_path / "plain", mixed) as checkpointer:
        assert_same(mixed.unshard(checkpointer.restore(bf16)), expected)

    mixed, plain = (on_host(tx=tx) for tx in (mixed_tx, TX))
    with jzero.Checkpointer(tmp_path / "mixed", plain) as checkpointer:
        assert_same(checkpointer.restore(jax.eval_shape(new_state)), without)
    with jzero.Checkpointer(tmp_path / "plain", mixed) as checkpointer:
        assert_same(checkpointer.restore(bf16), expected)


@pytest.mark.parametrize("inner", [optax.sgd(1e-2), optax.adamw(1e-2, mu_dtype=jnp.bfloat16)])
def test_masters_of_any_optimizer_come_and_go(inner, tmp_path):
    """One without a state of its own, and one with moments in the parameters' dtype."""

    def new(tx, dtype):
        state = new_state(dtype, tx)
        return state._asdict() | {"ema": jax.tree.map(lambda x: x + 1, state.params)}

    tx = jzero.master_weights(inner)
    train_step = sharded(3, (8,))
    mixed, plain = new(tx, jnp.bfloat16), new(inner, jnp.float32)
    plain["ema"] = mixed["ema"]
    with jzero.Checkpointer(tmp_path / "mixed", train_step) as checkpointer:
        checkpointer.save(1, mixed)
        found = train_step.unshard(checkpointer.restore(plain))
    assert_same(found["params"], mixed["opt_state"].masters)
    assert_same(found["ema"], mixed["ema"])
    with jzero.Checkpointer(tmp_path / "plain", train_step) as checkpointer:
        checkpointer.save(1, plain)
        found = train_step.unshard(checkpointer.restore(mixed))
    assert_same(found["opt_state"].masters, plain["params"])
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), plain["params"])
    assert_same(found["params"], half)


def linen_state() -> TrainState:
    params = new_state().params
    return TrainState.create(apply_fn=jnp.tanh, params=params, tx=TX)


@pytest.mark.slow
def test_reads_what_orbax_wrote(tmp_path):
    """An unsharded Flax `TrainState`, in the three forms in which Orbax writes it."""
    state = linen_state().replace(step=jnp.int32(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "standard", state)
    ocp.PyTreeCheckpointer().save(tmp_path / "pytree", state)
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    train_step = sharded(3, (8,))
    for path in ("standard", "pytree", "manager/3"):
        restored = jzero.restore(tmp_path / path, train_step, linen_state())
        assert isinstance(restored.params["odd"], jzero.LeafArray)
        assert_same(train_step.unshard(restored), state)
    with jzero.Checkpointer(tmp_path / "manager", train_step) as checkpointer:
        assert_same(train_step.unshard(checkpointer.restore(state)), state)


READERS = """
    import json, sys
    sys.modules["jzero"] = None  # an import of it fails
    from pathlib import Path
    import jax, numpy as np, orbax.checkpoint as ocp
    from orbax.checkpoint.experimental import v1
    STEPS = Path(sys.argv[1])
    STEP, STATE = STEPS / "2", STEPS / "2" / "state"
    PYTREE, STANDARD = ocp.args.PyTreeRestore, ocp.args.StandardRestore

    def manager(restore, **options):
        with ocp.CheckpointManager(STEPS, **options) as manager:
            return restore(manager)["state"]

    whole = ocp.PyTreeCheckpointer().restore(STATE)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    def target(x):
        split = jax.P("x") if x.ndim and x.shape[0] % 4 == 0 else jax.P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, split))
    targets = jax.tree.map(target, whole)
    handlers = dict(item_handlers={"state": ocp.StandardCheckpointHandler()})
    ways = {
        "PyTreeCheckpointer": lambda: whole,
        "StandardCheckpointer, sharded": lambda: ocp.StandardCheckpointer().restore(STATE, targets),
        "CompositeCheckpointHandler": lambda: ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(
            STEP, args=ocp.args.Composite(state=PYTREE()))["state"],
        "CheckpointManager": lambda: manager(lambda m: m.restore(m.latest_step())),
        "CheckpointManager, with handlers": lambda: manager(lambda m: m.restore(2), **handlers),
        "CheckpointManager, sharded": lambda: manager(
            lambda m: m.restore(2, args=ocp.args.Composite(state=STANDARD(targets)))),
        "v1.load_pytree, sharded": lambda: v1.load_pytree(STEP, targets),
        "v1.load_checkpointables": lambda: v1.load_checkpointables(STEP)["state"],
        "v1.training.Checkpointer": lambda: v1.training.Checkpointer(STEPS).load_pytree(2),
    }
    for number, (name, read) in enumerate(ways.items()):
        flat = {"/".join(k): v for k, v in ocp.tree.to_flat_dict(read()).items() if v is not None}
        np.savez(f"{sys.argv[2]}/{number}.npz", **flat)
    print(json.dumps(list(ways)))
"""


@pytest.mark.slow
def test_orbax_alone_reads_it(saved, trained, tmp_path):
    """By each of its documented ways, as NumPy arrays or in the layout that is asked for."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(READERS)]
    run = subprocess.run(
        [*command, saved("stage 3 on 2x4"), tmp_path],
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    )
    for number, way in enumerate(json.loads(run.stdout.splitlines()[-1])):
        found = np.load(tmp_path / f"{number}.npz")
        moment = trained.opt_state[1][0].mu["layers"][0]
        np.testing.assert_array_equal(found["params/odd"], trained.params["odd"], err_msg=way)
        np.testing.assert_array_equal(found["opt_state/1/0/mu/layers/0"], moment, err_msg=way)
        np.testing.assert_array_equal(found["key"], jax.random.key_data(trained.key), err_msg=way)
        assert len(found.files) == len(jax.tree.leaves(trained)), way


def test_a_lone_array(tmp_path):
    train_step = jzero.shard_train_step(lambda w, x: w - x.mean())
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, jnp.arange(800.0))
        assert_same(checkpointer.restore(jnp.zeros(800)), jnp.arange(800.0))


class Count:
    """The smallest data iterator that can be saved."""

    def __init__(self, state: Any):
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("place", [{"next": 12}, b'{"next": 12}'])
def test_data_iterator_comes_back(place, tmp_path):
    train_step = sharded(3, (8,))
    state = train_step.init(new_state)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, state, Count(place))
        other = Count(None)
        checkpointer.restore(state, data_iterator=other)
    assert other.state == place


@pytest.mark.slow
def test_a_data_iterator_may_go_on_while_it_is_saved(tmp_path, monkeypatch):
    """`get_state()` may return the dict that the iterator counts in: saved is where it stood at `save`."""
    train_step = sharded(3, (8,))
    state = train_step.init(new_state)
    place: dict[str, Any] = {"next": 12, "shards": [1, 2]}
    end, gate = _saver._Work._complete, threading.Event()
    monkeypatch.setattr(_saver._Work, "_complete", lambda *args: (gate.wait(60), end(*args))[1])
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, state, Count(place))
        place["next"] = 13
        place["shards"][0] = 5
        gate.set()
        other = Count(None)
        checkpointer.restore(state, data_iterator=other)
    assert other.state == {"next": 12, "shards": [1, 2]}


def test_grain_goes_on_where_it_was(tmp_path):
    def batches():
        dataset = grain.MapDataset.range(1000).seed(0).shuffle().repeat().batch(8)
        return iter(dataset.to_iter_dataset())

    train_step = sharded(3, (8,))
    state, iterator = train_step.init(new_state), batches()
    for _ in range(3):
        next(iterator)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(3, state, iterator)
        expected = [next(iterator) for _ in range(5)]
        restarted = batches()
        checkpointer.restore(state, data_iterator=restarted)
    np.testing.assert_array_equal([next(restarted) for _ in range(5)], expected)


MEASURE = """
    import sys, jax, jax.numpy as jnp, jzero
    from jzero.checkpoint import _restore, _saver

    _restore._TO_HOST = 2**26

    def resident(what):
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10

    def new_state():
        return {f"w{i}": jnp.full((2048, 2048 + i), 1.0) for i in range(24)}

    offload = getattr(jzero, sys.argv[2])()
    train_step = jzero.shard_train_step(lambda state, batch: (state, {}), memory=offload)
    with jzero.Checkpointer(sys.argv[1], train_step) as checkpointer:
        if checkpointer.latest_step() is None:
            checkpointer.save(0, train_step.init(new_state))
        else:
            before = resident("VmRSS")
            open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
            state = checkpointer.restore(jax.eval_shape(new_state))
            nbytes = [leaf.nbytes for leaf in jax.block_until_ready(jax.tree.leaves(state))]
            print(resident("VmHWM") - before, sum(nbytes), max(nbytes))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of a process in /proc")
@pytest.mark.parametrize(("offload", "more"), [("NoOffload", 0), ("HostCPU", 2**26)])
def test_restore_needs_little_more_memory_than_the_state(offload, more, tmp_path):
    """On CPUs the devices' memory is the host's: what is at rest, and what is on its way."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), tmp_path, offload]
    for _ in range(2):
        run = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    peak, at_rest, largest = map(int, run.stdout.split())
    # Of 404 MB; what XLA and Orbax hold is in it.
    assert peak - at_rest < 2**27 + 2 * largest + more


def test_chunks_of_zeros_that_orbax_once_left_out(tmp_path):
    """They are zeros where `_METADATA` does not say that all chunks were written, and else missing."""
    values = {"v": jnp.ones((64, 8)), "w": jnp.zeros((64, 8))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", values)
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{tmp_path}/plain/"}
    ).result()
    store.write("w/0.0", None).result()
    train_step = jzero.shard_train_step(lambda state, batch: state, stage=3)
    with pytest.raises(jzero.CheckpointError, match="w: .*is missing"):
        jzero.restore(tmp_path / "plain", train_step, values)
    described = tmp_path / "plain" / "_METADATA"
    found = json.loads(described.read_text())
    del found["store_array_data_equal_to_fill_value"]
    described.write_text(json.dumps(found))
    restored = jzero.restore(tmp_path / "plain", train_step, values)
    jax.tree.map(np.testing.assert_array_equal, restored, values)


def test_restored_where_a_loop_runs(tmp_path):
    """As in a notebook."""
    train_step = jzero.shard_train_step(lambda state, batch: state, stage=3)
    values = {"w": jnp.arange(64.0)}

    async def cell() -> Any:
        with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
            checkpointer.save(1, values)
            return checkpointer.restore(values)

    jax.tree.map(np.testing.assert_array_equal, asyncio.run(cell()), values)
