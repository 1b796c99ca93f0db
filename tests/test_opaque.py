"""Opaque calls run on each device's rows where a promise, or the call itself, says that rows are apart."""

import functools
import inspect
import re
import warnings

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import gpu_compiler
import jzero
import small

pytestmark = pytest.mark.usefixtures("float64")

ROWS, DIM = 32, 4
GATHERED = "nothing says that its rows are apart; jzero.per_example promises it"
NOT_COVERED = "jzero.per_example does not cover it"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, W = normal(ROWS, DIM), normal(DIM, DIM, seed=1)


def gathered(fn, w=W, x=X, tolerance=1e-9, **options):
    """What `fn(w, x)`, inside a loss, gathers: pairs of operation and reason; it trains as on one device."""

    def step(w, x):
        def loss_fn(w):
            y = fn(w, x)
            return jnp.sum(jnp.sin(y)) / 100, y

        (loss, y), grads = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - grads, {"loss": loss, "y": y}

    train_step = small.shard_train_step(step, stage=3, **options)
    report = train_step.describe(w, x)
    expected = jax.jit(step)(w, x)
    found = train_step(train_step.shard(w), x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        (train_step.unshard(found[0]), found[1]), expected,
    )  # fmt: skip
    return [(m.operation, m.reason) for m in report.movements if m.operation != "output"]


def on_host(fn, *arrays, shape=None):
    shape = jax.ShapeDtypeStruct(shape or arrays[0].shape, arrays[0].dtype)
    return jax.pure_callback(fn, shape, *arrays, vmap_method="expand_dims")


@jax.custom_vjp
def softsign(x):
    """A callback in its forward and in its backward pass."""
    return on_host(lambda x: x / (1 + np.abs(x)), x)


softsign.defvjp(
    lambda x: (softsign(x), x),
    lambda x, ct: (on_host(lambda x, ct: ct / (1 + np.abs(x)) ** 2, x, ct),),
)
promised = jzero.per_example(softsign)


# -- promises ------------------------------------------------------------------------------------------


def in_a_scan(w, x):
    return jax.lax.scan(lambda x, _: (promised(x @ w), None), x, None, length=3)[0]


def around_a_scan(w, x):
    def layers(x):
        return jax.lax.scan(lambda x, _: (softsign(x @ w), None), x, None, length=3)[0]

    return jzero.per_example(layers)(x)


def along_another_dim(w, x):
    return jzero.per_example(softsign, in_axes=1, out_axes=-1)((x @ w).T).T


def of_several_arguments(w, x):
    def fn(arrays, scale, *, bias):
        return on_host(lambda a, b, s: a + b * s, arrays["a"], bias, scale)

    y = jax.lax.stop_gradient(x @ w)
    return jzero.per_example(fn, in_axes=(0, None))({"a": y}, jnp.asarray(3.0), bias=y) + x @ w


