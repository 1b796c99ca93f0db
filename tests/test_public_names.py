"""Every public function of jax.numpy, jax.nn and jax.lax, called on rows: it moves none, or we say why.

A name that a new release adds fails `test_every_name_has_a_call_or_a_reason`.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

import jzero
import scaled_products  # noqa: F401 (it is what runs jax.nn.scaled_matmul here)
import zoo

pytestmark = pytest.mark.filterwarnings("ignore")  # of names that will go, and of 64-bit types

MODULES = {"jnp": jnp, "nn": nn, "lax": lax}
NUM_ROWS, NUM_DEVICES = 16, 8
W = np.linspace(0.2, 0.9, 4, dtype=np.float32)
PAIRS = (((2,), (2,)), ((0,), (0,)))  # what a product sums over, and its batch
MATRIX = np.linspace(0.1, 0.8, 12, dtype=np.float32).reshape(4, 3)
DIMS = lax.ScatterDimensionNumbers((0,), (1,), (1,))
NHWC = ("NHWC", "HWIO", "NHWC")


def make_rows():
    """Rows of every kind; each leading dim is the batch's."""
    x, y, z = np.random.default_rng(0).uniform(0.1, 0.9, (3, NUM_ROWS, 4)).astype(np.float32)
    cube = np.random.default_rng(1).uniform(0.1, 0.9, (NUM_ROWS, 5, 4)).astype(np.float32)
    square = cube[:, :4] + 2 * np.eye(4, dtype=np.float32)
    return dict(
        x=x, y=y, z=z, cube=cube, square=square,
        i=(x * 4).astype(np.int32), j=(y * 4).astype(np.int32) + 1, bits=(x * 200).astype(np.uint8),
        b=x > 0.5, c=x > y, complex=(x + 1j * y).astype(np.complex64),
        one=x[:, 0], two=y[:, 0], label=(x[:, 0] * 4).astype(np.int32),
        image=np.random.default_rng(2).uniform(0, 1, (NUM_ROWS, 6, 6, 2)).astype(np.float32),
        heads=np.random.default_rng(3).uniform(0, 1, (NUM_ROWS, 4, 2, 8)).astype(np.float32),
    )  # fmt: skip


