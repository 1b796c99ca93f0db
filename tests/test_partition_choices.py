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


def moved(found):
    return [(m.kind, m.axes, m.nbytes) for m in found.moves]


def test_a_sum_over_two_axes_is_one():
    """Over each of two axes it costs as much as to gather what is summed; together it costs less."""
    found = run_and_compare(
        lambda w: w / (w**2).sum(0), ((8, 16), OVER_TWO), mesh=TWO,
        outs=[from_spec((8, 16), TWO, OVER_TWO)],
    )  # fmt: skip
    (only,) = found.moves
    assert (only.kind, {*only.axes}) == ("reduce", {"node", "local"})


def test_what_comes_whole_is_not_gathered():
    """As what the devices do not divide: cut for its rows, and there for whatever needs all of it."""

    def fn(w, x):
        body = lambda c, _: (c * jnp.sort(x, 0)[0], None)  # noqa: E731
        return jnp.sin(x).sum(), jnp.sort(x, 0), jax.lax.scan(body, w[0, :13], None, length=2)

    found = run_and_compare(fn, (SQUARE, P()), ((13, 13), ROWS), whole=(1,))
    assert kinds(found) == ["reduce"]


def test_an_activation_is_not_scattered_as_a_bias_is():
    """A sum of activations whose gradient is summed over rows for a bias, which is sharded otherwise."""

    def fn(w, x, y):
        h = jnp.tanh(y)
        text = (x @ h.T).T @ x * h  # Of all rows of x, for each row of y.
        return w - text.sum(0), text.T @ y

    found = run_and_compare(
        fn, ((16,), ROWS), (SQUARE, ROWS), (SQUARE, ROWS), outs=[from_spec((16,), DATA, ROWS), None]
    )
    assert "exchange" not in kinds(found)
