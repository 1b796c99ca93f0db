"""Arguments that are no batch, whose rows lie elsewhere, or are not as many as devices divide."""

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    WIDTH,
    cross_entropies,
    dense,
    dense_params,
    labelled,
    learn,
    learning,
    mlp,
    mlp_start,
    normals,
    start,
    update,
    with_arguments,
)
from ._program import Program, program, relative


def _weighted_step(state, x, label, class_weights):
    def loss_fn(params):
        weights = class_weights[label]
        losses = cross_entropies(mlp(params, x), label)
        return (weights * losses).sum() / weights.sum(), {"losses": losses}

    return learn(state, loss_fn)


def _class_weights(i, dtype, num=CLASSES):
    return (np.random.default_rng(30 + i).uniform(0.2, 2, num).astype(dtype),)


@program
def class_weights():
    """Ten numbers beside the batch: it is no matter how they are laid out."""
    batches = with_arguments(labelled, _class_weights)
    return Program(init=mlp_start, batches=batches, step=_weighted_step, covers="A4")


@program
def table_of_eight_learning_rates():
    """As many as devices; a counter in the state says which one counts."""

    def init(dtype):
        return {**mlp_start(dtype), "step": jnp.zeros((), jnp.int32)}

    def step(state, x, label, rates):
        def loss(params):
            return cross_entropies(mlp(params, x), label).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        rate = rates[(3 * state["step"] + 1) % rates.shape[0]]
        grads = jax.tree.map(lambda g: rate * g, grads)
        return update(state, grads, step=state["step"] + 1), {"loss": value, "rate": rate}

    def rates(i, dtype):
        return (np.linspace(0.1, 2.5, 8).astype(dtype),)

    batches = with_arguments(labelled, rates)
    return Program(init=init, batches=batches, step=step, covers="A4 I4")


@program
def two_integers_that_are_no_key():
    """uint32[2], like an old key: a range of classes."""

    def step(state, x, label, limits):
        low, high = limits[0].astype(jnp.int32), limits[1].astype(jnp.int32)

        def loss_fn(params):
            counts = (label >= low) & (label < high)
            losses = cross_entropies(mlp(params, x), label)
            loss = jnp.where(counts, losses, 0).sum() / counts.sum()
            return loss, {"counted": counts.sum(), "limits": limits}

        return learn(state, loss_fn)

    def limits(i, dtype):
        return (np.asarray([i, i + 6], np.uint32),)

    batches = with_arguments(labelled, limits)
    return Program(init=mlp_start, batches=batches, step=step, covers="A4")


def _recurrent(dtype):
    params = {
        "inner": dense_params(0, WIDTH, WIDTH, dtype),
        "outer": dense_params(2, FEATURES, WIDTH, dtype),
        "head": dense_params(4, WIDTH, CLASSES, dtype),
    }
    return start(params)


def _time_major_step(state, sequence, label):
    def loss_fn(params):
        def turn(h, token):
            h = jnp.tanh(dense(params["inner"], h) + dense(params["outer"], token))
            return h, h.mean(-1)

        first = jnp.zeros((sequence.shape[1], WIDTH), sequence.dtype)
        last, means = jax.lax.scan(turn, first, sequence)
        losses = cross_entropies(dense(params["head"], last), label)
        return losses.mean(), {"losses": losses, "means": means, "logits": last.T}

    return learn(state, loss_fn)


def _time_major(length):
    batches = normals((length, ROWS, FEATURES), seed=8, labels=ROWS)

    return batches


@program
def time_major():
    """[time, rows, features]: the caller names the dim of the rows."""
    return Program(
        init=_recurrent,
        batches=_time_major(6),
        step=_time_major_step,
        covers="A4 I2",
        row_dims={"sequence": 1},
    )


@program
def time_major_without_a_word():
    """The same with eight time steps that lie over the devices: slower, and as exact."""
    return Program(init=_recurrent, batches=_time_major(8), step=_time_major_step, covers="A4 I2")


