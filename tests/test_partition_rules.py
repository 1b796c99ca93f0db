"""Each rule of the partitioner: an operation on one device's rows gives the rows of the operation on all.

A case is a small function, mostly one primitive, and the dims of its arguments as letters. For every letter
of every argument, the argument is dealt to four devices along that dim, in each layout; `partition` writes
the function for one device; what the four compute is put together and compared with the function of whole
arrays.
Padding is NaN, True, or a large number, so that whatever lets it through fails.
"""

import dataclasses
import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax, random
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jzero
import small
from jzero.ir._layout import Layout, replicated
from jzero.sharding.partition._movement import is_of_rows, movements
from jzero.sharding.partition._partition import DeviceInput, partition
from jzero.sharding.partition._writer import OUTPUT
from jzero.tracing import _jaxpr, _rewrite
from layout_blocks import held_by, positions

pytestmark = pytest.mark.usefixtures("float64")

DEVICES = 4
# Sizes of the dims that hold rows. Dealt out, the devices have two blocks each, and all dims are of one size;
# in a square they are too, so that rows of one dim can be exchanged for rows of another.
LAYOUTS = {"contiguous": (8, 4), "dealt": (8, 8), "padded": (5, 7), "few": (3, 2), "square": (8, 8)}
# Each place has one of the two with each of JAX's releases.
TWO_LAYOUTS = (("contiguous", "padded"), ("dealt", "few"), ("square", "padded"))
OTHERS = (3, 6, 4, 9, 5, 7)  # sizes of the rest, in their order


@dataclasses.dataclass(frozen=True)
class Case:
    """A function and its arguments.

    Attributes:
      fn: of arrays; and of a shape, if `to` is given.
      arguments: of each its dims, `i:ab`: a letter is a dim, `(ab)` one that is as long as two, a digit one
        of that size. Before the colon stands the dtype, see `DTYPES`.
      along: dims whose rows it gathers.
      padded: dims whose rows it gathers if they are padded.
      to: the dims of `fn`'s last argument.
    """

    fn: Callable[..., Any]
    arguments: str
    along: str = ""
    to: str | None = None
    padded: str = ""
    vmapped: bool = True  # False if its primitive cannot be vmapped


def ein(subscripts: str) -> Case:
    dims = subscripts.split("->")[0].replace(",", " ")
    return Case(functools.partial(jnp.einsum, subscripts), dims)


def reshape(before: str, after: str, padded: str = "", along: str = "") -> Case:
    return Case(jnp.reshape, before, along, after, padded)


def conv(lhs: Any, rhs: Any, feature_groups: int = 1, batch_groups: int = 1, **options: Any) -> Any:
    dims = lhs.ndim - 2
    options = {"window_strides": (1,) * dims, "padding": "SAME"} | options
    return lax.conv_general_dilated(
        lhs, rhs, feature_group_count=feature_groups, batch_group_count=batch_groups, **options
    )


def grouped(lhs: Any, rhs: Any) -> Any:
    return conv(lhs, rhs, feature_groups=lhs.shape[1] // rhs.shape[1])


def batch_grouped(lhs: Any, rhs: Any) -> Any:
    return conv(lhs, rhs, batch_groups=3)


def gradient(fn: Callable[..., Any], argnum: int) -> Callable[..., Any]:
    """The gradient of sum(sin(fn)), which is different for every element."""
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs))), argnum)


def pool(x: Any, init: float, op: Any) -> Any:
    return lax.reduce_window(x, init, op, (1, 2, 1), (1, 2, 1), "SAME")


def max_pool(x: Any) -> Any:
    return pool(x, -jnp.inf, lax.max)


def avg_pool(x: Any) -> Any:
    return pool(x, 0.0, lax.add) / pool(jnp.ones_like(x), 0.0, lax.add)


def definite(x: Any) -> Any:
    return regular(x @ x.mT)


def regular(x: Any) -> Any:
    return x + 9 * jnp.broadcast_to(jnp.eye(x.shape[-1]), x.shape)


def solve_triangular(a: Any, b: Any, **options: Any) -> Any:
    return lax.linalg.triangular_solve(regular(a), b, lower=True, **options)


def ragged(sizes: Any, x: Any, weights: Any) -> Any:
    return lax.ragged_dot(x, weights, sizes)


def first_extremes(x: Any) -> Any:
    return jnp.argmax(x, 0), jnp.argmin(x, 0)


def extremes(x: Any) -> Any:
    return jnp.max(x, 0), jnp.min(x, 0)


def extremes_in(dtype: Any, x: Any) -> Any:
    return [y.astype(x.dtype) for y in extremes(x.astype(dtype))]


def with_nans(x: Any) -> Any:
    return jnp.where(x > 0.4, jnp.nan, x)


def with_infinities(x: Any) -> Any:
    return jnp.where(x > 0.4, jnp.inf, jnp.where(x < -0.4, -jnp.inf, x))


