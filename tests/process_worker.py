"""What each process of tests/test_processes.py does: `process_worker.py SCENARIO FOLDER`.

The folder is shared; what a process found out is in `<process>.json` there when it ends.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import resource
import signal
import sys
import time
import timeit
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero.checkpoint import _chunks
from jzero.offload.memory import _available
from jzero.processes import _agreement
from small import grouped

# -- the same trajectory -------------------------------------------------------------------------

NUM_STEPS = 3
TRAININGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 3, accumulate 2": {"stage": 3, "accumulate": 2},
    "stage 3 in each process": {"stage": 3, "param_axes": "local"},
    "stage 3, on the host": {"stage": 3, "offload": jzero.HostCPU()},
    "stage 3, in files": {"stage": 3},  # of the run's folder
    "stage 3, parameters in files": {"stage": 3},
}
# By how many processes; each compiles for itself.
TWO = ["stage 3, accumulate 2", "stage 3, on the host", "stage 3, parameters in files"]
NAMES = {2: TWO, 4: list(TRAININGS)}
tx = optax.adam(1e-2)


def new_state():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "table": jax.random.normal(keys[0], (37, 16)),  # its rows rest padded
        "out": jax.random.normal(keys[1], (16, 16)),
        "bias": jnp.zeros(16),  # Eight devices have two each: files take no leaf of one number.
    }
    return {"params": params, "opt_state": tx.init(params), "step": 0, "key": jax.random.key(2)}


def host_state():
    """The same as NumPy arrays, but for what NumPy does not have."""
    state = new_state()
    arrays = jax.tree.map(np.asarray, {name: state[name] for name in ("params", "opt_state")})
    return state | arrays


def loss_fn(params, rows, key):
    hidden = jnp.tanh(params["table"][rows].mean(axis=1))
    hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((hidden @ params["out"] + params["bias"][None]) ** 2)


def train_step(state, rows, key):
    kept_key, noise_key = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], rows, key)
    noise = 1e-3 * jax.random.normal(noise_key, (16,))
    grads = grads | {"bias": grads["bias"] + noise}
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    new_state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
    return new_state | {"key": kept_key}, loss


def global_batch(step):
    return np.random.default_rng(step).integers(0, 37, size=(16, 5), dtype=np.int32)


def own_rows(batch, mesh):
    split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    rows = np.split(batch, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(split, rows)


def training(devices, name, folder):
    """Trains and evaluates twice: what was reported, each loss, and the whole state after the last step."""
    options, files = TRAININGS[name], folder / f"nvme-{jax.process_count()}"
    if "in files" in name:
        gradients = "parameters" in name
        options = options | {"offload": jzero.NVMe(files, host_bytes=2**16, gradients=gradients)}
    if "parameters" in name:
        window = jzero.NVMe(files, host_bytes=2**16, device_bytes=2**14, gradients=True)
        options = options | {"offload_params": window}
    mesh = jax.sharding.Mesh(np.reshape(devices, (-1, 2)), ("node", "local"))
    if "param_axes" not in options:
        mesh = jax.sharding.Mesh(devices, ("data",))
    sharded = jzero.shard_train_step(train_step, mesh=mesh, **grouped(min_shard_bytes=0, **options))
    losses, keys = [], jax.random.split(jax.random.key(1), NUM_STEPS)
    ways = (
        (sharded.init(new_state), own_rows),
        (sharded.shard(host_state()), lambda batch, _: batch),
    )
    for state, feed in ways:
        for i in range(NUM_STEPS):
            state, loss = sharded(state, feed(global_batch(i), mesh), keys[i])
            losses.append(float(loss))
        eval_step = jzero.shard_eval_step(loss_fn, like=sharded)
        losses.append(float(eval_step(state["params"], feed(global_batch(9), mesh), keys[0])))
        # What no devices divide, every process has whole.
        losses.append(float(eval_step(state["params"], global_batch(9)[:13], keys[0])))
    described = sharded.describe(state, global_batch(0), keys[0])
    # Which collectives are the cheapest depends on the links between processes.
    report = str(dataclasses.replace(described, traffic=()))
    # A line may end anywhere in a long path.
    report = "".join(report.split()).replace(str(files), "files")
    whole = sharded.unshard(state)
    whole["key"] = jax.random.key_data(whole["key"])
    return report, losses, jax.tree.map(np.asarray, whole)


def train(folder):
    found = {}
    for name in NAMES[jax.process_count()]:
        report, losses, state = training(jax.devices(), name, folder)
        leaves = jax.tree.leaves(state)
        digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        found[name] = {"report": report, "losses": losses, "digest": digest.hexdigest()}
        if jax.process_index() == 0:
            np.savez(folder / f"{name}.npz", *leaves)
    return found


# -- checkpoints ---------------------------------------------------------------------------------


class Place:
    """A data iterator's: which step is next."""

    def __init__(self, step=0, process=0):
        self.state = {"step": step, "process": process}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def go_on(folder, num_steps, mesh=None):
    """Trains from the latest checkpoint, and saves the state after `num_steps` steps."""
    mesh = mesh or jax.make_mesh((jax.device_count(),), ("data",))
    sharded = jzero.shard_train_step(train_step, mesh=mesh, axes=jzero.Axes(min_shard_bytes=0))
    losses, keys, place = [], jax.random.split(jax.random.key(1), 2 * NUM_STEPS), Place()
    with jzero.Checkpointer(folder / "steps", sharded) as checkpointer:
        if checkpointer.latest_step() is None:
            state = sharded.init(new_state)
        else:
            state = checkpointer.restore(jax.eval_shape(new_state), data_iterator=place)
        for i in range(place.state["step"], num_steps):
            state, loss = sharded(state, own_rows(global_batch(i), mesh), keys[i])
            losses.append(float(loss))
        checkpointer.save(num_steps, state, Place(num_steps))
        checkpointer.wait()
        restored = checkpointer.restore(jax.eval_shape(new_state))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(own_values(x), own_values(y))
    return losses


