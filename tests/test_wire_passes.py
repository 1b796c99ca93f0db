"""Passes that say how values travel between devices, on programs that are written by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
import test_passes as by_hand
from experiments.passes import explicit
from jzero.sharding.passes import _quantize, _waits
from jzero.sharding.passes._keep_gathered import keep_gathered
from jzero.sharding.passes._loop_gathers import loop_gathers
from jzero.sharding.passes._quantized_weights import QuantizedRows, dequantize_weights
from jzero.tracing import _jaxpr

INT8 = jzero.Blocks("int8")


def dtypes(jaxpr: Any, name: str) -> list[str]:
    """Of what each equation of this primitive reads, those in loops, too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(str(eqn.invars[0].aval.dtype))
        for inner in _jaxpr.inner_jaxprs(eqn):
            found += dtypes(_jaxpr.open_jaxpr(inner)[0], name)
    return found


# -- weights at rest as codes ------------------------------------------------------------------------------


def reads(kind: str, ws: jax.Array, x: jax.Array) -> Any:
    """A stack of matrices `[3, 16/8, 16]` of each device, of which products read slices."""

    def whole(w: jax.Array) -> jax.Array:
        return lax.all_gather(w.astype(jnp.bfloat16), explicit.AXIS, tiled=True).astype(jnp.float32)

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ whole(w)), None

    if kind == "scan":
        return lax.scan(turn, x, ws)[0]
    if kind == "slices":
        return turn(turn(x, ws[0])[0], lax.dynamic_index_in_dim(ws, 2, keepdims=False))[0]
    if kind == "while":
        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, turn(c[1], ws[1])[0]), (0, x)
        )[1]
    if kind == "cond":
        return lax.cond(ws[0, 0, 0] > 9, lambda: x, lambda: turn(x, ws[1])[0])
    if kind == "before":
        w = whole(ws[1])
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]
    return x * lax.psum(jnp.sum(ws**2), explicit.AXIS)


@pytest.mark.slow(but=["slices-int8 in blocks of 256", "while-int8 in blocks of 256"])
@pytest.mark.parametrize("codes", [INT8, jzero.Blocks("int4", 16)], ids=str)
@pytest.mark.parametrize("kind", ["scan", "slices", "while", "cond", "before", "own part"])
def test_a_program_takes_rows_gathers_rows_and_decodes_where_it_reads(kind, codes):
    ws = jax.random.normal(jax.random.key(0), (3, 16, 16))
    x = jax.random.normal(jax.random.key(1), (8, 16))
    rows = _quantize.quantize(ws.reshape(24, 32), codes)
    specs = [P(None, explicit.AXIS), P(explicit.AXIS)]
    plain = explicit.program(
        lambda ws, x: [reads(kind, ws, x)], [ws, x], by_hand.MESH, specs, [P(explicit.AXIS)]
    )
    form = QuantizedRows(codes, "float32", (2, 16), dim=1, num_stacked=1)
    leaves = {0: (form, (3, 1, rows.shape[1]))}
    found = plain.through(lambda jaxpr: dequantize_weights(jaxpr, leaves))
    decoded = _quantize.dequantize(rows, 32, ws.dtype, codes).reshape(ws.shape)
    (wanted,) = plain.run()(decoded, x)
    (got,) = found.run()(rows.reshape(3, 8, -1), x)
    np.testing.assert_array_equal(got, wanted)
    assert {*dtypes(found.jaxpr, "all_gather")} <= {"uint8"}
    of_loops = [e for e in found.jaxpr.eqns if e.primitive.name in ("scan", "while")]
    read = {str(x.aval.dtype) for e in of_loops for x in e.invars}
    assert ("uint8" in read) == (kind in ("scan", "while"))


# -- gathers that are kept ---------------------------------------------------------------------------------


def gathers(jaxpr: Any) -> list[Any]:
    """Shapes that a program gathers, those of each loop in a list of its own."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if _waits.is_gather(eqn):
            found.append(eqn.outvars[0].aval.shape)
        found += [gathers(_jaxpr.open_jaxpr(inner)[0]) for inner in _jaxpr.inner_jaxprs(eqn)]
    return found


@pytest.mark.slow
def test_a_loop_of_train_steps_gathers_in_each():
    """What a turn gathers of a stack belongs to no pass of `jax.grad`."""

    def run(ws, x):
        def turn(x, w):
            return jnp.tanh(x @ lax.all_gather(w, explicit.AXIS, tiled=True)), None

        return [lax.scan(turn, x, ws)[0]]

    args = [jnp.ones((3, 16, 16)), jnp.ones((8, 16))]
    specs = [P(None, explicit.AXIS), P(explicit.AXIS)]
    plain = explicit.program(run, args, by_hand.MESH, specs, [P(explicit.AXIS)])
    assert plain.through(keep_gathered).jaxpr is plain.jaxpr
    kept = plain.through(lambda jaxpr: keep_gathered(jaxpr, in_all_loops=True))
    assert gathers(plain.jaxpr) == [[(16, 16)]]
    assert gathers(kept.jaxpr) == [(3, 16, 16), []]
    for x, y in zip(kept.run()(*args), plain.run()(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# -- gathers of what loops close over ----------------------------------------------------------------------


def over_time(kind: str) -> tuple[explicit.Program, list[jax.Array]]:
    """A loop that reads the same two matrices in each turn."""

    def run(w, v, x):
        def turn(x):
            w_, v_ = (
                lax.all_gather(y.astype(jnp.float32), explicit.AXIS, tiled=True) for y in (w, v)
            )
            return jnp.tanh(x @ w_ @ v_)

        if kind == "scan":
            return [lax.scan(lambda x, _: (turn(x), None), x, None, length=4)[0]]
        if kind == "nested":
            return [
                lax.fori_loop(0, 2, lambda _, x: lax.fori_loop(0, 2, lambda _, x: turn(x), x), x)
            ]
        return [lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, turn(c[1])), (0, x))[1]]

    args = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2)]
    args.append(jax.random.normal(jax.random.key(2), (8, 16)))
    specs = [P(explicit.AXIS)] * 3
    return explicit.program(run, args, by_hand.MESH, specs, [P(explicit.AXIS)]), args


@pytest.mark.parametrize("kind", ["scan", "while", "nested"])
def test_what_loops_close_over_is_gathered_before_them_if_it_fits(kind):
    plain, args = over_time(kind)
    (inside,) = [x for x in gathers(plain.jaxpr) if x]
    matrix = 16 * 16 * 4
    (wanted,) = plain.run()(*args)
    before = plain.through(lambda jaxpr: loop_gathers(jaxpr, 2 * matrix))
    assert [x for x in gathers(before.jaxpr) if isinstance(x, tuple)] == [(16, 16)] * 2
    assert str(gathers(before.jaxpr)).count("16, 16") == 2
    each = plain.through(lambda jaxpr: loop_gathers(jaxpr, 2 * matrix - 1))
    assert [x for x in gathers(each.jaxpr) if x] == [inside]
    for found in (before, each):
        np.testing.assert_allclose(found.run()(*args)[0], wanted, rtol=1e-3, atol=1e-4)
    text = each.run().lower(*args).compile().as_text()
    (body,) = [x for x in text.split("\n\n") if "all-gather" in x]
    assert "ENTRY" not in body
