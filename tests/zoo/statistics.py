"""State that is no mean of what devices would make of their rows: queues, counts, maxima, codebooks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    SGD,
    WIDTH,
    cast,
    classified,
    cross_entropies,
    kernel,
    labelled,
    learn,
    mlp,
    mlp_params,
    normal,
    normals,
    start,
    update,
)
from ._program import Program, program


def _unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


class _BatchNormState(train_state.TrainState):
    batch_stats: Any


class _BatchNormNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


@program
def batch_norm():
    """Flax's, as in its ImageNet example: statistics of the whole batch, as a synchronised norm's."""
    model = _BatchNormNet()

    def init(dtype):
        variables = cast(model.init(jax.random.key(0), jnp.zeros((2, FEATURES))), dtype)
        return _BatchNormState.create(apply_fn=model.apply, tx=SGD, **variables)

    def step(state, x, label):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = model.apply(variables, x, mutable=["batch_stats"])
            return cross_entropies(logits, label).mean(), (logits, changed["batch_stats"])

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, batch_stats)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        correct = (logits.argmax(-1) == label).sum()
        return state, {"loss": loss, "logits": logits, "correct": correct}

    return Program(init=init, batches=labelled, step=step, covers="A6 I4")


@program
def moco_queue():
    """The batch's keys replace the oldest of a queue, at a pointer in the state."""
    size = 80

    def init(dtype):
        params = mlp_params(dtype)
        queue = _unit(normal(30, (size, CLASSES), dtype))
        pointer = jnp.zeros((), jnp.int32)
        return start(params, teacher=params, queue=queue, pointer=pointer)

    def step(state, x, noise):
        keys = _unit(mlp(state["teacher"], x + 0.3 * noise))

        def loss_fn(params):
            queries = _unit(mlp(params, x))
            positive = (queries * keys).sum(-1, keepdims=True)
            logits = jnp.concatenate([positive, queries @ state["queue"].T], axis=1) / 0.3
            return classified(logits, jnp.zeros(x.shape[0], jnp.int32))

        state, outputs = learn(state, loss_fn)
        at = (state["pointer"] + jnp.arange(x.shape[0])) % size
        teacher = optax.incremental_update(state["params"], state["teacher"], 0.1)
        queue, pointer = state["queue"].at[at].set(keys), (at[-1] + 1).astype(jnp.int32)
        return {**state, "queue": queue, "pointer": pointer, "teacher": teacher}, outputs

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Program(init=init, batches=batches, step=step, covers="A6 I2")


def _float8(x, scale):
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jnp.clip(x / scale, -limit, limit).astype(jnp.float8_e4m3fn)


@program
def float8_amax_history():
    """Delayed scaling: the scale of a product's operands is the largest of the last steps' maxima."""
    length = 4

    def init(dtype):
        history = {name: jnp.ones(length, dtype) for name in ("x", "kernel", "grad")}
        params = {
            "first": kernel(0, (FEATURES, WIDTH), dtype),
            "head": kernel(1, (WIDTH, 10), dtype),
        }
        return start(params, history=history)

    def step(state, x, label):
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        scales = {name: past.max() / limit for name, past in state["history"].items()}

        @jax.custom_vjp
        def product(x, w, probe):
            del probe
            a, b = _float8(x, scales["x"]), _float8(w, scales["kernel"])
            return (a.astype(x.dtype) @ b.astype(x.dtype)) * (scales["x"] * scales["kernel"])

        def forward(x, w, probe):
            return product(x, w, probe), (x, w)

        def backward(saved, g):
            x, w = saved
            g8 = _float8(g, scales["grad"]).astype(g.dtype) * scales["grad"]
            return g8 @ w.T, x.T @ g8, jnp.abs(g).max()

        product.defvjp(forward, backward)

        def loss_fn(params, probe):
            h = jnp.tanh(product(x, params["first"], probe))
            return cross_entropies(h @ params["head"], label).mean()

        probe = jnp.zeros((), x.dtype)
        grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, grad_amax) = grad_fn(state["params"], probe)
        new = {"x": jnp.abs(x).max(), "kernel": jnp.abs(state["params"]["first"]).max()}
        new["grad"] = grad_amax
        history = {
            name: jnp.roll(past, 1).at[0].set(new[name]) for name, past in state["history"].items()
        }
        return update(state, grads, history=history), {"loss": loss, "amax": new}

    return Program(
        init=init,
        batches=labelled,
        step=step,
        covers="A9 I2",
        note="the gradient's maximum leaves the backward pass as the cotangent of a probe",
    )
