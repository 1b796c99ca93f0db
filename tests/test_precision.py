"""16-bit parameters with masters or stochastic rounding, and dtypes of reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import programs
import small


def init_params(dtype):
    keys = jax.random.split(jax.random.key(0))
    return {
        "w": (jax.random.normal(keys[0], (16, 32)) / 4).astype(dtype),
        "v": (jax.random.normal(keys[1], (32, 8)) / 6).astype(dtype),
        "scale": jnp.ones(8),  # stays float32
    }


def loss_fn(params, x):
    h = jnp.tanh(x.astype(params["w"].dtype) @ params["w"])
    return jnp.mean(jnp.square((h @ params["v"]).astype(jnp.float32) * params["scale"][None] - 1))


def make_step(tx, dtype=None):
    def step(state, x):
        params, opt_state = state

        def loss_of(params):
            return loss_fn(cast(params, dtype), x)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


def cast(params, dtype):
    return params if dtype is None else {**params, **{k: params[k].astype(dtype) for k in "wv"}}


def batches(num=5):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(64, 16)).astype(np.float32) for _ in range(num)]


def run(step, state, xs):
    for x in xs:
        state, metrics = step(state, x)
    return jax.tree.map(np.asarray, (state, metrics))


def init(tx, dtype=jnp.bfloat16):
    params = init_params(dtype)
    return params, tx.init(params)


# -- masters ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_masters_train_as_float32_parameters_that_the_model_casts():
    """To the bit, on one device: float16 or bfloat16 parameters are their masters, rounded."""
    for dtype in (jnp.bfloat16, jnp.float16):
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
        masters = jzero.master_weights(tx)
        (params, opt_state), _ = run(jax.jit(make_step(masters)), init(masters, dtype), batches(50))
        wide = cast(init_params(dtype), jnp.float32)
        (expected, inner), _ = run(
            jax.jit(make_step(tx, dtype)), (wide, tx.init(wide)), batches(50)
        )
        for name in ("w", "v"):
            np.testing.assert_array_equal(opt_state.masters[name], expected[name])
            np.testing.assert_array_equal(params[name], expected[name].astype(dtype))
        np.testing.assert_array_equal(params["scale"], expected["scale"])
        jax.tree.map(np.testing.assert_array_equal, opt_state.inner, inner)


def test_float32_parameters_have_no_masters():
    state = jzero.master_weights(optax.sgd(0.1)).init(init_params(jnp.bfloat16))
    assert [leaf.dtype for leaf in jax.tree.leaves(state.masters)] == [jnp.float32] * 2
    assert state.masters["scale"] == optax.MaskedNode()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_in_shards(stage):
    tx = jzero.master_weights(optax.sgd(0.1, momentum=0.9))
    step = make_step(tx)
    train_step = small.shard_train_step(step, stage=stage, mesh=small.mesh(data=8), microbatches=2)
    (_, opt_state), metrics = run(train_step, init(tx), batches())
    (_, expected), expected_metrics = run(jax.jit(step), init(tx), batches())
    # A gradient summed in another order may round to another bfloat16.
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=2e-3)
    for name in ("w", "v"):
        np.testing.assert_allclose(
            opt_state.masters[name], expected.masters[name], rtol=0.02, atol=2e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "num_bytes"), [(0, 14), (2, 2 + 12 / 8), (3, 14 / 8)])
def test_bytes_per_parameter_are_the_papers(stage, num_bytes):
    tx = jzero.master_weights(optax.adamw(1e-3))
    state = programs.abstract_state(programs.Model(dtype=jnp.bfloat16), tx)
    half = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), state.params)
    state = state.replace(params=half, opt_state=jax.eval_shape(tx.init, half))
    train_step = small.shard_train_step(
        programs.train_step, stage=stage, mesh=AbstractMesh((8,), ("data",))
    )
    found = train_step.describe(state, programs.tokens())
    counters = 2 * 4
    assert found.plan.nbytes_at_rest() == num_bytes * programs.num_params(state) + counters
    # Gradients and gathered parameters are bfloat16 with no cast of the model's own.
    assert (
        found.elements("all-gather", "float32") == found.elements("reduce-scatter", "float32") == 0
    )


# -- stochastic rounding ---------------------------------------------------------------------------


def test_updates_too_small_for_bfloat16_count_in_the_mean():
    tx = jzero.stochastic_rounding(optax.sgd(1e-4))
    params = jnp.ones(40_000, jnp.bfloat16)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(20):
        updates, state = update(jnp.ones_like(params), state, params)
        params = optax.apply_updates(params, updates)
    mean = float(params.astype(jnp.float32).mean())
    assert abs(mean - (1 - 20e-4)) < 1e-4  # rounding to nearest would leave 1.0
    assert params.dtype == jnp.bfloat16


@pytest.mark.slow
def test_rounding_goes_to_the_two_neighbours_and_keeps_what_bfloat16_holds():
    values = jnp.array([1.0, -3.5, 0.0, jnp.inf, 1 + 1 / 256, -1 - 1 / 256], jnp.float32)

    def rounded(seed):
        tx = jzero.stochastic_rounding(optax.identity(), seed)
        params = jnp.zeros(6, jnp.bfloat16)
        updates, _ = tx.update(values.astype(jnp.float32), tx.init(params), params)
        return np.asarray(optax.apply_updates(params, updates), np.float32)

    results = np.stack([rounded(seed) for seed in range(64)])
    np.testing.assert_array_equal(results[:, :4], np.tile(values[:4], (64, 1)))
    assert set(results[:, 4]) == {1.0, 1 + 1 / 128}
    assert 16 < (results[:, 4] == 1.0).sum() < 48
    assert set(results[:, 5]) == {-1.0, -1 - 1 / 128}


@pytest.mark.parametrize(("stage", "num_devices"), [(0, 2), (1, 8), (3, 8)])
def test_shards_round_as_the_whole_would(stage, num_devices):
    """To the bit: gradients of integers are exact, whatever the order of their sum."""
    tx = jzero.stochastic_rounding(optax.sgd(1e-3))

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda w: jnp.mean(x @ w.astype(jnp.float32)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    xs = [np.random.default_rng(i).integers(-8, 8, (64, 16)).astype(np.float32) for i in range(5)]
    params = jnp.ones((16, 32), jnp.bfloat16)
    train_step = small.shard_train_step(step, stage=stage, mesh=small.mesh(data=num_devices))
    actual, _ = run(train_step, (params, tx.init(params)), xs)
    expected, _ = run(jax.jit(step), (params, tx.init(params)), xs)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert len(np.unique(actual[0])) > 2


def test_random_bits_are_made_for_the_shard_alone():
    tx = jzero.stochastic_rounding(optax.sgd(1e-3))

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda w: jnp.mean(x @ w.astype(jnp.float32)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state)

    params = jax.ShapeDtypeStruct((8, 2**18), jnp.bfloat16)
    state = (params, jax.eval_shape(tx.init, params))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    lowered = small.shard_train_step(step, stage=2).lower(state, x)
    whole_words = 4 * 8 * 2**18
    gradient_and_activations = 3 * whole_words
    assert lowered.compile().memory_analysis().temp_size_in_bytes < gradient_and_activations


# -- dtypes of reductions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "compute", "reduce_dtype"),
    [(1, jnp.float32, jnp.bfloat16), (3, jnp.bfloat16, jnp.float32), (0, jnp.bfloat16, None)],
)
def test_gradients_travel_in_reduce_dtype(stage, compute, reduce_dtype):
    state = programs.abstract_state(programs.Model(dtype=compute))
    train_step = small.shard_train_step(
        programs.train_step, stage=stage, comm=jzero.Comm(reduce_dtype=reduce_dtype), microbatches=2
    )
    found = train_step.describe(state, programs.tokens())
    wire = jnp.dtype(reduce_dtype or compute)
    op = "reduce-scatter" if stage else "all-reduce"
    moved = {c.dtype for c in found.traffic if c.op == op and c.elements > 1}
    assert moved == {wire.name}
    # The loss is no gradient.
    assert {c.dtype for c in found.traffic if c.elements == 1} == {"float32"}


@pytest.mark.slow
def test_float16_sums_do_not_overflow_where_their_mean_does_not():
    def step(w, x):
        return w, {"g": jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32)))(w)}

    w = jnp.zeros((8, 8), jnp.float16)
    x = jnp.full((16, 8), 3e5 / 8, jnp.float16)  # each device's gradient is near float16's 65504
    for stage in (0, 3):
        _, metrics = small.shard_train_step(step, stage=stage)(w, x)
        np.testing.assert_allclose(np.asarray(metrics["g"], np.float32), 3e5 / 64, rtol=1e-2)


def test_leaves_that_are_alike_round_apart():
    tx = jzero.stochastic_rounding(optax.sgd(1e-3))
    params = {"a": jnp.ones((64, 8), jnp.bfloat16), "b": jnp.ones((64, 8), jnp.bfloat16)}
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    a, b = (np.asarray(x, np.float32) for x in optax.apply_updates(params, updates).values())
    assert len(np.unique(a)) > 1
    assert (a != b).any()
