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
    with_arguments,
)
from ._program import Program, program, relative


def _autoencoder(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, FEATURES)))


def _regressor(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))


REGRESSION = normals((ROWS, FEATURES), (ROWS,))


@program
def first_rows_as_pictures():
    """The outputs show a few reconstructions, and all rows' errors in order."""

    def loss(params, x):
        made = mlp(params, x)
        errors = ((made - x) ** 2).mean(-1)
        shown = {"first": made[:3], "last": made[-1], "middle": made[10:17:2]}
        pairs = jnp.concatenate([x[:4], made[:4]])
        return errors.mean(), {**shown, "pairs": pairs, "errors": errors}

    batches = normals((ROWS, FEATURES))
    return Program(init=_autoencoder, batches=batches, step=learning(loss), covers="A7 I4")


@program
def hardest_rows():
    """Online hard example mining: top-k of the losses over the batch, with the rows' numbers."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        worst, rows = jax.lax.top_k(losses, 6)
        return worst.mean(), {"worst": worst, "rows": rows, "classes": label[rows]}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@program
def reversed_rows():
    """Mixup with the reversed batch, and outputs in reversed order."""

    def step(state, x, label):
        mixed = 0.7 * x + 0.3 * x[::-1]

        def loss_fn(params):
            logits = mlp(params, mixed)
            losses = 0.7 * cross_entropies(logits, label) + 0.3 * cross_entropies(
                logits, jnp.flip(label, 0)
            )
            return losses.mean(), {"backwards": losses[::-1], "labels": jnp.flip(label)}

        return learn(state, loss_fn)

    return Program(init=mlp_start, batches=labelled, step=step, covers="A7 I2")


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
def worst_row():
    """Arg-reductions along the batch, and what is looked up with their results."""

    def loss(params, x, label):
        logits = mlp(params, x)
        losses = cross_entropies(logits, label)
        worst, best = losses.argmax(), losses.argmin()
        of_classes = logits.argmax(0)
        chosen = jnp.take_along_axis(logits, of_classes[None], axis=0)
        loss = losses.mean() + 0.5 * losses[worst] - 0.1 * losses[best] + 0.1 * chosen.mean()
        return loss, {"worst": worst, "best": best, "row": x[worst], "top": of_classes}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@program
def neighbouring_rows():
    """Differences to the row before, rolls, and pads: the batch is a time series."""

    def loss(params, x):
        z = mlp(params, x)
        steps = z[1:] - z[:-1]
        around = z - jnp.roll(z, 3, axis=0)
        padded = jnp.pad(z, ((2, 1), (0, 0)))
        bend = padded[:-3] - 2 * padded[1:-2] + padded[2:-1]
        loss = (steps**2).mean() + 0.1 * (around**2).mean() + 0.1 * (bend**2).mean()
        loss += ((z - x) ** 2).mean()
        return loss, {"steps": steps, "diff": jnp.diff(z.mean(-1)), "bend": bend}

    batches = normals((ROWS, FEATURES))
    return Program(init=_autoencoder, batches=batches, step=learning(loss), covers="A7 I2")


@program
def halves_of_the_batch():
    """The first half are positives, the second negatives; then one concatenated batch, and halves."""

    def loss(params, x):
        half = x.shape[0] // 2

        scores = mlp(params, jnp.concatenate([x, 0.5 * x]))[:, 0]
        wide, narrow = jnp.split(scores, 2)
        positive, negative = wide[:half], wide[half:]
        pairs = jnp.stack([positive, negative], axis=1).reshape(-1)
        loss = jax.nn.softplus(negative - positive).mean() + 0.1 * (narrow**2).mean()
        return loss + 0.1 * (scores**2).mean(), {"pairs": pairs, "narrow": narrow}

    batches = normals((ROWS, FEATURES))
    return Program(init=_regressor, batches=batches, step=learning(loss), covers="A7 I2")


@program
def permuted_rows():
    """Row numbers as an argument: gathers, and scatters that put rows, add to them and keep maxima."""

    def numbers(i, dtype):
        rng = np.random.default_rng(90 + i)
        return rng.permutation(ROWS).astype(np.int32), rng.integers(0, 5, ROWS).astype(np.int32)

    def loss(params, x, label, order, group):
        logits = mlp(params, x)
        losses = cross_entropies(logits[order], label[order])
        put_back = jnp.zeros_like(losses).at[order].set(losses)
        sums = jnp.zeros(5, losses.dtype).at[group].add(losses)
        largest = jnp.full(5, -1.0, losses.dtype).at[group].max(losses)
        loss = (losses * jnp.roll(put_back, 1)).mean() + (sums**2).mean() / 100
        loss += 0.1 * largest.mean()
        return loss, {"losses": losses, "put_back": put_back, "largest": largest}

    batches = with_arguments(labelled, numbers)
    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A7 I2")


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
def lookup_by_arange():
    """logp[arange(B), y], and its scatter in the backward pass."""

    def loss(params, x, label):
        log_probs = jax.nn.log_softmax(mlp(params, x))
        chosen = log_probs[jnp.arange(x.shape[0]), label]
        smooth = log_probs.at[jnp.arange(x.shape[0]), label].mul(0.5)
        return -chosen.mean() - 0.1 * smooth.mean(), {"chosen": chosen}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


@relative
def ranks():
    """Ranks among all rows, by argsort of argsort and by searchsorted; a rank correlation."""

    def loss(params, x, y):
        scores = mlp(params, x)[:, 0]
        rank = jnp.argsort(jnp.argsort(scores))
        wanted = jnp.searchsorted(jnp.sort(y), y)
        gaps = (rank - wanted).astype(x.dtype) / x.shape[0]
        loss = (jax.lax.stop_gradient(gaps) * scores).mean() + 0.1 * ((scores - y) ** 2).mean()
        concordant = ((rank[:, None] > rank[None]) & (wanted[:, None] > wanted[None])).sum()
        return loss, {"rank": rank, "wanted": wanted, "concordant": concordant}

    return Program(init=_regressor, batches=REGRESSION, step=learning(loss), covers="A7")


@program
def windows_of_rows():
    """Moving means, maxima and a convolution along the batch."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        sums = jax.lax.reduce_window(losses, 0.0, jax.lax.add, (5,), (1,), "SAME")
        largest = jax.lax.reduce_window(losses, -jnp.inf, jax.lax.max, (4,), (4,), "VALID")
        smooth = jnp.convolve(losses, jnp.asarray([0.2, 0.5, 0.3], x.dtype), mode="same")
        loss = (sums**2).mean() / 25 + largest.mean() + (smooth**2).mean()
        return loss, {"sums": sums, "largest": largest, "smooth": smooth}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A7 I2")


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
