"""Microbatches of partitioned steps: an axis in time, which becomes loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import partition_steps as steps
import small
from jzero import StepError
from jzero.ir._layout import Partial, replicated
from jzero.ir._loops import MICROBATCHES
from jzero.segments._partitioned import Partitioned
from jzero.sharding.partition._time_axis import TimeAxis, step_over_time
from jzero.tracing import _jaxpr

TX = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def _partitions(monkeypatch):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def train(made, num_steps=3, rows=None, **options):
    """Trains by the partitioner, beside one device; returns the sharded step and its programs."""
    init, step, batch = made
    batch = batch if rows is None else jax.tree.map(lambda x: x[:rows], batch)
    options = {"mesh": small.mesh(data=8), **options}
    train_step = small.shard_train_step(step, **options)
    state = expected = init()
    run = jax.jit(step)
    for _ in range(num_steps):
        expected, wanted = run(expected, batch)
        state, found = train_step(state, batch)
        assert_close(found, wanted)
    assert_close(train_step.unshard(state), expected)
    program = train_step._programs.of(train_step._programs.bind((init(), batch), {}))
    found = program.step.found
    assert isinstance(found, Partitioned)
    return train_step, found


def assert_close(actual, expected):
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11, err_msg=str(path))


def loops(found):
    """The loops over microbatches of a partitioned step."""
    jaxpr = found.programs["microbatches"].jaxpr
    return [eqn for eqn in jaxpr.eqns if _is_loop(eqn)]


def _is_loop(eqn):
    return eqn.primitive.name == "scan" and _jaxpr.in_scope(eqn, MICROBATCHES)


def counts(eqn):
    """How often each collective stands in a loop, those inside included."""
    found: dict[str, int] = {}
    for each in _jaxpr.inside(eqn):
        if each.primitive in _jaxpr.COLLECTIVES:
            found[each.primitive.name] = found.get(each.primitive.name, 0) + 1
    return found


# -- parity --------------------------------------------------------------------------------------------


def mean_of_rows(batch_loss):
    """What minimises a loss of `(params, rows)` that also returns metrics."""

    def params():
        return {"a": steps.normal(0, 32, 64), "b": steps.normal(1, 64, 8)}

    def step(state, batch):
        p, opt_state = state
        (_, metrics), g = jax.value_and_grad(batch_loss, has_aux=True)(p, batch)
        updates, opt_state = TX.update(g, opt_state, p)
        return (optax.apply_updates(p, updates), opt_state), metrics

    def init():
        p = params()
        return p, TX.init(p)

    return init, step


def layer(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def test_keys_of_rows():
    def loss(p, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (32,)))(batch["key"])
        y = layer(p, batch["x"] + noise)
        return jnp.mean(y**2), {"key": batch["key"]}

    keys = jax.random.split(jax.random.key(0), 16)
    train((*mean_of_rows(loss), {"x": steps.rows(16, 32), "key": keys}), accumulate=2)


# -- what the loops do ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loops_of_single_rows_stop_by_themselves(accumulate):
    """Also those that begin with the same for all rows; the interpreter refuses both in microbatches."""

    def solved(w, x):
        def far(c):
            return (jnp.max(jnp.abs(c[0] ** 3 + c[0] - x @ w)) > 1e-9) & (c[1] < 50)

        def better(c):
            return c[0] - (c[0] ** 3 + c[0] - x @ w) / (3 * c[0] ** 2 + 1), c[1] + 1

        return lax.while_loop(far, better, (jnp.zeros(16), 0))

    def step(w, x):
        y, count = jax.vmap(solved, (None, 0))(w, x)
        return w - 0.1 * x.T @ y / x.shape[0], {"counts": count}

    made = lambda: steps.normal(0, 16, 16), step, steps.rows(32, 16)
    for each in (made, steps.newton()):
        _, found = train(each, accumulate=accumulate)
        whiles = [e for e in _jaxpr.walk(found.program.jaxpr) if e.primitive.name == "while"]
        assert whiles
        assert not any(counts(eqn) for eqn in whiles)


def test_a_while_over_the_whole_batch_is_opened():
    train(steps.searched(), accumulate=2)


@pytest.mark.slow
def test_activations_of_all_microbatches_are_kept_and_said():
    """Of layers in a loop, each of which needs statistics of the whole batch."""

    def loss(p, x):
        def turn(x, _):
            return jnp.tanh((x - x.mean(0)) @ p["a"] @ p["a"].T), None

        return jnp.mean(lax.scan(turn, x, length=3)[0] ** 2), {}

    init, step = mean_of_rows(loss)
    train((init, step, steps.rows(16, 32)), accumulate=2)
    train_step = small.shard_train_step(step, mesh=small.mesh(data=8), microbatches=2)
    many = jax.ShapeDtypeStruct((2**14, 32), np.float64)
    with pytest.warns(UserWarning, match="MiB .* of all 2 microbatches at once, at .*loss"):
        train_step.plan(init(), many)


@pytest.mark.slow
def test_loops_that_would_repeat_products_many_times_are_refused():
    def loss(p, x):
        for _ in range(9):
            x = jnp.tanh((x - x.mean(0)) @ p["a"] @ p["a"].T)
        return jnp.mean(x**2), {}

    init, step = mean_of_rows(loss)
    train_step = small.shard_train_step(step, mesh=small.mesh(data=8), microbatches=2)
    with pytest.raises(StepError, match="times as often, and 4 times is the most"):
        train_step(init(), steps.rows(16, 32))


def doubled_in_turn(h):
    return lax.fori_loop(0, len(h), lambda i, h: h.at[i].set(h[i] * 2), h)


def set_to_others(h):
    for i in range(3):
        h = h.at[i].set(h[i + 1])
    return h


def set_where_largest(h):
    i = jnp.argmax(h[:, 0])
    return h.at[i].set(h[i - 1])


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [16, 20])  # Of both some microbatches are padded.
@pytest.mark.parametrize("act", [doubled_in_turn, set_to_others, set_where_largest])
def test_updates_of_single_rows(act, num_rows):
    def step(w, x):
        return w, act(x @ w).mean()

    w, x = jnp.eye(8), np.random.default_rng(0).normal(size=(num_rows, 8))
    _, found = small.shard_train_step(step, mesh=small.mesh(data=8), microbatches=4)(w, x)
    np.testing.assert_allclose(found, jax.jit(step)(w, x)[1], rtol=1e-9)


# -- conversions over time -----------------------------------------------------------------------------
SIZES = {"data": 4, "time": 2}


@pytest.mark.parametrize(
    ("source", "target", "once", "kind", "before"),
    [
        (replicated((8,), SIZES).cut(0, "data").cut(0, "time"), replicated((8,), SIZES), False,
         "gather", "[8@data,time]"),
        (replicated((8,), SIZES).with_partial(Partial("data"), Partial("time")),
         replicated((8,), SIZES), False, "reduce", "[8] sum(data) sum(time)"),
        (replicated((8,), SIZES).with_partial(Partial("data"), Partial("time")),
         replicated((8,), SIZES).cut(0, "data"), False, "reduce", "[8@data] sum(time)"),
        (replicated((8,), SIZES).with_partial(Partial("data"), Partial("time")),
         replicated((8,), SIZES).cut(0, "data"), True, "reduce", "[8] sum(data) sum(time)"),
        (replicated((8,), SIZES), replicated((8,), SIZES).cut(0, "data").cut(0, "time"), False, None, None),
    ],
)  # fmt: skip
def test_what_ends_a_loop_on_the_way_from_layout_to_layout(source, target, once, kind, before):
    step = step_over_time(source, target, TimeAxis("time", 2, once))
    assert (step and step.kind, step and str(step.before)) == (kind, before)
