"""Facts that jzero's analyses find of real steps, and the same on edges and dataflow: none may differ."""

import collections
import contextlib
import math
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import facts
import jzero
import small
import zoo
from jzero.ir._dataflow import forward
from jzero.ir._regions import EdgeKind, Region, ValueIn, edges, trip_count
from jzero.sharding.analysis import _new_leaves
from jzero.sharding.plan import _make
from jzero.tracing import _jaxpr
from small import grouped
from zoo.sampling import check

# One of each bundle's setting; all of them are slow. A device that is alone has nothing that differs.
SAMPLED = [
    pytest.param(i, marks=[pytest.mark.slow] * (i % 10 > 0))
    for i in range(500)
    if math.prod(check.setting_of(i).axes) > 1
]


@contextlib.contextmanager
def analysed():
    """Frames that plans are made of."""
    found, original = [], _make._laid_out

    def laid_out(frame, *args):
        found.append(frame)
        return original(frame, *args)

    with mock.patch.object(_make, "_laid_out", laid_out):
        yield found


def zoo_step(name):
    entry, mesh = zoo.get(name), small.mesh(data=8)
    with analysed() as found:
        train_step = jzero.shard_train_step(entry.step, mesh=mesh, **grouped(**entry.options))
        train_step.plan(jax.eval_shape(entry.init), *entry.batches(1)[0])
    return found


def sampled_step(seed):
    setting = check.setting_of(seed)
    program = check.program_of(seed, setting)
    b, t, w = ([batch] for batch in program.batches[0])
    with jax.enable_x64(setting.dtype == "float64"), jax.numpy_rank_promotion("allow"):
        with analysed() as found, contextlib.suppress(jzero.JzeroError):
            check.shard(setting, check.together([program])).plan([program.make_state()], b, t, w)
    return found


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", zoo.CORE)
def test_facts_of_the_zoo(name):
    found = zoo_step(name)
    assert found
    for each in found:
        assert_same(each)


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("seed", SAMPLED)
def test_facts_of_sampled_steps(seed):
    for each in sampled_step(seed):
        assert_same(each)


def assert_same(frame):
    num = len(frame.jaxpr.outvars)
    assert values(frame)
    for stops in (), range(0, len(frame.jaxpr.eqns), 7):
        mine, theirs = (of.new_leaves(frame, num, stops) for of in (facts, _new_leaves))
        for var in values(frame):
            assert mine.get(var, 0) == theirs.get(var, 0), var


def values(region):
    jaxpr = region.jaxpr
    made = [out for eqn in jaxpr.eqns for out in eqn.outvars if not _jaxpr.is_dropped(out)]
    return dict.fromkeys([*jaxpr.constvars, *jaxpr.invars, *made])


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
