"""Slices whose start JAX clamps: a part that jzero takes of one is a part of the rows that JAX took.

XLA merges the two, with JAX before 0.11 without the clamp. All is compiled as users compile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo
from jzero.ir import _starts
from jzero.tracing import _jaxpr
from zoo import Setting, sharded

FAMILIES = [name for name in zoo.NAMES if zoo.module_of(name) == "windows"]


@pytest.fixture(autouse=True, scope="module")
def _optimized():
    """With XLA's optimizations, in float64."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_disable_most_optimizations", before)


SETTINGS = {
    "stage0": (0, 1, {}),
    "stage3": (3, 1, {}),
    "microbatches": (3, 2, {}),
    "tiles": (3, 1, {"tile_bytes": 256}),
    "offload": (2, 1, {"offload": jzero.PinnedHost()}),
    "offload_params": (3, 1, {"offload_params": jzero.PinnedHost()}),
}


@pytest.mark.slow(but=[21])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_slice_of_a_clamped_slice(name, setting):
    stage, accumulate, options = SETTINGS[setting]
    family = zoo.get(name)
    family = zoo.Program(**{**vars(family), "options": options})
    dtype = jnp.dtype("float64")
    run = sharded(family, Setting(stage, (8,), "float64", accumulate))
    expected = zoo.train(family, zoo.reference(family), dtype)
    assert not zoo.differences(expected, zoo.train(family, run, dtype), family)


SHIFTS = {
    "by one": lambda h: h.at[1:].set(h[:-1]),
    "added": lambda h: h.at[1:].add(h[:-1]),
    "by two": lambda h: lax.dynamic_update_slice(h, h[:-2], (2, 0)),
    "twice": lambda h: lax.dynamic_update_slice(h, 2 * h[:4], (1, 0)),
    "turned round": lambda h: lax.dynamic_update_slice(h, h[::-1][:5], (1, 0)),
    "rolled": lambda h: h.at[1:].set(jnp.roll(h, 1, 0)[1:] / 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "devices", "accumulate"), [(8, 8, 1), (16, 8, 1), (16, 4, 2)])
def test_rows_that_are_shifted_in_their_place(rows, devices, accumulate):
    """[Note: reshapes before updates] Both of JAX's releases write over rows that they still have to read."""

    def step(w, x):
        def loss_fn(w):
            made = {name: shift(jnp.tanh(x * w[None])) for name, shift in SHIFTS.items()}
            return sum((rows * x).sum() for rows in made.values()), made

        (loss, made), grad = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 1e-2 * grad, {"loss": loss, "made": made, "given": SHIFTS["by one"](x)}

    x = jax.random.normal(jax.random.key(0), (rows, 4))
    expected = jax.jit(step)(jnp.ones(4), x)
    train_step = jzero.shard_train_step(
        step, stage=0, mesh=small.mesh(data=devices), microbatches=accumulate
    )
    found = jax.device_get(train_step(jnp.ones(4), x))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected
    )


@pytest.mark.parametrize("start", [-3, 1, 5])
def test_what_a_step_takes_of_a_microbatch_is_of_that_microbatch(start):
    """The step's own slice and scatter of one device's rows, out of their bounds."""

    def step(w, x, at):
        mine = lax.dynamic_slice(x, (at, 0 * at), (2, 4), allow_negative_indices=False)
        indices = lax.ScatterDimensionNumbers((0,), (0,), (0,))
        dropped = lax.scatter(x, at[None], jnp.zeros(4), indices, mode="drop")
        loss, grad = jax.value_and_grad(lambda w: ((mine @ w) ** 2).mean() + (dropped @ w).mean())(
            w
        )
        return w - 0.1 * lax.pmean(grad, "data"), {"loss": lax.pmean(loss, "data")}

    num, rows = 4, 4
    mesh = small.mesh(data=2)
    x = np.random.default_rng(0).normal(size=(2 * num * rows, 4))
    parts = x.reshape(2 * num, rows, 4)
    alone = jax.vmap(step, (None, 0, None), axis_name="data")
    expected, metrics = jax.jit(alone)(jnp.ones(4), parts, jnp.array(start))
    sharded_step = jzero.shard_train_step(
        step, mesh=mesh, microbatches=num, in_specs={"x": P("data")}
    )
    w, outputs = sharded_step(jnp.ones(4), x, jnp.array(start))
    np.testing.assert_allclose(outputs["loss"], metrics["loss"][0], rtol=1e-12)
    np.testing.assert_allclose(w, expected[0], rtol=1e-12)


def test_a_state_is_born_as_init_makes_it():
    """XLA's partitioner takes each device's part of what `init` slices."""
    table = np.random.default_rng(0).normal(size=(32, 3))

    def init(at):
        return {"w": lax.dynamic_slice(jnp.sin(table), (at, 0 * at), (16, 3))}

    step = jzero.shard_train_step(
        lambda s, x: (s, (s["w"] * x.mean()).sum()), axes=jzero.Axes(min_shard_bytes=0)
    )
    state = step.unshard(step.init(init, jnp.array(29)))
    np.testing.assert_allclose(state["w"], np.sin(table)[16:], rtol=1e-12)


