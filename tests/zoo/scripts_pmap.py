"""Train steps of scripts that were written for `jax.pmap`: collectives over 'batch', a key for each device.

Hugging Face's Flax models want JAX 0.4.13, and are gone from Transformers 5: the step of their language
modelling script is here with a small Linen model.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state
from flax.training.common_utils import onehot

from ._program import Program, relative
from .core import (
    CLASSES,
    ROWS,
    SEQ_LEN,
    VOCAB_SIZE,
    adamw,
    cross_entropy,
    labelled_batches,
    token_batches,
)

AXIS = {"axis_name": "batch"}


def padded_tokens(rng: np.random.Generator, length: int = SEQ_LEN) -> jax.Array:
    """Token ids int32 [32, length] that end in zeros, after 2 or more tokens."""
    tokens = rng.integers(1, VOCAB_SIZE, (ROWS, length))
    lengths = rng.integers(2, length + 1, ROWS)
    return jnp.asarray(np.where(np.arange(length) < lengths[:, None], tokens, 0), jnp.int32)


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0):
    """The sum over tokens that count, and how many these are, as Flax's examples have it."""
    size = logits.shape[-1]
    rest = label_smoothing / (size - 1)
    targets = onehot(targets, size, 1 - label_smoothing, rest)
    loss = -(targets * nn.log_softmax(logits)).sum(-1) * weights
    return loss.sum(), weights.sum()


def token_metrics(logits, targets, weights):
    loss, count = weighted_cross_entropy(logits, targets, weights)
    correct = ((logits.argmax(-1) == targets) * weights).sum()
    return {"loss": loss, "accuracy": correct, "denominator": count}


def schedule(step):
    return 0.01 * jnp.minimum(1.0, (step + 1) / 3)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for width in (8, 16):
            y = nn.Conv(width, (3, 3), strides=(2, 2), use_bias=False)(x)
            y = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(y)
            x = nn.silu(nn.Conv(width, (1, 1), strides=(2, 2))(x) + y)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class ImageNetState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: Any


@relative
def imagenet():
    """BatchNorm of each device's rows, with averages averaged; a loss scale; weight decay in the loss."""

    def init():
        model = ResNet()
        variables = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
        scale = dynamic_scale_lib.DynamicScale(scale=jnp.float32(2**10), growth_interval=2)
        tx = optax.sgd(schedule, momentum=0.9, nesterov=True)
        return ImageNetState.create(apply_fn=model.apply, tx=tx, dynamic_scale=scale, **variables)

    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
            decay = 0.5 * 0.0001 * sum(jnp.sum(x**2) for x in kernels)
            return cross_entropy(logits, batch["label"]) + decay, (changed, logits)

        dynamic_scale = state.dynamic_scale
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        dynamic_scale, is_finite, (_, (changed, logits)), grads = grad_fn(state.params)
        right = (logits.argmax(-1) == batch["label"]).mean()
        metrics = {"loss": cross_entropy(logits, batch["label"]), "accuracy": right}
        metrics = jax.lax.pmean(metrics, axis_name="batch")
        metrics["learning_rate"] = schedule(state.step)
        new = state.apply_gradients(
            grads=grads, batch_stats=jax.lax.pmean(changed["batch_stats"], "batch")
        )

        def chosen(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        new = new.replace(
            opt_state=chosen(new.opt_state, state.opt_state),
            params=chosen(new.params, state.params),
            dynamic_scale=dynamic_scale,
        )
        return new, {**metrics, "scale": dynamic_scale.scale}

    def batches(num_steps):
        rng = np.random.default_rng(30)
        images = [rng.normal(size=(ROWS, 8, 8, 3)) for _ in range(num_steps)]
        return [
            ({"image": jnp.asarray(image, jnp.float32), "label": batch["label"]},)
            for image, (batch,) in zip(images, labelled_batches(num_steps), strict=True)
        ]

    return Program(init=init, batches=batches, step=train_step, options=AXIS)


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, inputs, train):
        x = nn.Embed(VOCAB_SIZE, 16)(inputs)
        x = nn.Dropout(0.3, deterministic=not train)(x)
        attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_attention_mask(inputs > 0, inputs > 0))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x))


def nlp_seq_step(state, batch, dropout_rng):
    """As the example has it: the metrics that it returns are each device's, which pmap stacks."""
    inputs, targets = batch["inputs"], batch["targets"]
    weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        rngs = {"dropout": dropout_rng}
        logits = state.apply_fn({"params": params}, inputs, train=True, rngs=rngs)
        loss, count = weighted_cross_entropy(logits, targets, weights)
        return loss / count, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    metrics = token_metrics(logits, targets, weights)
    metrics["learning_rate"] = schedule(state.step)
    return state.apply_gradients(grads=grads), metrics


@relative
def nlp_seq():
    """With the edit that it is refused for: its metrics summed over the devices."""

    def init():
        model, one = Tagger(), jnp.zeros((1, SEQ_LEN), jnp.int32)
        params = model.init(jax.random.key(0), one, False)["params"]
        return train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=adamw(schedule)
        )

    def train_step(state, batch, dropout_rng):
        state, metrics = nlp_seq_step(state, batch, dropout_rng)
        rate = metrics.pop("learning_rate")
        return state, {**jax.lax.psum(metrics, "batch"), "learning_rate": rate}

    def batches(num_steps):
        rng = np.random.default_rng(32)
        return [
            ({"inputs": tokens, "targets": tokens % CLASSES}, jax.random.key(4))
            for tokens in (padded_tokens(rng) for _ in range(num_steps))
        ]

    return Program(init=init, batches=batches, step=train_step, options=AXIS)


class KeyedState(train_state.TrainState):
    dropout_rng: jax.Array


class CausalLM(nn.Module):
    @nn.compact
    def __call__(self, input_ids, train):
        x = nn.Embed(VOCAB_SIZE, 16)(input_ids[:, :-1])
        x = nn.Dropout(0.1, deterministic=not train)(x)
        attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(input_ids[:, :-1]))
        return nn.Dense(VOCAB_SIZE)(nn.LayerNorm()(x))


@relative
def run_clm_flax():
    """Hugging Face's: an old-style key in the state, split by each step, and by the device's index."""

    def init():
        model, one = CausalLM(), jnp.zeros((1, SEQ_LEN + 1), jnp.int32)
        params = model.init(jax.random.key(0), one, False)["params"]
        tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(schedule, weight_decay=0.01))
        return KeyedState.create(
            apply_fn=model.apply, params=params, tx=tx, dropout_rng=jax.random.PRNGKey(2)
        )

    def train_step(state, batch):
        # pmap's state is stacked, with a key for each device; here there is one.
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)
        dropout_rng = jax.random.fold_in(dropout_rng, jax.lax.axis_index("batch"))

        def compute_loss(params):
            rngs = {"dropout": dropout_rng}
            logits = state.apply_fn({"params": params}, batch["input_ids"], True, rngs=rngs)
            labels = batch["labels"][:, 1:]
            return optax.softmax_cross_entropy(logits, onehot(labels, VOCAB_SIZE)).mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        metrics = {"loss": loss, "learning_rate": schedule(state.step)}
        return new_state, jax.lax.pmean(metrics, axis_name="batch")

    def batches(num_steps):
        return [({"input_ids": x, "labels": x},) for (x,) in token_batches(num_steps)]

    return Program(init=init, batches=batches, step=train_step, options=AXIS)
