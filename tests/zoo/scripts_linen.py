"""Train steps of Flax's Linen examples under `jax.jit`: their signatures, keys, masks, metrics; at tiny size.

Its mnist and imagenet of today are NNX's and pmap's; plain classifiers, ConvNets and CLU's metrics are
entries of the other files.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from ._entry import Entry, script
from ._models import BATCH_SIZE, adamw
from .networks import create_state
from .scripts_tokens import Metrics


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
