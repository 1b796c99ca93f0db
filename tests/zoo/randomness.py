"""Steps that see more than their rows: batch statistics, and dropout keys of every kind.

A key that is passed beside the batch is folded with the device's index, so that devices drop
different units; a key that rests in the state is the same on all devices.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training import train_state

from ._entry import Entry, entry, identity, split_reference
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
    """Running statistics vary between devices: the state keeps their mean."""

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

    def make_step(mean):
        def step(state, batch):
            def loss_fn(params):
                variables = {"params": params, "batch_stats": state.batch_stats}
                logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
                return cross_entropy(logits, batch["label"]), (logits, updates["batch_stats"])

            grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, (logits, batch_stats)), grads = grad_fn(state.params)
            state = state.apply_gradients(grads=mean(grads), batch_stats=mean(batch_stats))
            return state, mean({"loss": loss, "accuracy": accuracy(logits, batch["label"])})

        return step

    return Entry(
        init=init,
        batches=labelled_batches,
        step=make_step(identity),
        reference=split_reference(make_step),
    )


def _dropout(with_keys, key_of) -> Entry:
    """`with_keys(i)` is what step i receives beside its batch, `key_of` the dropout key in it."""
    model = MLP(dropout_rate=0.5)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)), train=False)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=adamw())

    def batches(num_steps):
        return [(*batch, with_keys(i)) for i, batch in enumerate(labelled_batches(num_steps))]

    def make_step(mean):
        def step(state, batch, keys):
            def loss_fn(params):
                rngs = {"dropout": key_of(keys, state.step)}
                logits = state.apply_fn({"params": params}, batch["x"], rngs=rngs)
                return cross_entropy(logits, batch["label"])

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=mean(grads)), mean({"loss": loss})

        return step

    return Entry(
        init=init,
        batches=batches,
        step=make_step(identity),
        reference=split_reference(make_step),
    )


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
    """The key rests in the state, so all devices drop the same units."""
    model = MLP(dropout_rate=0.5)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)), train=False)["params"]
        return {"params": params, "opt_state": adamw().init(params), "key": jax.random.key(3)}

    def make_step(mean):
        def step(state, batch):
            key, dropout_key = jax.random.split(state["key"])

            def loss_fn(params):
                rngs = {"dropout": dropout_key}
                logits = model.apply({"params": params}, batch["x"], rngs=rngs)
                return cross_entropy(logits, batch["label"])

            loss, grads = jax.value_and_grad(loss_fn)(state["params"])
            updates, opt_state = adamw().update(mean(grads), state["opt_state"], state["params"])
            params = jax.tree.map(jnp.add, state["params"], updates)
            return {"params": params, "opt_state": opt_state, "key": key}, mean({"loss": loss})

        return step

    return Entry(
        init=init,
        batches=labelled_batches,
        step=make_step(identity),
        reference=split_reference(make_step),
    )
