# SPDX-License-Identifier: Apache-2.0
"""Sorts the rows of each block by themselves, where a step puts them back (`_row_orders.py`)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir._loops import ConstPort, Scan, SlicePort, StackPort
from jzero.ir._regions import Region, ValueIn
from jzero.ir._rows import RowDims, row_dims
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis._row_orders import EqnIn, Facts, Order, has_sort
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

GROUPED = "ragged_dot_general"
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def sorted_in_blocks(
    flat: _rewrite.Flat, consts: Sequence[Any], dims: Sequence[RowDims], num: int
) -> _rewrite.Flat:
    """Sorts the rows of each of `num` contiguous blocks of the batch; `dims` are the inputs' batch dims."""
    if num == 1 or not has_sort(flat):
        return flat
    opened = flat._replace(eqns=[_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns])
    region = Region(opened, [*consts])  # type: ignore[arg-type]
    rows = {value for value, own in row_dims(region, dims).items() if own == {0}}
    facts = _facts(region, rows, num)
    found: _rewrite.Flat = _Rewritten(facts, region).of(region, {})
    return found if facts.in_blocks else flat


def _facts(region: Region, rows: set[ValueIn], num: int) -> Facts:
    """The orders of all sorts that no equation forbids, and facts about values."""
    kept = frozenset[EqnIn]()
    while True:
        facts = Facts(rows, num, kept)
        facts.run(region)
        for atom in region.jaxpr.outvars:
            facts.blame(facts.of(atom).orders)
        if not facts.blamed:
            return facts
        kept |= facts.blamed


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a loop, branch or checkpoint with its calls flattened, unless these have constants."""
    flat, consts = _rewrite.flatten_calls(jaxpr, ())
    eqns = [_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns]
    return jaxpr if consts else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=flat.outvars)


class _Rewritten:
    """Rewrites programs.

    Grouped products need to know how often each block has each key. These counts are made where the keys are
    sorted, and pass through the programs in between, [Note: orders across programs].
    """

    def __init__(self, facts: Facts, program: Region):
        self._facts = facts
        # For each region, the orders whose counts are made there, passed to it, and returned.
        self._made, self._given, self._returned = (
            collections.defaultdict[Region, dict[Order, None]](dict) for _ in range(3)
        )
        for region, eqn in program.walk():
            if eqn.primitive.name == GROUPED and (region, id(eqn)) in facts.in_blocks:
                self._need(region, facts.in_blocks[region, id(eqn)])

    def _need(self, region: Region, order: Order) -> None:
        """Makes the counts of an order available in a region."""
        inside = _on_the_way(region, order.region)
        if inside is not None:
            self._return(inside, order)
        elif region is not order.region:
            self._give(region, order, order)
        elif order.of is None:
            self._made[region][order] = None
        elif order.body is not None:
            self._return(order.body, order.of)
        else:
            self._give(region, order, order.of)

    def _give(self, region: Region, order: Order, outside: Order) -> None:
        assert region.around is not None
        self._given[region][order] = None
        self._need(region.around[0], outside)

    def _return(self, region: Region, order: Order) -> None:
        self._returned[region][order] = None
        self._need(region, order)

    def of(self, region: Region, counts: dict[Order, Var]) -> Any:
        """The program of a region; `counts` has those that it is passed, and gets those that it makes."""
        jaxpr = region.jaxpr
        if not jaxpr.eqns:
            return jaxpr
        writer = _BlocksWriter(self._facts, region, counts, jaxpr.eqns[0])
        for eqn in jaxpr.eqns:
            order = self._facts.in_blocks.get((region, id(eqn)))
            writer.rewrite(self._with_programs(region, eqn, counts), order)
            if order is not None and order in self._made[region] and order not in counts:
                counts[order] = writer.counted(eqn.invars[0], order)
        assert not writer.constvars
        eqns, outs = writer.eqns, [*map(writer.read, jaxpr.outvars)]
        if isinstance(jaxpr, _rewrite.Flat):
            return jaxpr._replace(eqns=eqns, outvars=outs)
        same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
        return jaxpr if same else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=outs)

    def _with_programs(self, region: Region, eqn: Eqn, counts: dict[Order, Var]) -> Eqn:
        """The equation with its programs rewritten, and the counts that pass through it."""
        inner = region.inner(eqn)
        if not any(self._given[body] or self._returned[body] for body in inner):
            return region.with_inner(eqn, lambda body: self.of(body, {}))
        (body,) = inner
        shared = [order for order in self._given[body] if order.region is not body]
        sliced = [order for order in self._given[body] if order.region is body]
        values = [counts[order] for order in shared]
        stacks = [counts[order.of] for order in sliced if order.of is not None]
        ins, rows = (
            [*map(_jaxpr.new_var, values)],
            [_jaxpr.var_like(x.aval, x.aval.shape[1:]) for x in stacks],
        )
        own = dict(zip((*shared, *sliced), (*ins, *rows), strict=True))
        changed = region.with_inner(eqn, lambda body: self.of(body, own))
        returned = [*self._returned[body]]
        outs = [own[order] for order in returned]
        if eqn.primitive.name != "scan":
            new = [*map(_jaxpr.new_var, outs)]
            counts |= zip(returned, new, strict=True)
            return _with_values(changed, values, ins, new, outs)
        loop = Scan.of(changed)
        new = [_jaxpr.var_like(x.aval, (loop.length, *x.aval.shape)) for x in outs]
        counts |= zip((self._facts.stack(body, order) for order in returned), new, strict=True)
        return dataclasses.replace(
            loop, consts=(*loop.consts, *map(ConstPort, values, ins)),
            xs=(*loop.xs, *map(SlicePort, stacks, rows)), ys=(*loop.ys, *map(StackPort, outs, new)),
        ).equation()  # fmt: skip


def _on_the_way(region: Region, home: Region) -> Region | None:
    """The program of one of a region's equations that is `home`, or holds it."""
    while home.around is not None and home.around[0] is not region:
        home = home.around[0]
    return home if home.around is not None else None


