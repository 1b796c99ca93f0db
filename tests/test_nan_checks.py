"""`jax_debug_nans` and `jax_debug_infs`: a step in parts trains under them, and says what is not finite."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small

ADAM = optax.adam(1e-2, eps=1e-3)
ON_THE_HOST = {"offload_params": jzero.PinnedHost(device_bytes=22000)}
TIERS = pytest.mark.parametrize(
    "options",
    [ON_THE_HOST, ON_THE_HOST | {"offload": jzero.HostCPU()}, {"offload": jzero.HostCPU()}],
    ids=["offload_params", "both", "offload"],
)


def new_state():
    params = {"up": jnp.ones((4, 32, 32)) / 32, "down": jnp.ones((4, 32, 32)) / 32}
    return params, ADAM.init(params)


def step(state, x):
    """`jnp.var` selects, of a constant NaN and a number, the number."""

    def layer(x, w):
        x = jnp.tanh(x @ w["up"]) @ w["down"]
        return x + x.var(axis=-1, keepdims=True), None

    params, opt_state = state
    loss_fn = lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)  # noqa: E731
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "most": x.max()}


@pytest.mark.slow(but=["both"])
@TIERS
def test_a_step_in_parts(options):
    train_step = small.shard_train_step(step, mesh=small.mesh(data=2), min_shard_bytes=0, **options)
    with jax.debug_nans(True):
        state, expected = train_step.init(new_state), new_state()
        for _ in range(2):
            expected, one = jax.jit(step)(expected, jnp.ones((8, 32)))
            state, metrics = train_step(state, jnp.ones((8, 32)))
            assert abs(float(metrics["loss"]) - float(one["loss"])) < 1e-5 * float(one["loss"])
        with pytest.raises(
            FloatingPointError, match="(?s)output 0 beside the state is not finite.*Run a small"
        ):
            train_step(state, np.full((8, 32), np.nan, np.float32))


@pytest.mark.slow
def test_a_delayed_update():
    """A leaf that waits for it is not looked at: that would be an error by itself."""
    delayed = jzero.HostCPU(delayed_update=True, delay_after=0)
    train_step = small.shard_train_step(step, memory=delayed, axes=jzero.Axes(min_shard_bytes=0))
    with jax.debug_nans(True):
        state, metrics = train_step(train_step.init(new_state), jnp.ones((8, 32)))
        assert jnp.isfinite(metrics["loss"])
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(train_step.flush(state)))


def test_infinities():
    train_step = small.shard_train_step(
        step, memory=jzero.HostCPU(), axes=jzero.Axes(min_shard_bytes=0)
    )
    state = train_step.init(new_state)
    with jax.debug_infs(True):
        state, _ = train_step(state, jnp.ones((8, 32)))
        with pytest.raises(FloatingPointError, match="output 1 beside the state is not finite"):
            train_step(state, np.full((8, 32), np.inf, np.float32))


def test_an_evaluation_in_parts():
    def evaluate(params, x):
        return {"out": step((params, ADAM.init(params)), x)[1]["loss"]}

    eval_step = jzero.shard_eval_step(
        evaluate,
        memory=jzero.Memory(params=jzero.PinnedHost(device_bytes=22000)),
        mesh=small.mesh(data=2),
    )
    params = eval_step.shard(new_state()[0])
    with jax.debug_nans(True):
        assert jnp.isfinite(eval_step(params, jnp.ones((8, 32)))["out"])
        with pytest.raises(FloatingPointError, match="shard_eval_step: output 0"):
            eval_step(params, np.full((8, 32), np.nan, np.float32))


def whole_step(w, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grads, loss


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_every_nan_of_one_program(value):
    """JAX looks for the line in an eager `shard_map`, after which it looks at nothing more in this thread."""
    good, bad = np.ones((16, 8), np.float32), np.full((16, 8), value, np.float32)
    bad[:, 1] *= -1
    own = jax.jit(lambda x: x.sum(1))
    error = "leaf 0 of the batch is not finite" if np.isnan(value) else "(?i)invalid value"

    def train():
        for _ in range(2):
            train_step = small.shard_train_step(whole_step, axes=jzero.Axes(min_shard_bytes=0))
            w, _ = train_step(jnp.ones((8, 16)), good)
            own(jnp.asarray(good))
            for _ in range(2):
                with pytest.raises(FloatingPointError, match=error):
                    train_step(w, bad)
                with pytest.raises(FloatingPointError):
                    own(jnp.asarray(bad))
            w, _ = train_step(w, good)

    jax.config.update("jax_debug_nans", True)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # No other test has been in it.
            thread.submit(train).result()
    finally:
        jax.config.update("jax_debug_nans", False)