def own_values(x):
    """What this process holds of a leaf."""
    return [np.asarray(x.data) for x in of_keys(getattr(x, "storage", x)).addressable_shards]


def first_half(folder):
    return go_on(folder, NUM_STEPS)


def second_half(folder):
    return go_on(folder, 2 * NUM_STEPS)


def uneven_places(folder):
    """Data iterators that stand in different places can only come back to as many processes."""
    sharded = jzero.shard_train_step(train_step)
    with jzero.Checkpointer(folder / "uneven", sharded) as checkpointer:
        if checkpointer.latest_step() is None:
            state = sharded.init(new_state)
            checkpointer.save(1, state, Place(7, jax.process_index()))
        place = Place()
        try:
            checkpointer.restore(jax.eval_shape(new_state), data_iterator=place)
        except jzero.CheckpointError as error:
            return str(error)
    return place.state


def own_examples(size):
    """Grain's iterator of this process, in batches of so many examples of all processes together."""
    dataset = grain.MapDataset.range(50).seed(1).shuffle().repeat()
    dataset = dataset[jax.process_index() :: jax.process_count()]
    return iter(dataset.to_iter_dataset().batch(size // jax.process_count()))


def data_goes_on(folder, step=2):
    """What is read after the latest step, until another is saved; before, two processes fail to restore."""
    sharded, shapes = jzero.shard_train_step(train_step), jax.eval_shape(new_state)
    batches, failures = own_examples(12), []
    with jzero.Checkpointer(folder / "steps", sharded) as checkpointer:
        if jax.process_count() > 1:
            filtered = iter(grain.MapDataset.range(50).to_iter_dataset().filter(bool))
            for of_one in (None, filtered):
                own = of_one if is_odd_one() else batches
                failures.append(told(checkpointer.restore, shapes, data_iterator=own))
            failures.append(batches.get_state())
        if checkpointer.latest_step() is None:
            state = sharded.init(new_state)
        else:
            state = checkpointer.restore(shapes, data_iterator=batches)
        found = [next(batches).tolist() for _ in range(3)]
        checkpointer.save(step, state, batches)
    return found, failures


PRIME = 5003


def prime_state():
    """Of a size of which a shard is not cut into equal chunks, nor the other leaf between its devices."""
    return {"w": jnp.arange(2.0 * PRIME), "odd": jnp.arange(PRIME * 3.0).reshape(PRIME, 3)}


def decay(state, rows):
    return jax.tree.map(lambda x: x - 0.0 * rows.mean(), state)


def prime_shards(folder):
    """Saves and restores leaves of which processes have parts of the same chunks."""
    before = _chunks.MAX_BYTES, _chunks.MIN_BYTES
    _chunks.MAX_BYTES, _chunks.MIN_BYTES = 1000, 400
    sharded = jzero.shard_train_step(decay, axes=jzero.Axes(min_shard_bytes=0))
    state = sharded.init(prime_state)
    with jzero.Checkpointer(folder / "prime", sharded) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(jax.eval_shape(prime_state))
    _chunks.MAX_BYTES, _chunks.MIN_BYTES = before
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(own_values(x), own_values(y))
    return [own_values(x)[0].shape for x in jax.tree.leaves(restored)]


def one_cannot_write(folder):
    """What each process is told when one of them cannot write its part, and whether all save it then."""
    sharded = jzero.shard_train_step(train_step)
    state = sharded.init(new_state)
    with jzero.Checkpointer(folder / "steps", sharded) as checkpointer:

        def save():
            checkpointer.save(2, state)
            checkpointer.wait()

        checkpointer.save(1, state)
        checkpointer.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if is_odd_one():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        _, *texts = told(save)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        saved = checkpointer.save(2, state)
        checkpointer.wait()
        return texts, saved, checkpointer.steps()


class Broken(Place):
    def get_state(self):
        if is_odd_one():
            raise RuntimeError("the loader of process 1 is broken")
        return self.state


def unlike_checkpoints(folder):
    """What each process is told when they save or restore unlike things; then all save and restore alike."""
    sharded = jzero.shard_train_step(train_step)
    here, shapes, found = jax.process_index(), jax.eval_shape(new_state), {}
    state = sharded.init(new_state)
    with jzero.Checkpointer(folder / "steps", sharded) as checkpointer:
        acts = {
            "steps saved": lambda: checkpointer.save(8 + here, state),
            "states": lambda: checkpointer.save(8, state if here else state["params"]),
            "iterators": lambda: checkpointer.save(8, state, Place() if here else None),
            "an iterator fails": lambda: checkpointer.save(8, state, Broken()),
            "steps restored": lambda: checkpointer.restore(shapes, step=2 - here),
            "paths restored": lambda: jzero.restore(
                folder / "steps" / str(2 - here), sharded, shapes
            ),
            "shapes restored": lambda: checkpointer.restore(shapes if here else shapes["params"]),
        }
        for step in (1, 2):
            checkpointer.save(step, state)
        for name, act in acts.items():
            found[name] = told(act)
        checkpointer.save(3, state, Place(3, here))
        checkpointer.restore(shapes, data_iterator=Place())
        return found, checkpointer.steps()


def locked_out(folder):
    """What each process is told when another job writes in the directory."""
    sharded = jzero.shard_train_step(train_step)
    with jzero.Checkpointer(folder / "locked", sharded) as checkpointer:
        try:
            checkpointer.save(1, sharded.init(new_state))
        except jzero.CheckpointError as error:
            return str(error)


def until_preempted(folder):
    """Steps until one of the processes is told to end."""
    sharded = jzero.shard_train_step(train_step)
    state, batch = sharded.init(new_state), global_batch(0)
    rows = own_rows(batch, jax.make_mesh((jax.device_count(),), ("data",)))
    with jzero.Checkpointer(folder / "steps", sharded, save_interval_steps=10**6) as checkpointer:
        for step in range(1, 10**6):
            state, _ = sharded(state, rows, jax.random.key(0))
            stop = checkpointer.preempted(step)
            checkpointer.save(step, state, force=stop)
            if step == 5:
                (folder / f"{jax.process_index()}.ready").touch()
            if stop:
                return step


# -- state on the hosts --------------------------------------------------------------------------


def in_a_bucket(folder):
    """The steps that two processes have saved in a bucket, and whether they restore them."""
    sharded = jzero.shard_train_step(decay, axes=jzero.Axes(min_shard_bytes=0))
    state = sharded.init(prime_state)
    url, environment = json.loads((folder / "bucket.json").read_text())
    os.environ.update(environment)
    own = folder / str(jax.process_index())
    with jzero.Checkpointer(url, sharded, max_to_keep=2, staging=own) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state, Place(step))
        restored = checkpointer.restore(jax.eval_shape(prime_state), data_iterator=Place())
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
        same = all(np.array_equal(*map(own_values, pair)) for pair in pairs)
        return checkpointer.steps(), same and not list(own.glob("*/*"))


def uneven_state():
    return new_state() | {"uneven": jnp.arange(37 * 7.0).reshape(37, 7)}


def on_hosts(folder):
    """A state in the memory of both processes: made, placed, moved, saved and restored; and refused."""
    axes = {"param_axes": "local", "optimizer_axes": "local"}
    devices = np.reshape(jax.devices(), (jax.process_count(), -1))
    flat = jax.sharding.Mesh(devices.ravel(), ("data",))
    nodes = jax.sharding.Mesh(devices, ("node", "local"))
    whole = jax.tree.map(lambda x: np.asarray(x) if np.ndim(x) else x, uneven_state())
    host = sharded(train_step, mesh=flat, offload=jzero.HostCPU())
    # All of it on each host.
    each = sharded(train_step, mesh=nodes, offload=jzero.HostCPU(), **axes)
    steps = {"host": host, "plain": sharded(train_step, mesh=flat), "each": each}
    given = {name: step.shard(whole) for name, step in steps.items()}
    given["init"] = host.init(uneven_state)
    for state in given.values():
        check_parts(state, whole)
        for use in (jnp.sum, jax.jit(jnp.sum), jax.jit(jax.grad(lambda x: (x**2).sum()))):
            np.testing.assert_allclose(use(state["uneven"]), use(whole["uneven"]), rtol=1e-6)
        for step in steps.values():
            check_parts(step.shard(state), whole)
    check_whole(host.unshard(given["host"]), whole)
    with jzero.Checkpointer(folder / "steps", host) as checkpointer:
        checkpointer.save(1, given["host"])
    with jzero.Checkpointer(folder / "each", each) as checkpointer:
        checkpointer.save(1, given["each"])
    for path in ("steps", "each"):
        for step in steps.values():
            restored = jzero.restore(folder / path / "1", step, jax.eval_shape(uneven_state))
            check_parts(restored, whole)
    leaf = given["host"]["uneven"]
    whole_leaf = given["each"]["uneven"]
    np.testing.assert_allclose(
        host.shard(given["each"])["uneven"].storage.buffers[0], leaf.storage.buffers[0]
    )
    return {
        "devices": [device.id for device in leaf.storage.placement.devices],
        "rows": [buffer.shape[0] for buffer in leaf.storage.buffers],
        "rows_of_each": [buffer.shape[0] for buffer in whole_leaf.storage.buffers],
        "read": told(np.asarray, leaf),
        "too_little": told(without_memory, folder, is_odd_one(), host.init, uneven_state),
        "all_too_little": told(without_memory, folder, True, host.shard, whole),
        "enough": told(host.shard, whole),
    }


def of_keys(x):
    """The data of keys, and other leaves as they are."""
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def check_whole(state, whole):
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(of_keys(x).addressable_data(0), of_keys(y), rtol=1e-6)


def check_parts(state, whole):
    """What this process has of each leaf, padded, is what the leaf has there."""
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        x, y = of_keys(getattr(x, "storage", x)), np.asarray(of_keys(y))
        if isinstance(x, jax.Array):
            parts = [(shard.index, shard.data) for shard in x.addressable_shards]
        else:
            found = x.sharding.addressable_devices_indices_map(x.shape)
            parts = [(found[d], x) for d, x in zip(x.placement.devices, x.buffers, strict=True)]
        widths = [(0, new - old) for old, new in zip(y.shape, x.shape, strict=True)]
        y = np.pad(y, widths) if widths else y
        for index, part in parts:  # Initialisers that were compiled round otherwise.
            np.testing.assert_allclose(part, y[index], rtol=1e-6)


def without_memory(folder, here, act, *args):
    before, root = _available.ROOT, folder / f"root of {jax.process_index()}"
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "meminfo").write_text("MemAvailable: 1 kB")
    _available.ROOT = root if here else before
    try:
        return act(*args)
    finally:
        _available.ROOT = before