# Functions that are called alike: module, how, names.
ALIKE = [
    ("jnp", lambda f, r: f(r.x), """
        abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh around array asarray asin
        asinh atan atanh atleast_1d atleast_2d atleast_3d cbrt ceil conj conjugate copy cos cosh deg2rad
        degrees empty_like exp exp2 expm1 fabs fix floor frexp i0 imag iscomplex iscomplexobj isfinite isinf
        isnan isneginf isposinf isreal isrealobj log log10 log1p log2 logical_not modf nan_to_num negative
        ones_like positive rad2deg radians real reciprocal rint round sign signbit sin sinc sinh size
        spacing sqrt square tan tanh trunc zeros_like shape ndim ravel"""),
    ("jnp", lambda f, r: f(r.x), """
        bfloat16 bool bool_ complex64 csingle float16 float32 float4_e2m1fn float6_e2m3fn float6_e3m2fn
        float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
        float8_e8m0fnu int16 int2 int32 int4 int8 single uint16 uint2 uint32 uint4 uint8"""),
    ("jnp", lambda f, r: f(r.i), "bitwise_count bitwise_invert bitwise_not invert"),
    ("jnp", lambda f, r: f(r.x, r.y), """
        add arctan2 atan2 copysign divide divmod equal float_power floor_divide fmax fmin fmod greater
        greater_equal heaviside hypot isclose less less_equal logaddexp logaddexp2 logical_and logical_or
        logical_xor maximum minimum mod multiply nextafter not_equal pow power remainder subtract
        true_divide broadcast_arrays vecdot allclose array_equal array_equiv vdot result_type"""),
    ("jnp", lambda f, r: f(r.i, r.j), """
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm left_shift
        right_shift"""),
    ("jnp", lambda f, r: f(r.x, axis=-1), """
        all amax amin any argmax argmin argpartition argsort average count_nonzero cumprod cumsum
        cumulative_prod cumulative_sum diff expand_dims flip gradient max mean median min minmax nanargmax
        nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp
        sort std sum trapezoid unstack unwrap var"""),
    ("jnp", lambda f, r: f(r.x, 2, axis=-1), """
        argpartition array_split partition repeat roll split delete percentile nanpercentile take"""),
    ("jnp", lambda f, r: f(r.x, 0.3, axis=-1), "quantile nanquantile"),
    ("jnp", lambda f, r: f([r.x, r.y], axis=-1), "concat concatenate stack"),
    ("jnp", lambda f, r: f([r.x, r.y]), "block column_stack dstack hstack"),
    ("jnp", lambda f, r: f(r.square), "matrix_transpose tril triu"),
    ("jnp", lambda f, r: f(r.square, axis1=1, axis2=2), "diagonal trace"),
    ("jnp", lambda f, r: f(r.x, W), "dot inner kron matmul"),
    ("jnp", lambda f, r: f(r.cube, 1, 2), "moveaxis swapaxes rollaxis"),
    ("jnp", lambda f, r: f(r.one, r.two, 5, axis=-1), "geomspace linspace logspace"),
    ("jnp", lambda f, r: f(r.x, W), "digitize isin"),
    ("jnp", lambda f, r: f(W, r.x), "polyval searchsorted"),
    ("jnp", lambda f, r: f(r.x, rowvar=False), "cov corrcoef"),
    ("jnp", lambda f, r: f(r.x, bins=4, range=(0.0, 1.0)), "histogram histogram_bin_edges"),
    ("nn", lambda f, r: f(r.x), """
        celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log1mexp
        log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
        sparse_sigmoid squareplus standardize swish tanh"""),
    ("nn", lambda f, r: f(r.x, axis=-1), "logmeanexp logsumexp"),
    ("lax", lambda f, r: f(r.x), """
        abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv
        erfc exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square reciprocal
        round rsqrt sign sin sinh sqrt square stop_gradient tan tanh optimization_barrier"""),
    ("lax", lambda f, r: f(r.complex), "conj imag real"),
    ("lax", lambda f, r: f(r.i), "bitwise_not clz population_count"),
    ("lax", lambda f, r: f(r.x, r.y), """
        add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter polygamma
        pow rem sub zeta random_gamma_grad"""),
    ("lax", lambda f, r: f(r.i, r.j), """
        bitwise_and bitwise_or bitwise_xor mulhi shift_left shift_right_arithmetic shift_right_logical"""),
    ("lax", lambda f, r: f(r.x, axis=1, index_dtype=np.int32), "argmax argmin"),
    ("lax", lambda f, r: f(r.x, axis=1), "cumlogsumexp cummax cummin cumprod cumsum unstack"),
    ("lax", lambda f, r: f(r.x, 2), "approx_max_k approx_min_k integer_pow top_k"),
    ("lax", lambda f, r: f(r.x, axes=(1,)), "reduce_max reduce_min reduce_prod reduce_sum"),
    ("lax", lambda f, r: f(r.b, axes=(1,)), "reduce_and reduce_or"),
    ("lax", lambda f, r: f(r.x, W), "dot"),
]  # fmt: skip