def _with_values(
    eqn: Eqn, ins: Sequence[Var], inner_ins: Sequence[Var], outs: Sequence[Var], inner_outs: Sequence[Var]
) -> Eqn:  # fmt: skip
    """A `jax.checkpoint` with more operands and results."""

    def body(old: Jaxpr) -> Jaxpr:
        return _jaxpr.replaced(
            old, invars=[*old.invars, *inner_ins], outvars=[*old.outvars, *inner_outs],
            debug_info=old.debug_info.with_unknown_names(),  # type: ignore[attr-defined]
        )  # fmt: skip

    changed = _jaxpr.with_inner(eqn, body)
    return changed.replace(invars=[*eqn.invars, *ins], outvars=[*eqn.outvars, *outs])


class _BlocksWriter(JaxprWriter):
    """Writes the equations of sorted rows for each block by itself: `[rows, ...]` as `[num, rows, ...]`."""

    def __init__(self, facts: Facts, region: Region, counts: Mapping[Order, Var], source: Eqn):
        super().__init__(source)
        self._facts, self._region, self._num = facts, region, facts.num
        self._counts = counts
        self._sizes: dict[tuple[Order, Atom], Atom] = {}

    def counted(self, keys: Atom, order: Order) -> Var:
        static = self._num, order.num_values, order.number
        (found,) = self.trace(_counted, self.read(keys), static=static)
        return _jaxpr.variable(found)

    def rewrite(self, eqn: Eqn, order: Order | None) -> None:
        if order is None:
            self.eqns.append(self.renamed(eqn))
            return
        self._facts.region = self._region
        self.source, params, name = eqn, eqn.params, eqn.primitive.name
        ins = [*map(self.read, eqn.invars)]
        run: Callable[..., Any] = _updated
        static: tuple[Hashable, ...] = params.get("dimension_numbers"), name == "scatter-add"
        if name == "sort":
            run, static = _sorted, (params["num_keys"], params["is_stable"])
        elif name == "gather":
            run, static = _taken, (params["dimension_numbers"], params["slice_sizes"])
        elif name == GROUPED:
            ins[2] = self._sizes_in_blocks(order, eqn.invars[2])
            rhs = self._facts.of(eqn.invars[1])
            dims = self._facts.of(eqn.invars[0]).dim, None if rhs.order is None else rhs.dim
            numbers = params["ragged_dot_dimension_numbers"]
            run = _multiplied
            static = numbers, dims, params["precision"], params["preferred_element_type"]
        self.names |= zip(
            eqn.outvars, self.trace(run, *ins, static=(self._num, *static)), strict=True
        )

    def _sizes_in_blocks(self, order: Order, sizes: Atom) -> Atom:
        """`[num, groups]`: how many rows of each block are in each group."""
        if (order, sizes) not in self._sizes:
            is_histogram = self._facts.of(sizes).counts == order.root
            run = _first_counts if is_histogram else _shared_out
            (found,) = self.trace(run, self._counts[order], self.read(sizes))
            self._sizes[order, sizes] = found
        return self._sizes[order, sizes]


