"""What is local on purpose: norms and routing in groups of rows; and opaque calls that are promised to be."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state

import jzero

from ._parts import (
    CLASSES,
    FEATURES,
    SGD,
    WIDTH,
    cast,
    cross_entropies,
    kernel,
    labelled,
    learning,
    mlp,
    mlp_start,
    start,
)
from ._program import Program, program, relative

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

    return Program(init=init, batches=labelled, step=step, covers="A6")


@program
def ghost_batch_norm():
    """Flax's BatchNorm in groups of two rows, its statistics averaged over the groups."""
    return _ghost_batch_norm(GROUPS)


@relative
def ghost_batch_norm_of_few_groups():
    """The same in two groups, which no more than two devices divide: by gathering."""
    return _ghost_batch_norm(2)


@program
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

    def loss(params, x, label):
        apply = jzero.groups(route, GROUPS, in_axes=(None, 0), out_axes=(0, None, None))
        logits, balance, kept = apply(params, x)
        loss = cross_entropies(logits, label).mean() + 0.1 * balance.mean()
        return loss, {"kept": kept.sum()}

    return Program(init=init, batches=labelled, step=learning(loss), covers="A8")


@program
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

    def loss(params, x, label):
        logits = jzero.per_example(softsign)(mlp(params, x))
        return cross_entropies(logits, label).mean(), {}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="B2")
