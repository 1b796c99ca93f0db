"""Losses that are no mean of rows: rows compare themselves with, or are divided by, all others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._family import Family, family, relative
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
    mlp,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    with_arguments,
)


def _regressor(dtype):
    return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))


REGRESSION = normals((ROWS, FEATURES), (ROWS,))


def _size(z):
    # A loss of differences between rows leaves the last bias a gradient of rounding errors alone.
    return 0.1 * (z**2).mean()


def _unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


@family
def rmse():
    """The root of the mean over all rows."""

    def step(state, x, y):
        def loss_fn(params):
            errors = (mlp(params, x)[:, 0] - y) ** 2
            return jnp.sqrt(errors.mean()), {"errors": errors}

        return learn(state, loss_fn)

    return Family(init=_regressor, batches=REGRESSION, step=step, covers="A8")


def _masks(i, dtype):
    # Lengths differ widely between the parts of the batch that devices would get.
    lengths = np.random.default_rng(20 + i).integers(1, 7, ROWS)
    lengths[-4:] = 0 if i == 1 else 1
    return (np.arange(6)[None] < lengths[:, None],)


@family
def masked_mean():
    """Tokens of rows with different lengths: the sum over the count of all of them."""

    def step(state, x, mask):
        def loss_fn(params):
            errors = (mlp(params, x).mean(-1) - 1.0) ** 2
            count = mask.sum()
            loss = jnp.sum(errors * mask) / count
            return loss, {"tokens": count, "errors": jnp.where(mask, errors, 0)}

        return learn(state, loss_fn)

    batches = with_arguments(normals((ROWS, 6, FEATURES)), _masks)
    return Family(init=mlp_start, batches=batches, step=step, covers="A8 A5")


@relative
def mean_where():
    """The same by `where=`, for mean, maximum, variance and logsumexp."""

    def step(state, x, mask):
        def loss_fn(params):
            scores = mlp(params, x).mean(-1)
            worst = jnp.max(scores, where=mask, initial=-10.0)
            spread = jnp.var(scores, where=mask)
            total = jax.nn.logsumexp(scores, where=mask)
            loss = jnp.mean((scores - 1) ** 2, where=mask) + 0.1 * worst + spread + 0.1 * total
            return loss, {"worst": worst, "spread": spread, "total": total}

        return learn(state, loss_fn)

    batches = with_arguments(normals((ROWS, 6, FEATURES)), _masks)
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


@family
def weighted_sum_over_sum_of_weights():
    """Weights come with the rows, and some devices' parts would hold only zeros."""

    def weights(i, dtype):
        w = np.random.default_rng(40 + i).uniform(size=ROWS)
        w[8:12] = 0
        return (w.astype(dtype),)

    def step(state, x, label, weight):
        def loss_fn(params):
            losses = cross_entropies(mlp(params, x), label)
            return (losses * weight).sum() / weight.sum(), {"weight": weight.sum()}

        return learn(state, loss_fn)

    batches = with_arguments(labelled, weights)
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


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


@family
def clip():
    """Every row's negatives are all other rows."""
    batches = normals((ROWS, FEATURES), (ROWS, 12))
    return Family(init=_two_towers, batches=batches, step=_clip_step, covers="A8 I2")


@family
def clip_where_rows_equal_features():
    """16 rows of 16 features: a dim is known by where it comes from, not by its size."""

    def init(dtype):
        return _two_towers(dtype, 16, 16, 16)

    return Family(init=init, batches=normals((16, 16), (16, 16)), step=_clip_step, covers="A8 I2")


@relative
def siglip():
    """Sigmoids over all pairs, normalised by the rows alone."""

    def init(dtype):
        state = _two_towers(dtype)
        return start({**state["params"], "shift": jnp.asarray(-2.0, dtype)})

    def step(state, image, text):
        def loss_fn(params):
            images, texts = _unit(mlp(params["image"], image)), _unit(mlp(params["text"], text))
            logits = jnp.exp(params["log_scale"]) * images @ texts.T + params["shift"]
            signs = 2 * jnp.eye(logits.shape[0], dtype=logits.dtype) - 1
            losses = -jax.nn.log_sigmoid(signs * logits).sum(-1)
            return losses.mean(), {"losses": losses}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, 12))
    return Family(init=init, batches=batches, step=step, covers="A8")


@family
def simclr():
    """Two views of each row in one concatenated batch; a view's own logit is masked out."""

    def step(state, x, noise):
        def loss_fn(params):
            views = jnp.concatenate([x, x + 0.3 * noise])
            z = _unit(mlp(params, views))
            num = z.shape[0]
            logits = jnp.where(jnp.eye(num, dtype=bool), -1e9, z @ z.T / 0.5)
            partner = jnp.roll(jnp.arange(num), num // 2)
            losses = cross_entropies(logits, partner)
            return losses.mean(), {"losses": losses, "hits": (logits.argmax(-1) == partner).sum()}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=mlp_start, batches=batches, step=step, covers="A8 I2")