def _in_blocks(num: int, x: jax.Array, dim: int = 0) -> jax.Array:
    """Blocks of a dim, in front."""
    shape = x.shape
    blocks = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0) if dim else blocks


def _sorted(num: int, num_keys: int, is_stable: bool, *xs: jax.Array) -> tuple[jax.Array, ...]:
    blocks = [_in_blocks(num, x) for x in xs]
    outs = lax.sort(blocks, dimension=1, num_keys=num_keys, is_stable=is_stable)
    return tuple(out.reshape(x.shape) for out, x in zip(outs, xs, strict=True))


def _within(num: int, rows: int, at: jax.Array) -> jax.Array:
    blocks = _in_blocks(num, at)
    first = lax.broadcasted_iota(at.dtype, blocks.shape, 0) * jnp.asarray(rows // num, at.dtype)
    return blocks - first


def _taken(
    num: int, numbers: Any, sizes: tuple[int, ...], x: jax.Array, at: jax.Array
) -> jax.Array:
    def take(rows: jax.Array, own: jax.Array) -> jax.Array:
        return lax.gather(rows, own, numbers, sizes, mode=IN_BOUNDS)

    found = jax.vmap(take)(_in_blocks(num, x), _within(num, x.shape[0], at))
    return found.reshape(at.shape[0], *found.shape[2:])


def _updated(
    num: int, numbers: Any, adds: bool, x: jax.Array, at: jax.Array, new: jax.Array
) -> jax.Array:
    def update(rows: jax.Array, own: jax.Array, more: jax.Array) -> jax.Array:
        return (lax.scatter_add if adds else lax.scatter)(rows, own, more, numbers, mode=IN_BOUNDS)

    blocks = _in_blocks(num, x), _within(num, x.shape[0], at), _in_blocks(num, new)
    return jax.vmap(update)(*blocks).reshape(x.shape)


def _multiplied(
    num: int, numbers: lax.RaggedDotDimensionNumbers, dims: tuple[int, int | None], precision: Any,
    dtype: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array,
) -> jax.Array:  # fmt: skip
    def multiply(a: jax.Array, b: jax.Array, own: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(a, b, own, numbers, precision, dtype)

    a = _in_blocks(num, lhs, dims[0])
    if dims[1] is not None:
        # Each block has a part of the sum over rows, reduced in the product's dtype.
        parts = jax.vmap(multiply)(a, _in_blocks(num, rhs, dims[1]), sizes)
        total: jax.Array = lax.reduce(parts, np.zeros((), parts.dtype), lax.add, (0,))
        return total
    same = lax.broadcast_in_dim(rhs, (num, *rhs.shape), tuple(range(1, rhs.ndim + 1)))
    found = jax.vmap(multiply)(a, same, sizes)
    return found.reshape(lhs.shape[0], *found.shape[2:])


def _counted(num: int, num_values: int, number: int, keys: jax.Array) -> jax.Array:
    """`[num, num_values]`: how often each block has each key, divided by a number."""

    def count(own: jax.Array) -> jax.Array:
        return jnp.zeros(num_values, jnp.int32).at[own // number].add(1, mode="drop")

    return jax.vmap(count)(_in_blocks(num, keys))


def _first_counts(counts: jax.Array, sizes: jax.Array) -> jax.Array:
    padding = (0, 0, 0), (0, sizes.size - counts.shape[1], 0)
    return lax.pad(counts, np.zeros((), counts.dtype), padding).astype(sizes.dtype)


def _shared_out(counts: jax.Array, sizes: jax.Array) -> jax.Array:
    """How many rows of each block are in each group, where groups are of `sizes` rows of all blocks.

    In the order of all rows those of a block with one key are a range; so are the rows of a group.
    """
    own = counts.astype(sizes.dtype)
    before = jnp.cumsum(own, axis=0) - own
    total = own.sum(0)
    start = ((jnp.cumsum(total) - total)[None] + before)[:, :, None]
    end, last = start + own[:, :, None], jnp.cumsum(sizes)[None, None]
    common = jnp.minimum(end, last) - jnp.maximum(start, last - sizes[None, None])
    return jnp.maximum(common, 0).sum(1).astype(sizes.dtype)
