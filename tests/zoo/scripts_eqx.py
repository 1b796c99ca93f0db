"""Train steps of Equinox's examples, as `jzero.from_eqx` takes them: modules taken and returned.

The reference is the script itself: its own step under `eqx.filter_jit`, one call after the other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero._compare import to_host

from ._entry import Entry, script
from ._models import (
    BATCH_SIZE,
    NUM_CLASSES,
    NUM_FEATURES,
    SEQ_LEN,
    VOCAB_SIZE,
    adamw,
    cross_entropy,
    labelled_batches,
    token_batches,
)


def of_values(
    train_step: Callable[..., Any], make: Callable[[], Mapping[str, Any]],
    batches: Callable[[int], list[tuple[Any, ...]]], batch_name: str, returned: tuple[str, ...],
) -> Entry:  # fmt: skip
    """An entry of a step that takes `make()` by name and one argument more, and returns what is named."""

    def alone(batches):
        values, trained = dict(make()), []
        for (batch,) in batches:
            found = dict(zip(returned, train_step(**values, **{batch_name: batch}), strict=True))
            loss = found.pop("loss")
            values |= found
            state = eqx.filter(tuple(values.values()), eqx.is_array)
            trained.append(to_host((state, loss)))
        return trained

    def init():
        return jzero.from_eqx(train_step, **make())[1]

    step, _ = jzero.from_eqx(train_step, **make())
    return Entry(init=init, batches=batches, step=step, alone=alone)


class CNN(eqx.Module):
    """The MNIST example's: layers and functions in one list."""

    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 4, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.silu,
            jnp.ravel,
            eqx.nn.Linear(4 * 81, 16, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, NUM_CLASSES, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@script
def eqx_mnist():
    """Functions among the layers; the model's arrays are its leaves that are arrays."""
    tx = adamw()

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        def loss_fn(model, x, y):
            return -jnp.mean(jnp.take_along_axis(jax.vmap(model)(x), y[:, None], axis=1))

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch["image"], batch["label"])
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def make():
        model = CNN(jax.random.key(0))
        return {"model": model, "opt_state": tx.init(eqx.filter(model, eqx.is_array))}

    def batches(num_steps):
        rng = np.random.default_rng(50)
        return [
            ({"image": jnp.asarray(rng.normal(size=(BATCH_SIZE, 1, 12, 12)), jnp.float32),
              "label": batch["label"]},)
            for (batch,) in labelled_batches(num_steps)
        ]  # fmt: skip

    return of_values(make_step, make, batches, "batch", ("model", "opt_state", "loss"))


class Classifier(eqx.Module):
    """The BERT example's kind: embedding, attention, a norm, dropout, and a head over the first token."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB_SIZE, 16, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[1])
        self.norm = eqx.nn.LayerNorm(16)
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(16, 2, key=keys[2])

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens)
        x = jax.vmap(self.norm)(x + self.attention(x, x, x))
        return self.head(self.dropout(x, key=key)[0])


@script
def eqx_bert():
    """The loss first and a key last among what is returned; the optimizer is an argument."""

    @eqx.filter_jit
    def make_step(model, inputs, opt_state, key, tx):
        key, new_key = jax.random.split(key)

        def loss_fn(model):
            keys = jax.random.split(key, inputs.shape[0])
            logits = jax.vmap(model)(inputs[:, :SEQ_LEN], keys)
            return cross_entropy(logits, inputs[:, -1] % 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return loss, eqx.apply_updates(model, updates), opt_state, new_key

    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(weight_decay=0.1))

    def make():
        model = Classifier(jax.random.key(0))
        opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        return {"model": model, "opt_state": opt_state, "key": jax.random.PRNGKey(1), "tx": tx}

    returned = ("loss", "model", "opt_state", "key")
    return of_values(make_step, make, token_batches, "inputs", returned)


class NormNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear
    activation: Callable
    name: str
    scale: float

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(NUM_FEATURES, 16, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, "rows", mode="batch", momentum=0.8)
        self.last = eqx.nn.Linear(16, NUM_CLASSES, key=keys[1])
        self.activation, self.name, self.scale = jax.nn.silu, "net", 0.5

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.scale * self.last(self.activation(x)), state


@script
def eqx_batch_norm():
    """The stateful example's: `eqx.nn.State` beside the model; not under filter_jit."""
    tx = adamw()

    def train_step(model, state, opt_state, batch):
        def loss_fn(model, state):
            mapped = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
            logits, state = mapped(batch["x"], state)
            return cross_entropy(logits, batch["label"]), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    def make():
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
        opt_state = tx.init(eqx.filter(model, eqx.is_array))
        return {"model": model, "state": state, "opt_state": opt_state}

    returned = ("model", "state", "opt_state", "loss")
    return of_values(train_step, make, labelled_batches, "batch", returned)
