"""Gradients inside the step that are no gradients of the loss: of the batch, of gradients, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._family import Family, family, relative
from ._parts import (
    FEATURES,
    ROWS,
    WIDTH,
    cross_entropies,
    dense,
    labelled,
    learn,
    mlp,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    update,
)


def _loss(params, x, label):
    return cross_entropies(mlp(params, x), label).mean()


@family
def maml_on_the_whole_batch():
    """One inner step on all support rows together, inside the loss of all query rows."""

    def step(state, x, label, x_new, label_new):
        def loss_fn(params):
            inner = jax.grad(_loss)(params, x, label)
            adapted = jax.tree.map(lambda p, g: p - 0.5 * g, params, inner)
            return _loss(adapted, x_new, label_new), {"inner": optax.tree.norm(inner)}

        return learn(state, loss_fn)

    def batches(num_steps, dtype):
        both = labelled(2 * num_steps, dtype)
        return [(*both[2 * i], *both[2 * i + 1]) for i in range(num_steps)]

    return Family(init=mlp_start, batches=batches, step=step, covers="A1")


@relative
def adversarial_inputs():
    """Rows move along their own gradients, of a mean over the batch, three times."""

    def step(state, x, label):
        moved = x
        for _ in range(3):
            slope = jax.grad(_loss, argnums=1)(state["params"], moved, label)
            size = jnp.sqrt((slope**2).sum(-1, keepdims=True) + 1e-12)
            moved = moved + 0.1 * slope / size

        def loss_fn(params):
            return _loss(params, moved, label), {"moved": moved - x}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A1")


@family
def gradient_penalty():
    """The loss holds a gradient with respect to the rows, and is differentiated again."""

    def init(dtype):
        return start(mlp_params(dtype, (FEATURES, WIDTH, 1)))

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
    return Family(init=init, batches=batches, step=step, covers="A1 I2")


@relative
def norm_of_the_gradient_in_the_loss():
    """Flatness: the squared norm of the whole batch's gradient is part of what is minimised."""

    def step(state, x, label):
        def loss_fn(params):
            value, grads = jax.value_and_grad(_loss)(params, x, label)
            size = optax.tree.norm(grads) ** 2
            return value + 0.1 * size, {"size": size}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A1 A8")


@relative
def products_with_the_hessian():
    """Forward over reverse: a Hutchinson diagonal with signs from a key in the state."""

    def init(dtype):
        zeros = jax.tree.map(jnp.zeros_like, mlp_params(dtype))
        return {**mlp_start(dtype), "diagonal": zeros, "key": jax.random.key(1)}

    def step(state, x, label):
        key, sign_key = jax.random.split(state["key"])
        leaves, structure = jax.tree.flatten(state["params"])
        keys = jax.random.split(sign_key, len(leaves))
        signs = jax.tree.unflatten(
            structure,
            [
                jax.random.rademacher(k, leaf.shape, leaf.dtype)
                for k, leaf in zip(keys, leaves, strict=True)
            ],
        )

        def gradient(params):
            return jax.grad(_loss)(params, x, label)

        grads, products = jax.jvp(gradient, (state["params"],), (signs,))
        diagonal = jax.tree.map(
            lambda d, s, p: 0.8 * d + 0.2 * s * p, state["diagonal"], signs, products
        )
        grads = jax.tree.map(lambda g, d: g / (jnp.abs(d) + 0.5), grads, diagonal)
        outputs = {"trace": optax.tree.vdot(signs, products)}
        return update(state, grads, diagonal=diagonal, key=key), outputs

    return Family(init=init, batches=labelled, step=step, covers="A1 I3 I2")


@family
def custom_vjp_that_couples_rows():
    """A backward rule by hand that clips the cotangents by their norm over the whole batch."""

    @jax.custom_vjp
    def clipped(z):
        return z

    def backward(_, g):
        size = jnp.sqrt((g**2).sum())
        return (g * jnp.minimum(1.0, 0.05 / size),)

    clipped.defvjp(lambda z: (z, None), backward)

    def step(state, x, label):
        def loss_fn(params):
            h = clipped(jnp.tanh(dense(params[0], x)))
            losses = cross_entropies(dense(params[1], h), label)
            return losses.mean(), {"losses": losses}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="A1 A8 I2")


@family
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

    def step(state, x, label, domain):
        def loss_fn(params):
            h = soft_clip(dense(params["net"][0], x))
            losses = cross_entropies(dense(params["net"][1], h), label)
            guess = turned(h) @ params["judge"]
            confusion = optax.sigmoid_binary_cross_entropy(guess, domain)
            share = domain.mean()
            balanced = jnp.where(domain > 0, confusion / share, confusion / (1 - share))
            return losses.mean() + balanced.mean(), {"guess": guess, "share": share}

        return learn(state, loss_fn)

    def batches(num_steps, dtype):
        rng = np.random.default_rng(12)
        return [
            (*args, (rng.uniform(size=ROWS) < 0.3).astype(dtype))
            for args in labelled(num_steps, dtype)
        ]

    return Family(init=init, batches=batches, step=step, covers="A8 I2")


@relative
def influence_of_each_row():
    """Each row's gradient times that of clean rows, by jvp, chooses which rows count (top half)."""

    def step(state, x, label, clean_x, clean_label):
        direction = jax.grad(_loss)(state["params"], clean_x, clean_label)

        def losses_of(params):
            return cross_entropies(mlp(params, x), label)

        _, influence = jax.jvp(losses_of, (state["params"],), (direction,))
        counts = influence > jnp.median(influence)

        def loss_fn(params):
            losses = jnp.where(counts, losses_of(params), 0)
            return losses.sum() / counts.sum(), {"influence": influence, "counts": counts}

        return learn(state, loss_fn)

    def batches(num_steps, dtype):
        both = labelled(2 * num_steps, dtype)
        return [(*both[2 * i], *(a[:16] for a in both[2 * i + 1])) for i in range(num_steps)]

    return Family(init=mlp_start, batches=batches, step=step, covers="A1 A7")


@relative
def gradients_of_two_losses():
    """Loss weights by the norms of two gradients (GradNorm); the features' gradient is shared."""

    def step(state, x, label):
        params = state["params"]

        def classify(params):
            return _loss(params, x, label)

        def shrink(params):
            return jnp.sqrt((mlp(params, x) ** 2).sum(-1)).mean()

        first, second = jax.grad(classify)(params), jax.grad(shrink)(params)
        ratio = optax.tree.norm(first) / (optax.tree.norm(second) + 1e-6)
        grads = jax.tree.map(lambda a, b: a + 0.3 * ratio * b, first, second)
        logits, back = jax.vjp(lambda p: mlp(p, x), params)
        (third,) = back(jax.nn.softmax(logits) / logits.size)
        grads = jax.tree.map(jnp.add, grads, third)
        return update(state, grads), {"ratio": ratio, "loss": classify(params)}

    return Family(init=mlp_start, batches=labelled, step=step, covers="A3 A1")
