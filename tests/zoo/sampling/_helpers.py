"""Functions that templates call; each means the same for any number of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax, random

REMAT: dict[str, Any] = {
    "plain": lambda body: body,
    "remat": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}


def mlp(w, b):
    return lambda h: jnp.tanh(h @ w + b)


def through(x, narrow):
    """The values as a narrower float rounds them; cotangents are rounded on their way back."""
    return x.astype(narrow).astype(float)


def norm(h, axis=-1):
    centered = h - h.mean(axis, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, axis, keepdims=True) + 0.1)


def unit(h):
    return h * lax.rsqrt(jnp.sum(h**2, -1, keepdims=True) + 0.1)


def attend(q, k, v):
    return jax.nn.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v


def scan_layers(h, layers, remat, **options):
    body = REMAT[remat](lambda h, layer: (mlp(*layer)(h), h.mean(-1)))
    h, means = lax.scan(body, h, layers, **options)
    return h + 0.1 * means.sum(0)[:, None]


def over_time(h, seq, w, b, layers=None):
    """A recurrent net over time-major rows; with layers, each of its turns is a loop too."""

    def turn(h, x):
        h = jnp.tanh(h @ w + x + b)
        if layers is not None:
            h = lax.scan(lambda h, layer: (mlp(*layer)(h), None), h, layers)[0]
        return h, h[:, :1]

    h, outs = lax.scan(turn, h, seq)
    return h + outs.mean(0)


def per_row(body, h, kind):
    return lax.map(body, h) if kind == "map" else jax.vmap(body)(h)


def halve(x):
    """A loop of as many turns as the values ask for."""
    return lax.while_loop(
        lambda s: jnp.max(jnp.abs(s)) > 0.7, lambda s: s * 0.5, lax.stop_gradient(x)
    )


def experts(h, gates, weights):
    """One expert for each row, with as many rows as it gets."""
    probabilities = jax.nn.softmax(h @ gates)
    best = jnp.argmax(probabilities, -1)
    chosen = jax.nn.one_hot(best, weights.shape[0]) * probabilities
    return jnp.einsum("be,bn,enm->bm", chosen, h, weights)


def capacity(h, gates, capacity=3):
    """Drops the rows beyond an expert's capacity, in the order of the batch."""
    chosen = jax.nn.one_hot(jnp.argmax(h @ gates, -1), gates.shape[1])
    place = jnp.cumsum(chosen, 0) * chosen
    return h * jnp.sum(chosen * (place <= capacity), -1, keepdims=True)


def whiten(h):
    centered = h - h.mean(0)
    covariance = centered.T @ centered / h.shape[0] + 0.5 * jnp.eye(h.shape[1])
    return jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(covariance), centered.T, lower=True
    ).T


def sinkhorn(h):
    def turn(_, logits):
        logits = logits - jax.nn.logsumexp(logits, 0, keepdims=True)
        return logits - jax.nn.logsumexp(logits, 1, keepdims=True)

    return jnp.exp(lax.fori_loop(0, 2, turn, h))


def running(h, decay=0.7):
    """A mean that runs along the batch."""

    def turn(carry, row):
        carry = decay * carry + (1 - decay) * row
        return carry, carry

    return lax.scan(turn, jnp.zeros_like(h[0]), h)[1]


def associative(h):
    a, b = lax.associative_scan(
        lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (jnp.full_like(h, 0.5), h)
    )
    return b


def off_diagonal(logits):
    rows = logits.shape[0]
    return jnp.where(jnp.eye(rows, dtype=bool), -1e9, logits)


def xent(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def info_nce(a, b, symmetric=True):
    logits = unit(a) @ unit(b).T * 3
    labels = jnp.arange(logits.shape[0])
    one = xent(logits, labels).mean()
    return 0.5 * (one + xent(logits.T, labels).mean()) if symmetric else one


def sim_clr(a, b):
    z = jnp.concatenate([unit(a), unit(b)])
    rows = a.shape[0]
    labels = jnp.concatenate([jnp.arange(rows) + rows, jnp.arange(rows)])
    return xent(off_diagonal(z @ z.T * 2), labels).mean()


def vic(a, b):
    """Redundancy between features, over the batch."""
    a, b = norm(a, 0), norm(b, 0)
    c = a.T @ b / a.shape[0]
    return jnp.sum((c - jnp.eye(c.shape[0])) ** 2)


def triplet(h, ids):
    """Hardest positives and negatives within the batch."""
    apart = jnp.sum((h[:, None] - h[None]) ** 2, -1)
    same = ids[:, None] % 3 == ids[None] % 3
    positive = jnp.max(jnp.where(same, apart, 0), 1)
    negative = jnp.min(jnp.where(same, 1e3, apart), 1)
    return jax.nn.relu(positive - negative + 1).mean()


def line_search(f, p, grads, loss):
    """Halves the step until the loss falls."""

    def worse(carry):
        rate, turn = carry
        new = jax.tree.map(lambda w, g: w - rate * g, p, grads)
        return (f(new)[0] > loss) & (turn < 3)

    return lax.while_loop(worse, lambda c: (c[0] * 0.5, c[1] + 1), (jnp.asarray(1.0), 0))[0]


def clipped(grads, most):
    scale = jnp.minimum(1.0, most / (optax.tree.norm(grads) + 1e-3))
    return jax.tree.map(lambda g: g * scale, grads)


@jax.custom_jvp
def custom_square(x):
    return 0.5 * x * x


@custom_square.defjvp
def _custom_square_jvp(primals, tangents):
    return custom_square(*primals), primals[0] * tangents[0]


def with_custom_vjp(function):
    """The function with its own derivative written out as a custom one."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda *args: jax.vjp(function, *args), lambda vjp, cotangent: vjp(cotangent))
    return wrapped


# Adam's epsilon is large, so that what is zero but for rounding stays there.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(0.1),
    "nesterov": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-2, weight_decay=1e-2),
    "clip, adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.adam(optax.linear_schedule(1e-2, 0, 9), eps=1e-2)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-4),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-2),
    "lion": lambda: optax.lion(1e-3),
    "rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.1), optax.scale_by_rms(eps=1e-2), optax.add_decayed_weights(1e-2),
        optax.trace(0.9), optax.scale(-1e-2),
    ),
    "every second": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 2),
}  # fmt: skip
NAMESPACE = {
    **{name: value for name, value in globals().items() if not name.startswith("__")},
    "jax": jax, "jnp": jnp, "lax": lax, "random": random, "optax": optax,
}  # fmt: skip
