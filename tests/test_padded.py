"""Leaves with no dim that the devices divide: padded at rest, and of their true shape for all else."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo
from small import grouped

VOCABULARY, WIDTH = 53, 11  # both prime


def init(tx):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "table": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "hidden": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 3,
        "bias": jax.random.normal(keys[2], (VOCABULARY,)),
    }
    return params, tx.init(params)


def make_step(tx):
    def step(state, tokens):
        params, opt_state = state

        def loss_fn(params):
            x = jnp.tanh(params["table"][tokens] @ params["hidden"])
            logits = x @ params["table"].T + params["bias"][None]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


def tokens(step=0):
    # 840 is divisible by 1 to 8.
    return jax.random.randint(jax.random.key(step), (840,), 0, VOCABULARY)


def assert_same_training(tx, mesh, num_steps=4):
    step = make_step(tx)
    train_step = small.shard_train_step(step, mesh=mesh)
    reference = jax.jit(step)
    state, expected = train_step.shard(init(tx), tokens()), init(tx)
    for i in range(num_steps):
        state, metrics = train_step(state, tokens(i))
        expected, expected_metrics = reference(expected, tokens(i))
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    # As they rest, and made plain.
    zoo.assert_trees_close(jax.device_get(state), jax.device_get(expected), zoo.FP32, "state")
    whole = jax.device_get(train_step.unshard(state))
    zoo.assert_trees_close(whole, jax.device_get(expected), zoo.FP32, "unshard")
    return train_step, state


def min_max_normalised(offset):
    """A transformation that would show padding in a sum, a mean, a maximum, a minimum, or by NaN.

    Far from zero (`offset`), zeros would be the smallest of all elements, or the largest.
    """

    def update(updates, state, params=None):
        def rescaled(u):
            u = u + offset
            normalised = (u - u.min()) / (u.max() - u.min())
            per_row = normalised / u.max(axis=-1, keepdims=True) - (u / u).mean()
            return per_row * (u != 0).sum() / u.size + jnp.median(normalised)

        return jax.tree.map(rescaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(1e-2),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "far above zero": optax.chain(min_max_normalised(5.0), optax.sgd(1e-2)),
    "far below zero": optax.chain(min_max_normalised(-5.0), optax.sgd(1e-2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_padding_reaches_no_norm_and_no_maximum(tx):
    assert_same_training(tx, small.mesh(data=8))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [3, 6, 7])
def test_every_number_of_devices(num_devices):
    tx = OPTIMIZERS["clipped adamw"]
    train_step, state = assert_same_training(tx, small.mesh(data=num_devices))
    share = -(-VOCABULARY // num_devices)
    table = state[0]["table"]
    assert isinstance(table, jzero.LeafArray)
    shards = table.storage.addressable_shards
    assert [s.data.shape for s in shards] == [(share, WIDTH)] * num_devices
    plan = train_step.plan(state, tokens())
    on_a_device = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in (
            leaf.storage if isinstance(leaf, jzero.LeafArray) else leaf
        ).addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert plan.nbytes_at_rest() == on_a_device


def test_rows_that_a_nodes_devices_divide_are_padded_for_all_devices():
    """52 rows move as 56 do: four devices divide them, but the moments lie on eight."""

    def step(state, x):
        w, moment = state
        moment = moment + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - moment, moment), {}

    mesh = AbstractMesh((2, 4), ("node", "local"))
    train_step = small.shard_train_step(step, mesh=mesh, param_axes="local")
    found, expected = (
        train_step.describe((jnp.ones((rows, WIDTH)),) * 2, jnp.ones((8, rows))).traffic
        for rows in (52, 56)
    )
    assert found == expected


@pytest.mark.slow
def test_born_in_its_layout_and_carried_through_jit():
    tx = optax.adam(1e-2)
    train_step = small.shard_train_step(make_step(tx), mesh=small.mesh(AxisType.Explicit, data=8))
    state = train_step.init(lambda: init(tx))
    assert isinstance(state[0]["table"], jzero.LeafArray)
    zoo.assert_trees_close(
        jax.device_get(state), jax.device_get(init(tx)), zoo.FP32, "initial state"
    )
    # Under an outer jit shapes are true, in and out.
    plain = train_step.unshard(state)
    traced = jax.jit(train_step)(plain, tokens())
    assert traced[0][0]["table"].shape == (VOCABULARY, WIDTH)
    outs = train_step(state, tokens())
    zoo.assert_trees_close(jax.device_get(traced), jax.device_get(outs), zoo.FP32, "step")


def test_a_padded_array_reads_as_its_true_shape():
    tx = optax.sgd(0.1)
    train_step = small.shard_train_step(make_step(tx), mesh=small.mesh(data=8))
    placed = jax.device_put(init(tx), train_step.state_shardings(init(tx), tokens()))
    assert placed[0]["table"].sharding.is_fully_replicated  # of its true shape
    state, _ = train_step(placed, tokens())
    table = state[0]["table"]
    assert repr(table) == "LeafArray(shape=(53, 11), dtype=float32, padded to (56, 11))"
    assert (table.shape, table.ndim, table.size) == ((53, 11), 2, 583)
    assert (table.dtype, table.nbytes) == (jnp.float32, 2332)
    assert table.storage.sharding.spec == P("data")
    assert table.sharding.spec == P()  # of its true shape
    assert jnp.zeros_like(table).shape == (53, 11)
    assert (len(table), len(list(table))) == (53, 53)
    assert (table == np.asarray(table)).all()
    with pytest.raises(ValueError, match="truth value"):
        bool(table)
    assert jax.block_until_ready(state)[0]["table"] is table
    whole = np.asarray(table)
    assert whole.shape == (53, 11)
    np.testing.assert_array_equal(jnp.asarray(table), whole)
    np.testing.assert_array_equal(table[-1], whole[-1])
    assert np.array(table, np.float64).dtype == np.float64
    again = pickle.loads(pickle.dumps(table))
    np.testing.assert_array_equal(jnp.asarray(again), whole)
    assert not np.asarray(table.storage)[53:].any()
    moved = small.shard_train_step(make_step(tx), mesh=small.mesh(data=3)).shard(state)
    assert moved[0]["table"].storage.shape == (54, WIDTH)
    small.assert_same(jax.device_get(moved), jax.device_get(state))

    # One program for leaves padded or plain.
    plain = jax.device_get(state)
    state, _ = train_step(state, tokens())
    train_step(plain, tokens())
    assert len(train_step._programs.built) == 1

    with pytest.raises(jzero.StateError, match=r"already donated: state\[0\]\['bias'\]"):
        train_step((state, train_step(state, tokens()))[0], tokens())
    for use in (jnp.sum, jax.jit(jnp.sum), lambda x: x + 1, np.asarray, copy.copy, copy.deepcopy,
                pickle.dumps, jax.block_until_ready):  # fmt: skip
        with pytest.raises(
            jzero.StateError, match=r"LeafArray\(shape=.* was already donated. A step"
        ):
            use(state[0]["bias"])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.bool_])
def test_extremes_of_every_dtype(dtype):
    """The last of 11 rows lies on a device that holds padding too."""

    def step(state, x):
        w, q = state
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - grads, q), (q.max().astype(jnp.float32), q.min().astype(jnp.float32))

    q = jnp.ones((11, 3), dtype).at[10, 0].set(jnp.asarray(7, dtype))
    train_step = small.shard_train_step(step, mesh=small.mesh(data=8))
    state = jnp.ones((11, 3)), q.at[10, 1].set(jnp.asarray(0, dtype))
    found = train_step(state, jnp.ones((8, 11)))[1]
    assert [float(x) for x in found] == [1.0 if dtype == jnp.bool_ else 7.0, 0.0]


def test_padding_that_would_cost_more_than_the_leaf_is_refused():
    state = {"k": jax.ShapeDtypeStruct((16, 12, 16), jnp.float32)}

    def step(state, x):
        grads = jax.grad(lambda s: jnp.mean(jnp.einsum("bi,ijk->bjk", x, s["k"])))(state)
        return jax.tree.map(jnp.subtract, state, grads)

    mesh = AbstractMesh((1024,), ("data",))
    plan = small.shard_train_step(step, mesh=mesh).plan(
        state, jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    )
    assert plan.leaves[0].why_full == "every dim is too small for so many devices"


def test_describe_tells_what_padding_costs():
    table = jax.ShapeDtypeStruct((50257, 1600), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((1024,), jnp.int32)

    def step(table, indices):
        loss, grads = jax.value_and_grad(lambda t: jnp.mean(t[indices] ** 2))(table)
        return table - grads, loss

    mesh = AbstractMesh((1024,), ("data",))
    report = str(jzero.shard_train_step(step, mesh=mesh).describe(table, indices))
    # 50 rows each; 1600 columns would be 2 each, of 2048.
    assert report.endswith("""
