"""Train steps of Flax's NNX examples, as `jzero.from_nnx` takes them: objects wherever they stand, mutated.

The reference is the script itself: its own step, its objects, one call after the other, on one device.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from jzero._compare import to_host

from ._entry import Entry, script
from ._models import BATCH_SIZE, NUM_CLASSES, SEQ_LEN, VOCAB_SIZE, adamw, labelled_batches
from .scripts_tokens import padded_tokens


def of_objects(
    train_step: Callable[..., Any], make: Callable[[], Mapping[str, Any]],
    batches: Callable[[int], list[tuple[Any, ...]]],
) -> Entry:  # fmt: skip
    """An entry of a step whose arguments are `make()`, by name in the step's order, and a batch's."""
    names = [name for name in inspect.signature(train_step).parameters if name not in make()]

    def alone(batches):
        objects, trained = make(), []
        for batch in batches:
            metrics = train_step(**objects, **dict(zip(names, batch, strict=False)))
            trained.append(to_host((nnx.state(tuple(objects.values())), metrics)))
        return trained

    step, _ = jzero.from_nnx(train_step, **make())
    init = lambda: jzero.from_nnx(train_step, **make())[1]  # noqa: E731
    return Entry(init=init, batches=batches, step=step, alone=alone)


def optimizer_of(model, tx=None):
    return nnx.Optimizer(model, tx or adamw(), wrt=nnx.Param)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.linear = nnx.Linear(8 * 16, NUM_CLASSES, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.silu(self.norm(self.dropout(self.conv(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))


def mnist_loss(model, batch, rngs):
    logits = model(batch["image"], rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@nnx.jit
def mnist_step(model, optimizer, metrics, batch, rngs):
    grad_fn = nnx.value_and_grad(mnist_loss, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch, rngs)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@script
def mnist():
    """Metrics before the batch and keys after it; BatchNorm, dropout; nothing is returned."""

    def make():
        model = CNN(nnx.Rngs(0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        # SGD: the convolution's bias has a gradient of rounding errors alone.
        optimizer = optimizer_of(model, optax.sgd(0.05, momentum=0.9))
        return {"model": model, "optimizer": optimizer, "metrics": metrics, "rngs": nnx.Rngs(1)}

    def batches(num_steps):
        rng = np.random.default_rng(40)
        return [
            ({"image": jnp.asarray(rng.normal(size=(BATCH_SIZE, 8, 8, 1)), jnp.float32),
              "label": batch["label"]},)
            for (batch,) in labelled_batches(num_steps)
        ]  # fmt: skip

    return of_objects(mnist_step, make, batches)


class Gemma(nnx.Module):
    """Rotary attention with grouped heads, RMS norms, a gated unit, the embedding as the head."""

    def __init__(self, rngs: nnx.Rngs):
        width, heads, size = 16, 4, 8
        init = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(VOCAB_SIZE, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.query = nnx.Param(init(rngs.params(), (width, heads, size)))
        self.keys_and_values = nnx.Param(init(rngs.params(), (2, width, size)))
        self.out = nnx.Param(init(rngs.params(), (heads, size, width)))
        self.gate, self.up = (nnx.Linear(width, 32, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(32, width, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, tokens, positions, attention_mask, rngs):
        x = self.embed(tokens) * 4.0
        h = self.norms[0](x)
        q = rotated(jnp.einsum("btd,dhs->bths", h, self.query[...]), positions)
        k, v = jnp.einsum("btd,cds->cbts", h, self.keys_and_values[...])
        k = rotated(k[:, :, None], positions)[:, :, 0]
        logits = jnp.einsum("bths,bus->bhtu", q, k) / 8**0.5
        weights = jax.nn.softmax(jnp.where(attention_mask[:, None], logits, -1e9))
        x = x + jnp.einsum("bhtu,bus,hsd->btd", weights, v, self.out[...])
        h = self.norms[1](x)
        x = x + self.dropout(self.down(nnx.gelu(self.gate(h)) * self.up(h)), rngs=rngs)
        return 5.0 * jnp.tanh(self.embed.attend(self.norms[2](x)) / 5.0)


def rotated(x, positions):
    """x [b, t, h, s] by the angles of its positions [b, t]."""
    angles = jnp.einsum("bt,s->bts", positions, 100.0 ** (-jnp.arange(4) / 4.0))[:, :, None]
    first, second = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.partial(nnx.jit, static_argnames=("label_smoothing", "pad_id"))
def gemma_step(
    model, optimizer, rngs, batch, train_metrics, label_smoothing=0.1, pad_id=0
):  # fmt: skip
    inputs, targets = batch["inputs"], batch["targets"]
    weights = (inputs > pad_id).astype(jnp.float32)
    segments = batch["inputs_segmentation"]
    causal = jnp.tril(jnp.ones((SEQ_LEN, SEQ_LEN), bool))[None]
    mask = causal & (inputs > pad_id)[:, None, :] & (segments[:, :, None] == segments[:, None, :])

    def loss_fn(model, rngs):
        logits = model(inputs, batch["inputs_position"], mask, rngs)
        rest = label_smoothing / (VOCAB_SIZE - 1)
        soft = jax.nn.one_hot(targets, VOCAB_SIZE) * (1 - label_smoothing - rest) + rest
        losses = -(soft * nnx.log_softmax(logits)).sum(-1) * weights
        losses = losses.sum(1) * len(losses) / weights.sum()
        return losses.mean(), (losses, logits)

    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (_, (losses, logits)), grads = grad_fn(model, rngs.fork())
    optimizer.update(model, grads)
    train_metrics.update(loss=losses, logits=logits, labels=targets)


@script
def gemma():
    """Objects on both sides of the batch; forked keys; losses of examples into a metric; packed rows."""

    def make():
        model = Gemma(nnx.Rngs(0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(weight_decay=0.1))
        return {
            "model": model,
            "optimizer": optimizer_of(model, tx),
            "rngs": nnx.Rngs(params=0, dropout=1),
            "train_metrics": metrics,
        }

    def batches(num_steps):
        rng, place = np.random.default_rng(41), np.arange(SEQ_LEN)
        found = []
        for _ in range(num_steps):
            tokens, cut = padded_tokens(rng, SEQ_LEN + 1), rng.integers(1, SEQ_LEN, (BATCH_SIZE, 1))
            positions = np.where(place < cut, place, place - cut).astype(np.float32)
            batch = {
                "inputs": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "inputs_position": jnp.asarray(positions),
                "inputs_segmentation": jnp.asarray(1 + (place >= cut), jnp.int32),
            }
            found.append((batch,))
        return found

    return of_objects(gemma_step, make, batches)