def a_state_with_rows(w, x):
    """Whole on every device, and what follows from it has rows all the same."""

    def fn(y, table):
        return on_host(lambda y, flat: y + flat.reshape(y.shape), y, table.reshape(-1))

    table = jnp.concatenate([w] * (len(x) // DIM))
    y = jax.lax.stop_gradient(x @ w)
    return jzero.per_example(fn)(y, jax.lax.stop_gradient(table)) + x @ w


COVERED = {
    "once": lambda w, x: promised(x @ w),
    "jit": lambda w, x: jax.jit(promised)(x @ w),
    "remat": lambda w, x: jax.checkpoint(lambda w: promised(jnp.sin(x @ w)))(w),
    "vmap over rows": lambda w, x: jax.vmap(jzero.per_example(softsign))((x @ w)[:, None])[:, 0],
    "vmap along rows": lambda w, x: jax.vmap(promised, 1, 1)(x @ w),
    "an ensemble": lambda w, x: jax.vmap(lambda w: promised(x @ w))(jnp.stack([w, 2 * w])).sum(0),
    "an ensemble inside": lambda w, x: jax.vmap(
        lambda w: jzero.per_example(lambda x, w: softsign(x @ w), in_axes=(0, None))(x, w)
    )(jnp.stack([w, 2 * w])).sum(0),
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, promised, lambda x: x, x @ w),
    "zero cotangents": lambda w, x: jnp.sum(promised(jnp.stack([x @ w, x], 1)), 1),
    **{
        fn.__name__: fn
        for fn in (in_a_scan, around_a_scan, along_another_dim, of_several_arguments)
    },
}


@pytest.mark.slow(but=["vmap over rows"])
@pytest.mark.parametrize("name", COVERED)
def test_promised_calls_run_on_the_rows_of_each_device(name):
    assert gathered(COVERED[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "accumulate"), [(27, 1), (2, 1), (ROWS, 2)])
def test_rows_that_devices_do_not_divide_and_microbatches(rows, accumulate):
    assert gathered(COVERED["once"], x=normal(rows, DIM), accumulate=accumulate) == []


def test_each_device_gives_the_host_its_own_rows():
    sizes = []

    def note(x):
        sizes.append(x.shape)
        return x

    fn = jzero.per_example(functools.partial(on_host, note))
    step = small.shard_train_step(lambda w, x: (w, fn(x)))
    np.testing.assert_array_equal(step(W, X)[1], X)
    assert set(sizes) == {(ROWS // 8, DIM)}


def test_without_a_promise_rows_are_gathered_and_the_edit_is_named():
    assert gathered(lambda w, x: softsign(x @ w)) == [("pure_callback", GATHERED)] * 2
    text = rf"pure_callback at .*test_opaque\.py.*{re.escape(GATHERED)}"
    step = small.shard_train_step(lambda w, x: (w, softsign(x)), max_gather_bytes=100)
    with pytest.raises(jzero.StepError, match=text):
        step(W, X)


@pytest.mark.slow
def test_other_operations_inside_are_what_they_are():
    """A promise that is broken by what JAX knows changes nothing: the mean is that of the batch."""
    assert gathered(lambda w, x: jzero.per_example(lambda x: x - x.mean(0)[None])(x @ w)) == []
    (sort,) = gathered(lambda w, x: jzero.per_example(lambda x: jnp.sort(x, 0))(x) + x @ w)
    assert sort[0] == "sort"


@pytest.mark.slow
def test_nothing_in_plain_jax():
    jaxpr = str(jax.make_jaxpr(promised)(X))
    assert promised(X).tolist() == softsign(X).tolist()
    assert "pure_callback" in jaxpr
    np.testing.assert_array_equal(
        jax.jvp(jzero.per_example(jnp.sin), (X,), (X,))[1], jnp.cos(X) * X
    )
    y, tangents = jax.linearize(jzero.per_example(jnp.sin), X)
    np.testing.assert_array_equal(tangents(X), jnp.cos(X) * X)


def parameter_gradient(w, x):
    """The backward pass of a kernel that makes its parameter's gradient itself."""

    @jax.custom_vjp
    def product(x, w):
        return on_host(lambda x, w: x @ w, x, w)

    def backward(saved, ct):
        x, w = saved
        return on_host(lambda ct, w: ct @ w.T, ct, w), on_host(
            lambda x, ct: x.T @ ct, x, ct, shape=w.shape
        )

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return jzero.per_example(product, in_axes=(0, None))(x, w)


def closes_over_rows(w, x):
    add = jzero.per_example(lambda y: on_host(np.add, y, x.T.reshape(y.shape)))
    return add(jax.lax.stop_gradient(x @ w)) + x @ w


def long_as_the_batch(w, x):
    """Shared operands that might as well have rows."""

    def fn(x, table):
        return on_host(lambda x, t: x + t.sum(0)[None], x, table)

    ones = jzero.per_example(lambda x: fn(x, jnp.ones((8, DIM))))(x)
    table = jnp.arange(8.0 * DIM).reshape(8, DIM)
    return jzero.per_example(fn, in_axes=(0, None))(x, table) + ones + x @ w


def rows_of_two_dims(w, x):
    def fn(x):
        return on_host(lambda a, b: a + b.T, x, x.T)

    return jzero.per_example(fn)(jax.lax.stop_gradient(x @ w)) + x @ w


def transposed_on_host(w, x):
    """Rows in dim 0 of what the host gets, and in dim 1, as long, of what it returns."""

    def fn(x):
        return on_host(lambda x: np.ascontiguousarray(np.transpose(x)), x).T

    return jzero.per_example(fn)(jax.lax.stop_gradient(x @ w))


@pytest.mark.parametrize(("fn", "rows"), [
    (a_state_with_rows, ROWS), (parameter_gradient, ROWS), (parameter_gradient, DIM),
    (long_as_the_batch, 8), (rows_of_two_dims, ROWS), (transposed_on_host, DIM),
])  # fmt: skip
def test_what_shapes_contradict_is_gathered(fn, rows):
    """A gradient of a parameter may be as long as the batch, by chance."""
    found = gathered(fn, x=normal(rows, DIM))
    assert {operation for operation, _ in found} == {"pure_callback"}
    assert all(reason.startswith(NOT_COVERED) for _, reason in found)


def layers(w, x, inside=lambda fn: fn):
    def layer(x, _):
        return parameter_gradient(w, x), None

    return inside(lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, 3)[0])(x)


def test_and_in_loops():
    """There the sum of such gradients is rows of what was gathered, which nobody can tell from others."""
    assert NOT_COVERED in str(gathered(layers))
    assert NOT_COVERED in str(gathered(layers, x=normal(DIM, DIM)))
    inside = functools.partial(layers, inside=jzero.per_example)
    assert NOT_COVERED in str(gathered(inside))
    with pytest.raises(jzero.StepError, match="of what has no rows is as long as the batch"):
        gathered(inside, x=normal(DIM, DIM))


def embedded(table, numbers):
    """Rows of a table, by a call whose backward pass never sees the table."""
    size = len(table)

    @jax.custom_vjp
    def look_up(table, numbers):
        shape = (len(numbers), table.shape[1])
        return on_host(lambda table, n: table[n], table, numbers, shape=shape)

    def backward(numbers, ct):
        def add_up(ct, numbers):
            total = np.zeros((size, ct.shape[1]))
            np.add.at(total, np.asarray(numbers), np.asarray(ct))
            return total

        return on_host(add_up, ct, numbers, shape=(size, ct.shape[1])), None

    look_up.defvjp(lambda table, numbers: (look_up(table, numbers), numbers), backward)
    return jzero.per_example(look_up, in_axes=(None, 0))(table, numbers)


def test_a_gradient_that_looks_like_rows_is_refused():
    def step(table, numbers):
        loss, grad = jax.value_and_grad(lambda table: embedded(table, numbers).sum())(table)
        return table - grad, loss

    table = normal(16, DIM)
    for rows in (24, 16):
        numbers = np.arange(rows) * 5 % 7
        train_step = small.shard_train_step(step)
        if rows == len(table):
            text = r"a gradient float64\[16,4\] of what has no rows is as long as the batch at .*test_opaque"
            with pytest.raises(jzero.StepError, match=text):
                train_step(table, numbers)
        else:
            expected, loss = jax.jit(step)(table, numbers)
            found, metric = train_step(table, numbers)
            np.testing.assert_allclose(found, expected)
            np.testing.assert_allclose(metric, loss)


def test_what_is_no_array_reaches_fn_untouched():
    def fn(x, given, *, both):
        assert given == {"train": True, "name": "softsign", "scale": 2.0}
        assert isinstance(given["train"], bool)
        return softsign(x) if given["train"] else both

    given = {"train": True, "name": "softsign", "scale": 2.0}
    call = jzero.per_example(fn, in_axes=(0, None))
    assert call(X, given, both=X).tolist() == softsign(X).tolist()
    assert gathered(lambda w, x: call(x @ w, given, both=x)) == []


def test_a_module_that_changes():
    norm = nnx.BatchNorm(DIM, rngs=nnx.Rngs(0))
    with pytest.raises(jzero.StepError, match="fn changes an NNX module .* call the module outs"):
        jzero.per_example(lambda x: norm(x))(X.astype(np.float32))
    with pytest.raises(ZeroDivisionError):
        jzero.per_example(lambda x: x * (1 / 0))(X)


def test_results_are_arrays():
    with pytest.raises(jzero.BatchError, match=r"output\[1\] is a str. Results are arrays"):
        jzero.per_example(lambda x: (x, "a"))(X)


def test_rows_that_a_promise_says_are_none():
    found = gathered(closes_over_rows)
    assert ("marked_rows", "jzero.per_example has its rows along no dim") in found


def test_closed_over_rows_that_have_a_gradient():
    def fn(w, x):
        h = x @ w
        return jzero.per_example(lambda y: promised(y) * h)(h)

    with pytest.raises(jzero.StepError, match="If it has rows, make it an argument, and name"):
        gathered(fn)


def test_effects_happen_once_all_the_same():
    calls = []

    def note(x):
        calls.append(x.shape)
        return x

    fn = jzero.per_example(lambda x: io_callback(note, x, x))
    step = small.shard_train_step(lambda w, x: (w, fn(x)))
    np.testing.assert_array_equal(step(W, X)[1], X)
    jax.effects_barrier()
    assert calls == [X.shape]
    reason = "a callback gets whole values, once; jzero.per_example does not cover effects"
    assert ("io_callback", reason) in [
        (m.operation, m.reason) for m in step.describe(W, X).movements
    ]


def calls_of_whole_rows(w, x):
    fn = jzero.per_example(lambda x: io_callback(lambda x: np.cumsum(x, 0), x, x))
    return w, jax.lax.scan(lambda x, _: (fn(x + 1), None), x, None, length=2)[0]


def test_a_call_of_the_rows_of_all_microbatches_in_a_loop():
    found = small.shard_train_step(calls_of_whole_rows, microbatches=2)(W, X)
    expected = jax.jit(calls_of_whole_rows)(W, X)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)


@pytest.mark.parametrize(("text", "fn", "options", "args"), [
    ("jzero.per_example: output float64[] has no dim 0. Rows are along a dim. Name that dim in out_axes",
     jnp.sum, {}, [X]),
    ("output float64[4] has not the 32 rows of the arguments. Each row of a result comes from the same row",
     lambda x: x.sum(0), {}, [X]),
    ("output['y'] float64[32,4] has not the 32 rows", lambda x: {"y": x}, {"out_axes": 1}, [X]),
    ("output float64[32,4] has not the 32 rows", lambda x: x, {"out_axes": None}, [X]),
    ("args[0] float64[32,4] has 32 rows\n  - args[1] float64[4,4] has 4 rows", jnp.add, {}, [X, W]),
    ("no argument has rows", jnp.sin, {"in_axes": None}, [X]),
    ("args[0]['x'] float64[32,4] has no dim 2", jnp.sin, {"in_axes": 2}, [{"x": X}]),
])  # fmt: skip
def test_refusals(text, fn, options, args):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        jzero.per_example(fn, **options)(*args)
    assert isinstance(caught.value, jzero.JzeroError)


def cholesky(x):
    """LAPACK's, by its name."""
    types = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], np.int32)
    call = jax.ffi.ffi_call(
        "lapack_dpotrf_ffi", types, input_output_aliases={0: 0},
        input_layouts=[(0, 2, 1)], output_layouts=[(0, 2, 1), (0,)],
    )  # fmt: skip
    factor, failed = call(x, uplo=np.uint8(ord("L")))
    return jnp.tril(factor) + failed[:, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 13])
