"""Parameters in files: read layer by layer, ahead of their use; the same training as with `HostCPU`."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import parity
import small
import zoo
from jzero.offload._file_reads import FileReads, FileRun
from jzero.offload.memory._pinned_pool import PinnedPool
from test_nvme import in_files
from test_offload_params import CLIPPED, batch, make_step, new_state, one_device

pytest.importorskip("llvmlite")

DEVICE_BYTES, HOST_BYTES = 2**14, 2**17


def policies(folder: Any, **options: Any) -> dict[str, Any]:
    """Optimizer state and parameters in the same files."""
    bounds = {"device_bytes": DEVICE_BYTES, "host_bytes": HOST_BYTES}
    own = {name: options.pop(name) for name in bounds if name in options}
    return {
        "offload": jzero.NVMe(folder, host_bytes=2**16, **options),
        "offload_params": jzero.NVMe(folder, **{**bounds, **own}, **options),
    }


def mesh_of(axes: dict[str, int]) -> Any:
    num = parity.num_devices(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:num])


def on(axes: dict[str, int], step: Any, folder: Any, **options: Any) -> Any:
    own = {k: options.pop(k) for k in ("device_bytes", "host_bytes") if k in options}
    return small.shard_train_step(step, mesh=mesh_of(axes), **policies(folder, **own), **options)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- the same training -----------------------------------------------------------------------------

ACTIVATIONS = {"offload_activations": jzero.PinnedHost()}


@pytest.mark.parametrize(
    ("axes", "scan", "options"),
    [
        ({"data": 1}, True, {}),
        ({"data": 1}, False, {}),
        ({"data": 2}, True, {}),
        ({"data": 4}, False, {}),
        ({"data": 8}, True, {}),
        ({"data": 8}, False, {}),
        ({"node": 2, "local": 2}, True, dict(param_axes="local", optimizer_axes="local")),
        ({"data": 4}, True, dict(accumulate=2, layer_major=True)),
        ({"data": 2}, False, dict(accumulate=2)),
        ({"data": 2}, True, dict(accumulate=2, device_bytes=2**13)),
        ({"data": 2}, True, ACTIVATIONS),
    ],
    ids=str,
)
def test_it_trains_what_one_device_trains(
    axes: Any, scan: bool, options: dict[str, Any], tmp_path: Path
):
    """And what `HostCPU` trains with parameters in pinned memory, to the bit, in every leaf."""
    step = make_step(scan, CLIPPED)
    options = dict(options)
    one = on(axes, step, tmp_path, **options)
    window = jzero.PinnedHost(device_bytes=options.pop("device_bytes", DEVICE_BYTES))
    other = small.shard_train_step(
        step, mesh=mesh_of(axes), offload=jzero.HostCPU(), offload_params=window, **options
    )
    start = new_state(scan, 4, CLIPPED)
    state, same = one.shard(start, batch(0)), other.shard(start, batch(0))
    assert len(in_files(state)) == len(jax.tree.leaves(start))
    for i, wanted in enumerate(one_device(scan, clipped=True)):
        state, metrics = one(state, batch(i))
        same, _ = other(same, batch(i))
        assert_same(state, same)
        zoo.assert_trees_close(zoo.to_host((state, metrics)), wanted, zoo.FP32, f"step {i}")
    assert len(in_files(state)) == len(jax.tree.leaves(start))


def test_masters_in_half_precision_on_eight_devices(tmp_path: Path):
    """Parameters are bfloat16, cast from masters in the tiles; 14 bytes of each are read and written."""
    tx = jzero.master_weights(optax.adamw(1e-2))

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            y = x.astype(jnp.bfloat16)
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, params["layers"])
            return jnp.mean((y @ params["embed"].T).astype(jnp.float32) ** 2) + jnp.mean(
                (x.astype(jnp.bfloat16) @ params["embed"].T).astype(jnp.float32) ** 2
            )

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    keys = jax.random.split(jax.random.key(0))
    params = {
        "layers": jax.random.normal(keys[0], (3, 36, 36), jnp.bfloat16) / 6,
        "embed": jax.random.normal(keys[1], (257, 36), jnp.bfloat16),
    }
    x = jax.random.normal(jax.random.key(1), (8, 36))
    window = jzero.PinnedHost(device_bytes=DEVICE_BYTES * 4)
    one = on({"data": 8}, step, tmp_path, device_bytes=DEVICE_BYTES * 4)
    other = small.shard_train_step(
        step, mesh=mesh_of({"data": 8}), offload=jzero.HostCPU(), offload_params=window
    )
    start = params, tx.init(params)
    state, same, alone = one.shard(start, x), other.shard(start, x), start
    for i in range(3):
        (state, loss), (same, _) = one(state, x * (i + 1)), other(same, x * (i + 1))
        alone, expected = jax.jit(step)(alone, x * (i + 1))
        assert_same(state, same)
        np.testing.assert_allclose(loss, expected, rtol=2e-2)
    crossings = one.describe(state, x).crossings
    padded = [leaf.padded_shape for leaf in in_files(state[0])]
    assert all(math.prod(shape) % 8 == 0 for shape in padded)
    assert padded != [(257, 36), (3, 36, 36)]
    num = sum(map(math.prod, padded)) // 8
    written = sum(x.nbytes for x in crossings if x.direction == "to disk")
    assert written == 14 * num
    assert not [x for x in crossings if x.direction == "to device" and x.what != "parameter"]


def test_an_optimizer_without_state(tmp_path: Path):
    """Then there are parameters alone in the files."""
    step = make_step(True, optax.sgd(0.1))
    train_step = on({"data": 4}, step, tmp_path)
    state = train_step.shard(new_state(True, 4, optax.sgd(0.1)), batch(0))
    assert len(in_files(state)) == 4
    for i, wanted in enumerate(one_device(True, clipped=False)):
        state, metrics = train_step(state, batch(i))
        zoo.assert_trees_close(zoo.to_host((state, metrics)), wanted, zoo.FP32, f"step {i}")


# -- leaves that no step changes -------------------------------------------------------------------


def adapters(state: Any, x: Any) -> Any:
    """Trains `a` and `b` beside weights that stay."""

    def loss_fn(adapter: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            base, a, b = w
            return jnp.tanh(x @ base + x @ a @ b), None

        y, _ = jax.lax.scan(layer, x, (state["base"], adapter["a"], adapter["b"]))
        return jnp.mean((y @ state["head"]) ** 2)

    tx = optax.adam(1e-2)
    loss, grads = jax.value_and_grad(loss_fn)(state["adapter"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["adapter"])
    new = {"adapter": optax.apply_updates(state["adapter"], updates), "opt_state": opt_state}
    return state | new, loss


def adapted() -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    base = jax.random.normal(keys[0], (4, 32, 32)) / 5
    adapter = {
        "a": jax.random.normal(keys[1], (4, 32, 8)) / 5,
        "b": jax.random.normal(keys[2], (4, 8, 32)) / 5,
    }
    head = jax.random.normal(keys[3], (32, 33))
    return {
        "base": base, "head": head, "adapter": adapter, "opt_state": optax.adam(1e-2).init(adapter),
        "step": jnp.zeros((), jnp.int32),
    }  # fmt: skip


@pytest.mark.parametrize("num", [1, 4])
def test_frozen_weights_are_read_and_never_written(num: int, tmp_path: Path):
    train_step = on({"data": num}, adapters, tmp_path)
    start, x = adapted(), jax.random.normal(jax.random.key(9), (8, 32))
    state, expected = train_step.shard(start, x), start
    frozen = [path for path in tmp_path.rglob("*") if "frozen" in path.name]
    assert len(frozen) == num
    size, header = sum(path.stat().st_size for path in frozen), 2**14 * num
    weights = sum(state[name].home.nbytes for name in ("base", "head"))
    assert weights <= size <= weights + header * 4
    bodies = [path.read_bytes()[2**13 :] for path in frozen]
    for _ in range(3):
        (state, loss), (expected, wanted) = train_step(state, x), jax.jit(adapters)(expected, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    assert bodies == [path.read_bytes()[2**13 :] for path in frozen]
    crossings = train_step.describe(state, x).crossings
    adapter = sum(leaf.nbytes for leaf in jax.tree.leaves(start["adapter"])) // num
    assert sum(x.nbytes for x in crossings if x.direction == "to disk") == 3 * adapter
    for a, b in ((state["base"], start["base"]), (state["head"], start["head"])):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- what is in memory -----------------------------------------------------------------------------


class Watched:
    """Counts bytes of pinned memory that pools of parameters have lent, and made, and those of buffers."""

    def __init__(self, monkeypatch: Any):
        self.most, self.ahead = 0, 0
        old, made = PinnedPool.take, FileReads._made_buffers
        buffers = [0]

        def take(pool: Any, *args: Any) -> Any:
            found = old(pool, *args)
            assert pool.lent_bytes <= pool.made_bytes
            self.most = max(self.most, pool.made_bytes + buffers[0])
            return found

        def making(reads: Any, leaves: Any) -> Any:
            found = made(reads, leaves)
            buffers[0] = sum(x.nbytes for x in found)
            return found

        monkeypatch.setattr(PinnedPool, "take", take)
        monkeypatch.setattr(FileReads, "_made_buffers", making)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_parameters_in_memory_stay_within_host_bytes(scan: bool, tmp_path: Path, monkeypatch: Any):
    """Of devices of one process together; how many there are changes nothing else."""
    found = []
    for host_bytes in (2**16, 2**18):
        watched = Watched(monkeypatch)
        folder = tmp_path / str(host_bytes)
        found.append(train(scan, folder, host_bytes=host_bytes))
        assert 0 < watched.most <= host_bytes
    assert_same(*found)


def train(scan: bool, folder: Any, **options: Any) -> Any:
    train_step = on({"data": 8}, make_step(scan, CLIPPED), folder, **options)
    state = train_step.shard(new_state(scan, 12, CLIPPED), batch(0))
    for i in range(2):
        state, _ = train_step(state, batch(i))
    return jax.tree.map(np.array, state)


def test_reads_begin_before_earlier_layers_have_run(tmp_path: Path, monkeypatch: Any):
    """As far ahead as there is room: of 12 layers, several are asked for when the first is fetched."""
    asked: list[Any] = []
    fetched: list[int] = []
    begin, fetch = FileRun._begin, FileRun.fetched

    def beginning(run: Any, reads: Any, waits: bool = False) -> bool:
        begun = begin(run, reads, waits)
        asked.extend(reads if begun else ())
        return begun

    def fetching(run: Any, wanted: Any) -> Any:
        fetched.append(len(asked))
        return fetch(run, wanted)

    monkeypatch.setattr(FileRun, "_begin", beginning)
    monkeypatch.setattr(FileRun, "fetched", fetching)
    train(True, tmp_path, host_bytes=2**20)
    num = 2 * (12 * 3 + 1) - 1  # Each stack's slices, in both passes, and the head.
    assert fetched[0] >= 12 * 3
    assert len(asked) >= num


def test_too_little_memory_is_refused_with_the_least(tmp_path: Path):
    """Which suffices, and trains the same."""

    def step(state: Any, x: Any) -> Any:
        w, m = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1]))(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
        return (jax.tree.map(lambda w, m: w - m, w, m), m), loss

    weights = [np.ones((64, 256), np.float32) / 64, np.ones((256, 64), np.float32) / 256]
    start, x = (weights, [0 * w for w in weights]), np.ones((8, 64), np.float32)
    host_bytes = 2**16
    while True:
        options = {"device_bytes": 2**20, "host_bytes": host_bytes}
        train_step = on({"data": 2}, step, tmp_path / str(host_bytes), **options)
        try:
            state, _ = train_step(start, x)
            break
        except jzero.OptionError as refused:
            needed = int(re.findall(r"(\d+) is the least", str(refused))[0])
            assert needed > host_bytes
            host_bytes = needed
    assert host_bytes == 2**16 + 4096  # One of the two, and a page to read through.
    expected = jax.jit(step)(start, x)[0]
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
