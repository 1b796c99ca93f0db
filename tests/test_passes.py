"""Passes on one device's explicit program: the same to the bit, in another order that the jaxpr shows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.passes import explicit
from jzero.sharding.passes import _before_loops, _order, _waits
from jzero.sharding.passes._after_loops import after_loops
from jzero.sharding.passes._before_loops import before_loops
from jzero.sharding.passes._in_place import in_place
from jzero.sharding.passes._inputs_first import inputs_first
from jzero.sharding.passes._late_sums import late_sums
from jzero.sharding.passes._one_order import one_order
from jzero.sharding.passes._order import order
from jzero.sharding.passes._prefetch import prefetch
from jzero.sharding.passes._whole_stacks import whole_stacks
from jzero.tracing import _jaxpr

NUM, LAYERS, WIDTH, ROWS, VOCAB = 8, 6, 16, 2, 64
MATRIX = 4 * WIDTH * 2 * WIDTH  # bytes of each of a layer's two
TABLE = 4 * VOCAB * WIDTH  # and of the first and the last one


def layer(gather: Any, x: jax.Array, w: Any) -> jax.Array:
    w = gather(w)
    return x + jnp.tanh(x * w["scale"][None] @ w["up"]) @ w["down"]


def loss_of(params: Any, x: jax.Array, gather: Any, remat: bool, loops: int) -> jax.Array:
    block: Callable[..., jax.Array] = functools.partial(layer, gather)
    if remat:
        block = jax.checkpoint(block, prevent_cse=not loops)
    turn = lambda x, w: (block(x, w), None)  # noqa: E731
    x, layers = x @ gather(params["embed"]), params["layers"]
    if loops == 2:
        layers = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), layers)
        x, _ = lax.scan(lambda x, w: lax.scan(turn, x, w), x, layers)
    elif loops:
        x, _ = lax.scan(turn, x, layers)
    else:
        for i in range(LAYERS):
            x = block(x, jax.tree.map(lambda w, i=i: w[i], layers))
    return jnp.mean((x @ gather(params["head"])) ** 2)


SHARDS: dict[tuple[int, ...], int] = {
    (VOCAB // NUM, WIDTH): 0, (WIDTH // NUM, VOCAB): 0,
    (WIDTH // NUM, 2 * WIDTH): 0, (2 * WIDTH, WIDTH // NUM): 1,
}  # fmt: skip


def make_params(key: int = 0) -> Any:
    keys = iter(jax.random.split(jax.random.key(key), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 4  # noqa: E731
    layers = {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, 2 * WIDTH, WIDTH)}
    layers["scale"] = 1 + normal(LAYERS, WIDTH)
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "head": normal(WIDTH, VOCAB)}


SPECS = {
    "embed": P("data"), "head": P("data"),
    "layers": {"up": P(None, "data"), "down": P(None, None, "data"), "scale": P()},
}  # fmt: skip


def step(remat: bool, loops: int, params: Any, x: jax.Array) -> Any:
    hooks = explicit.Explicit(SHARDS)
    loss = functools.partial(loss_of, gather=hooks.weights, remat=remat, loops=loops)
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g / NUM, params, grads), explicit.mean(value)


MESH = jax.make_mesh((NUM,), (explicit.AXIS,), (jax.sharding.AxisType.Auto,))
LEAVES = jax.tree.leaves(SPECS, is_leaf=lambda x: isinstance(x, P))


def arguments() -> list[jax.Array]:
    x = jax.random.normal(jax.random.key(1), (NUM * ROWS, VOCAB))
    return [*jax.tree.leaves(make_params()), x]


@functools.cache
def program(remat: bool = True, loops: int = 1) -> explicit.Program:
    tree = jax.tree.structure(SPECS, is_leaf=lambda x: isinstance(x, P))
    run = lambda *args: step(remat, loops, jax.tree.unflatten(tree, args[:-1]), args[-1])  # noqa: E731
    return explicit.program(run, arguments(), MESH, [*LEAVES, P(explicit.AXIS)], [*LEAVES, P()])


def outputs(made: explicit.Program) -> list[np.ndarray[Any, Any]]:
    return [*map(np.asarray, made.run()(*arguments()))]


FORMS = [(False, 0), (True, 1), (True, 2)]
forms = pytest.mark.parametrize(("remat", "loops"), FORMS)
Pass = Callable[[Any], Any]
PASSES: dict[str, Pass] = {
    "prefetch": lambda jaxpr: prefetch(jaxpr, 2**28),
    "prefetch 3 matrices": lambda jaxpr: prefetch(jaxpr, 3 * MATRIX),
    "prefetch 1": lambda jaxpr: prefetch(jaxpr, 1),
    "prefetch 0": lambda jaxpr: prefetch(jaxpr, 0),
    "order": lambda jaxpr: order(jaxpr, MATRIX),
    "order 0": lambda jaxpr: order(jaxpr, 0),
    "after_loops": after_loops,
    "inputs_first": lambda jaxpr: inputs_first(jaxpr, MATRIX),
}
ALL = [PASSES[n] for n in ("inputs_first", "prefetch 3 matrices", "order 0", "after_loops")]
PASSES["all"] = lambda jaxpr: functools.reduce(lambda x, each: each(x), ALL, jaxpr)


@pytest.mark.slow(but=["True-1"])
@forms
def test_passes_change_no_bit(remat: bool, loops: int):
    plain = program(remat, loops)
    for was, now in zip(outputs(plain), outputs(plain.through(PASSES["all"])), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("name", [*PASSES, "whole_stacks"])
def test_where_there_is_nothing_to_do_the_jaxpr_stays_itself(name: str):
    def step(w: jax.Array, x: jax.Array) -> Any:
        loss = lambda w: jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 3)[0])  # noqa: E731
        return [w - lax.psum(jax.grad(loss)(w), explicit.AXIS)]

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (NUM, WIDTH))]
    made = explicit.program(step, types, MESH, [P(), P(explicit.AXIS)], [P()])
    assert made.through(PASSES.get(name, whole_stacks)).jaxpr is made.jaxpr


# -- where gathers stand -------------------------------------------------------------------------------


def bytes_of(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def ahead(jaxpr: Any, entering: set[Any]) -> tuple[int, list[bool]]:
    """The most bytes gathered and not yet read when a product begins; which results are such values."""
    waiting, most, ends = {*entering}, 0, list[bool]()
    for eqn in jaxpr.eqns:
        read = {x for x in _jaxpr.variables_read(eqn) if x in waiting}
        waiting -= read
        held = sum(map(bytes_of, waiting))
        if eqn.primitive.name == "all_gather":
            waiting |= {*eqn.outvars}
        elif eqn.primitive.name == "dot_general":
            most = max(most, held)
        elif eqn.primitive.name == "scan":
            parts = _jaxpr.scan_parts(eqn)
            span = slice(parts.num_consts, parts.num_consts + parts.num_carry)
            pairs = zip(eqn.invars[span], parts.body.invars[span], strict=True)
            begun = {
                inner for outer, inner in pairs if not _jaxpr.is_literal(outer) and outer in read
            }
            for _ in range(3):
                inside, ends = ahead(parts.body, begun)
                most = max(most, held + inside)
                begun = {
                    x for x, waits in zip(parts.body.invars[span], ends, strict=False) if waits
                }
            waiting |= {out for out, waits in zip(eqn.outvars, ends, strict=True) if waits}
    return most, [not _jaxpr.is_literal(x) and x in waiting for x in jaxpr.outvars]


@forms
@pytest.mark.parametrize("limit", [0, 1, 2 * MATRIX, 5 * MATRIX])
def test_no_more_than_the_limit_is_gathered_and_not_read(limit: int, remat: bool, loops: int):
    def most(limit: int) -> int:
        made = program(remat, loops).through(lambda jaxpr: prefetch(jaxpr, limit))
        return ahead(made.jaxpr, set())[0]

    assert most(limit) <= max(limit, min(limit, 1) * TABLE)
    # It is used: of what is ahead with the largest limit so much that no further matrix fits.
    assert most(limit) > min(most(2**28), limit) - TABLE


def carried(jaxpr: Any) -> list[int]:
    """Bytes that each loop gathers for its next turn, for those with any, the inner ones first."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in _jaxpr.inner_jaxprs(eqn):
            found += carried(_jaxpr.open_jaxpr(inner)[0])
        if eqn.primitive.name == "scan":
            num, body = _jaxpr.scan_parts(eqn).num_carry, _jaxpr.scan_parts(eqn).body
            made = {v for e in body.eqns if e.primitive.name == "all_gather" for v in e.outvars}
            nbytes = sum(bytes_of(v) for v in body.outvars[:num] if v in made)
            found += [nbytes] if nbytes else []
    return found