1 of 1 leaves is stored padded (jzero.LeafArray), which costs 2.9 KiB on each
  device.
  padded to [51200, 1600]:
    2.9 KiB  state bfloat16[50257,1600]""")


@pytest.mark.slow
def test_nnx_modules_read_padded_parameters():
    model = nnx.Linear(7, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    step_fn, state = jzero.from_nnx(train_step, model, optimizer)
    batch = jnp.ones((8, 7))
    state, loss = small.shard_train_step(step_fn, mesh=small.mesh(data=8))(state, batch)
    expected = train_step(model, optimizer, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    after = jnp.mean(model(batch) ** 2)
    nnx.update((model, optimizer), state)
    assert isinstance(model.kernel.get_value(), jzero.LeafArray)
    np.testing.assert_allclose(jnp.mean(model(batch) ** 2), after, rtol=1e-5)


# -- spared: full rather than padded -----------------------------------------------------------------

SPARED = "it would need padding, which would save less than 1 MiB"
MATRIX = 1024, 1024  # its share of a device, of 8, with Adam's moments: 1.5 MiB


def abstract_plans(shapes, options):
    """What the plan says of each leaf before a step is seen, and after, with Adam's moments."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    tx = optax.adam(1e-2)
    state = params, jax.eval_shape(tx.init, params)

    def step(state, x):
        params, opt_state = state
        loss = lambda p: jnp.mean(x) * sum(jnp.sum(jnp.sin(leaf)) for leaf in p.values())  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mesh = AbstractMesh((8,), ("data",))
    train_step = jzero.shard_train_step(step, mesh=mesh, **grouped(**options))
    before, _ = train_step._placement.leaf_plans(state)
    after = train_step.plan(state, jax.ShapeDtypeStruct((16,), jnp.float32)).leaves
    return before, after


