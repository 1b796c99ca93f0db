"""Gradients inside the step that are no gradients of the loss: of the batch, of gradients, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    FEATURES,
    ROWS,
    WIDTH,
    classified,
    cross_entropies,
    dense,
    labelled,
    learn,
    learning,
    mlp,
    mlp_of,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
)
from ._program import Program, program


def _loss(params, x, label):
    return cross_entropies(mlp(params, x), label).mean()


@program
def maml_on_the_whole_batch():
    """One inner step on all support rows together, inside the loss of all query rows."""

    def loss(params, x, label, x_new, label_new):
        inner = jax.grad(_loss)(params, x, label)
        adapted = jax.tree.map(lambda p, g: p - 0.5 * g, params, inner)
        return _loss(adapted, x_new, label_new), {"inner": optax.tree.norm(inner)}

    def batches(num_steps, dtype):
        both = labelled(2 * num_steps, dtype)
        return [(*both[2 * i], *both[2 * i + 1]) for i in range(num_steps)]

    return Program(init=mlp_start, batches=batches, step=learning(loss), covers="A1")


@program
def gradient_penalty():
    """The loss holds a gradient with respect to the rows, and is differentiated again."""

    def step(state, real, fake, share):
        mixed = share[:, None] * real + (1 - share[:, None]) * fake

        def loss_fn(params):
            def score(rows):
                return mlp(params, rows).sum()

            slopes = jax.grad(score)(mixed)
            sizes = jnp.sqrt((slopes**2).sum(-1) + 1e-6)
            gap = score(fake) / fake.shape[0] - score(real) / real.shape[0]
            squares = (mlp(params, real) ** 2).mean()
            return gap + squares + 2 * ((sizes - 1) ** 2).mean(), {"sizes": sizes}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES), (ROWS,))
    return Program(init=mlp_of(FEATURES, WIDTH, 1), batches=batches, step=step, covers="A1 I2")


@program
def custom_vjp_that_couples_rows():
    """A backward rule by hand that clips the cotangents by their norm over the whole batch."""

    @jax.custom_vjp
    def clipped(z):
        return z

    def backward(_, g):
        size = jnp.sqrt((g**2).sum())
        return (g * jnp.minimum(1.0, 0.05 / size),)

    clipped.defvjp(lambda z: (z, None), backward)

    def loss(params, x, label):
        h = clipped(jnp.tanh(dense(params[0], x)))
        return classified(dense(params[1], h), label)

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A1 A8 I2")


@program
def custom_jvp_and_reversed_gradients():
    """A soft clip with its own derivative, and a gradient that is turned round (domain confusion)."""

    @jax.custom_jvp
    def soft_clip(z):
        return jnp.clip(z, -1.0, 1.0)

    @soft_clip.defjvp
    def _(primals, tangents):
        (z,), (t,) = primals, tangents
        return soft_clip(z), t * jnp.exp(-(z**2))

    @jax.custom_vjp
    def turned(z):
        return z

    turned.defvjp(lambda z: (z, None), lambda _, g: (-0.5 * g,))

    def init(dtype):
        return start({"net": mlp_params(dtype), "judge": normal(9, (WIDTH,), dtype)})

    def loss(params, x, label, domain):
        h = soft_clip(dense(params["net"][0], x))
        losses = cross_entropies(dense(params["net"][1], h), label)
        guess = turned(h) @ params["judge"]
        confusion = optax.sigmoid_binary_cross_entropy(guess, domain)
        share = domain.mean()
        balanced = jnp.where(domain > 0, confusion / share, confusion / (1 - share))
        return losses.mean() + balanced.mean(), {"guess": guess, "share": share}

    def batches(num_steps, dtype):
        rng = np.random.default_rng(12)
        return [
            (*args, (rng.uniform(size=ROWS) < 0.3).astype(dtype))
            for args in labelled(num_steps, dtype)
        ]

    return Program(init=init, batches=batches, step=learning(loss), covers="A8 I2")
