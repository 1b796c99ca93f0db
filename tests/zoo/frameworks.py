"""The same steps in the words of Flax NNX and Equinox."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ._parts import (
    CLASSES,
    FEATURES,
    SGD,
    WIDTH,
    cast,
    cross_entropies,
    labelled,
    with_arguments,
)
from ._program import Program, program


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


@program
def equinox_filter_jit():
    """The step as its users write it: under eqx.filter_jit."""
    import equinox as eqx

    return _equinox(eqx.filter_jit(_equinox_step), "Misleading: eqx.filter_jit")