def signed_zeros(x: Any) -> Any:
    return jnp.where(x > 0, 0.0, -0.0)


def get(mode: str, **options: Any) -> Callable[..., Any]:
    """Looks up rows, of which some are out of bounds."""
    return lambda x, i: x.at[2 * i - 3].get(mode=mode, wrap_negative_indices=False, **options)


def update(how: str, mode: str | None = None) -> Callable[..., Any]:
    """Updates rows, of which some are out of bounds and some the same."""

    def updated(x: Any, i: Any, y: Any) -> Any:
        return getattr(x.at[2 * i - 3], how)(y, mode=mode, wrap_negative_indices=False)

    return updated


def arange(x: Any) -> Any:
    return jnp.arange(x.shape[0])


def pairs(x: Any, i: Any) -> Any:
    """Several elements of each row, as DLRM picks those above a diagonal: rows are counted in one dim."""
    rows = jnp.tile(arange(x)[:, None], (1, i.shape[1])).reshape(1, -1)
    rows, columns = jnp.concatenate([rows, i.reshape(1, -1)])
    return x[rows, columns].reshape(*i.shape, *x.shape[2:])


def add_pairs(x: Any, i: Any, y: Any) -> Any:
    rows = jnp.repeat(arange(x), i.shape[1])
    return x.at[rows, i.reshape(-1)].add(y.reshape(-1, *y.shape[2:]))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def cross_entropy_by_rows(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(logits)[arange(logits), labels])


def layer_norm(x: Any, scale: Any) -> Any:
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale[None, None]


def batch_norm(x: Any) -> Any:
    mean, var = jnp.mean(x, (0, 1), keepdims=True), jnp.var(x, (0, 1), keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5)


def contrastive(z: Any) -> Any:
    return cross_entropy(jnp.einsum("id,jd->ij", z, z), arange(z))


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def noise(draw: Callable[..., Any]) -> Callable[..., Any]:
    """What one key draws for a whole array."""
    return lambda x, key: x + draw(key, x.shape)


def draws(draw: Callable[..., Any]) -> Callable[..., Any]:
    """What each row's own key draws."""
    return jax.vmap(draw)


def bits(dtype: Any) -> Callable[..., Any]:
    return lambda x, key: (x > 0).astype(dtype) + random.bits(key, x.shape, dtype)


