"""State that is no mean of what devices would make of their rows: queues, counts, maxima, codebooks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from ._family import Family, family, relative
from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    SGD,
    WIDTH,
    cast,
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


@family
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

    return Family(init=init, batches=labelled, step=step, covers="A6 I4")


@family
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

    return Family(init=init, batches=labelled, step=step, covers="A5")


@family
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

    return Family(init=init, batches=labelled, step=step, covers="A6 A5 I2")


@family
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

    return Family(init=init, batches=normals((ROWS, FEATURES)), step=step, covers="A6 A7")


@family
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
            losses = cross_entropies(logits, jnp.zeros(x.shape[0], jnp.int32))
            return losses.mean(), {"losses": losses}

        state, outputs = learn(state, loss_fn)
        at = (state["pointer"] + jnp.arange(x.shape[0])) % size
        teacher = optax.incremental_update(state["params"], state["teacher"], 0.1)
        queue, pointer = state["queue"].at[at].set(keys), (at[-1] + 1).astype(jnp.int32)
        return {**state, "queue": queue, "pointer": pointer, "teacher": teacher}, outputs

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=init, batches=batches, step=step, covers="A6 I2")


@relative
def queue_by_slices():
    """The same by a dynamic update slice and by dropping the oldest rows."""

    def init(dtype):
        ring, line = normal(30, (64, CLASSES), dtype), normal(31, (40, CLASSES), dtype)
        return {**mlp_start(dtype), "ring": ring, "line": line, "at": jnp.zeros((), jnp.int32)}

    def step(state, x, label):
        def loss_fn(params):
            z = mlp(params, x)
            apart = jnp.abs(z @ state["ring"].T).mean() + jnp.abs(z @ state["line"].T).mean()
            return cross_entropies(z, label).mean() + 0.1 * apart, {"z": z}

        state, outputs = learn(state, loss_fn)
        num = x.shape[0]
        ring = jax.lax.dynamic_update_slice_in_dim(state["ring"], outputs["z"], state["at"], axis=0)
        line = jnp.concatenate([state["line"][num:], outputs["z"]])
        return {**state, "ring": ring, "line": line, "at": (state["at"] + num) % 64}, outputs

    return Family(init=init, batches=labelled, step=step, covers="A6 A7 I2")


@family
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
    return Family(init=init, batches=batches, step=step, covers="A6 I2")


@relative
def replay_buffer():
    """Transitions go into a ring, and the gradient is of rows drawn from it."""
    size = 96

    def init(dtype):
        buffer = {
            "x": normal(30, (size, FEATURES), dtype),
            "label": jnp.zeros(size, jnp.int32),
            "filled": jnp.asarray(10, jnp.int32),
        }
        return {**mlp_start(dtype), "buffer": buffer}

    def step(state, x, label, key):
        old = state["buffer"]
        at = (old["filled"] + jnp.arange(x.shape[0])) % size
        buffer = {
            "x": old["x"].at[at].set(x),
            "label": old["label"].at[at].set(label),
            "filled": old["filled"] + x.shape[0],
        }
        drawn = jax.random.randint(key, (24,), 0, jnp.minimum(buffer["filled"], size))

        def loss_fn(params):
            losses = cross_entropies(mlp(params, buffer["x"][drawn]), buffer["label"][drawn])
            return losses.mean(), {"drawn": drawn, "losses": losses}

        return learn(state, loss_fn, buffer=buffer)

    batches = with_arguments(labelled, lambda i, _: (jax.random.key(i),))
    return Family(init=init, batches=batches, step=step, covers="A6 A5 I3")


@relative
def dino_centre():
    """A teacher's outputs are centred by a running mean; the teacher follows the student."""

    def init(dtype):
        params = mlp_params(dtype)
        return start(params, teacher=params, centre=jnp.zeros(CLASSES, dtype))

    def step(state, x, noise):
        target = mlp(state["teacher"], x + 0.3 * noise)
        probs = jax.nn.softmax((target - state["centre"][None]) / 0.3)

        def loss_fn(params):
            return -(probs * jax.nn.log_softmax(mlp(params, x))).sum(-1).mean(), {}

        state, outputs = learn(state, loss_fn)
        centre = 0.8 * state["centre"] + 0.2 * target.mean(0)
        teacher = optax.incremental_update(state["params"], state["teacher"], 0.1)
        return {**state, "centre": centre, "teacher": teacher}, outputs

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Family(init=init, batches=batches, step=step, covers="A6")


