"""Microbatches of steps that need all rows: what is gathered between loops, what is kept, what is refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from jzero.ir import _products
from jzero.ir._regions import Region


@pytest.mark.slow
def test_extremes_keep_nan_and_the_sign_of_zero():
    def step(w, x):
        return w - jax.grad(lambda w: (x @ w).mean())(w), {"most": x.max(0), "least": x.min(0)}

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    x[3, 1], x[9, 2], x[:, 3], x[5, 3] = np.nan, np.inf, -0.0, 0.0
    x[:, 4] = -0.0
    w = jnp.eye(8)
    expected = jax.jit(step)(w, x)[1]
    actual = small.shard_train_step(step, microbatches=2)(w, x)[1]
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name])
        got, want = (np.where(np.isnan(x), 0, x) for x in (actual[name], expected[name]))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.slow(but=["4"])
@pytest.mark.parametrize("k", [2, 4])
def test_what_is_the_largest_of_all_rows_is_so_in_every_loop(k):
    """Its loss is computed in one loop and compared in the next one: with the same bits."""

    def loss_fn(w, x):
        z = jnp.tanh(x @ w)
        distances = ((z[:, None] - z[None]) ** 2).sum(-1)
        losses = jax.nn.softplus(distances.max(1) - jnp.where(distances > 0, distances, 9).min(1))
        return losses.max() + jnp.where(losses == losses.min(), losses, 0).sum(), losses

    def step(w, x):
        (_, losses), g = jax.value_and_grad(loss_fn, has_aux=True)(w, x)
        hard = losses >= jnp.median(losses)
        return w - g, {"hard": hard, "first": jnp.argmax(losses == losses.max()), "g": g}

    x = np.random.default_rng(k).normal(size=(48, 8)).astype(np.float32)
    w = jnp.asarray(np.random.default_rng(9).normal(size=(8, 5)), jnp.float32)
    expected = jax.jit(step)(w, x)
    actual = small.shard_train_step(step, mesh=small.mesh(data=4), microbatches=k)(w, x)
    assert np.abs(expected[1]["g"]).max() > 0.01
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_step_of_its_own_collectives_gathers_in_the_order_of_devices():
    """Of devices x microbatches."""

    def step(w, x):
        rows = jax.lax.all_gather(x, "batch", axis=1)
        grads = jax.grad(lambda w: jnp.mean((x @ w) * jnp.std(rows)))(w)
        most = jax.lax.pmax(x.max(), "batch") - jax.lax.pmin(x.min(), "batch")
        return w - jax.lax.pmean(grads, "batch"), {"rows": rows, "most": most}

    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    run = small.shard_train_step(
        step, axes=jzero.Axes(axis_name="batch"), mesh=small.mesh(data=4), microbatches=2
    )
    new, out = run(jnp.eye(4), x)
    of_parts = jax.vmap(step, in_axes=(None, 0), axis_name="batch")
    expected, expected_out = of_parts(jnp.eye(4), x.reshape(8, 2, 4))
    np.testing.assert_array_equal(out["rows"], expected_out["rows"][0])
    assert out["most"] == expected_out["most"][0]
    np.testing.assert_allclose(new, expected[0], rtol=1e-6)


# -- how much runs, moves and stays ----------------------------------------------------------------


def test_it_is_said_what_is_kept():
    def step(w, x):
        def loss_fn(w):
            z = jnp.tanh(x @ w[0]) @ w[1]
            return jax.nn.logsumexp(z @ z.T, 1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 512), (512, 16), (256, 12))
    ]
    report = small.shard_train_step(step, microbatches=4).describe(shapes[:2], shapes[2])
    kept = sum(k.nbytes for k in report.loops.saved)
    assert kept
    text = " ".join(str(report).split())
    assert re.search(
        r"loops over microbatches: \d; matrix products run 1\.\d times as often as in one loop; .* are saved",
        text,
    )
    assert re.search(r"2\.0 KiB float32\[8, ?16\] of .*test_collected_rows\.py", text)


def test_products_are_counted_in_loops_and_branches():
    def fn(x, w, image, kernel):
        h, _ = jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=5)
        h = jax.lax.cond(h[0, 0] > 0, lambda: h @ w @ w, lambda: h @ w)
        return h, jax.lax.conv(image, kernel, (1, 1), "VALID")

    shapes = [(4, 8), (8, 8), (2, 3, 10, 10), (6, 3, 3, 3)]
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = Region(jaxpr.jaxpr, jaxpr.consts)
    found = sum(_products.products(region, eqn) for eqn in jaxpr.jaxpr.eqns)
    assert found == (5 + 2) * 4 * 8 * 8 + 2 * 6 * 8 * 8 * 3 * 3 * 3


# -- refused ---------------------------------------------------------------------------------------


def deep_step(normalise, depth=8):
    def step(params, x):
        def loss_fn(params):
            h = x
            for w in params:
                h = jnp.tanh(normalise(h @ w))
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))

    return step, [jnp.eye(16)] * depth, jnp.ones((64, 16))


def batch_norm(h):
    return (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)


def test_statistics_of_the_batch_in_every_layer_are_refused():
    step, params, x = deep_step(batch_norm)
    with pytest.raises(jzero.StepError) as caught:
        small.shard_train_step(step, microbatches=2).plan(params, x)
    text = str(caught.value)
    assert re.search(r"reductions fail:\n  - microbatches > 1, and .*test_collected_rows\.py:\d+:\d+ "
                     r"\(batch_norm\) begins a loop over the microbatches", text)  # fmt: skip
    assert re.search(
        r"in \d+ loops the products would run \d+\.\d times as often, and 4 times", text
    )
    assert text.count("  - ") <= 9
    assert "Drop microbatches; or normalise each row" in text
    assert "jzero.groups" in text


def test_a_gather_inside_a_loop():
    """What it makes of all microbatches is there at once, and said."""

    def step(w, x):
        def loss_fn(w):
            def layer(h, _):
                h = jnp.tanh(h @ w)
                return h - jnp.sort(h, axis=0), None

            return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0])

        return w - jax.grad(loss_fn)(w)

    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    train_step = small.shard_train_step(step, microbatches=2)
    np.testing.assert_allclose(train_step(jnp.eye(8), x), step(jnp.eye(8), x), rtol=2e-5)
    report = train_step.describe(jnp.eye(8), x)
    assert report.loops.at_once
    assert all("test_collected_rows.py" in each.where for each in report.loops.at_once)
    assert "computed from all microbatches at once, which saves no memory" in " ".join(
        str(report).split()
    )


def test_other_collectives_of_a_written_step_are_refused():
    def step(w, x):
        other: Any = jax.lax.ppermute(x, "batch", [(i, (i + 1) % 16) for i in range(16)])
        return w - jax.lax.pmean(jax.grad(lambda w: jnp.mean((x + other) @ w))(w), "batch")

    text = (r"microbatches > 1, and ppermute at .* a collective over \('batch',\) that gives each device "
            r"something else.*Drop microbatches, or use psum")  # fmt: skip
    with pytest.raises(jzero.StepError, match=text):
        small.shard_train_step(step, axes=jzero.Axes(axis_name="batch"), microbatches=2).plan(
            jnp.eye(8), jnp.ones((32, 8))
        )
