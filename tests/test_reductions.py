"""Large gradients do not wait: each is reduced before the next is due, and none through a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import programs
import small
from jzero.sharding.passes import _before_loops
from jzero.sharding.plan import _stored_layout
from jzero.tracing import _jaxpr

TIED = programs.VOCAB * programs.WIDTH  # elements of the table that looks up and makes logits


def all_jaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from all_jaxprs(_jaxpr.open_jaxpr(inner)[0])


def reductions_in_loops(jaxpr, inside=False):
    """For every loop's body: its large reductions, each with whether it waits for another of them."""
    found = []
    for eqn in jaxpr.eqns:
        for sub in _jaxpr.inner_jaxprs(eqn):
            found += reductions_in_loops(
                _jaxpr.open_jaxpr(sub)[0], inside or eqn.primitive.name == "scan"
            )
    reached: dict[object, set[int]] = {}
    made: dict[int, bool] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        before = set().union(
            *(reached.get(a, set()) for a in eqn.invars if not _jaxpr.is_literal(a))
        )
        if eqn.primitive.name == "reduce_scatter":
            made[i] = bool(before)
            before = before | {i}
        reached |= dict.fromkeys(eqn.outvars, before)
    return found + ([made] if inside and made else [])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limit", [0, 2**26])
def test_a_large_gradient_does_not_wait_through_a_loop(limit, accumulate, monkeypatch):
    """The logits' part of a tied table's gradient is reduced before the layers, the look-up's after."""
    monkeypatch.setattr(_before_loops, "WAITS_THROUGH_LOOPS", limit)
    state = programs.abstract_state(programs.Model(), optax.sgd(0.1))
    train_step = small.shard_train_step(programs.train_step, microbatches=accumulate)
    found = train_step.describe(state, programs.tokens())
    twice = TIED if limit == 0 and accumulate == 1 else 0  # Over time there is one running sum.
    psi = programs.num_params(state)
    assert found.elements("reduce-scatter") == accumulate * (psi + twice)
    assert found.elements("all-gather") == accumulate * 2 * psi


@pytest.mark.parametrize(
    ("shape", "num", "dim"),
    [
        (
            (36, 4096, 16384),
            8,
            1,
        ),  # rows: the first dim of a layer's slice, where gathers are cheapest
        ((36, 16384, 4096), 8, 1),
        ((50304, 768), 8, 0),
        ((768, 50304), 8, 1),  # a quarter of the largest is not reached
        ((3, 3, 256, 512), 8, 2),
        ((50257, 768), 8, 1),  # the only one that divides
        ((50257, 768), 1024, 0),  # padded by least
        ((7,), 8, 0),
        ((1, 1), 8, None),
        ((0, 8), 8, None),
        ((), 8, None),
    ],
)
def test_the_dim_that_is_sharded(shape, num, dim):
    assert _stored_layout.choose_dim(shape, num) == dim


@pytest.mark.slow
def test_a_maximum_knows_of_a_row_that_is_no_number():
    """Of the batch, and of a state's shards: an all-reduce would leave it out."""

    def step(state, x):
        w = state - 0.1 * x.mean(0)
        return w, (x.max(0), x.min(), jnp.max(jnp.abs(w)), jnp.min(w))

    x = jnp.arange(32.0).reshape(8, 4).at[1, 2].set(jnp.nan)
    w = jnp.ones(4)
    expected = jax.jit(step)(w, x)
    found = small.shard_train_step(step, mesh=small.mesh(data=4))(w, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    assert all(np.isnan(np.asarray(value)).any() for value in found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_devices"),
    [("float8_e4m3fn", 3), ("float8_e5m2fnuz", 3), ("uint2", 4), ("int2", 3)],
)
def test_dtypes_without_infinity_or_of_two_bits(dtype, num_devices):
    """Padding must not show in an extreme; XLA:CPU moves no numbers of two bits."""

    def step(state, x):
        x = x.astype(dtype)
        rows = x[::-1].astype(jnp.float32)
        return state, (rows, *(f(x, 0).astype(jnp.float32) for f in (jnp.max, jnp.min)))

    x = (jnp.arange(32.0) % 3 - 1).reshape(8, 4)
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
    expected = jax.jit(step)(jnp.ones(4), x)[1]
    found = small.shard_train_step(step, mesh=mesh)(jnp.ones(4), x)[1]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
