"""Parameters in files: read layer by layer, ahead of their use; the same training as with `HostCPU`."""

import functools
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
from jzero.offload._file_reads import FileReads
from jzero.offload.memory._pinned_pool import PinnedPool
from small import grouped
from test_nvme import in_files
from test_nvme_faults import end_of_process
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


def on(axes: dict[str, int], step: Any, folder: Any, **options: Any) -> Any:
    names = ("device_bytes", "host_bytes", "in_place", "gradients")
    own = {name: options.pop(name) for name in names if name in options}
    return small.shard_train_step(
        step, mesh=small.mesh(**axes), **policies(folder, **own), **options
    )


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.slow(but=[2, 4])
@pytest.mark.parametrize(
    ("axes", "scan", "options"),
    [
        ({"data": 1}, True, {}),
        ({"data": 8}, False, {}),
        ({"node": 2, "local": 2}, True, dict(param_axes="local", optimizer_axes="local")),
        ({"data": 4}, True, dict(accumulate=2, layer_major=True)),
        ({"data": 2}, True, dict(accumulate=2, device_bytes=2**13)),
        ({"data": 2}, True, {"offload_activations": jzero.PinnedHost()}),
        ({"data": 2}, True, dict(in_place=True)),
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
    options.pop("in_place", None)
    options |= {"offload": jzero.HostCPU(), "offload_params": window}
    other = small.shard_train_step(step, mesh=small.mesh(**axes), **options)
    start = new_state(scan, 4, CLIPPED)
    state, same = one.shard(start, batch(0)), other.shard(start, batch(0))
    assert len(in_files(state)) == len(jax.tree.leaves(start))
    for i, wanted in enumerate(one_device(scan, clipped=True)):
        state, metrics = one(state, batch(i))
        same, _ = other(same, batch(i))
        small.assert_same(state, same)
        zoo.assert_trees_close(zoo.to_host((state, metrics)), wanted, zoo.FP32, f"step {i}")
    assert len(in_files(state)) == len(jax.tree.leaves(start))


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("gradients", [False, True])
def test_masters_in_half_precision_on_eight_devices(gradients: bool, tmp_path: Path):
    """Parameters are bfloat16, cast from masters in the tiles; 14 bytes of each are read and written."""
    tx = jzero.master_weights(optax.adamw(1e-2))

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            y = x.astype(jnp.bfloat16)
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, params["layers"])
            logits = (y + x.astype(jnp.bfloat16)) @ params["embed"].T
            return jnp.mean(logits.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    keys = jax.random.split(jax.random.key(0))
    params = {
        "layers": jax.random.normal(keys[0], (3, 36, 36), jnp.bfloat16) / 6,
        "embed": jax.random.normal(keys[1], (257, 36), jnp.bfloat16),
    }
    x = jax.random.normal(jax.random.key(1), (8, 36))
    bounds = {"device_bytes": DEVICE_BYTES * 4}
    one = on({"data": 8}, step, tmp_path, gradients=gradients, **bounds)
    memory = jzero.Memory(optimizer=jzero.HostCPU(), params=jzero.PinnedHost(**bounds))
    other = small.shard_train_step(step, mesh=small.mesh(data=8), memory=memory)
    start = params, tx.init(params)
    state, same, alone = one.shard(start, x), other.shard(start, x), start
    for i in range(3):
        (state, loss), (same, _) = one(state, x * (i + 1)), other(same, x * (i + 1))
        alone, expected = jax.jit(step)(alone, x * (i + 1))
        small.assert_same(state, same)
        np.testing.assert_allclose(loss, expected, rtol=2e-2)
    transfers = one.describe(state, x).transfers
    padded = [leaf.storage.shape for leaf in in_files(state[0])]
    assert all(math.prod(shape) % 8 == 0 for shape in padded)
    assert padded != [(257, 36), (3, 36, 36)]
    num = sum(map(math.prod, padded)) // 8
    written = sum(x.nbytes for x in transfers if x.direction == "to disk")
    assert written == (16 if gradients else 14) * num
    assert not [x for x in transfers if x.direction == "to device" and x.what != "parameter"]


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


@pytest.mark.slow(but=["4"])
@pytest.mark.parametrize("num", [1, 4])
def test_frozen_weights_are_read_and_never_written(num: int, tmp_path: Path):
    train_step = on({"data": num}, adapters, tmp_path, gradients=num > 1)
    start, x = adapted(), jax.random.normal(jax.random.key(9), (8, 32))
    state, expected = train_step.shard(start, x), start
    frozen = [path for path in tmp_path.rglob("*") if "frozen" in path.name]
    assert len(frozen) == num
    size, header = sum(path.stat().st_size for path in frozen), 2**14 * num
    weights = sum(state[name].storage.placement.nbytes for name in ("base", "head"))
    assert weights <= size <= weights + header * 4
    bodies = [path.read_bytes()[2**13 :] for path in frozen]
    for _ in range(3):
        (state, loss), (expected, wanted) = train_step(state, x), jax.jit(adapters)(expected, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    assert bodies == [path.read_bytes()[2**13 :] for path in frozen]
    transfers = train_step.describe(state, x).transfers
    adapter = sum(leaf.nbytes for leaf in jax.tree.leaves(start["adapter"])) // num
    written = [x for x in transfers if x.direction == "to disk" and x.what != "gradient"]
    assert sum(x.nbytes for x in written) == 3 * adapter
    for a, b in ((state["base"], start["base"]), (state["head"], start["head"])):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- what is in memory -----------------------------------------------------------------------------


class Watched:
    """Counts bytes of pinned memory that pools of parameters have lent, and made, and those of buffers."""

    def __init__(self, monkeypatch: Any):
        self.most, self.pools = 0, set[PinnedPool]()
        old, made = PinnedPool.take, FileReads._made_buffers
        buffers = [0]

        def take(pool: Any, *args: Any) -> Any:
            found = old(pool, *args)
            assert pool.lent_bytes <= pool.made_bytes <= pool.nbytes
            self.pools.add(pool)
            self.most = max(self.most, pool.made_bytes + buffers[0])
            return found

        def making(reads: Any, leaves: Any) -> Any:
            found = made(reads, leaves)
            buffers[0] = sum(x.nbytes for x in found)
            return found

        monkeypatch.setattr(PinnedPool, "take", take)
        monkeypatch.setattr(FileReads, "_made_buffers", making)


@pytest.mark.slow(but=["scanned"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_parameters_in_memory_stay_within_host_bytes(scan: bool, tmp_path: Path, monkeypatch: Any):
    """Of devices of one process together; how many there are changes nothing else."""
    found = []
    for host_bytes in (2**16, 2**18):
        watched = Watched(monkeypatch)
        folder = tmp_path / str(host_bytes)
        found.append(train(scan, folder, host_bytes=host_bytes))
        assert 0 < watched.most <= host_bytes
        (pool,) = watched.pools  # One for all steps; at their end it has everything back.
        assert pool.lent_bytes == 0
    small.assert_same(*found)


def train(scan: bool, folder: Any, **options: Any) -> Any:
    train_step = on({"data": 8}, make_step(scan, CLIPPED), folder, **options)
    state = train_step.shard(new_state(scan, 12, CLIPPED), batch(0))
    for i in range(2):
        state, _ = train_step(state, batch(i))
    return jax.tree.map(np.array, state)


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


# -- many steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_bytes", [2**11, 2**20], ids=["in parts", "whole"])
@pytest.mark.parametrize("kind", ["scan", "while"])
def test_nested_loops_read_their_layers_in_each_iteration(
    kind: str, device_bytes: int, tmp_path: Path
):
    """A loop in time around unrolled layers: where it runs in parts, each iteration reads them all again."""

    def step(state: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            def iteration(y: Any) -> Any:
                for i in range(4):
                    y = jnp.tanh(y @ w[f"w{i}"])
                return y

            if kind == "scan":
                y, _ = jax.lax.scan(lambda y, _: (iteration(y), None), x, None, 3)
            else:  # No gradient goes through it.
                y = jax.lax.while_loop(
                    lambda carry: carry[1] < 3, lambda carry: (iteration(carry[0]), carry[1] + 1),
                    (jax.lax.stop_gradient(x), 0),
                )[0]  # fmt: skip
            y = jax.lax.stop_gradient(y) @ w["head"]
            return jnp.mean(y**2) + jnp.mean(iteration(x) ** 2)

        w, m = state
        loss, grads = jax.value_and_grad(loss_fn)(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m), loss

    names = ("w0", "w1", "w2", "w3", "head")
    keys = jax.random.split(jax.random.key(0), len(names))
    w = {n: jax.random.normal(k, (16, 16)) / 4 for n, k in zip(names, keys, strict=True)}
    start, x = (w, jax.tree.map(jnp.zeros_like, w)), batch(0)
    train_step = on({"data": 1}, step, tmp_path, device_bytes=device_bytes)
    state, expected = train_step.shard(start, x), start
    for _ in range(2):
        (state, loss), (expected, wanted) = train_step(state, x), jax.jit(step)(expected, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")


def test_a_step_in_mixed_precision(tmp_path: Path):
    bounds = {"device_bytes": 2**24, "host_bytes": 2**24}
    shard = functools.partial(small.shard_train_step, **policies(tmp_path, **bounds))
    parity.check("mixed_bf16", {"data": 4}, shard)


@pytest.mark.slow
def test_checkpoints_go_to_every_tier_and_come_back(tmp_path: Path):
    step = make_step(True, CLIPPED)
    one = on({"data": 4}, step, tmp_path / "one")
    other = small.shard_train_step(step, mesh=small.mesh(data=8), stage=3)
    state, _ = one(one.shard(new_state(True, 4, CLIPPED), batch(0)), batch(0))
    with jzero.Checkpointer(tmp_path / "steps", one, asynchronous=False) as saver:
        assert saver.save(1, state)
    shapes = jax.eval_shape(lambda: new_state(True, 4, CLIPPED))
    plain = jzero.restore(tmp_path / "steps" / "1", other, shapes, batch(0))
    small.assert_same(plain, state)
    with jzero.Checkpointer(tmp_path / "back", other, asynchronous=False) as saver:
        assert saver.save(1, plain)
    again = jzero.restore(tmp_path / "back" / "1", one, shapes, batch(0))
    assert len(in_files(again)) == len(jax.tree.leaves(state))
    small.assert_same(one(again, batch(1))[0], one(state, batch(1))[0])


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [False, True])
def test_resume_brings_parameters_back(guarded: bool, tmp_path: Path):
    """Whatever the state has of them, if the rest is of a step of the files.

    With `apply_if_finite` the integers that rest on the devices are the same after every step.
    """
    tx = optax.adam(1e-2)
    tx = optax.apply_if_finite(tx, 5) if guarded else tx
    step = make_step(True, tx)

    def train_step() -> Any:
        options = policies(tmp_path, resume=True)
        return small.shard_train_step(step, mesh=small.mesh(data=2), **options)

    one = train_step()
    state: Any = one.shard(new_state(True, 4, tx), batch(0))
    for i in range(2):
        state, _ = one(state, batch(i))
    before = jax.tree.map(np.array, state)
    rest = jax.tree.map(
        lambda x: np.zeros_like(x) if getattr(x, "where", "") == "in files" else x, state
    )
    with jzero.Checkpointer(tmp_path / "steps", one, asynchronous=False) as checkpointer:
        checkpointer.save(2, rest)
    del rest
    after = jax.tree.map(np.array, one(state, batch(2))[0])
    del state
    end_of_process()
    other = train_step()
    shapes = jax.eval_shape(lambda: new_state(True, 4, tx))
    nothing = jzero.restore(tmp_path / "steps" / "2", other, shapes)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing) if x.ndim)
    state = other.shard(nothing, batch(0))  # Of the step before the last: that slot is there, too.
    small.assert_same(state, before)
    small.assert_same(other(state, batch(2))[0], after)


# -- evaluations -----------------------------------------------------------------------------------


def forward(state: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh((x * w["scale"][None]) @ w["up"]) @ w["down"], None

    y, _ = jax.lax.scan(layer, x, state["params"]["layers"])
    return y @ state["params"]["head"]


@pytest.mark.parametrize("num", [1, 8])
def test_evaluations_read_the_files_of_a_training(num: int, tmp_path: Path):
    train_step = on({"data": num}, make_step(True, CLIPPED), tmp_path)
    state, _ = train_step(train_step.shard(new_state(True, 4, CLIPPED), batch(0)), batch(0))
    files = sorted(tmp_path.rglob("*.tiles"))
    eval_step = jzero.shard_eval_step(forward, like=train_step)
    found = eval_step(state, batch(1))
    wanted = jax.jit(forward)(jax.tree.map(np.array, state), batch(1))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert sorted(tmp_path.rglob("*.tiles")) == files
    transfers = eval_step.describe(state, batch(1)).transfers
    read = {way: sum(x.nbytes for x in transfers if x.direction == way)
            for way in ("from disk", "to device")}  # fmt: skip
    assert read["from disk"] == read["to device"] > 0
    train_step(state, batch(1))
    with pytest.raises(jzero.StateError, match="already donated"):
        eval_step(state, batch(1))


@pytest.mark.parametrize("num", [1, 8])
def test_evaluations_of_what_is_not_trained_have_files_of_their_own(num: int, tmp_path: Path):
    policy = policies(tmp_path)["offload_params"]
    memory = jzero.Memory(params=policy)
    eval_step = jzero.shard_eval_step(forward, mesh=small.mesh(data=num), memory=memory)
    start = {"params": new_state(True, 4, CLIPPED)["params"]}
    placed = eval_step.shard(start)
    assert in_files(placed)
    small.assert_same(placed, start)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tiles")}
    assert len(files) == num
    for state in (placed, placed):
        found, wanted = eval_step(state, batch(1)), jax.jit(forward)(start, batch(1))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tiles")}
    text = " ".join(str(eval_step.describe(placed, batch(1))).split())
    assert "Parameters come from files on NVMe, part by part" in text


# -- refusals --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "in memory": ({"offload": jzero.HostCPU()}, "Use Memory(optimizer=jzero.NVMe("),
    "on the devices": ({"offload": jzero.NoOffload()}, "Use Memory(optimizer=jzero.NVMe("),
    "in buckets": ({"offload": jzero.PinnedHost()}, "read, updated and written with their optimizer state"),
    "another path": ({"offload": jzero.NVMe("/elsewhere")}, "have path='/run' and '/elsewhere'"),
    "in place": ({"offload": jzero.NVMe("/run", in_place=True)}, "have in_place=False and True"),
    "device_bytes": ({"offload": jzero.NVMe("/run", device_bytes=1)}, "Drop device_bytes, or move it to"),
    "no bytes": ({"offload_params": 0}, "Memory: params=0. It is a policy"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str):
    given, text = REFUSED[what]
    options = {"offload": jzero.NVMe("/run"), "offload_params": jzero.NVMe("/run")} | given
    with pytest.raises(jzero.OptionError, match=re.escape(text)):
        jzero.shard_train_step(make_step(True, CLIPPED), **grouped(**options))


def test_too_little_room_on_the_devices_names_the_policy(tmp_path: Path):
    train_step = on({"data": 1}, make_step(True, CLIPPED), tmp_path, device_bytes=100)
    with pytest.raises(jzero.OptionError, match=r"Use NVMe\(path, device_bytes=\d+\) or more"):
        train_step.plan(new_state(True, 4, CLIPPED), batch(0))


def test_evaluations_that_are_refused():
    with pytest.raises(jzero.OptionError, match="device_bytes=0. It is how many bytes of param"):
        jzero.NVMe("/run", device_bytes=0)
    memory = jzero.Memory(optimizer=jzero.HostCPU(), params=jzero.PinnedHost())
    pinned = small.shard_train_step(make_step(True, CLIPPED), memory=memory)
    with pytest.raises(jzero.OptionError, match="those of the train step are in PinnedHost"):
        jzero.shard_eval_step(forward, like=pinned, memory=jzero.Memory(params=jzero.NVMe("/run")))
    with pytest.raises(jzero.OptionError, match="Drop resume, in_place and gradients"):
        jzero.shard_eval_step(forward, memory=jzero.Memory(params=jzero.NVMe("/run", resume=True)))
