"""Large gradients do not wait: each is reduced before the next is due, and none through a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small
from jzero.sharding.plan import _stored_layout


@pytest.mark.parametrize(
    ("shape", "num", "dim"),
    [
        ((36, 4096, 16384), 8, 1),  # the first dim of a layer's slice, where gathers are cheapest
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
