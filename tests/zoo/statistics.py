"""State that is no mean of what devices would make of their rows: queues, counts, maxima, codebooks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
    dense,
    dense_params,
    kernel,
    labelled,
    learn,
    mlp,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    update,
    with_arguments,
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
def welford():
    """Running moments merged with the batch's, and the number of rows seen so far."""

    def init(dtype):
        moments = {
            "count": jnp.zeros((), jnp.int32),
            "mean": jnp.zeros(FEATURES, dtype),
            "squares": jnp.zeros(FEATURES, dtype),
        }
        return {**mlp_start(dtype), "moments": moments}

    def merged(old, x):
        new_count, new_mean = x.shape[0], x.mean(0)
        total = old["count"] + new_count
        delta = new_mean - old["mean"]
        squares = ((x - new_mean[None]) ** 2).sum(0)
        share = (old["count"] / total).astype(x.dtype) * new_count
        return {
            "count": total,
            "mean": old["mean"] + delta * (new_count / total).astype(x.dtype),
            "squares": old["squares"] + squares + delta**2 * share,
        }

    def step(state, x, label):
        moments = merged(state["moments"], x)
        deviation = jnp.sqrt(moments["squares"] / moments["count"] + 1e-3)
        normalised = (x - moments["mean"][None]) / deviation[None]

        def loss_fn(params):
            return cross_entropies(mlp(params, normalised), label).mean(), {}

        return learn(state, loss_fn, moments=moments)

    return Program(init=init, batches=labelled, step=step, covers="A5")


@program
def histogram():
    """Counts of values and of classes, a running maximum and minimum."""
    edges = np.linspace(-2, 2, 9)

    def init(dtype):
        seen = {
            "values": jnp.zeros(8, jnp.int32),
            "classes": jnp.zeros(CLASSES, jnp.int32),
            "pairs": jnp.zeros((CLASSES, CLASSES), jnp.int32),
            "largest": jnp.full(FEATURES, -jnp.inf, dtype),
            "smallest": jnp.asarray(jnp.inf, dtype),
        }
        return {**mlp_start(dtype), "seen": seen}

    def step(state, x, label):
        def loss_fn(params):
            logits = mlp(params, x)
            return cross_entropies(logits, label).mean(), {"guess": logits.argmax(-1)}

        state, outputs = learn(state, loss_fn)
        old = state["seen"]
        values = jnp.histogram(jnp.clip(x, -1.99, 1.99), jnp.asarray(edges, x.dtype))[0]
        seen = {
            "values": old["values"] + values.astype(jnp.int32),
            "classes": old["classes"] + jnp.bincount(label, length=CLASSES).astype(jnp.int32),
            "pairs": old["pairs"].at[label, outputs["guess"]].add(1),
            "largest": jnp.maximum(old["largest"], x.max(0)),
            "smallest": jnp.minimum(old["smallest"], x.min()),
        }
        return {**state, "seen": seen}, outputs

    return Program(init=init, batches=labelled, step=step, covers="A6 A5 I2")


@program
def vq_codebook():
    """VQ-VAE: codes follow the sums and counts of the rows that choose them; unused ones restart."""
    num_codes, decay = 12, 0.8

    def init(dtype):
        params = {
            "encoder": dense_params(0, FEATURES, WIDTH, dtype),
            "decoder": dense_params(2, WIDTH, FEATURES, dtype),
        }
        codes = normal(4, (num_codes, WIDTH), dtype)
        return start(params, codes=codes, counts=jnp.ones(num_codes, dtype), sums=codes)

    def step(state, x):
        def loss_fn(params):
            z = dense(params["encoder"], x)
            distances = ((z[:, None] - state["codes"][None]) ** 2).sum(-1)
            chosen = distances.argmin(-1)
            quantised = state["codes"][chosen]
            passed = z + jax.lax.stop_gradient(quantised - z)
            error = ((dense(params["decoder"], passed) - x) ** 2).mean()
            commitment = ((z - quantised) ** 2).mean()
            return error + 0.25 * commitment, {"chosen": chosen, "z": z}

        state, outputs = learn(state, loss_fn)
        hot = jax.nn.one_hot(outputs["chosen"], num_codes, dtype=x.dtype)
        counts = decay * state["counts"] + (1 - decay) * hot.sum(0)
        sums = decay * state["sums"] + (1 - decay) * hot.T @ outputs["z"]
        is_dead = (counts < 0.6)[:, None]
        codes = jnp.where(is_dead, outputs["z"][:num_codes], sums / (counts[:, None] + 1e-3))
        usage = hot.mean(0)
        outputs["perplexity"] = jnp.exp(-(usage * jnp.log(usage + 1e-6)).sum())
        return {**state, "codes": codes, "counts": counts, "sums": sums}, outputs

    return Program(init=init, batches=normals((ROWS, FEATURES)), step=step, covers="A6 A7")


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


@program
def memory_bank():
    """One remembered embedding for each of 64 examples, written where the batch's indices say."""

    def indices(i, dtype):
        return (np.random.default_rng(80 + i).permutation(64)[:ROWS].astype(np.int32),)

    def init(dtype):
        return {**mlp_start(dtype), "bank": _unit(normal(30, (64, CLASSES), dtype))}

    def step(state, x, label, index):
        remembered = state["bank"][index]

        def loss_fn(params):
            z = _unit(mlp(params, x))
            logits = z @ state["bank"].T / 0.3
            return cross_entropies(logits, index).mean(), {"z": z}

        state, outputs = learn(state, loss_fn)
        bank = state["bank"].at[index].set(_unit(0.5 * remembered + 0.5 * outputs["z"]))
        return {**state, "bank": bank}, outputs

    batches = with_arguments(labelled, indices)
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
