"""What is local on purpose: norms and routing in groups of rows; and opaque calls that are promised to be."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.training import train_state

import jzero

from ._family import Family, family, relative
from ._parts import (
    CLASSES,
    FEATURES,
    SGD,
    WIDTH,
    cast,
    cross_entropies,
    kernel,
    labelled,
    learn,
    mlp,
    mlp_start,
    start,
)

GROUPS = 16  # of 2 rows: 8 devices have 2 each, with 2 microbatches one


class _State(train_state.TrainState):
    batch_stats: Any


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8, epsilon=0.1)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


def _ghost_batch_norm(groups):
    model = _Net()

    def init(dtype):
        variables = cast(model.init(jax.random.key(0), jnp.zeros((2, FEATURES))), dtype)
        return _State.create(apply_fn=model.apply, tx=SGD, **variables)

    def forward(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    def step(state, x, label):
        def loss_fn(params):
            apply = jzero.groups(forward, groups, in_axes=(None, 0), out_axes=(0, None))
            logits, new = apply({"params": params, "batch_stats": state.batch_stats}, x)
            batch_stats = jax.tree.map(lambda x: x.mean(0), new["batch_stats"])
            return cross_entropies(logits, label).mean(), (logits, batch_stats)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, batch_stats)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, {"loss": loss, "logits": logits}

    return Family(init=init, batches=labelled, step=step, covers="A6")


@family
def ghost_batch_norm():
    """Flax's BatchNorm in groups of two rows, its statistics averaged over the groups."""
    return _ghost_batch_norm(GROUPS)


@relative
def ghost_batch_norm_of_few_groups():
    """The same in two groups, which no more than two devices divide: by gathering."""
    return _ghost_batch_norm(2)


class _NNXNet(nnx.Module):
    def __init__(self, dtype):
        rngs, types = nnx.Rngs(0), {"dtype": dtype, "param_dtype": dtype}
        self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs, **types)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, epsilon=0.1, rngs=rngs, **types)
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs, **types)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


@relative
def ghost_batch_norm_of_nnx():
    """The same, of NNX."""

    def init(dtype):
        model = _NNXNet(dtype)
        stats = cast(nnx.state(model, nnx.BatchStat), dtype)
        return start(nnx.state(model, nnx.Param), stats=stats)

    def step(state, x, label):
        graph = nnx.graphdef(nnx.eval_shape(lambda: _NNXNet(x.dtype)))

        def forward(params, stats, x):
            model = nnx.merge(graph, params, stats, copy=True)
            return model(x), nnx.state(model, nnx.BatchStat)

        def loss_fn(params):
            apply = jzero.groups(forward, GROUPS, in_axes=(None, None, 0), out_axes=(0, None))
            logits, stats = apply(params, state["stats"], x)
            stats = jax.tree.map(lambda x: x.mean(0), stats)
            return cross_entropies(logits, label).mean(), {"stats": stats}

        new, outputs = learn(state, loss_fn)
        return {**new, "stats": outputs.pop("stats")}, outputs

    return Family(init=init, batches=labelled, step=step, covers="A6")


@family
def experts_in_groups():
    """Routing with a capacity for each group: who comes late in its group is dropped there."""
    experts, capacity = 4, 1

    def init(dtype):
        params = {
            "router": kernel(1, (FEATURES, experts), dtype),
            "up": kernel(2, (experts, FEATURES, WIDTH), dtype),
            "down": kernel(3, (experts, WIDTH, CLASSES), dtype),
        }
        return start(params)

    def route(params, x):
        chances = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(chances.argmax(-1), experts, dtype=x.dtype)
        place = (jnp.cumsum(chosen, axis=0) - 1) * chosen
        kept = chosen * (place < capacity)
        slots = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
        sent = jnp.einsum("re,rc->rec", kept, slots)
        inside = jnp.einsum("rec,rd->ecd", sent, x)
        outside = jnp.tanh(jnp.einsum("ecd,edw->ecw", inside, params["up"]))
        outside = jnp.einsum("ecw,ewk->eck", outside, params["down"])
        weights = sent * (chances * kept).sum(-1)[:, None, None]
        balance = experts * (chosen.mean(0) * chances.mean(0)).sum()
        return jnp.einsum("rec,eck->rk", weights, outside), balance, kept.sum().astype(jnp.int32)

    def step(state, x, label):
        def loss_fn(params):
            apply = jzero.groups(route, GROUPS, in_axes=(None, 0), out_axes=(0, None, None))
            logits, balance, kept = apply(params, x)
            loss = cross_entropies(logits, label).mean() + 0.1 * balance.mean()
            return loss, {"kept": kept.sum()}

        return learn(state, loss_fn)

    return Family(init=init, batches=labelled, step=step, covers="A8")


@family
def host_function_of_each_row():
    """A callback in a forward and in a backward pass, promised to treat rows apart."""

    def call(fn, *arrays):
        shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
        return jax.pure_callback(fn, shape, *arrays, vmap_method="expand_dims")

    @jax.custom_vjp
    def softsign(x):
        return call(lambda x: x / (1 + np.abs(x)), x)

    def backward(x, cotangent):
        return (call(lambda x, ct: ct / (1 + np.abs(x)) ** 2, x, cotangent),)

    softsign.defvjp(lambda x: (softsign(x), x), backward)

    def step(state, x, label):
        def loss_fn(params):
            logits = jzero.per_example(softsign)(mlp(params, x))
            return cross_entropies(logits, label).mean(), {}

        return learn(state, loss_fn)

    return Family(init=mlp_start, batches=labelled, step=step, covers="B2")