@relative
def barlow_twins():
    """A correlation of features, each normalised over the batch."""

    def step(state, x, noise):
        def loss_fn(params):
            def normalised(rows):
                z = mlp(params, rows)
                return (z - z.mean(0, keepdims=True)) / (z.std(0, keepdims=True) + 1e-3)

            cross = normalised(x).T @ normalised(x + 0.3 * noise) / x.shape[0]
            on = jnp.diagonal(cross)
            off = cross - jnp.diag(on)
            loss = ((on - 1) ** 2).sum() + 0.05 * (off**2).sum() + _size(mlp(params, x))
            return loss, {"cross": cross}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


@relative
def vicreg():
    """A hinge on each feature's deviation over the batch, and the covariance of features."""

    def step(state, x, noise):
        def loss_fn(params):
            a, b = mlp(params, x), mlp(params, x + 0.3 * noise)
            centred = a - a.mean(0, keepdims=True)
            covariance = centred.T @ centred / (x.shape[0] - 1)
            off = covariance * (1 - jnp.eye(CLASSES, dtype=x.dtype))
            deviations = jnp.sqrt(a.var(0) + 1e-3)
            hinge = jax.nn.relu(1.0 - deviations).mean()
            loss = ((a - b) ** 2).mean() + hinge + (off**2).sum() / CLASSES
            return loss + _size(a), {"deviations": deviations}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


@relative
def sinkhorn_assignments():
    """SwAV: scores are normalised over rows and over prototypes in turns."""

    def init(dtype):
        return start({"net": mlp_params(dtype), "prototypes": normal(50, (12, CLASSES), dtype)})

    def sinkhorn(scores):
        q = jnp.exp(scores / 0.5)
        for _ in range(3):
            q = q / q.sum(0, keepdims=True) / q.shape[1]
            q = q / q.sum(1, keepdims=True) / q.shape[0]
        return q * q.shape[0]

    def step(state, x, noise):
        def loss_fn(params):
            def scores(rows):
                return _unit(mlp(params["net"], rows)) @ _unit(params["prototypes"]).T

            a, b = scores(x), scores(x + 0.3 * noise)
            target = jax.lax.stop_gradient(sinkhorn(a))
            losses = -(target * jax.nn.log_softmax(b / 0.1)).sum(-1)
            return losses.mean(), {"losses": losses, "used": target.sum(0)}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=init, batches=batches, step=step, covers="A8")


@relative
def batch_hard_triplets():
    """For each row the farthest of its class and the nearest of the others."""

    def step(state, x, label):
        def loss_fn(params):
            z = mlp(params, x)
            distances = ((z[:, None] - z[None]) ** 2).mean(-1)
            same = (label % 3)[:, None] == (label % 3)[None]
            farthest = jnp.where(same, distances, -1.0).max(1)
            nearest = jnp.where(same, 1e9, distances)
            chosen = nearest.argmin(1)
            nearest = jnp.take_along_axis(nearest, chosen[:, None], 1)[:, 0]
            losses = jax.nn.softplus(farthest - nearest)
            return losses.mean() + _size(z), {"losses": losses, "nearest": chosen}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A8 A7")


@relative
def pairwise_ranking():
    """A hinge for each pair of rows whose targets are in order, over the number of such pairs."""

    def step(state, x, y):
        def loss_fn(params):
            scores = mlp(params, x)[:, 0]
            above = y[:, None] > y[None]
            gaps = scores[:, None] - scores[None]
            losses = jnp.where(above, jax.nn.softplus(-gaps), 0)
            right = jnp.where(above, gaps > 0, False).sum()
            loss = losses.sum() / above.sum() + _size(scores)
            return loss, {"pairs": above.sum(), "right": right}

        return learn(state, loss_fn)

    return Family(init=_regressor, batches=REGRESSION, step=step, covers="A8 A5")


@relative
def maximum_mean_discrepancy():
    """Kernels between all pairs of rows of two populations of different sizes."""

    def step(state, real, noise):
        def loss_fn(params):
            fake = mlp(params, noise)

            def similarity(a, b):
                squares = ((a[:, None] - b[None]) ** 2).sum(-1)
                return jnp.exp(-squares / 10.0).mean()

            loss = similarity(real, real) + similarity(fake, fake) - 2 * similarity(real, fake)
            return loss, {"fake_mean": fake.mean(0)}

        return learn(state, loss_fn)

    batches = normals((ROWS, CLASSES), (16, FEATURES))
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


@relative
def dice():
    """Twice an overlap over a sum of sizes, for each class, and an F1 of counts."""

    def step(state, x, label):
        def loss_fn(params):
            logits = mlp(params, x)
            probs, hot = jax.nn.softmax(logits), jax.nn.one_hot(label, CLASSES, dtype=x.dtype)
            overlap = (probs * hot).sum(0)
            score = (2 * overlap + 1) / (probs.sum(0) + hot.sum(0) + 1)
            guess = logits.argmax(-1)
            hits = ((guess == label) & (label == 1)).sum()
            f1 = 2 * hits / ((guess == 1).sum() + (label == 1).sum())
            return 1 - score.mean(), {"score": score, "f1": f1, "hits": hits}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A8 A5")


