"""State on the hosts beside mesh axes over which XLA shards: each device's part over all axes rests there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo
from host_updates import watched  # noqa: F401
from jzero.offload import _file_updates

pytest.importorskip("llvmlite")

WIDTH, HIDDEN, TOKENS, BATCH = 16, 32, 21, 16
AUTO_SPECS = {r"table|up": P(None, "model"), r"down": P("model", None)}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
MESHES = [(4, 2), (2, 4), (1, 8)]
NUM_CUT = TOKENS * WIDTH + 2 * WIDTH * HIDDEN


def mesh_of(data: int, model: int, other: str = "model") -> jax.sharding.Mesh:
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", other), (AxisType.Auto,) * 2, devices=devices)


def new_state(tx: Any, dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, dtype)

    # 21 rows are padded for 2 and for 4 devices; nothing cuts the scale but data axes.
    params = {"table": weights(TOKENS, WIDTH), "up": weights(WIDTH, HIDDEN),
              "down": weights(HIDDEN, WIDTH), "scale": jnp.ones(WIDTH, dtype)}  # fmt: skip
    return params, tx.init(params)


def make_step(tx: Any, axis: str | None = "model", layers: bool = False, unroll: bool = False):
    """One layer, or with `layers` a scan over `LAYERS`, which may be unrolled."""

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return x if axis is None else jax.lax.with_sharding_constraint(x, spec)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        hidden = constrain(jnp.tanh((x * w["scale"][None]) @ w["up"]), P(None, axis))
        return x + constrain(hidden @ w["down"], P(None, None)), None

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        tokens, wanted = batch
        x = jax.nn.one_hot(tokens, TOKENS, dtype=params["table"].dtype) @ params["table"]
        weights = {name: params[name] for name in ("up", "down", "scale")}
        if unroll:
            for i in range(LAYERS):
                x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        else:
            x, _ = jax.lax.scan(layer, x, weights) if layers else layer(x, weights)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - wanted))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


def sharded(tx: Any, data: int, model: int, **options: Any) -> Any:
    options = {"offload": jzero.HostCPU(), "auto_specs": AUTO_SPECS, **options}
    return small.shard_train_step(
        make_step(tx), mesh=mesh_of(data, model), axis_names="data", **options
    )


def assert_trains(train_step: Any, tx: Any, layers: bool = False) -> Any:
    """As one device does with the whole batch, every leaf; returns the last state."""
    expected = new_layers(tx) if layers else new_state(tx)
    state = train_step.shard(jax.tree.map(jnp.copy, expected), batches()[0])
    plain = jax.jit(make_step(tx, None, layers))
    for batch in batches():
        state, metrics = train_step(state, batch)
        expected, wanted = plain(expected, batch)
        zoo.assert_trees_close(zoo.to_host(metrics), zoo.to_host(wanted), zoo.FP32, "metrics")
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    return state


def batches(num: int = 4) -> list[Any]:
    rng = np.random.default_rng(1)
    return [(rng.integers(0, TOKENS, BATCH), rng.normal(size=(BATCH, WIDTH)).astype(np.float32))
            for _ in range(num)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), MESHES)
def test_two_bytes_of_each_parameter_cross_in_each_direction(data, model, watched):  # noqa: F811
    """Each device's own part; what no axis of the model cuts, at each place along it."""
    down, up = watched
    tx = jzero.master_weights(optax.sgd(0.1, momentum=0.9))
    train_step = sharded(tx, data, model)
    state, expected = new_state(tx, jnp.bfloat16), new_state(tx, jnp.bfloat16)
    state = train_step.shard(state, batches()[0])
    plain = jax.jit(make_step(tx, None))
    rows = -TOKENS % data  # The table's rows are padded.
    due = 2 * (NUM_CUT + rows * WIDTH + WIDTH * model)
    for batch in batches():
        down.clear()
        up.clear()
        state, metrics = train_step(state, batch)
        expected, wanted = plain(expected, batch)
        assert (down.pop("bfloat16"), up.pop("bfloat16")) == (due, due)
        assert (down, up) == ({}, {})
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=5e-3)
    masters = zip(*map(jax.tree.leaves, (state[1].masters, expected[1].masters)), strict=True)
    for leaf, master in masters:
        np.testing.assert_allclose(leaf, master, rtol=0.02, atol=2e-3)
    rounded = jax.tree.map(lambda master: np.asarray(master.astype(jnp.bfloat16)), state[1].masters)
    jax.tree.map(np.testing.assert_array_equal, zoo.to_host(state[0]), rounded)
    report = train_step.describe(state, batches()[0])
    for direction in ("to host", "to device"):
        crossed = [x for x in report.transfers if x.direction == direction and x.elements > 1]
        assert data * model * sum(x.nbytes for x in crossed) == due


