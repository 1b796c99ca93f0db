"""A gradient for each row: its norm, its clipping and its inner training are that row's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    FEATURES,
    ROWS,
    cross_entropies,
    dense,
    dense_params,
    labelled,
    learning,
    mlp,
    mlp_of,
    mlp_start,
    normals,
    start,
    update,
    with_arguments,
)
from ._program import Program, program, register

CLIP = 3.0  # some rows' gradients are longer, and some are not


def _row_loss(params, x, label):
    return cross_entropies(mlp(params, x), label)


def _clipped(params, x, label):
    """The row's loss, its gradient at norm CLIP, and whether it was longer."""
    loss, grads = jax.value_and_grad(_row_loss)(params, x, label)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
    return loss, grads, norm > CLIP


def _summed(rows):
    return jax.tree.map(lambda g: g.sum(0), rows)


def _by_vmap(params, x, label):
    losses, grads, was_cut = jax.vmap(_clipped, in_axes=(None, 0, 0))(params, x, label)
    return losses, _summed(grads), was_cut


def _by_scan(params, x, label):
    def body(total, row):
        loss, grads, was_cut = _clipped(params, *row)
        return jax.tree.map(jnp.add, total, grads), (loss, was_cut)

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (losses, was_cut) = jax.lax.scan(body, zeros, (x, label))
    return losses, total, was_cut


def _by_map(params, x, label, batch_size=None):
    def row(example):
        return _clipped(params, *example)

    losses, grads, was_cut = jax.lax.map(row, (x, label), batch_size=batch_size)
    return losses, _summed(grads), was_cut


def _by_chunks(params, x, label):
    """A scan over chunks of rows, and within each one a vmap: what fits into memory."""

    def body(total, chunk):
        losses, grads, was_cut = _by_vmap(params, *chunk)
        return jax.tree.map(jnp.add, total, grads), (losses, was_cut)

    chunks = x.reshape(4, -1, x.shape[-1]), label.reshape(4, -1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (losses, was_cut) = jax.lax.scan(body, zeros, chunks)
    return losses.reshape(-1), total, was_cut.reshape(-1)


def _dp_sgd(private_gradients):
    def step(state, x, label, key):
        losses, total, was_cut = private_gradients(state["params"], x, label)
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            (leaf + 0.1 * CLIP * jax.random.normal(k, leaf.shape, leaf.dtype)) / x.shape[0]
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        outputs = {"losses": losses, "cut": was_cut, "num_cut": was_cut.sum()}
        return update(state, jax.tree.unflatten(structure, noisy)), outputs

    return Program(
        init=mlp_start,
        batches=with_arguments(labelled, lambda i, _: (jax.random.key(i),)),
        step=step,
        covers="A1 A3 I2",
        note="each row's gradient is clipped, and one noise is added to their sum",
    )


for _name, _gradients in {
    "dp_sgd_by_vmap": _by_vmap,
    "dp_sgd_by_scan": _by_scan,
    "dp_sgd_by_map": _by_map,
    "dp_sgd_by_map_in_batches": functools.partial(_by_map, batch_size=5),
    "dp_sgd_by_chunks": _by_chunks,
}.items():
    register(_name, functools.partial(_dp_sgd, _gradients), is_slow=_name == "dp_sgd_by_chunks")


def _tasks(num_steps, dtype):
    """For each of 16 tasks, 6 rows to learn from and 5 to be judged by: sines of its own phase."""
    rng = np.random.default_rng(11)

    def task_rows(phase, rows):
        x = rng.normal(size=(16, rows, FEATURES))
        return x.astype(dtype), np.sin(x.sum(-1) + phase[:, None]).astype(dtype)

    steps = []
    for _ in range(num_steps):
        phase = rng.uniform(0, 3, 16)
        steps.append((task_rows(phase, 6), task_rows(phase, 5)))
    return steps


def _task_loss(params, rows):
    x, y = rows
    return jnp.mean((mlp(params, x)[..., 0] - y) ** 2)


def _adapted(params, support, num_inner=2):
    """Inner gradient steps on one task's rows: of this task alone."""
    for _ in range(num_inner):
        grads = jax.grad(_task_loss)(params, support)
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, grads)
    return params


def _query_loss(params, support, query):
    return _task_loss(_adapted(params, support), query)


def _maml_by_vmap(params, support, query):
    return jax.vmap(_query_loss, in_axes=(None, 0, 0))(params, support, query)


def _maml_by_map(params, support, query):
    return jax.lax.map(lambda rows: _query_loss(params, *rows), (support, query))


def _maml_by_scan(params, support, query):
    def body(total, rows):
        loss = _query_loss(params, *rows)
        return total + loss, loss

    zero = jnp.zeros((), query[1].dtype)
    total, losses = jax.lax.scan(jax.checkpoint(body), zero, (support, query))
    return losses + 0.0 * total


def _maml(task_losses):

    def loss(params, support, query):
        losses = task_losses(params, support, query)
        return losses.mean(), {"losses": losses, "solved": (losses < 0.5).sum()}

    return Program(
        init=mlp_of(FEATURES, 16, 1),
        batches=_tasks,
        step=learning(loss),
        covers="A1 I2",
        note="the inner gradients of a task are its own",
    )


for _name, _losses in {
    "maml_by_vmap": _maml_by_vmap,
    "maml_by_map": _maml_by_map,
    "maml_by_scan": _maml_by_scan,
}.items():
    register(_name, functools.partial(_maml, _losses))


@program
def ttt_layer():
    """Test-time training: a hidden state that is a model, with gradients of its own along the sequence."""
    width, length = 6, 7

    def init(dtype):
        names = ("key", "value", "query")
        params = {
            name: dense_params(20 * i, FEATURES, width, dtype) for i, name in enumerate(names)
        }
        return start({**params, "out": dense_params(90, width, FEATURES, dtype)})

    def layer(params, sequence):
        def inner_loss(fast, k, v):
            return jnp.sum((jnp.tanh(k @ fast) - v) ** 2)

        def body(fast, token):
            k, v, q = (dense(params[name], token) for name in ("key", "value", "query"))
            fast = fast - 0.1 * jax.grad(inner_loss)(fast, k, v)
            return fast, jnp.tanh(q @ fast)

        fast = jnp.eye(width, dtype=sequence.dtype)
        return dense(params["out"], jax.lax.scan(body, fast, sequence)[1])

    def loss(params, sequences):
        predicted = jax.vmap(layer, in_axes=(None, 0))(params, sequences[:, :-1])
        errors = jnp.mean((predicted - sequences[:, 1:]) ** 2, axis=(1, 2))
        return errors.mean(), {"errors": errors}

    batches = normals((ROWS, length, FEATURES))
    return Program(init=init, batches=batches, step=learning(loss), covers="A1 I2")


@program
def one_row_at_a_time():
    """A scan along the batch whose carry is the parameters: each row sees what the last one left."""

    def step(state, x, label):
        def body(params, row):
            loss, grads = jax.value_and_grad(_row_loss)(params, *row)
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss

        params, losses = jax.lax.scan(body, state["params"], (x, label))
        return {**state, "params": params}, {"losses": losses, "last": losses[-1]}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A1 I2")
