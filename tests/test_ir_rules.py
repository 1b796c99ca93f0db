"""The table of rules, each rule alone: an equation on blocks of an operand gives blocks of its results.

Equations are those of the cases of `test_partition_rules.py` and of `MORE`, with the values that operands
have there. No other code of jzero takes part.
"""

import contextlib
import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.experimental import xla_metadata
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.sparse import BCOO, bcoo_dot_general, bcoo_dot_general_sampled, bcoo_extract
from jax.extend.core import Primitive

import scaled_products  # noqa: F401 (it is what runs jax.nn.scaled_matmul here)
import test_partition_rules
from jzero.ir import _factors, _products, _rules
from jzero.ir._layout import replicated
from jzero.ir._rules import Cost
from jzero.sharding.analysis import _frames
from jzero.tracing import _jaxpr, _rewrite
from layout_blocks import positions
from test_partition_rules import Case, drawn, length, parsed

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (4, 6, 2, 8, 12)  # of dims
SUMMED = frozenset(_factors.SCATTER_REDUCES)  # Of what these update there is one among the blocks.


def bind(name: str, **params: Any) -> Any:
    return lambda *xs: primitives()[name].bind(*xs, **params)


@functools.cache
def primitives() -> dict[str, Primitive]:
    """Those of this release of JAX."""
    return {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}


UNARY = """
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cosh digamma erf erfc exp2 expm1 floor
    lgamma log1p logistic neg rsqrt sinh tan
""".split()
BINARY = ("atan2", "igamma_grad_a", "nextafter", "polygamma", "pow")
MORE: dict[str, Case] = {
    **{name: Case(getattr(lax, name), "+:ab") for name in UNARY},
    **{name: Case(getattr(lax, name), "+:ab +:ab") for name in BINARY},
    **{f"two, {name}": Case(bind(name), "ab ab") for name in "add_any eq_to le_to lt_to".split()},
    "bits": Case(
        lambda x, y: (
            [f(x, y) for f in (lax.shift_left, lax.shift_right_arithmetic, lax.mulhi)] + [x ^ y, ~x]
        ),
        "u:ab u:ab",
    ),
    "integer_pow": Case(lambda x: lax.integer_pow(x, 3), "ab"),
    "reduce_precision": Case(lambda x: lax.reduce_precision(x, 5, 4), "ab"),
    "quotient of integers": Case(lambda x: lax.div(x, jnp.full_like(x, 2)), "i:ab"),
    "products of integers": Case(lambda x, y: x * y - y, "i:ab i:ab"),
    "orthogonal": Case(
        lambda x, y: (
            lax.linalg.householder_product(x, y),
            bind("geqrf")(x),
            bind("ormqr", left=True, transpose=False)(x, y, x),
        ),
        "bnn bn",
    ),
    "geqp3": Case(lambda x, i: bind("geqp3", use_magma=None)(x, i), "bmn i:bn"),
    "hessenberg": Case(lambda x: (lax.linalg.hessenberg(x), lax.linalg.schur(x)), "bnn"),
    "tridiagonal": Case(lambda x: lax.linalg.tridiagonal(x + x.mT), "bnn"),
    "symmetric_product": Case(
        lambda x, y: lax.linalg.symmetric_product(x, y, symmetrize_output=True), "bmn bmm"
    ),
    "permutation of pivots": Case(
        lambda x: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(x)[1], x.shape[-1]), "bnn"
    ),
    "threefry": Case(bind("threefry2x32"), "u:ab u:ab u:ab u:ab"),
    "to the host": Case(lambda x: jax.device_put(x, jax.memory.Space.Host), "ab"),
    "gamma": Case(jax.vmap(random.gamma), "k:b +:b"),
    "newer": Case(
        lambda x: (
            *([lax.one_minus_square(x)] if hasattr(lax, "one_minus_square") else []),
            *([lax.polynomial(x, [1.0, 2.0])] if hasattr(lax, "polynomial") else []),
            xla_metadata.set_xla_metadata(x, key="value"),
        ),
        "ab",
    ),
}


