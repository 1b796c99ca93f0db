"""Passes that say how values travel between devices: the same, to the bit, as a step that says so by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
import partition_steps
import small
import test_passes as by_hand
from experiments.passes import explicit
from jzero.sharding.passes import _quantize, _waits
from jzero.sharding.passes._keep_gathered import keep_gathered
from jzero.sharding.passes._loop_gathers import loop_gathers
from jzero.sharding.passes._quantized_gathers import quantize_gathers
from jzero.sharding.passes._quantized_reductions import QuantizedAxes, quantize_reductions
from jzero.sharding.passes._quantized_weights import QuantizedRows, dequantize_weights
from jzero.sharding.passes._reduce_dtype import reduce_dtype
from jzero.tracing import _jaxpr


@dataclasses.dataclass(frozen=True)
class Wire:
    """How values travel: weights are gathered, and gradients reduced."""

    dtype: Any = None
    gather: jzero.Blocks | None = None
    reduce: jzero.Blocks | None = None


INT8, INT4 = jzero.Blocks("int8"), jzero.Blocks("int4", 32, rotate=True, stochastic=True)


@dataclasses.dataclass(frozen=True, eq=False)
class ByHand(explicit.Explicit):
    """Weights are gathered, and their gradients reduced, as a wire has it."""

    wire: Wire = Wire()

    def _gathered(self, w: jax.Array, dtype: Any) -> jax.Array:
        dim = self.shards.get(w.shape)
        return w if dim is None else gathered(self.wire, dim, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(wire: Wire, dim: int, w: jax.Array) -> jax.Array:
    if wire.gather is None:
        return lax.all_gather(w, explicit.AXIS, axis=dim, tiled=True)
    row = _quantize.quantize(w.reshape(1, w.size), wire.gather)
    rows = lax.all_gather(row, explicit.AXIS, axis=0, tiled=True)
    parts = _quantize.dequantize(rows, w.size, w.dtype, wire.gather).reshape(-1, *w.shape)
    return jnp.concatenate([*parts], axis=dim)


def scattered(wire: Wire, dim: int, g: jax.Array) -> jax.Array:
    if wire.reduce is not None:
        parts = jnp.stack(jnp.split(g, by_hand.NUM, axis=dim))
        rows = _quantize.quantize(parts.reshape(by_hand.NUM, -1), wire.reduce)
        rows = lax.all_to_all(rows, explicit.AXIS, 0, 0, tiled=True)
        terms = _quantize.dequantize(rows, parts[0].size, g.dtype, wire.reduce)
        return terms.sum(0).reshape(parts.shape[1:])
    x = g if wire.dtype is None else g.astype(wire.dtype)
    shard = lax.psum_scatter(x, explicit.AXIS, scatter_dimension=dim, tiled=True)
    return shard.astype(g.dtype)


gathered.defvjp(
    lambda wire, dim, w: (gathered(wire, dim, w), None),
    lambda wire, dim, _, g: (scattered(wire, dim, g),),
)


def step(wire: Wire, remat: bool, loops: int, params: Any, x: jax.Array) -> Any:
    weights = ByHand(by_hand.SHARDS, wire).weights
    loss = functools.partial(by_hand.loss_of, gather=weights, remat=remat, loops=loops)
    value, grads = jax.value_and_grad(loss)(params, x)
    grads["layers"]["scale"] = lax.psum(grads["layers"]["scale"], explicit.AXIS)
    new = jax.tree.map(lambda p, g: p - 0.1 * g / by_hand.NUM, params, grads)
    return new, explicit.mean(value)


@functools.cache
def program(wire: Wire = Wire(), remat: bool = True, loops: int = 1) -> explicit.Program:
    tree = jax.tree.structure(by_hand.SPECS, is_leaf=lambda x: isinstance(x, P))

    def run(*args):
        return step(wire, remat, loops, jax.tree.unflatten(tree, args[:-1]), args[-1])

    ins = [*by_hand.LEAVES, P(explicit.AXIS)]
    return explicit.program(run, by_hand.arguments(), by_hand.MESH, ins, [*by_hand.LEAVES, P()])


ROWS = [frozenset[str]()] * len(by_hand.LEAVES) + [frozenset([explicit.AXIS])]


def assert_equal(found: explicit.Program, wanted: explicit.Program) -> None:
    for x, y in zip(by_hand.outputs(found), by_hand.outputs(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def dtypes(jaxpr: Any, name: str) -> list[str]:
    """Of what each equation of this primitive reads, those in loops, too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(str(eqn.invars[0].aval.dtype))
        for inner in _jaxpr.inner_jaxprs(eqn):
            found += dtypes(_jaxpr.open_jaxpr(inner)[0], name)
    return found