# -- disagreements -------------------------------------------------------------------------------

W, X = np.ones((12, 12), np.float32), np.ones((12, 12), np.float32)


def sgd(w, x, rate=0.1, noise=0.0):
    return w - rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w) + noise


def sharded(step_fn=sgd, **options):
    return jzero.shard_train_step(step_fn, **grouped(**{"min_shard_bytes": 0} | options))


def is_odd_one():
    return jax.process_index() == 1


def differs(here, elsewhere):
    """One thing on process 1, and another on all others."""
    return here if is_odd_one() else elsewhere


def state_structure():
    state = {"w": W, **differs({"ema": W}, {})}
    sharded(lambda state, x: {**state, "w": sgd(state["w"], x)})(state, X)


def constant():
    noise = jnp.arange(12.0) + jax.process_index() % 2
    sharded(lambda w, x: sgd(w, x, noise=noise))(W, X)


def on_devices(devices):
    return sharded(mesh=jax.sharding.Mesh(devices, ("data",)))


def order_of_devices():
    on_devices(sorted(jax.devices(), key=lambda d: d.id, reverse=is_odd_one()))(W, X)


def another_call():
    if is_odd_one():
        sharded().shard(W)
    else:
        sharded().init(lambda: jnp.ones((12, 12)))


CASES = {
    "stage": lambda: sharded(stage=differs(1, 3))(W, X),
    "option": lambda: sharded(gather=differs("keep", None))(W, X),
    "batch_shape": lambda: sharded()(W, X[: differs(6, 12)]),
    "batch_that_one_cannot_read": lambda: sharded()(W, differs("x", X)),
    "state_structure": state_structure,
    "hyperparameter": lambda: sharded(functools.partial(sgd, rate=differs(0.2, 0.1)))(W, X),
    "constant": constant,
    "order_of_devices": order_of_devices,
    "initial_shape": lambda: sharded().init(lambda: jnp.ones((differs(24, 12), 12))),
    "values_of_a_state": lambda: sharded().shard({"w": W + is_odd_one()}),
    "another_call": another_call,
    "values_of_a_batch": lambda: sharded()(W, X + jax.process_index()),
    "batch_on_one_process": lambda: sharded()(W, jax.device_put(X, jax.local_devices()[0])),
    # The others need not come.
    "own_mesh": lambda: is_odd_one() and on_devices(jax.local_devices())(W, X),
}


