"""Each primitive that kernels know computes what XLA computes, special values included, to the bit."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from host_updates import call, on_host, ulps
from jzero.offload.kernels._code_paths import KERNEL
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.kernels._kernel import LANES
from jzero.offload.kernels._ops import OPS
from jzero.offload.kernels._writer import TYPES

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
DTYPES = {"float": FLOATS, "signed": INTS[:3], "unsigned": INTS[3:], "bool": ("bool",)}
COMPARED = ("float", "signed", "unsigned", "bool")


class Case(NamedTuple):
    """A function that is one equation of the primitive, its number of operands, how exact it must be."""

    fn: Callable[..., Any]
    num_operands: int
    kinds: tuple[str, ...]
    ulps: int = 0


CASES = {
    "add": Case(lax.add, 2, ("float", "signed", "unsigned")),
    "sub": Case(lax.sub, 2, ("float", "signed", "unsigned")),
    "mul": Case(lax.mul, 2, ("float", "signed", "unsigned")),
    "div": Case(lax.div, 2, ("float",)),
    "add_any": Case(lambda x, y: jax.vjp(lambda z: (z, z), x)[1]((x, y))[0], 2, ("float",)),
    "neg": Case(lax.neg, 1, ("float", "signed", "unsigned")),
    "abs": Case(lax.abs, 1, ("float", "signed")),
    "sign": Case(lax.sign, 1, ("float",)),
    "max": Case(lax.max, 2, ("float", "signed", "unsigned")),
    "min": Case(lax.min, 2, ("float", "signed", "unsigned")),
    "clamp": Case(lax.clamp, 3, ("float", "signed", "unsigned")),
    "square": Case(lax.square, 1, ("float", "signed", "unsigned")),
    "sqrt": Case(lax.sqrt, 1, ("float",)),
    "rsqrt": Case(lax.rsqrt, 1, ("float",), ulps=2),
    "cbrt": Case(lax.cbrt, 1, ("float",), ulps=8),
    "floor": Case(lax.floor, 1, ("float",)),
    "ceil": Case(lax.ceil, 1, ("float",)),
    "is_finite": Case(lax.is_finite, 1, ("float",)),
    "exp": Case(lax.exp, 1, ("float",), ulps=2),
    "exp2": Case(lax.exp2, 1, ("float",), ulps=2),
    "expm1": Case(lax.expm1, 1, ("float",), ulps=4),
    "log": Case(lax.log, 1, ("float",), ulps=2),
    "log1p": Case(lax.log1p, 1, ("float",), ulps=4),
    "tanh": Case(lax.tanh, 1, ("float",), ulps=8),
    "pow": Case(lax.pow, 2, ("float",), ulps=8),
    "integer_pow": Case(lambda x: lax.integer_pow(x, 5), 1, ("float",), ulps=2),
    "and": Case(lax.bitwise_and, 2, ("signed", "unsigned", "bool")),
    "or": Case(lax.bitwise_or, 2, ("signed", "unsigned", "bool")),
    "xor": Case(lax.bitwise_xor, 2, ("signed", "unsigned", "bool")),
    "not": Case(lax.bitwise_not, 1, ("signed", "unsigned", "bool")),
    **{
        name: Case(getattr(lax, name), 2, COMPARED) for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "select_n": Case(lambda x, y: lax.select_n(jnp.asarray(x > y), x, y), 2, COMPARED),
    "reshape": Case(lambda x: lax.reshape(x, (x.size // 2, 2)), 1, COMPARED),
    "squeeze": Case(lambda x: lax.squeeze(x[None], (0,)), 1, COMPARED),
    "broadcast_in_dim": Case(lambda x: lax.broadcast_in_dim(x, (1, x.size), (1,)), 1, COMPARED),
    "stop_gradient": Case(lax.stop_gradient, 1, ("float",)),
    "copy": Case(lambda x: jnp.array(x, copy=True), 1, COMPARED),
}

# The smallest normal float32; what is below it is zero, to XLA and to kernels.
TINY = float(np.finfo(np.float32).tiny)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -2.5, 1e-3, 7e4, np.inf, -np.inf, np.nan]
SPECIAL += [TINY, 3.4028235e38, 1e-40, -1e-45]


@functools.cache
def operands(dtype: str, count: int) -> list[np.ndarray]:
    """Every combination of some values, as arrays whose size no number of lanes divides."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        values = np.array([True, False])
    elif dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        values = np.array([0, 1, 2, 5, 100, info.min, info.max, info.max - 1])
    else:
        values = np.array(SPECIAL + list(rng.standard_normal(17 if count < 3 else 1)))
    with np.errstate(over="ignore"):
        values = values.astype(jnp.dtype(dtype))
    combined = [grid.ravel() for grid in np.meshgrid(*[values] * count)]
    return [np.append(x, x[: 2 - len(x) % 2]) for x in combined]


def assert_same(got: np.ndarray, want: np.ndarray, limit: float, signs: bool = True) -> None:
    if not jnp.issubdtype(got.dtype, jnp.floating):
        np.testing.assert_array_equal(got, want)
        return
    got, want = flushed(got), flushed(want)
    assert ulps(got, want) <= limit
    if limit == 0 and signs:
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x.astype(np.float64)) < TINY, np.copysign(x.dtype.type(0), x), x)


