"""What the partitioner chooses: how much moves, and that what it computes is the same."""

import jax
import jax.numpy as jnp
import pytest
from jax import P

from jzero.ir._layout import from_spec
from partitioned import DATA, ROWS, SQUARE, kinds, run_and_compare

TWO = {"node": 4, "local": 2}
OVER_TWO = P(("node", "local"))


@pytest.fixture(autouse=True, scope="module")
def _double():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
def test_a_sum_over_two_axes_is_one():
    """Over each of two axes it costs as much as to gather what is summed; together it costs less."""
    found = run_and_compare(
        lambda w: w / (w**2).sum(0), ((8, 16), OVER_TWO), mesh=TWO,
        outs=[from_spec((8, 16), TWO, OVER_TWO)],
    )  # fmt: skip
    (only,) = found.moves
    assert (only.kind, {*only.axes}) == ("reduce", {"node", "local"})


@pytest.mark.slow
def test_what_comes_whole_is_not_gathered():
    """As what the devices do not divide: cut for its rows, and there for whatever needs all of it."""

    def fn(w, x):
        body = lambda c, _: (c * jnp.sort(x, 0)[0], None)  # noqa: E731
        return jnp.sin(x).sum(), jnp.sort(x, 0), jax.lax.scan(body, w[0, :13], None, length=2)

    found = run_and_compare(fn, (SQUARE, P()), ((13, 13), ROWS), whole=(1,))
    assert kinds(found) == ["reduce"]


# Steps, what they are given, where their results have to be, and what moves.
STATE, STATE_WHOLE, BATCH = (SQUARE, ROWS), (SQUARE, P()), (SQUARE, ROWS)
LONG = ((64, 16), ROWS)
TABLE, COLUMNS = (400, 16), P(None, "data")


def bias_beside_an_activation(w, x, y):
    """A sum of activations whose gradient is summed over rows for a bias, which is sharded otherwise."""
    text = (x @ jnp.tanh(y).T).T @ x * jnp.tanh(y)  # Of all rows of x, for each row of y.
    return w - text.sum(0), text.T @ y


def inner_step(w, x):
    """Its gradient is scattered as the state is, and its result gathered for the next one."""
    inner = w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    return jnp.tanh(x @ inner).sum()


def looked_up_in_columns(w, x, at):
    """The rows are exchanged for columns, and what is found for rows: less than all rows of everything."""
    return jnp.sin(x[(jnp.abs(at[:, 0]) * 20).astype(jnp.int32)]) @ w


def most_rows_are_padded_ones(w, x):
    """And what fills them up again, of their gradient, moves nothing."""
    return jax.grad(lambda x: (jnp.sin(x[:30] @ w) ** 2).sum())(x)


def joined_with_rows(w, x, y):
    sums = jnp.zeros((16, 16)).at[(jnp.abs(y[:, 0]) * 6).astype(jnp.int32)].add(y)
    return jnp.sin(jnp.concatenate([x, sums], 1)) @ jnp.concatenate([w, w])


def window_of_rows(w, x):
    """It is cut from all of them, in columns; a product takes it in rows of its own."""
    return jnp.sin(jax.lax.dynamic_slice_in_dim(x, jnp.int32(3 * w[0, 0] ** 2), 16) @ w)


def gradient_of_a_whole_table(w, moment, x):
    """Of rows that were not looked up in columns the ids are gathered, which are fewer than columns."""
    ids = (100 * jnp.abs(x[:, :3])).astype(jnp.int32)
    return moment + jax.grad(lambda w: (jnp.sin(w[ids]).sum(-1) ** 2).sum())(w)


CASES = [
    (inner_step, (STATE, BATCH), None, ["gather", "scatter", "gather", "reduce"]),
    (looked_up_in_columns, (STATE_WHOLE, LONG, LONG), None, ["exchange", "gather", "exchange"]),
    (most_rows_are_padded_ones, (STATE_WHOLE, ((32, 16), ROWS)), None, []),
    (joined_with_rows, (STATE_WHOLE, BATCH, BATCH), None, ["scatter"]),
    (window_of_rows, (STATE_WHOLE, ((32, 16), ROWS)), None, ["exchange", "exchange"]),
    (gradient_of_a_whole_table, ((TABLE, P()), (TABLE, COLUMNS), BATCH),
     [from_spec(TABLE, DATA, COLUMNS)], ["gather", "exchange"]),
]  # fmt: skip