def scaled_dots(x, y, a, b):
    """Of numbers that no dtype rounds: XLA may keep more of a bfloat16 than that holds."""
    x, y = (each.astype(jnp.float8_e4m3fn) for each in (x, y))
    a, b = (2.0**each for each in (a, b))
    given = dict(dimension_numbers=(((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return lax.scaled_dot(x, y, lhs_scale=a, rhs_scale=b, **given), jax.nn.scaled_matmul(x, y, a, b)


def sparse_rows(data, indices, w, y):
    """Rows of a batch, each with its own indices: a product with them, and its gradients."""

    def product(data, w):
        return BCOO((data, indices), shape=(len(data), len(w))) @ w

    out, pull = jax.vjp(product, data, w)
    return out, pull(y)


def sparse_weights(data, indices, x, y):
    """A sparse matrix that all rows of the batch share."""

    def product(data, x):
        return x @ BCOO((data, indices), shape=(x.shape[1], y.shape[1]))

    out, pull = jax.vjp(product, data, x)
    return out, pull(y)


def sparse_and_dense(data, indices):
    """Two indices each, and a dense dim behind what they count."""
    shape = (len(indices), 7, 6, data.shape[-1])
    dense = BCOO((data, indices), shape=shape).todense()
    return dense, bcoo_extract(BCOO((data, indices), shape=shape), dense).data


def sparse_blocks(data, indices, w):
    """All rows have the same data, at other places."""
    x = BCOO((data, indices), shape=(len(indices), len(w), data.shape[-1]))
    return bcoo_dot_general(x, w, dimension_numbers=(((1,), (0,)), ((), ()))), x.todense()


def sparse_in_other_orders(data, indices, shared):
    """Two dims of the batch, of which the indices have one alone; two indices each, and a dense dim."""
    x = BCOO((data, indices), shape=(*data.shape[:2], 7, 6, data.shape[-1]))
    of_both = BCOO((data, jnp.broadcast_to(indices, (*data.shape[:3], 2))), shape=x.shape)
    of_all = BCOO((shared, of_both.indices), shape=(*x.shape[:4], shared.shape[-1]))
    found = []
    for each in (x, of_both, of_all):
        found += [each.transpose((1, 0, 3, 2, 4)), each.sort_indices(), each.sum_duplicates(nse=3)]
        found += [each.sum_duplicates(nse=9)]
    return found


def products_of_sparse(data, indices, others, shared):
    """Rows by one matrix, by a matrix each, of which all have the same indices; and one matrix by rows."""
    rows = len(indices)
    x = BCOO((data, indices), shape=(rows, 7, 6))
    y = BCOO((others, shared), shape=(rows, 6, 7))
    z = BCOO((data, indices), shape=(rows, 6, 7))
    contract = ((2,), (1,))

    def product(x, y, *numbers):
        return bcoo_dot_general(x, y, dimension_numbers=numbers)

    return (
        product(x, BCOO((data[0], indices[0]), shape=(6, 7)), ((2,), (0,)), ((), ())),
        product(x, y, contract, ((0,), (0,))),
        product(BCOO((data[0], indices[0]), shape=(6, 7)), z, ((0, 1), (1, 2)), ((), ())),
    )


MORE |= {
    "scaled_dot": Case(scaled_dots, "i:ba(km) i:bd(km) i:bam i:bdm"),
    "sparse rows": Case(sparse_rows, "bn i:bn1 dk bk"),
    "sparse weights": Case(sparse_weights, "n i:n2 bd bk"),
    "sparse and dense": Case(sparse_and_dense, "bne i:bn2"),
    "sparse blocks": Case(sparse_blocks, "1ne i:bn1 dk"),
    "sparse in other orders": Case(sparse_in_other_orders, "bcne i:1cn2 bcn1"),
    "products of sparse": Case(products_of_sparse, "bn i:bn2 bn i:1n2"),
    "sparse of dense": Case(
        lambda x: (
            BCOO.fromdense(x, nse=5, n_batch=1, n_dense=1),
            BCOO.fromdense(x, nse=5, n_batch=2),
            BCOO.fromdense(x, nse=5),
        ),
        "bcd",
    ),
    "sampled": Case(
        lambda x, y, indices: bcoo_dot_general_sampled(
            x, y, indices, dimension_numbers=(((1,), (0,)), ((), ()))
        ),
        "bk kde i:bn1",
    ),
}
# Beside those that jzero passes on as they are, and those that have no factors.
UNSEEN = {
    "select_and_scatter": "no function of JAX's face makes it",
    "psum_invariant": "it is `psum`, inside of shard_map",
}
NOT_EAGER = {"mul_p, dims of size 1"}  # JAX itself runs these only when they are compiled.
CASES = {
    name: case
    for name, case in (test_partition_rules.CASES | MORE).items()
    if name not in NOT_EAGER and name not in test_partition_rules.FUNCTIONS
}


def traced(case: Case) -> Any:
    """A case's equations, its constants and its arguments."""
    letters = sorted({c for c in case.arguments + (case.to or "") if c.isalpha()})
    sizes = dict(zip(letters, itertools.cycle(SIZES), strict=False))
    specs = [parsed(spec) for spec in case.arguments.split()]
    rng = np.random.default_rng(0)
    arguments = [drawn(dtype, tuple(length(d, sizes) for d in dims), rng) for dtype, dims in specs]
    to = [] if case.to is None else [tuple(length(d, sizes) for d in parsed(case.to)[1])]
    found = _jaxpr.trace_here(lambda *xs: jax.tree.leaves(case.fn(*xs, *to)), *arguments)
    return *_rewrite.flatten_calls(found.jaxpr, found.consts), arguments


def equations(case: Case) -> Iterator[Any]:
    """Equations that no case had before, each with the values of its operands and of its results."""
    flat, consts, arguments = traced(case)
    env = dict(zip(flat.constvars, map(_jaxpr.constant, consts), strict=True))
    env |= zip(flat.invars, map(jnp.asarray, arguments), strict=True)
    for eqn in flat.eqns:
        ins = [_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[a] for a in eqn.invars]
        outs = _jaxpr.bind(eqn, *ins)
        env |= zip(eqn.outvars, outs, strict=True)
        ins, outs = [*map(array, ins)], [*map(array, outs)]
        key = str((eqn.primitive, eqn.params, [(x.shape, x.dtype.name) for x in ins]))
        if _rules.rule_of(eqn) is not None and key not in seen():
            seen().add(key)
            yield eqn, ins, outs


def array(x: Any) -> Any:
    """What needs no program for each shape to be cut; keys do."""
    return jnp.asarray(x) if is_key(x) else np.asarray(x)


@functools.cache
def seen() -> set[str]:
    return set()


@pytest.mark.slow(but=["matrix product", *[*CASES][::13]])
@pytest.mark.parametrize("name", CASES)
def test_each_equation(name):
    for eqn, ins, outs in equations(CASES[name]):
        for factor in _rules.factors_of(eqn):
            with noted(f"by {factor} of {eqn}"):
                check_factor(eqn, factor, ins, outs)
        for operands in _rules.linear_in(eqn):
            with noted(f"linear in {operands}, says the rule of {eqn}"):
                check_linear(eqn, operands, ins)
        with noted(f"see the classes of Cost, and the rule of {eqn.primitive}"):
            check_class(eqn, ins, outs)


@contextlib.contextmanager
def noted(what):
    """What fails inside may be an assertion here, or JAX, which refuses an equation on a block."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def check_factor(eqn, factor, ins, outs):
    """On contiguous blocks; and dealt out or padded, if no groups have to stay together."""
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
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)


def check_blocks(eqn, factor, ins, outs, num, outer):
    where = f"{eqn}, {factor}, {num} blocks, {outer} outer"
    mesh, parts = {"a": num}, []
    for i in range(num):
        operands = [
            x
            if d is None
            else block(x, d, mesh, outer, i, functools.partial(padding, eqn, factor, place, x))
            for place, (x, d) in enumerate(zip(ins, factor.ins, strict=True))
        ]
        if eqn.primitive.name in SUMMED and factor.reduces == "sum" and i:
            operands[0] = np.zeros_like(operands[0])
        to = factor.outs[0]
        at = next(
            (x.shape[d] for x, d in zip(operands, factor.ins, strict=True) if d is not None), 0
        )
        size = at if to is None else layout(outs[0], to, mesh, outer).local_shape[to]
        parts.append([*map(array, _jaxpr.bind(eqn, *operands, **factor.local(size, num)))])
    for out, d, *found in zip(outs, factor.outs, *parts, strict=True):
        if d is None and factor.reduces:
            found = [functools.reduce(_rules.COMBINES[factor.reduces].bind, found)]
        if d is None:
            for part in found:
                assert_same(part, out, where)
            continue
        for i, part in enumerate(found):
            at = positions(layout(out, d, mesh, outer), {"a": i})[d]
            true = np.flatnonzero(at >= 0)
            assert part.shape[d] == len(at), where
            assert_same(taken(part, true, d), taken(out, at[true], d), where)


def layout(x, dim, mesh, outer):
    return replicated(x.shape, mesh).cut(dim, "a", outer)


def block(x, dim, mesh, outer, device, fill):
    at = positions(layout(x, dim, mesh, outer), {"a": device})[dim]
    found = taken(x, np.maximum(at, 0), dim)
    if (at >= 0).all():
        return found
    inside = np.expand_dims(at >= 0, [d for d in range(x.ndim) if d != dim])
    return np.where(inside, found, np.asarray(fill(), x.dtype))


def taken(x, at, dim):
    return (jnp if is_key(x) else np).take(x, at, dim)


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
    elif jnp.issubdtype(got.dtype, jnp.inexact):
        got, want = (x if x.dtype.kind in "fc" else x.astype(np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=where)
    else:
        np.testing.assert_array_equal(got, want, where)


# -- collectives --------------------------------------------------------------------------------------

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "v"),
    "pmax": lambda x: lax.pmax(x, "v"),
    "pmin": lambda x: lax.pmin(x, "v"),
    "all_gather": lambda x: lax.all_gather(x, "v", axis=1),
    "all_gather, tiled": lambda x: lax.all_gather(x, "v", axis=1, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x[:, :2], "v", scatter_dimension=1),
    "reduce_scatter, tiled": lambda x: lax.psum_scatter(x, "v", scatter_dimension=1, tiled=True),
    "layout_constraint": jax.jit(lambda x: with_layout_constraint(x, Layout((1, 0, 2)))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_on_blocks(name):
    """Dims of what each device has, which are one further behind where `vmap` has all devices."""
    eqns = equations_of(COLLECTIVES[name])
    eqn = eqns[-1]
    shape = (2, *eqn.invars[0].aval.shape)
    x = np.random.default_rng(0).normal(size=shape)
    run = jax.jit(jax.vmap(functools.partial(_jaxpr.bind, eqn), axis_name="v"))
    (out,) = run(x)
    factors = _rules.factors_of(eqn)
    assert factors
    for factor in factors:
        (d,), (to,) = factor.ins, factor.outs
        assert d is not None
        assert to is not None
        parts = [np.asarray(run(block(x, d + 1, {"a": 2}, 1, i, None))[0]) for i in range(2)]
        assert_same(np.concatenate(parts, to + 1), out, name)


def equations_of(fn):
    traced = jax.make_jaxpr(fn, axis_env=[("v", 2)])(jnp.zeros((4, 6, 2)))
    return _rewrite.flatten_calls(traced.jaxpr, traced.consts)[0].eqns


# -- sums ---------------------------------------------------------------------------------------------


def check_linear(eqn, operands, ins):
    """f(a + c, b + d) = f(a, b) + f(c, d), of small whole numbers, which no dtype rounds."""
    rng = np.random.default_rng(1)

    def terms(x):
        return rng.integers(1, 3, x.shape).astype(x.dtype)

    if any(map(is_key, ins)):
        return
    a, b = ([terms(x) if i in operands else x for i, x in enumerate(ins)] for _ in "ab")
    both = [x + y if i in operands else x for i, (x, y) in enumerate(zip(a, b, strict=True))]
    found = [_jaxpr.bind(eqn, *each) for each in (a, b, both)]
    for one, other, together in (map(array, each) for each in zip(*found, strict=True)):
        if one.dtype != bool:
            assert_same(one + other, together, str(eqn))


# -- classes ------------------------------------------------------------------------------------------


def check_class(eqn, ins, outs):
    """What a class of cost says of elements."""
    rule, out = _rules.rule_of(eqn), outs[0]
    assert rule is not None
    cost = rule.cost
    if cost is Cost.COPY:
        assert_same(out, ins[0], str(eqn))
    elif cost is Cost.VIEW:
        assert sorted(elements(out)) == sorted(elements(ins[0]))
    elif cost in (Cost.PART, Cost.REPEAT):
        assert set().union(*map(elements, outs)) <= set(elements(ins[0]))
    elif cost is Cost.JOIN:
        assert set(elements(out)) <= set().union(*map(elements, ins))
    elif cost is Cost.PRODUCT:
        assert len(_rules.linear_in(eqn)) == 2
    elif cost is Cost.REDUCTION:
        assert out.ndim < ins[0].ndim or not eqn.params["axes"]
    elif cost is Cost.SOURCE:
        assert not ins
    if _rules.is_elementwise(eqn) and eqn.primitive.name != "broadcast_in_dim":
        for x, dims in zip(ins, _rules.dim_maps(eqn), strict=True):
            assert all(to == d or x.shape[d] == 1 for d, to in enumerate(dims))


def elements(x):
    """The bits of each element."""
    if is_key(x):
        x = random.key_data(x)
        return [bytes(each) for each in np.asarray(x).reshape(-1, x.shape[-1])]
    return [each.tobytes() for each in np.asarray(x).ravel()[:10_000]]


# -- every entry --------------------------------------------------------------------------------------


def test_every_entry_has_an_equation_with_factors():
    eqns = (eqn for case in CASES.values() for eqn in traced(case)[0].eqns)
    found = {eqn.primitive.name for eqn in eqns if _rules.factors_of(eqn)}
    found |= {eqns[-1].primitive.name for eqns in map(equations_of, COLLECTIVES.values())}
    passed = _rules.IDENTITIES | {n for n, r in _rules.RULES.items() if r.factors is _factors.none}
    missing = _rules.RULES.keys() - found - passed - UNSEEN.keys()
    asked = sorted(missing & primitives().keys())
    assert not asked, (
        f"give each of {asked} a case in MORE in which it has a factor, or say in UNSEEN why it has none"
    )
    # Newer releases have them.
    assert missing <= {"log2", "one_minus_square", "polynomial"}


def test_tables_that_say_how_name_what_the_classes_say():
    """Handlers and texts beside their readers: which primitives they are for is what the table says."""
    # Of the collectives this one moves nothing.
    moves = _rules.named(Cost.COLLECTIVE) - {"layout_constraint"}
    for module, table, named in (
        (_products, "COUNTS", _rules.named(Cost.PRODUCT)),
        (_frames, "COLLECTIVES", _frames.COLLECTIVES | moves),
    ):
        differ = sorted(named ^ set(getattr(module, table)))
        assert not differ, f"{differ}: add it to {table} of {module.__name__}, or change its Cost"
    assert set(_factors.SCATTER_REDUCES) < _rules.named(Cost.LOOKUP)
