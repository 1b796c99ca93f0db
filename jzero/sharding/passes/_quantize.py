# SPDX-License-Identifier: Apache-2.0
"""Block quantization: floats as rows of bytes (codes of few bits, then the blocks' scales), and back.

One row is one value, so that one collective moves codes and scales, and no compiler widens them on the way.

What is not finite survives. A block with an infinity or NaN has a negative scale. Its largest codes stand for
the infinities then, the code below the smallest one for NaN, and its finite elements have the codes between;
it is not rotated. So an overflow is seen where it was made, and its neighbours keep their values.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._blocks import Blocks
from jzero.tracing._precision import mix


def quantize(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Floats `[..., n]` as bytes `uint8[..., blocks.nbytes(n)]`."""
    *several, n = x.shape
    x = x.reshape(-1, n)
    rows = len(x)
    x = _in_blocks(x.astype(_wide(x.dtype)), blocks)
    finite = jnp.isfinite(x)
    special = ~jnp.all(finite, axis=-1, keepdims=True)
    known = jnp.where(finite, x, 0)
    if blocks.rotate:
        known = jnp.where(special | _cut(n, blocks), known, _rotated(known))
    top = jnp.where(special, blocks.largest - 1, blocks.largest).astype(x.dtype)
    scale = jnp.max(jnp.abs(known), axis=-1, keepdims=True) / top
    tiny = jnp.finfo(x.dtype).tiny
    steps = known * jnp.where(scale >= tiny, 1 / scale, 0)
    steps = jnp.floor(steps + _uniform(known)) if blocks.stochastic else jnp.round(steps)
    codes = jnp.clip(steps, -top, top)
    beyond = jnp.where(jnp.isnan(x), -blocks.largest - 1, jnp.sign(x) * blocks.largest)
    codes = jnp.where(finite, codes, beyond).astype(jnp.int8).reshape(rows, -1)[:, :n]
    scale = jnp.where(special, -jnp.maximum(scale, tiny), scale)
    row = jnp.concatenate([_packed(codes, blocks), _as_bytes(scale[..., 0])], axis=1)
    return row.reshape(*several, -1)


def dequantize(row: jax.Array, n: int, dtype: Any, blocks: Blocks) -> jax.Array:
    """Bytes `[..., blocks.nbytes(n)]` as floats `[..., n]`."""
    *several, nbytes = row.shape
    row = row.reshape(-1, nbytes)
    wide = jnp.dtype(_wide(dtype))
    num_codes = -(-n // blocks.per_byte)
    codes = _in_blocks(_unpacked(row[:, :num_codes], blocks)[:, :n], blocks)
    scales = row[:, num_codes:].reshape(*codes.shape[:2], -1)
    scale = lax.bitcast_convert_type(scales, wide)[..., None]
    special = scale < 0
    x = codes.astype(wide) * jnp.abs(scale)
    if blocks.rotate:
        x = jnp.where(special | _cut(n, blocks), x, _rotated(x))
    # The largest one times its rounded step may be a little more than a float can be.
    most = np.asarray(jnp.finfo(dtype).max, wide)
    x = jnp.clip(x, -most, most)
    infinite = jnp.sign(codes).astype(wide) * jnp.inf
    x = jnp.where(special & (jnp.abs(codes) == blocks.largest), infinite, x)
    x = jnp.where(special & (codes == -blocks.largest - 1), jnp.nan, x)
    return x.reshape(row.shape[0], -1)[:, :n].astype(dtype).reshape(*several, n)


def quantize_rows(x: jax.Array, part: tuple[int, ...], blocks: Blocks) -> jax.Array:
    """One device's part of a leaf, `[..., *part]` with padding, as rows `[..., 1, bytes]`."""
    stack = x.shape[: x.ndim - len(part)]
    return quantize(x.reshape(*stack, 1, math.prod(part)), blocks)


def dequantize_rows(
    rows: jax.Array, part: tuple[int, ...], dim: int | None, dtype: Any, blocks: Blocks
) -> jax.Array:
    """Rows of a leaf, `[..., parts, bytes]`, as floats `[..., n, d]`, in which the parts cut `dim`."""
    *stack, parts, _ = rows.shape
    x = dequantize(rows, math.prod(part), dtype, blocks).reshape(*stack, parts, *part)
    dim = len(stack) if dim is None else max(dim, len(stack))
    x = jnp.moveaxis(x, len(stack), dim)  # A part's own dims follow it.
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]) if part else x[..., 0]


def _wide(dtype: Any) -> Any:
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def _in_blocks(x: jax.Array, blocks: Blocks) -> jax.Array:
    """`[rows, n]` as `[rows, blocks, size]`, with zeros in the last one."""
    rows, n = x.shape
    x = jnp.pad(x, ((0, 0), (0, -n % blocks.elements)))
    return x.reshape(rows, x.shape[1] // blocks.elements, blocks.elements)


def _cut(n: int, blocks: Blocks) -> jax.Array:
    """`[1, blocks, 1]`: whether a block extends beyond a row of n, so that it is sent in part."""
    # Computed and not a constant: a loop's body has no place for one.
    first = lax.broadcasted_iota(jnp.int32, (1, -(-n // blocks.elements), 1), 1)
    return first >= n // blocks.elements


def _packed(codes: jax.Array, blocks: Blocks) -> jax.Array:
    """`int8[rows, n]` as bytes `[rows, n / codes per byte]`."""
    if blocks.per_byte == 1:
        return lax.bitcast_convert_type(codes, jnp.uint8)
    codes = jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    pairs = (codes + 8).astype(jnp.uint8).reshape(codes.shape[0], codes.shape[1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpacked(row: jax.Array, blocks: Blocks) -> jax.Array:
    """Bytes `[rows, m]` as `int8[rows, m * codes per byte]`."""
    if blocks.per_byte == 1:
        return lax.bitcast_convert_type(row, jnp.int8)
    pairs = jnp.stack([row & jnp.uint8(15), row >> 4], axis=-1).astype(jnp.int8)
    return lax.sub(pairs, jnp.full_like(pairs, 8)).reshape(row.shape[0], -1)


def _as_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def _rotated(x: jax.Array) -> jax.Array:
    """Each block, times an orthonormal matrix of Hadamard's, which is its own inverse."""
    size = x.shape[-1]
    i, j = (lax.broadcasted_iota(jnp.uint32, (size, size), dim) for dim in (0, 1))
    odd = lax.population_count(i & j) % np.uint32(2) == 1
    share = jnp.asarray(1 / math.sqrt(size), x.dtype)
    rotated: jax.Array = jnp.matmul(
        x, jnp.where(odd, -share, share), precision=lax.Precision.HIGHEST
    )
    return rotated


def _uniform(x: jax.Array) -> jax.Array:
    """For each element of `[rows, blocks, size]` a hash of its value and position, in [0, 1)."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    blocks, inside = (lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in (1, 2))
    places = blocks * np.uint32(x.shape[2]) + inside
    mixed = mix(bits ^ (places * np.uint32(0x9E3779B9)))
    return ((mixed >> 8).astype(jnp.float32) * np.float32(2.0**-24)).astype(x.dtype)