# Functions that are called like no other.
CALLS = {
    "jnp": dict(
        append=lambda f, r: f(r.x, r.y, axis=-1),
        apply_along_axis=lambda f, r: f(jnp.cumsum, 1, r.x),
        apply_over_axes=lambda f, r: f(jnp.sum, r.cube, (1, 2)),
        astype=lambda f, r: f(r.x, jnp.int32),
        bincount=lambda f, r: f(r.label, length=4),
        broadcast_to=lambda f, r: f(r.x, (3, NUM_ROWS, 4)),
        choose=lambda f, r: f(r.i, [r.x, r.y, r.z, r.x], mode="clip"),
        clip=lambda f, r: f(r.x, 0.2, 0.8),
        compress=lambda f, r: f(np.array([True, False, True, True]), r.x, axis=1, size=3),
        cross=lambda f, r: f(r.x[:, :3], r.y[:, :3]),
        diag=lambda f, r: f(r.one),
        dsplit=lambda f, r: f(r.cube, 2),
        einsum=lambda f, r: f("bi,ij->bj", r.x, MATRIX),
        fill_diagonal=lambda f, r: f(r.x, 1.0, inplace=False),
        fliplr=lambda f, r: f(r.x),
        frompyfunc=lambda f, r: f(lambda a, b: a + b, 2, 1)(r.x, r.y),
        full_like=lambda f, r: f(r.x, 2.0),
        histogram2d=lambda f, r: f(r.one, r.two, bins=3, range=((0, 1), (0, 1))),
        histogramdd=lambda f, r: f(r.x[:, :2], bins=3, range=((0, 1), (0, 1))),
        hsplit=lambda f, r: f(r.x, 2),
        insert=lambda f, r: f(r.x, 1, 0.5, axis=1),
        interp=lambda f, r: f(r.x, W, W),
        ldexp=lambda f, r: f(r.x, r.i),
        lexsort=lambda f, r: f((r.x, r.y), axis=-1),
        matvec=lambda f, r: f(MATRIX.T, r.x),
        meshgrid=lambda f, r: f(r.one, W, indexing="ij"),
        outer=lambda f, r: f(r.one, W),
        packbits=lambda f, r: f(r.b, axis=-1),
        pad=lambda f, r: f(r.x, ((0, 0), (1, 1))),
        permute_dims=lambda f, r: f(r.cube, (0, 2, 1)),
        piecewise=lambda f, r: f(r.x, [r.b], [lambda v: v, lambda v: -v]),
        put_along_axis=lambda f, r: f(r.x, r.i[:, :1], 0.0, axis=-1, inplace=False),
        ravel_multi_index=lambda f, r: f((r.i, r.j), (4, 5), mode="clip"),
        reshape=lambda f, r: f(r.x, (NUM_ROWS, 2, 2)),
        rot90=lambda f, r: f(r.square, axes=(1, 2)),
        select=lambda f, r: f([r.b, r.c], [r.x, r.y], r.z),
        sort_complex=lambda f, r: f(r.complex),
        squeeze=lambda f, r: f(r.cube[:, :1], 1),
        take_along_axis=lambda f, r: f(r.x, r.i, axis=-1),
        tensordot=lambda f, r: f(r.x, MATRIX, 1),
        tile=lambda f, r: f(r.x, (1, 2)),
        top_k=lambda f, r: f(r.x, 2),
        transpose=lambda f, r: f(r.cube, (0, 2, 1)),
        unpackbits=lambda f, r: f(r.bits, axis=-1),
        unravel_index=lambda f, r: f(r.i, (4, 5)),
        vander=lambda f, r: f(r.one, 3),
        vecmat=lambda f, r: f(r.x, MATRIX),
        vectorize=lambda f, r: f(lambda v: v.sum(), signature="(n)->()")(r.x),
        where=lambda f, r: f(r.b, r.x, r.y),
    ),
    "nn": dict(
        dot_product_attention=lambda f, r: f(r.heads, r.heads, r.heads),
        one_hot=lambda f, r: f(r.label, 4),
        scaled_dot_general=lambda f, r: f(
            jnp.tile(r.square, (1, 8, 8)),
            jnp.tile(r.square, (1, 8, 8)),
            PAIRS,
            configs=[nn.get_scaled_dot_general_config("mxfp8")] * 3,
        ),
        scaled_matmul=lambda f, r: f(r.cube, r.cube, r.cube[:, :, :2], r.cube[:, :, :2]),
    ),
    "lax": dict(
        associative_scan=lambda f, r: f(jnp.add, r.x, axis=1),
        batch_matmul=lambda f, r: f(r.square, r.square),
        betainc=lambda f, r: f(r.x, r.y, r.z),
        bitcast_convert_type=lambda f, r: f(r.x, np.int32),
        broadcast=lambda f, r: f(r.x, (3,)),
        broadcast_in_dim=lambda f, r: f(r.x, (NUM_ROWS, 4, 2), (0, 1)),
        broadcast_like=lambda f, r: f(r.one[:, None], r.x),
        broadcast_to_rank=lambda f, r: f(r.x, 3),
        clamp=lambda f, r: f(0.2, r.x, 0.8),
        collapse=lambda f, r: f(r.cube, 1),
        composite=lambda f, r: f(lambda v: v * 2, "test.double")(r.x),
        concatenate=lambda f, r: f([r.x, r.y], 1),
        conv=lambda f, r: f(r.image, np.ones((5, 6, 2, 2), np.float32), (1, 1), "SAME"),
        conv_general_dilated=lambda f, r: f(
            r.image, np.ones((3, 3, 2, 5), np.float32), (1, 1), "SAME", dimension_numbers=NHWC
        ),
        conv_general_dilated_local=lambda f, r: f(
            r.image,
            np.ones((5, 5, 8, 3), np.float32),
            (1, 1),
            "VALID",
            (2, 2),
            dimension_numbers=NHWC,
        ),
        conv_general_dilated_patches=lambda f, r: f(
            r.image, (3, 3), (1, 1), "SAME", dimension_numbers=NHWC
        ),
        conv_transpose=lambda f, r: f(
            r.image, np.ones((3, 3, 2, 5), np.float32), (2, 2), "SAME", dimension_numbers=NHWC
        ),
        conv_with_general_padding=lambda f, r: f(
            r.image, np.ones((5, 6, 2, 2), np.float32), (1, 1), "SAME", None, None
        ),
        convert_element_type=lambda f, r: f(r.x, np.int32),
        dot_general=lambda f, r: f(r.x, MATRIX, (((1,), (0,)), ((), ()))),
        dynamic_index_in_dim=lambda f, r: f(r.x, 1, 1),
        dynamic_slice=lambda f, r: f(r.x, (0, 1), (NUM_ROWS, 2)),
        dynamic_slice_in_dim=lambda f, r: f(r.x, 1, 2, 1),
        dynamic_update_index_in_dim=lambda f, r: f(r.x, r.one, 1, 1),
        dynamic_update_slice=lambda f, r: f(r.x, r.y[:, :2], (0, 1)),
        dynamic_update_slice_in_dim=lambda f, r: f(r.x, r.y[:, :2], 1, 1),
        expand_dims=lambda f, r: f(r.x, (1,)),
        fft=lambda f, r: f(r.x, "rfft", (4,)),
        full_like=lambda f, r: f(r.x, 2.0),
        gather=lambda f, r: f(
            r.x, np.array([[1]]), lax.GatherDimensionNumbers((0,), (1,), (1,)), (NUM_ROWS, 1)
        ),
        index_in_dim=lambda f, r: f(r.x, 1, 1),
        index_take=lambda f, r: f(r.x, (np.array([1, 2]),), (1,)),
        pad=lambda f, r: f(r.x, 0.0, ((0, 0, 0), (1, 1, 0))),
        polynomial=lambda f, r: f(r.x, [1.0, 2.0]),
        reduce=lambda f, r: f(r.x, 0.0, lax.add, (1,)),
        reduce_precision=lambda f, r: f(r.x, 5, 7),
        reduce_window=lambda f, r: f(r.x, 0.0, lax.add, (1, 2), (1, 1), "SAME"),
        reduce_xor=lambda f, r: f(r.i, axes=(1,)),
        reshape=lambda f, r: f(r.x, (NUM_ROWS, 2, 2)),
        rev=lambda f, r: f(r.x, (1,)),
        scaled_dot=lambda f, r: f(
            r.cube,
            r.cube,
            dimension_numbers=PAIRS,
            lhs_scale=r.cube[..., :2],
            rhs_scale=r.cube[..., :2],
        ),
        scatter_apply=lambda f, r: f(
            r.x, np.array([1]), lambda v: v * 2, DIMS, update_shape=(NUM_ROWS,)
        ),
        select=lambda f, r: f(r.b, r.x, r.y),
        select_n=lambda f, r: f(r.b, r.x, r.y),
        slice=lambda f, r: f(r.x, (0, 1), (NUM_ROWS, 3)),
        slice_in_dim=lambda f, r: f(r.x, 0, 2, 1, 1),
        sort=lambda f, r: f(r.x),
        sort_key_val=lambda f, r: f(r.x, r.y),
        split=lambda f, r: f(r.x, (1, 3), axis=1),
        squeeze=lambda f, r: f(r.cube[:, :1], (1,)),
        stack=lambda f, r: f([r.x, r.y], 1),
        tile=lambda f, r: f(r.x, (1, 2)),
        transpose=lambda f, r: f(r.cube, (0, 2, 1)),
    ),
}
for _name in "scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub".split():
    CALLS["lax"][_name] = lambda f, r: f(r.x, np.array([1]), r.one, DIMS)