def told(case, *args, **kwargs):
    """What who calls it is told: nothing, or the error."""
    try:
        case(*args, **kwargs)
    except (jzero.JzeroError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []


def absence(folder):
    """One process comes when the others have given up."""
    before, _agreement.PATIENCE_SECONDS = _agreement.PATIENCE_SECONDS, 5.0
    while is_odd_one() and len(list(folder.glob("*.gave_up"))) < jax.process_count() - 1:
        time.sleep(0.1)
    found = told(lambda: sharded()(W, X))
    _agreement.PATIENCE_SECONDS = before
    (folder / f"{jax.process_index()}.gave_up").touch()
    return found


def disagree(folder):
    found = {name: told(case) for name, case in CASES.items()}
    found["absence"] = absence(folder)
    # Whoever has met so often still meets.
    total = np.asarray(sharded(stage=0)(W, X)).sum()
    # One may have asked of a step where its state is: it knows before the others do.
    for ask in (
        lambda step: step.describe(X, {"w": W}),
        lambda step: step.state_shardings({"w": W}, X),
    ):
        elsewhere = sharded(lambda x, s: {"w": sgd(s["w"], x)}, stage=0)
        if is_odd_one():
            ask(elsewhere)
        total += np.asarray(elsewhere(X, {"w": W})["w"]).sum()
    return found | {"agreement": float(total)}


# -- differences in what has run before ----------------------------------------------------------


def rows(num):
    """So many rows, of each process its own."""
    split = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.P("data"))
    return jax.make_array_from_process_local_data(split, np.ones((num, 12), np.float32))


