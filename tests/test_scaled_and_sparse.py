"""Products of scaled 8-bit numbers and of sparse arrays: trained as on one device, and no rows are moved."""

from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.sparse import BCOO

import scaled_products  # noqa: F401 (it is what runs jax.nn.scaled_matmul here)
import small
import zoo
from jzero.ir import _rules

BLOCK, WIDTH = 32, 64
ROWS = 8 * BLOCK  # Gradients of weights sum over rows, with a scale for each 32 of them.
TX = optax.adamw(1e-2, eps=1e-3)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(x):
    """Along the last dim: float8 and a power of two for each block."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    most = jnp.abs(blocks).max(-1, keepdims=True)
    scales = jnp.exp2(jnp.ceil(jnp.log2(most / 448 + 1e-30)))
    codes = (blocks / scales).astype(jnp.float8_e4m3fn).reshape(x.shape)
    return codes[None], scales[None, ..., 0].astype(jnp.float8_e8m0fnu)


@jax.custom_vjp
def scaled_dot(x, w):
    (x, x_scale), (w, w_scale) = quantized(x), quantized(w.T)
    return lax.scaled_dot(
        x, w, lhs_scale=x_scale, rhs_scale=w_scale, preferred_element_type=jnp.float32,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
    )[0]  # fmt: skip


scaled_dot.defvjp(
    lambda x, w: (scaled_dot(x, w), (x, w)),
    lambda xw, g: (scaled_dot(g, xw[1].T), scaled_dot(xw[0].T, g)),
)


def scaled_dot_general(x, w):
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    return jax.nn.scaled_dot_general(
        x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, configs=configs
    )


class Model(NamedTuple):
    params: dict[str, Any]
    of_rows: Any  # of the parameters and what else the batch has, for each row
    batch: tuple[Any, ...]


def of_scaled(product):
    params = {"up": normal(0, WIDTH, WIDTH) / 8, "down": normal(1, WIDTH, WIDTH) / 8}
    return Model(
        params,
        lambda params, x: product(jax.nn.relu(product(x, params["up"])), params["down"]),
        (normal(2, ROWS, WIDTH),),
    )


def of_sparse_rows(rows):
    """Features of which a row has a few, by index; some are scaled by a parameter, which has a gradient."""

    def of_rows(params, data, indices):
        data = jnp.tanh(data * params["scale"][indices[..., 0]])
        x = BCOO((data, indices), shape=(len(data), WIDTH))
        return x @ params["table"] + x.todense() @ params["dense"]

    params = {
        "table": normal(0, WIDTH, 16),
        "dense": normal(1, WIDTH, 16),
        "scale": normal(2, WIDTH),
    }
    indices = np.random.default_rng(4).integers(0, WIDTH, (rows, 5, 1), np.int32)
    return Model(params, of_rows, (normal(3, rows, 5), indices))


def of_sparse_weights():
    """A matrix of which a few elements are trained."""
    indices = np.argwhere(np.random.default_rng(0).random((WIDTH, 16)) < 0.1)
    return Model(
        {"elements": normal(1, len(indices))},
        lambda params, x: x @ BCOO((params["elements"], jnp.asarray(indices)), shape=(WIDTH, 16)),
        (normal(2, ROWS, WIDTH),),
    )


MODELS = {
    "scaled_dot": lambda: of_scaled(scaled_dot),
    "scaled_dot_general": lambda: of_scaled(scaled_dot_general),
    "sparse rows": lambda: of_sparse_rows(ROWS),
    "sparse rows, padded": lambda: of_sparse_rows(21),
    "sparse weights": of_sparse_weights,
}
SUMMED = ("sparse rows", "sparse weights")  # over two microbatches; 16 rows of one are half a block


def step_of(model):
    def loss_fn(params, batch, wanted):
        return jnp.square(model.of_rows(params, *batch) - wanted).mean()

    def step(state, batch, wanted):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, wanted)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    state = jax.tree.map(jnp.asarray, {"params": model.params, "opt": TX.init(model.params)})
    out = jax.eval_shape(model.of_rows, model.params, *model.batch)
    return step, state, (model.batch, normal(9, *out.shape))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in MODELS), *((name, {"accumulate": 2}) for name in SUMMED)],
)
def test_trains_as_on_one_device(name, options):
    step, state, args = step_of(MODELS[name]())
    expected, train_step = state, small.shard_train_step(step, stage=3, **options)
    for _ in range(3):
        expected, loss = jax.jit(step)(expected, *args)
        state, actual = train_step(state, *args)
        zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(loss), zoo.FP32, "loss")
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")


def moved(name):
    step, state, args = step_of(MODELS[name]())
    return {m.operation for m in small.shard_train_step(step).describe(state, *args).movements}


@pytest.mark.parametrize("name", MODELS)
def test_no_rows_are_moved(name):
    assert not moved(name)


@pytest.mark.parametrize(
    ("name", "rule"),
    {
        "scaled_dot": "scaled_dot",
        "scaled_dot_general": "scaled_matmul_wrapper",
        "sparse rows": "bcoo_dot_general",
        "sparse weights": "bcoo_dot_general_sampled",
    }.items(),
)
def test_without_a_rule_they_are(name, rule):
    with mock.patch.dict(_rules.RULES):
        del _rules.RULES[rule]
        assert rule in moved(name)
