"""Values as codes of few bits: how near they come back, what a row of them takes, what is not finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.sharding.passes import _quantize


def there_and_back(x, codes):
    x = jnp.atleast_2d(x)
    row, y = _there_and_back(x, codes)
    scale_bytes = 8 if x.dtype == jnp.float64 else 4
    assert row.dtype == jnp.uint8
    assert row.shape == (len(x), codes.nbytes(x.shape[1], scale_bytes))
    return np.asarray(y)


@functools.partial(jax.jit, static_argnums=1)
def _there_and_back(x, codes):
    row = _quantize.quantize(x, codes)
    return row, _quantize.dequantize(row, x.shape[1], x.dtype, codes)


def steps(x, codes):
    """Of each element the distance between two codes of its block."""
    rows, n = x.shape
    blocks = np.pad(np.abs(x), ((0, 0), (0, -n % codes.size))).reshape(rows, -1, codes.size)
    return np.repeat(blocks.max(-1) / codes.largest, codes.size, axis=1)[:, :n]


@pytest.mark.parametrize("codes", [jzero.Blocks(jnp.int8), jzero.Blocks("int4", size=32)], ids=str)
@pytest.mark.parametrize("n", [1, 257])
def test_what_comes_back_is_within_half_a_step(codes, n):
    x = np.random.default_rng(n).normal(size=(4, n)) * np.array([[0], [1e-30], [1.0], [1e30]])
    y = there_and_back(x.astype(np.float32), codes)
    assert np.all(np.abs(y - x) <= 0.5001 * steps(x, codes))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64])
def test_every_float_keeps_its_dtype_and_its_range(dtype):
    with jax.enable_x64(True):
        most, least = jnp.finfo(dtype).max, jnp.finfo(dtype).tiny
        x = jnp.asarray([most, -most, most / 2, 0, least, -0.0], dtype)
        y = there_and_back(x, jzero.Blocks("int8"))
        assert y.dtype == dtype
        assert np.isfinite(y).all()
        assert y[0, 0] == most
        assert y[0, 1] == -most
        assert np.all(y[0, 3:] == 0)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_what_is_not_finite_comes_back_as_it_was_and_its_neighbours_stay_near(codes, rotate):
    codes = jzero.Blocks(codes, size=32, rotate=rotate)
    x = np.random.default_rng(0).normal(size=(1, 96)).astype(np.float32)
    known = x.copy()
    x[0, [3, 40]], x[0, 41], x[0, 42] = np.inf, -np.inf, np.nan
    y = there_and_back(x, codes)
    bad = ~np.isfinite(x)
    np.testing.assert_array_equal(y[bad], x[bad])
    known[bad] = 0
    near = steps(known, codes) * codes.largest / (codes.largest - 1)
    assert np.all(np.abs(y - known)[:, :64][~bad[:, :64]] <= 0.5001 * near[:, :64][~bad[:, :64]])


@pytest.mark.slow
def test_a_rotated_block_comes_back_and_large_elements_cost_their_neighbours_less():
    x = np.random.default_rng(1).normal(size=(1, 128)).astype(np.float32)
    x[0, 5] = 40
    plain, turned = (there_and_back(x, jzero.Blocks("int4", rotate=r)) for r in (False, True))
    rest = np.arange(128) != 5
    assert np.square(turned - x)[0, rest].mean() < 0.9 * np.square(plain - x)[0, rest].mean()
    assert np.abs(turned - x).max() < 40 / 7


def test_stochastic_codes_are_right_in_the_mean_and_the_same_for_the_same_values():
    codes = jzero.Blocks("int4", size=16, stochastic=True)
    x = np.full((1, 16 * 4000), 0.3, np.float32)
    x[0, ::16] = 7  # steps of 1
    y = there_and_back(x, codes)
    assert set(np.unique(y)) == {0, 1, 7}
    assert abs(np.delete(y[0], np.s_[::16]).mean() - 0.3) < 0.01
    np.testing.assert_array_equal(y, there_and_back(x, codes))
    down = there_and_back(x, jzero.Blocks("int4", size=16))
    assert not np.delete(down[0], np.s_[::16]).any()


def test_int4_takes_half_of_a_byte_and_int8_a_byte():
    for name, num, size, nbytes in (
        ("int8", 1024, 256, 1024 + 16), ("int4", 1024, 128, 512 + 32), ("int4", 129, 128, 65 + 8),
    ):  # fmt: skip
        assert jzero.Blocks(name, size=size).nbytes(num) == nbytes


def test_formats_of_all_options_read_back_what_they_wrote():
    names, sizes, flags = ("int8", "int4"), (16, 32), (False, True)
    x = np.random.default_rng(3).normal(size=(2, 77)).astype(np.float32)
    for name, size, rotate, stochastic in itertools.product(names, sizes, flags, flags):
        codes = jzero.Blocks(name, size, rotate, stochastic)
        worst = {"int8": 0.05, "int4": 1.2}[name] * (1 + stochastic) * (1 + rotate)
        assert np.abs(there_and_back(x, codes) - x).max() < worst, codes


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(dtype=jnp.float8_e4m3fn), r"dtype=.*float8_e4m3fn.*Quantized values have 8 or 4 bits."),
        (dict(dtype="int5"), r"dtype='int5'.*Use jnp.int8 or jnp.int4"),
        (dict(dtype="int8", size=100), r"size=100.*a power of two from 16 to 65536. Use size=256"),
        (dict(dtype="int4", size=8), r"size=8.*a power of two from 16 to 65536. Use size=128"),
        (dict(dtype="int4", size=True), r"size=True.*a power of two"),
        (dict(dtype="int8", rotate=1), r"rotate=1.*It is True or False. Drop it."),
        (dict(dtype="int8", stochastic=None), r"stochastic=None.*It is True or False."),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_are_refused(given, text):
    with pytest.raises(jzero.OptionError, match=f"(?s)Blocks: {text}"):
        jzero.Blocks(**given)