for _module, _how, _names in ALIKE:
    CALLS[_module] |= dict.fromkeys(_names.split(), _how)

# What is not called, and why.
REASONS = {
    "jnp": {
        "a type, or a question about types and shapes": """
            ComplexWarning broadcast_shapes can_cast character complexfloating dtype finfo flexible floating
            generic iinfo inexact integer isdtype isscalar issubdtype iterable ndarray number object_
            promote_types signedinteger ufunc unsignedinteger""",
        "64-bit, or 1-bit: a type that JAX's configuration or XLA's CPU compiler does not have": """
            cdouble complex128 complex_ double float64 float_ int1 int64 int_ uint uint1 uint64""",
        "makes an array of no rows": """
            arange bartlett blackman diag_indices empty eye frombuffer fromfile fromfunction fromiter
            fromstring full from_dlpack hamming hanning identity indices kaiser load mask_indices ones tri
            tril_indices triu_indices zeros""",
        "text, files, or what NumPy does on the host": """
            array_repr array_str get_printoptions printoptions save savez set_printoptions einsum_path""",
        "the number of results depends on the values: not in jax.jit, or with a size along the batch": """
            argwhere extract flatnonzero intersect1d nonzero setdiff1d setxor1d trim_zeros union1d unique
            unique_all unique_counts unique_inverse unique_values""",
        "works along the batch by its meaning, of one dim or flat": """
            convolve correlate diagflat ediff1d flipud place polyfit put resize vsplit vstack""",
        "coefficients of one polynomial, which has no rows": """
            poly polyadd polyder polydiv polyint polymul polysub roots""",
        "an array's dims say what is returned": "diag_indices_from tril_indices_from triu_indices_from ix_",
    },
    "nn": {
        "a choice of formats": "get_scaled_dot_general_config",
    },
    "lax": {
        "a type": """
            AccuracyMode ConvDimensionNumbers ConvGeneralDilatedDimensionNumbers DotAlgorithm
            DotAlgorithmPreset DotDimensionNumbers FftType GatherDimensionNumbers GatherScatterMode
            Precision PrecisionLike RaggedDotDimensionNumbers RandomAlgorithm RoundingMethod
            ScatterDimensionNumbers Tolerance dtype""",
        "shapes alone": """
            broadcast_shapes conv_dimension_numbers conv_general_permutations conv_general_shape_tuple
            conv_shape_tuple conv_transpose_shape_tuple padtype_to_pads reduce_window_shape_tuple
            shape_as_value""",
        "makes an array of no rows": "broadcasted_iota empty full iota rng_bit_generator rng_uniform",
        "over a mesh axis that a step names itself (test_axis_names.py)": """
            all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute precv psend
            pshuffle psum psum_scatter psum_scatter_start pswapaxes ragged_all_to_all""",
        "order of effects": "after_all create_token dce_sink",
        "takes functions: control flow, and what JAX builds of it, have tests of their own": """
            cond custom_linear_solve custom_root fori_loop map platform_dependent scan stage switch
            while_loop""",
        "groups of rows (test_row_orders.py)": "ragged_dot ragged_dot_general",
        "says where values lie (test_tensor_axes.py)": "with_sharding_constraint",
    },
}


