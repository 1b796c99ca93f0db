"""`tile_bytes`: large matrices are gathered, and their gradients made, tile by tile; all else stays."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
from jzero.sharding.passes._cuts import cut
from jzero.testing import Tolerance, assert_same_training
from jzero.tracing import _jaxpr
from small import grouped

pytestmark = pytest.mark.usefixtures("no_compilation_cache")
TILE = 256  # bytes; the matrices below have 1 to 16 KiB


def mesh_of(num):
    return small.auto_mesh(local=int(num))


def weights(shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: (jax.random.normal(key, shape) / shape[-1] ** 0.5).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x):
    return jax.nn.standardize(x, epsilon=1e-2)


# Losses of parameters and rows: each has matrices in other places of other products.


def unrolled(p, x):
    """Two plain layers, biases, and dims that eight devices do not divide."""
    hidden = jnp.tanh(x @ p["up"] + p["bias"][None])
    return jnp.mean((hidden @ p["down"] - x) ** 2)


def transposed(p, x):
    """Matrices that are read transposed, and one that two products read."""
    hidden = jnp.tanh(x @ p["up"].T)
    return jnp.mean((jnp.tanh(hidden @ p["up"]) @ p["square"].T @ p["square"]) ** 2)


def einsums(p, x):
    """Heads, of three dims in any order, and experts, over which a product is batched."""
    q = jnp.einsum("bd,hkd->bhk", x, p["heads"])
    y = norm(jnp.einsum("bhk,hkd->bd", jnp.tanh(q), p["out"]))
    z = jnp.tanh(jnp.einsum("bd,edf->ebf", y, p["experts"]))
    return jnp.mean(jnp.einsum("ebf,efd->bd", z, p["back"]) ** 2)


def half(p, x):
    """Masters in float32, products in bfloat16, the last one with float32 results."""
    p, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
    hidden = jnp.tanh(x @ p["up"] + p["bias"][None])
    return jnp.mean(jnp.dot(hidden, p["down"], preferred_element_type=jnp.float32) ** 2)


def layer(x, p):
    hidden = jnp.tanh(norm(x) * p["scale"][None] @ p["up"])
    return x + hidden @ p["down"], hidden.mean()


def scanned(p, x, remat=False):
    block = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    y, means = jax.lax.scan(block, x, p)
    return jnp.mean(y**2) + jnp.sum(means)


def unrolled_remat(p, x):
    for i in range(p["up"].shape[0]):
        x, _ = jax.checkpoint(layer)(x, jax.tree.map(lambda a, i=i: a[i], p))
    return jnp.mean(x**2)


def tied(p, x):
    """A table that is looked up in, and multiplied with."""
    tokens = jnp.argsort(x, axis=1)[:, :4] % p["table"].shape[0]
    y = jnp.tanh(p["table"][tokens] @ p["square"])
    logits = y @ p["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def recurrent(p, x):
    """A loop over time that closes over its weights, and collects their gradients."""

    def step(h, x):
        return jnp.tanh(x[:, None] * p["into"][None] + h @ p["square"]), None

    h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], p["square"].shape[0])), x.T)
    return jnp.mean((h @ p["square"]) ** 2)


def shared(p, x):
    """A matrix of four products, whose operands are larger than it on two devices, and smaller on 8."""
    for _ in range(4):
        x = norm(jnp.tanh(x @ p["square"]) + x)
    return jnp.mean(jnp.tanh(x - 1) ** 2)


def elementwise(p, x):
    """A matrix that a penalty and a normalisation read whole, beside its product."""
    q = p["up"] / jnp.linalg.norm(p["up"], axis=0, keepdims=True)
    return jnp.mean((x @ q) ** 2) + jnp.mean((p["up"].T @ p["up"]) ** 2)


def convolution(p, x):
    y = x[:, None, :, None] * jnp.ones((1, 1, 1, p["kernel"].shape[2]))
    y = jax.lax.conv_general_dilated(
        y, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jnp.tanh(y) ** 2)


def scaled_rows(p, x):
    """A matrix that rows of the batch scale, element by element."""
    return jnp.mean((x[:, :, None] * p["up"][None]).sum(1) ** 2)


STACK = {"up": (3, 24, 40), "down": (3, 40, 24), "scale": (3, 24)}
LOSSES = {
    "unrolled": (unrolled, {"up": (24, 40), "bias": (40,), "down": (40, 24)}),
    "padded": (unrolled, {"up": (24, 29), "bias": (29,), "down": (29, 24)}),
    "padded both": (unrolled, {"up": (23, 29), "bias": (29,), "down": (29, 23)}),
    "transposed": (transposed, {"up": (40, 24), "square": (24, 24)}),
    "einsums": (einsums, {"heads": (4, 6, 24), "out": (4, 6, 24), "experts": (5, 24, 16),
                          "back": (5, 16, 24)}),
    "half": (half, {"up": (24, 40), "bias": (40,), "down": (40, 24)}),
    "scanned": (scanned, STACK),
    "scanned remat": (functools.partial(scanned, remat=True), STACK),
    "unrolled remat": (unrolled_remat, STACK),
    "tied": (tied, {"table": (32, 24), "square": (24, 24)}),
    "recurrent": (recurrent, {"into": (24,), "square": (24, 24)}),
    "shared": (shared, {"square": (24, 24)}),
    "elementwise": (elementwise, {"up": (24, 40)}),
    "convolution": (convolution, {"kernel": (1, 3, 8, 16)}),
    "scaled rows": (scaled_rows, {"up": (24, 40)}),
}  # fmt: skip
# Adam divides by the root of squared gradients: where these are rounding errors, its steps are too.
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def step_of(loss_fn):
    def step(state, x):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def new_state(name):
    params = weights(LOSSES[name][1])
    return params, TX.init(params)


def rows_of(name, num=16):
    size = 23 if name == "padded both" else 24
    return jax.random.normal(jax.random.key(7), (3, num, size))


def check(name, mesh, tile_bytes=TILE, **options):
    tolerance = Tolerance(3e-2, 2e-2) if name == "half" else None
    assert_same_training(
        step_of(LOSSES[name][0]),
        lambda: new_state(name),
        [*rows_of(name)],
        mesh=mesh_of(mesh),
        tolerance=tolerance,
        **grouped(tile_bytes=tile_bytes, **options),
    )


@pytest.mark.slow(but=["2-padded both", "2-unrolled remat"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mesh", ["2", "8"])
def test_steps_train_as_on_one_device(name, mesh):
    check(name, mesh)


def test_what_a_step_has_updated_is_gathered_in_tiles_and_rows_are_not():
    """Two updates in one step; the second loss couples rows, which are more than a tile, too."""

    def coupled(p, x):
        z = norm(jnp.tanh(x @ p["up"]) @ p["down"])
        return jnp.mean((z @ z.T - jnp.eye(len(z))) ** 2)

    def step(params, x):
        for loss_fn in (unrolled, coupled):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        return params, loss

    def init():
        return weights(LOSSES["unrolled"][1])

    rows = rows_of("unrolled")
    assert_same_training(step, init, [*rows], mesh=mesh_of("8"), comm=jzero.Comm(tile_bytes=TILE))
    train_step = small.shard_train_step(step, mesh=mesh_of("8"), comm=jzero.Comm(tile_bytes=TILE))
    found = large(train_step.program(init(), rows[0], after="tiles").jaxpr)
    assert {tuple(sorted(aval.shape)) for aval in found} == {(16, 24)}


def test_tiles_of_bfloat16_are_summed_up_as_exactly_as_one_product():
    """1024 + 2 is 1024 in bfloat16: a row's ones would be lost, two in each tile."""

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum((x * p["scale"][None]) @ p["w"] * x[:, :32]))(params)
        return jax.tree.map(jnp.subtract, params, grads)

    w = jnp.ones((64, 32), jnp.bfloat16).at[:, 0].set(1024)
    params = {"scale": jnp.zeros(64, jnp.bfloat16), "w": w}
    x = jnp.zeros((256, 64), jnp.bfloat16).at[0].set(1)
    expected = jax.jit(step)(params, x)["scale"]
    train_step = small.shard_train_step(step, mesh=mesh_of("2"), tile_bytes=TILE)
    assert jnp.array_equal(train_step(params, x)["scale"], expected)


