"""Train steps of Flax's Linen examples under `jax.jit`: their signatures, keys, masks, metrics; at tiny size.

Its mnist and imagenet of today are NNX's and pmap's; plain classifiers, ConvNets and CLU's metrics are
entries of the other files.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state

from ._entry import Entry, script
from ._models import BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, adamw
from .networks import create_state


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


class VAE(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x, z_rng):
        hidden = nn.relu(nn.Dense(16)(x))
        mean, logvar = nn.Dense(self.latents)(hidden), nn.Dense(self.latents)(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(16)(z))), mean, logvar


@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy(logits, labels):
    logits = nn.log_sigmoid(logits)
    return -jnp.sum(labels * logits + (1 - labels) * jnp.log(-jnp.expm1(logits)))


@script
def vae():
    """Losses of single examples by vmap, a key for the latents, a static size; only the state is returned."""

    def init():
        one = jnp.ones((1, 24))
        params = VAE(4).init(jax.random.key(0), one, jax.random.key(1))["params"]
        return train_state.TrainState.create(apply_fn=None, params=params, tx=adamw())

    def train_step(state, batch, z_rng, latents):
        def loss_fn(params):
            found: Any = VAE(latents).apply({"params": params}, batch, z_rng)
            recon, mean, logvar = found
            return binary_cross_entropy(recon, batch).mean() + kl_divergence(mean, logvar).mean()

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    def batches(num_steps):
        rng = np.random.default_rng(23)
        return [
            (jnp.asarray(rng.integers(0, 2, (BATCH_SIZE, 24)), jnp.float32), jax.random.key(i), 4)
            for i in range(num_steps)
        ]

    options = {"static_argnums": 3}
    return Entry(
        init=init, batches=batches, step=train_step, options=options, returns_metrics=False
    )


class Graphs(NamedTuple):
    """Several graphs in one: nodes and edges one after the other, and how many each graph has (jraph)."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    globals: Any
    n_node: Any
    n_edge: Any


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graphs):
        num_nodes, num_graphs = graphs.nodes.shape[0], graphs.n_node.shape[0]
        nodes, edges = nn.Dense(16)(graphs.nodes), nn.Dense(16)(graphs.edges)
        owner = jnp.repeat(jnp.arange(num_graphs), graphs.n_node, total_repeat_length=num_nodes)
        for _ in range(2):
            sent = nn.relu(nn.Dense(16)(nodes)[graphs.senders] + edges)
            sent = nn.Dropout(0.1, deterministic=False)(sent)
            received = jax.ops.segment_sum(sent, graphs.receivers, num_nodes)
            nodes = nodes + nn.LayerNorm()(nn.relu(nn.Dense(16)(received)))
        sums = jax.ops.segment_sum(nodes, owner, num_graphs)
        return nn.Dense(graphs.globals.shape[1])(sums / 8)