FORMS = [(remat, loops) for remat in (False, True) for loops in (0, 1, 2)]
forms = pytest.mark.parametrize(("remat", "loops"), FORMS)


@pytest.mark.slow
@forms
def test_gradients_are_reduced_in_another_dtype(remat, loops):
    plain, wanted = program(Wire(), remat, loops), program(Wire(jnp.bfloat16), remat, loops)
    found = plain.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.bfloat16, ROWS))
    assert {*dtypes(found.jaxpr, "reduce_scatter")} == {"bfloat16"}
    # That of the scales of layers, which nothing scatters, and that of the loss.
    assert dtypes(found.jaxpr, "psum") == ["bfloat16", "float32"]
    assert dtypes(wanted.jaxpr, "psum") == ["float32", "float32"]
    scales = [str(path) for path, _ in jax.tree.leaves_with_path(by_hand.make_params())]
    place = next(i for i, path in enumerate(scales) if "scale" in path)
    pairs = zip(by_hand.outputs(found), by_hand.outputs(wanted), strict=True)
    for i, (x, y) in enumerate(pairs):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 if i == place else 0)
    again = found.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.bfloat16, ROWS))
    assert again.jaxpr is found.jaxpr
    assert plain.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.float32, ROWS)).jaxpr is plain.jaxpr


# -- gathers of codes --------------------------------------------------------------------------------------

MATRICES = [i for i, spec in enumerate(by_hand.LEAVES) if spec != P()]


@pytest.mark.slow(but=[6])
@pytest.mark.parametrize(
    ("codes", "form"), [(INT8, (True, 1)), *((INT4, form) for form in FORMS)], ids=str
)
def test_weights_are_gathered_as_codes_and_other_passes_find_them(codes, form):
    plain, wanted = program(Wire(), *form), program(Wire(gather=codes), *form)
    found = plain.through(lambda jaxpr: quantize_gathers(jaxpr, codes, MATRICES, ROWS))
    assert {*dtypes(found.jaxpr, "all_gather")} == {"uint8"}
    assert_equal(found, wanted)
    again = found.through(lambda jaxpr: quantize_gathers(jaxpr, codes, MATRICES, ROWS))
    assert again.jaxpr is found.jaxpr
    after = found.through(by_hand.PASSES["all"])
    assert_equal(after, found)
    if form[1] == 1:  # What a turn has gathered for the next one is rows.
        (scan, *_) = [eqn for eqn in after.jaxpr.eqns if eqn.primitive.name == "scan"]
        assert "uint8" in {str(x.aval.dtype) for x in scan.invars}


@pytest.mark.slow
def test_what_passes_do_not_read_is_gathered_exact():
    """What follows from weights alone, and what an update reads."""

    def run(w, v, u, x):
        whole = [lax.all_gather(y, explicit.AXIS, tiled=True) for y in (w, v, u)]
        merged = whole[0] + whole[1].T
        g = lax.psum_scatter(x.T @ (x @ merged @ whole[2]), explicit.AXIS, tiled=True)
        return [u - g, whole[1].sum()[None]]

    args = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(4)]
    specs = [P(explicit.AXIS)] * 4
    plain = explicit.program(run, args, by_hand.MESH, specs, [P(explicit.AXIS), P(explicit.AXIS)])
    rows = [frozenset[str]()] * 3 + [frozenset([explicit.AXIS])]
    found = plain.through(lambda jaxpr: quantize_gathers(jaxpr, INT8, [0, 1, 2], rows))
    assert dtypes(found.jaxpr, "all_gather") == ["float32", "float32", "uint8"]
    none = plain.through(lambda jaxpr: quantize_gathers(jaxpr, INT8, [0, 1], rows))
    assert none.jaxpr is plain.jaxpr


# -- reductions of codes -----------------------------------------------------------------------------------


def in_codes(codes: jzero.Blocks) -> Any:
    """The pass, of a program in which all reductions are of one leaf."""
    axes = QuantizedAxes({explicit.AXIS: by_hand.NUM}, {explicit.AXIS: codes})
    return lambda jaxpr: quantize_reductions(jaxpr, axes, ["w"], ROWS, lambda eqn: "w")


