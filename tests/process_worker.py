"""What each process of tests/test_processes.py does: `process_worker.py SCENARIO FOLDER`.

The folder is shared; what a process found out is in `<process>.json` there when it ends.
"""

import functools
import hashlib
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero import _processes

# -- the same trajectory -------------------------------------------------------------------------

NUM_STEPS = 3
TRAININGS = {
    "stage 1": {"stage": 1},
    "stage 3, accumulate 2": {"stage": 3, "accumulate": 2},
    "stage 3 in each process": {"stage": 3, "param_axes": "local"},
}
tx = optax.adam(1e-2)


def new_state():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "table": jax.random.normal(keys[0], (37, 16)),  # its rows rest padded
        "out": jax.random.normal(keys[1], (16, 8)),
        "bias": jnp.zeros(8),
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
    noise = 1e-3 * jax.random.normal(noise_key, (8,))
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


def training(devices, options):
    """Trains twice: what was reported, each loss, and the whole state after the last step."""
    mesh = jax.sharding.Mesh(np.reshape(devices, (-1, 2)), ("node", "local"))
    if "param_axes" not in options:
        mesh = jax.sharding.Mesh(devices, ("data",))
    sharded = jzero.shard_train_step(train_step, mesh=mesh, min_shard_bytes=0, **options)
    losses, keys = [], jax.random.split(jax.random.key(1), NUM_STEPS)
    ways = [
        (sharded.init(new_state), own_rows),
        (sharded.shard(host_state()), lambda batch, _: batch),
    ]
    for state, feed in ways:
        for i in range(NUM_STEPS):
            state, loss = sharded(state, feed(global_batch(i), mesh), keys[i])
            losses.append(float(loss))
    report = str(sharded.describe(state, global_batch(0), keys[0]))
    whole = sharded.unshard(state)
    whole["key"] = jax.random.key_data(whole["key"])
    return report, losses, jax.tree.map(np.asarray, whole)


def train(folder):
    found = {}
    for name, options in TRAININGS.items():
        report, losses, state = training(jax.devices(), options)
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
    sharded = jzero.shard_train_step(train_step, mesh=mesh, min_shard_bytes=0)
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
    x = getattr(x, "padded", x)
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(shard.data) for shard in x.addressable_shards]


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


# -- disagreements -------------------------------------------------------------------------------

W, X = np.ones((12, 12), np.float32), np.ones((12, 12), np.float32)


def sgd(w, x, rate=0.1, noise=0.0):
    return w - rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w) + noise


def sharded(step_fn=sgd, **options):
    return jzero.shard_train_step(step_fn, **{"min_shard_bytes": 0} | options)


def is_odd_one():
    return jax.process_index() == 1


def stage():
    sharded(stage=1 if is_odd_one() else 3)(W, X)


def option():
    sharded(gather="keep" if is_odd_one() else None)(W, X)


def batch_shape():
    sharded()(W, X[: 6 if is_odd_one() else 12])


def batch_that_one_cannot_split():
    sharded()(W, X[: 7 if is_odd_one() else 12])


def state_structure():
    state = {"w": W, "ema": W} if is_odd_one() else {"w": W}
    sharded(lambda state, x: {**state, "w": sgd(state["w"], x)})(state, X)


def hyperparameter():
    sharded(functools.partial(sgd, rate=0.2 if is_odd_one() else 0.1))(W, X)


def constant():
    noise = jnp.arange(12.0) + jax.process_index() % 2
    sharded(lambda w, x: sgd(w, x, noise=noise))(W, X)


def order_of_devices():
    devices = sorted(jax.devices(), key=lambda device: device.id, reverse=is_odd_one())
    sharded(mesh=jax.sharding.Mesh(devices, ("data",)))(W, X)


def initial_shape():
    sharded().init(lambda: jnp.ones((24 if is_odd_one() else 12, 12)))


def values_of_a_state():
    sharded().shard({"w": W + is_odd_one()})


def another_call():
    if is_odd_one():
        sharded().shard(W)
    else:
        sharded().init(lambda: jnp.ones((12, 12)))


def values_of_a_batch():
    sharded()(W, X + jax.process_index())


def batch_on_one_process():
    sharded()(W, jax.device_put(X, jax.local_devices()[0]))


def own_mesh():
    if is_odd_one():  # The others need not come.
        sharded(mesh=jax.sharding.Mesh(jax.local_devices(), ("data",)))(W, X)


CASES = [
    stage, option, batch_shape, batch_that_one_cannot_split, state_structure, hyperparameter, constant,
    order_of_devices, initial_shape, values_of_a_state, another_call, values_of_a_batch,
    batch_on_one_process, own_mesh,
]  # fmt: skip


def told(case):
    """What a process that does `case` is told: nothing, or the error."""
    try:
        case()
    except jzero.JzeroError as error:
        return [type(error).__name__, str(error)]
    return []


def absence(folder):
    """One process comes when the others have given up."""
    before, _processes.PATIENCE_SECONDS = _processes.PATIENCE_SECONDS, 5.0
    while is_odd_one() and len(list(folder.glob("*.gave_up"))) < jax.process_count() - 1:
        time.sleep(0.1)
    found = told(lambda: sharded()(W, X))
    _processes.PATIENCE_SECONDS = before
    (folder / f"{jax.process_index()}.gave_up").touch()
    return found


def disagree(folder):
    found = {case.__name__: told(case) for case in CASES}
    found["absence"] = absence(folder)
    # Whoever has met so often still meets.
    total = np.asarray(sharded(stage=0)(W, X)).sum()
    return found | {"agreement": float(total)}


# -- a process that ends -------------------------------------------------------------------------


def step_forever(folder):
    """Steps until a signal or an error; says when the first steps are done."""
    train_step, state = sharded(), W
    split = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.P("data"))
    batch = jax.make_array_from_process_local_data(split, X)
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