def executed(jaxpr: Any, name: str, times: int = 1) -> int:
    """How often a primitive runs, loops multiplied out."""
    found = 0
    for eqn in jaxpr.eqns:
        turns = _jaxpr.scan_parts(eqn).length if eqn.primitive.name == "scan" else 1
        found += times * (eqn.primitive.name == name)
        inner = [_jaxpr.open_jaxpr(x)[0] for x in _jaxpr.inner_jaxprs(eqn)]
        found += sum(executed(x, name, times * turns) for x in inner)
    return found


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    ("limit", "nbytes"), [(0, 0), (MATRIX, MATRIX), (2 * MATRIX, 2 * MATRIX), (2**28, 2 * MATRIX)]
)
def test_a_loop_carries_what_fits(limit: int, nbytes: int, remat: bool):
    made = program(remat, 1).through(lambda jaxpr: prefetch(jaxpr, limit)).jaxpr
    # Without remat the backward loop reads the gathered matrices that the forward loop has stacked.
    assert carried(made) == ([nbytes] * (1 + remat) if nbytes else [])


@forms
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_adds_no_collective(name: str, remat: bool, loops: int):
    plain = program(remat, loops)
    for op in ("all_gather", "reduce_scatter", "dot_general"):
        assert executed(plain.through(PASSES[name]).jaxpr, op) == executed(plain.jaxpr, op)


