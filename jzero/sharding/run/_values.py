"""What a value can be while the step runs on one device: full, a shard, or not yet reduced.

And how one becomes another: every gather, reduction and slice of the step is asked for here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp

from jzero._errors import StepError, message
from jzero.sharding.analysis import _rules
from jzero.sharding.plan._layout import Automatic, padded_size
from jzero.sharding.run import _collectives
from jzero.sharding.run._collectives import Axes
from jzero.sharding.run._queue import GatherQueue


@dataclasses.dataclass(eq=False)
class FullValue:
    """The whole value; whether it differs between devices is the frame's knowledge."""

    x: Any
    name: str = ""


@dataclasses.dataclass(eq=False)
class ShardValue:
    """This device's slice along `dim`, over mesh `axes`, of a value that is the same on all devices.

    The whole dim has `size`. If the devices do not divide it, the last slices hold padding, of which
    nothing is known: it is dropped when the value is gathered and masked when it is reduced.
    `gathered` keeps the whole value for the pass (see `Devices.scope`) that asked for it. `view_of` is
    the value this one only rearranges, and how: the two share a gather. `views` are the casts and
    rearrangements already made of it, so that a step that casts twice gathers once.
    """

    x: Any
    dim: int
    size: int
    axes: Axes
    name: str = ""
    view_of: tuple[ShardValue, Callable[[Any], Any]] | None = None
    gathered: dict[object, Any] = dataclasses.field(default_factory=dict)
    views: dict[object, ShardValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Unreduced:
    """`scale` times the sum over the devices of `x`, presented as `dtype`; summed when first needed.

    With a `dim`, the sum over the axes of a shard was taken: `x` is a shard along `dim`, a dim of `size`,
    and the sum over the axes beside them is still due.
    `made` counts up, in the order of the program.
    A running sum of reductions (`collecting`) has no `scale` before the first: it takes that of what is
    added to it.
    `x` keeps the dtype in which the step wrote the reduction, so a cast after it changes no traffic.
    """

    x: Any
    scale: float | None
    dtype: Any
    name: str = ""
    collecting: bool = False
    dim: int | None = None
    size: int = 0
    made: int = dataclasses.field(default_factory=itertools.count().__next__)
    reduced: FullValue | ShardValue | None = None


Value = FullValue | ShardValue | Unreduced

# Enough for the wire to be busy. Leaves up to this size are gathered in one piece when a step ends.
GATHERED_AT_ONCE = 2**27


def waits(value: Value) -> TypeGuard[Unreduced]:
    """Whether the value is a reduction that has not run."""
    return isinstance(value, Unreduced) and value.reduced is None


def in_order_made(values: Sequence[Value]) -> list[int]:
    """Places of the values: reductions that have not run come last, in the order of the program."""
    order = [value.made if waits(value) else -1 for value in values]
    return sorted(range(len(values)), key=order.__getitem__)


@dataclasses.dataclass(eq=False)
class Devices:
    """The data axes, and where in the program we are.

    Parameters may rest over the first of `shard_axes` only, so that their shards are unions of those of
    the optimizer state: cutting one into the other moves nothing.

    Attributes:
      sizes: names and sizes of the data axes.
      shard_axes: over which gradients and optimizer state are sharded.
      param_axes: over which parameters are; the first of `shard_axes`.
      leaves: shapes of the leaves that XLA shards over further axes, and over which.
      scope: gathers of one shard are shared within a scope (a pass, a loop body, a remat body).
      queue: the gathers of the pass, and how far they may run ahead of its compute.
      divergent: inside a branch or loop that not all devices take together.
    """

    sizes: Mapping[str, int]
    shard_axes: Axes
    param_axes: Axes
    leaves: Mapping[str, tuple[tuple[int, ...], Automatic]]
    queue: GatherQueue
    scope: object = None
    divergent: bool = False

    @property
    def axes(self) -> Axes:
        """All data axes."""
        return tuple(self.sizes)

    @property
    def num(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes.values())

    def count(self, axes: Axes) -> int:
        """How many shards there are over `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def num_shards(self) -> int:
        """How many shards a gradient has."""
        return self.count(self.shard_axes)

    @property
    def num_replicas(self) -> int:
        """How many devices hold the same shard of a gradient."""
        return self.num // self.num_shards

    def value(
        self, x: Any, dim: int | None, shape: Sequence[int], name: str = ""
    ) -> FullValue | ShardValue:
        """An array that is whole (None) or sharded like a gradient; `shape` is that of the whole."""
        if dim is None:
            return FullValue(x, name)
        return ShardValue(x, dim, shape[dim], self.shard_axes, name)

    def shard_size(self, size: int, axes: Axes | None = None) -> int:
        """How much of a dim of `size` each device holds, padding included."""
        num = self.num_shards if axes is None else self.count(axes)
        return padded_size(size, self.num_shards) // num

    def line_up(self, size: int, other: int) -> bool:
        """Whether shards of dims of these sizes hold the same parts of what a reshape made of them."""
        return size == other or not (size % self.num_shards or other % self.num_shards)

    def without_padding(self, value: ShardValue, reduces: str) -> Any:
        """The shard with padding that changes no 'sum', 'max' or 'min' of it."""
        if value.size % self.num_shards == 0:
            return value.x
        fill = {
            "sum": 0,
            "max": _rules.extreme(value.x.dtype, "min"),
            "min": _rules.extreme(value.x.dtype, "max"),
        }
        return _collectives.mask_padding(value.x, value.dim, value.size, value.axes, fill[reduces])

    def shard_shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """Sizes of a gradient's shard along `dim`; of the whole for None."""
        return tuple(self.shard_size(n) if d == dim else n for d, n in enumerate(shape))

    def full(self, value: Value, dim: int | None = None) -> Any:
        """The whole array; `dim` is how an unreduced value is sharded on the way, if at all."""
        value = self.settle(value, dim)
        if isinstance(value, FullValue):
            return value.x
        if self.scope not in value.gathered and value.view_of is not None:
            origin, rearrange = value.view_of
            value.gathered[self.scope] = rearrange(self.full(origin))
        if self.scope not in value.gathered:
            value.gathered[self.scope] = self._whole(value, self._when_due(value))
        return value.gathered[self.scope]

    def _whole(self, value: ShardValue, x: Any) -> Any:
        """`x`, the value's shard or a part of it along another dim, gathered."""
        for axes in reversed(self._steps(value.axes)):  # the outer, slower axes move least
            x = self._gather(x, value.dim, axes, value.name)
        return _collectives.unpad(x, value.dim, value.size)

    def _when_due(self, value: ShardValue) -> Any:
        """The shard, but not before it is this value's turn to be gathered."""
        size = math.prod(value.x.shape) * value.x.dtype.itemsize
        tokens = self.queue.tokens(size * self.count(value.axes))
        return _collectives.not_before(value.x, tokens)

    def shard(self, value: Value, dim: int, axes: Axes | None = None) -> Any:
        """This device's slice along `dim`; a full value must be the same on all devices."""
        axes = self.shard_axes if axes is None else axes
        value = self.settle(value, dim)
        if not (isinstance(value, ShardValue) and value.dim == dim):
            padded = _collectives.pad(self.full(value), dim, self.num_shards)
            return _collectives.take_shard(padded, dim, axes, self.count(axes))
        more, fewer = axes[len(value.axes) :], value.axes[len(axes) :]
        if more:
            return _collectives.take_shard(value.x, dim, more, self.count(more))
        return self._gather(value.x, dim, fewer, value.name) if fewer else value.x

    def full_into(self, old: Any, value: Value, dim: int | None = None) -> Any:
        """The whole array, in the place of `old`, which nothing reads any more."""
        settled = self.settle(value, dim)
        if not isinstance(settled, ShardValue) or not self._goes_into(old, settled):
            return self.full(settled)
        gather_slice = functools.partial(self._whole, settled)
        return _collectives.slices_into(old, settled.x, GATHERED_AT_ONCE, gather_slice)

    def _goes_into(self, old: Any, value: ShardValue) -> bool:
        """Whether it is large, not yet gathered, and sharded along another dim than the first."""
        if value.dim == 0 or self.scope in value.gathered:
            return False
        # A leaf that XLA shards over further axes is known by its whole shape, which a slice has not.
        alike = old.dtype == value.x.dtype and value.name not in self.leaves
        return bool(alike and old.nbytes > GATHERED_AT_ONCE)

    def settle(self, value: Value, dim: int | None) -> FullValue | ShardValue:
        """Runs the reduction if it is still due: scattered along `dim`, or whole for None."""
        if not isinstance(value, Unreduced):
            return value
        if value.reduced is None:
            value.reduced = self._reduce(value, dim)
        return value.reduced

    def scatter(self, value: Value, dim: int | None) -> Value:
        """The reduction over the axes of a shard done, if it is due; that over the others still waits."""
        beside = self.axes_beside(self.shard_axes)
        if waits(value) and value.dim is not None:
            return value
        if not waits(value) or dim is None or not beside:
            return self.settle(value, dim)
        before, after = _halves(value)
        total = self._scatter(
            value.x * jnp.asarray(before, value.x.dtype), dim, value.name, value.made
        )
        total = total * jnp.asarray(after, total.dtype)
        size = value.x.shape[dim]
        return dataclasses.replace(value, x=total, scale=1.0, dim=dim, size=size)

    def _scatter(self, total: Any, dim: int, name: str, made: int) -> Any:
        self._check_together("a gradient is reduced")
        total = _collectives.pad(total, dim, self.num_shards)
        nbytes = math.prod(total.shape) * total.dtype.itemsize
        total = _collectives.not_before(total, self.queue.reduction_tokens(made))
        for axes in self._steps(self.shard_axes):
            automatic = self._automatic(name, total, dim)
            total = _collectives.reduce_scatter(total, dim, axes, name, automatic)
        self.queue.note_reduction(total, made, nbytes)
        return total

    def _steps(self, axes: Axes) -> list[Axes]:
        """Axes that one collective runs over: those of parameters, then the rest."""
        first, rest = axes[: len(self.param_axes)], axes[len(self.param_axes) :]
        return [group for group in (first, rest) if group]

    def _gather(self, shard: Any, dim: int, axes: Axes, name: str) -> Any:
        self._check_together("a parameter is gathered")
        automatic = self._automatic(name, shard, dim)
        return _collectives.gather(shard, dim, axes, name, automatic)

    def _automatic(self, name: str, x: Any, dim: int) -> Automatic:
        """How XLA shards `x`, which comes from a leaf: the leaf itself, a cast, a slice of its stack."""
        shape, automatic = self.leaves.get(name, ((), ()))
        for first in (0, 1):
            like = shape[first:]
            rest = [d for d in range(len(like)) if d != dim]
            if len(like) == x.ndim and all(like[d] == x.shape[d] for d in rest):
                # On another dim a wrong guess (of a transposed view) costs traffic; on this one, where
                # devices and parts would interleave, it would cost the order of the elements.
                of_dim = automatic[first + dim : first + dim + 1]
                return () if any(of_dim) else automatic[first:]
        return ()

    def _reduce(self, value: Unreduced, dim: int | None) -> FullValue | ShardValue:
        if value.dim is not None:
            total = _collectives.all_reduce(value.x, self.axes_beside(self.shard_axes))
            total = total.astype(value.dtype)
            return ShardValue(total, value.dim, value.size, self.shard_axes, value.name)
        total, (before, after) = value.x, _halves(value)
        if before != 1:
            total = total * jnp.asarray(before, total.dtype)
        if self.num > 1:
            self._check_together("a gradient is reduced")
            rest = self.axes if dim is None else self.axes_beside(self.shard_axes)
            if dim is not None:
                total = self._scatter(total, dim, value.name, value.made)
            if rest:
                total = _collectives.all_reduce(total, rest)
        if after != 1:
            total = total * jnp.asarray(after, total.dtype)
        total = total.astype(value.dtype)
        return self.value(total, dim if self.num > 1 else None, value.x.shape, value.name)

    def axes_beside(self, axes: Axes) -> Axes:
        """The data axes that are not among `axes`."""
        return tuple(axis for axis in self.axes if axis not in axes)

    def _check_together(self, what: str) -> None:
        if self.divergent:
            raise DivergentError(
                message(
                    "shard_train_step",
                    f"{what} inside a branch (lax.cond, lax.while_loop) that not all devices take",
                    "All devices must take part in a collective, or the step hangs.",
                    "Choose with jnp.where instead, or make the predicate the same on all devices.",
                )
            )


def _halves(value: Unreduced) -> tuple[float, float]:
    """The scale as two factors, for before and after the sum.

    A sum of many float16 could overflow where their mean does not: half of the scale comes before.
    """
    scale = 1.0 if value.scale is None else value.scale
    if value.x.dtype != jnp.float16 or scale in (0, 1):
        return 1.0, scale
    before = 2.0 ** (math.log2(scale) // 2)
    return before, scale / before


class DivergentError(StepError):
    """A collective would run where not all devices are."""
