"""Whole programs in plain JAX and optax."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.example_libraries import optimizers
from jax.experimental.ode import odeint

from ._script import BATCH_SIZE, NUM_STEPS, adam, script


@script()
def lbfgs(jit):
    """All data in every step; a line search that evaluates the loss again; stops by the gradient's norm."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 3))).argmax(-1)
    opt = optax.lbfgs(memory_size=3)

    def loss_fn(params, x, y):
        logits = x @ params["w"] + params["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean() + 1e-2 * optax.tree.norm(params, squared=True)

    @jit
    def step(params, opt_state, x, y):
        value_fn = functools.partial(loss_fn, x=x, y=y)
        value, grad = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
        updates, opt_state = opt.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
    opt_state = opt.init(params)
    norms = []
    for _ in range(4):
        params, opt_state = step(params, opt_state, x, y)
        norms.append(optax.tree.norm(optax.tree.get(opt_state, "grad")))
        if norms[-1] < 1e-3:
            break
    return params, opt_state, norms, (x @ params["w"] + params["b"]).argmax(-1)


@script(donate=False)
def sgld(jit):
    """A sampler's kernel, the position second and alone returned; the samples are kept: no donation."""
    num_data = 256

    def logdensity(position, minibatch):
        x, y = minibatch
        hidden = jnp.tanh(x @ position["w1"] + position["b1"])
        logits = hidden @ position["w2"]
        log_likelihood = -optax.sigmoid_binary_cross_entropy(logits[:, 0], y)
        log_prior = -0.5 * sum(jnp.sum(p**2) for p in jax.tree.leaves(position))
        return log_prior + num_data * jnp.mean(log_likelihood)

    def kernel(rng_key, position, minibatch, step_size):
        gradient = jax.grad(logdensity)(position, minibatch)
        leaves, treedef = jax.tree.flatten(position)
        keys = jax.tree.unflatten(treedef, list(jax.random.split(rng_key, len(leaves))))
        noise = jax.tree.map(lambda p, k: jax.random.normal(k, p.shape), position, keys)
        return jax.tree.map(
            lambda p, g, n: p + step_size * g + jnp.sqrt(2 * step_size) * n,
            position,
            gradient,
            noise,
        )

    sgld_step = jit(kernel)
    rng_key = jax.random.key(0)
    rng = np.random.default_rng(0)
    position = {"w1": jnp.zeros((8, 16)), "b1": jnp.zeros(16), "w2": jnp.ones((16, 1))}
    samples = []
    for i in range(NUM_STEPS + 1):
        x = rng.normal(size=(BATCH_SIZE, 8)).astype(np.float32)
        minibatch = (x, (x[:, 0] > 0).astype(np.float32))
        step_size = 1e-4 * (1 + i) ** -0.33
        position = sgld_step(jax.random.fold_in(rng_key, i), position, minibatch, step_size)
        if i > 0:
            samples.append(position)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *samples)
    return stacked, jax.tree.map(lambda p: p.mean(0), stacked)


class SVIState(NamedTuple):
    optim_state: Any
    mutable_state: Any
    rng_key: Any


@script()
def svi_class(jit):
    """A bound method of an object; a NamedTuple with a key and an optimizer's state of JAX's own library."""

    class SVI:
        def __init__(self, optim, num_data):
            self.opt_init, self.opt_update, self.get_params = optim
            self.num_data = num_data

        def init(self, rng_key, x, y):
            rng_key, init_key = jax.random.split(rng_key)
            loc = 0.1 * jax.random.normal(init_key, (x.shape[1], 8))
            guide = {"loc": loc, "log_scale": jnp.full_like(loc, -3.0)}
            return SVIState((jnp.array(0), self.opt_init(guide)), None, rng_key)

        def elbo(self, guide, rng_key, x, y):
            eps = jax.random.normal(rng_key, guide["loc"].shape)
            w = guide["loc"] + jnp.exp(guide["log_scale"]) * eps
            log_likelihood = jax.scipy.stats.norm.logpdf(y, (x @ w).sum(-1)).mean() * self.num_data
            kl = 0.5 * (jnp.exp(2 * guide["log_scale"]) + guide["loc"] ** 2 - 1)
            return log_likelihood - (kl - guide["log_scale"]).sum()

        def update(self, svi_state, x, y):
            rng_key, step_key = jax.random.split(svi_state.rng_key)
            i, optim_state = svi_state.optim_state
            guide = self.get_params(optim_state)
            loss, grads = jax.value_and_grad(lambda g: -self.elbo(g, step_key, x, y))(guide)
            optim_state = self.opt_update(i, grads, optim_state)
            return SVIState((i + 1, optim_state), svi_state.mutable_state, rng_key), loss

        def evaluate(self, svi_state, x, y):
            guide = self.get_params(svi_state.optim_state[1])
            return -self.elbo(guide, svi_state.rng_key, x, y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_STEPS + 1, BATCH_SIZE, 8)).astype(np.float32)
    y = x.sum(-1) + 0.1 * rng.normal(size=x.shape[:2]).astype(np.float32)
    svi = SVI(optimizers.adam(optimizers.exponential_decay(1e-2, 2, 0.9), eps=1e-3), num_data=128)
    svi_state = svi.init(jax.random.PRNGKey(0), x[0], y[0])
    update, losses = jit(svi.update), []
    for i in range(NUM_STEPS):
        svi_state, loss = update(svi_state, x[i], y[i])
        losses.append(loss)
    evaluated = jax.jit(svi.evaluate)(svi_state, x[-1], y[-1])
    return svi_state, svi.get_params(svi_state.optim_state[1]), losses, evaluated