def with_rows(w, x):
    """Gathers the rows, so that processes with unlike batches send each other unlike amounts."""
    return sgd(w, x) + jnp.sort(x.sum(axis=1))[0]


def slowly(step_fn):
    """After some steps in two shapes, long enough to meet before each change."""
    train_step, state, shapes = sharded(step_fn), W, [rows(4), rows(8)]
    for i in range(24):
        state = jax.block_until_ready(train_step(state, shapes[i > 1]))
        time.sleep(0.05)
    return train_step, state, shapes


def unseen():
    """Steps too short to meet before each change, and collectives that do not mind."""
    train_step, state, shapes = sharded(), W, [rows(4), rows(8)]
    for i in range(201):
        state = jax.block_until_ready(train_step(state, shapes[i % 2]))
    return train_step, state, differs(*shapes)


def note_difference(folder):
    (folder / f"{jax.process_index()}.differs").write_text(str(time.time()))


def differing(folder, odd_batch):
    """The odd process passes `odd_batch`; all go on until they are ended."""
    train_step, state, shapes = slowly(with_rows)
    note_difference(folder)
    if is_odd_one() and odd_batch == "unreadable":
        assert told(lambda: train_step(state, "x"))[0] == "BatchError"
        time.sleep(3600)
    state = train_step(state, odd_batch if is_odd_one() else shapes[1])
    for _ in range(100_000):
        state = jax.block_until_ready(train_step(state, shapes[1]))


