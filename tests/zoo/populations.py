"""Losses that are no mean of rows: rows compare themselves with, or are divided by, all others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    WIDTH,
    adamw,
    cross_entropies,
    dense,
    dense_params,
    labelled,
    learn,
    learning,
    mlp,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    with_arguments,
)
from ._program import Program, program


def _regressor(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))


REGRESSION = normals((ROWS, FEATURES), (ROWS,))


def _unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


@program
def rmse():
    """The root of the mean over all rows."""

    def loss(params, x, y):
        errors = (mlp(params, x)[:, 0] - y) ** 2
        return jnp.sqrt(errors.mean()), {"errors": errors}

    return Program(init=_regressor, batches=REGRESSION, step=learning(loss), covers="A8")


def _masks(i, dtype):
    # Lengths differ widely between the parts of the batch that devices would get.
    lengths = np.random.default_rng(20 + i).integers(1, 7, ROWS)
    lengths[-4:] = 0 if i == 1 else 1
    return (np.arange(6)[None] < lengths[:, None],)


@program
def masked_mean():
    """Tokens of rows with different lengths: the sum over the count of all of them."""

    def loss(params, x, mask):
        errors = (mlp(params, x).mean(-1) - 1.0) ** 2
        count = mask.sum()
        loss = jnp.sum(errors * mask) / count
        return loss, {"tokens": count, "errors": jnp.where(mask, errors, 0)}

    batches = with_arguments(normals((ROWS, 6, FEATURES)), _masks)
    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A8 A5")


@program
def weighted_sum_over_sum_of_weights():
    """Weights come with the rows, and some devices' parts would hold only zeros."""

    def weights(i, dtype):
        w = np.random.default_rng(40 + i).uniform(size=ROWS)
        w[8:12] = 0
        return (w.astype(dtype),)

    def loss(params, x, label, weight):
        losses = cross_entropies(mlp(params, x), label)
        return (losses * weight).sum() / weight.sum(), {"weight": weight.sum()}

    batches = with_arguments(labelled, weights)
    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A8")


def _two_towers(dtype, image=FEATURES, text=12, width=WIDTH):
    params = {
        "image": mlp_params(dtype, (image, width, width)),
        "text": mlp_params(dtype, (text, width, width), seed=100),
        "log_scale": jnp.asarray(1.0, dtype),
    }
    return start(params)


def _clip_step(state, image, text):
    def loss_fn(params):
        images = _unit(mlp(params["image"], image))
        texts = _unit(mlp(params["text"], text))
        logits = jnp.exp(params["log_scale"]) * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        forth, back = cross_entropies(logits, labels), cross_entropies(logits.T, labels)
        correct = (logits.argmax(-1) == labels).sum()
        loss = (forth.mean() + back.mean()) / 2
        return loss, {"correct": correct, "forth": forth, "back": back}

    return learn(state, loss_fn)


@program
def clip():
    """Every row's negatives are all other rows."""
    batches = normals((ROWS, FEATURES), (ROWS, 12))
    return Program(init=_two_towers, batches=batches, step=_clip_step, covers="A8 I2")


@program
def clip_where_rows_equal_features():
    """16 rows of 16 features: a dim is known by where it comes from, not by its size."""

    def init(dtype):
        return _two_towers(dtype, 16, 16, 16)

    return Program(init=init, batches=normals((16, 16), (16, 16)), step=_clip_step, covers="A8 I2")


@program
def simclr():
    """Two views of each row in one concatenated batch; a view's own logit is masked out."""

    def loss(params, x, noise):
        views = jnp.concatenate([x, x + 0.3 * noise])
        z = _unit(mlp(params, views))
        num = z.shape[0]
        logits = jnp.where(jnp.eye(num, dtype=bool), -1e9, z @ z.T / 0.5)
        partner = jnp.roll(jnp.arange(num), num // 2)
        losses = cross_entropies(logits, partner)
        return losses.mean(), {"losses": losses, "hits": (logits.argmax(-1) == partner).sum()}

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A8 I2")


@program
def loss_weights_from_a_vector_of_losses():
    """Tasks are weighted by how their losses stand to each other and to the last step's."""
    num_tasks = 3

    def init(dtype):
        params = {
            "trunk": dense_params(0, FEATURES, WIDTH, dtype),
            "heads": normal(2, (num_tasks, WIDTH, 1), dtype, 0.3),
        }
        return start(params, adamw(), last=jnp.ones(num_tasks, dtype))

    def step(state, x, targets):
        def losses_of(params):
            h = jnp.tanh(dense(params["trunk"], x))
            predicted = jnp.einsum("bw,twk->bt", h, params["heads"])
            return ((predicted - targets) ** 2).mean(0)

        losses = losses_of(state["params"])
        weights = num_tasks * jax.nn.softmax(losses / state["last"])
        grads = jax.grad(lambda params: (weights * losses_of(params)).sum())(state["params"])
        updates, opt = adamw().update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "last": losses}, {"weights": weights}

    batches = normals((ROWS, FEATURES), (ROWS, num_tasks))
    return Program(init=init, batches=batches, step=step, covers="A3")


@program
def groups_of_rows():
    """Norms within groups of four rows, by vmap over a reshaped batch."""

    def loss(params, x, label):
        def normalised(rows):
            centred = rows - rows.mean(0, keepdims=True)
            return centred / (rows.std(0, keepdims=True) + 1e-2)

        h = jnp.tanh(dense(params[0], x))
        h = jax.vmap(normalised)(h.reshape(-1, 4, WIDTH)).reshape(h.shape)
        losses = cross_entropies(dense(params[1], h), label)
        best_of_group = losses.reshape(-1, 4).min(1)
        return losses.mean() + best_of_group.mean(), {"best": best_of_group}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A8 I2")


@program
def moe_with_balance_loss():
    """Shares of rows times mean gates, over experts: a product of two means."""
    num_experts = 4

    def init(dtype):
        params = {
            "router": normal(0, (FEATURES, num_experts), dtype),
            "up": normal(1, (num_experts, FEATURES, WIDTH), dtype, 0.3),
            "down": normal(2, (num_experts, WIDTH, CLASSES), dtype, 0.3),
        }
        return start(params)

    def loss(params, x, label):
        gates = jax.nn.softmax(x @ params["router"])
        top, chosen = jax.lax.top_k(gates, 2)
        picked = jax.nn.one_hot(chosen, num_experts, dtype=x.dtype)
        weights = (picked * (top / top.sum(-1, keepdims=True))[..., None]).sum(1)
        h = nn.silu(jnp.einsum("bf,efw->bew", x, params["up"]))
        logits = jnp.einsum("bew,ewc,be->bc", h, params["down"], weights)
        load = picked[:, 0].mean(0)
        balance = num_experts * (load * gates.mean(0)).sum()
        z_loss = (jax.nn.logsumexp(x @ params["router"], axis=-1) ** 2).mean()
        loss = cross_entropies(logits, label).mean() + 0.5 * balance + 0.01 * z_loss
        counts = jnp.bincount(chosen.reshape(-1), length=num_experts)
        return loss, {"balance": balance, "counts": counts, "chosen": chosen}

    return Program(init=init, batches=labelled, step=learning(loss), covers="A8 I2")
