# SPDX-License-Identifier: Apache-2.0
"""How a value becomes another on one device: every gather, reduction and slice of a step is asked for here.

Shapes are those of a value `[n, d]` with a dim of n over k devices: a shard is `[n/k, d]`, n rounded up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jzero._blocks import Blocks
from jzero._errors import StepError, message
from jzero.ir import _rules
from jzero.sharding.analysis._tables import added_dims
from jzero.sharding.passes._in_place import GATHERED_AT_ONCE, row_major, slices_into
from jzero.sharding.passes._waits import not_before
from jzero.sharding.plan._layout import Automatic, padded_size
from jzero.sharding.run import _coded, _collectives, _tables
from jzero.sharding.run._collectives import Axes, part_by_part
from jzero.sharding.run._queue import GatherQueue
from jzero.sharding.run._tables import RowsAdded
from jzero.sharding.run._values import (
    CodedValue,
    FullValue,
    Settled,
    ShardValue,
    Unreduced,
    Value,
    comes_from_codes,
    rows_of,
    waits,
)


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
      others: names and sizes of the mesh's other axes, over which XLA shards.
      alone: mesh axes over which XLA must not shard a sum of 16 bits: [Note: 16 bits on CPUs].
      scope: gathers of one shard are shared within a scope (a pass, a loop body, a remat body).
      queue: the gathers of the pass, and how far they may run ahead of its compute.
      balance: multiplications in the time in which a byte is moved among the devices.
      divergent: inside a branch or loop that not all devices take together.
      gather_codes: in which parameters are gathered that are `coded`; None if none is.
      reduce_codes: over each axis, in which gradients travel that are `coded`; no axis if none is.
      coded: paths of the parameters that are.
    """

    sizes: Mapping[str, int]
    shard_axes: Axes
    param_axes: Axes
    leaves: Mapping[str, tuple[tuple[int, ...], Automatic]]
    queue: GatherQueue
    balance: float = dataclasses.field(kw_only=True)
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alone: Axes = ()
    scope: Hashable = None
    divergent: bool = False
    gather_codes: Blocks | None = None
    reduce_codes: Mapping[str, Blocks | None] = dataclasses.field(default_factory=dict)
    coded: frozenset[str] = frozenset()

    @functools.cached_property
    def axes(self) -> Axes:
        """All data axes."""
        return tuple(self.sizes)

    @functools.cached_property
    def replica_axes(self) -> Axes:
        """The data axes beside those of a gradient's shards: along them all devices hold the same shard."""
        return tuple(axis for axis in self.axes if axis not in self.shard_axes)

    @functools.cached_property
    def num(self) -> int:
        """How many devices there are."""
        return self.count(self.axes)

    @functools.cached_property
    def num_shards(self) -> int:
        """How many shards a gradient has."""
        return self.count(self.shard_axes)

    @property
    def num_replicas(self) -> int:
        """How many devices hold the same shard of a gradient."""
        return self.num // self.num_shards

    def count(self, axes: Axes) -> int:
        """How many shards there are over `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def value(
        self, x: jax.Array, dim: int | None, shape: Sequence[int], like: Settled | str = ""
    ) -> Settled:
        """An array that is whole (None) or sharded like a gradient; `shape` is that of the whole.

        It has the name, and lies over automatic axes, as another value that is `like` it.
        """
        name = like if isinstance(like, str) else like.name
        if dim is None:
            return FullValue(x, name)
        same = isinstance(like, ShardValue) and like.dim == dim
        automatic = like.automatic if isinstance(like, ShardValue) and same else None
        return ShardValue(x, dim, shape[dim], self.shard_axes, name, automatic=automatic)

    def shard_size(self, size: int, axes: Axes | None = None) -> int:
        """How much of a dim of `size` each device holds, padding included: n -> n/k."""
        num = self.num_shards if axes is None else self.count(axes)
        return padded_size(size, self.num_shards) // num

    def line_up(self, size: int, other: int) -> bool:
        """Whether shards of dims of these sizes hold the same parts of what a reshape made of them."""
        return size == other or not (size % self.num_shards or other % self.num_shards)

    def without_padding(self, value: ShardValue, reduces: str) -> jax.Array:
        """The shard `[n/k, d]` with padding that changes no 'sum', 'max' or 'min' of it."""
        if value.size % self.num_shards == 0:
            return value.x
        fill = _rules.neutral(reduces, value.x.dtype)
        return _collectives.mask_padding(value.x, value.dim, value.size, value.axes, fill)

    def shard_shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """`[n, d]` -> `[n/k, d]`, a gradient's shard along `dim`; the whole for None."""
        return tuple(self.shard_size(n) if d == dim else n for d, n in enumerate(shape))

    # -- gathers and slices ------------------------------------------------------------------------

    def as_dim(self, value: Value, dim: int | None) -> jax.Array:
        """A given layout of `[n, d]`: a gradient's shard `[n/k, d]` along `dim`, or the whole for None."""
        return self.full(value) if dim is None else self.shard(value, dim)

    def full(self, value: Value, as_codes: bool = False) -> jax.Array:
        """The whole `[n, d]`; of a shard, gathered once in a scope, `as_codes` if it may be."""
        value = self.settle(value)
        if isinstance(value, FullValue):
            return value.x
        if isinstance(value, CodedValue):
            return self._decoded(value)
        key = (self.scope, as_codes and value.coded)
        if key not in value.gathered and value.view_of is not None:
            origin, rearrange = value.view_of
            value.gathered[key] = rearrange(self.full(origin, as_codes))
        if key not in value.gathered:
            value.gathered[key] = self.whole(value, self._when_due(value), as_codes)
        return value.gathered[key]

    def with_all_rows(self, value: CodedValue) -> CodedValue:
        """A leaf that rests in codes with its rows gathered, once in a scope; a cast shares them."""
        if not value.axes:
            return value
        origin = value.origin or value
        if self.scope not in origin.gathered:
            rows = not_before(
                origin.rows, self.queue.tokens(_coded.nbytes_of_rows(origin, self.sizes))
            )
            for axes in reversed(self._steps(origin.axes)):
                self._check_together("a parameter is gathered")
                rows = _coded.gather_rows(rows, origin, axes)
            origin.gathered[self.scope] = rows
        return _coded.with_all_rows(value, origin.gathered[self.scope])

    def _decoded(self, value: CodedValue) -> jax.Array:
        """The whole `[n, d]` of a leaf that rests in codes, decoded once in a scope."""
        if self.scope not in value.views:
            gathered = self.with_all_rows(value)
            # Else the compiler would decode long before the use, or before a loop for all of its turns.
            tokens = self.queue.decoding_tokens()
            x = _coded.decode_rows(not_before(gathered.rows, tokens), gathered)
            whole = FullValue(_coded.without_padding(x, gathered), value.name)
            value.views[self.scope] = whole
        return value.views[self.scope].x

    def own_part(self, value: CodedValue) -> Settled:
        """This device's part of a leaf that rests in codes, `[n/k, d]`, or all of it, decoded."""
        if not value.axes:
            return FullValue(self._decoded(value), value.name)
        return _coded.own_part(value, self.scope)

    def whole(self, value: ShardValue, x: jax.Array, as_codes: bool = False) -> jax.Array:
        """`x [n/k, d]`, the value's shard or a part of it along another dim, gathered: `[n, d]`."""
        wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
        codes = self.gather_codes if as_codes and value.coded and wide else None
        for axes in reversed(self._steps(value.axes)):  # the outer, slower axes move least
            x = self._gather(x, value, axes, codes)
        return _collectives.unpad(x, value.dim, value.size)

    def _when_due(self, value: ShardValue) -> jax.Array:
        """The shard, but not before it is this value's turn to be gathered."""
        nbytes = value.x.nbytes * self.count(value.axes)
        return not_before(value.x, self.queue.tokens(nbytes))

    def shard(self, value: Value, dim: int, axes: Axes | None = None) -> jax.Array:
        """This device's `[n/k, d]` along `dim`; of a full value, alike on all devices, its part."""
        axes = self.shard_axes if axes is None else axes
        if waits(value) and not value.scattered:
            value.dim = dim
        value = self.settle(value)
        value = self.own_part(value) if isinstance(value, CodedValue) else value
        if not (isinstance(value, ShardValue) and value.dim == dim):
            padded = _collectives.pad(self.full(value), dim, self.num_shards)
            return _collectives.take_shard(padded, dim, axes, self.count(axes))
        more, fewer = axes[len(value.axes) :], value.axes[len(axes) :]
        if more:
            return _collectives.take_shard(value.x, dim, more, self.count(more))
        return self._gather(value.x, value, fewer) if fewer else value.x

    def exchanged(self, value: Settled, dim: int) -> jax.Array:
        """This device's part along another dim than that of the shards, `[n, d/k] -> [n/k, d]`.

        If it is padded, then with what is last along it.
        """
        assert not isinstance(value, CodedValue), "what an update makes rests in no codes"
        if isinstance(value, FullValue):
            filled = _collectives.filled_up(value.x, dim, self.num_shards)
            return _collectives.take_shard(filled, dim, self.shard_axes, self.num_shards)
        x = self.shard(value, value.dim)
        if dim == value.dim:
            return x
        self._check_together("a matrix is sent to its owner")
        x = _collectives.filled_up(x, dim, self.num_shards)
        x = _collectives.exchange(x, dim, value.dim, self.shard_axes, value.name)
        return _collectives.unpad(x, value.dim, value.size)

    def full_into(self, old: jax.Array, value: Value, codes: Blocks | None = None) -> jax.Array:
        """The whole `[n, d]`, in the place of `old`, which nothing reads any more.

        With `codes` what travels is the difference to it, if a shard does.
        """
        settled = self.settle(value)
        if not isinstance(settled, ShardValue):
            return settled.x
        if codes is not None:
            return self._plus_difference(old, settled, (), codes)
        if not self._goes_into(old, settled):
            return self.full(settled)
        laid_out = part_by_part(row_major, self.automatic(settled))
        return slices_into(
            old, settled.x, GATHERED_AT_ONCE, lambda _, part: laid_out(self.whole(settled, part))
        )

    def shard_into(
        self, old: jax.Array, value: Value, dim: int, axes: Axes, codes: Blocks | None = None
    ) -> jax.Array:
        """A shard `[n/k, d]` over `axes`, the first of the value's, in the place of `old`; likewise."""
        settled = self.settle(value) if codes is not None else value
        if codes is None or not isinstance(settled, ShardValue) or settled.dim != dim:
            return self.shard(settled, dim, axes)
        if len(settled.axes) <= len(axes):
            return self.shard(settled, dim, axes)
        return self._plus_difference(old, settled, axes, codes)

    def _plus_difference(
        self, old: jax.Array, value: ShardValue, axes: Axes, codes: Blocks
    ) -> jax.Array:
        """`old`, `[n, d]` or its shard over `axes`, and its difference to `value [n/k, d]`, in codes."""
        over, wide = value.axes[len(axes) :], jnp.promote_types(old.dtype, jnp.float32)
        here = old if axes else _collectives.pad(old, value.dim, self.num_shards)
        here = _collectives.take_shard(here, value.dim, over, self.count(over))
        mine = value.x.astype(wide) - here.astype(wide)
        if value.size % self.num_shards:
            mine = _collectives.mask_padding(mine, value.dim, value.size, value.axes, 0)

        def renewed(old: jax.Array, part: jax.Array) -> jax.Array:
            change = self._gather(part, value, over, codes)
            if not axes:
                change = _collectives.unpad(change, value.dim, value.size)
            return (old.astype(wide) + change).astype(old.dtype)

        if self._goes_into(old, value):
            laid_out = part_by_part(row_major, self.automatic(value))
            return slices_into(
                old, mine, GATHERED_AT_ONCE, lambda old, mine: laid_out(renewed(old, mine))
            )
        return renewed(old, mine)

    def _goes_into(self, old: jax.Array, value: ShardValue) -> bool:
        """Whether it is large, not yet gathered, and sharded along another dim than the first."""
        if value.dim == 0 or (self.scope, False) in value.gathered:
            return False
        in_slices = old.dtype == value.x.dtype and not any(self.automatic(value)[:1])
        return bool(in_slices and old.nbytes > GATHERED_AT_ONCE)

    def _gather(
        self, shard: jax.Array, value: ShardValue, axes: Axes, codes: Blocks | None = None
    ) -> jax.Array:
        """`[n/k, d] -> [n, d]`, for the k devices of `axes`; what lies as `value` does."""
        self._check_together("a parameter is gathered")
        automatic = self.automatic(value)
        if codes is not None:
            return _coded.gather(shard, value.dim, axes, value.name, automatic, codes)
        return _collectives.gather(shard, value.dim, axes, value.name, automatic)

    def _steps(self, axes: Axes) -> list[Axes]:
        """Axes that one collective runs over: those of parameters, then the rest."""
        first, rest = axes[: len(self.param_axes)], axes[len(self.param_axes) :]
        return [group for group in (first, rest) if group]

    # -- reductions --------------------------------------------------------------------------------

    def settle(self, value: Value) -> Settled:
        """The value with its reduction done: a shard along the dim that it wants, or whole for None."""
        if not isinstance(value, Unreduced):
            return value
        if value.reduced is None:
            value.reduced = self._reduce(value)
        return value.reduced

    def _reduce(self, value: Unreduced) -> Settled:
        """`x [n, d]`, or what of it was scattered, `[n/k, d]` -> the sum's `[n/k, d]`, or `[n, d]`."""
        if value.scattered:
            assert value.dim is not None
            total = self._over_replicas(value.x, value).astype(value.dtype)
            return ShardValue(total, value.dim, value.size, self.shard_axes, value.name)
        dim, (before, after) = value.dim if self.num > 1 else None, _halves(value)
        if dim is None:
            total = _scaled(value.x, before)
        else:
            total = self._scatter(value, dim, before)
        if self.num > 1 and dim is None:
            total = self._all_reduce(total, self.axes, value.name, None)
        elif self.num > 1:
            total = self._over_replicas(total, value)
        total = _scaled(total, after).astype(value.dtype)
        return self.value(total, dim, value.x.shape, value.name)

    def scatter(self, value: Value) -> Value:
        """`[n, d] -> [n/k, d]`: the sum over the axes of a shard, if it is due; that over replicas waits."""
        if waits(value) and value.scattered:
            return value
        if not waits(value) or value.dim is None or not self.replica_axes:
            return self.settle(value)
        before, after = _halves(value)
        total = self._scatter(value, value.dim, before)
        total = total * jnp.asarray(after, total.dtype)
        size = value.x.shape[value.dim]
        return dataclasses.replace(value, x=total, scale=1.0, size=size, scattered=True)

    def _scatter(self, value: Unreduced, dim: int, scale: float) -> jax.Array:
        """`x [n, d]` of each device -> this one's `[n/k, d]` of `scale` times their sum, in its turn."""
        rows = rows_of(value)
        if rows and all(self.adds_rows(each, dim, value.name, value.coded) for each in rows):
            self._check_together("a gradient is reduced")
            sums = [_tables.add_up(each, dim, self.shard_axes, value.name, scale) for each in rows]
            return functools.reduce(jnp.add, sums)
        total = _collectives.pad(_scaled(value.x, scale), dim, self.num_shards)
        tokens = self.queue.reduction_tokens(value.made, total.nbytes)
        shard = self.reduce_scatter(total, dim, value.name, value.coded, tokens)
        self.queue.note_reduction(shard, value.made, total.nbytes)
        return shard

    def adds_rows(self, rows: RowsAdded, dim: int, name: str, coded: bool) -> bool:
        """Whether rows are exchanged for columns of their sum, and not their sums reduced."""
        codes = coded and any(self.reduce_codes.get(axis) for axis in self.shard_axes)
        shape = rows.table.shape
        even = dim in added_dims(rows.eqn) and shape[dim] % self.num_shards == 0
        return even and not codes and not any(self.automatic_of(name, shape, dim))

    def looks_up(self, table: ShardValue) -> bool:
        """Whether columns of all rows that are looked up are exchanged for rows."""
        even = table.size % self.count(table.axes) == 0
        codes = table.coded and self.gather_codes is not None
        here = (self.scope, False) in table.gathered or comes_from_codes(table)
        return even and not (codes or here or self.divergent or any(self.automatic(table)))

    def reduce_scatter(
        self, total: jax.Array, dim: int, name: str, coded: bool = False,
        tokens: Sequence[jax.Array] = (),
    ) -> jax.Array:  # fmt: skip
        """`total [n, d]` of each device, or a part of it along another dim -> `[n/k, d]` of their sum.

        When `tokens` are there.
        """
        self._check_together("a gradient is reduced")
        shard = _collectives.pad(total, dim, self.num_shards)
        codes = {axis: self.reduce_codes.get(axis) for axis in self.shard_axes}
        if coded and any(codes.values()):
            # The last axis of the mesh is the fastest: it carries most, and the others its sums.
            hops = [axis for axis in reversed(self.axes) if axis in codes]
            sizes = {axis: self.sizes[axis] for axis in self.shard_axes}
            automatic = self.automatic_of(name, shard.shape, dim)
            alone = self._alone(shard)
            if any(automatic) or alone:
                shard, tokens = not_before(shard, tokens), ()
            # Else codes wait, and not what they are made of, which is larger.
            return _coded.reduce_scatter(
                shard, dim, sizes, hops, codes, name, automatic, tokens, alone
            )
        automatic, alone = self.automatic_of(name, shard.shape, dim), self._alone(shard)
        if dim and tokens:
            shard = _collectives.with_dim_first(shard, dim, automatic, alone)
        shard = not_before(shard, tokens)
        for axes in self._steps(self.shard_axes):
            automatic, alone = self.automatic_of(name, shard.shape, dim), self._alone(shard)
            shard = _collectives.reduce_scatter(shard, dim, axes, name, automatic, alone)
        return shard

    def _over_replicas(self, total: jax.Array, value: Unreduced) -> jax.Array:
        """`[n/k, d]` of each device -> their sum over the axes beside those of a shard."""
        exact = self.replica_axes
        if value.coded:
            exact = tuple(axis for axis in exact if not self.reduce_codes.get(axis))
        for axis in self.replica_axes:
            codes = self.reduce_codes.get(axis) if axis not in exact else None
            if codes is not None:
                self._check_together("a gradient is reduced")
                total = _coded.all_reduce(total, axis, self.sizes[axis], codes, value.name)
        return self._all_reduce(total, exact, value.name, value.dim)

    def _all_reduce(self, total: jax.Array, axes: Axes, name: str, dim: int | None) -> jax.Array:
        """`[n, d]` of each device -> their sum `[n, d]` over `axes`, if there are any.

        Of a value that is sharded along `dim`, or whole for None.
        """
        if not axes:
            return total
        self._check_together("a gradient is reduced")
        automatic = self.automatic_of(name, total.shape, dim)
        return _collectives.all_reduce(total, axes, "sum", name, automatic, self._alone(total))

    def all_reduce(self, local: jax.Array, axes: Axes, kind: str = "sum") -> jax.Array:
        """`[n, d]` of each device -> their sum (or 'max', 'min') `[n, d]` over some mesh axes."""
        return _collectives.all_reduce(local, axes, kind, alone=self._alone(local))

    def alone_if_narrow(
        self, collective: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """A sum of the step's own, `collective(x)`: [Note: 16 bits on CPUs]."""
        return _collectives.part_by_part(collective, (), self._alone(x))(x)

    def _alone(self, x: jax.Array) -> Axes:
        """Over which axes XLA must not shard a sum of what is like `x`."""
        narrow = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
        return self.alone if narrow else ()

    def automatic(self, value: ShardValue) -> Automatic:
        """How XLA shards a value over further axes, along other dims than its `dim`."""
        if value.automatic is not None:
            return value.automatic
        return self.automatic_of(value.name, value.x.shape, value.dim)

    def automatic_of(self, name: str, found: Sequence[int], dim: int | None) -> Automatic:
        """How XLA shards what is `found`, by its shape, of a leaf: itself, a cast, a slice along its dim 0.

        Or a stack that a step has reshaped into stages, `[s * l, n, d] -> [s, l, n, d]`. Its dim `dim` is
        sharded, and may have any size; None if none is.
        """
        shape, automatic = self.leaves.get(name, ((), ()))
        for first in (0, 1):
            like = shape[first:]
            sliced = not (first or any(automatic[:1]))
            rest = [d for d in range(sliced, len(like)) if d != dim]
            if len(like) == len(found) and all(like[d] == found[d] for d in rest):
                # On another dim a wrong guess (of a transposed view) costs traffic; on this one, where
                # devices and parts would interleave, it would cost the order of the elements.
                of_dim = () if dim is None else automatic[first + dim : first + dim + 1]
                return () if any(of_dim) else automatic[first:]
        return self._of_stages(found, dim, shape, automatic)

    def _of_stages(
        self, found: Sequence[int], dim: int | None, shape: Sequence[int], automatic: Automatic
    ) -> Automatic:
        if len(found) != len(shape) + 1 or not any(automatic[:1]) or dim in (0, 1):
            return ()
        same = all(found[d + 1] == shape[d] for d in range(1, len(shape)) if d + 1 != dim)
        parts = math.prod(self.others[axis] for axis in automatic[0])
        stages = (automatic[0], (), *automatic[1:])
        whole = dim is None or not any(stages[dim : dim + 1])
        fits = same and whole and found[0] * found[1] == shape[0] and found[0] % parts == 0
        return stages if fits else ()

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


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


class DivergentError(StepError):
    """A collective would run where not all devices are."""