def test_a_foreign_function(rows):
    jax.block_until_ready(jnp.linalg.cholesky(jnp.eye(2)))  # JAX loads LAPACK.

    def fn(w, x, wrap=lambda fn: fn):
        y = jax.lax.stop_gradient(x @ w)
        matrices = jnp.einsum("bi,bj->bij", y, y) + jnp.broadcast_to(jnp.eye(DIM), (rows, DIM, DIM))
        return jnp.einsum("bij,bj->bi", wrap(cholesky)(matrices), x @ w)

    assert gathered(fn, x=normal(rows, DIM)) == [("ffi_call", GATHERED)]
    assert gathered(functools.partial(fn, wrap=jzero.per_example), x=normal(rows, DIM)) == []


# -- kernels ---------------------------------------------------------------------------------------------


def spec(*block, index=lambda i: (i, 0)):
    return pl.BlockSpec(block, index)


def chosen(block):
    return spec(2, DIM, index=lambda i: (block(i), 0))


def kernel(fn, x, *more, block=2, ins=None, out=None, shape=None, grid=None, **options):
    """`fn(*refs)` on a grid of blocks of rows."""
    shared = [spec(*y.shape, index=lambda i: (0, 0)) for y in more]
    return pl.pallas_call(
        fn, out_shape=jax.ShapeDtypeStruct(shape or x.shape, x.dtype), grid=grid or (len(x) // block,),
        in_specs=ins or [spec(block, x.shape[1]), *shared], out_specs=out or spec(block, x.shape[1]),
        interpret=True, **options,
    )(x, *more)  # fmt: skip


def tanh(x, out):
    out[...] = jnp.tanh(x[...])


def centred_in_blocks(x, out):
    out[...] = x[...] - jnp.broadcast_to(x[...].mean(0)[None], x.shape)


def product(x, w, out):
    out[...] = x[...] @ w[...]


def numbered(x, out):
    out[...] = x[...] * pl.program_id(0).astype(x.dtype)


def numbered_columns(x, out):
    out[...] = x[...] * pl.program_id(1).astype(x.dtype)


def accumulated(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += x[...]


def neighbour(x, out):
    number = (pl.program_id(0) + 1) % pl.num_programs(0)
    out[...] = x[pl.ds(number * 2, 2), :]


@jax.custom_vjp
def tanh_with_gradient(x):
    return kernel(tanh, x)


def tanh_gradient(y, ct, out):
    out[...] = ct[...] * (1 - y[...] * y[...])


def tanh_backward(y, ct):
    both = [spec(2, y.shape[1])] * 2
    return (kernel(tanh_gradient, y, ct, ins=both),)


tanh_with_gradient.defvjp(lambda x: (tanh_with_gradient(x),) * 2, tanh_backward)


def sums_of_blocks(x):
    def fn(x, out):
        out[...] = x[...].sum(0, keepdims=True)

    return kernel(fn, x, out=spec(1, DIM), shape=(len(x) // 2, DIM))


def by_columns(x):
    pair = spec(2, 2, index=lambda i, j: (i, j))
    return kernel(numbered_columns, x, grid=(len(x) // 2, DIM // 2), ins=[pair], out=pair)


PROVED = {
    "blocks": lambda x: kernel(tanh, x),
    "single rows": lambda x: kernel(tanh, x, block=1),
    "what rows of a block do": lambda x: kernel(centred_in_blocks, x),
    "shared operand": lambda x: kernel(product, x, jnp.eye(DIM)),
    "vmapped": lambda x: jax.vmap(lambda x: kernel(numbered, x, block=1))(
        x.reshape(-1, 2, 2)).reshape(x.shape),
    "another number of rows": sums_of_blocks,
    "program of another dim": by_columns,
    "how many programs there are": lambda x: kernel(
        lambda x, out: out.__setitem__(..., x[...] * pl.num_programs(0)), x),
    "number of the row as an operand": lambda x: kernel(
        lambda x, n, out: out.__setitem__(..., x[...] * n[...]), x,
        jax.lax.broadcasted_iota(x.dtype, x.shape, 0), ins=[spec(2, DIM)] * 2),
}  # fmt: skip


def of_rows(fn):
    return lambda w, x: fn(jax.lax.stop_gradient(x @ w)).sum() * (x @ w)


@pytest.mark.slow(but=["another number of rows"])
@pytest.mark.parametrize("name", PROVED)
def test_a_grid_proves_that_rows_are_apart(name):
    assert gathered(of_rows(PROVED[name])) == []


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_kernels(accumulate):
    assert gathered(lambda w, x: tanh_with_gradient(x @ w), accumulate=accumulate) == []


@pytest.mark.slow
def test_flash_attention_of_jax():
    """JAX's own kernels, forward and backward, as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.12 points to another package.
        flash = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention")

    def fn(w, x):
        q = (x @ w).reshape(len(x), 128, 1, 16)
        return flash.mha(q, q, q, segment_ids=None, causal=True, interpret=True)

    x, w = normal(8, 16), normal(16, 128 * 16, seed=1) / 4
    with jax.enable_x64(False):
        assert gathered(fn, w.astype(np.float32), x.astype(np.float32), tolerance=1e-5) == []


@pytest.mark.slow
@pytest.mark.parametrize(("block", "rows"), [(2, 24), (2, 26), (ROWS, ROWS)])
def test_blocks_that_devices_do_not_divide(block, rows):
    """One block has all rows, and may do with them what it likes."""
    fn = of_rows(lambda x: kernel(centred_in_blocks, x, block=block))
    reason = "its rows are apart along another dim, or in blocks that 8 devices do not divide"
    assert gathered(fn, x=normal(rows, DIM)) == [("pallas_call", reason)]


def test_single_rows_that_devices_do_not_divide():
    assert gathered(of_rows(PROVED["single rows"]), x=normal(27, DIM)) == []


def prefetched(x):
    """Index maps that read an operand."""
    order = jnp.arange(len(x) // 2)[::-1]
    blocks = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(len(x) // 2,),
        in_specs=[pl.BlockSpec((2, DIM), lambda i, order: (order[i], 0))],
        out_specs=pl.BlockSpec((2, DIM), lambda i, order: (i, 0)),
    )  # fmt: skip
    return pl.pallas_call(
        lambda order, x, out: tanh(x, out), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=blocks, interpret=True,
    )(order, x)  # fmt: skip


NOT_PROVED = {
    "the next block": lambda x: kernel(tanh, x, ins=[chosen(lambda i: (i + 1) % (len(x) // 2))]),
    "blocks in reverse": lambda x: kernel(tanh, x, ins=[chosen(lambda i: len(x) // 2 - 1 - i)]),
    "reads its neighbour": lambda x: kernel(neighbour, x, ins=[spec(*x.shape, index=lambda i: (0, 0))]),
    "adds up along rows": lambda x: kernel(accumulated, x, out=chosen(lambda i: 0), shape=(2, DIM)),
    "which program it is": lambda x: kernel(numbered, x),

    "scratch": lambda x: kernel(
        lambda x, out, scratch: tanh(x, out), x, scratch_shapes=[pltpu.VMEM((2,), x.dtype)]),
    "in the place of an operand": lambda x: kernel(tanh, x, input_output_aliases={0: 0}),
    "operands chosen by another": prefetched,
}  # fmt: skip


@pytest.mark.slow(but=[0, 2, 4, 6])
@pytest.mark.parametrize("name", NOT_PROVED)
def test_near_misses_are_gathered(name):
    assert gathered(of_rows(NOT_PROVED[name])) == [("pallas_call", GATHERED)]


def test_a_promise_covers_what_a_grid_alone_does_not_prove():
    assert gathered(of_rows(jzero.per_example(NOT_PROVED["scratch"]))) == []
    (movement,) = gathered(of_rows(jzero.per_example(NOT_PROVED["the next block"])))
    assert movement[1].startswith(NOT_COVERED)


@pytest.mark.slow
def test_but_not_a_kernel_that_reads_its_row_by_its_number():
    """The promise is kept, and on each device programs are numbered anew."""

    def fn(x, all_rows, out):
        out[...] = x[...] + all_rows[pl.ds(pl.program_id(0) * 2, 2), :]

    found = gathered(of_rows(jzero.per_example(lambda x: kernel(fn, x, 2 * x))))
    assert len(found) == 2
    assert all(reason.startswith(NOT_COVERED) for _, reason in found)


# -- cuDNN's attention: traced, rewritten, and compiled where there is a compiler for GPUs ------------------

HEADS, WIDTH, TIMES = 2, 64, 16


def attention(q, k, v, bias=None, lengths=None, dropout=0.0):
    """What `jax.nn.dot_product_attention(implementation="cudnn")` calls when it has found cuDNN."""
    none = jnp.zeros(0, q.dtype)
    padding = cudnn.MaskType.CAUSAL if lengths is None else cudnn.MaskType.PADDING_CAUSAL
    given = dict(
        query=q, key=k, value=v, bias=none if bias is None else bias, scale=1.0, seed=0, dropout_rate=dropout,
        q_seqlen=none if lengths is None else lengths, kv_seqlen=none if lengths is None else lengths,
        variadic_args=(bias is not None,) * 2, mask_type=padding, layout=cudnn.AttentionLayout.BTNH.value,
        cudnn_version=91000, return_residual=False, score_mod_args=(), score_mod=None,
        sliding_window_length=None,
    )  # fmt: skip
    names = inspect.signature(cudnn._dot_product_attention).parameters
    return cudnn._dot_product_attention(*(given.get(name, none) for name in names))


def attend(w, x, bias=None, **options):
    x = x.astype(w.dtype)
    q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], HEADS, 3 * WIDTH), 3, -1)
    return attention(q, k, v, bias, **options).astype(jnp.float32)


def trained_on_attention(rows=16, bias=None, lengths=False, dropout=0.0):
    """The step's report; `bias` is the shape of a learned one."""

    def step(state, x, lengths):
        def loss_fn(state):
            options = {"lengths": lengths} if lengths is not None else {}
            return attend(state["w"], x, state.get("bias"), dropout=dropout, **options).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(jnp.subtract, state, grads), {"loss": loss}

    state = {"w": jax.ShapeDtypeStruct((8, HEADS * 3 * WIDTH), jnp.bfloat16)}
    if bias is not None:
        state["bias"] = jax.ShapeDtypeStruct(bias, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, TIMES, 8), jnp.float32)
    sizes = jax.ShapeDtypeStruct((rows,), jnp.int32) if lengths else None
    return small.shard_train_step(step, stage=0), state, x, sizes


@pytest.mark.parametrize(
    "options", [{}, {"rows": 13}, {"lengths": True}, {"bias": (1, HEADS, TIMES, TIMES)}], ids=str
)
def test_attention_of_cudnn_is_local(options):
    step, *args = trained_on_attention(**options)
    report = step.describe(*args)
    assert report.movements == ()
    psi = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    assert report.elements("all-reduce") == psi + 1


def test_its_dropout_is_that_of_the_whole_batch():
    step, *args = trained_on_attention(dropout=0.1)
    movements = step.describe(*args).movements
    reason = "its rows are apart without dropout and packed sequences, along its batch"
    assert {(m.operation, m.reason) for m in movements} == {
        ("dot_product_attention_fwd_wrapper", reason)
    }


def test_a_bias_that_rows_share_is_not_summed_with_padding():
    step, *args = trained_on_attention(rows=13, bias=(1, HEADS, TIMES, TIMES))
    (reason,) = {m.reason for m in step.describe(*args).movements}
    assert reason == "its rows are apart without dropout and packed sequences, along its batch"


def test_attention_of_cudnn_compiles():
    gpu_compiler.skip_without_it()
    step, *args = trained_on_attention()
    with jax.enable_x64(False):
        found = jzero.preflight(step, *args, target="h100", topology="1x8")
    assert {c.op for c in found.schedule.collectives} == {"all-reduce"}
