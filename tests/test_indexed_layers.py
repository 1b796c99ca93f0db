"""Loops over the numbers of layers, whose weights rest on the hosts: what runs is what the report says."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
import zoo

LAYERS, WIDTH = 4, 32
ADAM = optax.adam(1e-2, eps=1e-3)


def new_state():
    keys = iter(jax.random.split(jax.random.key(0), 3))
    params = {
        "up": jax.random.normal(next(keys), (LAYERS, WIDTH, WIDTH)) / 8,
        "bias": jnp.zeros((LAYERS, WIDTH)),
        "down": jax.random.normal(next(keys), (LAYERS, WIDTH, WIDTH)) / 8,
        "embed": jax.random.normal(next(keys), (WIDTH, WIDTH)) / 8,
    }
    return params, ADAM.init(params)


def by_scan(params, x):
    def layer(x, i):
        return jnp.tanh(x @ params["up"][i] + params["bias"][i][None]) @ params["down"][i], None

    return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]


def in_pairs(params, x):
    """The stacks are cut anew before the loop: what it reads follows from weights, and is none."""
    pairs = {name: params[name].reshape(2, 2, *params[name].shape[1:]) for name in ("up", "down")}

    def layers(x, two):
        for i in range(2):
            x = jnp.tanh(x @ two["up"][i]) @ two["down"][i]
        return x, None

    return jax.lax.scan(layers, x, pairs)[0] + params["bias"].mean(axis=0)[None]


def by_number(params, x):
    layer = lambda i, x: jnp.tanh(x @ params["up"][i]) @ params["down"][i] + params["bias"][i][None]  # noqa: E731
    return jax.lax.fori_loop(0, LAYERS, layer, x)


def make_step(model):
    def step(state, x):
        params, opt_state = state
        loss_fn = lambda params: jnp.mean(jnp.square(model(params, x @ params["embed"])))  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


@pytest.mark.slow(but=["in_pairs-HostCPU", "by_number-None"])
@pytest.mark.parametrize("offload", [jzero.HostCPU(), None], ids=["HostCPU", "None"])
@pytest.mark.parametrize("model", [by_scan, in_pairs, by_number])
def test_they_train_and_are_described(model, offload):
    """With room for a stack, and not for all: iterations run in parts, and fetch what they index."""
    mesh = small.mesh(data=4)
    options = {} if offload is None else {"offload": offload}
    train_step = small.shard_train_step(
        make_step(model),
        mesh=mesh,
        min_shard_bytes=0,
        offload_params=jzero.PinnedHost(device_bytes=36864),
        **options,
    )
    state, expected, one = train_step.init(new_state), new_state(), jax.jit(make_step(model))
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))
    report = train_step.describe(state, x)
    for i in range(3):
        expected, loss = one(expected, x)
        state, metrics = train_step(state, x)
        zoo.assert_trees_close(
            zoo.to_host((state, metrics)), jax.device_get((expected, loss)), zoo.FP32, f"step {i}"
        )
    # An iteration gathers the rows that it reads, and not their stacks.
    gathers = [c for c in report.traffic if c.op == "all-gather"]
    rows = [c for c in gathers if (c.elements, c.times) == (WIDTH**2, LAYERS)]
    assert model is in_pairs or len(rows) == 2 * 2  # of two stacks in two passes
    assert model is in_pairs or not any(c.elements == LAYERS * WIDTH**2 for c in gathers)