@program
def nested_arguments():
    """Dicts, tuples and None; rows of several dtypes, a Python number, other numbers of rows."""

    def step(state, batch, extra, strength):
        images = batch["image"].astype(state["params"][0]["kernel"].dtype) / 255

        def loss_fn(params):
            losses = cross_entropies(mlp(params, images), batch["label"])
            losses = jnp.where(batch["is_real"], losses, 0)
            few, none = extra
            assert none is None
            loss = losses.sum() / batch["is_real"].sum() + strength * (mlp(params, few) ** 2).mean()
            weights = batch["half"].astype(images.dtype)
            return loss + 0.1 * (weights * losses).mean(), {"losses": losses}

        return learn(state, loss_fn)

    def batches(num_steps, dtype):
        rng = np.random.default_rng(9)

        def batch():
            rows = {
                "image": rng.integers(0, 256, (ROWS, FEATURES)).astype(np.uint8),
                "label": rng.integers(0, CLASSES, ROWS).astype(np.int16),
                "is_real": rng.uniform(size=ROWS) < 0.8,
                "half": rng.normal(size=ROWS).astype(np.float16),
            }
            return rows, (rng.normal(size=(16, FEATURES)).astype(dtype), None), 0.3

        return [batch() for _ in range(num_steps)]

    return Program(init=mlp_start, batches=batches, step=step, covers="A4")


@program
def affinities_between_rows():
    """A matrix [rows, rows] beside the rows: both of its dims are the batch's."""

    def loss(params, x, affinity):
        z = mlp(params, x)
        smooth = affinity @ z / affinity.sum(1, keepdims=True)
        laplacian = jnp.diag(affinity.sum(0)) - affinity
        energy = jnp.einsum("ik,ij,jk->", z, laplacian, z) / x.shape[0]
        loss = ((z - smooth) ** 2).mean() + 0.02 * energy + 0.1 * ((z - 1) ** 2).mean()
        return loss, {"smooth": smooth, "energy": energy}

    def affinity(i, dtype):
        return (np.random.default_rng(50 + i).uniform(size=(ROWS, ROWS)).astype(dtype),)

    batches = with_arguments(normals((ROWS, FEATURES)), affinity)
    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A4 A8")


def _uneven(num_rows):
    def batches(num_steps, dtype):
        return labelled(num_steps, dtype, rows=num_rows)

    return batches


def _uneven_step(state, x, label):
    def loss_fn(params):
        logits = mlp(params, x)
        losses = cross_entropies(logits, label)
        outputs = {
            "losses": losses,
            "rows": x.shape[0],
            "correct": (logits.argmax(-1) == label).sum(),
            "largest": logits.max(0),
            "smallest": losses.min(),
            "order": jnp.argsort(losses),
            "sums": jnp.cumsum(losses),
        }
        return losses.mean(), outputs

    return learn(state, loss_fn)


@program
def rows_27():
    """Eight devices hold 28."""
    return Program(init=mlp_start, batches=_uneven(27), step=_uneven_step, covers="I4")


@relative
def rows_5():
    """Fewer rows than devices."""
    return Program(init=mlp_start, batches=_uneven(5), step=_uneven_step, covers="I4")


@relative
def rows_of_one():
    """A single row."""
    return Program(init=mlp_start, batches=_uneven(1), step=_uneven_step, covers="I4")


@program
def rows_that_change_from_step_to_step():
    """32 rows, then 27, then 20: each is its own whole batch, and a remainder ends an epoch."""

    def batches(num_steps, dtype):
        sizes = [32, 27, 20]
        return [
            (x[: sizes[i % 3]], label[: sizes[i % 3]])
            for i, (x, label) in enumerate(labelled(num_steps, dtype))
        ]

    return Program(init=mlp_start, batches=batches, step=_uneven_step, covers="I4")


@program
def rows_27_that_couple():
    """27 rows: statistics, pairs of rows, a mask, a division by what padding would hold as zero."""

    def step(state, x, label):
        def loss_fn(params):
            h = dense(params[0], x)
            h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
            h = h / jnp.linalg.norm(x, axis=-1, keepdims=True)
            z = dense(params[1], jnp.tanh(h + jnp.broadcast_to(params[0]["bias"], h.shape)))
            pairs = z @ z.T / CLASSES
            same = label[:, None] == label[None]
            losses = -jnp.where(same, jax.nn.log_softmax(pairs), 0).sum(1) / same.sum(1)
            return losses.mean() + 1 / (z**2).sum(), {"losses": losses, "pairs": same.sum()}

        (_, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        return update(state, grads), outputs

    return Program(init=mlp_start, batches=_uneven(27), step=step, covers="I4 A8")
