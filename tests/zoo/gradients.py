"""Steps with collectives of their own, which are written for one device's part of the batch."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training import train_state

from ._entry import Entry, entry
from ._models import (
    NUM_CLASSES,
    NUM_FEATURES,
    accuracy,
    adamw,
    cross_entropy,
    labelled_batches,
)
from .networks import classifier_state

AXIS = "batch"


class PmapNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8, axis_name=AXIS)(x)
        return nn.Dense(NUM_CLASSES)(nn.relu(x))


class LocalNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
        x = nn.Dropout(0.3, deterministic=False)(nn.relu(x))
        return nn.Dense(NUM_CLASSES)(x)


class PmapState(train_state.TrainState):
    batch_stats: Any


def _pmap_step(state, batch):
    """As in Flax's ImageNet example, written for `jax.pmap(..., axis_name="batch")`."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), (logits, updates)

    (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name=AXIS)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    metrics = {"loss": loss, "accuracy": accuracy(logits, batch["label"])}
    return state, jax.lax.pmean(metrics, axis_name=AXIS)


@entry
def pmap_style():
    """Its own `lax.pmean` over its own axis name, batch statistics over all devices."""

    def init():
        model = PmapNet()
        variables = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)))
        return PmapState.create(apply_fn=model.apply, tx=adamw(), **variables)

    return Entry(init=init, batches=labelled_batches, step=_pmap_step, options={"axis_name": AXIS})


@entry
def pmap_style_sum():
    """`lax.psum` of the gradients, which the user divides by the number of devices."""

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        num_devices = jax.lax.psum(1, AXIS)
        grads = jax.tree.map(lambda g: jax.lax.psum(g, AXIS) / num_devices, grads)
        return state.apply_gradients(grads=grads), {"loss": jax.lax.pmean(loss, AXIS)}

    return Entry(
        init=classifier_state,
        batches=labelled_batches,
        step=step,
        options={"axis_name": AXIS},
    )


@entry
def pmap_style_local():
    """Statistics of each device's own rows, and dropout by its own key: the meaning that pmap gives."""

    def init():
        model, keys = LocalNet(), jax.random.split(jax.random.key(0))
        rngs = {"params": keys[0], "dropout": keys[1]}
        variables = model.init(rngs, jnp.zeros((1, NUM_FEATURES)))
        return PmapState.create(apply_fn=model.apply, tx=adamw(), **variables)

    def batches(num_steps):
        keys = jax.random.split(jax.random.key(9), num_steps)
        return [(*batch, key) for batch, key in zip(labelled_batches(num_steps), keys, strict=True)]

    def step(state, batch, key):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs = {"dropout": key}
            logits, updates = state.apply_fn(
                variables, batch["x"], mutable=["batch_stats"], rngs=rngs
            )
            return cross_entropy(logits, batch["label"]), updates["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss, stats, grads = jax.lax.pmean((loss, stats, grads), AXIS)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

    return Entry(init=init, batches=batches, step=step, options={"axis_name": AXIS})
