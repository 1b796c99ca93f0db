# SPDX-License-Identifier: Apache-2.0
"""Loops along the batch: which ones devices share out, and that all of them make what one device makes.

A device may run the iterations of its own rows only if what they change are sums: each carry its own last
value plus terms that no other carry's changes reach. 40 loops drawn by seed run by default, `-m ""` runs
200, and `run_zoo.py sampled --loops` as many as you like.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import small
from zoo.sampling import check, loops

pytestmark = pytest.mark.usefixtures("float64")

DIM, NUM = 3, 4
DEPENDS = "a loop along the batch whose iterations depend on each other"


def error(w, row):
    return jnp.sum((row @ w) ** 2)


def scanned(turn, init, **options):
    """A loop over the rows as a function of parameters and rows; `turn(w, carry, row)`."""
    return lambda w, x: lax.scan(lambda c, row: turn(w, c, row), init, x, **options)


def with_init(turn, init):
    return lambda w, x: lax.scan(lambda c, row: turn(w, c, row), init(w, x), x)


def gradients(w, row):
    return jax.grad(error)(w, row)


ZEROS = np.zeros((DIM, DIM))
plus = loops.plus

# Loops whose iterations need those before them.
DEPENDENT: dict[str, Any] = {
    "the area under a running sum": scanned(
        lambda w, c, r: ((c[0] + error(w, r), c[1] + c[0]), None), (0.0, 0.0)),

    "Euler steps": scanned(lambda w, c, r: ((c[0] + 0.1 * c[1], c[1] + error(w, r)), None), (0.0, 1.0)),

    "carries swap": scanned(lambda w, c, r: ((c[1], c[0] + error(w, r)), None), (0.0, 0.0)),

    "the sum before the last row": scanned(
        lambda w, c, r: ((c[0] + error(w, r), c[0]), None), (0.0, 0.0)),
    "one sum in two carries": scanned(
        lambda w, c, r: ((new := c[0] + error(w, r), new), None), (0.0, 0.0)),
    "a sum that doubles": scanned(lambda w, c, r: (c + c + error(w, r), None), 0.0),
    "two that add each other": scanned(
        lambda w, c, r: ((c[0] + c[1], c[1] + c[0] + error(w, r)), None), (0.0, 0.0)),
    "a difference of carries": scanned(
        lambda w, c, r: ((c[0] + error(w, r), c[1] - c[0]), None), (0.0, 0.0)),
    "alternating signs": scanned(lambda w, c, r: (error(w, r) - c, None), 0.0),
    "a discount": scanned(lambda w, c, r: (0.9 * c + error(w, r), None), 0.0),
    "the last row wins": scanned(lambda w, c, r: (error(w, r), None), 0.0),
    "the parameters win": scanned(lambda w, c, r: ((jnp.sum(w), c[0]), None), (0.0, 0.0)),
    "a sum that is returned": scanned(lambda w, c, r: (c + error(w, r), c), 0.0),
    "an index that is read": scanned(lambda w, c, r: ((c[0] + 1, c[1] + c[0] * error(w, r)), None), (0, 0.0)),
    "chosen sums": scanned(lambda w, c, r: (jnp.where(r[0] > 0, c + error(w, r), c), None), 0.0),
    "swapped in a checkpoint": scanned(
        lambda w, c, r: (jax.checkpoint(lambda a, b: (b, a + error(w, r)))(*c), None), (0.0, 0.0)),
    "added in a checkpoint": scanned(
        lambda w, c, r: (jax.checkpoint(lambda a, b: (a + error(w, r), a + b))(*c), None), (0.0, 0.0)),
    "swapped in a call": scanned(
        lambda w, c, r: (jax.jit(lambda a, b: (b, a + error(w, r)))(*c), None), (0.0, 0.0)),
    "added by a function with a rule": scanned(
        lambda w, c, r: ((plus(c[0], error(w, r)), plus(c[1], c[0])), None), (0.0, 0.0)),
    "chosen by a branch": scanned(
        lambda w, c, r: (lax.cond(r[0] > 0, lambda c: (c[0], error(w, r)), lambda c: c[::-1], c), None),
        (0.0, 0.0)),
    "a loop inside that adds": scanned(
        lambda w, c, r: (lax.fori_loop(0, 2, lambda _, c: (c[0] + error(w, r), c[1] + c[0]), c), None),
        (0.0, 0.0)),
    "through integers": scanned(
        lambda w, c, r: (c + (r[0] > 0).astype(jnp.int32), c.astype(jnp.float64)), jnp.int32(3)),
    # Its backward pass asks for the sum before each row, though it has no use for it.
    "sums in a checkpoint": scanned(
        lambda w, c, r: (jax.checkpoint(lambda c: (c[0] - error(w, r), c[1] + r))(c), None),
        (0.0, np.zeros(DIM))),
    "whether any row is": scanned(lambda w, c, r: (c | (r[0] > 1.5), None), False),
    "a barrier": scanned(
        lambda w, c, r: (((b := lax.optimization_barrier(c))[1], b[0] + error(w, r)), None), (0.0, 0.0)),
    "the first row, and on": with_init(
        lambda w, c, r: ((c[0] + r, c[1] + c[0]), None), lambda w, x: (x[0], x[1])),
    "reversed": scanned(
        lambda w, c, r: ((c[0] + error(w, r), c[1] + c[0]), None), (0.0, 0.0), reverse=True, unroll=2),
    "over rows by their number": lambda w, x: (lax.fori_loop(
        0, x.shape[0], lambda i, c: (c[0] + error(w, x[i]), c[1] + c[0]), (0.0, 0.0)), None),
}  # fmt: skip

# Sums, of which each device adds up the terms of its rows.
SUMS: dict[str, Any] = {
    "a loss": scanned(lambda w, c, r: (c + error(w, r), None), 0.0),
    "two, from a start": scanned(
        lambda w, c, r: ((c[0] + error(w, r), jnp.sum(r) + c[1]), error(w, r)), (0.5, -2.0)),
    "per-example gradients": scanned(
        lambda w, c, r: (c - gradients(w, r) / (1 + error(w, r)), error(w, r)), ZEROS),
    "several terms": scanned(lambda w, c, r: ((c + error(w, r)) - jnp.sum(r) + jnp.sum(w), None), 0.0),
    "a count": scanned(lambda w, c, r: ((c[0] + 1, c[1] + (r[0] > 0)), None), (0, jnp.int32(7))),
    "one that wraps": scanned(lambda w, c, r: (c + jnp.int8(100), None), jnp.int8(3)),
    "beside one that stays": scanned(
        lambda w, c, r: ((c[0] + c[1] * error(w, r), c[1]), c[1] * r), (0.0, 2.0)),
    "of a checkpoint": scanned(
        lambda w, c, r: ((c[0] - jax.checkpoint(error)(w, r), c[1] + r), None), (0.0, np.zeros(DIM))),
    "by a function with a rule": scanned(lambda w, c, r: (plus(c, error(w, r)), None), 0.0),
    "in a call": scanned(lambda w, c, r: (jax.jit(lambda c: c + error(w, r))(c), None), 0.0),
    "of a mean of all rows": lambda w, x: lax.scan(
        lambda c, r: (c + error(w, r - jnp.mean(x, 0)), None), 0.0, x),
    "from the first row": with_init(lambda w, c, r: (c + r @ w, None), lambda w, x: x[0]),
    "in reverse": scanned(lambda w, c, r: (c + error(w, r), r @ w), 0.0, reverse=True, unroll=2),
    "a row at a time": lambda w, x: (0.0, lax.map(lambda r: error(w, r), x)),
    "of rows of two batches": lambda w, x: lax.scan(
        lambda c, r: (c + error(w, r), None), 0.0, jnp.concatenate([x, 2 * x])),
}  # fmt: skip


def drawn(num_rows):
    return np.eye(DIM) + 0.1, np.random.default_rng(0).normal(size=(num_rows, DIM))


def objective(w, x, loop):
    """Of all that a loop makes that can be differentiated; and what it makes."""
    out = loop(w, x)
    found = [x for x in jax.tree.leaves(out) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]
    return jnp.sum(w) + sum(jnp.sum(jnp.tanh(0.01 * leaf)) for leaf in found), out


def learned(loops):
    """A step with all of the loops, each with its own parameters."""

    def step(params, x):
        new, outputs = {}, {}
        for name, loop in loops.items():
            w = params[name]
            grad, outputs[name] = jax.grad(objective, has_aux=True)(w, x, loop)
            new[name] = w - 0.1 * grad
        return new, outputs

    return step


def assert_equal(found, expected):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected
    )


# An odd number of rows for each device or microbatch, lest two swaps be none.
@pytest.mark.parametrize(
    ("options", "num_rows"), [({"stage": 3}, 20), ({"stage": 0, "accumulate": 2}, 24)]
)
def test_they_train_as_on_one_device(options, num_rows):
    w, x = drawn(num_rows)
    params, step = dict.fromkeys(DEPENDENT | SUMS, w), learned(DEPENDENT | SUMS)
    train_step = small.shard_train_step(step, mesh=jax.make_mesh((NUM,), ("data",)), **options)
    assert_equal(train_step(params, x), jax.jit(step)(params, x))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sum_stays_whole(stage):
    """A loop saves a mean of all rows, and what it has of each, which microbatches compute again."""

    def step(params, sequence):
        def loss(params):
            def turn(total, x):
                mean = jnp.mean(jnp.tanh(x @ params["w"]), 0)
                return total + jnp.sum(mean * params["v"]), None

            return jnp.tanh(lax.scan(turn, 0.0, sequence)[0])

        value, grad = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grad), value

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(DIM, DIM)), "v": rng.normal(size=DIM)}
    sequence = rng.normal(size=(2, 16, DIM))
    options: dict[str, Any] = {"in_specs": {"sequence": jax.P(None, "data")}, "accumulate": 2}
    mesh = jax.make_mesh((NUM,), ("data",))
    train_step = small.shard_train_step(step, stage=stage, mesh=mesh, **options)
    assert_equal(train_step(params, sequence), jax.jit(step)(params, sequence))


# -- who runs which iterations ---------------------------------------------------------------------------


def gathered(loop, num_rows=20):
    """Why rows of the batch are gathered."""
    w, x = drawn(num_rows)
    mesh = jax.make_mesh((NUM,), ("data",))
    train_step = small.shard_train_step(learned({"loop": loop}), stage=0, mesh=mesh)
    found = train_step.describe({"loop": w}, x).movements
    return {m.reason for m in found if m.operation != "output"}


@pytest.mark.parametrize("name", SUMS)
def test_sums_need_only_the_rows_of_their_device(name):
    # Two padded batches, one behind the other, are no shards of both.
    assert DEPENDS not in gathered(SUMS[name], 16 if name == "of rows of two batches" else 20)


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_depends_on_earlier_iterations_is_named(name):
    found = gathered(DEPENDENT[name])
    # They gather the rows before.
    elsewhere = "over rows by their number", "the first row, and on"
    assert DEPENDS in found or (found and name in elsewhere)


# -- drawn by seed ---------------------------------------------------------------------------------------

NUM_DRAWN = 200


@pytest.mark.slow(but=["20", "40"])
@pytest.mark.parametrize("bundle", check.bundles(range(NUM_DRAWN)), ids=lambda bundle: bundle[0])
def test_drawn_loops_train_as_on_one_device(bundle):
    results = loops.check(bundle)
    wrong = [r for r in results if r.verdict not in ("equal", "refused")]
    assert not wrong, "\n".join(f"seed {r.seed}: {r.why}\n{r.listing}" for r in wrong)
    # Without microbatches nothing is; with them, what needs all rows or their sums inside a loop.
    few = 4 * ("accumulate" in loops.setting_of(bundle[0]).options)
    assert sum(r.verdict == "refused" for r in results) <= few


@pytest.mark.slow
def test_what_nobody_reads_is_no_update():
    """A checkpoint that makes a start of a carry for nothing, of a parameter that it gathers."""
    (found,) = loops.check([1059])
    assert found.verdict == "equal", found.why


@pytest.mark.slow
def test_every_part_of_loops_is_drawn():
    tables = (
        loops.NEXT, loops.ADDITIVE, loops.TERMS, loops.HANDED, loops.APART, loops.STARTS, loops.ROWS_OF,
        loops.LOOPS, loops.AROUND, loops.PASSES,
    )  # fmt: skip
    never = {name for table in tables for name in table} | {"integers"}
    for seed in range(3000):
        never -= loops.draw(seed, 8).features
        if not never:
            break
    assert not never, f"drawn never: {never}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_only_decides_whether_a_turn_follows(stage):
    """A line search: of `limit`, and of what a turn makes of a parameter, nothing but its end depends."""

    def step(state, x):
        def loss_fn(w):
            return jnp.mean((x @ w) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])

        def goes_on(carry):
            size, _, norm, best = carry
            return (size > 2**-6) & (norm > jnp.mean(state["limit"])) & (best >= loss)

        def turn(carry):
            size, _, _, _ = carry
            tried = state["w"] - size * grads
            return size / 2, size, jnp.sum(tried**2), loss_fn(tried)

        size = lax.while_loop(goes_on, turn, (8.0, 8.0, jnp.inf, loss))[1]
        return {"w": state["w"] - size * grads, "limit": state["limit"] * 0.9}, loss

    def init():
        w = jax.random.normal(jax.random.key(0), (16, 8))
        return {"w": w, "limit": jnp.full((16, 8), 20.0)}

    batches = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(3)]
    train_step = small.shard_train_step(step, stage=stage)
    state, expected = train_step.init(init), init()
    for x in batches:
        (state, loss), (expected, wanted) = train_step(state, x), jax.jit(step)(expected, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-9)
    for name, leaf in train_step.unshard(state).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-9, err_msg=name)


def layer(h, w):
    return jnp.tanh(h @ w), h


NO_TURNS = {
    "over an empty leaf": lambda p, x: lax.scan(layer, x, p["none"])[0],
    "over nothing of a leaf": lambda p, x: lax.scan(layer, x, p["w"][None][:0])[0],
    "of a length": lambda p, x: lax.scan(lambda h, _: layer(h, p["w"]), x, None, length=0)[0],
    "a map": lambda p, x: x + lax.map(lambda w: x @ w, p["none"]).sum(0),
}


@pytest.mark.slow(but=[6])
@pytest.mark.parametrize(
    "options",
    [{}, {"stage": 1}, {"accumulate": 2}, {"tile_bytes": 256}, {"prefetch_bytes": 0}],
    ids=str,
)
@pytest.mark.parametrize("name", NO_TURNS)
def test_loops_of_no_turns(name, options):
    """They ended in a ZeroDivisionError, and in slices of stacks that have none."""

    def step(params, x):
        def loss_fn(params):
            return jnp.mean((NO_TURNS[name](params, x) @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, x = {"w": jnp.eye(16) / 2, "none": jnp.zeros((0, 16, 16))}, jnp.ones((16, 16))
    train_step = small.shard_train_step(step, **options)
    found, loss = train_step(train_step.shard(params), x)
    expected, wanted = jax.jit(step)(params, x)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(train_step.unshard(found)["w"], expected["w"], rtol=1e-6)
