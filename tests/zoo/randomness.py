"""Steps that see more than their rows: statistics of the whole batch, and dropout keys of every kind.

Every device draws the numbers that one device would draw for its rows, wherever the key comes from.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training import train_state

from ._entry import Entry, entry
from ._models import (
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    accuracy,
    adamw,
    cross_entropy,
    labelled_batches,
)


class BatchNormState(train_state.TrainState):
    batch_stats: Any


@entry
def batch_norm():
    """Rows are normalised by the mean and variance of the whole batch, which the state keeps."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(16, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
            return nn.Dense(NUM_CLASSES)(nn.relu(x))

    def init():
        model = Net()
        variables = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)))
        return BatchNormState.create(apply_fn=model.apply, tx=adamw(), **variables)

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["label"]), (logits, updates["batch_stats"])

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, batch_stats)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, {"loss": loss, "accuracy": accuracy(logits, batch["label"])}

    return Entry(init=init, batches=labelled_batches, step=step)


def _dropout(with_keys, key_of) -> Entry:
    """`with_keys(i)` is what step i receives beside its batch, `key_of` the dropout key in it."""
    model = MLP(dropout_rate=0.5)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)), train=False)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=adamw())

    def batches(num_steps):
        return [(*batch, with_keys(i)) for i, batch in enumerate(labelled_batches(num_steps))]

    def step(state, batch, keys):
        def loss_fn(params):
            rngs = {"dropout": key_of(keys, state.step)}
            logits = state.apply_fn({"params": params}, batch["x"], rngs=rngs)
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Entry(init=init, batches=batches, step=step)


@entry
def dropout_typed_key():
    """One key for the whole training, folded with the step number, as Flax's examples do."""
    return _dropout(lambda _: jax.random.key(7), jax.random.fold_in)


@entry
def dropout_old_style_key():
    """A uint32[2]: neither rows of a batch nor a scalar."""
    return _dropout(jax.random.PRNGKey, lambda key, _: key)


@entry
def dropout_dict_of_keys():
    def with_keys(i):
        return {"dropout": jax.random.key(i), "unused": jax.random.key(100 + i)}

    return _dropout(with_keys, lambda keys, _: keys["dropout"])


@entry
def dropout_key_in_state():
    """The key rests in the state, and every step splits it."""
    model = MLP(dropout_rate=0.5)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)), train=False)["params"]
        return {"params": params, "opt_state": adamw().init(params), "key": jax.random.key(3)}

    def step(state, batch):
        key, dropout_key = jax.random.split(state["key"])

        def loss_fn(params):
            logits = model.apply({"params": params}, batch["x"], rngs={"dropout": dropout_key})
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = adamw().update(grads, state["opt_state"], state["params"])
        params = jax.tree.map(jnp.add, state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    return Entry(init=init, batches=labelled_batches, step=step)
