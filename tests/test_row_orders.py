"""Rows that a step sorts and puts back: each device sorts its own, unless they are needed in their places."""

import functools
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


@jax.custom_vjp
def permuted(x, order):
    return x[order]


def permuted_back(order, g):
    return permuted(g, jnp.argsort(order)), None


permuted.defvjp(lambda x, order: (permuted(x, order), order), permuted_back)


def of_number(w, num):
    """So many experts."""
    return {name: w[name][jnp.arange(num) % EXPERTS] for name in ("up", "down")}


def weighed(y, scale):
    return jnp.einsum("tkd,tk->td", y.reshape(-1, CHOSEN, WIDTH), scale)


def own_derivative(w, x):
    """As MaxText: the derivative of a permutation is a look-up at its inverse; and what has no group is 0."""
    scale, chosen = routed(w, x)
    order = jnp.argsort(jnp.ravel(chosen))
    rows = permuted(jnp.repeat(x, CHOSEN, axis=0), order)
    sizes = jnp.bincount(jnp.ravel(chosen), length=EXPERTS)
    y = experts(w, rows, sizes)
    y = jnp.where((jnp.arange(len(y)) < jnp.sum(sizes))[:, None], y, 0)
    return weighed(permuted(y, jnp.argsort(order)), scale)


def ranked(w, x):
    """The inverse is the rank of a key, from another sort of the same keys."""
    scale, chosen = routed(w, x)
    order, inverse = jnp.argsort(jnp.ravel(chosen)), jnp.argsort(jnp.argsort(jnp.ravel(chosen)))
    sizes = jnp.bincount(jnp.ravel(chosen), length=EXPERTS + 2)
    y = experts(of_number(w, EXPERTS + 2), x[order // CHOSEN], sizes)
    return weighed(y[inverse], scale)


def rematted(w, x):
    """A checkpoint of the experts only: its body is given sorted rows and returns their derivatives."""
    scale, chosen = routed(w, x)
    order = jnp.argsort(jnp.ravel(chosen))
    sizes = jnp.bincount(jnp.ravel(chosen), length=EXPERTS)
    y = jax.checkpoint(experts)(w, x[order // CHOSEN], sizes)
    return weighed(y[jnp.argsort(order)], scale)


def by_weight(w, x):
    """Within each expert by their weights."""
    scale, chosen = routed(w, x)
    order = jnp.lexsort((jnp.ravel(scale), jnp.ravel(chosen)))
    sizes = jnp.bincount(jnp.ravel(chosen), length=EXPERTS - 1)
    y = experts(of_number(w, EXPERTS - 1), x[order // CHOSEN], sizes)
    return weighed(y[jnp.argsort(order)], scale)


def packed(number, width=jnp.int32, divisor=None):
    """Keys and places in one number: `key * rows + place`."""

    def form(w, x):
        scale, chosen = routed(w, x)
        keys = jnp.ravel(chosen).astype(width)
        num, by = (jnp.asarray(f(keys.size), width) for f in (number, divisor or number))
        order = jnp.sort(keys * num + jnp.arange(keys.size, dtype=width)) % by
        sizes = jnp.minimum(jnp.bincount(jnp.ravel(chosen), length=EXPERTS), 9)
        y = experts(w, x[order // CHOSEN], sizes)
        return weighed(y[jnp.argsort(order)], scale)

    return form


def layers(form, wrap=lambda layer: layer):
    """Three scanned layers, whose sorted rows the backward pass reads."""

    def run(w, x):
        stacks = jax.tree.map(lambda v: jnp.stack([v, 0.5 * v, -v]), w)
        layer = wrap(lambda x, own: (jnp.tanh(x + form(own, x)), None))
        return lax.scan(layer, x, stacks)[0]

    run.__name__ = f"layers of {form.__name__}"
    return run


def sizes_of_others(w, x):
    """Every layer has the groups of the first one: other rows are in them, and some in none."""
    first = jnp.argmax(x @ w["router"], axis=1)
    sizes = jnp.bincount(first, length=EXPERTS)

    def form(own, rows):
        order = jnp.argsort(jnp.argmax(rows @ own["router"], axis=1))
        return experts(own, rows[order], sizes)[jnp.argsort(order)]

    return layers(form)(w, x)


def an_order_for_all_layers(w, x):
    """Each layer is given rows that were sorted before."""
    chosen = jnp.argmax(x @ w["router"], axis=1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    rows = x[order]

    def layer(y, scale):
        return y + experts(w, jnp.tanh(rows * scale), sizes)[jnp.argsort(order)], None

    return lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]


def rows_of_another_loop(w, x):
    """A loop returns its sorted rows and their orders, and another works on them and puts them back."""

    def layer(y, scale):
        keys = jnp.argmax(y @ w["router"] * scale, axis=1)
        order = jnp.argsort(keys)
        return jnp.tanh(y), (y[order], order, jnp.bincount(keys, length=EXPERTS), 2.0)

    def next_layer(y, own):
        rows, order, sizes, factor = own
        return y + factor * experts(w, rows, sizes)[jnp.argsort(order)], None

    x, stacks = lax.scan(layer, x, jnp.arange(-1.0, 2.0))
    return lax.scan(next_layer, x, stacks, reverse=True)[0]


FORMS = [
    with_biases, added_back, one_each, repeated, set_back, ranked, by_weight,
    *map(layers, (sorted_back, rematted, own_derivative)), layers(with_padding, jax.checkpoint),
    sizes_of_others,
    an_order_for_all_layers, rows_of_another_loop, packed(lambda num: num),
    packed(lambda num: 1024, jnp.int16),
]  # fmt: skip


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


def loop_of_orders(w, x):
    """Of three layers, whose rows are sorted otherwise, the sorted rows and the orders."""

    def layer(y, shift):
        order = jnp.argsort((jnp.argmax(y @ w["router"], axis=1) + shift) % EXPERTS)
        return jnp.tanh(y), (y[order], order)

    return lax.scan(layer, x, jnp.arange(3))


def put_back_in_loop(y, rows, orders):
    def layer(y, own):
        rows, order = own
        return y + jnp.tanh(rows)[jnp.argsort(order)], None

    return lax.scan(layer, y, (rows, orders))[0]


def other_slices(w, x):
    """The rows of a layer meet the order of another one."""
    y, (rows, orders) = loop_of_orders(w, x)
    return put_back_in_loop(y, rows[::-1], orders)


def slices_of_other_loops(w, x):
    y, (rows, _) = loop_of_orders(w, x)
    y, (_, orders) = loop_of_orders(w, y)
    return put_back_in_loop(y, rows, orders)


def carried(w, x):
    """Sorted rows are the carry of a loop: an iteration puts back those of the one before."""

    def layer(own, shift):
        rows, order = own
        y = rows[jnp.argsort(order)]
        order = jnp.argsort((jnp.argmax(y @ w["router"], axis=1) + shift) % EXPERTS)
        return (jnp.tanh(y[order]), order), None

    rows, order = lax.scan(layer, (x, jnp.arange(len(x))), jnp.arange(3))[0]
    return rows[jnp.argsort(order)]


def chosen_by_a_rank(w, x):
    """What branch is taken depends on the row that comes first."""
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    y = x[order][jnp.argsort(order)]
    return lax.cond(order[0] > 3, jnp.sin, jnp.cos, y)


def in_a_branch(w, x):
    order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    y = lax.cond(x[0, 0] > 0, lambda y: jnp.flip(y, 0), lambda y: y, x[order])
    return y[jnp.argsort(order)]


def flag_of_the_first(w, x):
    """Rows of the first iteration are in order, those of the others are not."""

    def layer(own, shift):
        y, is_first = own
        order = jnp.argsort((jnp.argmax(y @ w["router"], axis=1) + shift) % EXPERTS)
        return (jnp.tanh(y + jnp.where(is_first, y[order], x)[jnp.argsort(order)]), False), None

    return lax.scan(layer, (x, True), jnp.arange(3))[0][0]


def masked_by_a_product(w, x):
    """The product of keys is negative where it overflows."""
    keys = jnp.argmax(x @ w["router"], axis=1).astype(jnp.int8)
    order = jnp.argsort(keys)
    return jnp.where((keys * jnp.int8(100) < 0)[:, None], 0.0, x[order])[jnp.argsort(order)]


def by_an_inverse(change):
    """Rows in the order of numbers that are made of the inverse of an order."""

    def form(w, x):
        inverse = jnp.argsort(jnp.argsort(jnp.argmax(x @ w["router"], axis=1)))
        return x[jnp.argsort(change(inverse))]

    return form


def cut_by_weight(w, x):
    """Groups are smaller than there are rows of each key: which rows are behind them depends on the order."""
    chosen = jnp.argmax(x @ w["router"], axis=1)
    order = jnp.lexsort((x[:, 0], chosen))
    sizes = jnp.minimum(jnp.bincount(chosen, length=EXPERTS), 5)
    return experts(w, x[order], sizes)[jnp.argsort(order)]


def of_no_group(w, x):
    """Rows behind all groups are masked by their places."""
    chosen = jnp.where(x[:, 0] > 0, jnp.argmax(x @ w["router"], axis=1), EXPERTS)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    rows = jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x[order], 1.0)
    return rows[jnp.argsort(order)]


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
    np.testing.assert_array_equal(found[0], jax.jit(form)(w, x))


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
    numbers_are_set, positions_matter, sums_run, stays_sorted, random_of_place, ranks,
    groups_of_inputs, another_order, other_slices, slices_of_other_loops, carried,
    chosen_by_a_rank, in_a_branch, flag_of_the_first,
    masked_by_a_product, cut_by_weight, of_no_group,
    packed(lambda num: num // 2), packed(lambda num: 50, jnp.int8), packed(lambda num: 2**14, jnp.int16),
    packed(lambda num: num, divisor=lambda num: 2 * num),
    *map(by_an_inverse, (jnp.negative, lambda x: x + 1, lambda x: x // 2, lambda x: x[::-1])),
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
    run = jax.jit(functools.partial(_jaxpr.evaluate, jaxpr, consts))
    return jaxpr, run(*jax.tree.leaves((w, x))), len(blocks)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_compute_what_all_rows_do(form):
    with jax.enable_x64(True):
        w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
        fn = loss_and_grads(form)
        _, found, num = in_blocks(fn, w, x)
        assert num > 0
        for got, want in zip(found, jax.tree.leaves(jax.jit(fn)(w, x)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", IN_PLACE)
def test_rows_in_their_places_stay_there(form):
    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    jaxpr, found, num = in_blocks(form, w, x)
    assert num == 0
    np.testing.assert_array_equal(found[0], jax.jit(form)(w, x))


@pytest.mark.parametrize("in_branch", [False, True])
def test_a_callback_sees_the_rows_in_the_order_of_all(in_branch):
    """Whether it is called may depend on the order, too."""
    seen: list[Any] = []

    def form(w, x):
        order = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))

        def call(*rows):
            jax.debug.callback(lambda *rows: seen.append(rows), *rows)

        if in_branch:
            lax.cond(order[0] == expected[0], call, lambda: None)
        else:
            call(x[order])
        return x[order][jnp.argsort(order)]

    w, x = weights(), jax.random.normal(jax.random.key(9), (ROWS, WIDTH))
    expected = jnp.argsort(jnp.argmax(x @ w["router"], axis=1))
    _, _, num = in_blocks(form, w, x)
    jax.effects_barrier()
    assert num == 0
    for rows in seen[0]:
        np.testing.assert_array_equal(rows, x[expected])


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
    ("form", "num", "remat", "options"),
    [
        (added_back, 8, True, {"stage": 2, "microbatches": 2}),
        (sorted_back, 2, False, {"stage": 3, "microbatches": 4}),
        (own_derivative, 8, False, {"stage": 1}),
        (rematted, 8, False, {"stage": 3}),
    ],
)
def test_a_mixture_of_experts_moves_no_rows(form, num, remat, options):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))
        keys = jax.random.split(jax.random.key(2))
        batch = {
            name: jax.random.normal(k, (16, 4, WIDTH)) for name, k in zip("xy", keys, strict=True)
        }
        tx = optax.adam(1e-2)
        step = step_of(form, tx, remat)
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
