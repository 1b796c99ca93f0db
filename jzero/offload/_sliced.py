# SPDX-License-Identifier: Apache-2.0
"""A turn whose leaves are larger than the room for them: updated in slices of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import DEVICE, PINNED
from jzero.offload._slicing import layout_of, num_rows
from jzero.offload.memory._pinned_leaf import renewed
from jzero.segments import _conversions
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Values, Var
from jzero.sharding.cut import _elementwise
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import Shard
from jzero.sharding.plan._plan import Turn
from jzero.tracing import _jaxpr


def _rows(x: jax.Array) -> jax.Array:
    """All dims but the last as one; a slice of them is one stretch of memory."""
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)


def _cut(x: jax.Array, start: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(_rows(x), start, size, 0)


def _put(x: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(_rows(x), part, start, 0).reshape(x.shape)


def _done(start: Any) -> jax.Array:
    """A result of a program that no other one consumes, to wait for; JAX would forward `start` itself."""
    return jnp.asarray(start + 1)


class SlicedTurn:
    """The programs of one piece, for rows of its leaves.

    Parameters, and whatever else of the state rests on the devices, become shards like the moments' first
    and are updated in place; when the last slice is done they take the form in which they rest.
    """

    def __init__(
        self, planned: PlannedStep, turn: Turn, homes: Mapping[Var, NamedSharding], frees: set[Var]
    ):
        """Makes the programs.

        Args:
          planned: the step.
          turn: one piece, in slices.
          homes: where offloaded leaves rest.
          frees: what nobody reads after it.
        """
        piece = planned.plan.update.pieces[turn.pieces[0]]
        self._piece, self._homes, self._frees = piece, homes, frees
        self._planned, self._frame = planned, planned.frame
        leaves, boundary = planned.plan.leaves, planned.plan.boundary
        layout = layout_of(planned.frame, leaves, boundary, piece)
        leaf = leaves[piece.leaves[0]]
        assert layout is not None
        self._layout, self._leaf = layout, leaf
        self._spec = _layout.partition_spec(layout)
        self._slice_spec = P(layout.axes) if isinstance(layout, Shard) else P()
        invars = self._frame.jaxpr.invars
        self._back = [i for i in piece.outs if invars[i] in homes]
        self._renewed = [i for i in piece.outs if invars[i] not in homes]
        hosted = [var for var in piece.reads if var in homes]
        self._own = [
            var for var in hosted if var in self._vars(self._back)
        ]  # renewed in their place
        self._others = [var for var in hosted if var not in self._own]
        rest = [v for v in piece.reads if v not in homes and v not in self._vars(self._renewed)]
        self._scalars = [var for var in rest if not var.aval.shape]
        self._large = [var for var in rest if var.aval.shape]
        rows = num_rows(leaf)
        size = -(-rows // turn.parts)
        self._slices = [(start, min(size, rows - start)) for start in range(0, rows, size)]
        self._enter_renewed = self._entering(self._vars(self._renewed))
        self._enter_large = self._entering(self._large)
        self._fetch, self._update, self._store = self._fetching(), self._updating(), self._storing()
        self._leave = self._leaving()

    def _vars(self, outs: Sequence[int]) -> list[Var]:
        return [self._frame.jaxpr.invars[i] for i in outs]

    def visits(
        self, values: Values, outs: dict[int, Any]
    ) -> Iterator[tuple[Callable[[], Any], Callable[[Any], list[jax.Array]]]]:
        """Each slice's copy to the devices, and its update and copy back; at the end the piece's `outs`."""
        held: list[
            list[jax.Array]
        ] = []  # of the state on the devices, as shards: renewed, only read

        def fetch(start: jax.Array, size: int) -> Any:
            groups = [[values[var] for var in group] for group in (self._own, self._others)]
            return self._fetch(*groups, start, size=size)

        def update(start: jax.Array, size: int, arrays: Any) -> list[jax.Array]:
            if not held:
                held.append(self._enter_renewed([values[v] for v in self._vars(self._renewed)]))
                held.append(self._enter_large([values[v] for v in self._large]))
            scalars = [values[var] for var in self._scalars]
            own, others = arrays
            new, held[0], done = self._update(
                own, held[0], others, held[1], scalars, start, size=size
            )
            if homes := self._vars(self._back):
                if start is self._starts[0]:
                    values.update(zip(homes, self._taken(values), strict=True))
                stored, done = self._store([values[var] for var in homes], new, start)
                values.update(zip(homes, stored, strict=True))
            if start is self._starts[-1]:
                finish()
            return [done]

        def finish() -> None:
            outs.update(
                (i, values[var]) for i, var in zip(self._back, self._vars(self._back), strict=True)
            )
            olds = [values[var] for var in self._vars(self._renewed)]
            outs.update(zip(self._renewed, self._leave(olds, held[0]), strict=True))
            held.clear()
            for var in self._frees:
                del values[var]

        for start, (_, size) in zip(self._starts, self._slices, strict=True):
            yield functools.partial(fetch, start, size), functools.partial(update, start, size)

    @functools.cached_property
    def _starts(self) -> list[Any]:
        """The first row of each slice, on the devices: copied there once, for a guard may forbid steps to."""
        place = NamedSharding(self._planned.mesh, P())
        rows = [np.asarray(start, np.int32) for start, _ in self._slices]
        if not isinstance(self._planned.mesh, Mesh):
            return rows  # There are no devices, and nothing will run.
        with jax.transfer_guard("allow"):  # JAX counts this as implicit.
            return [jax.make_array_from_callback((), place, x.__getitem__) for x in rows]

    def _taken(self, values: Values) -> list[jax.Array]:
        """The leaves that slices are stored into, for these are donated."""
        olds = {i: values[var] for i, var in zip(self._back, self._vars(self._back), strict=True)}
        if any(isinstance(x, jax.core.Tracer) for x in olds.values()):
            return [*olds.values()]
        return [*renewed(olds, self._back, self._planned.plan.leaves).values()]

    # -- programs ------------------------------------------------------------------------------------

    def _entering(self, variables: Sequence[Var]) -> Callable[..., Any]:
        enter = _conversions.entering(self._planned, variables)
        return list if enter is None else jax.jit(enter)

    def _leaving(self) -> Callable[..., Any]:
        leave = _conversions.leaving(self._planned, self._renewed)
        return (lambda olds, shards: shards) if leave is None else jax.jit(leave, donate_argnums=0)

    def _place(self, tier: str) -> NamedSharding:
        return NamedSharding(self._planned.mesh, self._slice_spec, memory_kind=tier)

    def _fetching(self) -> Callable[..., Any]:
        nums, place = (len(self._own), len(self._others)), self._place(DEVICE)

        def fetch(own: list[Any], others: list[Any], start: Any, size: int) -> Any:
            def local(groups: tuple[list[Any], list[Any]], start: Any) -> Any:
                return tuple([_cut(x, start, size) for x in xs] for xs in groups)

            ins = tuple([self._spec] * num for num in nums), P()
            outs = tuple([self._slice_spec] * num for num in nums)
            return jax.device_put(
                self._planned.shard_map(local, ins, outs)((own, others), start), place
            )

        return jax.jit(fetch, static_argnames="size", out_shardings=place)

    def _storing(self) -> Callable[..., Any]:
        num, place = len(self._back), self._place(PINNED)

        def store(olds: list[Any], new: list[Any], start: Any) -> tuple[list[Any], Any]:
            def local(olds: list[Any], new: list[Any], start: Any) -> list[Any]:
                return [_put(x, part, start) for x, part in zip(olds, new, strict=True)]

            specs = [self._spec] * num
            run = self._planned.shard_map(local, (specs, [self._slice_spec] * num, P()), specs)
            # What the next slice does not consume, to wait for.
            return run(olds, jax.device_put(new, place), start), _done(start)

        homes = [self._homes[var] for var in self._vars(self._back)]
        return jax.jit(store, donate_argnums=0, out_shardings=(homes, None))

    def _updating(self) -> Callable[..., Any]:
        jaxpr, back, renewed, slices = (
            self._frame.jaxpr,
            self._back,
            self._renewed,
            self._slice_spec,
        )
        whole = [*self._vars(renewed), *self._large]

        def local(size: int, groups: list[list[Any]], start: Any) -> tuple[list[Any], list[Any]]:
            own, olds, others, reads, scalars = groups
            cut = [_cut(x, start, size) for x in [*olds, *reads]]
            names = [*self._own, *self._others, *whole, *self._scalars]
            given = dict(zip(names, [*own, *others, *cut, *scalars], strict=True))
            shape = next(x.shape for x in given.values() if x.ndim)
            values = _elementwise.evaluate(self._frame, self._piece.eqns, given, shape)
            new = {
                i: self._masked(values[_jaxpr.variable(jaxpr.outvars[i])], start)
                for i in self._piece.outs
            }
            new = {i: _jaxpr.with_type_of(x, jaxpr.outvars[i]) for i, x in new.items()}
            parts = [_put(x, new[i], start) for i, x in zip(renewed, olds, strict=True)]
            return [new[i] for i in back], parts

        specs = [
            [slices] * len(self._own), [self._spec] * len(renewed), [slices] * len(self._others),
            [self._spec] * len(self._large), [P()] * len(self._scalars),
        ]  # fmt: skip
        outs = ([slices] * len(back), [self._spec] * len(renewed))

        def update(
            own: Any, olds: Any, others: Any, reads: Any, scalars: Any, start: Any, size: int
        ) -> Any:
            run = self._planned.shard_map(functools.partial(local, size), (specs, P()), outs)
            return *run([own, olds, others, reads, scalars], start), _done(start)

        return jax.jit(update, static_argnames="size", donate_argnums=(0, 1))

    def _masked(self, x: jax.Array, start: Any) -> jax.Array:
        """Rows of a leaf, with zeros where it is padded."""
        if not self._leaf.padding:
            return x
        assert isinstance(self._layout, Shard)
        dim, local = self._layout.dim, self._leaf.shape_per_device
        row = start + lax.broadcasted_iota(jnp.int32, x.shape, 0)
        if dim == len(local) - 1 and dim > 0:
            place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        else:
            place = row // math.prod(local[dim + 1 : -1]) % local[dim]
        index = lax.axis_index(self._layout.axes) * local[dim] + place
        return jnp.where(index < self._leaf.shape[dim], x, jnp.zeros((), x.dtype))
