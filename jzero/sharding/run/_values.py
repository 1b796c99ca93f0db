# SPDX-License-Identifier: Apache-2.0
"""What a value can be while the step runs on one device: full, a shard, in codes, or not yet reduced.

All are pytrees, so that JAX's loops and branches take and return them. What is only remembered of a value
(its gathers and views) does not go through: its tracers must not outlive the trace that made them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeGuard, TypeVar

import jax
from jax.typing import DTypeLike

from jzero._blocks import Blocks
from jzero.sharding.plan._layout import Automatic
from jzero.sharding.run._collectives import Axes
from jzero.sharding.run._tables import RowsAdded

Arrays = list[jax.Array]

# [Note: reductions wait]
# A sum over the devices is due where the step writes it, and cheaper later: gradients of tied weights are
# added and reduced once, what a time loop adds up once and not at every time step
# (test_traffic.py::test_a_time_loop_gathers_and_reduces_its_weights_once), and over replicas once a step
# and not for each microbatch (test_accumulate.py::test_replicas_are_reduced_once_per_step). So it waits
# through everything linear, on each device: what may is in `_ordinary._LINEAR`, and
# `_frames.is_unreduced` tells it beforehand.


@dataclasses.dataclass(eq=False)
class FullValue:
    """The whole value, `x [n, d]`; whether it differs between devices is the frame's knowledge.

    Of a look-up's gradient it is known which rows were `added` up.
    """

    x: jax.Array
    name: str = ""
    added: tuple[RowsAdded, ...] = ()


@dataclasses.dataclass(eq=False)
class ShardValue:
    """This device's slice along `dim`, over mesh `axes`, of a value that is the same on all devices.

    The whole dim has `size`: of `[n, d]` along dim 0 over k devices, `x` is `[ceil(n / k), d]`. If k does not
    divide n, the last slices hold padding, of which nothing is known: it is dropped when the value is
    gathered and masked when it is reduced (test_padded.py).
    `gathered` keeps the whole value for the pass (see `Devices.scope`) that asked for it. `view_of` is
    the value this one only rearranges, and how: the two share a gather. `views` are the casts and
    rearrangements already made of it, so that a step that casts twice gathers once. What is `coded`, a
    parameter or its cast, may be gathered as codes of few bits, for whoever can do with that.
    `automatic` is how XLA shards it over further axes, never along `dim`; None for as it shards the leaf. It
    is gathered part by part, and what is wrong in this costs traffic and no more.
    """

    x: jax.Array
    dim: int
    size: int
    axes: Axes
    name: str = ""
    coded: bool = False
    automatic: Automatic | None = None
    view_of: tuple[ShardValue | CodedValue, Callable[[jax.Array], jax.Array]] | None = None
    gathered: dict[Hashable, jax.Array] = dataclasses.field(default_factory=dict)
    views: dict[Hashable, ShardValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Unreduced:
    """`scale` times the sum over the devices of `x [n, d]`, presented as `dtype`: [Note: reductions wait].

    It knows the `dim` along which the sum is wanted in shards, None for the whole: `Interpreter.bind` sets it
    from `Links` when a variable gets the value. Once the sum over the axes of a shard was taken
    (`scattered`), `x` is a shard `[ceil(n / k), d]` along `dim`, which has `size`, and only the sum over the
    axes beside them is due.
    `made` counts up, in the order of the program.
    A running sum of reductions (`collecting`) has no `scale` before the first: it takes that of what is
    added to it.
    `x` keeps the dtype in which the step wrote the reduction, so a cast after it changes no traffic. What is
    `coded`, a gradient, may travel as codes of few bits. In the place of the gradient of look-ups the
    rows may travel that were `added` up (`rows_of`).
    """

    x: jax.Array
    scale: float | None
    dtype: DTypeLike
    name: str = ""
    collecting: bool = False
    dim: int | None = None
    size: int = 0
    scattered: bool = False
    coded: bool = False
    made: int = dataclasses.field(default_factory=itertools.count().__next__)
    added: tuple[RowsAdded, ...] = ()
    reduced: Settled | None = None


@dataclasses.dataclass(eq=False)
class CodedValue:
    """A leaf that rests in codes: this device's part of its rows, or, gathered, all of them.

    The same on all devices is the leaf `[..., n, d]`; `rows` are `uint8[..., parts, bytes]`. Of a row that is
    cut along `dim`, which has `size`, each part is `part`, `[n/k, d]`. It is decoded where it is computed
    with, as the leaf's `dtype`, and then cast as by those who read it (`casts`): gathered are codes. A stack
    of leaves is sliced as it is (`CodedForm`).

    Attributes:
      axes: over which the rows are cut; none once they are gathered.
      origin: of a cast, what it is one of: they share a gather.
      gathered: its rows, gathered, by the pass (see `Devices.scope`) that asked for them.
      views: what was made of it: casts, and by scope itself, decoded.
    """

    rows: jax.Array
    blocks: Blocks
    dtype: str
    part: tuple[int, ...]
    dim: int | None
    size: int
    axes: Axes
    name: str = ""
    casts: tuple[str, ...] = ()
    origin: CodedValue | None = None
    gathered: dict[Hashable, jax.Array] = dataclasses.field(default_factory=dict)
    views: dict[Hashable, FullValue | ShardValue | CodedValue] = dataclasses.field(
        default_factory=dict
    )

    @property
    def x(self) -> jax.Array:
        """None: who asks has to decode it first."""
        raise AssertionError(f"{self.name} is in codes")

    @property
    def num_stacked(self) -> int:
        """How many dims stand before a row."""
        return self.rows.ndim - 2

    @property
    def is_cut_in_rows(self) -> bool:
        """Whether the cut dim is one of a row's."""
        return self.dim is not None and self.dim >= self.num_stacked