def test_evaluation():
    loss_fn: Any = LOSSES["tied"][0]
    state, rows = new_state("tied"), rows_of("tied")[0]
    train_step = small.shard_train_step(step_of(loss_fn), mesh=mesh_of("8"))
    placed = train_step.shard(state, rows)
    for gather in (None, "per_pass"):
        eval_step = jzero.shard_eval_step(
            loss_fn, like=train_step, comm=jzero.Comm(tile_bytes=TILE, gather=gather)
        )
        assert jnp.allclose(eval_step(placed[0], rows), jax.jit(loss_fn)(state[0], rows), 2e-5)


# What moves, and what is whole.


def large(jaxpr):
    """What is gathered and reduced of more than a tile."""
    moved = [
        (eqn.outvars if eqn.primitive.name == "all_gather" else eqn.invars)[0].aval
        for eqn in _jaxpr.walk(jaxpr)
        if eqn.primitive.name in ("all_gather", "reduce_scatter")
    ]
    return [aval for aval in moved if aval.size * aval.dtype.itemsize > TILE]


@pytest.mark.slow(but=["unrolled"])
@pytest.mark.parametrize("name", ["unrolled", "scanned remat"])
def test_one_pass_makes_tiles(name):
    def program(after, tile_bytes=TILE):
        step = step_of(LOSSES[name][0])
        train_step = small.shard_train_step(
            step, mesh=mesh_of("8"), comm=jzero.Comm(tile_bytes=tile_bytes)
        )
        return train_step.program(new_state(name), rows_of(name)[0], after=after)

    assert large(program("microbatches").jaxpr)
    assert not large(program("tiles").jaxpr)
    assert "jzero.tiles" in str(program("tiles"))
    untouched = program("microbatches", 2**20), program("tiles", 2**20)
    assert str(untouched[0]).splitlines()[1:] == str(untouched[1]).splitlines()[1:]


