"""`p + (n - p)` becomes `n`, and nothing else does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._differences import without_differences

P = jnp.linspace(-2, 2, 12).reshape(4, 3).astype(jnp.bfloat16)
N = P * jnp.asarray(1.01, jnp.bfloat16)


def rewritten(fn, *args):
    closed = jax.make_jaxpr(fn)(*args)
    flat, consts = _rewrite.flatten_calls(*_jaxpr.open_jaxpr(closed))
    return flat, without_differences(flat), consts


def run(flat, consts, args):
    env = dict(zip([*flat.constvars, *flat.invars], [*consts, *args], strict=True))

    def read(atom):
        return _jaxpr.literal(atom) if _jaxpr.is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        env |= zip(eqn.outvars, _jaxpr.bind(eqn, *map(read, eqn.invars)), strict=True)
    return [read(atom) for atom in flat.outvars]


def wide(x):
    return x.astype(jnp.float32)


def weak(x):
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def narrow(x, dtype=jnp.bfloat16):
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=jnp.dtype(dtype), weak_type=False, sharding=None
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda p, n: optax.apply_updates(p, wide(n) - wide(p)),
        lambda p, n: jax.jit(optax.apply_updates)(p, jax.jit(lambda: wide(n) - wide(p))()),
        lambda p, n: narrow((wide(n) - wide(p)) + wide(p), p.dtype),
        lambda p, n: narrow(wide(p) + weak(wide(n) - weak(wide(p))), p.dtype),
    ],
    ids=["optax", "calls", "other order", "weak types"],
)
def test_the_new_value_is_taken_as_it_is(fn, dtype):
    p, n = P.astype(dtype), N.astype(dtype)
    _, flat, _ = rewritten(fn, p, n)
    assert flat.outvars == [flat.invars[1]]
    np.testing.assert_array_equal(fn(p, n), n)


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, n: narrow(wide(p) + (wide(p) - wide(n))),
        lambda p, n: narrow(wide(p) - (wide(n) - wide(p))),
        lambda p, n: narrow(wide(n) + (wide(n) - wide(p))),
        lambda p, n: narrow(wide(p) + (n.astype(jnp.float16).astype(jnp.float32) - wide(p))),
        lambda p, n: narrow(wide(p) + (wide(n) * 2 - wide(p))),
        lambda p, n: p + (n - p),  # rounds
        lambda p, n: wide(p) + (wide(n) - wide(p)),
        lambda p, n: narrow(wide(p) + (wide(n) - wide(p)), jnp.float16),
        lambda p, n: narrow((p * 4).astype(jnp.int32) + (n.astype(jnp.int32) - p.astype(jnp.int32))),
    ],
)  # fmt: skip
def test_what_is_something_else_stays(fn):
    flat, found, _ = rewritten(fn, P, N)
    assert len(found.eqns) == len(flat.eqns)
    assert found.outvars == flat.outvars


def test_a_difference_that_is_read_stays():
    def fn(p, n):
        difference = wide(n) - wide(p)
        return optax.apply_updates(p, difference), jnp.sum(difference**2)

    flat, found, consts = rewritten(fn, P, N)
    assert len(flat.eqns) - len(found.eqns) == 1
    for x, y in zip(run(found, consts, (P, N)), fn(P, N), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("make", [jzero.master_weights, jzero.stochastic_rounding])
def test_steps_of_flax(make):
    tx = make(optax.sgd(0.1, momentum=0.9))
    state: Any = TrainState.create(apply_fn=None, params={"w": P}, tx=tx)
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, state))

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(P)

    model = Model()
    graph, nnx_state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
    nnx_leaves, nnx_tree = jax.tree.flatten(nnx_state)

    def linen(g, *leaves):
        return jax.tree.leaves(jax.tree.unflatten(tree, leaves).apply_gradients(grads={"w": g}))

    def nnx_step(g, *leaves):
        model, optimizer = nnx.merge(graph, jax.tree.unflatten(nnx_tree, leaves))
        optimizer.update(model, nnx.State({"w": nnx.Param(g)}))
        return jax.tree.leaves(nnx.state((model, optimizer)))

    for fn, args in ((linen, leaves), (nnx_step, nnx_leaves)):
        flat, found, consts = rewritten(fn, N, *args)
        assert len(flat.eqns) - len(found.eqns) == 1
        for x, y in zip(run(found, consts, (N, *args)), fn(N, *args), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_offload_alone_rewrites():
    """Without it a step is what the user wrote, to the bit."""
    tx = jzero.master_weights(optax.sgd(0.0, momentum=0.9))

    def step_fn(state, x):
        w, opt_state = state
        grads = jax.grad(lambda w: jnp.sum(jnp.nan_to_num(w) * x.mean()))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.ones((16, 8), jnp.bfloat16)
    broken = functools.partial(jnp.full, (16, 8), jnp.inf, jnp.bfloat16)
    state = tx.init(w)
    batch = np.ones((8, 4), np.float32)
    plain = jzero.shard_train_step(step_fn, axes=jzero.Axes(min_shard_bytes=0))
    hosted = jzero.shard_train_step(
        step_fn, axes=jzero.Axes(min_shard_bytes=0), memory=jzero.PinnedHost(2**20)
    )
    assert not np.isfinite(plain((broken(), state), batch)[0]).any()
    np.testing.assert_array_equal(hosted((broken(), tx.init(w)), batch)[0], w)
