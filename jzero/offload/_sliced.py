# SPDX-License-Identifier: Apache-2.0
"""A bucket whose leaves are larger than `device_bytes`: updated in slices of rows."""

from __future__ import annotations

import dataclasses
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
from jzero.offload.schedule._ops import (
    DeviceCall,
    Fetch,
    Loop,
    Op,
    Run,
    Send,
    Slice,
    Value,
    of_list,
)
from jzero.segments import _conversions
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Var
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut import _elementwise
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._plan import UpdateBucket
from jzero.sharding.plan._stored_layout import Shard


def _rows(x: jax.Array) -> jax.Array:
    """`[n, m, d] -> [n * m, d]`, so that a slice along dim 0 is contiguous."""
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)


def _cut(x: jax.Array, start: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(_rows(x), start, size, 0)


def _put(x: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(_rows(x), part, start, 0).reshape(x.shape)


def _done(start: Any) -> jax.Array:
    """A result to wait for that no other program donates; JAX would forward `start` itself."""
    return jnp.asarray(start + 1)


class SlicedBucket:
    """The programs of one subgraph, for rows of its leaves.

    Parameters, and other state that is stored on the devices, are first sharded like the moments and updated
    in place; after the last slice they take their stored layout.
    """

    def __init__(
        self, planned: PlannedStep, bucket: UpdateBucket, offloaded: Mapping[Var, NamedSharding]
    ):
        """`bucket` has one subgraph; `offloaded` has the shardings of leaves in pinned memory."""
        subgraph = planned.plan.update.subgraphs[bucket.subgraphs[0]]
        self._subgraph, self._offloaded, self._nbytes = subgraph, offloaded, bucket.nbytes_at_once
        self._planned, self._frame = planned, planned.frame
        leaves, interface = planned.plan.leaves, planned.plan.interface
        layout = layout_of(planned.frame, leaves, interface, subgraph)
        leaf = leaves[subgraph.leaves[0]]
        assert layout is not None
        self._layout, self._leaf = layout, leaf
        self._spec = _stored_layout.partition_spec(layout, leaf.automatic)
        self._also = tuple(axis for names in leaf.automatic for axis in names)
        axes = (*(layout.axes if isinstance(layout, Shard) else ()), *self._also)
        self._slice_spec = P(axes) if axes else P()
        invars = self._frame.jaxpr.invars
        self._back = [i for i in subgraph.outs if invars[i] in offloaded]
        self._renewed = [i for i in subgraph.outs if invars[i] not in offloaded]
        fetched = [var for var in subgraph.reads if var in offloaded]
        # Updated in place, or only read.
        self._own = [var for var in fetched if var in self._vars(self._back)]
        self._others = [var for var in fetched if var not in self._own]
        rest = [
            v for v in subgraph.reads if v not in offloaded and v not in self._vars(self._renewed)
        ]
        self._scalars = [var for var in rest if not var.aval.shape]
        self._large = [var for var in rest if var.aval.shape]
        rows = num_rows(leaf)
        size = -(-rows // bucket.parts)
        self._slices = [(start, min(size, rows - start)) for start in range(0, rows, size)]

    def _vars(self, outs: Sequence[int]) -> list[Var]:
        return [self._frame.jaxpr.invars[i] for i in outs]

    def ops(self, names: Callable[[Var], Value], new: Mapping[int, Value]) -> Iterator[Op]:
        """The operations of the update; `new` are the names of updated leaves on the devices."""
        own, others, back = (
            tuple(Slice(names(v)) for v in group)
            for group in (self._own, self._others, self._vars(self._back))
        )
        renewed, large, scalars = (
            tuple(map(names, group))
            for group in (self._vars(self._renewed), self._large, self._scalars)
        )
        # State on the devices, in shards: updated, or only read.
        held, read = (tuple(map(dataclasses.replace, group)) for group in (renewed, large))
        yield Run("", renewed, held, of_list(self._entering(self._vars(self._renewed))))
        yield Run("", large, read, of_list(self._entering(self._large)))
        body: list[Op] = [
            Fetch((*own, *others), PINNED, (), self._fetch(), self._nbytes),
            Run(
                "a bucket of the update", (*own, *held, *others, *read, *scalars), (*back, *held),
                self._update(),
            ),
        ]  # fmt: skip
        if back:
            body.append(Send(back, PINNED, (), self._store(), copies=0))
        yield Loop(tuple(body), len(self._slices), "")
        yield Run("", (*renewed, *held), tuple(new[i] for i in self._renewed), self._leaving())

    @functools.cached_property
    def _starts(self) -> list[Any]:
        """The first row of each slice, on the devices; copied once, as a guard may forbid it in steps."""
        place = NamedSharding(self._planned.mesh, P())
        rows = [np.asarray(start, np.int32) for start, _ in self._slices]
        if not isinstance(self._planned.mesh, Mesh):
            return rows  # There are no devices, and nothing will run.
        with jax.transfer_guard("allow"):  # JAX counts this as implicit.
            return [jax.make_array_from_callback((), place, x.__getitem__) for x in rows]

    def _taken(self, stacks: Sequence[Any]) -> list[Any]:
        """Stored leaves that slices are written into: taken from the user, as they are donated."""
        olds = dict(zip(self._back, stacks, strict=True))
        if any(isinstance(x, jax.core.Tracer) for x in stacks):
            return [*stacks]
        return [*renewed(olds, self._back, self._planned.plan.leaves).values()]

    def _entering(self, variables: Sequence[Var]) -> Callable[..., Any]:
        enter, planned = _conversions.entering(self._planned, variables), self._planned
        passed = map(planned.plan.interface.as_passed, variables)
        places = [value.aval(planned.mesh).sharding for value in passed]
        return list if enter is None else jax.jit(enter, out_shardings=places)

    def _leaving(self) -> DeviceCall:
        """`[*old leaves, *shards] -> leaves`."""
        leave, num = _conversions.leaving(self._planned, self._renewed), len(self._renewed)
        if leave is None:
            return lambda arrays, _: (arrays[num:], ())
        stored = map(self._planned.plan.interface.of, self._vars(self._renewed))
        places = [value.aval(self._planned.mesh).sharding for value in stored]
        run: Any = jax.jit(leave, donate_argnums=0, out_shardings=places)
        return lambda arrays, _: (run([*arrays[:num]], [*arrays[num:]]), ())

    def _place(self, tier: str) -> NamedSharding:
        return NamedSharding(self._planned.mesh, self._slice_spec, memory_kind=tier)

    def _shard_map(self, local: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return self._planned.shard_map(local, ins, outs, self._also)

    def _fetch(self) -> Callable[[Sequence[Any], int], Sequence[Any]]:
        """`(stacks, index of the slice) -> its rows`."""
        num, place = len(self._own) + len(self._others), self._place(DEVICE)

        def fetch(stacks: list[Any], start: Any, size: int) -> Any:
            def local(stacks: list[Any], start: Any) -> list[Any]:
                return [_cut(x, start, size) for x in stacks]

            ins, outs = ([self._spec] * num, P()), [self._slice_spec] * num
            return jax.device_put(self._shard_map(local, ins, outs)(stacks, start), place)

        run = jax.jit(fetch, static_argnames="size", out_shardings=place)

        def by(stacks: Sequence[Any], place: int) -> Sequence[Any]:
            rows: Sequence[Any] = run([*stacks], self._starts[place], size=self._slices[place][1])
            return rows

        return by

    def _store(self) -> Callable[[Any, Sequence[Any], int], Any]:
        """`(stacks, rows, index of the slice) -> stacks, what to wait for`."""
        num, place = len(self._back), self._place(PINNED)

        def store(olds: list[Any], new: list[Any], start: Any) -> tuple[list[Any], Any]:
            def local(olds: list[Any], new: list[Any], start: Any) -> list[Any]:
                return [_put(x, part, start) for x, part in zip(olds, new, strict=True)]

            specs = [self._spec] * num
            run = self._shard_map(local, (specs, [self._slice_spec] * num, P()), specs)
            return run(olds, jax.device_put(new, place), start), _done(start)

        stored = [self._offloaded[var] for var in self._vars(self._back)]
        run = jax.jit(store, donate_argnums=0, out_shardings=(stored, None))

        def by(stacks: Any, new: Sequence[Any], place: int) -> Any:
            olds = stacks if place else self._taken(stacks)
            stored, done = run(olds, [*new], self._starts[place])
            return stored, [done]

        return by

    def _update(self) -> DeviceCall:
        """`[*own, *held, *others, *read, *scalars] -> [*new rows, *held]`."""
        spec, rows = self._spec, self._slice_spec
        groups = (self._own, self._vars(self._renewed), self._others, self._large, self._scalars)
        sizes = [*map(len, groups)]
        names = [var for group in groups for var in group]

        def local(size: int, arrays: list[list[Any]], start: Any) -> tuple[list[Any], list[Any]]:
            own, olds, others, reads, scalars = arrays
            olds_here, reads_here = ([_cut(x, start, size) for x in xs] for xs in (olds, reads))
            here = [*own, *olds_here, *others, *reads_here, *scalars]
            given = dict(zip(names, here, strict=True))
            made = _elementwise.outputs(self._frame, self._subgraph, given)
            new = {i: self._masked(x, start) for i, x in made.items()}
            held = [_put(x, new[i], start) for i, x in zip(self._renewed, olds, strict=True)]
            return [new[i] for i in self._back], held

        specs = [[x] * num for x, num in zip((rows, spec, rows, spec, P()), sizes, strict=True)]
        outs = ([rows] * len(self._back), [spec] * len(self._renewed))

        def update(
            own: Any, olds: Any, others: Any, reads: Any, scalars: Any, start: Any, size: int
        ) -> Any:
            run = self._shard_map(functools.partial(local, size), (specs, P()), outs)
            return *run([own, olds, others, reads, scalars], start), _done(start)

        run = jax.jit(update, static_argnames="size", donate_argnums=(0, 1))

        def call(arrays: Sequence[Any], place: int | None) -> Any:
            assert place is not None
            start, (_, size) = self._starts[place], self._slices[place]
            new, held, done = run(*split(arrays, *sizes[:-1]), start, size=size)
            return [*new, *held], [done]

        return call

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
