# SPDX-License-Identifier: Apache-2.0
"""Memory-centric tiling: a large matrix is gathered, used and freed tile by tile, and its gradient made so.

A product of whole rows with a parameter at rest in shards is a loop over tiles of the parameter, each of
which is gathered one turn before its use. A product that is only made to be summed over the devices is a
loop too, each tile of which is reduced one turn after it was made. Neither is ever whole.

Reference:
  Rajbhandari, Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
  Learning", 2021, section 5.1.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.ir import _rules
from jzero.sharding.analysis._frames import REDUCTIONS, Frame
from jzero.sharding.analysis._untiled import TILES
from jzero.sharding.passes._cuts import Tiles, cut
from jzero.sharding.passes._in_place import row_major
from jzero.sharding.passes._tiles import dtype_of_sum
from jzero.sharding.passes._waits import not_before, token_of
from jzero.sharding.run import _ordinary
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._interpret import EqnHandler, Interpreter
from jzero.sharding.run._values import FullValue, Settled, ShardValue, Unreduced, Value
from jzero.tracing import _jaxpr

Start = int | jax.Array
# The turn, the result so far, and the tile that is used in it.
TurnState = tuple[Start, jax.Array, jax.Array]


def _dot_general(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    settled = [interp.devices.settle(value) for value in ins]
    for place in (0, 1):
        value, other = settled[place], settled[1 - place]
        if isinstance(value, ShardValue) and isinstance(other, FullValue):
            tiles = _tiles_of_operand(interp, eqn, place, value)
            if tiles is not None:
                return [FullValue(_product(interp.devices, eqn, place, value, other.x, tiles))]
    (out,) = eqn.outvars
    if out in frame.lone_products and out not in interp.boundary:
        reduced = _reduced(interp, frame, eqn, frame.lone_products[out], settled)
        if reduced is not None:
            return [reduced]
    return _ordinary.apply(interp, frame, index, eqn, [*settled])


def _psum(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """As ever, unless the product that it alone reads was reduced as it was made."""
    done = eqn.invars[0] in frame.lone_products and not isinstance(ins[0], FullValue)
    return ins if done else _ordinary.psum(interp, frame, index, eqn, ins)


# --------------------------------------------------------------------------------------------------
# Products with a parameter.


def _tiles_of_operand(
    interp: Interpreter, eqn: _jaxpr.Eqn, place: int, value: ShardValue
) -> Tiles | None:
    """How the operand at `place` is gathered; None for in one piece."""
    aval, itemsize = eqn.invars[place].aval, value.x.dtype.itemsize
    # A leaf that XLA shards over further axes is known by its whole shape, which a tile has not.
    if not _is_large(interp, aval.size * itemsize) or value.name in interp.devices.leaves:
        return None
    assert interp.tile_bytes is not None
    kept = [d for d, to in enumerate(_rules.dim_maps(eqn)[place]) if to is not None]
    return cut(aval.shape, itemsize, value.dim, interp.tile_bytes, kept)


def _is_large(interp: Interpreter, nbytes: int) -> bool:
    return interp.tile_bytes is not None and nbytes > interp.tile_bytes


def _product(
    devices: Devices, eqn: _jaxpr.Eqn, place: int, value: ShardValue, other: jax.Array, tiles: Tiles
) -> jax.Array:
    """`x [b, n] @ w [n, d]` of a `w` in shards `[n/k, d]`, which is the operand at `place`: `[b, d]`.

    The results of tiles are put side by side, or summed up if the product sums over their dim.
    """
    aval, factor = eqn.outvars[0].aval, _rules.factor_of(eqn, place, tiles.dim)
    assert factor is not None
    beside, (into,) = factor.ins[1 - place], factor.outs
    dtype = dtype_of_sum(eqn) if into is None else aval.dtype

    def gathered(start: Start, size: int, tokens: Sequence[jax.Array] = ()) -> jax.Array:
        part = lax.dynamic_slice_in_dim(value.x, start, size, tiles.dim)
        with jax.named_scope(TILES):
            return devices.whole(value, not_before(part, tokens), as_codes=True)

    @jax.jit  # Traced and lowered once for the loop and its last turn.
    def used(total: jax.Array, start: Start, tile: jax.Array) -> jax.Array:
        x = _range(other, start, tile.shape[tiles.dim], beside)
        operands = (tile, x) if place == 0 else (x, tile)
        (y,) = _jaxpr.bind(eqn, *operands, preferred_element_type=dtype)
        return lax.add(total, y) if into is None else _put(total, y, start, into)

    def turn(total: jax.Array, start: Start, tile: jax.Array, _: jax.Array) -> jax.Array:
        new: jax.Array = used(total, start, tile)
        return new

    nbytes = value.x.nbytes * devices.count(value.axes) // tiles.size * tiles.tile
    first = gathered(0, tiles.tile, devices.queue.tokens(nbytes))
    total, last = _one_ahead(tiles, first, gathered, turn, lax.full(aval.shape, 0, dtype))
    for start, tile in last:
        total = used(total, start, tile)
    return total.astype(aval.dtype)


def _one_ahead(
    tiles: Tiles,
    first: jax.Array,
    make: Callable[[Start, int], jax.Array],
    use: Callable[[jax.Array, Start, jax.Array, jax.Array], jax.Array],
    total: jax.Array,
) -> tuple[jax.Array, list[tuple[int, jax.Array]]]:
    """Makes every tile beside the use of the one before it.

    It runs like this::

        for start in range(0, (num - 1) * size, size):
            following = make(start + size, size)
            total, tile = use(total, start, tile, following), following

    Returns:
      The result of these uses; and where what is left starts, and the tile, or two if one is smaller.
    """

    def turn(state: TurnState, _: None) -> tuple[TurnState, None]:
        i, total, tile = state
        following = make((i + 1) * tiles.tile, tiles.tile)
        return (i + 1, use(total, i * tiles.tile, tile, following), following), None

    state: TurnState = (0, total, first)
    (_, total, tile), _ = lax.scan(turn, state, None, length=tiles.num - 1)
    done = tiles.num * tiles.tile
    last = [(done - tiles.tile, tile)]
    return total, [*last, (done, make(done, tiles.rest))] if tiles.rest else last


def _range(x: jax.Array, start: Start, size: int, dim: int | None) -> jax.Array:
    return x if dim is None else lax.dynamic_slice_in_dim(x, start, size, dim)


def _put(whole: jax.Array, part: jax.Array, start: Start, dim: int) -> jax.Array:
    """`whole [n, d]` with the `part [n, t]` at `start` of `dim`."""
    new: jax.Array = lax.dynamic_update_slice_in_dim(whole, part, start, dim)
    return new


# --------------------------------------------------------------------------------------------------
# Products that are reduced.


def _reduced(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, sum_eqn: _jaxpr.Eqn, ins: Sequence[Settled]
) -> Value | None:
    """The sum over the devices of a large product, in shards; None for one that is made whole."""
    devices, (out,) = interp.devices, sum_eqn.outvars
    dim, name = interp.dim_of(frame, out), interp.links.leaf_of(frame, out)
    dtype = _ordinary.wire_dtype(interp, frame, sum_eqn, sum_eqn.invars[0])
    nbytes = max(out.aval.size * dtype.itemsize, _rules.size_in_bytes(out.aval))
    over_all = _ordinary.is_over_all(interp, sum_eqn)
    if dim is None or interp.hold or not over_all or not _is_large(interp, nbytes):
        return None
    if name in devices.leaves or not all(isinstance(value, FullValue) for value in ins):
        return None
    assert interp.tile_bytes is not None
    itemsize = max(dtype.itemsize, out.aval.dtype.itemsize)
    tiles = cut(out.aval.shape, itemsize, dim, interp.tile_bytes)
    if tiles is None:
        return None
    size = out.aval.shape[dim]
    coded = _ordinary.is_coded(interp, frame, sum_eqn, sum_eqn.invars[0], out)
    waiting = Unreduced(
        ins[0].x, 1.0, out.aval.dtype, name, dim=dim, size=size, scattered=True, coded=coded
    )
    x = _reduced_product(devices, eqn, [value.x for value in ins], dtype, waiting, tiles)
    waiting = dataclasses.replace(waiting, x=x)
    return waiting if devices.replica_axes else devices.settle(waiting)


def _reduced_product(
    devices: Devices, eqn: _jaxpr.Eqn, operands: Sequence[jax.Array], dtype: jnp.dtype[Any],
    result: Unreduced, tiles: Tiles,
) -> jax.Array:  # fmt: skip
    """`x [b, n]`, `y [b, d]` -> this device's `[n/k, d]` of the devices' sum of `x.T @ y [n, d]`."""
    aval, dim = eqn.outvars[0].aval, result.dim
    factor = _rules.factor_to(eqn, tiles.dim)
    assert dim is not None
    assert factor is not None

    def made(start: Start, size: int) -> jax.Array:
        parts = [_range(x, start, size, d) for x, d in zip(operands, factor.ins, strict=True)]
        (tile,) = _jaxpr.bind(eqn, *parts)
        on_wire: jax.Array = tile.astype(dtype)
        return on_wire

    def put(total: jax.Array, start: Start, shard: jax.Array) -> jax.Array:
        # [Note: layouts at rest]
        return row_major(_put(total, shard, start, tiles.dim))

    def reduced(tile: jax.Array) -> jax.Array:
        with jax.named_scope(TILES):
            return devices.reduce_scatter(tile, dim, result.name, result.coded)

    def turn(total: jax.Array, start: Start, tile: jax.Array, following: jax.Array) -> jax.Array:
        # Else the compiler hides this copy behind the next tile's product, and not the reduction.
        return put(total, start, not_before(reduced(tile), [token_of(following)]))

    total = lax.full(devices.shard_shape(aval.shape, dim), 0, dtype)
    total, last = _one_ahead(tiles, made(0, tiles.tile), made, turn, total)
    for start, tile in last:
        # The compiler would combine it with those of other matrices, for which all would wait.
        shard = reduced(not_before(tile, devices.queue.reduction_tokens(result.made, tile.nbytes)))
        devices.queue.note_reduction(shard, result.made, tile.nbytes)
        total = put(total, start, shard)
    return total


TILED: dict[str, EqnHandler] = {
    "dot_general": _dot_general,
    **dict.fromkeys(REDUCTIONS, _psum),
}
