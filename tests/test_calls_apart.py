"""Calls that plain `jax.jit` tells apart, or that hand one array over twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small

X = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)


def new_state():
    w = jnp.linspace(-1.0, 1.0, 24 * 16).reshape(24, 16)
    return {"w": w, "m": w * 0}


def step_fn(state, x, y=None):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    m = 0.9 * state["m"] + grad + (0.0 if y is None else 0.1 * y)
    return {"w": state["w"] - 0.1 * m, "m": m}


def check(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_static_arguments_of_other_types():
    def scaled(w, x, n):
        return w + {bool: 3.0, int: 1.0, float: 7.0}[type(n)] * jnp.mean(x)

    train_step = small.shard_train_step(scaled, static_argnums=2)
    w = expected = jnp.ones((16, 8))
    for n in (1, True, 1.0, 1, True):
        w = train_step(w, X, n)
        expected = jax.jit(scaled, static_argnames="n")(expected, X, n=n)
    check(w, expected)


@pytest.mark.slow
def test_a_precision_that_changes_between_calls():
    """As with `jax.jit`, it is another program."""
    train_step = small.shard_train_step(step_fn)
    state, traced = train_step(new_state(), X), []
    for precision in ("highest", "default", "highest"):
        with jax.default_matmul_precision(precision):
            state = train_step(state, X)
            traced.append(str(train_step.lower(state, X).as_text()))
    assert traced[0] == traced[2] != traced[1]


@pytest.mark.slow
def test_64_bit_types_that_are_switched_on():
    train_step = small.shard_train_step(lambda s, x: (s, jnp.mean(x)))
    state = jnp.ones((24, 16), jnp.float32)
    for on in (True, False, True):
        with jax.enable_x64(on):
            state, mean = train_step(state, X.astype(np.float64))
            assert mean.dtype == (jnp.float64 if on else jnp.float32)


@pytest.mark.slow
def test_an_argument_that_is_a_leaf_of_the_state():
    train_step = small.shard_train_step(step_fn, in_specs={"y": jax.P()})
    state, expected = train_step.shard(new_state()), new_state()
    for _ in range(3):
        state = train_step(state, X, state["w"])
        expected = jax.jit(step_fn)(expected, X, expected["w"])
    check(state, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_array_twice_in_a_state(stage):
    """As after `state["m"] = state["w"]`: an average that starts where parameters are."""
    train_step = small.shard_train_step(step_fn, stage=stage)
    state, expected = train_step(new_state(), X), jax.jit(step_fn)(new_state(), X)
    state, expected = state | {"m": state["w"]}, expected | {"m": expected["w"]}
    for _ in range(2):
        state, expected = train_step(state, X), jax.jit(step_fn)(expected, X)
    check(state, expected)


@pytest.mark.parametrize("tier", ["host", "files"])
def test_a_leaf_on_the_host_or_in_files_twice(tier, tmp_path):
    """Refused before anything is consumed, also where one of the two is only carried on."""

    def with_best(state, x):
        return {**step_fn(state, x), "best": state["best"]}

    offload = jzero.HostCPU() if tier == "host" else jzero.NVMe(tmp_path)
    train_step = small.shard_train_step(with_best, memory=offload)
    state = expected = {**new_state(), "best": new_state()["m"]}
    state = train_step(train_step.shard(state, X), X)
    with pytest.raises(jzero.StateError, match=r"state\['m'\] is the array of state\['best'\]"):
        train_step({**state, "best": state["m"]}, X)
    found = train_step({**state, "best": jnp.copy(state["m"])}, X)
    expected = with_best(expected, X)
    check(found, with_best({**expected, "best": expected["m"]}, X))
