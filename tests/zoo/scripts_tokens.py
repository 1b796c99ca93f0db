"""Train steps of Flax's Linen examples on tokens: lm1b, seq2seq and sst2, with their signatures and keys."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state

from ._entry import Entry, script
from ._models import BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, adamw


def padded_tokens(rng: np.random.Generator, length: int = SEQ_LEN) -> jax.Array:
    """Token ids int32 [32, length] that end in zeros, after 2 or more tokens."""
    tokens = rng.integers(1, VOCAB_SIZE, (BATCH_SIZE, length))
    lengths = rng.integers(2, length + 1, BATCH_SIZE)
    return jnp.asarray(np.where(np.arange(length) < lengths[:, None], tokens, 0), jnp.int32)


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0):
    """The sum over tokens that count, and how many these are, as lm1b and wmt have it."""
    size = logits.shape[-1]
    rest = label_smoothing / (size - 1)
    targets = common_utils.onehot(targets, size, 1 - label_smoothing, rest)
    loss = -(targets * nn.log_softmax(logits)).sum(-1) * weights
    return loss.sum(), weights.sum()


def token_metrics(logits, targets, weights):
    loss, count = weighted_cross_entropy(logits, targets, weights)
    correct = ((logits.argmax(-1) == targets) * weights).sum()
    return {"loss": loss, "accuracy": correct, "denominator": count}


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 16
    dropout: float = 0.3


class Decoder(nn.Module):
    """Packed sequences: attention within a segment, positions from the batch."""

    config: Config

    @nn.compact
    def __call__(self, inputs, positions, segments):
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        x = nn.Embed(VOCAB_SIZE, self.config.width)(shifted)
        x = x + nn.Embed(SEQ_LEN, self.config.width, name="positions")(positions)
        mask = nn.combine_masks(
            nn.make_causal_mask(inputs), nn.make_attention_mask(segments, segments, jnp.equal)
        )
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, use_bias=False, dropout_rate=self.config.dropout, deterministic=False
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        x = nn.Dropout(self.config.dropout, deterministic=False)(x)
        return nn.Dense(VOCAB_SIZE)(nn.LayerNorm()(x))


def lm1b_step(state, batch, config, learning_rate_fn, label_smoothing=0.0, dropout_rng=None):
    inputs, positions, segments = (
        batch.get(key) for key in ("inputs", "inputs_position", "inputs_segmentation")
    )
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        rngs = {"dropout": dropout_rng}
        logits = Decoder(config).apply({"params": params}, inputs, positions, segments, rngs=rngs)
        loss, count = weighted_cross_entropy(logits, inputs, weights, label_smoothing)
        return loss / count, logits

    learning_rate = learning_rate_fn(state.step)
    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {**token_metrics(logits, inputs, weights), "learning_rate": learning_rate}


def schedule(step):
    return 0.01 * jnp.minimum(1.0, (step + 1) / 3)


@script
def lm1b():
    """A masked mean over tokens of packed sequences; config, schedule and smoothing are static arguments."""

    def init():
        model, one = Decoder(Config()), jnp.zeros((1, SEQ_LEN), jnp.int32)
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = model.init(rngs, one, one, one)["params"]
        return train_state.TrainState.create(apply_fn=None, params=params, tx=adamw(schedule))

    def batches(num_steps):
        rng, args = np.random.default_rng(20), []
        for _ in range(num_steps):
            inputs, cut = padded_tokens(rng), rng.integers(1, SEQ_LEN, (BATCH_SIZE, 1))
            place = np.arange(SEQ_LEN)
            batch = {
                "inputs": inputs,
                "inputs_position": jnp.asarray(
                    np.where(place < cut, place, place - cut), jnp.int32
                ),
                "inputs_segmentation": jnp.asarray(1 + (place >= cut), jnp.int32),
            }
            args.append((batch, Config(), schedule, 0.1, jax.random.key(7)))
        return args

    options = {"static_argnums": (2, 3, 4)}
    return Entry(init=init, batches=batches, step=lm1b_step, options=options)


class Seq2seq(nn.Module):
    """A decoder that feeds back tokens that it draws."""

    hidden: int = 16
    vocab: int = 8

    @nn.compact
    def __call__(self, query, answer):
        carry, _ = nn.RNN(nn.LSTMCell(self.hidden), return_carry=True)(query)
        cell, head = nn.LSTMCell(self.hidden), nn.Dense(self.vocab)

        fed, logits = answer[:, 0], []
        for _ in range(answer.shape[1] - 1):
            carry, hidden = cell(carry, fed)
            logits.append(head(hidden))
            drawn = jax.random.categorical(self.make_rng("lstm"), logits[-1])
            fed = jax.nn.one_hot(drawn, self.vocab)
        return jnp.stack(logits, 1)


def sequence_mask(labels, eos_id):
    """1 up to the first token that ends a sequence, 0 after it."""
    ended = labels.argmax(-1) == eos_id
    return (ended.cumsum(-1) - ended == 0).astype(jnp.float32)


@script
def seq2seq():
    """An LSTM that feeds back what it draws, masked lengths, a Python number among the arguments."""
    model = Seq2seq()

    def init():
        rngs = {"params": jax.random.key(0), "lstm": jax.random.key(1)}
        one = jnp.zeros((1, 5, model.vocab))
        params = model.init(rngs, one, one)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=adamw())

    @jax.jit
    def train_step(state, batch, lstm_rng, eos_id):
        labels = batch["answer"][:, 1:]
        lstm_key = jax.random.fold_in(lstm_rng, state.step)
        mask = sequence_mask(labels, eos_id)

        def loss_fn(params):
            rngs = {"lstm": lstm_key}
            logits = state.apply_fn({"params": params}, batch["query"], batch["answer"], rngs=rngs)
            return -((nn.log_softmax(logits) * labels).sum(-1) * mask).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = (logits.argmax(-1) == labels.argmax(-1)) | (mask == 0)
        accuracy = jnp.mean(right.all(-1))
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    def batches(num_steps):
        rng = np.random.default_rng(21)

        def draw():
            tokens = rng.integers(0, model.vocab, (BATCH_SIZE, 5))
            return jax.nn.one_hot(tokens, model.vocab)

        return [
            ({"query": draw(), "answer": draw()}, jax.random.key(5), 1) for _ in range(num_steps)
        ]

    return Entry(init=init, batches=batches, step=train_step)


@flax.struct.dataclass
class Metrics:
    """sst2's: sums over the examples, and how many there were."""

    loss: jax.Array
    correct: jax.Array
    count: jax.Array