def key_bits(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: random.key_data(jax.vmap(fn)(*xs))


ELEMENTWISE = {
    "exp": Case(jnp.exp, "abc"),
    "log2": Case(jnp.log2, "+:ab"),
    "min, sqrt": Case(lambda x, y: (lax.min(x, y), lax.sqrt(y)), "ab +:ab"),
    "mul_p, dims of size 1": Case(lambda x, y: lax.mul_p.bind(x, y), "a1c abc"),
    "where": Case(jnp.where, "?:abc abc abc"),
    "select_n, one for all": Case(lax.select_n, "?: ab ab"),
    "clamp": Case(lax.clamp, "ab ab ab"),
    "int8 and back": Case(lambda x: (50 * x).astype(jnp.int8).astype(jnp.float64), "ab"),
    "bitcast": Case(lambda x: lax.bitcast_convert_type(x, jnp.uint64), "ab"),
    "bitcast to narrower": Case(lambda x: lax.bitcast_convert_type(x, jnp.uint32), "ab"),
    "complex": Case(lambda x, y: jnp.conj(lax.complex(x, y) * 2j) / (1 + x), "ab ab"),
    "real, imag": Case(lambda x: (jnp.real(x), jnp.imag(x), jnp.abs(x)), "c:ab"),
    "population_count": Case(lambda x: (lax.population_count(x), lax.clz(x)), "u:ab"),
    "igamma": Case(jsp.special.gammainc, "+:ab +:ab"),
    "igammac": Case(jsp.special.gammaincc, "+:ab +:ab"),
    "betainc": Case(jsp.special.betainc, "+:ab +:ab +:ab"),
    "zeta": Case(lambda x, y: jsp.special.zeta(x + 2, y), "+:ab +:ab"),
    "name": Case(lambda x: checkpoint_name(x, "x"), "ab"),
    "device_put": Case(lambda x: jax.device_put(x), "ab"),
}
SHAPES = {
    "merge two first": reshape("abc", "(ab)c"),
    "merge all": reshape("abc", "(abc)"),
    "split in three": reshape("(abc)", "abc", "ab"),
    "merge and split": reshape("(ab)c", "a(bc)", "a"),
    "dims of size 1": reshape("1ab", "a1b1"),
    "reshape, half a dim": reshape("2a3", "a6", along="a"),
    "squeeze": Case(lambda x: jnp.squeeze(x, (0, 2)), "1a1b"),
    "transpose": Case(lambda x: jnp.transpose(x, (2, 0, 1)), "abc"),
    "broadcast_to": Case(jnp.broadcast_to, "1ab", to="dab"),
    "broadcast a size-1 dim": Case(jnp.broadcast_to, "a1c", to="abc"),
    "broadcast and merge": Case(
        lambda x, y, shape: y + jnp.broadcast_to(x[:, None], y.shape).reshape(y.shape),
        "ac abc",
        to="a",
    ),
    "tile": Case(lambda x: jnp.tile(x, (1, 2)), "ab", "b"),
    "stack": Case(lambda x, y: jnp.stack([x, y], 1), "ab ab"),
    "unstack": Case(lambda x: jnp.unstack(x, axis=1), "a2b"),
    "concatenate": Case(lambda x, y: jnp.concatenate([x, y], 1), "ab ab"),
    "concatenate and slice": Case(
        lambda x, y: (lambda z: (z[: len(x)], z[len(x) :]))(jnp.concatenate([x, y])),
        "ab ab",
    ),
    "concatenate and split": Case(lambda x, y: jnp.split(jnp.concatenate([x, y, x]), 3), "ab ab"),
    "slice": Case(lambda x: x[:, 1:], "abc", "b"),
    "slice with strides": Case(lambda x: x[:, ::2], "abc", "b"),
    "rev": Case(lambda x: jnp.flip(x, 1), "abc", "b"),
    "pad": Case(lambda x: lax.pad(x, jnp.pi, [(1, 2, 0), (0, 0, 0), (-1, 0, 1)]), "abc", "ac"),
    "dynamic_slice": Case(lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), "abc i:", "b"),
    "dynamic_update_slice": Case(
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1), "abc a2c i:", "b"
    ),
    "one_hot": Case(lambda i: jax.nn.one_hot(i, 5), "i:ab"),
    "tril": Case(jnp.tril, "abc"),
    "diagonal": Case(jnp.diagonal, "aab", "a"),
    "rows along another dim": Case(lambda x, y: jnp.exp(y) * jnp.tanh(x)[None], "b ab"),
    "differences of all pairs": Case(lambda x: jnp.abs(x[:, None] - x[None]), "a", "a"),
}
REDUCTIONS = {
    "sum": Case(lambda x: (jnp.sum(x, 1), jnp.sum(x, (0, 2)), jnp.sum(x)), "abc"),
    "min": Case(lambda x: (jnp.min(x, 1), jnp.min(x)), "abc"),
    "max of integers": Case(lambda x: (jnp.max(x, 0), jnp.min(x, 0), jnp.sum(x, 0)), "i:ab"),
    "prod": Case(lambda x: jnp.prod(x, 1), "abc", "b"),
    "and, or": Case(lambda x: (jnp.all(x, 0), jnp.any(x, 0), jnp.sum(x, 0)), "?:ab"),
    "xor": Case(lambda x: lax.reduce_xor(x, (0,)), "i:ab", "a"),
    "reduce": Case(
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda s, t: (s[0] + t[0], s[1] * t[1]), (1,)),
        "abc abc",
        "b",
    ),
    "argmax, argmin": Case(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1)), "abc", "b"),
    "argmax of ties": Case(lambda x: first_extremes(jnp.round(x)), "ab", "a"),
    "argmax with NaN": Case(lambda x: first_extremes(with_nans(x)), "ab", "a"),
    "argmax of one dim": Case(lambda x: lax.argmax(x, 0, np.uint8), "a", "a"),
    "max with NaN": Case(lambda x: extremes(with_nans(x)), "ab"),
    "max of float8": Case(lambda x: extremes_in(jnp.float8_e4m3fn, with_nans(x)), "ab"),
    "sum of what waits": Case(lambda x: x + jnp.sum(3 * jnp.eye(1024), 0)[: len(x)], "a"),
    "logsumexp": Case(lambda x: (jax.nn.logsumexp(x, 0), jax.nn.softmax(x, 0)), "ab"),
    "variance": Case(lambda x: (jnp.var(x, 0), jnp.std(x)), "ab"),
    "cumsum": Case(lambda x: jnp.cumsum(x, 1), "abc", "b"),
    "cumsum, reversed": Case(lambda x: lax.cumsum(x, 1, reverse=True), "abc", "b"),
    "cumprod": Case(lambda x: lax.cumprod(x, 1), "abc", "b"),
    "cummax, cummin": Case(lambda x: (lax.cummax(x, 1), lax.cummin(x, 1)), "abc", "b"),
    "cumlogsumexp": Case(lambda x: lax.cumlogsumexp(x, 1), "abc", "b"),
    "associative_scan": Case(lambda x: lax.associative_scan(jnp.add, x, axis=1), "btc", "t"),
    "sort": Case(lambda x: jnp.sort(x, 1), "abc", "b"),
    "sort of two": Case(lambda i, x: lax.sort((i, x), dimension=1, num_keys=2), "i:ab ab", "b"),
    "argsort": Case(lambda x: jnp.argsort(x, 0), "ab", "a"),
    "top_k": Case(lambda x: lax.top_k(x, 2), "ab", "b"),
    "top_k of ties": Case(lambda x: lax.top_k(jnp.round(x), 3), "a", "a"),
    "top_k with NaN": Case(lambda x: lax.top_k(with_nans(x), 3), "a", "a"),
    "top_k of the first dim": Case(lambda x: lax.top_k(x, 2, axis=0), "ab", "a"),
    "approx_max_k": Case(lambda x: lax.approx_max_k(x, 2), "ab", "b"),
}
PRODUCTS = {
    "matrix product": ein("ij,jk->ik"),
    "sum over rows": ein("bi,bj->ij"),
    "product with itself": Case(lambda x: x @ x.T, "ab", "a"),
    "ragged_dot": Case(ragged, "i:g mk gkn", "mg", vmapped=False),
    "ragged_dot, to the rows": Case(gradient(ragged, 1), "i:g mk gkn", "mg", vmapped=False),
    "ragged_dot, to the weights": Case(gradient(ragged, 2), "i:g mk gkn", "mgkn", vmapped=False),
    "conv": Case(conv, "niw oik", "wk"),
    "conv, strides and padding": Case(
        lambda x, k: conv(
            x, k, window_strides=(2,), padding=[(2, 1)], lhs_dilation=(2,), rhs_dilation=(2,)
        ),
        "niw oi3",
        "w",
    ),
    "conv 2d, channels last": Case(
        lambda x, k: conv(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC")), "nhwi 33io", "hw"
    ),
    "conv, to the kernel": Case(gradient(conv, 1), "niw oi3", "w"),
    "grouped conv": Case(grouped, "n(gi)w (go)i3", "gowi"),
    "grouped conv, to the kernel": Case(gradient(grouped, 1), "n(gi)w (go)i3", "gowi"),
    "depthwise conv, to the kernel": Case(gradient(grouped, 1), "ngw g13", "gw"),
    "batch groups": Case(batch_grouped, "(3n)iw (3o)i3", "now"),
    "many batch groups": Case(
        lambda x, k: conv(x, k, batch_groups=k.shape[0]), "(on)iw oi3", "onw"
    ),
    "conv of each example": Case(jax.vmap(conv, (0, None)), "bniw oi3", "w", padded="n"),
    "conv of each with its kernel": Case(jax.vmap(conv), "bniw boi3", "biow"),
    "conv, to the kernel of each": Case(
        jax.vmap(gradient(lambda x, k: conv(x[None], k), 1), (0, None)), "biw oi3", "bow"
    ),
}
LOOK_UPS = {
    "embedding's gradient": Case(gradient(lambda x, i: x[i], 0), "vd i:bt", "v"),
    "two indices": Case(lambda x, i, j: x[i, j], "uvd i:b i:b", "uv"),
    "take_along_axis": Case(lambda x, i: jnp.take_along_axis(x, i, 1), "bvd i:bkd", "v"),
    "take_along_axis's gradient": Case(
        gradient(lambda x, i: jnp.take_along_axis(x, i, 1), 0), "bvd i:bkd", "v"
    ),
    "own row": Case(lambda x, i: x[arange(x), i], "bv i:b", "v"),
    "own row's gradient": Case(gradient(lambda x, i: x[arange(x), i], 0), "bv i:b", "v"),
    "own row, each repeated": Case(pairs, "bv i:bk", "v"),
    "own row, each repeated, gradient": Case(gradient(pairs, 0), "bv i:bk", "v"),
    "own row of windows, each repeated": Case(pairs, "bvd i:bk", "v"),
    "add to own row, each repeated": Case(add_pairs, "bvd i:bk bkd"),
    "own row, vmap": Case(jax.vmap(lambda x, i: x[i]), "bvd i:b", "v"),
    "add to own row": Case(lambda x, i, y: x.at[arange(x), i].add(y), "bv i:b b"),
    "maximum with own row": Case(lambda x, i, y: x.at[arange(x), i].max(y), "bv i:b b"),
    "rows of others": Case(lambda x, i: x[i], "vd i:2", "v"),
    "rows of others, two indices": Case(lambda x, i, j: x[i, j], "uvd i:2 i:2", "uv"),
    "rows of others, integers": Case(lambda x, i: x[i], "i:vd i:2", "v"),
    "rows of others, NaN": Case(lambda x, i: with_nans(x)[i], "vd i:2", "v"),
    "rows of others, zeros": Case(lambda x, i: 1 / signed_zeros(x)[i], "vd i:2", "v"),
    "rows of others, narrow indices": Case(lambda x, i: x[i.astype(jnp.uint8)], "vd i:2", "v"),
    "rows of others, filled": Case(get("fill"), "vd i:2", "v"),
    "rows of others, clipped": Case(get("clip"), "vd i:2", "v"),
    "rows of others, keys": Case(lambda x, i: random.key_data(x[i]), "k:v i:2", "v"),
    "rows of others, gradient": Case(gradient(lambda x, i: x[i], 0), "vd i:2", "v"),
    "rows of others, then a running sum": Case(
        lambda x, i: jnp.cumsum(x[i], 0) + x[i][::-1], "vd i:8", "v"
    ),
    "rows of others, then the largest": Case(
        lambda x, i: (jnp.argmax(x[i], 0), lax.top_k(x[i], 2), jnp.split(x[i], 2)), "v i:8", "v"
    ),
    "rows of others, in parts": Case(
        lambda x, i: jnp.tanh(x[i].reshape(2, 8, -1)).sum(1), "vd i:(28)", "v"
    ),
    "rows of others by a matrix": Case(lambda x, i: jnp.sin(x[i]).sum((1, 2)), "vd i:28", "v"),
    "diagonal by take_along_axis": Case(
        lambda x: jnp.take_along_axis(x, arange(x)[:, None], 1), "aa", "a"
    ),
    "add to rows of others": Case(update("add"), "vd i:2 2d"),
    "multiply rows of others": Case(update("multiply"), "vd i:2 2d"),
    "add to elements of others": Case(lambda x, i, j, y: x.at[i, j].add(y), "uv i:2 i:2 2"),
    "add to zeros": Case(
        lambda x, i, y: x + jnp.zeros_like(x).at[2 * i - 3].add(y, mode="drop"), "vd i:2 2d"
    ),
    "scatter-add": Case(lambda x, i, y: x.at[i].add(y), "vd i:b bd"),
    "scatter-sub": Case(lambda x, i, y: x.at[i].subtract(y), "vd i:b bd"),
    "scatter-max": Case(lambda x, i, y: x.at[i].max(y), "vd i:b bd"),
    "scatter-min": Case(lambda x, i, y: x.at[i].min(y), "vd i:b bd"),
    "scatter-mul": Case(lambda x, i, y: x.at[i].multiply(y), "vd i:b bd", "b"),
    "scatter": Case(lambda x, i, y: x.at[i].set(y), "vd i:b bd", "b"),
    "scatter into columns": Case(lambda x, i, y: x.at[:, i].add(y), "avd i:b abd"),
    "dynamic_slice, vmap": Case(
        jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 2)), "bvd i:b", "v"
    ),
    "dynamic_update_slice, vmap": Case(
        jax.vmap(lambda x, i, y: lax.dynamic_update_slice_in_dim(x, y, i, 0)), "bvd i:b b2d", "v"
    ),
    "scatter, vmap": Case(jax.vmap(lambda x, i, y: x.at[i].set(y)), "bvd i:bk bkd", "k"),
    "searchsorted": Case(
        lambda x, y: jnp.searchsorted(jnp.sort(x), y, method="compare_all"), "a b", "a"
    ),
}
WINDOWS = {
    "max pool": Case(max_pool, "bwc", "w"),
    "max pool's gradient": Case(gradient(max_pool, 0), "bwc", "w"),
    "average pool's gradient": Case(gradient(avg_pool, 0), "bwc", "w"),
    "min pool": Case(lambda x: pool(x, jnp.inf, lax.min), "bwc", "w"),
    "window of products": Case(lambda x: pool(x, 1.0, lax.mul), "bwc", "w"),
    "max pool's tangent": Case(lambda x, y: jax.jvp(max_pool, (x,), (y,))[1], "bwc bwc", "w"),
}
LINEAR_ALGEBRA = {
    "rfft": Case(lambda x: jnp.fft.rfft(x, axis=-1), "abc", "c"),
    "irfft": Case(lambda x: jnp.fft.irfft(x, 6), "c:ab", "b"),
    "fft of the first dim": Case(lambda x: jnp.fft.fft(x, axis=0), "ab", "a"),
    "cholesky": Case(lambda x: jnp.linalg.cholesky(definite(x)), "bnn", "n"),
    "triangular_solve": Case(functools.partial(solve_triangular, left_side=True), "bnn bnk", "n"),
    "eigh": Case(lambda x: jnp.linalg.eigh(definite(x)), "bnn", "n"),
    "eig": Case(lambda x: jnp.linalg.eigvals(definite(x)), "bnn", "n"),
    "qr": Case(jnp.linalg.qr, "bmn", "mn"),
    "svd": Case(lambda x: jnp.linalg.svd(x, full_matrices=False), "bmn", "mn"),
    "lu": Case(lax.linalg.lu, "bmn", "mn"),
    "solve": Case(lambda x, y: jnp.linalg.solve(regular(x), y), "bnn bnk", "n"),
    "solve for the batch": Case(lambda x, y: jnp.linalg.solve(regular(x), y), "nn nb", "n"),
    "slogdet": Case(lambda x: jnp.linalg.slogdet(regular(x)), "bnn", "n"),
    "tridiagonal_solve": Case(
        lambda x, y: lax.linalg.tridiagonal_solve(x, 9 + x, x, y), "bn bnk", "n"
    ),
}
RANDOM = {
    "bits of 8": Case(bits(jnp.uint8), "abc k:", vmapped=False),
    "bits of 32": Case(bits(jnp.uint32), "abc k:", vmapped=False),
    "normal": Case(noise(random.normal), "ab k:", vmapped=False),
    "uniform, merged": Case(
        lambda x, key: x + random.uniform(key, (x.size,)).reshape(x.shape), "ab k:", vmapped=False
    ),
    "randint": Case(
        noise(lambda key, shape: random.randint(key, shape, 0, 7)), "ab k:", vmapped=False
    ),
    "permutation": Case(lambda x, key: random.permutation(key, x), "ab k:", "a"),
    "split of one key": Case(
        lambda x, key: x + jax.vmap(random.normal)(random.split(key, x.shape[0]))[:, None],
        "ab k:",
        vmapped=False,
    ),
    "seeds": Case(key_bits(random.key), "i:b"),
    "fold_in": Case(key_bits(random.fold_in), "k:b i:b"),
    "fold_in of one key": Case(
        lambda i, key: random.key_data(jax.vmap(lambda j: random.fold_in(key, j))(i)), "i:b k:"
    ),
    "clone": Case(key_bits(random.clone), "k:b"),
    "raw keys": Case(jax.vmap(lambda k: random.bits(random.wrap_key_data(k), (3,))), "u:b2"),
    "bits by rows": Case(draws(lambda k: random.bits(k, (3, 2))), "k:b"),
    "bernoulli by rows": Case(draws(random.bernoulli), "k:b"),
    "permutation by rows": Case(jax.vmap(random.permutation), "k:b bt", "t"),
}
FUNCTIONS = {
    "cross entropy's gradient": Case(jax.grad(cross_entropy), "bv i:b"),
    "cross entropy's gradient, own rows": Case(jax.grad(cross_entropy_by_rows), "bv i:b"),
    "layer norm, to the scale": Case(gradient(layer_norm, 1), "btd d"),
    "batch norm's gradient": Case(gradient(batch_norm, 0), "btd"),
    "contrastive": Case(contrastive, "bd", "b"),
    "attention's gradient": Case(gradient(attention, 1), "bqhd bkhd bkhd"),
}
CASES = (
    ELEMENTWISE | SHAPES | REDUCTIONS | PRODUCTS | LOOK_UPS | WINDOWS | LINEAR_ALGEBRA | RANDOM | FUNCTIONS
)  # fmt: skip


