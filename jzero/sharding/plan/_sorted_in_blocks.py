# SPDX-License-Identifier: Apache-2.0
"""Sorts the rows of each block by themselves, where a step puts them back (`_row_orders.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir._regions import EdgeKind, Region, edges
from jzero.ir._rows import RowDims, row_dims
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis._row_orders import Fact, Facts, Order, OutOfOrderError
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr

IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def sorted_in_blocks(
    flat: _rewrite.Flat, consts: Sequence[Any], dims: Sequence[RowDims], num: int
) -> _rewrite.Flat:
    """The step with sorts of the rows of each of `num` blocks in the place of sorts of all rows.

    Args:
      flat: the step of the whole batch, calls flattened.
      consts: values of its constants.
      dims: for each of its inputs, the batch dims.
      num: how many contiguous blocks of equal size these are sharded in.
    """
    if num == 1 or not _has_sort(flat):
        return flat
    opened = flat._replace(eqns=[_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns])
    region = Region(opened, [*consts])  # type: ignore[arg-type]
    rows = {var for (_, var), own in row_dims(region, dims).items() if own == {0}}
    rewritten = _Rewritten(rows, num)
    found: _rewrite.Flat = rewritten.of(region, {})
    return found if rewritten.num_sorts else flat


def _has_sort(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "sort" for eqn in _jaxpr.walk(jaxpr))


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a loop, branch or checkpoint with its calls flattened, unless these have constants."""
    flat, consts = _rewrite.flatten_calls(jaxpr, ())
    eqns = [_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns]
    return jaxpr if consts else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=flat.outvars)


class _Rewritten:
    """Rewrites each program by itself: the rows that one is given or returns are in their places."""

    def __init__(self, rows: set[Atom], num: int):
        self.rows, self.num, self.num_sorts = rows, num, 0

    def of(self, region: Region, given: dict[Atom, Fact]) -> Any:
        jaxpr = region.jaxpr
        if not _has_sort(jaxpr):
            return jaxpr
        facts = self._facts(jaxpr, given)
        self.num_sorts += len(facts.sorts)
        writer = _BlocksWriter(facts, jaxpr.eqns[0])
        for eqn in jaxpr.eqns:
            inner = {id(each.jaxpr): each for each in region.inner(eqn)}
            passed = _passed(region, eqn, facts) if inner else {}

            def new(old: Jaxpr, inner: Any = inner, passed: Any = passed) -> Jaxpr:
                return self.of(inner[id(old)], passed) if id(old) in inner else old

            writer.rewrite(_jaxpr.with_inner(eqn, new), facts.in_blocks.get(id(eqn)))
        assert not writer.constvars
        eqns, outs = writer.eqns, [*map(writer.read, jaxpr.outvars)]
        if isinstance(jaxpr, _rewrite.Flat):
            return jaxpr._replace(eqns=eqns, outvars=outs)
        same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
        return jaxpr if same else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=outs)

    def _facts(self, jaxpr: Jaxpr, given: dict[Atom, Fact]) -> Facts:
        """With the orders of all sorts that no equation forbids."""
        kept = frozenset[int]()
        while True:
            facts = Facts(self.rows, self.num, kept, given)
            try:
                facts.run(jaxpr)
            except OutOfOrderError as error:
                kept |= {facts.sorts[order] for order in error.orders}
            else:
                return facts


def _passed(region: Region, eqn: Eqn, facts: Facts) -> dict[Atom, Fact]:
    """Facts of the operands that are the same values whenever a program inside runs."""
    ways = edges(region, eqn)
    changed = {edge.target for edge in ways if edge.kind is not EdgeKind.IN or edge.shift}
    found = {}
    for edge in ways:
        fact = facts.of(edge.source[1])
        if edge.target not in changed and not fact.orders and edge.kind is EdgeKind.IN:
            made_of = fact.made_of if len(fact.made_of) == 1 else ()  # Others name values of here.
            found[edge.target[1]] = fact._replace(root=None, counts=None, made_of=made_of)
    return found