@pytest.mark.slow(but=[0])
@pytest.mark.parametrize(
    ("codes", "form"), [(INT8, (True, 1)), *((INT4, form) for form in FORMS)], ids=str
)
def test_gradients_are_reduced_as_codes_and_other_passes_find_them(codes, form):
    plain, wanted = program(Wire(), *form), program(Wire(reduce=codes), *form)
    found = plain.through(in_codes(codes))
    assert dtypes(found.jaxpr, "reduce_scatter") == []
    assert {*dtypes(found.jaxpr, "all_to_all")} == {"uint8"}
    # That of the scales of layers, which nothing scatters, and that of the loss.
    assert dtypes(found.jaxpr, "psum") == ["float32", "float32"]
    assert_equal(found, wanted)
    assert found.through(in_codes(codes)).jaxpr is found.jaxpr
    after = found.through(by_hand.PASSES["all"])
    assert_equal(after, found)
    barriers = {False: 0}
    for each in (found, after):
        names = str(each.jaxpr)
        barriers[each is after] = names.count("optimization_barrier")
    assert barriers[True] > barriers[False]  # Exchanges have an order.


@pytest.mark.slow
def test_a_sum_of_which_a_pass_computes_something_is_exact():
    def run(w, x):
        def loss(w):
            whole = by_hand_gather(w)
            return jnp.sum(jnp.tanh(x @ whole))

        g = jax.grad(lambda w: loss(jnp.sin(w)))(w)
        h = jax.grad(loss)(w)
        return [w - g, w - h]

    by_hand_gather = functools.partial(gathered, Wire(), 0)
    args = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2)]
    specs = [P(explicit.AXIS)] * 2
    plain = explicit.program(run, args, by_hand.MESH, specs, specs)
    axes = QuantizedAxes({explicit.AXIS: by_hand.NUM}, {explicit.AXIS: INT8})
    rows = [frozenset[str](), frozenset([explicit.AXIS])]
    found = plain.through(
        lambda jaxpr: quantize_reductions(jaxpr, axes, ["w"], rows, lambda eqn: "w")
    )
    # That of `sin(w)`, from which a backward pass computes that of `w`, is exact.
    assert dtypes(found.jaxpr, "reduce_scatter") == ["float32"]
    assert dtypes(found.jaxpr, "all_to_all") == ["uint8"]
    none = plain.through(
        lambda jaxpr: quantize_reductions(jaxpr, axes, ["v"], rows, lambda eqn: "w")
    )
    assert none.jaxpr is plain.jaxpr


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


L, W, V = by_hand.LAYERS, by_hand.WIDTH, by_hand.VOCAB
EMBED, HEAD = (V, W), (W, V)


@pytest.mark.slow
@forms
def test_each_leaf_is_gathered_once(remat, loops):
    plain = program(Wire(), remat, loops)
    kept = plain.through(keep_gathered)
    assert_equal(kept, plain)
    ups, downs = [(W, 2 * W)], [(2 * W, W)]
    layers = [
        [*(ups + downs) * L],
        [(L, *ups[0]), (L, *downs[0])],
        [(2, L // 2, *ups[0]), (2, L // 2, *downs[0])],
    ][loops]
    found = [x for x in gathers(kept.jaxpr) if isinstance(x, tuple)]
    assert sorted(found) == sorted([EMBED, HEAD, *layers])
    assert str(gathers(kept.jaxpr)).count("(") == len(found)  # None in a loop.
    assert kept.through(keep_gathered).jaxpr is kept.jaxpr


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


# -- kept gathered ----------------------------------------------------------------------------------


MESHES = [{"data": 8}, {"node": 2, "local": 4}]
meshes = pytest.mark.parametrize("axes", MESHES, ids=str)


@pytest.mark.slow
@meshes
@pytest.mark.parametrize("options", [{}, {"scan": False}, {"remat": False}], ids=str)
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_what_is_kept_trains_as_one_device(axes, options):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        init, step, batch = partition_steps.gpt(**options)
        train_step = small.shard_train_step(
            step, mesh=small.mesh(**axes), comm=jzero.Comm(gather="keep")
        )
        expected = state = init()
        for _ in range(2):
            expected, _ = jax.jit(step)(expected, batch)
            state, _ = train_step(state, batch)
        pairs = zip(*map(jax.tree.leaves, (train_step.unshard(state), expected)), strict=True)
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
