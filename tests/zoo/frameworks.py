"""The same steps in the words of Flax Linen, Flax NNX, Equinox and Haiku."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from ._parts import (
    CLASSES,
    FEATURES,
    SGD,
    WIDTH,
    cast,
    cross_entropies,
    labelled,
    normals,
    with_arguments,
)
from ._program import Program, program, relative


class _ConvNet(nn.Module):
    """The ImageNet example's kind of net, small."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Conv(8, (3, 3), feature_group_count=8)(x)
        x = nn.GroupNorm(num_groups=4)(x)
        return nn.Dense(CLASSES)(nn.silu(x).mean((1, 2)))


class _WithStatistics(train_state.TrainState):
    batch_stats: Any


@relative
def linen_batch_stats():
    """A mutable collection beside the parameters, on images."""
    model = _ConvNet()

    def init(dtype):
        variables = model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 3)), True)
        return _WithStatistics.create(apply_fn=model.apply, tx=SGD, **cast(variables, dtype))

    def step(state, image, label):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, image, True, mutable=["batch_stats"])
            return cross_entropies(logits, label).mean(), (logits, changed["batch_stats"])

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, stats)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": loss, "correct": (logits.argmax(-1) == label).sum()}

    batches = normals((16, 6, 6, 3), seed=11, labels=16)

    return Program(init=init, batches=batches, step=step, covers="I4")


class _Nnx(nnx.Module):
    def __init__(self, rngs, dtype):
        self.first = nnx.Linear(FEATURES, WIDTH, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs, param_dtype=dtype)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        h = self.norm(jnp.sin(2 * self.first(x)))
        return self.last(self.dropout(nnx.relu(h)) + x.mean())


@program
def nnx_functional():
    """nnx.split and nnx.merge: batch statistics and the dropout's key count in the state."""

    def build(dtype):
        model = _Nnx(nnx.Rngs(0, dropout=1), dtype)
        model.train()
        return nnx.split(model, nnx.Param, ...)

    def init(dtype):
        _, params, rest = build(dtype)
        return {"params": params, "opt": SGD.init(params), "rest": cast(rest, dtype)}

    def step(state, x, label):
        graph = build(x.dtype)[0]

        def loss_fn(params):
            model = nnx.merge(graph, params, state["rest"], copy=True)
            logits = model(x)
            rest = nnx.state(model, nnx.Not(nnx.Param))
            return cross_entropies(logits, label).mean(), (logits, rest)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, rest)), grads = grad_fn(state["params"])
        updates, opt = SGD.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        outputs = {"loss": loss, "correct": (logits.argmax(-1) == label).sum()}
        return {"params": params, "opt": opt, "rest": rest}, outputs

    return Program(init=init, batches=labelled, step=step, covers="I4 I3 A6")


def _equinox_init(dtype):
    import equinox as eqx

    model = eqx.nn.MLP(FEATURES, CLASSES, WIDTH, 2, key=jax.random.key(0), dtype=jnp.dtype(dtype))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, static


def _equinox_step(state, x, label, key):
    import equinox as eqx

    _, static = _equinox_init(x.dtype)

    def loss_fn(params):
        model = eqx.combine(params, static)
        keys = jax.random.split(key, x.shape[0])
        drop = eqx.nn.Dropout(0.2)
        logits = jax.vmap(lambda row, k: model(drop(row, key=k)))(x, keys)
        losses = cross_entropies(logits, label)
        return losses.mean(), losses

    (loss, losses), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = SGD.update(grads, state["opt"], state["params"])
    params = eqx.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss, "losses": losses}


def _equinox_start(dtype):
    params, _ = _equinox_init(dtype)
    return {"params": params, "opt": SGD.init(params)}


def _equinox(step, note=""):
    return Program(
        init=_equinox_start,
        batches=with_arguments(labelled, lambda i, _: (jax.random.key(i),)),
        step=step,
        covers="I4 B3 I3",
        note=note,
    )


@relative
def equinox():
    """A partitioned module, vmapped over rows with a key for each."""
    return _equinox(_equinox_step)


@program
def equinox_filter_jit():
    """The step as its users write it: under eqx.filter_jit."""
    import equinox as eqx

    return _equinox(eqx.filter_jit(_equinox_step), "Misleading: eqx.filter_jit")


@relative
def equinox_batch_norm():
    """A stateful norm over a vmapped axis with a name, as its users must write it."""
    import equinox as eqx

    class Net(eqx.Module):
        first: Any
        last: Any
        norm: Any

        def __init__(self, dtype):
            keys = jax.random.split(jax.random.key(0))
            self.first = eqx.nn.Linear(FEATURES, WIDTH, key=keys[0], dtype=dtype)
            self.last = eqx.nn.Linear(WIDTH, CLASSES, key=keys[1], dtype=dtype)
            self.norm = eqx.nn.BatchNorm(WIDTH, "rows", mode="batch", dtype=dtype)

        def __call__(self, row, stats):
            # A bias right before a norm would have a gradient of rounding errors alone.
            h, stats = self.norm(jnp.sin(2 * self.first(row)), stats)
            return self.last(jax.nn.relu(h)), stats

    def build(dtype):
        model, stats = eqx.nn.make_with_state(Net)(jnp.dtype(dtype))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        leaves, structure = jax.tree.flatten(stats)
        return params, static, leaves, structure

    def init(dtype):
        params, _, leaves, _ = build(dtype)
        return {"params": params, "opt": SGD.init(params), "stats": cast(leaves, dtype)}

    def step(state, x, label):
        _, static, _, structure = build(x.dtype)

        def loss_fn(params):
            model = eqx.combine(params, static)
            stats = jax.tree.unflatten(structure, state["stats"])
            mapped = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
            logits, stats = mapped(x, stats)
            return cross_entropies(logits, label).mean(), (logits, jax.tree.leaves(stats))

        grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, stats)), grads = grad_fn(state["params"])
        updates, opt = SGD.update(grads, state["opt"], state["params"])
        params = eqx.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "stats": stats}, {"loss": loss, "logits": logits}

    return Program(
        init=init,
        batches=labelled,
        step=step,
        covers="I4 A6",
        note="pmean over a name of the step's own vmap: no name of devices",
    )


@program
def haiku():
    """transform_with_state: a norm with running averages, dropout from next_rng_key."""
    import haiku as hk

    def forward(x):
        h = jnp.sin(2 * hk.Linear(WIDTH)(x))
        h = hk.BatchNorm(True, True, 0.8)(h, is_training=True)
        h = hk.dropout(hk.next_rng_key(), 0.3, jax.nn.relu(h))
        return hk.Linear(CLASSES)(h)

    net: Any = hk.transform_with_state(forward)

    def init(dtype):
        params, stats = net.init(jax.random.key(0), jnp.ones((2, FEATURES), dtype))
        params, stats = cast(params, dtype), cast(stats, dtype)
        return {"params": params, "opt": SGD.init(params), "stats": stats}

    def step(state, x, label, key):
        def loss_fn(params):
            logits, stats = net.apply(params, state["stats"], key, x)
            return cross_entropies(logits, label).mean(), (logits, stats)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, stats)), grads = grad_fn(state["params"])
        updates, opt = SGD.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "stats": stats}, {"loss": loss, "logits": logits}

    batches = with_arguments(labelled, lambda i, _: (jax.random.PRNGKey(i),))
    return Program(init=init, batches=batches, step=step, covers="I4 I3 A6")