def test_a_ratio():
    assert_trains(sharded(CLIPPED, 2, 2, offload=jzero.HostCPU(ratio=0.6)), CLIPPED)


@pytest.mark.slow
def test_moments_that_no_axis_of_the_model_cuts():
    """A pattern for parameters alone: moments rest over the data axes, and the host sends whole rows."""
    only_params = {rf"^state\[0\].*'({names})'": spec for names, spec in
                   {"table|up": P(None, "model"), "down": P("model", None)}.items()}  # fmt: skip
    state = assert_trains(sharded(CLIPPED, 4, 2, auto_specs=only_params), CLIPPED)
    assert state[0]["up"].sharding.spec == P("data", "model")
    storage = state[1][1][0].mu["up"].storage
    assert storage.sharding.spec == P("data")
    assert len(storage.buffers) == 4  # Devices that differ along 'model' share one.


@pytest.mark.slow
def test_beside_an_axis_over_which_nothing_rests():
    """As a context axis: activations are cut over it, and leaves are not."""
    train_step = small.shard_train_step(
        make_step(CLIPPED, "context"),
        mesh=mesh_of(4, 2, "context"),
        axes="data",
        memory=jzero.HostCPU(),
    )
    state = assert_trains(train_step, CLIPPED)
    assert len(state[1][1][0].mu["up"].storage.buffers) == 4


@pytest.mark.slow
def test_leaves_come_from_devices_and_go_there():
    train_step = sharded(CLIPPED, 4, 2)
    state, batch = train_step.init(new_state, CLIPPED), batches()[0]
    state, _ = train_step(state, batch)
    back = train_step.unshard(state)
    other = sharded(CLIPPED, 2, 4)
    moved = other.shard(back, batch)
    jax.tree.map(np.testing.assert_array_equal, zoo.to_host(moved), zoo.to_host(back))
    zoo.assert_trees_close(
        zoo.to_host(other(moved, batch)[0]),
        zoo.to_host(train_step(state, batch)[0]),
        zoo.FP32,
        "state",
    )


def test_updates_that_are_not_elementwise_are_refused():
    tx = optax.lamb(1e-2)
    with pytest.raises(jzero.OptionError) as error:
        sharded(tx, 1, 8).plan(new_state(tx), batches()[0])
    text = str(error.value)
    assert "3 groups of leaves" in text  # Not that of the scale, which no axis cuts.
    assert "mu['up']" in text
    assert "does not treat every element alike" in text
    assert "XLA shards them over the mesh axes ['model'], too" in text
    assert "Use jzero.PinnedHost()" in text


@pytest.mark.slow
def test_leaves_that_are_cut_otherwise_are_refused():
    specs = {r"\.mu.*up": P("model", None), **AUTO_SPECS}
    with pytest.raises(jzero.OptionError, match=r"mu\['up'\].*are not all cut alike"):
        sharded(CLIPPED, 1, 8, auto_specs=specs).plan(new_state(CLIPPED), batches()[0])


def test_leaves_in_pinned_memory_visit_in_slices():
    """Of rows of each device's part over all axes."""
    train_step = sharded(CLIPPED, 2, 4, offload=jzero.PinnedHost(600))
    buckets = train_step.plan(new_state(CLIPPED), batches()[0]).buckets
    assert sum(bucket.parts > 1 for bucket in buckets) == 3
    assert max(bucket.nbytes_at_once for bucket in buckets) <= 200
    state = assert_trains(train_step, CLIPPED)
    assert state[1][1][0].mu["up"].sharding.memory_kind == "pinned_host"


# -- parameters on the hosts -------------------------------------------------------------------------

LAYERS = 3
STACK_SPECS = {
    r"table": P(None, "model"), r"up": P(None, None, "model"), r"down": P(None, "model", None)
}  # fmt: skip
ADAMW = optax.adamw(1e-2)
WINDOW = jzero.PinnedHost(2**20)


def new_layers(tx: Any) -> Any:
    (params, _), rng = new_state(tx), np.random.default_rng(2)
    for name in ("up", "down"):
        shape = (LAYERS, *params[name].shape)
        params[name] = jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    params["scale"] = jnp.ones((LAYERS, WIDTH))
    return params, tx.init(params)


def layered(tx: Any, data: int, model: int, unroll: bool = False, **options: Any) -> Any:
    return small.shard_train_step(
        make_step(tx, layers=True, unroll=unroll),
        mesh=mesh_of(data, model),
        axis_names="data",
        **{"offload_params": WINDOW, "auto_specs": STACK_SPECS, **options},
    )


STATES = {"PinnedHost": jzero.PinnedHost(), "HostCPU": jzero.HostCPU()}