# -- arguments ------------------------------------------------------------------------------------------

Dims = list[str]  # of one argument; each a letter, several, or a number
DTYPES = {"f": float, "+": float, "c": complex, "i": np.int32, "u": np.uint32, "?": bool, "k": None}


def parsed(spec: str) -> tuple[str, Dims]:
    dtype, _, dims = spec.rpartition(":")
    return dtype or "f", [d.strip("()") for d in re.findall(r"\(\w+\)|\w", dims)]


def length(dim: str, sizes: dict[str, int]) -> int:
    return math.prod(int(c) if c.isdigit() else sizes[c] for c in dim)


def drawn(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if dtype == "k":
        return random.wrap_key_data(
            jnp.asarray(rng.integers(2**32, size=(*shape, 2), dtype=np.uint32))
        )
    if dtype in "iu":
        return rng.integers(2**31 if dtype == "u" else 6, size=shape).astype(DTYPES[dtype])
    x = rng.uniform(0.1, 1, shape) if dtype == "+" else rng.normal(size=shape)
    return x > 0 if dtype == "?" else x + 1j * rng.normal(size=shape) if dtype == "c" else x


# What padding holds, by the kind of dtype.
GARBAGE: dict[str, Any] = {"f": np.nan, "c": np.nan, "b": True, "i": 1_000_003, "u": 1_000_003}


MESH = {"data": DEVICES}


def dealt(x: Any, layout: Layout) -> Any:
    """`x` as each device has it, stacked."""
    if not isinstance(x, np.ndarray):  # keys, which are wrapped words
        words = np.asarray(random.key_data(x))
        more = replicated(words.shape[x.ndim :], MESH).dims
        words = dealt(words, dataclasses.replace(layout, dims=(*layout.dims, *more)))
        return random.wrap_key_data(jnp.asarray(words))
    padding = GARBAGE[x.dtype.kind]
    return np.stack([held_by(layout, x, {"data": i}, padding) for i in range(DEVICES)])


def joined(parts: np.ndarray, layout: Layout) -> np.ndarray:
    """What devices have, put together."""
    whole = np.zeros(layout.shape, parts.dtype)
    for i, part in enumerate(parts):
        own = positions(layout, {"data": i})
        whole[np.ix_(*(at[at >= 0] for at in own))] = part[np.ix_(*(at >= 0 for at in own))]
    return whole


@dataclasses.dataclass(frozen=True)
class Place:
    """A letter of an argument's dim, along which the argument is dealt to the devices."""

    argument: int
    dim: int
    letter: str


def places_of(case: Case) -> list[Place]:
    return [
        Place(i, d, letter)
        for i, spec in enumerate(case.arguments.split())
        for d, dim in enumerate(parsed(spec)[1])
        for letter in dim
        if letter.isalpha()
    ]


def sizes_of(case: Case, letters: list[str], layout: str) -> dict[str, int]:
    """How long every dim is if these hold rows."""
    everything = sorted(
        {c for c in re.sub(r".:", "", case.arguments) + (case.to or "") if c.isalpha()}
    )
    if layout in ("dealt", "square"):
        return dict.fromkeys(everything, 8)
    own = dict(zip(letters, LAYOUTS[layout], strict=False))
    rest = iter([size for size in OTHERS if size not in own.values()])
    return {letter: own[letter] if letter in own else next(rest) for letter in everything}


def blocks_at(place: Place, dim: str, sizes: dict[str, int], layout: str) -> int:
    """In how many blocks of the argument's dim the devices have rows of the letter."""
    return length(dim.split(place.letter, 1)[0], sizes) * (2 if layout == "dealt" else 1)


# -- one device -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Configuration:
    """A case whose arguments are dealt to the devices along `places`."""

    case: Case
    places: tuple[Place, ...]
    layout: str

    def __post_init__(self) -> None:
        letters = list(dict.fromkeys(place.letter for place in self.places))
        sizes = sizes_of(self.case, letters, self.layout)
        specs = [parsed(spec) for spec in self.case.arguments.split()]
        rng = np.random.default_rng(zlib.crc32(repr(sizes).encode()))
        self.arguments = [
            drawn(dtype, tuple(length(d, sizes) for d in dims), rng) for dtype, dims in specs
        ]
        self.layouts: list[Layout] = [replicated(x.shape, MESH) for x in self.arguments]
        self.rows, self.can_be = [False] * len(specs), True
        for place in self.places:
            k, whole = place.argument, self.layouts[place.argument]
            outer = blocks_at(place, specs[k][1][place.dim], sizes, self.layout)
            # Padding stands behind the last block, of which there is but one.
            if outer > 1 and whole.shape[place.dim] % (outer * DEVICES):
                self.can_be = False
                return
            self.layouts[k] = whole.cut(place.dim, "data", outer)
            self.rows[k] = True
        shape = (
            []
            if self.case.to is None
            else [tuple(length(d, sizes) for d in parsed(self.case.to)[1])]
        )
        self.whole = lambda *xs: jax.tree.leaves(self.case.fn(*xs, *shape))
        traced = _jaxpr.trace_here(self.whole, *self.arguments)
        flat, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
        ins = [
            DeviceInput(layout, frozenset(MESH if is_rows else ()))
            for layout, is_rows in zip(self.layouts, self.rows, strict=True)
        ]
        outs = [None] * len(flat.outvars)
        self.local = partition(flat, consts, MESH, ins, outs, keeps_padding=True)
        moves = [m for m in self.local.moves if is_of_rows(m) and m.operation != OUTPUT]
        self.moves = [*map(str, movements(moves))]

    @property
    def is_padded(self) -> bool:
        return self.layout in ("padded", "few")

    def inputs(self) -> list[Any]:
        each = zip(self.arguments, self.layouts, self.rows, strict=True)
        return [dealt(x, layout) if is_rows else x for x, layout, is_rows in each]

    def on_all(self, *inputs: Any) -> list[Any]:
        """What each device returns, stacked."""
        axes = [0 if is_rows else None for is_rows in self.rows]
        run = functools.partial(evaluated, self.local)
        if not self.case.vmapped:
            mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], "data")
            specs = tuple(P() if axis is None else P("data") for axis in axes)

            def on_each(*xs):
                own = [x if axis is None else x[0] for x, axis in zip(xs, axes, strict=True)]
                return [out[None] for out in run(*own)]

            return jax.shard_map(
                on_each, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False
            )(*inputs)
        return jax.vmap(run, axes, axis_name="data", axis_size=DEVICES)(*inputs)

    def check(self, expected: list[Any], parts: list[Any]) -> None:
        for want, part, layout in zip(expected, parts, self.local.outs, strict=True):
            got = np.asarray(part)
            if layout.axes:
                got = joined(got, layout)
            else:
                for other in got[1:]:
                    np.testing.assert_array_equal(other, got[0], "not the same on all devices")
                got = got[0]
            assert got.dtype == want.dtype
            if got.dtype in (np.float64, np.complex128):
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=str(self))
            else:
                np.testing.assert_array_equal(got, want, str(self))

    def __str__(self) -> str:
        given, made = (", ".join(map(str, x)) for x in (self.layouts, self.local.outs))
        return f"{self.layout} {self.places}: {given} -> {made}, {self.moves}"