class TextClassifier(nn.Module):
    """A backward and a forward pass over sequences of various lengths, one logit for each."""

    @nn.compact
    def __call__(self, tokens, lengths):
        x = nn.Embed(VOCAB_SIZE, 16)(tokens)
        x = nn.Dropout(0.2, deterministic=False)(x)
        both = nn.Bidirectional(nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.LSTMCell(8)))
        hidden: Any = both(x, seq_lengths=lengths)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return nn.Dense(1)(nn.tanh(last))


@script
def sst2():
    """Named keys folded with the step, sequences of various lengths, metrics as sums in a struct."""

    def init():
        model = TextClassifier()
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = model.init(rngs, jnp.zeros((1, SEQ_LEN), jnp.int32), jnp.ones(1, jnp.int32))
        return train_state.TrainState.create(
            apply_fn=model.apply, params=params["params"], tx=adamw()
        )

    def train_step(state, batch, rngs):
        rngs = {name: jax.random.fold_in(rng, state.step) for name, rng in rngs.items()}

        def loss_fn(params):
            variables = {"params": params}
            logits = state.apply_fn(variables, batch["token_ids"], batch["length"], rngs=rngs)
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["label"][:, None])
            return losses.mean(), (losses, logits)

        (_, (losses, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = (logits[:, 0] > 0) == (batch["label"] > 0)
        metrics = Metrics(losses.sum(), right.sum(), jnp.asarray(losses.size))
        return state.apply_gradients(grads=grads), metrics

    def batches(num_steps):
        rng, rngs = np.random.default_rng(22), {"dropout": jax.random.key(3)}
        args = []
        for _ in range(num_steps):
            tokens = padded_tokens(rng)
            label = jnp.asarray(rng.integers(0, 2, BATCH_SIZE), jnp.float32)
            length = (tokens > 0).sum(1)
            args.append(({"token_ids": tokens, "length": length, "label": label}, rngs))
        return args

    return Entry(init=init, batches=batches, step=train_step)