@relative
def standardised_advantages():
    """Policy gradient: returns minus their mean, over their deviation."""

    def step(state, x, action, reward):
        advantage = (reward - reward.mean()) / (reward.std() + 1e-3)

        def loss_fn(params):
            log_probs = jax.nn.log_softmax(mlp(params, x))
            chosen = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
            entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
            return -(advantage * chosen).mean() - 0.01 * entropy, {"advantage": advantage}

        return learn(state, loss_fn)

    def rewards(i, dtype):
        return (np.random.default_rng(60 + i).normal(size=ROWS).astype(dtype),)

    batches = with_arguments(labelled, rewards)
    return Family(init=mlp_start, batches=batches, step=step, covers="A8")


@relative
def soft_maximum_of_the_losses():
    """Group robustness: a row's weight is the softmax of its loss among all losses."""

    def step(state, x, label):
        def loss_fn(params):
            losses = cross_entropies(mlp(params, x), label)
            weights = jax.nn.softmax(2.0 * jax.lax.stop_gradient(losses))
            rest = 0.1 * jax.nn.logsumexp(losses)
            return (weights * losses).sum() + rest, {"weights": weights, "worst": losses.max()}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A8 A3")


@family
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
    return Family(init=init, batches=batches, step=step, covers="A3")


@relative
def gradients_of_several_losses():
    """PCGrad: a task's gradient loses its part against the other's, by a jacobian of losses."""

    def step(state, x, targets):
        def losses_of(params):
            return ((mlp(params, x)[:, :2] - targets) ** 2).mean(0)

        rows = jax.jacrev(losses_of)(state["params"])
        first, second = (jax.tree.map(lambda g, i=i: g[i], rows) for i in range(2))
        product = optax.tree.vdot(first, second)
        scale = jnp.minimum(product, 0) / (optax.tree.norm(second) ** 2 + 1e-6)
        grads = jax.tree.map(lambda a, b: a - scale * b + b, first, second)
        updates, opt = optax.sgd(0.1, momentum=0.9).update(grads, state["opt"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return state, {"losses": losses_of(state["params"]), "product": product}

    batches = normals((ROWS, FEATURES), (ROWS, 2))
    return Family(init=mlp_start, batches=batches, step=step, covers="A3 I2")


@family
def groups_of_rows():
    """Norms within groups of four rows, by vmap over a reshaped batch."""

    def step(state, x, label):
        def normalised(rows):
            centred = rows - rows.mean(0, keepdims=True)
            return centred / (rows.std(0, keepdims=True) + 1e-2)

        def loss_fn(params):
            h = jnp.tanh(dense(params[0], x))
            h = jax.vmap(normalised)(h.reshape(-1, 4, WIDTH)).reshape(h.shape)
            losses = cross_entropies(dense(params[1], h), label)
            best_of_group = losses.reshape(-1, 4).min(1)
            return losses.mean() + best_of_group.mean(), {"best": best_of_group}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A8 I2")


@relative
def leave_one_out_baseline():
    """RLOO: each row's baseline is the mean of the others of its prompt, and prompts are not rows."""

    def step(state, x, action, reward):
        grouped = reward.reshape(-1, 4)
        baseline = (grouped.sum(1, keepdims=True) - grouped) / 3
        advantage = (grouped - baseline).reshape(-1)
        share = jax.nn.softmax(grouped.mean(1))

        def loss_fn(params):
            log_probs = jax.nn.log_softmax(mlp(params, x))
            chosen = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
            weights = jnp.repeat(share, 4)
            return -(weights * advantage * chosen).sum(), {"advantage": advantage, "share": share}

        return learn(state, loss_fn)

    def rewards(i, dtype):
        return (np.random.default_rng(70 + i).normal(size=ROWS).astype(dtype),)

    batches = with_arguments(labelled, rewards)
    return Family(init=mlp_start, batches=batches, step=step, covers="A8 I2")


@relative
def whitening_where_rows_equal_features():
    """16 rows of 16 features, their Gram matrices on both sides, and a Cholesky factor."""

    def init(dtype):
        return start(mlp_params(dtype, (16, 16, 16)))

    def step(state, x):
        def loss_fn(params):
            z = mlp(params, x)
            of_features, of_rows = z.T @ z / z.shape[0], z @ z.T / z.shape[1]
            factor = jnp.linalg.cholesky(of_features + jnp.eye(16, dtype=z.dtype))
            white = jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T
            loss = jnp.log(jnp.diagonal(factor)).sum() + 0.1 * (white**4).mean()
            return loss + 0.1 * jnp.abs(of_rows - of_features).mean(), {"white": white}

        return learn(state, loss_fn)

    return Family(init=init, batches=normals((16, 16)), step=step, covers="A8 I2")


@family
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

    def step(state, x, label):
        def loss_fn(params):
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

        return learn(state, loss_fn)

    return Family(init=init, batches=labelled, step=step, covers="A8 I2")
