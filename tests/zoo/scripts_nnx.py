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
from flax.training import train_state

import jzero
from jzero._compare import to_host

from ._entry import Entry, script
from ._models import BATCH_SIZE, NUM_CLASSES, SEQ_LEN, VOCAB_SIZE, adamw, labelled_batches
from .scripts_linen import padded_tokens


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


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, num_in, num_out, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (num_in, num_out)))
        self.b = nnx.Param(jnp.zeros((num_out,)))

    def __call__(self, x):
        return x @ self.w[...] + self.b[...][None]


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.count = Count(jnp.array(0))
        self.first, self.last = Linear(1, 32, rngs), Linear(32, 1, rngs)

    def __call__(self, x):
        self.count[...] += 1
        return self.last(nnx.silu(self.first(x)))


def curve(num_steps):
    """((x, y),) for each step, float32 [32, 1]."""
    rng = np.random.default_rng(42)
    xs = [rng.uniform(0, 1, (BATCH_SIZE, 1)) for _ in range(num_steps)]
    return [
        ((jnp.asarray(x, jnp.float32), jnp.asarray(0.8 * x**2 + 0.1, jnp.float32)),) for x in xs
    ]


@script
def toy_02_lifted_transforms():
    """A model that counts its calls."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        x, y = batch
        grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)

    def make():
        model = Counting(nnx.Rngs(0))
        return {"model": model, "optimizer": optimizer_of(model, optax.sgd(0.01))}

    return of_objects(train_step, make, curve)


class CountingState(train_state.TrainState):
    counts: Any
    graphdef: Any


@script
def toy_03_train_state():
    """Linen's TrainState around NNX's states: no objects, and no from_nnx."""

    def init():
        split: Any = nnx.split(Counting(nnx.Rngs(0)), nnx.Param, Count)
        graphdef, params, counts = split
        return CountingState.create(
            apply_fn=None, graphdef=graphdef, params=params, counts=counts, tx=optax.sgd(0.01)
        )

    def train_step(state, batch):
        x, y = batch

        def loss_fn(params):
            model = nnx.merge(state.graphdef, params, state.counts, copy=True)
            return jnp.mean((y - model(x)) ** 2), nnx.state(model, Count)

        grads, counts = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, counts=counts)

    return Entry(init=init, batches=curve, step=train_step, returns_metrics=False)


class Loss(nnx.Variable):
    pass


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(24, 16, rngs=rngs)
        self.mean, self.std = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = nnx.silu(self.linear(x))
        mean, std = self.mean(x), jnp.exp(self.std(x))
        self.kl_loss = Loss(jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2) / 2)
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


class NnxVae(nnx.Module):
    def __init__(self, rngs):
        self.encoder = Encoder(rngs)
        self.decoder = nnx.Linear(4, 24, rngs=rngs)

    def __call__(self, x):
        return self.decoder(self.encoder(x))


@script
def toy_05_vae():
    """A variable that the forward pass makes and the loss takes away; keys kept in the model."""

    @nnx.jit
    def train_step(model, optimizer, x):
        def loss_fn(model):
            logits = model(x)
            kl_loss = sum(jax.tree.leaves(nnx.pop(model, Loss)), 0.0)
            return optax.sigmoid_binary_cross_entropy(logits, x).mean() + 0.1 * kl_loss

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = NnxVae(nnx.Rngs(0, noise=1))
        return {"model": model, "optimizer": optimizer_of(model)}

    def batches(num_steps):
        rng = np.random.default_rng(43)
        shape = (BATCH_SIZE, 24)
        return [(jnp.asarray(rng.integers(0, 2, shape), jnp.float32),) for _ in range(num_steps)]

    return of_objects(train_step, make, batches)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.dropout(self.bn(self.linear(x))))


class ScanMLP(nnx.Module):
    def __init__(self, num_layers, rngs):
        make = nnx.vmap(Block, in_axes=0, axis_size=num_layers)
        self.layers = nnx.split_rngs(splits=num_layers)(make)(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scan_fn(x, block):
            return block(x)

        return scan_fn(x, self.layers)


@script
def toy_06_scan_over_layers():
    """Layers in a scan, each with its batch statistics and its keys."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch["x"]) - 1.0) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = ScanMLP(3, nnx.Rngs(0))
        return {"model": model, "optimizer": optimizer_of(model)}

    return of_objects(train_step, make, labelled_batches)


class ArrayLinear(nnx.Module):
    def __init__(self, num_in, num_out, rngs):
        self.w = nnx.data(jax.random.normal(rngs.params(), (num_in, num_out)))
        self.b = nnx.data(jnp.zeros((num_out,)))

    def __call__(self, x):
        return x @ self.w + self.b[None]


class ArrayMLP(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.data(jnp.array(0))
        self.first, self.last = ArrayLinear(1, 32, rngs), ArrayLinear(32, 1, rngs)

    def __call__(self, x):
        self.count += 1
        return self.last(nnx.silu(self.first(x)))


@script
def toy_07_array_leaves():
    """Parameters that are plain arrays, found by their names: DiffState, an optimizer with a filter."""

    def is_param(path, value):
        return path[-1] in ("w", "b")

    @nnx.jit
    def train_step(model, optimizer, batch):
        x, y = batch
        grad_fn = nnx.grad(
            lambda model: jnp.mean((model(x) - y) ** 2), argnums=nnx.DiffState(0, is_param)
        )
        optimizer.update(model, grad_fn(model))

    def make():
        model = ArrayMLP(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.01), wrt=is_param)}

    return of_objects(train_step, make, curve)


class Momentum(nnx.Variable):
    pass


class SGD(nnx.Pytree):
    """An optimizer of the script's own, which has the model's variables, and mutates them."""

    def __init__(self, params, learning_rate, decay=0.9):
        self.learning_rate, self.decay = learning_rate, decay
        self.params = nnx.data(params)
        self.momentum = nnx.data(
            jax.tree.map(lambda v: Momentum(jnp.zeros_like(v[...])), params, is_leaf=is_variable)
        )

    def update(self, grads):
        def update_one(param, momentum, grad):
            momentum[...] = self.decay * momentum[...] + (1 - self.decay) * grad[...]
            param[...] -= self.learning_rate * momentum[...]

        jax.tree.map(update_one, self.params, self.momentum, grads, is_leaf=is_variable)


def is_variable(x):
    return isinstance(x, nnx.Variable)


@script
def toy_10_fsdp_and_optimizer():
    """Variables that two objects share."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        x, y = batch
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(grads)
        return loss

    def make():
        model = Counting(nnx.Rngs(0))
        return {"model": model, "optimizer": SGD(nnx.variables(model, nnx.Param), 0.01)}

    return of_objects(train_step, make, curve)