def described(name, tile_bytes, mesh="8", **options):
    step = small.shard_train_step(
        step_of(LOSSES[name][0]), mesh=mesh_of(mesh), tile_bytes=tile_bytes, **options
    )
    return step.describe(new_state(name), rows_of(name)[0])


def largest(report, op):
    """The largest value that a collective of a leaf gathers or reduces, in bytes."""
    found = [math.ceil(c.elements * c.itemsize) for c in report.traffic if c.op == op and c.leaf]
    return max(found, default=0)


@pytest.mark.parametrize(
    ("name", "tile_bytes"), [("half", TILE), ("scanned", 1000), ("einsums", 512)]
)
def test_nothing_large_is_whole_and_as_much_moves(name, tile_bytes):
    plain, tiled = described(name, None), described(name, tile_bytes)
    for op in ("all-gather", "reduce-scatter"):
        assert largest(tiled, op) <= tile_bytes < largest(plain, op)
    for op in ("all-gather", "reduce-scatter", "all-reduce"):
        assert tiled.elements(op) == plain.elements(op)


@pytest.mark.slow
def test_recomputation_gathers_a_matrix_once_more():
    """The backward pass computes `x @ up` again, and a tile of it is freed by then."""
    plain, tiled = described("scanned remat", None), described("scanned remat", TILE)
    up = 3 * 24 * 40
    assert tiled.elements("all-gather") == plain.elements("all-gather") + up
    assert tiled.elements("reduce-scatter") == plain.elements("reduce-scatter")


@pytest.mark.slow
def test_a_matrix_of_several_products_is_gathered_for_each_and_reduced_once():
    plain, tiled = described("transposed", None), described("transposed", TILE)
    size = 40 * 24 + 24 * 24
    # The forward pass reads each twice; the backward pass too, and adds two gradients up in each tile.
    assert tiled.elements("all-gather") == plain.elements("all-gather") + 2 * size - 40 * 24
    assert tiled.elements("reduce-scatter") == plain.elements("reduce-scatter")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "times"), [("2", 2), ("8", 1)])
def test_products_of_a_gradient_wait_for_each_other_if_they_are_small(mesh, times):
    plain, tiled = described("shared", None, mesh), described("shared", TILE, mesh)
    assert tiled.elements("reduce-scatter") == times * plain.elements("reduce-scatter")


