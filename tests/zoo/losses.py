"""Beyond one gradient of one mean: CTC, GAN, SAM, adversarial inputs, MAML, loss scaling."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.testing import Tolerance

from ._entry import Entry, entry
from ._models import (
    BATCH_SIZE,
    MLP,
    NUM_FEATURES,
    adamw,
    cross_entropy,
    labelled_batches,
)
from .networks import classifier_state, create_state


@entry
def ctc():
    """A scan whose carry starts from constants, inside optax."""
    num_frames, num_labels, vocab_size = 8, 3, 9

    def init():
        return create_state(MLP(num_outputs=vocab_size), jnp.zeros((1, num_frames, 8)), adamw())

    def batches(num_steps):
        rng = np.random.default_rng(4)

        def batch():
            lengths = rng.integers(1, num_labels + 1, (BATCH_SIZE, 1))
            labels = rng.integers(1, vocab_size, (BATCH_SIZE, num_labels))
            return {
                "frames": jnp.asarray(rng.normal(size=(BATCH_SIZE, num_frames, 8)), jnp.float32),
                "labels": jnp.asarray(labels, jnp.int32),
                "paddings": jnp.asarray(np.arange(num_labels)[None] >= lengths, jnp.float32),
            }

        return [(batch(),) for _ in range(num_steps)]

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["frames"])
            no_padding = jnp.zeros(logits.shape[:2])
            return optax.ctc_loss(logits, no_padding, batch["labels"], batch["paddings"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Entry(init=init, batches=batches, step=step)


@entry
def gan():
    """Two networks, two optimizers; the generator learns from the updated discriminator."""
    noise_size = 8

    def init():
        generator = create_state(MLP(num_outputs=NUM_FEATURES), jnp.zeros((1, noise_size)), adamw())
        sgd = optax.sgd(0.1, momentum=0.9)
        discriminator = create_state(MLP(num_outputs=1), jnp.zeros((1, NUM_FEATURES)), sgd)
        return {"generator": generator, "discriminator": discriminator}

    def batches(num_steps):
        rng = np.random.default_rng(5)
        return [
            (batch["x"], jnp.asarray(rng.normal(size=(BATCH_SIZE, noise_size)), jnp.float32))
            for (batch,) in labelled_batches(num_steps)
        ]

    def bce(logits, is_real):
        return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, is_real)).mean()

    def step(state, real, noise):
        generator, discriminator = state["generator"], state["discriminator"]

        def judge(params, images):
            return discriminator.apply_fn({"params": params}, images)

        def discriminator_loss(params):
            fake = generator.apply_fn({"params": generator.params}, noise)
            return bce(judge(params, real), 1.0) + bce(judge(params, fake), 0.0)

        d_loss, grads = jax.value_and_grad(discriminator_loss)(discriminator.params)
        discriminator = discriminator.apply_gradients(grads=grads)

        def generator_loss(params):
            fake = generator.apply_fn({"params": params}, noise)
            return bce(judge(discriminator.params, fake), 1.0)

        g_loss, grads = jax.value_and_grad(generator_loss)(generator.params)
        generator = generator.apply_gradients(grads=grads)
        state = {"generator": generator, "discriminator": discriminator}
        return state, {"discriminator": d_loss, "generator": g_loss}

    return Entry(init=init, batches=batches, step=step)


def _loss(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    return cross_entropy(logits, batch["label"])


@entry
def sam():
    """Sharpness-aware minimisation: the gradient is taken where the first gradient leads."""
    radius = 0.1

    def init():
        tx = optax.sgd(0.2, momentum=0.9)
        return create_state(MLP(), jnp.zeros((1, NUM_FEATURES)), tx)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda params: _loss(state, params, batch))(state.params)
        scale = radius / (optax.tree.norm(grads) + 1e-6)
        perturbed = jax.tree.map(lambda p, g: p + scale * g, state.params, grads)
        grads = jax.grad(lambda params: _loss(state, params, batch))(perturbed)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Entry(init=init, batches=labelled_batches, step=step)


@entry
def adversarial_inputs():
    """One gradient with respect to the batch, which must not be summed over devices."""

    def step(state, batch):
        def attack_loss(x):
            logits = state.apply_fn({"params": state.params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).sum()

        x = batch["x"] + 0.5 * jax.grad(attack_loss)(batch["x"])
        loss, grads = jax.value_and_grad(lambda p: _loss(state, p, {**batch, "x": x}))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def gradient_penalty():
    """The loss holds a gradient with respect to the batch, and is differentiated again."""

    def step(state, batch):
        def loss_fn(params):
            def score(x):
                return nn.tanh(state.apply_fn({"params": params}, x)).sum()

            slopes = jax.grad(score)(batch["x"])
            penalty = ((slopes**2).sum(-1) - 1.0) ** 2
            return _loss(state, params, batch) + 0.1 * penalty.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def maml():
    """One inner gradient step inside the loss: a gradient through a gradient of the whole batch."""

    def step(state, support, query):
        def loss_fn(params):
            inner = jax.grad(lambda p: _loss(state, p, support))(params)
            adapted = jax.tree.map(lambda p, g: p - 0.5 * g, params, inner)
            return _loss(state, adapted, query)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def batches(num_steps):
        both = labelled_batches(2 * num_steps)
        return [(*both[2 * i], *both[2 * i + 1]) for i in range(num_steps)]

    return Entry(init=classifier_state, batches=batches, step=step)


@entry
def dynamic_scale_fp16():
    """Loss scaling in float16. The third batch overflows in one row, and its update is skipped."""
    from flax.training import dynamic_scale

    def init():
        state = create_state(MLP(dtype=jnp.float16), jnp.zeros((1, NUM_FEATURES)), adamw())
        scale = dynamic_scale.DynamicScale(growth_interval=2, scale=1024.0)
        return {"train": state, "dynamic_scale": scale}

    def batches(num_steps):
        result = labelled_batches(num_steps)
        if num_steps > 2:
            (batch,) = result[2]
            result[2] = ({**batch, "x": batch["x"].at[5].mul(1e6)},)
        return result

    def step(state, batch):
        train = state["train"]

        def loss_fn(params):
            logits = train.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits.astype(jnp.float32), batch["label"])

        grad_fn = state["dynamic_scale"].value_and_grad(loss_fn)
        scale, is_finite, loss, grads = grad_fn(train.params)
        updated = train.apply_gradients(grads=grads)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        updated = updated.replace(
            params=keep(updated.params, train.params),
            opt_state=keep(updated.opt_state, train.opt_state),
        )
        return {"train": updated, "dynamic_scale": scale}, {"loss": loss}

    # float16 has 11 bits; otherwise as `mixed_bf16`. Rows that are merely permuted, on one device, differ by
    # up to 1.5 * 2**-9 of the leaf's largest.
    tolerance = Tolerance(rtol=2**-9, leaf_rtol=2**-8)
    return Entry(init=init, batches=batches, step=step, tolerance=tolerance)