@relative
def running_quantile():
    """The state follows a quantile of all rows, by sort, and rows above it are clipped."""

    def init(dtype):
        return {**mlp_start(dtype), "bound": jnp.asarray(2.5, dtype)}

    def step(state, x, label):
        def loss_fn(params):
            losses = cross_entropies(mlp(params, x), label)
            kept = losses < state["bound"]
            return jnp.minimum(losses, state["bound"]).mean(), {"losses": losses, "kept": kept}

        state, outputs = learn(state, loss_fn)
        bound = 0.7 * state["bound"] + 0.3 * jnp.quantile(outputs["losses"], 0.8)
        return {**state, "bound": bound}, {**outputs, "num_kept": outputs["kept"].sum()}

    return Family(init=init, batches=labelled, step=step, covers="A6 A7")


@relative
def kfac_factors():
    """Running second moments of inputs and of output gradients precondition the gradient."""

    def init(dtype):
        params = dense_params(0, FEATURES, CLASSES, dtype)
        factors = {"in": jnp.eye(FEATURES, dtype=dtype), "out": jnp.eye(CLASSES, dtype=dtype)}
        return start(params, factors=factors)

    def step(state, x, label):
        def loss_fn(params, probe):
            losses = cross_entropies(dense(params, x) + probe, label)
            return losses.mean(), losses

        probe = jnp.zeros((x.shape[0], CLASSES), x.dtype)
        grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (loss, losses), (grads, of_rows) = grad_fn(state["params"], probe)
        of_rows = of_rows * x.shape[0]
        factors = {
            "in": 0.7 * state["factors"]["in"] + 0.3 * x.T @ x / x.shape[0],
            "out": 0.7 * state["factors"]["out"] + 0.3 * of_rows.T @ of_rows / x.shape[0],
        }
        damped = [f + 0.1 * jnp.eye(f.shape[0], dtype=f.dtype) for f in factors.values()]
        left = jnp.linalg.solve(damped[0], grads["kernel"])
        natural = jnp.linalg.solve(damped[1], left.T).T
        grads = {"kernel": 0.1 * natural, "bias": grads["bias"]}
        return update(state, grads, factors=factors), {"loss": loss, "losses": losses}

    return Family(init=init, batches=labelled, step=step, covers="A6 A5")


@relative
def spectral_norm():
    """One power iteration in each step: a state that the batch reaches only through the weights."""

    def init(dtype):
        return start(mlp_params(dtype), u=_unit(normal(30, (WIDTH,), dtype)))

    def step(state, x, label):
        weights = state["params"][0]["kernel"]
        v = _unit(weights @ state["u"])
        u = _unit(weights.T @ v)

        def loss_fn(params):
            first, second = params
            size = jax.lax.stop_gradient(v) @ first["kernel"] @ jax.lax.stop_gradient(u)
            first = {**first, "kernel": first["kernel"] / size}
            return cross_entropies(mlp([first, second], x), label).mean(), {"size": size}

        return learn(state, loss_fn, u=u)

    return Family(init=init, batches=labelled, step=step, covers="A6")


def _float8(x, scale):
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jnp.clip(x / scale, -limit, limit).astype(jnp.float8_e4m3fn)


@family
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

    return Family(
        init=init,
        batches=labelled,
        step=step,
        covers="A9 I2",
        note="the gradient's maximum leaves the backward pass as the cotangent of a probe",
    )


@relative
def float8_flax():
    """Flax's own Fp8 dot-general, whose scales and histories are overwritten by their gradients."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)
            return nn.Dense(CLASSES)(nn.tanh(x))

    model = Net()

    def init(dtype):
        variables = model.init(jax.random.key(0), jnp.zeros((2, FEATURES)))
        params, scales = cast(variables["params"], dtype), variables["_overwrite_with_gradient"]
        return start(params, scales=scales)

    def step(state, x, label):
        def loss_fn(params, scales):
            variables = {"params": params, "_overwrite_with_gradient": scales}
            logits: Any = model.apply(variables, x)
            losses = cross_entropies(logits, label)
            return losses.mean(), losses

        grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (loss, losses), (grads, scales) = grad_fn(state["params"], state["scales"])
        return update(state, grads, scales=scales), {"loss": loss, "losses": losses}

    return Family(
        init=init,
        batches=labelled,
        step=step,
        covers="A9 I2",
        exact_dtypes=("float32",),
        note="the products are in float8 whatever the parameters are",
    )