def behind(jaxpr: Any, name: str) -> list[tuple[Any, set[int]]]:
    """The equations of a program, and of which equations `name` they wait, by index."""
    before: dict[Any, set[int]] = {}
    found = []
    for i, eqn in enumerate(jaxpr.eqns):
        waits = set[int]().union(*(before.get(x, set()) for x in _jaxpr.variables_read(eqn)))
        found.append((eqn, waits))
        mine = {i} if eqn.primitive.name == name else set()
        before |= dict.fromkeys(eqn.outvars, waits | mine)
    return found


def test_gathers_of_unrolled_layers_wait_for_products():
    """The table, three layers of two matrices, the last matrix; each product waits for the one before."""
    expected = {
        0: [0, 1, 2, 3, 4, 5],
        1: [0, 0, 1, 2, 3, 4],  # a product to hide behind, however small the bound
        3 * MATRIX: [0, 0, 1, 1, 2, 3],
        5 * MATRIX: [0, 0, 0, 0, 1, 1],
    }
    for limit, waits in expected.items():
        made = program(True, 0).through(functools.partial(prefetch, nbytes=limit)).jaxpr
        found = [
            len(w) for eqn, w in behind(made, "dot_general") if eqn.primitive.name == "all_gather"
        ]
        assert found[:6] == waits, limit
        forward = 2 * LAYERS + 1
        # Those of the backward pass wait for the whole forward pass.
        assert min(found[forward + 1 :]) > forward


# -- the order of reductions ---------------------------------------------------------------------------


def levels(jaxpr: Any) -> list[Any]:
    """The program, and those inside."""
    inner = [_jaxpr.open_jaxpr(x)[0] for eqn in jaxpr.eqns for x in _jaxpr.inner_jaxprs(eqn)]
    return [jaxpr, *(level for x in inner for level in levels(x))]


