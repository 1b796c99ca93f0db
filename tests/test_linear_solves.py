"""Solves of lineax, whose primitive is rebuilt here (it is no dependency); JAX's own are in tests/zoo."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small

X = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)


def _solve(state: Any, vector: Any) -> Any:
    """As lineax: what it is given must be what was noted, with its sharding."""
    matrix, noted = state
    if eqx.tree_equal(jax.eval_shape(lambda: vector), noted.value) is not True:
        raise ValueError("pytree does not match out_structure")
    return jnp.linalg.solve(matrix, vector)


@eqxi.filter_primitive_def
def _abstract(state: Any, vector: Any) -> Any:
    def struct(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x

    out = eqx.filter_eval_shape(_solve, *jax.tree.map(struct, (state, vector)))
    return jax.core.ShapedArray(out.shape, out.dtype)


def _no_rule(*args: Any) -> Any:
    raise NotImplementedError


solve_p = eqxi.create_vprim(
    "linear_solve", eqxi.filter_primitive_def(_solve), _abstract, _no_rule, _no_rule
)


def lineax_solve(matrix: Any, vector: Any) -> Any:
    noted = eqxi.Static(jax.eval_shape(lambda: vector))
    return eqxi.filter_primitive_bind(solve_p, (matrix, noted), vector)


def gram(x: Any) -> Any:
    return x.T @ x + jnp.eye(4)


def of_lineax(x: Any) -> Any:
    return lineax_solve(gram(x), x.sum(0))


def in_a_loop(x: Any) -> Any:
    a, b = gram(x), x.sum(0)
    return jax.lax.scan(lambda c, _: (lineax_solve(a, c), None), b, None, 3)[0]


def of_each_row(x: Any) -> Any:
    matrices = jax.vmap(lambda row: jnp.outer(row, row) + jnp.eye(4))(x)
    return jax.vmap(lineax_solve)(matrices, x).mean(0)


@pytest.mark.slow(but=[4])
@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 3}, {"stage": 3, "accumulate": 2}], ids=str
)
@pytest.mark.parametrize("solve", [of_lineax, in_a_loop, of_each_row])
def test_a_solve_of_the_whole_batch(solve, options):
    def step_fn(w: Any, x: Any) -> Any:
        ridge = solve(x)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - ridge[None]) ** 2))(w)
        return w - 0.1 * grad, loss

    w = jnp.ones((4, 4))
    found = small.shard_train_step(step_fn, **options)(w, X)
    for x, y in zip(found, jax.jit(step_fn)(w, X), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)
