"""Train steps of scripts that were written for `jax.pmap`: collectives over 'batch', a key for each device.

Hugging Face's Flax models want JAX 0.4.13, and are gone from Transformers 5: the step of their language
modelling script is here with a small Linen model.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state
from flax.training.common_utils import onehot

from ._program import Program, relative
from .core import (
    CLASSES,
    ROWS,
    SEQ_LEN,
    VOCAB_SIZE,
    adamw,
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