@forms
@pytest.mark.parametrize("ahead_first", [False, True])
def test_reductions_wait_for_each_other_and_stand_behind_their_products(
    ahead_first: bool, remat: bool, loops: int
):
    plain = program(remat, loops)
    if ahead_first:
        plain = plain.through(PASSES["prefetch 3 matrices"])
    for each in levels(plain.through(PASSES["order 0"]).jaxpr):
        found = behind(each, "reduce_scatter")
        waits = [len(waits) for eqn, waits in found if eqn.primitive.name == "reduce_scatter"]
        assert waits == [*range(len(waits))]
        made = [
            eqn.primitive.name for eqn, _ in found if eqn.primitive.name != "optimization_barrier"
        ]
        # Between a product and its reduction is nothing that takes time.
        for i, name in enumerate(made):
            near = [x for x in made[:i] if x in ("dot_general", "scan", "add_any")]
            assert name != "reduce_scatter" or near
    free = [
        len(waits)
        for each in levels(plain.jaxpr)
        for eqn, waits in behind(each, "reduce_scatter")
        if eqn.primitive.name == "reduce_scatter"
    ]
    assert not any(free), "they run as they come where the pass is left out"


def test_a_reduction_stands_where_its_gradient_is_made():
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        grads = [x.T @ (x @ w) for w in (w, v)]
        scatter = functools.partial(lax.psum_scatter, axis_name=explicit.AXIS, tiled=True)
        # In the order in which an update reads them: the last one first.
        return [scatter(g) for g in reversed(grads)]

    types = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    rows = jax.ShapeDtypeStruct((NUM, WIDTH), jnp.float32)
    specs = [P(), P(), P(explicit.AXIS)], [P(explicit.AXIS)] * 2
    made = explicit.program(step, [*types, rows], MESH, *specs).through(PASSES["order 0"])
    names = [eqn.primitive.name for eqn in made.jaxpr.eqns]
    names = [name for name in names if name in ("dot_general", "reduce_scatter")]
    assert names == ["dot_general", "dot_general", "reduce_scatter"] * 2


def test_reductions_run_in_groups():
    mib = 2**20
    cases: list[tuple[list[int], int, bool, list[int]]] = [
        ([8, 8, 8, 8], 0, True, [0, 1, 2, 3]),
        ([8, 8, 8, 8], 64 * mib, True, [0, 0, 1, 1]),  # halves
        ([8, 8, 8, 8], 8 * mib, True, [0, 1, 2, 3]),
        ([8, 8, 8, 8, 8, 8, 8, 8], 16 * mib, True, [0, 0, 1, 1, 2, 2, 3, 3]),
        ([8] * 8, 16 * mib, False, [0, 1, 2, 3, 4, 5, 6, 7]),  # half of that outside of loops
        ([1] * 8, 64 * mib, True, [0, 0, 0, 0, 1, 1, 1, 1]),  # 4 MiB at least
    ]
    for sizes, nbytes, in_turn, expected in cases:
        assert _order.groups([size * mib for size in sizes], nbytes, in_turn) == expected, sizes


def test_a_large_gradient_is_reduced_before_the_next_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_order, "WAITS_THROUGH_LOOPS", TABLE - 1)
    before, after = (
        [waits for eqn, waits in behind(p.jaxpr, "reduce_scatter") if eqn.primitive.name == "scan"]
        for p in (program(), program().through(PASSES["order 0"]))
    )
    assert [len(waits) for waits in before] == [0, 0]
    assert [len(waits) for waits in after] == [0, 1], (
        "the backward loop waits for the last matrix's"
    )


def tied_step(embed: jax.Array, ws: jax.Array, x: jax.Array) -> Any:
    """A table that is read before the layers and behind them."""
    gather = functools.partial(lax.all_gather, axis_name=explicit.AXIS, tiled=True)

    def loss(table: jax.Array, ws: jax.Array) -> jax.Array:
        turn = lambda x, w: (x + jnp.tanh(x @ gather(w)), None)  # noqa: E731
        y, _ = lax.scan(turn, x @ table, ws)
        return jnp.mean((y @ table.T) ** 2)

    table, grads = jax.grad(loss, (0, 1))(gather(embed), ws)
    return [lax.psum_scatter(table, explicit.AXIS, tiled=True), grads]