def test_an_evaluation_reads_the_window_that_jax_reads():
    def evaluate(params, x, at):
        window = lax.dynamic_slice(params, (at, 0 * at), (16, 3))
        return (window * x).sum(1)

    rng = np.random.default_rng(0)
    params, x = rng.normal(size=(32, 3)), rng.normal(size=(16, 3))
    found = jzero.shard_eval_step(evaluate)(params, x, jnp.array(29))
    np.testing.assert_allclose(found, (params[16:] * x).sum(1), rtol=1e-12)


STARTS = [-200, -128, -7, -1, 0, 1, 5, 6, 7, 90, 120, 127, 128, 200, 255, 990, 2**31, 2**63]


@pytest.mark.slow(but=["uint64-10"])
@pytest.mark.parametrize("size", [10, 200, 1000])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_clamps_as_xla_does_in_every_dtype(dtype, size):
    """Also where `size` is no number of the index's dtype."""
    x = jnp.arange(float(size))

    def window(i):
        return lax.dynamic_slice(x, (i,), (4,), allow_negative_indices=False)

    def read(i):
        rows = lax.GatherDimensionNumbers((1,), (), (0,))
        windows = lax.gather(x, i[None, None], rows, (4,), mode="clip")
        return window(i), jax.vmap(window)(i[None]), windows

    traced = _jaxpr.trace_here(read, jax.ShapeDtypeStruct((), dtype))
    clamped = _starts.in_bounds(traced.jaxpr)
    assert str(clamped).count(" clamp") + str(clamped).count("clamp ") >= 3
    info = np.iinfo(dtype)
    run = jax.jit(functools.partial(_jaxpr.evaluate, clamped, traced.consts))
    for start in STARTS:
        if info.min <= start <= info.max:
            i = np.asarray(start, dtype)
            for found, expected in zip(run(i), read(i), strict=True):
                np.testing.assert_array_equal(found, expected)


def _in_a_loop(x, i):
    return lax.scan(lambda c, j: (c + 1, _slice(x, c + j)), i, jnp.arange(3))[1]


def _in_a_while(x, i):
    return lax.while_loop(
        lambda c: c[0] < 40, lambda c: (c[0] + 9, _slice(x, c[0])), (i, _slice(x, i))
    )


def _in_branches(x, i):
    return lax.cond(i > 3, lambda: _slice(x, i), lambda: -_slice(x, i - 2))


def _in_a_solve(x, i):
    matrix = jnp.eye(2) * 2

    def solve(_, b):
        return b / 2 + 0 * _slice(x, i)[:, 0]

    return lax.custom_linear_solve(lambda v: matrix @ v, _slice(x, i)[:, 0], solve, symmetric=True)


def _under_checkpoint(x, i):
    return jax.grad(jax.checkpoint(lambda x: (jnp.sin(_slice(x, i)) ** 2).sum()))(x)


def _called_twice(x, i):
    called = jax.jit(_slice)
    return called(x, i) + called(x, i + 1)


def _slice(x, i):
    return lax.dynamic_slice(x, (i, i - 20), (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn", [_in_a_loop, _in_a_while, _in_branches, _in_a_solve, _under_checkpoint, _called_twice]
)
def test_in_whatever_an_equation_holds(fn):
    x = jnp.arange(33.0).reshape(11, 3)
    traced = _jaxpr.trace_here(fn, x, jnp.array(5))
    clamped = _starts.in_bounds(traced.jaxpr)
    assert not list(_unclamped(clamped))
    for i in (-5, 0, 4, 9, 20):
        found = _jaxpr.evaluate(clamped, traced.consts, x, jnp.array(i))
        expected = jax.tree.leaves(fn(x, jnp.array(i)))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def _unclamped(jaxpr):
    made = {eqn.outvars[0]: eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dynamic_slice":
            starts = [start for start in eqn.invars[1:] if not _jaxpr.is_literal(start)]
            yield from (eqn for start in starts if made.get(start) != "clamp")
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_jaxpr._is_jaxpr):
            if _jaxpr._is_jaxpr(inner):
                yield from _unclamped(_jaxpr.open_jaxpr(inner)[0])


def test_constants_in_bounds_and_what_has_no_slices_stay_as_they_are():
    def step(x):
        looked_up = x[jnp.array([1, 2])] + lax.dynamic_slice_in_dim(x, 3, 2)
        return lax.scan(lambda c, row: (c + row, None), looked_up.sum(0), x)

    traced = _jaxpr.trace_here(step, jnp.ones((8, 3)))
    assert _starts.in_bounds(traced.jaxpr) is traced.jaxpr


@pytest.mark.slow
def test_a_constant_out_of_bounds_is_another_constant():
    x = jnp.arange(10.0)
    traced = _jaxpr.trace_here(lambda x: lax.dynamic_slice(x, (np.int32(8),), (4,)), x)
    clamped = _starts.in_bounds(traced.jaxpr)
    assert [e.primitive.name for e in clamped.eqns] == [e.primitive.name for e in traced.jaxpr.eqns]
    (found,) = _jaxpr.evaluate(clamped, traced.consts, x)
    np.testing.assert_array_equal(found, x[6:])