# What is larger than a tile all the same.


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("unrolled", {}, []),
        ("scanned remat", {}, []),
        ("tied", {}, [("table", "gathered", "a look-up reads it whole"),
                      ("table", "reduced", "its gradient is that of a look-up")]),
        ("recurrent", {}, [("square", "gathered", "a loop reads it whole in every iteration"),
                           ("square", "reduced", "a loop adds it up before it is reduced")]),
        ("elementwise", {}, [("up", "gathered", "a product reads it whole: the other operand is")]),
        ("convolution", {}, [("kernel", "gathered", "a convolution reads it whole"),
                             ("kernel", "reduced", "its gradient is that of a convolution")]),
        ("scaled rows", {}, [("up", "gathered", "`mul` reads it whole"),
                             ("up", "reduced", "`reduce_sum` makes its gradient")]),
        ("unrolled", {"accumulate": 2, "reduce": "once"},
         [("down", "reduced", "a loop adds it up"), ("up", "reduced", "a loop adds it up")]),
        ("unrolled", {"stage": 2}, []),
        ("unrolled", {"tile_bytes": 50}, [("bias", "gathered", "`add` reads it whole"),
                                          ("bias", "reduced", "`reduce_sum` makes its gradient"),
                                          ("down", "gathered", "its tiles cannot be smaller"),
                                          ("down", "reduced", "its tiles cannot be smaller"),
                                          ("up", "gathered", "its tiles cannot be smaller"),
                                          ("up", "reduced", "its tiles cannot be smaller")]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_cut_is_named(name, options, expected):
    report = described(name, **{"tile_bytes": TILE, "mesh": "4"} | options)
    found = sorted(report.untiled)
    assert [(each.leaf, each.what) for each in found] == [
        (f"state[0]['{leaf}']", what) for leaf, what, _ in expected
    ]
    text = " ".join(str(report).split())
    assert ("except these:" in text) == bool(expected)
    for each, (_, _, why) in zip(found, expected, strict=True):
        assert each.why.startswith(why)
        assert each.nbytes > report.to_dict()["tile_bytes"]
        assert each.why in text
    assert report.to_dict()["untiled"] == [each._asdict() for each in report.untiled]
    if name == "tied":
        assert re.search(r"test_tiles\.py.*\(tied\)", found[0].where)


def test_a_tensor_axis():
    """A product that sums over what XLA cuts reads a matrix whole, and it is named; the others are cut."""
    mesh = small.auto_mesh(data=4, model=2)

    def loss_fn(p, x):
        hidden = jnp.tanh(x @ p["up"])
        return jnp.mean((hidden @ p["down"]) ** 2)

    options: dict[str, Any] = dict(
        mesh=mesh, axis_names="data", auto_specs={"up": jax.P(None, "model")}, tile_bytes=TILE
    )
    params = weights({"up": (24, 40), "down": (40, 24)})
    state, (rows, *_) = (params, TX.init(params)), rows_of("unrolled")
    step = small.shard_train_step(step_of(loss_fn), **options)
    assert "state[0]['up']" in {each.leaf for each in step.describe(state, rows).untiled}
    init = functools.partial(jax.tree.map, jnp.array, state)
    assert_same_training(step_of(loss_fn), init, [*rows_of("unrolled")], **grouped(**options))


# How a matrix is cut.


@pytest.mark.parametrize(
    ("shape", "sharded", "kept", "expected"),
    [
        ((8, 16), 0, [1], (1, 16, 2)),  # rows rest in shards: columns are cut
        ((8, 16), 1, [1], (0, 8, 1)),
        ((8, 13), 0, [1], (1, 13, 2)),  # a last one is smaller
        ((4, 15), 0, [1], (1, 15, 3)),  # 5 of three columns rather than 3 of four and one of three
        ((4, 8, 16), 0, [1], (2, 16, 1)),  # only columns are small enough
        ((2, 8, 8), 0, [1], (1, 8, 1)),  # the dim that the product keeps
        ((2, 8, 8), 0, [2], (2, 8, 1)),
        ((64, 2), 0, [1], (1, 2, 1)),  # a tile has one column at least
        ((2, 9), 0, [1], (1, 9, 3)),  # three tiles, though two would do
        ((64, 1), 0, [1], None),
        ((64,), 0, [], None),
    ],
)
def test_cuts(shape, sharded, kept, expected):
    found = cut(shape, 1, sharded, 16, kept)
    assert (found and tuple(found)) == expected