def test_a_large_gradient_waits_through_no_loop_for_another_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_before_loops, "WAITS_THROUGH_LOOPS", TABLE - 1)
    rng = np.random.default_rng(0)
    shapes = (VOCAB, WIDTH), (LAYERS, WIDTH, WIDTH), (NUM * ROWS, VOCAB)
    args = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
    by_rows, stacked = P(explicit.AXIS), P(None, explicit.AXIS)
    plain = explicit.program(tied_step, args, MESH, [by_rows, stacked, by_rows], [by_rows, stacked])
    made = plain.through(before_loops)

    def reductions(program: explicit.Program) -> list[int]:
        """Of the table, by how many loops there are before each."""
        names = [eqn.primitive.name for eqn in program.jaxpr.eqns]
        places = [i for i, name in enumerate(names) if name == "reduce_scatter"]
        return [names[:i].count("scan") for i in places]

    assert (reductions(plain), reductions(made)) == ([2], [1, 2])
    expected, found = (p.run()(*args) for p in (plain, made))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    # What is no larger, or is there at once, is reduced once.
    monkeypatch.setattr(_before_loops, "WAITS_THROUGH_LOOPS", TABLE)
    assert before_loops(plain.jaxpr) is plain.jaxpr


def biased_step(begin: float, reads: bool, bias: jax.Array, ws: jax.Array, x: jax.Array) -> Any:
    """A gradient that all turns add to, reduced in float32 and cast in each; a loop may read it as well."""

    def turn(carry: Any, w: jax.Array) -> Any:
        total, x = carry
        x = jnp.tanh(x @ w + (bias * total[0] if reads else bias)[None])
        part = lax.psum(x.sum(0), explicit.AXIS).astype(jnp.bfloat16)
        return (total + part, x), None

    (total, x), _ = lax.scan(turn, (jnp.full(bias.shape, begin, jnp.bfloat16), x), ws)
    return [total, x]


@pytest.mark.parametrize(("begin", "reads"), [(0, False), (3, False), (3, True)])
def test_a_sum_that_a_loop_only_adds_up_is_done_once_behind_it(begin: float, reads: bool):
    rows = jnp.sin(jnp.arange(2.0 * NUM * WIDTH)).reshape(-1, WIDTH)
    args = [jnp.arange(float(WIDTH)) / WIDTH, make_params()["layers"]["up"][..., :WIDTH], rows]
    by_rows = P(explicit.AXIS)
    fn = functools.partial(biased_step, begin, reads)
    plain = explicit.program(fn, args, MESH, [P(), P(), by_rows], [P(), by_rows])
    made = plain.through(late_sums)
    for was, now in zip(plain.run()(*args), made.run()(*args), strict=True):
        np.testing.assert_allclose(np.asarray(was, float), np.asarray(now, float), rtol=2**-6)
    of_loop = [
        [e.primitive.name for e in _jaxpr.inside(eqn)].count("psum")
        for eqn in made.jaxpr.eqns
        if eqn.primitive.name == "scan"
    ]
    assert of_loop == [int(reads)]
    assert [e.primitive.name for e in made.jaxpr.eqns].count("psum") == int(not reads)
    assert (made.jaxpr is plain.jaxpr) == reads


def test_a_sum_behind_a_loop_loses_no_small_terms():
    def fn(x: jax.Array) -> list[jax.Array]:
        def turn(total: jax.Array, _: Any) -> Any:
            return total + lax.psum(x.sum(0), explicit.AXIS).astype(jnp.float32), None

        zeros = jnp.zeros(WIDTH, jnp.float32)
        return [lax.scan(turn, zeros, None, length=1024)[0]]

    args = [jnp.full((NUM, WIDTH), 1 / 64, jnp.bfloat16)]
    plain = explicit.program(fn, args, MESH, [P(explicit.AXIS)], [P()])
    made = plain.through(late_sums)
    assert made.jaxpr is not plain.jaxpr
    for each in (plain, made):
        (total,) = each.run()(*args)
        np.testing.assert_array_equal(total, 1024 * NUM / 64)


# -- results in the places of arguments ----------------------------------------------------------------


