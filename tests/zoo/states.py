"""What a state and the metrics may be: containers, EMA, NNX, steps that return only the state."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

import jzero

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
from .networks import classifier_state


def _init_params():
    params = MLP().init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)))["params"]
    return params, adamw().init(params)


def _logits(params, batch):
    return MLP().apply({"params": params}, batch["x"])


def _loss(params, batch):
    return cross_entropy(_logits(params, batch), batch["label"])


def _train(params, opt_state, batch):
    loss, grads = jax.value_and_grad(_loss)(params, batch)
    updates, opt_state = adamw().update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


@entry
def state_is_dict():
    def init():
        params, opt_state = _init_params()
        return {"params": params, "opt_state": opt_state}

    def step(state, batch):
        params, opt_state, metrics = _train(state["params"], state["opt_state"], batch)
        return {"params": params, "opt_state": opt_state}, metrics

    return Entry(init=init, batches=labelled_batches, step=step)


@entry
def state_is_tuple():
    def step(state, batch):
        params, opt_state = state
        params, opt_state, metrics = _train(params, opt_state, batch)
        return (params, opt_state), metrics

    return Entry(init=_init_params, batches=labelled_batches, step=step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Training:
    params: Any
    opt_state: Any
    num_steps: jax.Array


@entry
def state_is_dataclass():
    def init():
        params, opt_state = _init_params()
        return Training(params, opt_state, num_steps=jnp.zeros((), jnp.int32))

    def step(state, batch):
        params, opt_state, metrics = _train(state.params, state.opt_state, batch)
        return Training(params, opt_state, state.num_steps + 1), metrics

    return Entry(init=init, batches=labelled_batches, step=step)


class EmaState(train_state.TrainState):
    ema_params: Any


@entry
def ema():
    """A copy of the parameters that follows them, read by nothing but its own update."""

    def init():
        params, _ = _init_params()
        # A copy of its own: a state whose two leaves share one buffer cannot be donated.
        ema_params = jax.tree.map(jnp.copy, params)
        return EmaState.create(
            apply_fn=MLP().apply, params=params, tx=adamw(), ema_params=ema_params
        )

    def step(state, batch):
        loss, grads = jax.value_and_grad(_loss)(state.params, batch)
        state = state.apply_gradients(grads=grads)
        ema_params = optax.incremental_update(state.params, state.ema_params, 0.1)
        return state.replace(ema_params=ema_params), {"loss": loss}

    return Entry(init=init, batches=labelled_batches, step=step)


@entry
def returns_only_state():
    def step(state, batch):
        grads = jax.grad(_loss)(state.params, batch)
        return state.apply_gradients(grads=grads)

    return Entry(init=classifier_state, batches=labelled_batches, step=step, returns_metrics=False)


@flax.struct.dataclass
class Average:
    """clu's: a sum over the examples, and how many there were."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array) -> "Average":
        return cls(total=values.sum(), count=jnp.ones(values.shape, jnp.int32).sum())

    def compute(self) -> jax.Array:
        return self.total / self.count


@flax.struct.dataclass
class Metrics:
    loss: Average
    accuracy: Average


@entry
def clu_metrics():
    """Sums over the examples, and how many there are, are those of the whole batch."""

    def step(state, batch):
        def loss_fn(params):
            logits = _logits(params, batch)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (losses, logits)

        (_, (losses, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        metrics = Metrics(loss=Average.of(losses), accuracy=Average.of(right))
        return state.apply_gradients(grads=grads), metrics

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


@entry
def per_example_outputs():
    """Outputs with one row per example come back as those of the whole batch."""

    def step(state, batch):
        def loss_fn(params):
            logits = _logits(params, batch)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), {"losses": losses, "logits": logits}

        (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, **rows}

    return Entry(init=classifier_state, batches=labelled_batches, step=step)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(NUM_FEATURES, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, NUM_CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def _nnx_objects():
    model = NnxNet(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return model, optimizer, metrics


def _nnx_train(model, optimizer, metrics, batch):
    """The mutating step of Flax's tutorial."""

    def loss_fn(model):
        logits = model(batch["x"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return {"loss": loss}


@entry
def nnx_functional():
    """`nnx.merge` and `nnx.state` inside; the `nnx.State` holds a dropout key and its count."""
    graphdef = nnx.graphdef(_nnx_objects())

    def step(state, batch):
        model, optimizer, metrics = nnx.merge(graphdef, state)
        outputs = _nnx_train(model, optimizer, metrics, batch)
        return nnx.state((model, optimizer, metrics)), outputs

    return Entry(init=lambda: nnx.state(_nnx_objects()), batches=labelled_batches, step=step)


@entry
def nnx_mutating():
    """The same by `jzero.from_nnx`, which finds the state in the objects."""

    def init():
        return jzero.from_nnx(_nnx_train, *_nnx_objects())[1]

    step, _ = jzero.from_nnx(_nnx_train, *_nnx_objects())
    return Entry(init=init, batches=labelled_batches, step=step)


@entry
def running_metrics():
    """Floats in the state that no optimizer touches: a running accuracy, and a count of rows."""

    def init():
        return {"train": classifier_state(), "accuracy": jnp.zeros(()), "rows": jnp.zeros(())}

    def step(state, batch):
        train = state["train"]
        right = accuracy(_logits(train.params, batch), batch["label"])
        loss, grads = jax.value_and_grad(_loss)(train.params, batch)
        state = {
            "train": train.apply_gradients(grads=grads),
            "accuracy": 0.9 * state["accuracy"] + 0.1 * right,
            "rows": state["rows"] + batch["x"].shape[0],
        }
        return state, {"loss": loss}

    return Entry(init=init, batches=labelled_batches, step=step)