@pytest.mark.slow(but=["most_rows_are_padded_ones"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_what_moves(case):
    fn, specs, outs, expected = case
    found = run_and_compare(fn, *specs, outs=outs)
    assert kinds(found) == expected
    if "exchange" in expected and outs is None:  # What was exchanged comes back in rows.
        assert str(found.outs[0]).endswith("@data, 16]")


@pytest.mark.slow
def test_an_activation_is_not_scattered_as_a_bias_is():
    outs = [from_spec((16,), DATA, ROWS), None]
    found = run_and_compare(bias_beside_an_activation, ((16,), ROWS), BATCH, BATCH, outs=outs)
    assert "exchange" not in kinds(found)


# -- along a sharded dim -------------------------------------------------------------------------------
UNEVEN = ((13, 5), ROWS)


@pytest.mark.slow(but=[14])
@pytest.mark.parametrize("rows", [((16, 5), ROWS), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.argmax(0), lambda x: x.argmin(0), lambda x: x.sum(1).argmax(),
        lambda x: jnp.where(x > 0, 1, 2).argmax(0), lambda x: (x > 0).argmin(0),
        lambda x: jnp.where(x > 1, jnp.nan, x).argmax(0), lambda x: jnp.where(x > 1, jnp.nan, x).argmin(0),
        lambda x: (x > 9).argmax(0), lambda x: (x < 9).argmin(0), lambda x: (0.0 * x).argmax(0),
        lambda x: (x * -jnp.inf).argmax(0),
    ],
)  # fmt: skip
def test_each_device_finds_its_own_largest(fn, rows):
    found = run_and_compare(lambda w, x: fn(x), (SQUARE, P()), rows)
    assert set(kinds(found)) == {"reduce"}
    assert len(found.moves) <= 2  # Of Booleans the largest is known.


@pytest.mark.slow
@pytest.mark.parametrize("rows", [LONG, ((61, 16), ROWS)], ids=["even", "uneven"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin"])
def test_running_sums_exchange_totals(name, reverse, rows):
    def fn(w, x):
        return getattr(jax.lax, name)(jnp.cos(x), 0, reverse=reverse)

    found = run_and_compare(fn, (SQUARE, P()), rows)
    assert [m.nbytes for m in found.moves if m.why.startswith("the totals")] == [7 * 16 * 8]
    assert str(found.outs[0]).startswith("[61+3@data" if rows[0][0] == 61 else "[64@data")


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("mesh", [DATA, TWO])
@pytest.mark.parametrize("num", [64, 61])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i], lambda x, i: x[-3:], lambda x, i: x[5], lambda x, i: x[2:12:3],
        lambda x, i: jax.lax.dynamic_slice(x, (i, i), (3, 2)), lambda x, i: x[i - 200],
        lambda x, i: x.at[jnp.array([1, 70, 8, -3])].get(mode="fill"),
        lambda x, i: x.at[jnp.array([1, 70, 8, -3])].get(mode="clip"),
        lambda x, i: x.at[jnp.array([3, 70]), jnp.array([4, 70])].get(mode="fill", fill_value=7.0),
        lambda x, i: x[i, :].astype(jnp.int8)[:3], lambda x, i: (x > 0)[i],
        lambda x, i: jnp.take_along_axis(x, (x[:1] > 0).astype(jnp.int32), 0),
    ],
)  # fmt: skip
def test_few_elements_are_looked_up_where_they_are(fn, num, mesh):
    def step(w, x):
        return fn(x, (20 + 3 * w[0, 0]).astype(jnp.int32))

    spec = ROWS if mesh is DATA else OVER_TWO
    found = run_and_compare(step, (SQUARE, P()), ((num, 5), spec), mesh=mesh)
    assert all(m.kind != "exchange" and m.nbytes < 4 * 5 * 8 * 2 for m in found.moves)


@pytest.mark.slow
@pytest.mark.parametrize("num", [16, 13])
def test_halves_of_two_batches(num):
    """A device has its rows of both, one behind the other."""

    def fn(w, x):
        both = jnp.sin(jnp.concatenate([x, 2 * x]) @ w)
        first, second = jnp.split(both, 2)
        return first - second, both[num:], (first * both[:num]).sum(), both

    found = run_and_compare(fn, (SQUARE, P()), ((num, 16), ROWS))
    assert set(kinds(found)) <= {"reduce", "gather"}
    assert len([m for m in found.moves if m.kind == "gather"]) <= 1  # The result of dealt-out rows.


@pytest.mark.slow
@pytest.mark.parametrize("num", [16, 13])
def test_a_statistic_is_summed_and_not_scattered(num):
    """All rows read it: to scatter it as the bias is, whose gradient sums rows, takes two collectives."""

    def fn(w, x):
        def loss(w):
            h = x + w
            return jnp.sin((h - h.mean(0)) * h.max(0)).sum()

        return w - jax.grad(loss)(w)

    found = run_and_compare(
        fn, ((16,), P()), ((num, 16), ROWS), outs=[from_spec((16,), DATA, ROWS)]
    )
    assert "gather" not in kinds(found)


@pytest.mark.slow
@pytest.mark.parametrize("num", [16, 13])
def test_each_device_draws_its_own_random_bits(num):
    """Those that one device would draw for these rows."""

    def fn(w, x):
        key = jax.random.key(0)
        keep = jax.random.bernoulli(jax.random.key(2), 0.5, x.shape)
        noise = jax.random.normal(jax.random.key(1), w.shape, w.dtype)
        return jnp.where(keep, x, 0.0), jax.random.bits(key, (num, 3), "uint16"), w + noise

    stored = from_spec(SQUARE, DATA, ROWS)
    found = run_and_compare(fn, (SQUARE, ROWS), ((num, 16), ROWS), outs=[None, None, stored])
    assert not found.moves
    shapes = [
        eqn.outvars[0].aval.shape for eqn in found.jaxpr.eqns if "threefry" in str(eqn.primitive)
    ]
    assert (2, 16) in shapes
    assert (16, 16) not in shapes


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_added_by_number_is_made_where_it_is_read(turned):
    """Each device adds what falls into its shard; what is out of bounds none does."""

    def fn(w, x):
        rows, columns = jnp.arange(16), 3 * jnp.arange(16) - 20
        added = jnp.zeros((16, 16), x.dtype).at[rows, columns].add(2.0, mode="drop")
        return w + (x.T if turned else x) * (added + added[::-1].T)

    stored = from_spec(SQUARE, DATA, P(None, "data") if turned else ROWS)
    specs = (SQUARE, P(None, "data") if turned else ROWS), (SQUARE, ROWS)
    run_and_compare(fn, *specs, outs=[stored])

    def alone(w, x):
        rows, columns = jnp.arange(16), 3 * jnp.arange(16) - 20
        added = jnp.zeros((16, 16), x.dtype).at[rows, columns].add(2.0, mode="drop")
        return w + added

    found = run_and_compare(alone, *specs, outs=[stored])
    assert not found.moves
    assert (16, 16) not in {out.aval.shape for e in found.jaxpr.eqns for out in e.outvars}