@script
def ogbg_molpcba():
    """Packed graphs: three kinds of rows, edges between any of them, labels that are missing, padding."""
    num_graphs, num_nodes, num_edges, num_tasks = 8, 40, 72, 3

    def draw(rng):
        # The last graph is padding: it has the nodes and edges that are left.
        n_node, n_edge = rng.integers(3, 5, num_graphs), rng.integers(4, 8, num_graphs)
        n_node[-1] += num_nodes - n_node.sum()
        n_edge[-1] += num_edges - n_edge.sum()
        first, size = np.repeat(n_node.cumsum() - n_node, n_edge), np.repeat(n_node, n_edge)
        labels = rng.integers(0, 2, (num_graphs, num_tasks)).astype(np.float32)
        labels[rng.random(labels.shape) < 0.2] = np.nan
        return jax.tree.map(jnp.asarray, Graphs(
            rng.normal(size=(num_nodes, 6)).astype(np.float32),
            rng.normal(size=(num_edges, 5)).astype(np.float32),
            (first + rng.integers(0, size)).astype(np.int32),
            (first + rng.integers(0, size)).astype(np.int32),
            labels, n_node.astype(np.int32), n_edge.astype(np.int32),
        ))  # fmt: skip

    def init():
        graphs = draw(np.random.default_rng(0))
        params = GraphNet().init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, graphs
        )
        return train_state.TrainState.create(apply_fn=GraphNet().apply, params=params, tx=adamw())

    @jax.jit
    def train_step(state, graphs, rngs):
        def loss_fn(params, graphs):
            labels = graphs.globals
            logits = state.apply_fn(params, graphs, rngs=rngs)
            real = jnp.arange(labels.shape[0]) < labels.shape[0] - 1
            mask = ~jnp.isnan(labels) & real[:, None]
            labels = jnp.where(mask, labels, 0)
            losses = jnp.where(mask, optax.sigmoid_binary_cross_entropy(logits, labels), 0)
            return losses.sum() / mask.sum(), (losses, logits, labels, mask)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, (losses, logits, labels, mask)), grads = grad_fn(state.params, graphs)
        right = ((logits > 0) == (labels > 0)) & mask
        metrics = Metrics(losses.sum(), right.sum(), mask.sum())
        return state.apply_gradients(grads=grads), metrics

    def batches(num_steps):
        rng = np.random.default_rng(24)
        return [(draw(rng), {"dropout": jax.random.key(i)}) for i in range(num_steps)]

    return Entry(init=init, batches=batches, step=train_step)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=(2, 2))(x / 255.0))
        x = nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1)))
        return nn.log_softmax(nn.Dense(4)(x)), nn.Dense(1)(x)


def ppo_loss(params, apply_fn, minibatch, clip_param, vf_coeff, entropy_coeff):
    frames, actions, old_log_probs, returns, advantages = minibatch
    log_probs, values = apply_fn({"params": params}, frames)
    value_loss = ((returns - values[:, 0]) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(1).mean()
    taken = jax.vmap(lambda row, action: row[action])(log_probs, actions)
    ratios = jnp.exp(taken - old_log_probs)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = jnp.clip(ratios, 1 - clip_param, 1 + clip_param)
    policy_loss = -jnp.minimum(ratios * advantages, clipped * advantages).mean()
    return policy_loss + vf_coeff * value_loss - entropy_coeff * entropy


@script
def ppo():
    """An epoch in a step: minibatches cut from the trajectories, an update after each; a static size."""
    model = ActorCritic()

    def init():
        return create_state(model, jnp.zeros((1, 8, 8, 2)), adamw())

    @functools.partial(jax.jit, static_argnums=(2,))
    def train_step(state, trajectories, batch_size, clip_param, vf_coeff, entropy_coeff):
        iterations = trajectories[0].shape[0] // batch_size
        trajectories = jax.tree.map(
            lambda x: x.reshape((iterations, batch_size) + x.shape[1:]), trajectories
        )
        loss = 0.0
        for batch in zip(*trajectories, strict=True):
            grad_fn: Callable[..., Any] = jax.value_and_grad(ppo_loss)
            value, grads = grad_fn(
                state.params, state.apply_fn, batch, clip_param, vf_coeff, entropy_coeff
            )
            loss += value
            state = state.apply_gradients(grads=grads)
        return state, loss

    def batches(num_steps):
        rng = np.random.default_rng(25)
        args = []
        for _ in range(num_steps):
            frames = rng.integers(0, 255, (BATCH_SIZE, 8, 8, 2)).astype(np.float32)
            actions = rng.integers(0, 4, BATCH_SIZE).astype(np.int32)
            others = rng.normal(size=(3, BATCH_SIZE)).astype(np.float32)
            others[0] = np.log(0.25) + 0.1 * others[0]
            trajectories = jax.tree.map(jnp.asarray, (frames, actions, *others))
            args.append((trajectories, 16, 0.1, 0.5, 0.01))
        return args

    options = {"static_argnums": 2}
    return Entry(init=init, batches=batches, step=train_step, options=options)