def updated(*ps: jax.Array) -> list[jax.Array]:
    """Parameters that each device has whole; it updates a shard, along the last dim and along the first."""
    at, found = lax.axis_index(explicit.AXIS), []
    for p, dim in zip(ps, (1, 0), strict=True):
        size = p.shape[dim] // NUM
        mine = lax.dynamic_slice_in_dim(p, at * size, size, dim) * 0.9
        found.append(lax.all_gather(mine, explicit.AXIS, axis=dim, tiled=True))
    return found


@pytest.mark.parametrize(("rows", "at_once"), [(0, False), (1, False), (3, False), (10, True)])
def test_new_parameters_are_gathered_in_slices_into_the_old_ones(rows: int, at_once: bool):
    args = [
        jnp.sin(jnp.arange(10.0 * 16)).reshape(10, 16),
        jnp.cos(jnp.arange(16.0 * 3)).reshape(16, 3),
    ]
    plain = explicit.program(updated, args, MESH, [P(), P()], [P(), P()])
    made = plain.through(
        lambda jaxpr: in_place(jaxpr, [0, 1], MESH, MESH.axis_names, rows * args[0].nbytes // 10)
    )
    for was, now in zip(plain.run()(*args), made.run()(*args), strict=True):
        np.testing.assert_array_equal(was, now)
    gathers = [eqn for eqn in _jaxpr.walk(made.jaxpr) if _waits.is_gather(eqn)]
    loops = [eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan"]
    if at_once:
        assert made.jaxpr is plain.jaxpr
        return
    assert [eqn.outvars[0].aval.shape for eqn in gathers if eqn.params["all_gather_dimension"]] == [
        (max(rows, 1), 16), *[(10 % max(rows, 1), 16)] * bool(10 % max(rows, 1))
    ]  # fmt: skip
    assert [eqn.params["length"] for eqn in loops] == [10 // max(rows, 1)]
    # Of a step that returns nothing in the place of its arguments nothing is gathered into them.
    assert in_place(plain.jaxpr, [None, None], MESH, MESH.axis_names, 0) is plain.jaxpr


# -- stacks of loops -----------------------------------------------------------------------------------


def stacking_step(reads_twice: bool, ws: jax.Array, x: jax.Array) -> Any:
    """Stacks sums in bfloat16, widened, of which the loop itself may read; sums that all have; a cast one."""

    def turn(x: jax.Array, w: jax.Array) -> Any:
        x = jnp.tanh(x @ w)
        part = lax.psum_scatter((x.T @ x).astype(jnp.bfloat16), explicit.AXIS, tiled=True)
        wide = part.astype(jnp.float32)
        total, narrow = lax.psum(x.sum(0), explicit.AXIS), x.sum(1).astype(jnp.bfloat16)
        return x + wide[:1] if reads_twice else x, (wide, total, narrow)

    x, stacks = lax.scan(turn, x, ws, reverse=True)
    return [x, *stacks]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2**22])
@pytest.mark.parametrize("reads_twice", [False, True])
def test_what_is_done_to_whole_stacks(reads_twice: bool, limit: int):
    whole = functools.partial(whole_stacks, nbytes=limit)
    rows = jnp.sin(jnp.arange(2.0 * NUM * WIDTH)).reshape(-1, WIDTH)
    args = [make_params()["layers"]["up"][..., :WIDTH], rows]
    by_rows, stacked = P(explicit.AXIS), P(None, explicit.AXIS)
    specs = [P(), by_rows], [by_rows, stacked, P(), stacked]
    plain = explicit.program(functools.partial(stacking_step, reads_twice), args, MESH, *specs)
    made = plain.through(whole)
    for was, now in zip(plain.run()(*args), made.run()(*args), strict=True):
        np.testing.assert_array_equal(was, now)
    (loop,) = (eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan")
    _, wide, total, narrow = (out.aval for out in loop.outvars)
    assert wide.dtype == (jnp.float32 if reads_twice else jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16, "nothing is gained by a stack that is wider"
    assert total.shape == (LAYERS, WIDTH)
    # Small sums are one behind the loop, but for what the loop itself reads.
    assert wide.shape[1] == (WIDTH if limit and not reads_twice else WIDTH // NUM)
    assert executed(made.jaxpr, "psum") == (1 if limit else LAYERS)
    assert executed(made.jaxpr, "reduce_scatter") == (1 if wide.shape[1] == WIDTH else LAYERS)
    # [Note: slices that are only copied]
    body = _jaxpr.scan_parts(loop).body
    makers = {out: eqn.primitive.name for eqn in body.eqns for out in eqn.outvars}
    names = [makers[_jaxpr.variable(x)] for x in body.outvars[1:]]
    copied = [not limit and not reads_twice, not limit]
    assert [name == "select_n" for name in names] == [*copied, False]


# -- behind loops, at large matrices, on CPUs ----------------------------------------------------------


@pytest.mark.parametrize("ahead_first", [False, True])
def test_gathers_behind_a_loop_wait_for_it(ahead_first: bool):
    plain = program(True, 1)
    if ahead_first:
        plain = plain.through(PASSES["prefetch"])
    found = []
    for made in (plain, plain.through(after_loops)):
        loop, found_here = False, []
        for eqn, waits in behind(made.jaxpr, "scan"):
            loop |= eqn.primitive.name == "scan"
            found_here += [bool(waits)] if loop and eqn.primitive.name == "all_gather" else []
        found.append(found_here)
    assert all(found[1])
    # Where gathers are ahead, they wait already.
    assert found[0] == ([True] * 3 if ahead_first else [False])


def test_what_a_last_turn_makes_is_read_when_all_of_it_is_there():
    made = program(True, 1).through(PASSES["prefetch"], after_loops).jaxpr
    region = [eqn for eqn in made.eqns if _jaxpr.in_scope(eqn, _waits.LAST_ITERATION)]
    barriers = [eqn for eqn in region if _jaxpr.in_scope(eqn, _waits.AFTER_LOOP)]
    assert [eqn.primitive.name for eqn in barriers] == ["optimization_barrier"] * 2
    own = {out for eqn in region if eqn not in barriers for out in eqn.outvars}
    readers = [eqn for eqn in made.eqns if own.intersection(_jaxpr.variables_read(eqn))]
    assert all(_jaxpr.in_scope(eqn, _waits.LAST_ITERATION) for eqn in readers)
    assert own.isdisjoint(x for x in made.outvars if not _jaxpr.is_literal(x))


@forms
def test_on_cpus_collectives_wait_for_loops_with_collectives(remat: bool, loops: int):
    plain = program(remat, loops)
    for made in (plain, plain.through(PASSES["all"])):
        ordered = made.through(one_order)
        before: set[int] = set()
        for i, (eqn, waits) in enumerate(behind(ordered.jaxpr, "scan")):
            meets = eqn.primitive.name in ("all_gather", "reduce_scatter", "psum")
            nests = eqn.primitive.name == "scan" and executed(
                _jaxpr.scan_parts(eqn).body, "all_gather"
            )
            assert not (meets or nests) or before <= waits, eqn
            before |= {i} if nests else set()


@pytest.mark.slow
def test_barriers_of_the_program_give_way():
    """A gather waits for a product in their place."""

    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        x = x @ lax.all_gather(w, explicit.AXIS, axis=0, tiled=True)
        v, x = lax.optimization_barrier((v, x))
        v, u = lax.optimization_barrier((v * 2, v + 1))
        v, u = lax.optimization_barrier((v + u, u))
        return [(x @ x.T) @ x @ lax.all_gather(v * u, explicit.AXIS, axis=0, tiled=True)]

    args = [jnp.ones((WIDTH, WIDTH)) / 9, jnp.full((WIDTH, WIDTH), 0.1), jnp.ones((NUM * 2, WIDTH))]
    specs = [P(explicit.AXIS)] * 3, [P(explicit.AXIS)]
    plain = explicit.program(step, args, MESH, *specs)
    for limit, products in ((0, 3), (2**28, 0)):
        made = plain.through(functools.partial(prefetch, nbytes=limit))
        waits = [
            w for eqn, w in behind(made.jaxpr, "dot_general") if eqn.primitive.name == "all_gather"
        ]
        assert [len(w) for w in waits] == [0, products]
        np.testing.assert_array_equal(made.run()(*args)[0], plain.run()(*args)[0])


CALLS: list[int] = []
