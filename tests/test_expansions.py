"""Operations that JAX expands when it lowers a program: jzero expands them when it traces the step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import hijax
from jax.experimental.scheduling_groups import scheduling_group
from jax.experimental.xla_metadata import set_xla_metadata

import jzero
import samples
import zoo
from jzero.testing import assert_same_training

TABLE = jnp.linspace(0.0, 3.0, 16)


HiPrim: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # JAX 0.10 calls it so.


class Doubled(HiPrim):
    """A primitive of a user's own, as `jax.experimental.hijax` makes them."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return 2 * x

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, ct):
        return (2 * ct,)


@jax.custom_vjp
def composed(x):
    return lax.composite(jnp.tanh, "jzero.tanh")(x)


composed.defvjp(lambda x: (composed(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))


def linear(x):
    return linear_call(lambda _, x: 3 * x, lambda _, ct: 3 * ct, (), x)


# Each is one operation in some release; on rows, all of them are computed for each row by itself.
ON_ROWS = {
    "composite": composed,
    "erf": lax.erf,
    "hijax": lambda x: Doubled(jax.typeof(x))(x),
    "linear_call": linear,
    "polynomial": lambda x: jnp.polyval(jnp.asarray([1.0, -2.0, 0.5]), x),
    "scheduling_group": scheduling_group(name="rows")(lambda x: x * jnp.sin(x)),
    "xla_metadata": lambda x: set_xla_metadata(x * 2, rows="apart"),
    "digitize": lambda x: jnp.digitize(x, TABLE) * x,
    "frexp": lambda x: jnp.frexp(x)[0],
    "interp": lambda x: jnp.interp(x, TABLE, TABLE**2),
    "ldexp": lambda x: jnp.ldexp(x, jnp.full_like(x, 2, dtype=jnp.int32)),
    "searchsorted": lambda x: jnp.searchsorted(TABLE, x, side="right") * x,
}


def step(weights, x):
    def loss(weights):
        return sum((fn(x * w) ** 2).mean() for fn, w in zip(ON_ROWS.values(), weights, strict=True))

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], value


def weights():
    return [jnp.asarray(1.0 + 0.1 * i) for i in range(len(ON_ROWS))]


@pytest.fixture(scope="module")
def batch():
    return jax.random.uniform(jax.random.key(0), (16, 4), minval=0.1, maxval=3.0)


def test_operations_on_rows_move_no_rows(batch):
    assert not jzero.shard_train_step(step, stage=0).describe(weights(), batch).movements


@pytest.mark.slow
def test_operations_on_rows_train_equal(batch):
    assert_same_training(step, weights, [batch, batch + 0.1], stage=0, microbatches=2)


FLAGS = samples.UPGRADE_FLAGS


def layered(params, x):
    """Layers under `jax.checkpoint`, with a `jax.custom_jvp` and a `jax.custom_vjp`."""

    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(lambda x: (x / 2, None), lambda _, ct: (ct / 2,))

    def layer(h, w):
        return h + halved(jax.nn.relu(h @ w)), None

    def loss(params):
        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return params - 0.1 * grads, value


def layers():
    return 0.1 * jax.random.normal(jax.random.key(1), (4, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_coming_defaults_in_a_step_with_collectives_of_its_own(flag):
    """Its equations carry the mesh in which it was traced, and their expansions do."""

    def local(params, x):
        new, loss = layered(params, x)
        return params + jax.lax.pmean(new - params, "batch"), jax.lax.pmean(loss, "batch")

    x = jax.random.normal(jax.random.key(2), (16, 64))
    expected = jax.jit(layered)(layers(), x)
    with samples.switched_on(flag):
        train_step = jzero.shard_train_step(
            local, axes=jzero.Axes(axis_name="batch", min_shard_bytes=0)
        )
        actual = train_step(layers(), x)
    zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(expected), zoo.FP32, flag)


def unrolled(params, x):
    """Two layers under `jax.checkpoint` that compute in bfloat16."""
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h.astype("bfloat16") @ w.astype("bfloat16")))

    def loss(params):
        h = x
        for w in params:
            h = layer(h, w)
        return jnp.mean(h.astype("float32") ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


@pytest.mark.parametrize("flag", FLAGS)
def test_coming_defaults_cast_parameters_before_they_are_gathered(flag):
    with samples.switched_on(flag):
        train_step = jzero.shard_train_step(unrolled, axes=jzero.Axes(min_shard_bytes=0))
        found = train_step.describe([jnp.ones((64, 64))] * 2, jnp.ones((16, 64)))
    assert found.elements("all-gather", "bfloat16") == 4 * 64 * 64
    assert found.elements("all-gather") == 4 * 64 * 64