# JAX has no derivative of these, for these arguments.
NO_DERIVATIVE = {
    "jnp": "nextafter spacing",
    "lax": """
        betainc composite igamma_grad_a nextafter polygamma random_gamma_grad scaled_dot scatter_apply
        scatter_mul zeta""",
    "nn": "scaled_matmul",
}


# XLA's compiler for CPUs refuses these, or ends the process.
NOT_COMPILED = {"jnp": "float6_e2m3fn float6_e3m2fn", "lax": "mulhi"}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def public_names(module):
    found = MODULES[module]
    names = {name for name in dir(found) if not name.startswith("_")}
    return {name for name in names if callable(getattr(found, name))}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_a_call_or_a_reason(module):
    reasons = [name for names in REASONS.get(module, {}).values() for name in names.split()]
    known = [*CALLS[module], *reasons]
    assert len(known) == len(set(known)), sorted(n for n in known if known.count(n) > 1)
    new = sorted(public_names(module) - set(known))
    assert not new, f"call {module}.{new} in ALIKE or CALLS, or say in REASONS why not"


def of_floats(values):
    return [x for x in jax.tree.leaves(values) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def called(module, name):
    """A function of `make_rows()`: what the name returns for them, and its derivative if it has one."""
    fn, how = getattr(MODULES[module], name), CALLS[module][name]

    def value(rows):
        found = jax.tree.leaves(how(fn, types.SimpleNamespace(**rows)))
        return [x for x in found if isinstance(x, jax.Array)]

    def value_and_derivative(rows):
        values = value(rows)
        if name in NO_DERIVATIVE.get(module, "").split() or not of_floats(values):
            return values
        floats = {key: rows[key] for key in how.__code__.co_names if key in rows}
        floats = {key: x for key, x in floats.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        out, pull = jax.vjp(lambda floats: of_floats(value(rows | floats)), floats)
        return values, pull([x / 2 for x in out])

    return value_and_derivative


def calls_of(module):
    """Names that this release has, and what is called."""
    return {n: called(module, n) for n in CALLS[module] if hasattr(MODULES[module], n)}


def movements(calls):
    """What an evaluation moves that makes these calls, by operation."""
    eval_step = jzero.shard_eval_step(
        lambda state, rows: [fn(rows) for fn in calls],
        mesh=jax.make_mesh((NUM_DEVICES,), ("data",)),
    )
    found = eval_step.describe(jnp.ones(()), jax.eval_shape(make_rows)).movements
    return {m.operation: f"{m.operation}: {m.reason}" for m in found}


@pytest.mark.slow(but=["nn", "lax"])
@pytest.mark.parametrize("module", MODULES)
def test_calls_move_no_rows(module):
    calls = calls_of(module)
    if movements([*calls.values()]):
        found = {name: movements([fn]) for name, fn in calls.items()}
        moved = {name: x for name, x in found.items() if x}
        assert not moved, "a rule is missing, or a reason"


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_calls_compute_what_one_device_does(module):
    def all_of(rows):
        return {
            name: fn(rows)
            for name, fn in calls_of(module).items()
            if name not in NOT_COMPILED.get(module, "").split()
        }

    rows = make_rows()
    eval_step = jzero.shard_eval_step(lambda state, rows: all_of(rows))
    actual, expected = eval_step(jnp.ones(()), rows), jax.jit(all_of)(rows)
    wrong = {}
    for name in expected:
        try:
            zoo.assert_trees_close(
                zoo.to_host(actual[name]), zoo.to_host(expected[name]), zoo.FP32, name
            )
        except AssertionError as error:
            wrong[name] = f"{error}"[-300:]
    assert not wrong
