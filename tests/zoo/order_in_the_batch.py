"""Rows in order: the first, the largest, the middle, those before, and what comes back in rows."""

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import (
    FEATURES,
    ROWS,
    WIDTH,
    cross_entropies,
    labelled,
    learn,
    learning,
    mlp,
    mlp_params,
    mlp_start,
    normals,
    start,
)
from ._program import Program, program


def _regressor(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))


REGRESSION = normals((ROWS, FEATURES), (ROWS,))


@program
def hardest_rows():
    """Online hard example mining: top-k of the losses over the batch, with the rows' numbers."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        worst, rows = jax.lax.top_k(losses, 6)
        return worst.mean(), {"worst": worst, "rows": rows, "classes": label[rows]}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@program
def sorted_rows():
    """Trimmed mean: losses are sorted, the ends dropped; and the order itself as an output."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        ordered = jnp.sort(losses)
        kept = ordered[4:-4]
        down = jnp.sort(losses, descending=True)
        return kept.mean(), {"ordered": ordered, "order": jnp.argsort(losses), "down": down}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@program
def cumulated_rows():
    """Sums, maxima and log-sums of all rows so far, forwards and backwards."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        sums, largest = jnp.cumsum(losses), jax.lax.cummax(losses)
        after = jax.lax.cumsum(losses, reverse=True)
        logs = jax.lax.cumlogsumexp(losses)
        shrinking = jnp.cumprod(1.0 - 0.01 * losses)
        counts = jnp.cumsum(label == 3)
        loss = (sums * after).mean() / 100 + largest.mean() + logs.mean() - shrinking.mean()
        outputs = {"sums": sums, "largest": largest, "after": after, "counts": counts}
        return loss, {**outputs, "shrinking": shrinking}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@program
def median_of_the_losses():
    """Rows above the median count double; quantiles, percentiles and a median of features."""

    def loss(params, x, y):
        errors = jnp.abs(mlp(params, x)[:, 0] - y)
        middle = jnp.median(errors)
        above = errors > jax.lax.stop_gradient(middle)
        quantiles = jnp.quantile(errors, jnp.asarray([0.1, 0.25, 0.9], x.dtype))
        loss = jnp.where(above, 2 * errors, errors).mean() + 0.1 * middle + quantiles.sum()
        columns = jnp.median(x, axis=0)
        return loss, {"middle": middle, "quantiles": quantiles, "columns": columns}

    return Program(init=_regressor, batches=REGRESSION, step=learning(loss), covers="A7")


@program
def slice_of_rows_at_a_moving_place():
    """Each step trains on a window of the batch, where a counter in the state says."""

    def init(dtype):
        return {**mlp_start(dtype), "at": jnp.asarray(3, jnp.int32)}

    def step(state, x, label):
        at = state["at"] % x.shape[0]  # may hang over the end: dynamic slices then start earlier
        rows = jax.lax.dynamic_slice_in_dim(x, at, 12)
        labels = jax.lax.dynamic_slice_in_dim(label, at, 12)

        def loss_fn(params):
            losses = cross_entropies(mlp(params, rows), labels)
            everywhere = jnp.zeros(x.shape[0], x.dtype)
            everywhere = jax.lax.dynamic_update_slice_in_dim(everywhere, losses, at, 0)
            row = jax.lax.dynamic_index_in_dim(x, at, keepdims=False)
            loss = losses.mean() + 0.1 * (mlp(params, row) ** 2).mean()
            return loss, {"everywhere": everywhere, "row": row}

        return learn(state, loss_fn, at=state["at"] + 13)

    return Program(init=init, batches=labelled, step=step, covers="A7 I2")


@program
def discounted_returns():
    """The batch is one episode: advantages by a reversed scan and an associative scan along it."""

    def step(state, x, reward, is_last):
        keep = jnp.where(is_last, 0.0, 0.9).astype(x.dtype)

        def turn(after, now):
            after = now[0] + now[1] * after
            return after, after

        first = jnp.zeros((), x.dtype)
        _, returns = jax.lax.scan(turn, first, (reward, keep), reverse=True)

        def combine(right, left):
            return left[0] + left[1] * right[0], left[1] * right[1]

        again, _ = jax.lax.associative_scan(combine, (reward, keep), reverse=True)

        def loss_fn(params):
            values = mlp(params, x)[:, 0]
            errors = (values - returns) ** 2
            return errors.mean(), {"returns": returns, "again": again, "values": values}

        return learn(state, loss_fn)

    def batches(num_steps, dtype):
        rng = np.random.default_rng(7)
        return [
            (
                rng.normal(size=(ROWS, FEATURES)).astype(dtype),
                rng.normal(size=ROWS).astype(dtype),
                rng.uniform(size=ROWS) < 0.15,
            )
            for _ in range(num_steps)
        ]

    return Program(init=_regressor, batches=batches, step=step, covers="A7 I2")
