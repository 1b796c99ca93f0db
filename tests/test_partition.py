"""Partitioned steps and functions: every leaf and output against `jax.jit`, in float64; and what moves."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import partition_steps as steps
from jzero.ir._layout import from_spec
from jzero.testing import Tolerance, assert_same_training
from jzero.tracing import _jaxpr
from partitioned import DATA, ROWS, SQUARE, kinds, program, run_and_compare


@pytest.fixture(autouse=True, scope="module")
def _double():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


KINDS: dict[str, Callable[..., steps.Steps]] = {
    "gpt_whose_leaves_are_padded": functools.partial(steps.gpt, width=20, heads=2, vocab=90),
    "convolutions": steps.convolutions, "lstm": steps.lstm, "clip": steps.clip, "moe": steps.moe,
    "newton": steps.newton,
}  # fmt: skip


@pytest.mark.slow(but=["13-convolutions", "16-newton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [16, 13])
def test_trains_as_on_one_device(kind, num):
    init, step, batch = KINDS[kind](num)
    tolerance = Tolerance(rtol=1e-9, leaf_rtol=1e-9)
    assert_same_training(step, init, [batch] * 3, stage=3, tolerance=tolerance)


# -- parts of it ----------------------------------------------------------------------------------------
def test_state_moves_to_rows():
    found = program(lambda w, x: jnp.sin(x @ w), (SQUARE, ROWS), (SQUARE, ROWS))
    assert [(m.kind, m.of, m.why) for m in found.moves] == [("gather", 0, "state")]
    assert str(found.outs[0]) == "[16@data, 16]"


def test_a_sum_waits_and_is_scattered_where_the_state_is():
    wanted = from_spec(SQUARE, DATA, P(None, "data"))

    def fn(w, x):
        return w + (x.T @ x + (jnp.cos(x).T @ x).T)

    found = program(fn, (SQUARE, P(None, "data")), (SQUARE, ROWS), outs=[wanted])
    assert kinds(found) == ["scatter"]


def test_a_sum_in_a_carry_is_settled_behind_the_loop():
    """S1: the carry starts from zeros, each iteration adds a partial sum."""
    wanted = from_spec(SQUARE, DATA, ROWS)

    def fn(w, x):
        total, _ = lax.scan(
            lambda c, k: (c + x.T @ (k * x), None), jnp.zeros_like(w), jnp.arange(3.0)
        )
        return w + total

    found = program(fn, (SQUARE, ROWS), (SQUARE, ROWS), outs=[wanted])
    assert [(m.kind, m.times) for m in found.moves] == [("scatter", 1)]


def settled_by_another_carry(w, x):
    """The sum began as zeros, which are taken for what is added to them."""

    def turn(carry, k):
        total = jnp.sum(k * x) + carry[1]
        return (total, total), None

    return w, lax.scan(turn, (jnp.float64(0), jnp.float64(0)), jnp.arange(1.0, 4.0))[0]


def solved(w, x):
    return lax.custom_linear_solve(lambda v: w @ v, x, lambda m, b: jnp.tanh(b), symmetric=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        settled_by_another_carry,
        lambda w, x: lax.scan(lambda c, k: (0.5 * c + x.T @ (k * x), None), w, jnp.arange(3.0))[0],
        lambda w, x: w,  # no equation at all
        solved,
    ],
)
def test_carries_and_solvers(fn):
    for spec in (P(), ROWS):
        run_and_compare(fn, (SQUARE, spec), (SQUARE, ROWS))


def by_rows(carry, x, w):
    """A scan of single rows: their sum, what no row changes, how many there are, and a loss of each."""

    def body(carry, row):
        total, same, num = carry
        y = lax.fori_loop(0, 2, lambda _, y: jnp.sin(y @ w), same * row)
        return (total + y, same, num + 1), (y.sum(), w[0])

    return lax.scan(body, (carry, jnp.float64(2), jnp.int32(3)), x, reverse=True)


@pytest.mark.slow
def test_each_device_scans_its_own_rows():
    found = program(
        lambda w, x: by_rows(w[1], x, w), (SQUARE, ROWS), (SQUARE, ROWS),
    )  # fmt: skip
    assert all(m.times == 1 for m in found.moves)
    (scan,) = [eqn for eqn in found.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert _jaxpr.scan_parts(scan).length == 2
    run_and_compare(lambda w, x: by_rows(w[1], x, w), (SQUARE, ROWS), (SQUARE, ROWS))
    run_and_compare(lambda w, x: by_rows(0 * w[1], x, w), (SQUARE, P()), ((13, 16), ROWS))


@pytest.mark.parametrize(
    "body",
    [
        lambda c, row: (c + row, c),
        lambda c, row: (c + c, row.sum()),
        lambda c, row: ((total := c + row), total),
        lambda c, row: ((total := c + row), total * 2),
        lambda c, row: (0.5 * c + row, row.sum()),
        lambda c, row: (jnp.maximum(c, row), row.sum()),
    ],
)
def test_rows_that_wait_for_each_other_are_scanned_by_all(body):
    run_and_compare(lambda w, x: lax.scan(body, w[0], x), (SQUARE, ROWS), (SQUARE, ROWS))


@pytest.mark.parametrize(
    "look_up",
    [
        lambda x, y, at: x[at, y],
        lambda x, y, at: x[np.arange(16), y],
        lambda x, y, at: x.T[y, at],
        lambda x, y, at: jnp.stack([x, -x], 1)[at, y % 2, y],
        lambda x, y, at: x.at[at, y].add(y),
        lambda x, y, at: x.at[at, -y].set(2.0),
        lambda x, y, at: jax.grad(lambda x: (x[at, y] ** 3).sum())(x),
    ],
)
def test_rows_are_looked_up_in_themselves(look_up):
    def fn(w, x):
        return look_up(x, (8 * jnp.abs(jnp.sin(x[:, 0]))).astype(jnp.int32), jnp.arange(16))

    run_and_compare(fn, (SQUARE, P()), (SQUARE, ROWS))
    assert not program(fn, (SQUARE, P()), (SQUARE, ROWS)).moves


def test_rows_are_looked_up_in_others():
    """The column does not count the rows, or the operand has more of them."""

    def fn(w, x):
        y, at = jnp.arange(16) % 5, jnp.arange(16)
        ends_alike = np.array([0, 2, 1, *range(3, 16)])
        found = x[at[::-1], y], x[y, at], jnp.concatenate([x, x])[at, y], x[at - 1, y]
        return *found, x[ends_alike, y]

    run_and_compare(fn, (SQUARE, P()), (SQUARE, ROWS))


def test_gradients_of_grouped_convolutions_gather_no_rows():
    def fn(w, x):
        conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")
        return jax.grad(lambda w: (conv(x, w, feature_group_count=4) ** 2).sum())(w)

    sides = ((8, 2, 3), P()), ((16, 8, 5), ROWS)
    run_and_compare(fn, *sides)
    assert {move.kind for move in program(fn, *sides).moves} == {"reduce"}


def test_random_bits_are_those_of_the_whole_along_any_dim():
    def fn(w, x):
        draw = functools.partial(jax.random.uniform, jax.random.key(0))
        y = jnp.stack([x, -x]).transpose(2, 1, 0)
        return x.T * draw(x.T.shape), y * draw(y.shape)

    for shape in (SQUARE, (13, 16)):
        run_and_compare(fn, (SQUARE, P()), (shape, ROWS))


@pytest.mark.slow
def test_masks_and_positions_are_made_where_they_are_read():
    def fn(w, x):
        at = jnp.arange(16)
        return jnp.where(at[:, None] >= at[None, :], x, 0.0) + at[:, None] * w[0, 0]

    run_and_compare(fn, (SQUARE, P()), (SQUARE, ROWS))
    assert not program(fn, (SQUARE, P()), (SQUARE, ROWS)).moves


@pytest.mark.slow
def test_what_runs_on_no_shards_is_replicated_first_and_listed():
    found = program(lambda w, x: jnp.sort(x[:, 0]) + w[0], (SQUARE, P()), (SQUARE, ROWS))
    assert [(m.kind, m.operation, m.value, m.why) for m in found.moves] == [
        ("gather", "sort", "float64[16]", "it needs the rows of all devices")
    ]
    run_and_compare(lambda w, x: jnp.sort(x[:, 0]) + w[0, 0], (SQUARE, P()), ((13, 3), ROWS))