Settled = FullValue | ShardValue | CodedValue
Value = Settled | Unreduced

jax.tree_util.register_dataclass(FullValue, ["x"], ["name"], ["added"])
jax.tree_util.register_dataclass(
    ShardValue,
    ["x"],
    ["dim", "size", "axes", "name", "coded", "automatic"],
    ["view_of", "gathered", "views"],
)
jax.tree_util.register_dataclass(
    CodedValue,
    ["rows"],
    ["blocks", "dtype", "part", "dim", "size", "axes", "name", "casts"],
    ["origin", "gathered", "views"],
)
jax.tree_util.register_dataclass(
    Unreduced,
    ["x"],
    ["scale", "dtype", "name", "collecting", "dim", "size", "scattered", "coded", "made"],
    ["added", "reduced"],
)


def waits(value: Value) -> TypeGuard[Unreduced]:
    """Whether the value is a reduction that has not run."""
    return isinstance(value, Unreduced) and value.reduced is None


def rows_of(value: Value) -> tuple[RowsAdded, ...]:
    """The rows whose sum the value's `x` is, if that is known."""
    if not isinstance(value, FullValue | Unreduced):
        return ()
    return value.added if all(each.table is value.x for each in value.added) else ()


def comes_from_codes(value: Value) -> bool:
    """Whether the value is a leaf that rests in codes, or a view of one."""
    while isinstance(value, ShardValue) and value.view_of is not None:
        value = value.view_of[0]
    return isinstance(value, CodedValue)


def in_order_made(values: Sequence[Value]) -> list[int]:
    """Places of the values: reductions that have not run come last, in the order of the program."""
    order = [value.made if waits(value) else -1 for value in values]
    return sorted(range(len(values)), key=order.__getitem__)


V = TypeVar("V", Settled, Value)


def moved(value: V, dims: int) -> V:
    """The value with its dims so many further on: 1 makes of a turn's `[n, d]` a loop's `[turns, n, d]`."""
    if isinstance(value, FullValue) or value.dim is None:
        return value
    if isinstance(value, ShardValue) and value.automatic is not None:
        automatic = ((),) * dims + value.automatic[max(-dims, 0) :]
        return dataclasses.replace(value, dim=value.dim + dims, automatic=automatic)
    return dataclasses.replace(value, dim=value.dim + dims)
