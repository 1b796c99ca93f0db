"""Rows that a step sorts and puts back: each device sorts its own, unless they are needed in their places."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.sharding.plan._sorted_in_blocks import sorted_in_blocks
from jzero.tracing import _jaxpr, _rewrite

ROWS, WIDTH, HIDDEN, EXPERTS, CHOSEN, BLOCKS = 32, 6, 10, 4, 2, 4


def weights(key: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(key), 3)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    return {
        name: jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def experts(w: dict[str, Any], x: jax.Array, sizes: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(lax.ragged_dot(x, w["up"], sizes))
    return lax.ragged_dot(hidden, w["down"], sizes)


def routed(w: dict[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight of each choice, and which expert it is: `[rows, CHOSEN]`."""
    return lax.top_k(jax.nn.softmax(x @ w["router"]), CHOSEN)


# -- mixtures of experts, as people write them ------------------------------------------------------------
def sorted_back(w, x):
    """By the inverse permutation."""
    scale, chosen = routed(w, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    y = experts(w, x[order // CHOSEN], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", y.reshape(-1, CHOSEN, WIDTH), scale)


def added_back(w, x):
    """By a sum at each row."""
    scale, chosen = routed(w, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    y = experts(w, x[order // CHOSEN], sizes) * scale.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // CHOSEN].add(y)


def one_each(w, x):
    """The best expert, of copies of its rows, with an inverse that is scattered."""
    chosen = jnp.argmax(x @ w["router"], axis=1)
    order = jnp.argsort(chosen)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    sizes = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=0)
    return jnp.take(experts(w, x[order], sizes), inverse, axis=0)


def repeated(w, x):
    """Of repeated rows; keys and rows are sorted together, and a bias is looked up by the sorted keys."""
    scale, chosen = routed(w, x)
    rows = jnp.repeat(x, CHOSEN, axis=0)
    keys, order = lax.sort_key_val(chosen.reshape(-1), jnp.arange(chosen.size))
    y = experts(w, rows[order], jnp.bincount(keys, length=EXPERTS)) + w["router"].T[keys]
    _, y0 = lax.sort((order, y[:, 0]), num_keys=1)
    return (y0.reshape(-1, CHOSEN) * scale).sum(1, keepdims=True) * x


def with_padding(w, x):
    """Some rows are of no expert, and the last groups are cut off: rows behind all groups give zeros."""
    scale, chosen = routed(w, x)
    chosen = jnp.where(x[:, :1] > 0, chosen, EXPERTS).reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.minimum(jnp.bincount(chosen, length=EXPERTS), 9)
    y = experts(w, x[order // CHOSEN], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", y.reshape(-1, CHOSEN, WIDTH), scale)


def set_back(w, x):
    """Results are set at their rows: JAX's derivative numbers them, and looks at the numbers."""
    chosen = jnp.argmax(x @ w["router"], axis=1)
    order = jnp.argsort(chosen)
    y = experts(w, x[order], jnp.bincount(chosen, length=EXPERTS))
    return jnp.zeros_like(y).at[order].set(jnp.tanh(y))


def with_biases(w, x):
    """A bias of each expert, by sorted keys; and rows by a shift of positions."""
    scale, chosen = routed(w, x)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    y = experts(w, x[order >> 1], jnp.bincount(keys, length=EXPERTS)) + w["router"].T[keys[order]]
    return jnp.einsum("tkd,tk->td", y[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH), scale)


FORMS = [with_biases, sorted_back, added_back, one_each, repeated, with_padding, set_back]


# -- what needs the rows in their places -------------------------------------------------------------------
def positions_matter(w, x):
    """The first rows of the order are dropped."""
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    y = jnp.where(jnp.arange(len(x))[:, None] < 5, 0.0, x[order])
    return y[jnp.argsort(order)]


def sums_run(w, x):
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    return jnp.cumsum(x[order], axis=0)[jnp.argsort(order)]


def stays_sorted(w, x):
    return x[jnp.argsort(jnp.argmax(x @ w["router"], axis=1))]


def neighbours(w, x):
    order = jnp.argsort(x[:, 0])
    return (x[order] - jnp.roll(x[order], 1, axis=0))[jnp.argsort(order)]


def random_of_place(w, x):
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return (x[order] * noise)[jnp.argsort(order)]


def ranks(w, x):
    """The inverse of an order is a rank in the whole batch."""
    return x * jnp.argsort(jnp.argsort(x[:, 0]))[:, None]


def groups_of_inputs(w, x):
    """Nothing says between which numbers these experts are."""
    keys = jnp.abs(x[:, 0]).astype(jnp.int32)
    order = jnp.argsort(keys)
    sizes = jnp.bincount(keys, length=EXPERTS)
    return experts(w, x[order], sizes)[jnp.argsort(order)]


def another_order(w, x):
    """Rows in the order of one sort meet rows in the order of another."""
    a, b = jnp.argsort(x[:, 0]), jnp.argsort(x[:, 1])
    return (x[a] + x[b])[jnp.argsort(a)]


def numbers_are_set(w, x):
    """Numbers that are put at the positions of an order are used."""
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    numbers = jnp.zeros(len(x)).at[order].set(jnp.arange(len(x)) * 2.0)
    return x * numbers[:, None]


def sized(sizes):
    """Experts with groups of other sizes than there are rows of each."""

    def form(w, x):
        chosen = jnp.argmax(x @ w["router"], axis=1)
        order = jnp.argsort(chosen)
        return experts(w, x[order], sizes(chosen))[jnp.argsort(order)]

    return form


# Sizes with which groups do not simply follow each other, or that may be too large for their dtype.
SIZES = {
    "unsigned": lambda chosen: jnp.bincount(chosen, length=EXPERTS).astype(jnp.uint32),
    "of a byte": lambda chosen: jnp.bincount(chosen, length=EXPERTS).astype(jnp.int8),
    "negative": lambda chosen: jnp.array([6, -3, 4, 9]),
    "given": lambda chosen: jnp.bincount(chosen, length=EXPERTS) - 1,
}


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_of_any_sizes(sizes):
    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    form = sized(SIZES[sizes])
    _, found, num = in_blocks(form, w, x)
    assert num == 0
    np.testing.assert_array_equal(found[0], form(w, x))


@pytest.mark.parametrize("sentinel", [EXPERTS + 1, 10**6, 2**31 - 1])
def test_rows_of_no_expert(sentinel):
    """As many values as the largest key are counted only if they are few."""

    def form(w, x):
        chosen = jnp.where(x[:, 0] > 0, jnp.argmax(x @ w["router"], axis=1), sentinel)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS)
        return experts(w, x[order], sizes)[jnp.argsort(order)]

    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    _, found, num = in_blocks(form, w, x)
    assert (num > 0) == (sentinel < 100)
    np.testing.assert_allclose(found[0], form(w, x), rtol=1e-6)


def test_more_classes_than_the_index_counts():
    def form(w, x):
        wide = jnp.concatenate([x @ w["router"], x[:, :1] + jnp.zeros((1, 300))], axis=1)
        chosen = lax.argmax(wide, 1, jnp.int8)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS)
        return experts(w, x[order], sizes)[jnp.argsort(order)]

    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    _, found, _ = in_blocks(form, w, x)
    np.testing.assert_allclose(found[0], form(w, x), rtol=1e-6)


IN_PLACE = [
    numbers_are_set, positions_matter, sums_run, stays_sorted, neighbours, random_of_place, ranks,
    groups_of_inputs, another_order,
]  # fmt: skip


def loss_and_grads(form: Callable[..., Any]) -> Callable[..., Any]:
    def run(w, x):
        (loss, y), grads = jax.value_and_grad(
            lambda w, x: (jnp.sum(jnp.sin(form(w, x))), form(w, x)), (0, 1), has_aux=True
        )(w, x)
        return loss, y, grads

    return run


def in_blocks(
    fn: Callable[..., Any], w: Any, x: Any, num: int = BLOCKS
) -> tuple[Any, list[Any], int]:
    """The rewritten jaxpr, what it computes, and how many of its sorts are of blocks."""
    closed = jax.make_jaxpr(fn)(w, x)
    flat, consts = _rewrite.flatten_calls(closed.jaxpr, closed.consts)
    dims = [frozenset[int]()] * len(w) + [frozenset({0})]
    new = sorted_in_blocks(flat, consts, dims, num)
    jaxpr: Any = _jaxpr.replaced(
        closed.jaxpr, constvars=new.constvars, invars=new.invars, outvars=new.outvars, eqns=new.eqns,
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    sorts = [e for e in _jaxpr.walk(jaxpr) if e.primitive.name == "sort"]
    blocks = [e for e in sorts if e.invars[0].aval.shape[:1] == (num,)]
    return jaxpr, _jaxpr.evaluate(jaxpr, consts, *jax.tree.leaves((w, x))), len(blocks)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_compute_what_all_rows_do(form):
    with jax.enable_x64(True):
        w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
        fn = loss_and_grads(form)
        _, found, num = in_blocks(fn, w, x)
        assert num > 0
        for got, want in zip(found, jax.tree.leaves(fn(w, x)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", IN_PLACE)
def test_rows_in_their_places_stay_there(form):
    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    jaxpr, found, num = in_blocks(form, w, x)
    assert num == 0
    np.testing.assert_array_equal(found[0], form(w, x))


def test_a_callback_sees_the_rows_in_the_order_of_all():
    seen: list[Any] = []

    def form(w, x):
        order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
        jax.debug.callback(seen.append, x[order])
        return x[order][jnp.argsort(order)]

    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    _, _, num = in_blocks(form, w, x)
    jax.effects_barrier()
    assert num == 0
    np.testing.assert_array_equal(seen[0], x[jnp.argsort(jnp.argmax(x @ w["router"], axis=1))])


# -- on devices -------------------------------------------------------------------------------------------
def step_of(form: Callable[..., Any], tx: Any, remat: bool = True) -> Callable[..., Any]:
    """Two scanned layers."""

    def loss_fn(params, batch):
        def layer(x, w):
            return x + form(w, x.reshape(-1, WIDTH)).reshape(x.shape), None

        x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def moved_rows(train_step: Any, state: Any, batch: Any) -> int:
    return sum(m.nbytes for m in train_step.describe(state, batch).movements)


@pytest.mark.parametrize(
    ("form", "num", "options"),
    [
        (sorted_back, 8, {"stage": 3}),
        (added_back, 8, {"stage": 2, "microbatches": 2}),
        (sorted_back, 2, {"stage": 3, "microbatches": 4}),
        (one_each, 4, {"stage": 1}),
    ],
)
def test_a_mixture_of_experts_moves_no_rows(form, num, options):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))
        keys = jax.random.split(jax.random.key(2))
        batch = {
            name: jax.random.normal(k, (16, 4, WIDTH)) for name, k in zip("xy", keys, strict=True)
        }
        tx = optax.adam(1e-2)
        step = step_of(form, tx)
        mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])
        train_step = jzero.shard_train_step(step, mesh=mesh, donate=False, **options)
        expected = state = params, tx.init(params)
        assert not moved_rows(train_step, state, batch)
        jitted = jax.jit(step)
        for _ in range(3):
            state, loss = train_step(state, batch)
            expected, want = jitted(expected, batch)
            np.testing.assert_allclose(loss, want, rtol=1e-10)
        for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-12)


def test_residuals_of_a_loop_keep_the_order_of_all_rows():
    """Without `jax.checkpoint` sorted rows leave the loop of the forward pass: exact, and listed."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))
        keys = jax.random.split(jax.random.key(2))
        batch = {
            name: jax.random.normal(k, (16, WIDTH)) for name, k in zip("xy", keys, strict=True)
        }
        tx = optax.sgd(1e-2)
        step = step_of(sorted_back, tx, remat=False)
        train_step = jzero.shard_train_step(step, stage=3, donate=False)
        state = params, tx.init(params)
        assert moved_rows(train_step, state, batch) > 0
        got, want = train_step(state, batch), jax.jit(step)(state, batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
