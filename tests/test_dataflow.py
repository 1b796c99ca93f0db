"""Facts that jzero's analyses find of real steps, and the same on edges and dataflow: none may differ."""

import collections

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir._dataflow import forward
from jzero.ir._regions import EdgeKind, Region, ValueIn, edges, trip_count


def test_every_edge_of_a_loop():
    """A scan and a while, with what is carried, sliced, stacked and decided."""

    def fn(w, init, xs):
        out, ys = lax.scan(lambda c, x: (c + w * x, c), init, xs)
        return lax.while_loop(lambda c: c < w, lambda c: c + 1, out), ys

    closed = jax.make_jaxpr(fn)(1.0, 2.0, jnp.ones(3))
    region = Region(closed.jaxpr, closed.consts)
    scan, loop = region.jaxpr.eqns
    (body,), (cond, turn) = region.inner(scan), region.inner(loop)
    found = collections.Counter((e.kind, e.shift) for e in edges(region, scan))
    assert found == {
        (EdgeKind.IN, 0): 2, (EdgeKind.IN, -1): 1, (EdgeKind.OUT, 0): 1, (EdgeKind.OUT, 1): 1,
        (EdgeKind.BACK, 0): 1, (EdgeKind.PAST, 0): 1,
    }  # fmt: skip
    assert [trip_count(eqn) for eqn in (scan, loop)] == [3, None]
    back = [e for e in edges(region, loop) if e.kind is EdgeKind.BACK]
    assert [e.target[0] for e in back] == [cond, turn]
    decided = [e.target[0] for e in edges(region, loop) if e.kind is EdgeKind.PREDICATE]
    assert decided == [region, cond, turn]
    assert body.around == (region, scan)


def test_a_function_called_twice_is_two_regions():
    def fn(x, y):
        return double(x), double(y)

    double = jax.jit(lambda x: x * 2)
    closed = jax.make_jaxpr(fn)(1.0, 1.0)
    region = Region(closed.jaxpr, closed.consts)
    x, _ = region.jaxpr.invars
    found = forward(
        region, {(region, x): True}, lambda r, eqn, ins: [any(ins)] * len(eqn.outvars),
        lambda a, b: a or b, False,
    )  # fmt: skip
    assert [(region, out) in found for out in region.jaxpr.outvars] == [True, False]


def test_a_fact_goes_round_a_loop():
    """Three turns bring it from the first carry to the last."""

    def fn(a, b, c):
        return lax.fori_loop(0, 5, lambda i, abc: (abc[2], abc[0], abc[1]), (a, b, c))

    closed = jax.make_jaxpr(fn)(1.0, 2.0, 3.0)
    region = Region(closed.jaxpr, closed.consts)
    nothing = frozenset[str]()
    start: dict[ValueIn, frozenset[str]] = {(region, region.jaxpr.invars[0]): frozenset("a")}
    found = forward(
        region, start, lambda r, eqn, ins: [nothing.union(*ins)] * len(eqn.outvars),
        frozenset.union, nothing,
    )  # fmt: skip
    assert all(found[region, out] == {"a"} for out in region.jaxpr.outvars)
