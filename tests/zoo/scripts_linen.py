"""A train step of Flax's Linen examples under `jax.jit`, at tiny size: packed graphs."""

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from ._program import Program, relative
from .core import adamw


@flax.struct.dataclass
class Metrics:
    """Sums over the examples, and how many there were."""

    loss: jax.Array
    correct: jax.Array
    count: jax.Array


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


@relative
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

    return Program(init=init, batches=batches, step=train_step)