def differ_fewer(folder):
    """One process has a batch less than the others."""
    train_step, state = sharded(), W
    for _ in range(differs(2, 3)):
        note_difference(folder)
        state = jax.block_until_ready(train_step(state, rows(4)))


def differ_known(folder):
    differing(folder, rows(4))


def differ_unreadable(folder):
    differing(folder, "unreadable")


def differ_unseen(folder):
    """Then a checkpoint."""
    train_step, state, batch = unseen()
    # On a busy machine a step takes so long that the processes compare their calls meanwhile.
    told(lambda: jax.block_until_ready(train_step(state, batch)))
    began = time.monotonic()
    saved = told(_agreement.confirm, "Checkpointer.save")
    seconds = time.monotonic() - began
    return {"saved": saved, "again": told(train_step, W, X), "seconds": seconds}


def differ_at_the_end(folder):
    """Then nothing more."""
    train_step, state, batch = unseen()
    note_difference(folder)
    jax.block_until_ready(train_step(state, batch))


def differ_slowly_and_unshard(folder):
    """One process waits for the others when they look."""
    train_step, state, shapes = slowly(sgd)
    return told(lambda: train_step.unshard(train_step(state, differs(*shapes))))


def costs(folder):
    """Microseconds of what every call does, and of a change."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    before = _agreement.agree("costs", mesh, lambda: {"program": ["the same"]})
    peers = _agreement._peers_of(mesh)
    assert peers is not None
    peers.log.meets_from = 10**9
    names = itertools.cycle("ab")

    def same():
        _agreement.check("costs")
        _agreement.goes_on(mesh, before.name)

    acts = {"same": same, "change": lambda: _agreement.goes_on(mesh, next(names))}
    # The least of several means: of what it costs, not of what else the machine does.
    return {name: 1e3 * min(timeit.repeat(act, number=1000)) for name, act in acts.items()}


# -- one start for several -----------------------------------------------------------------------


def one_after_the_other(folder):
    """Scenarios after which processes are as before, each in its own folder; the last changes meetings."""
    found = {}
    for scenario in (
        uneven_places, data_goes_on, prime_shards, one_cannot_write, locked_out, unlike_checkpoints,
        costs,
    ):  # fmt: skip
        own = folder / scenario.__name__
        own.mkdir(exist_ok=True)
        found[scenario.__name__] = scenario(own)
    return found


# -- a process that ends -------------------------------------------------------------------------


def step_forever(folder):
    """Steps until a signal or an error; says when the first steps are done."""
    train_step, state = sharded(), W
    batch = rows(12)
    for i in range(1_000_000):
        state = jax.block_until_ready(train_step(state, batch))
        if i == 10:
            (folder / f"{jax.process_index()}.ready").touch()


def main():
    scenario, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    # On a busy machine a heartbeat may be late; only who waits for a dead process is in a hurry.
    heartbeat = 10 if scenario == "step_forever" else 100
    jax.distributed.initialize(
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
        heartbeat_timeout_seconds=heartbeat,
    )
    found = globals()[scenario](folder)
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