def evaluated(local: Any, *args: Any) -> list[Any]:
    return _jaxpr.evaluate(local.jaxpr, [*map(_jaxpr.constant, local.consts)], *args)


def check_all(configurations: list[Configuration]) -> None:
    """All in one program: compiling many takes longer."""
    inputs = [c.inputs() for c in configurations]
    whole = jax.jit(lambda xs: [c.whole(*x) for c, x in zip(configurations, xs, strict=True)])
    expected = whole([c.arguments for c in configurations])
    parts = jax.jit(lambda xs: [c.on_all(*x) for c, x in zip(configurations, xs, strict=True)])(
        inputs
    )
    for configuration, want, part in zip(configurations, expected, parts, strict=True):
        configuration.check(want, part)


def configured(case: Case, places: tuple[Place, ...], layouts: Any) -> list[Configuration]:
    found = [Configuration(case, places, layout) for layout in layouts]
    return [c for c in found if c.can_be]


FEW = [
    "exp", "betainc", "broadcast_to", "one_hot", "argmax of ties", "top_k with NaN",
    "grouped conv, to the kernel", "rows of others, two indices", "scatter, vmap", "eig",
    "fold_in of one key",
]  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_rows_of_one_argument(name):
    """By turns in a layout that divides the place and in one that does not."""
    check_one(CASES[name], lambda i, layout: layout == TWO_LAYOUTS[i % 3][i % 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_of_one_argument_in_every_layout(name):
    check_one(CASES[name], lambda i, layout: True)


def check_one(case: Case, wanted: Callable[[int, str], bool]) -> None:
    places = list(enumerate(places_of(case)))
    found = [(i, c) for i, place in places for c in configured(case, (place,), LAYOUTS)]
    check_all([c for i, c in found if wanted(i, c.layout)])
    moving = [c for _, c in found if c.moves]
    along = {c.places[0].letter for c in moving if not c.is_padded}
    padded = {c.places[0].letter for c in moving} - along
    assert (along, padded) == (set(case.along), set(case.padded)), [str(c) for c in moving]


def pairs_of(case: Case) -> list[tuple[Place, Place]]:
    pairs = itertools.combinations(places_of(case), 2)
    return [(a, b) for a, b in pairs if a.argument != b.argument]


TWO = [name for name, case in CASES.items() if pairs_of(case)]


FEW_OF_TWO = [
    "concatenate", "concatenate and slice", "ragged_dot", "two indices", "own row", "scatter-add",
    "dynamic_slice, vmap",
]  # fmt: skip


@pytest.mark.parametrize("name", FEW_OF_TWO)
def test_rows_of_two_arguments(name):
    """Every third pair of places, in one layout."""
    pairs = pairs_of(CASES[name])[::3]
    check_two(CASES[name], list(zip(pairs, itertools.cycle(LAYOUTS), strict=False)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_rows_of_two_arguments_in_every_layout(name):
    check_two(CASES[name], list(itertools.product(pairs_of(CASES[name]), LAYOUTS)))


def check_two(case: Case, wanted: list[tuple[tuple[Place, Place], str]]) -> None:
    found = [c for pair, layout in wanted for c in configured(case, pair, [layout])]
    check_all(found)
    for c in found:
        a, b = (place.letter for place in c.places)
        free = a != b or a in case.along or (a in case.padded and c.is_padded)
        assert free or not c.moves, str(c)


def test_function_without_equations():
    check_all([Configuration(Case(lambda x: x, "ab"), (Place(0, 0, "a"),), "padded")])


@pytest.mark.slow
@pytest.mark.parametrize("num", [4, 8])
def test_one_update_of_rows_that_were_moved(num):
    """As XLA optimizes it, which makes one slice of two, and forgets where the first one ends."""

    def step(w, x):
        moved = jnp.roll(x @ w, 1, 0).at[0].set(0.0)
        return w, {"moved": moved, "last": jnp.roll(x[:, 0], -1).at[-1].add(1.0)}

    w, x = jnp.ones((3, 2), np.float32), np.arange(60, dtype=np.float32).reshape(20, 3)
    lowered = jax.jit(jzero.shard_train_step(step, mesh=small.mesh(data=num))).lower(w, x)
    optimized: Any = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    found = lowered.compile(compiler_options=optimized)(w, x)[1]
    expected = jax.jit(step)(w, x)[1]
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
