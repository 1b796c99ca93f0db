"""What steps do beside computing: as often, with the same values and in the same order as under `jax.jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import small

pytestmark = pytest.mark.usefixtures("float64")

ROWS, DIM = 16, 4
CALLS: list[tuple[str, list[np.ndarray]]] = []


def note(name, *values):
    CALLS.append((name, [np.array(value) for value in values]))


def tell(name, *values, ordered=True):
    io_callback(functools.partial(note, name), None, *values, ordered=ordered)


def ask(name, answer, *values, ordered=False):
    """What the host answers, which it may make of the values."""

    def answered(*values):
        note(name, *values)
        return jax.tree.map(np.asarray, answer(*map(np.asarray, values)))

    kinds = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, answer(*map(np_like, values))))
    return io_callback(answered, kinds, *values, ordered=ordered)


def np_like(x):
    return np.ones(x.shape, x.dtype)


def descent(loss, w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grad, value


def layers(w, x, turn):
    """Three layers; `turn(i, h)` acts in each."""

    def layer(h, i):
        return jnp.tanh(turn(i, h) @ w), i * 2

    return lax.scan(layer, x, jnp.arange(3))


def mean_square(w, x):
    return jnp.mean((x @ w) ** 2)


def in_order(w, x):
    """Before a loop, in it, in a branch of it and behind it; in a `while`; of rows, and of the state."""
    tell("first", x)

    def turn(i, total):
        tell("turn", i, x[i])
        lax.cond(i > 0, lambda: tell("branch", w[0, i]), lambda: None)
        return total + x[i].sum()

    total = lax.fori_loop(0, 3, turn, 0.0)
    tell("then", total)

    def body(carry):
        i, total = carry
        tell("while", i)
        return i + 1, total * 0.5

    i, _ = lax.while_loop(lambda carry: carry[1] ** 2 > 1e-2, body, (0, total))
    tell("mean", x.mean())
    w, loss = descent(mean_square, w, x)
    tell("last", w, loss)
    return w, loss


def in_two_loops(w, x):
    """What a later loop over microbatches computes again is not done again."""

    def act(i, h):
        jax.debug.callback(functools.partial(note, "layer"), i, ordered=True)
        return h

    return descent(lambda w, x: jnp.sqrt(jnp.mean(layers(w, x, act)[0] ** 2)), w, x)


def answers_in_layers(w, x):
    """Each layer waits for an answer, which is about the state."""

    def act(i, h):
        return h * ask("layer", lambda s, i: np.tanh(s) + i, w.sum(), i)

    return descent(lambda w, x: jnp.mean(layers(w, x, act)[0] ** 2), w, x)


def answers_that_steer(w, x):
    """The host ends a loop, and answers about all rows in a branch."""

    def more(carry):
        return ask("more", lambda i: i < 3, carry[0])

    def turn(carry):
        return carry[0] + 1, carry[1] * 0.5

    i, w = lax.while_loop(more, turn, (0, w))
    scale = lax.cond(i > 2, lambda: ask("branch", np.mean, x), lambda: 0.0)
    return descent(lambda w, x: mean_square(w * scale, x), w, x)


ORDERED = {fn.__name__: fn for fn in (in_order, in_two_loops)}
STEPS = ORDERED | {fn.__name__: fn for fn in (answers_in_layers, answers_that_steer)}


def trained(step, state, x):
    """Each step's state and outputs, and what it has told the host."""
    CALLS.clear()
    found, told = [], []
    for k in range(3):
        state, outputs = step(state, x + k)
        found.append(jax.tree.map(np.asarray, (state, outputs)))
        jax.effects_barrier()
        told.append([*CALLS])
        CALLS.clear()
    return found, told


def by_value(call):
    name, values = call
    return name, [np.round(value, 6).tolist() for value in values]


def assert_alike(found, expected, tolerance=1e-9):
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(close, found, expected)


def assert_same_calls(found, expected, tolerance=1e-9):
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert_alike([values for _, values in found], [values for _, values in expected], tolerance)


def drawn():
    rng = np.random.default_rng(0)
    return rng.normal(size=(DIM, DIM)), rng.normal(size=(ROWS, DIM))


@pytest.mark.slow(but=["in_order-1-2", "in_two_loops-1-2"])
@pytest.mark.parametrize(("num", "accumulate"), [(1, 2), (8, 1), (8, 2)])
@pytest.mark.parametrize("name", STEPS)
def test_as_under_jit(name, num, accumulate):
    w, x = drawn()
    step = small.shard_train_step(STEPS[name], mesh=small.mesh(data=num), microbatches=accumulate)
    found, told = trained(step, w, x)
    expected, calls = trained(jax.jit(STEPS[name]), w, x)
    assert_alike(found, expected)
    for mine, jits in zip(told, calls, strict=True):
        if name not in ORDERED:
            mine, jits = sorted(mine, key=by_value), sorted(jits, key=by_value)
        assert_same_calls(mine, jits)


@pytest.mark.parametrize("num", [1, 4])
def test_a_gradient_that_the_host_reads(num):
    """It is reduced to shards for the update; a callback without results reads it too."""

    def step(w, x):
        value, grad = jax.value_and_grad(mean_square)(w, x)
        tell("gradient", grad)
        return w - 0.1 * grad, value

    mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])
    found, told = trained(small.shard_train_step(step, mesh=mesh, stage=3), *drawn())
    expected, calls = trained(jax.jit(step), *drawn())
    assert_alike(found, expected)
    for mine, jits in zip(told, calls, strict=True):
        assert_same_calls(mine, jits)