def of(plans, name):
    return [leaf for leaf in plans if leaf.path.endswith(f"[{name!r}]")]


# Each leaf is there three times, with its moments; MATRIX's share is 3 * 2**19 bytes, 1 % of it 15728.
@pytest.mark.parametrize(
    ("shapes", "options", "spared"),
    [
        ({"m": MATRIX, "b": (1001,)}, {}, {"b"}),
        ({"m": MATRIX, "b": (1001,)}, {"min_shard_bytes": 0}, set()),
        ({"m": MATRIX, "b": (1001,)}, {"stage": 1}, {"b"}),
        ({"m": MATRIX, "b": (1001,)}, {"offload": jzero.PinnedHost(2**20)}, {"b"}),
        ({"m": MATRIX, "b": (2001,)}, {}, set()),  # more than 1 %
        ({"m": MATRIX, "a": (501,), "b": (1001,), "c": (1003,)}, {}, {"a"}),  # nor are the larger ones
        ({"m": (32768, 8192), "b": (8191, 33)}, {}, {"b"}),  # 945 kB saved
        ({"m": (32768, 8192), "b": (8191, 41)}, {}, set()),  # 1.1 MiB saved
        ({"m": MATRIX, "b": (1001, 8)}, {}, set()),  # another dim divides
    ],
    ids=str,
)  # fmt: skip
def test_spared_leaves(shapes, options, spared):
    before, after = abstract_plans(shapes, options)
    for name in shapes:
        for leaf in of(before, name) + of(after, name):
            whole_params = options.get("stage") == 1 and leaf.role == "parameter"
            assert (leaf.why_full == SPARED) == (name in spared and not whole_params)
            assert (str(leaf.layout) == "replicated") == (name in spared or whole_params)
    padded = any(leaf.padding for leaf in after)
    assert padded == any(
        name != "m" and name not in spared and shapes[name] != (1001, 8) for name in shapes
    )
    whole = sum(leaf.nbytes for leaf in after if leaf.why_full == SPARED)
    assert 100 * whole <= sum(leaf.nbytes_per_device for leaf in after)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("float64")
def test_spared_leaves_train_as_on_one_device():
    """One is full by its shape, and one since its other dim is that of layers."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    keys = jax.random.split(jax.random.key(0), 3)

    def init():
        params = {
            "m": jax.random.normal(keys[0], MATRIX) / 32,
            "b": jax.random.normal(keys[1], (301,)),
            "layers": jax.random.normal(keys[2], (8, 41)),
        }
        return params, tx.init(params)

    def step(state, x):
        params, opt_state = state

        def loss_fn(params):
            def layer(h, b):
                return h.at[:, :41].add(jnp.sin(b)[None]), None

            h, _ = jax.lax.scan(layer, x @ params["m"], params["layers"])
            return jnp.mean(jnp.tanh(h[:, :301] + params["b"][None]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    train_step, reference = jzero.shard_train_step(step), jax.jit(step)
    state, expected = train_step.init(init), init()
    for i in range(3):
        x = jax.random.normal(jax.random.key(i), (16, 1024))
        (state, loss), (expected, expected_loss) = train_step(state, x), reference(expected, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    zoo.assert_trees_close(
        jax.device_get(state), jax.device_get(expected), zoo.Tolerance(1e-9, 1e-9), "state"
    )
    assert not any(isinstance(leaf, jzero.LeafArray) for leaf in jax.tree.leaves(state))
    leaves = train_step.plan(state, x).leaves
    spared = {leaf.path.split("'")[1] for leaf in leaves if leaf.why_full == SPARED}
    assert spared == {"b", "layers"}
    assert f" {SPARED}: " in " ".join(str(train_step.describe(state, x)).split())
