"""Windows whose start runs over the end: JAX clamps it, and jzero then shards what they select."""

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import (
    FEATURES,
    ROWS,
    WIDTH,
    learn,
    learning,
    mlp,
    mlp_params,
    normal,
    normals,
    start,
    with_arguments,
)
from ._program import Program, program, relative

WINDOW = 16
STARTS = (3, 29, 16)  # the second is 13 too large


def _starts(i, dtype):
    return (np.int32(STARTS[i % len(STARTS)]),)


def _regressor(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))


@program
def minibatch_from_a_table():
    """Features and, in the last column, targets: a window of the rows trains, where an argument says."""

    def step(state, table, at):
        x = jax.lax.dynamic_slice(table, (at, 0 * at), (WINDOW, FEATURES))
        y = jax.lax.dynamic_slice(table, (at, 0 * at + FEATURES), (WINDOW, 1))

        def loss_fn(params):
            errors = (mlp(params, x) - y)[:, 0]
            return (errors**2).mean(), {"errors": errors, "targets": y}

        return learn(state, loss_fn)

    batches = with_arguments(normals((ROWS, FEATURES + 1)), _starts)
    return Program(init=_regressor, batches=batches, step=step, covers="A7 I2")


@program
def table_of_positions():
    """Learned positions from an offset on, one for each row of the batch, and some behind each other."""

    def init(dtype):
        params = {
            "mlp": mlp_params(dtype, (FEATURES, WIDTH, 1)),
            "table": normal(9, (48, FEATURES), dtype),
        }
        return start(params)

    def loss(params, x, at):
        own = jax.lax.dynamic_slice_in_dim(params["table"], at, ROWS)
        near = jax.lax.dynamic_slice(params["table"], (at + 5, at - 3), (8, 4))
        made = mlp(params["mlp"], x + own)
        return (made**2).mean() + (near**2).mean(), {"made": made, "own": own}

    batches = with_arguments(normals((ROWS, FEATURES)), _starts)
    return Program(init=init, batches=batches, step=learning(loss), covers="A7 I2")


@program
def window_behind_the_largest_loss():
    """Trains on the rows from the worst one on, of which there are fewer than the window holds."""

    def step(state, x, y):
        errors = (mlp(state["params"], x)[:, 0] - y) ** 2
        worst = jnp.argmax(errors + jnp.arange(ROWS, dtype=x.dtype))
        rows, targets = (jax.lax.dynamic_slice_in_dim(a, worst, WINDOW) for a in (x, y))

        def loss_fn(params):
            losses = (mlp(params, rows)[:, 0] - targets) ** 2
            return losses.mean(), {"losses": losses, "worst": worst}

        return learn(state, loss_fn)

    return Program(
        init=_regressor, batches=normals((ROWS, FEATURES), (ROWS,)), step=step, covers="A7 I2"
    )


@program
def windows_under_vmap():
    """`jax.vmap` makes gathers of windows: one for each row, and a single one for all of them."""

    def init(dtype):
        params = {
            "mlp": mlp_params(dtype, (FEATURES, WIDTH, 1)),
            "table": normal(9, (ROWS, FEATURES), dtype),
        }
        return start(params)

    def loss(params, x, at):
        def window(i, size):
            return jax.lax.dynamic_slice(params["table"], (i, i - 20), (size, 4))

        each = jax.vmap(lambda i: window(i, 3))(at).mean((1, 2))
        (shared,) = jax.vmap(lambda i: window(i, ROWS // 2))(at.max()[None])
        made = mlp(params["mlp"], x)[:, 0] + each + (x[:, :4] * shared).sum(1)
        return (made**2).mean(), {"made": made}

    batches = with_arguments(
        normals((ROWS // 2, FEATURES)),
        lambda i, dtype: (np.random.default_rng(i).integers(0, 40, ROWS // 2).astype(np.int32),),
    )
    return Program(init=init, batches=batches, step=learning(loss), covers="A7 I2")


@relative
def scans_and_windows_of_each_row():
    """Cumulative products and extremes, windows of any function, and writes to places, along the features."""

    def found(x, at):
        lax = jax.lax
        zero, one = (jnp.asarray(value, x.dtype) for value in (0, 1))
        window = ((1, 3), (1, 1), "SAME")
        every = lambda a, b: a + b + a * b  # noqa: E731  # XLA is told no name for it
        rows = jnp.arange(x.shape[0])
        taken, _ = lax.approx_max_k(x, 4)
        parts = [
            lax.cumprod(1 + 0.1 * x, axis=1) + lax.cummax(x, axis=1) + lax.cummin(x, axis=1),
            lax.cumlogsumexp(x, axis=1),
            lax.reduce_window(0.1 * x, zero, every, *window),
            lax.reduce_window(x, jnp.asarray(jnp.inf, x.dtype), lax.min, *window),
            lax.reduce(0.1 * x, zero, every, (1,))[:, None] * one,
            jnp.tile(taken, (1, 2)),
            x.at[rows, at].min(0.5) + x.at[rows, at].max(-0.5) + x.at[rows, at].multiply(2),
        ]
        return jnp.tanh(0.2 * sum(parts))

    def step(state, x, at):
        features = jax.lax.stop_gradient(found(x, at))

        def loss_fn(params):
            made = mlp(params, features)
            return (made**2).mean(), {"made": made}

        return learn(state, loss_fn)

    batches = with_arguments(
        normals((ROWS, FEATURES)),
        lambda i, dtype: (np.random.default_rng(i).integers(0, FEATURES, ROWS).astype(np.int32),),
    )
    return Program(init=_regressor, batches=batches, step=step, covers="A7 I2")