def run(fn: Callable[..., Any], args: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel computes, and what XLA computes."""
    update = HostUpdate(lambda state, inputs: ((), (fn(*inputs),)), (), args)
    assert [code_path.by for code_path in update.code_paths] == [KERNEL]
    (out,) = update.make_outputs()
    call(update, (), [on_host(x) for x in args], [out])
    compiled = jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})
    return out, np.asarray(compiled(*args))


ROWS = [
    (name, dtype) for name, case in CASES.items() for kind in case.kinds for dtype in DTYPES[kind]
]


@pytest.mark.slow(but=90)  # Each primitive, of one of its dtypes.
@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_primitive(name: str, dtype: str):
    case = CASES[name]
    args = operands(dtype, case.num_operands)
    if case.ulps:  # The functions of the C library differ in what they make of numbers below TINY.
        args = [flushed(x) for x in args]
    assert name in {eqn.primitive.name for eqn in jax.make_jaxpr(case.fn)(*args).eqns}
    # Which of two zeros is the larger one, XLA says otherwise for bfloat16 from release to release.
    assert_same(*run(case.fn, args), case.ulps, signs=name not in ("max", "min", "clamp"))


@pytest.mark.slow(but=17)
@pytest.mark.parametrize("new", [*FLOATS, *INTS, "bool"])
@pytest.mark.parametrize("old", [*FLOATS, *INTS, "bool"])
def test_conversion(old: str, new: str):
    assert_same(*run(lambda x: lax.convert_element_type(x, new), operands(old, 1)), 0)


def test_every_dtype_and_primitive_has_cases():
    assert set(TYPES) == {*FLOATS, *INTS, "bool"}
    assert {name for name, _ in OPS} == {*CASES, "convert_element_type"}


# What divides a leaf is often one number (a bias correction, a norm): its reciprocal is taken once.
DIVISORS = [3.0, -0.1, 1e-3, 12345.678, 2.0**-100, 2.0**100]
# The reciprocals of these are zero, infinite, not normal, or too near to that.
UNUSUAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, TINY, 3.4028235e38, 2.0**-101, 2.0**101]


@functools.cache
def dividends() -> np.ndarray:
    """Numbers of all sizes, the last of which are computed one by one and are those that come first."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(100 * LANES) * 10.0 ** rng.integers(-30, 30, 100 * LANES)
    numbers[: len(SPECIAL)] = SPECIAL
    return np.append(numbers, numbers[: LANES - 1]).astype(np.float32)


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("fn", [lax.div, lambda x, y: x / jnp.broadcast_to(y, x.shape)])
def test_division_by_one_number(fn: Callable[..., Any], divisor: float):
    """XLA, too, multiplies by the reciprocal, which is within an ULP and a half of the quotient."""
    x, y = dividends(), np.array(divisor, np.float32)
    got, want = run(fn, [x, y])
    assert_same(got, want, 0)
    np.testing.assert_array_equal(got[1 - LANES :], got[: LANES - 1])
    with np.errstate(all="ignore"):
        exact = flushed(x).astype(np.float64) / np.float64(y)
        normal = np.isfinite(exact) & (np.abs(exact) > 2 * TINY) & (np.abs(exact) < 1e38)
    unit = np.spacing(np.abs(exact[normal]).astype(np.float32))
    assert np.max(np.abs(got[normal] - exact[normal]) / unit) <= 1.5


@pytest.mark.parametrize("divisor", UNUSUAL)
def test_division_by_an_unusual_number(divisor: float):
    """The true quotient, where XLA's reciprocal of a large number is zero."""
    x, y = dividends(), np.array(divisor, np.float32)
    got, _ = run(lax.div, [x, y])
    with np.errstate(all="ignore"):
        assert_same(got, (flushed(x) / flushed(y)).astype(np.float32), 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_division_in_16_bits_is_rounded_once(dtype: str):
    x, y = operands(dtype, 2)[0], np.asarray(3, jnp.dtype(dtype))
    got, _ = run(lax.div, [x, y])
    with np.errstate(all="ignore"):
        want = (flushed(x).astype(np.float32) / np.float32(3)).astype(x.dtype)
    assert_same(got, want, 0)


def long_floats() -> np.ndarray:
    """float32 between, at and beside all numbers of 16 bits and their ties, NaNs of all kinds among them."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    return np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        np.float32
    )


@pytest.mark.slow
def test_rounding_to_bfloat16():
    """To the nearest, ties to even, as in numbers of so many bits; a NaN keeps its sign."""
    x = long_floats()
    got, want = run(lambda x: x.astype(jnp.bfloat16), [x])
    assert_same(got, want, 0)
    normal = np.isfinite(x) & (np.abs(x) >= TINY)
    np.testing.assert_array_equal(got[normal], x[normal].astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("fn", [lax.mul, lax.add, lambda x, y: lax.sqrt(x)])
def test_what_follows_from_nan_is_nan(fn: Callable[..., Any]):
    """Whatever its payload: rounding adds to the bits of a number, and would carry into the sign."""
    x = np.arange(2**16).astype(np.uint16).view(jnp.bfloat16)
    with np.errstate(invalid="ignore"):  # Among the operands, to NumPy.
        got, want = run(fn, [x, np.ones_like(x)])
        assert np.isnan(got[np.isnan(x)]).all()
        assert_same(got, want, 0)


@pytest.mark.parametrize("power", [-3, -1, 0, 1, 2, 7])
def test_integer_powers(power: int):
    assert_same(*run(lambda x: lax.integer_pow(x, power), operands("float32", 1)), 2)
