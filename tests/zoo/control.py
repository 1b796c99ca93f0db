"""Loops and branches around and inside the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ._entry import Entry, entry
from ._models import (
    BATCH_SIZE,
    MLP,
    NUM_FEATURES,
    accuracy,
    adamw,
    cross_entropy,
    labelled_batches,
)
from .networks import classifier_state


def _loss(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    return cross_entropy(logits, batch["label"])


@entry
def inner_steps():
    """A `lax.scan` of three optimizer steps inside one step, over batches stacked along dim 0."""

    def batches(num_steps):
        parts = iter(labelled_batches(3 * num_steps))
        return [
            (jax.tree.map(lambda *rows: jnp.stack(rows), *(next(parts)[0] for _ in range(3))),)
            for _ in range(num_steps)
        ]

    def step(state, stacked):
        def one(state, batch):
            loss, grads = jax.value_and_grad(lambda p: _loss(state, p, batch))(state.params)
            return state.apply_gradients(grads=grads), loss

        state, losses = jax.lax.scan(one, state, stacked)
        return state, {"loss": losses.mean()}

    options = {"in_specs": {"stacked": P(None, "data")}}
    return Entry(init=classifier_state, batches=batches, step=step, options=options)


def _microbatches(batch, num):
    return jax.tree.map(lambda x: x.reshape(num, x.shape[0] // num, *x.shape[1:]), batch)


@entry
def microbatch_scan():
    """The user's own gradient accumulation, with zeros as the first carry."""
    num = 2

    def step(state, batch):
        def accumulate(carry, microbatch):
            loss, grads = jax.value_and_grad(lambda p: _loss(state, p, microbatch))(state.params)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, _microbatches(batch, num))
        grads = jax.tree.map(lambda g: g / num, grads)
        return state.apply_gradients(grads=grads), {"loss": loss / num}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def microbatch_python_loop():
    num = 2

    def step(state, batch):
        grads = jax.tree.map(jnp.zeros_like, state.params)
        losses = []
        microbatches = _microbatches(batch, num)
        for i in range(num):
            microbatch = jax.tree.map(lambda x, i=i: x[i], microbatches)
            grad_fn = jax.value_and_grad(lambda p, b=microbatch: _loss(state, p, b))
            loss, part = grad_fn(state.params)
            grads = jax.tree.map(lambda total, g: total + g / num, grads, part)
            losses.append(loss)
        return state.apply_gradients(grads=grads), {"loss": sum(losses) / num}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def cond_on_gradients():
    """The update is skipped where the gradient is large, as it is on the second batch."""

    def batches(num_steps):
        result = labelled_batches(num_steps)
        if num_steps > 1:
            (batch,) = result[1]
            result[1] = ({**batch, "x": 30.0 * batch["x"]},)
        return result

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: _loss(state, p, batch))(state.params)
        is_small = optax.tree.norm(grads) < 5.0
        new = jax.lax.cond(is_small, lambda: state.apply_gradients(grads=grads), lambda: state)
        return new, {"loss": loss, "applied": is_small.astype(jnp.float32)}

    return Entry(init=classifier_state, batches=batches, step=step)


def _two_heads_batches(num_steps):
    # Every second batch has flags, and they are in rows of the first of 8 devices: the others cannot
    # tell by their own rows which branch the whole batch takes.
    flags = jnp.arange(BATCH_SIZE) < 2
    return [
        ({**batch, "flag": flags & (i % 2 == 0)},)
        for i, (batch,) in enumerate(labelled_batches(num_steps))
    ]


def _cond_in_loss(branch) -> Entry:
    def init():
        models = {"plain": MLP(), "flagged": MLP()}
        keys = jax.random.split(jax.random.key(0), 2)
        params = {
            name: model.init(key, jnp.zeros((1, NUM_FEATURES)))["params"]
            for key, (name, model) in zip(keys, models.items(), strict=True)
        }
        return {"params": params, "opt_state": adamw().init(params)}

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda params: branch(params, batch))(state["params"])
        updates, opt_state = adamw().update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return Entry(init=init, batches=_two_heads_batches, step=step)


def _head_loss(params, batch):
    return cross_entropy(MLP().apply({"params": params}, batch["x"]), batch["label"])


@entry
def cond_on_batch():
    """The whole batch decides which of two branches, with parameters of its own, gives the loss."""

    def branch(params, batch):
        return jax.lax.cond(
            batch["flag"].any(),
            lambda: _head_loss(params["flagged"], batch),
            lambda: _head_loss(params["plain"], batch),
        )

    return _cond_in_loss(branch)


@entry
def cond_with_constant_branch():
    """As above, with a constant for one branch."""

    def branch(params, batch):
        extra = jax.lax.cond(
            batch["flag"].any(), lambda: _head_loss(params["flagged"], batch), lambda: 0.0
        )
        return _head_loss(params["plain"], batch) + extra

    return _cond_in_loss(branch)


@entry
def while_in_update():
    """Gradients are halved until they are small: the condition is a norm over all shards."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: _loss(state, p, batch))(state.params)

        def halve(carry):
            grads, count = carry
            return jax.tree.map(lambda g: 0.5 * g, grads), count + 1

        def is_large(carry):
            return optax.tree.norm(carry[0]) > 0.1

        grads, count = jax.lax.while_loop(is_large, halve, (grads, jnp.zeros((), jnp.int32)))
        return state.apply_gradients(grads=grads), {"loss": loss, "halvings": count}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def while_on_batch():
    """Targets are unrolled from the parameters for as long as the longest row of the batch needs."""
    width = 16

    def init():
        keys = jax.random.split(jax.random.key(0), 2)
        params = {
            "recurrent": 0.3 * jax.random.normal(keys[0], (width, width)),
            "readout": 0.3 * jax.random.normal(keys[1], (NUM_FEATURES, width)),
        }
        return {"params": params, "opt_state": adamw().init(params)}

    def batches(num_steps):
        rng = np.random.default_rng(6)
        return [
            (batch["x"], jnp.asarray(rng.integers(1, 6, BATCH_SIZE), jnp.int32))
            for (batch,) in labelled_batches(num_steps)
        ]

    def unroll(params, x, lengths):
        def body(carry):
            t, hidden = carry
            proposal = jnp.tanh(hidden @ params["recurrent"] + x @ params["readout"] + 0.1)
            return t + 1, jnp.where((t < lengths)[:, None], proposal, hidden)

        start = (jnp.zeros((), jnp.int32), jnp.zeros((x.shape[0], width)))
        return jax.lax.while_loop(lambda carry: carry[0] < lengths.max(), body, start)[1]

    def step(state, x, lengths):
        targets = unroll(jax.lax.stop_gradient(state["params"]), x, lengths)

        def loss_fn(params):
            prediction = jnp.tanh(x @ params["readout"]) @ params["recurrent"]
            return ((prediction - targets) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = adamw().update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return Entry(init=init, batches=batches, step=step)


@entry
def evaluate_after_update():
    """The new parameters are used again in the same step, after the update."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: _loss(state, p, batch))(state.params)
        state = state.apply_gradients(grads=grads)
        logits = state.apply_fn({"params": state.params}, batch["x"])
        after = {"loss": cross_entropy(logits, batch["label"])}
        return state, {"before": loss, "after": after, "right": accuracy(logits, batch["label"])}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)
