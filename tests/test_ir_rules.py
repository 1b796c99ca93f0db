"""The table of rules, each rule alone: an equation on blocks of an operand gives blocks of its results.

Equations are those of the cases of `test_batch_rules.py` and of `MORE`, with the values that their operands
have there. No other code of jzero takes part.
"""

import functools
import gc
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.extend.core import Primitive

import test_batch_rules
from jzero.ir import _factors, _rules
from jzero.ir._layout import replicated
from jzero.ir._rules import Cost
from jzero.tracing import _jaxpr, _rewrite
from test_batch_rules import Case, drawn, length, parsed

SIZES = (4, 6, 2, 8, 12)  # of dims
SUMMED = frozenset(_factors.SCATTER_REDUCES)  # Of what these update there is one among the blocks.


@pytest.fixture(autouse=True, scope="module")
def _float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def bind(name: str, **params: Any) -> Any:
    return lambda *xs: primitives()[name].bind(*xs, **params)


@functools.cache
def primitives() -> dict[str, Primitive]:
    """Those of this release of JAX."""
    return {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}


MORE: dict[str, Case] = {}


def cases() -> dict[str, Case]:
    return test_batch_rules.CASES | MORE


def equations(case: Case):
    """A case's equations, each with the values of its operands and of its results."""
    letters = sorted({c for c in case.arguments + (case.to or "") if c.isalpha()})
    sizes = dict(zip(letters, itertools.cycle(SIZES), strict=False))
    specs = [parsed(spec) for spec in case.arguments.split()]
    rng = np.random.default_rng(0)
    arguments = [drawn(dtype, tuple(length(d, sizes) for d in dims), rng) for dtype, dims in specs]
    to = [] if case.to is None else [tuple(length(d, sizes) for d in parsed(case.to)[1])]
    traced = _jaxpr.trace_here(lambda *xs: jax.tree.leaves(case.fn(*xs, *to)), *arguments)
    flat, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    env = dict(zip(flat.constvars, map(_jaxpr.constant, consts), strict=True))
    env |= zip(flat.invars, map(jnp.asarray, arguments), strict=True)
    for eqn in flat.eqns:
        ins = [_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[a] for a in eqn.invars]
        outs = _jaxpr.bind(eqn, *ins)
        env |= zip(eqn.outvars, outs, strict=True)
        yield eqn, [jnp.asarray(x) for x in ins], outs


@functools.cache
def seen(_name: str = "") -> set[Any]:
    return set()


@pytest.mark.parametrize("name", cases())
def test_on_blocks(name):
    for eqn, ins, outs in equations(cases()[name]):
        key = str((eqn.primitive, eqn.params, [x.shape for x in ins]))
        if key not in seen():
            seen().add(key)
            for factor in _rules.factors_of(eqn):
                check_factor(eqn, factor, ins, outs)


def check_factor(eqn, factor, ins, outs):
    """On contiguous blocks, and on blocks that are dealt out or padded, if no groups have to stay together."""
    size, groups = size_of(factor, ins, outs), factor.groups
    checks = [(2, 1), (3, 1), *([] if groups else [(2, 2)])]
    for num, outer in checks if size else ():
        even = (groups or size) % (num * outer) == 0
        if even or not (groups or outer > 1 or any(map(is_key, ins))):
            check_blocks(eqn, factor, ins, outs, num, outer)


def size_of(factor, ins, outs):
    dims = [*zip(ins, factor.ins, strict=True), *zip(outs, factor.outs, strict=True)]
    return next(x.shape[d] for x, d in dims if d is not None)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def check_blocks(eqn, factor, ins, outs, num, outer):
    where = f"{eqn}, {factor}, {num} blocks, {outer} outer"
    mesh, parts = {"a": num}, []
    for i in range(num):
        operands = [
            x if d is None else block(x, d, mesh, outer, i, functools.partial(padding, eqn, factor, place, x))
            for place, (x, d) in enumerate(zip(ins, factor.ins, strict=True))
        ]
        if eqn.primitive.name in SUMMED and factor.reduces == "sum" and i:
            operands[0] = jnp.zeros_like(operands[0])
        to = factor.outs[0]
        size = None if to is None else layout(outs[0], to, mesh, outer).local_shape[to]
        parts.append(_jaxpr.bind(eqn, *operands, **factor.local(size, num)))
    for out, d, *found in zip(outs, factor.outs, *parts, strict=True):
        if d is None:
            combined = functools.reduce(_rules.COMBINES[factor.reduces].bind, found)
            assert_same(combined, out, where)
            continue
        for i, part in enumerate(found):
            at = layout(out, d, mesh, outer).positions({"a": i})[d]
            true = np.flatnonzero(at >= 0)
            assert part.shape[d] == len(at), where
            assert_same(jnp.take(part, true, d), jnp.take(out, at[true], d), where)


def layout(x, dim, mesh, outer):
    return replicated(x.shape, mesh).cut(dim, "a", outer)


def block(x, dim, mesh, outer, device, fill):
    at = layout(x, dim, mesh, outer).positions({"a": device})[dim]
    found = jnp.take(x, np.maximum(at, 0), dim)
    if (at >= 0).all():
        return found
    inside = np.expand_dims(at >= 0, [d for d in range(x.ndim) if d != dim])
    return jnp.where(inside, found, jnp.asarray(fill(), x.dtype))


def padding(eqn, factor, place, x):
    """What a block's padding holds: what a reduction does not see, else garbage."""
    if factor.reduces is None:
        return np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype == bool or 101
    if eqn.primitive.name in SUMMED and place == 1:
        return 0
    return _rules.neutral(factor.reduces, x.dtype)


def assert_same(got, want, where):
    assert got.shape == want.shape, where
    assert got.dtype == want.dtype, where
    if is_key(got):
        got, want = random.key_data(got), random.key_data(want)
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype in (np.float64, np.complex128):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=where)
    elif got.dtype.kind in "fc":
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=where)
    else:
        np.testing.assert_array_equal(got, want, where)


# -- every entry --------------------------------------------------------------------------------------


def test_every_entry_has_an_equation():
    found = {eqn.primitive.name for case in cases().values() for eqn, *_ in equations(case)}
    assert not sorted((_rules.RULES.keys() & primitives().keys()) - found)