@script()
def neural_ode(jit):
    """The state second; an adaptive solver, whose steps all rows decide, and its adjoint."""

    def dynamics(y, t, params):
        return jnp.tanh(y @ params["w1"] + t * params["b1"]) @ params["w2"]

    def loss_fn(params, y0, ts, ys):
        found = odeint(dynamics, y0, ts, params, rtol=1e-3, atol=1e-3)
        return jnp.mean(jnp.abs(found.swapaxes(0, 1) - ys) ** 2)

    tx = adam()

    @jit
    def train_step(batch, state):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch)
        updates, opt_state = tx.update(grads, state["opt_state"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    rng = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(rng.normal(size=(8, 16)) * 0.3, jnp.float32),
        "b1": jnp.zeros(16),
        "w2": jnp.asarray(rng.normal(size=(16, 8)) * 0.3, jnp.float32),
    }
    state, losses = {"params": params, "opt_state": tx.init(params)}, []
    ts = np.linspace(0, 1, 4).astype(np.float32)
    for _ in range(NUM_STEPS):
        y0 = rng.normal(size=(BATCH_SIZE, 8)).astype(np.float32)
        ys = (y0[:, None] * np.exp(-ts)[:, None]).astype(np.float32)
        state, loss = train_step((y0, ts, ys), state)
        losses.append(loss)
    return state, losses


@script(in_specs={"images": jax.P(None, "data"), "labels": jax.P(None, "data")})
def scanned_epoch(jit):
    """An epoch in one call: a scan over batches that were stacked, with their order drawn inside."""
    tx = optax.sgd(0.05, momentum=0.9)

    @jit
    def train_epoch(state, rng, images, labels):
        def train_step(state, batch):
            params, opt_state = state
            x, y = batch

            def loss_fn(params):
                logits = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
                return losses.mean()

            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, opt_state = tx.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), loss

        order = jax.random.permutation(rng, len(images))
        state, losses = jax.lax.scan(train_step, state, (images[order], labels[order]))
        return state, losses

    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, BATCH_SIZE, 24)).astype(np.float32)
    labels = rng.integers(0, 10, (4, BATCH_SIZE))
    key, first, last = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": 0.2 * jax.random.normal(first, (24, 16)),
        "b1": jnp.zeros(16),
        "w2": 0.2 * jax.random.normal(last, (16, 10)),
    }
    state, epochs = (params, tx.init(params)), []
    for epoch in range(NUM_STEPS):
        state, losses = train_epoch(state, jax.random.fold_in(key, epoch), images, labels)
        epochs.append((losses, losses.mean()))
    return state, epochs


@script()
def vmapped_ensemble(jit):
    """`jit(vmap(step))`: each member has parameters and a rate of its own; all see the same batch."""
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, eps=1e-3)

    def init(key, learning_rate):
        first, last = jax.random.split(key)
        params = {
            "hidden": (0.3 * jax.random.normal(first, (8, 16)), jnp.zeros(16)),
            "out": (0.3 * jax.random.normal(last, (16, 1)), jnp.zeros(1)),
        }
        opt_state = tx.init(params)
        opt_state.hyperparams["learning_rate"] = learning_rate
        return params, opt_state

    def predict(params, x):
        (w1, b1), (w2, b2) = params["hidden"], params["out"]
        return (jax.nn.softplus(x @ w1 + b1) @ w2 + b2)[:, 0]

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step = jit(jax.vmap(step, in_axes=(0, 0, None, None)))
    rates = jnp.array([1e-3, 3e-3, 1e-2, 3e-2])
    params, opt_state = jax.vmap(init)(jax.random.split(jax.random.key(0), 4), rates)
    rng, losses = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        x = rng.normal(size=(BATCH_SIZE, 8)).astype(np.float32)
        params, opt_state, loss = train_step(params, opt_state, x, np.sin(x.sum(-1)))
        losses.append(loss)
    best = int(losses[-1].argmin())
    predictions = jax.vmap(predict, in_axes=(0, None))(params, x)
    return params, opt_state, losses, best, predictions.mean(0), predictions.std(0)