class _BlocksWriter(JaxprWriter):
    """Writes the equations of sorted rows for each block by itself: `[rows, ...]` as `[num, rows, ...]`."""

    def __init__(self, facts: Facts, source: Eqn):
        super().__init__(source)
        self._facts, self._num = facts, facts.num
        self._sizes: dict[tuple[Order, Atom], Atom] = {}

    def rewrite(self, eqn: Eqn, order: Order | None) -> None:
        if order is None:
            self.eqns.append(self.renamed(eqn))
            return
        self.source, params, name = eqn, eqn.params, eqn.primitive.name
        ins = [*map(self.read, eqn.invars)]
        run: Callable[..., Any] = _updated
        static: tuple[Hashable, ...] = params.get("dimension_numbers"), name == "scatter-add"
        if name == "sort":
            run, static = _sorted, (params["is_stable"],)
        elif name == "gather":
            run, static = _taken, (params["dimension_numbers"], params["slice_sizes"])
        elif name == "ragged_dot_general":
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
            keys = self.read(order.keys)
            if self._facts.of(sizes).counts is order.root:
                static = self._num, sizes.aval.shape[0], sizes.aval.dtype
                (found,) = self.trace(_counted, keys, static=static)
            else:
                values = self._num, order.num_values
                (found,) = self.trace(_shared_out, keys, self.read(sizes), static=values)
            self._sizes[order, sizes] = found
        return self._sizes[order, sizes]


def _in_blocks(num: int, x: jax.Array, dim: int = 0) -> jax.Array:
    """Blocks of a dim, in front."""
    shape = x.shape
    blocks = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0) if dim else blocks


def _sorted(num: int, is_stable: bool, *xs: jax.Array) -> tuple[jax.Array, ...]:
    blocks = [_in_blocks(num, x) for x in xs]
    outs = lax.sort(blocks, dimension=1, num_keys=1, is_stable=is_stable)
    return tuple(out.reshape(x.shape) for out, x in zip(outs, xs, strict=True))


def _within(num: int, rows: int, at: jax.Array) -> jax.Array:
    """Positions of rows within their blocks."""
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
    if (
        dims[1] is not None
    ):  # Each block has a part of the sum over rows, reduced in the product's dtype.
        parts = jax.vmap(multiply)(a, _in_blocks(num, rhs, dims[1]), sizes)
        total: jax.Array = lax.reduce(parts, np.zeros((), parts.dtype), lax.add, (0,))
        return total
    same = lax.broadcast_in_dim(rhs, (num, *rhs.shape), tuple(range(1, rhs.ndim + 1)))
    found = jax.vmap(multiply)(a, same, sizes)
    return found.reshape(lhs.shape[0], *found.shape[2:])


def _counted(num: int, size: int, dtype: Any, keys: jax.Array) -> jax.Array:
    """`[num, size]`: how often each block has each key."""

    def count(own: jax.Array) -> jax.Array:
        return jnp.zeros(size, dtype).at[own].add(1, mode="drop")

    return jax.vmap(count)(_in_blocks(num, keys))


def _shared_out(num: int, num_values: int, keys: jax.Array, sizes: jax.Array) -> jax.Array:
    """How many rows of each block are in each group, where groups are of `sizes` rows of all blocks.

    In the order of all rows those of a block with one key are a range; so are the rows of a group.
    """
    own = _counted(num, num_values, sizes.dtype, keys)
    before = jnp.cumsum(own, axis=0) - own
    total = own.sum(0)
    start = ((jnp.cumsum(total) - total)[None] + before)[:, :, None]
    end, last = start + own[:, :, None], jnp.cumsum(sizes)[None, None]
    common = jnp.minimum(end, last) - jnp.maximum(start, last - sizes[None, None])
    return jnp.maximum(common, 0).sum(1).astype(sizes.dtype)
