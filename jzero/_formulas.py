"""The ZeRO paper's formulas: bytes of each role on each device, and elements that a step moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp

from jzero._options import Options
from jzero._tables import Memory
from jzero.sharding._plan import OPTIMIZER, PARAMETER, Sharding
from jzero.sharding._traffic import Collective

GRADIENT, GATHERED, ACCUMULATOR = "gradient", "gathered parameter", "accumulator"


class BytesPerParam(NamedTuple):
    """Bytes per parameter: at rest, of its gradient, of its optimizer state, and in a pass."""

    parameters: Fraction
    gradients: Fraction
    optimizer_state: Fraction
    compute: Fraction


class Need(NamedTuple):
    """What one role takes: bytes per parameter, in that many shards, at rest or within a step."""

    role: str
    size: Fraction
    num_shards: int
    at_rest: bool
    note: str


def needs(options: Options, sharding: Sharding, sizes: BytesPerParam) -> Iterator[Need]:
    """The stage's row, by role (ZeRO, section 5)."""
    num_shards = sharding.count(sharding.shard_axes)
    num_param_shards = sharding.count(sharding.param_axes)
    yield Need(PARAMETER, sizes.parameters, num_param_shards, True, "")
    yield Need(OPTIMIZER, sizes.optimizer_state, num_shards, True, "")
    num = 1 if options.reduce_once else num_shards
    yield Need(GRADIENT, sizes.gradients, num, False, _gradient_note(options))
    if options.accumulate > 1:
        size = Fraction(jnp.dtype(options.accumulate_dtype or jnp.float32).itemsize)
        yield Need(ACCUMULATOR, size, num, False, f"sums {options.accumulate} microbatches")
    if num_param_shards > 1 and options.keep_gathered:
        when = "the whole step" if options.gather_once else "each microbatch"
        yield Need(GATHERED, sizes.compute, 1, False, f"gathered during {when}")


def memory(num_params: int, rows: Iterable[Need]) -> tuple[Memory, ...]:
    """The needs of so many parameters; bytes are rounded up."""

    def row(need: Need) -> Memory:
        whole = need.size * num_params
        per_device = math.ceil(whole / need.num_shards)
        return Memory(need.role, math.ceil(whole), per_device, need.at_rest, need.note)

    return tuple(map(row, rows))


def traffic(
    num_params: int, options: Options, sharding: Sharding, sizes: BytesPerParam
) -> Iterator[Collective]:
    """Gathers of the passes, reductions, and the gather of updated parameters (ZeRO, section 7)."""
    params, shards = sharding.param_axes, sharding.shard_axes
    outer = shards[len(params) :]  # `shard_axes` begins with `param_axes`.
    replicas = tuple(axis for axis, _ in sharding.axes if axis not in shards)
    reductions = 1 if options.reduce_once else options.accumulate
    dtype = options.reduce_dtype
    reduced = sizes.compute if dtype is None else Fraction(jnp.dtype(dtype).itemsize)
    for op, axes, held_over, size, times in (
        ("all-gather", params, (), sizes.compute, _gathers(options)),
        ("reduce-scatter", params, (), reduced, reductions),
        ("reduce-scatter", outer, params, reduced, reductions),
        ("all-reduce", replicas, shards, reduced, 1),  # after the last microbatch
        ("all-gather", outer, params, sizes.parameters, 1),
    ):
        if sharding.count(axes) > 1:
            elements = math.ceil(Fraction(num_params, sharding.count(held_over)))
            name = f"{float(8 * size):g}-bit"
            yield Collective(op, axes, name, float(size), elements, times, "")


def _gathers(options: Options) -> int:
    """How often a step gathers a parameter that rests in shards."""
    if options.gather_once:
        return 1
    return options.accumulate if options.keep_gathered else 2 * options.accumulate


def _gradient_note(options: Options) -> str:
    if not options.reduce_once:
        return "in shards: reduced as they are produced"
    if options.accumulate == 1 and options.stage > 0:
        # Without microbatches there is nothing to wait for: jzero runs what it runs at stage 2.
        return "whole, as the paper counts; jzero reduces them as they are produced"
    return "whole until they are reduced"