def test_layers_are_updated_while_earlier_ones_compute():
    """Gradients are reduced, each place its part, in the iteration that makes them, and leave with it."""
    text = str(
        layered(ADAMW, 4, 2, offload=jzero.HostCPU()).describe(new_layers(ADAMW), batches()[0])
    )
    assert f"in {LAYERS} slices: state[0]['{{down,scale,up}}']" in " ".join(text.split())


OPTIONS: dict[str, dict[str, Any]] = {
    "unrolled": {"unroll": True},
    "a small window": {"offload_params": jzero.PinnedHost(6000)},
    "microbatches": {"accumulate": 2},
    "activations": {"offload_activations": jzero.PinnedHost()},
}


@pytest.mark.slow(but=["HostCPU-activations"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("state", ["HostCPU", "PinnedHost"])
def test_parameters_on_the_hosts_with_other_options(state, name):
    train_step = layered(ADAMW, 2, 4, offload=STATES[state], **OPTIONS[name])
    params, _ = assert_trains(train_step, ADAMW, layers=True)
    for leaf in (params["up"], params["down"]):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert {x.data.nbytes for x in leaf.addressable_shards} == {leaf.nbytes // 8}


@pytest.mark.slow
def test_moments_and_parameters_that_are_cut_otherwise_are_refused():
    only_params = {rf"^state\[0\].*{name}": spec for name, spec in STACK_SPECS.items()}
    train_step = layered(ADAMW, 4, 2, offload=jzero.HostCPU(), auto_specs=only_params)
    with pytest.raises(jzero.OptionError, match=r"mu\['up'\].*are not all cut alike"):
        train_step.plan(new_layers(ADAMW), batches()[0])
    train_step = layered(ADAMW, 4, 2, offload=jzero.PinnedHost(), auto_specs=only_params)
    assert_trains(train_step, ADAMW, layers=True)


@pytest.mark.slow
def test_evaluations_and_checkpoints_of_parameters_on_the_hosts(tmp_path):
    train_step, batch = layered(ADAMW, 4, 2, offload=jzero.HostCPU()), batches()[0]
    state, _ = train_step(train_step.shard(new_layers(ADAMW), batch), batch)

    def loss(state: Any, batch: Any, axis: str | None = "model") -> jax.Array:
        return make_step(ADAMW, axis, layers=True)(state, batch)[1]["loss"]

    found = jzero.shard_eval_step(lambda state, batch: loss(state, batch), like=train_step)
    expected = jax.jit(lambda state, batch: loss(state, batch, None))(zoo.to_host(state), batch)
    np.testing.assert_allclose(found(state, batch), expected, rtol=2e-5)

    with jzero.Checkpointer(tmp_path, train_step, asynchronous=False) as checkpointer:
        checkpointer.save(1, state)
    other = layered(ADAMW, 2, 4, offload=jzero.HostCPU())
    shapes = jax.eval_shape(lambda: new_layers(ADAMW))
    restored = jzero.restore(tmp_path / "1", other, shapes, batch)
    jax.tree.map(np.testing.assert_array_equal, zoo.to_host(restored), zoo.to_host(state))


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_optimizer_state_in_files(tmp_path):
    train_step = sharded(CLIPPED, 2, 4, offload=jzero.NVMe(tmp_path, host_bytes=2**20))
    state = assert_trains(train_step, CLIPPED)
    assert state[1][1][0].mu["up"].where == "in files"
    assert len([*tmp_path.glob("process-0/state-0/*.tiles")]) == 8


@pytest.mark.slow(but=["2-4-True"])
@pytest.mark.parametrize(("data", "model", "gradients"), [(2, 4, True), (1, 8, False)])
def test_parameters_in_files(data, model, gradients, tmp_path):
    files = jzero.NVMe(tmp_path, host_bytes=2**20, gradients=gradients)
    window = jzero.NVMe(tmp_path, host_bytes=2**20, device_bytes=2**20, gradients=gradients)
    train_step = layered(ADAMW, data, model, offload=files, offload_params=window)
    state = assert_trains(train_step, ADAMW, layers=True)
    assert {leaf.where for leaf in jax.tree.leaves(state[0])} == {"in files"}


@pytest.mark.slow
def test_files_say_which_parts_they_have(tmp_path):
    """Parts of two specs may have one shape: a run that goes on with files takes none for the other."""

    def identity(spec: P) -> Any:
        policy = jzero.NVMe(tmp_path, host_bytes=2**20)
        train_step = sharded(ADAMW, 1, 2, offload=policy, auto_specs={r"up|down": spec})
        leaves = train_step.plan(new_state(ADAMW), batches()[0]).leaves
        return _file_updates.identity_of(leaves, mesh_of(1, 2), ("data", "model"))

    columns, rows = identity(P(None, "model")), identity(P("model", None))
    assert len(columns) == 2
    assert all(columns[name] != rows[name] for name in columns)
