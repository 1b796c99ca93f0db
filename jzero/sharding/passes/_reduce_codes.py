# SPDX-License-Identifier: Apache-2.0
"""Gradients reduced as codes of few bits: a hop over each mesh axis, of rows of bytes that are exchanged.

A hop cuts what a device has into a part for each device of the axis, encodes and exchanges the parts, and
sums up what came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero._blocks import Blocks
from jzero.ir import _dataflow, _rules
from jzero.ir._regions import Region, ValueIn
from jzero.ir._rules import Cost
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.passes import _codes, _origins, _waits
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

Formats = Mapping[str, Blocks | None]
# Of an equation that reduces the gradient of a leaf: its path.
LeafOf = Callable[[Eqn], str]
# What a gradient passes through on its way to its leaf, and is still all of it.
_PLAIN = _rules.named(Cost.COPY, Cost.VIEW, Cost.CAST, Cost.PART) | _frames.COLLECTIVES | {
    "add_any", "pad", "concatenate", "dynamic_update_slice", "layout_constraint",
}  # fmt: skip
_SCOPE = re.compile(r"jzero\.(?:reduce_scatter|all_reduce)\[(.*)\]")


class CodedAxes(NamedTuple):
    """The mesh axes over which gradients travel.

    Attributes:
      sizes: by name, the outermost first. The last one is the fastest, and carries most.
      formats: in which they travel over each; None for exact.
      replicas: those over which devices hold the same shards.
    """

    sizes: Mapping[str, int]
    formats: Formats
    replicas: Collection[str] = ()


def leaf_in_scope(eqn: Eqn) -> str:
    """The leaf that a reduction serves, as the partitioner names it; '' if none."""
    found = [_SCOPE.fullmatch(scope) for scope in _jaxpr.scopes(eqn)]
    return next((match.group(1) for match in reversed(found) if match is not None), "")


def reduce_codes(
    jaxpr: Jaxpr, axes: CodedAxes, coded: Collection[str], rows: Sequence[frozenset[str]],
    leaf_of: LeafOf = leaf_in_scope,
) -> Jaxpr:  # fmt: skip
    """One device's program that reduces the gradients of some leaves as codes.

    A sum of which a pass computes something else is exact, and so are the sums of forward passes.

    Args:
      jaxpr: the program, with explicit collectives.
      axes: the mesh, and the formats.
      coded: the leaves, by path.
      rows: of each argument, the axes over which it differs because rows of the batch do.
      leaf_of: says which leaf a reduction serves.
    """
    program = Region(jaxpr, [])
    found, mixed = _origins.origins(program, rows), _mixed(program)
    sums = dict[Var, Atom]()  # what a hop has summed up, as wide as it was summed

    def encoded(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        name = eqn.primitive.name
        if name not in _origins.SUMS or len(eqn.invars) != 1 or _jaxpr.in_scope(eqn, _waits.CODES):
            return False
        (x,), (out,), over = eqn.invars, eqn.outvars, _jaxpr.axes_of(eqn)
        ours = not _jaxpr.is_literal(x) and found[region, x].is_gradient
        if not ours or not jnp.issubdtype(x.aval.dtype, jnp.floating) or leaf_of(eqn) not in coded:
            return False
        if mixed.get((region, out)) or not any(axes.formats.get(axis) for axis in over):
            return False
        if name == "reduce_scatter" and eqn.params["tiled"]:
            first = x not in sums
            hops = _Hops(writer, eqn, axes)
            terms = writer.read(x) if first else sums[_jaxpr.variable(x)]
            writer.names[out], sums[out] = hops.scattered(terms, first)
        elif name != "reduce_scatter" and set(over) <= {*axes.replicas}:
            writer.names[out] = _Hops(writer, eqn, axes).summed(writer.read(x))
        else:
            return False
        return True

    return _origins.rewritten(program, encoded)


def _mixed(program: Region) -> dict[ValueIn, bool]:
    """Of which values a pass computes something else than gradients of leaves."""

    def of_operands(region: Region, eqn: Eqn, outs: Sequence[bool]) -> list[bool]:
        if eqn.primitive.name == "optimization_barrier":
            return [*outs]
        computes = region.pass_of(eqn) is not None and not _is_plain(eqn)
        return [computes or any(outs)] * len(eqn.invars)

    return _dataflow.backward(program, {}, of_operands, bool.__or__, False)


def _is_plain(eqn: Eqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":  # What `w[i]` has squeezed.
        return bool(eqn.invars[0].aval.size == eqn.outvars[0].aval.size)
    return eqn.primitive.name in _PLAIN


class _Hops:
    """Writes a reduction in the place of one that is exact."""

    def __init__(self, writer: JaxprWriter, eqn: Eqn, axes: CodedAxes):
        self.writer, self.eqn, self.axes = writer, eqn, axes
        self.dtype = eqn.outvars[0].aval.dtype
        self.source = _jaxpr.within_scope(eqn, _waits.CODES)
        over = _jaxpr.axes_of(eqn)
        self.sizes = {axis: axes.sizes[axis] for axis in over}
        self.order = [axis for axis in reversed([*axes.sizes]) if axis in over]

    def scattered(self, x: Atom, waits: bool) -> tuple[Atom, Atom]:
        """`[n, d]` of each device -> this one's `[n/k, d]` of their sum: in its dtype, and as it was summed.

        With `waits` the first hop counts among the reductions that have an order.
        """
        outer, self.writer.source = self.writer.source, self.source
        dim, left = self.eqn.params["scatter_dimension"], [*self.sizes]
        (parts,) = self.writer.trace(_parts, x, static=(dim, (*self.sizes.values(),)))
        for axis in self.order:
            (parts,) = self.writer.trace(_first, parts, static=(dim + left.index(axis),))
            parts = self._hop(parts, axis, waits and len(left) == len(self.sizes))
            left.remove(axis)
        (shard,) = self.writer.trace(_cast, parts, static=(str(self.dtype),))
        self.writer.source = outer
        return shard, parts

    def summed(self, x: Atom) -> Atom:
        """`[n, d]` of each device -> their sum, the same on all of them: axes without a format come last."""
        outer, self.writer.source = self.writer.source, self.source
        formats = self.axes.formats
        for axis in self.sizes:
            if (codes := formats.get(axis)) is not None:
                x = self._all_reduced(x, axis, codes)
        if exact := tuple(axis for axis in self.sizes if not formats.get(axis)):
            out = _jaxpr.var_like(x.aval)
            (x,) = self.writer.again(
                self.source, [x], [out], params={**self.eqn.params, "axes": exact}
            )
        self.writer.source = outer
        return x

    def _hop(self, parts: Atom, axis: str, waits: bool) -> Atom:
        """Of `[k, n, d]`, a part for each device of `axis`, all devices' parts for this one, summed up."""
        codes, num = self.axes.formats.get(axis), self.sizes[axis]
        if codes is None:
            (parts,) = self.writer.trace(_cast, parts, static=(str(self.dtype),))
            out = _jaxpr.var_like(parts.aval, parts.aval.shape[1:])
            params = {
                **self.eqn.params,
                "axis_name": axis,
                "axis_size": num,
                "scatter_dimension": 0,
            }
            return self.writer.again(
                self.source, [parts], [out], params={**params, "tiled": False}
            )[0]
        (rows,) = self.writer.trace(_rows, parts, static=(codes,))
        source = _jaxpr.within_scope(self.source, _waits.FIRST_HOP) if waits else self.source
        params = dict(
            split_axis=0, concat_axis=0, axis_name=axis, axis_index_groups=None, tiled=True
        )
        exchange, out = _jaxpr.PRIMITIVES["all_to_all"], _jaxpr.var_like(rows.aval)
        (rows,) = self.writer.add(exchange, [rows], [out], source, **params)
        static = parts.aval.shape[1:], str(parts.aval.dtype), codes
        return self.writer.trace(_total, rows, static=static)[0]

    def _all_reduced(self, x: Atom, axis: str, codes: Blocks) -> Atom:
        num = self.sizes[axis]
        (parts,) = self.writer.trace(_even, x, static=(num,))
        total = self._hop(parts, axis, waits=False)
        (row,) = self.writer.trace(_row, total, static=(codes,))
        rows = _jaxpr.var_like(row.aval, (num, row.aval.shape[1]))
        params: dict[str, Any] = dict(
            all_gather_dimension=0,
            axis_name=axis,
            axis_index_groups=None,
            axis_size=num,
            tiled=True,
        )
        self.writer.add(_jaxpr.PRIMITIVES["all_gather"], [row], [rows], **params)
        static = x.aval.shape, str(x.aval.dtype), total.aval.shape[0], codes
        return self.writer.trace(_whole, rows, static=static)[0]


# -- traced ------------------------------------------------------------------------------------------------
def _parts(dim: int, sizes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """`[n, d]` as `[k1, k2, ..., n/k, d]`."""
    return x.reshape(*x.shape[:dim], *sizes, -1, *x.shape[dim + 1 :])


def _first(dim: int, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, dim, 0)


def _cast(dtype: str, x: jax.Array) -> jax.Array:
    return x.astype(dtype)


def _rows(codes: Blocks, parts: jax.Array) -> jax.Array:
    return _codes.encode(parts.reshape(parts.shape[0], -1), codes)


def _total(part: tuple[int, ...], dtype: str, codes: Blocks, rows: jax.Array) -> jax.Array:
    wide = jnp.promote_types(dtype, jnp.float32)
    terms = _codes.decode(rows, math.prod(part), wide, codes)
    return jnp.sum(terms, axis=0).reshape(part)


def _even(num: int, x: jax.Array) -> jax.Array:
    return jnp.pad(x.reshape(-1), (0, -x.size % num)).reshape(num, -1)


def _row(codes: Blocks, x: jax.Array) -> jax.Array:
    return _codes.encode(x[None], codes)


def _whole(
    shape: tuple[int, ...], dtype: str, part: int, codes: Blocks, rows: jax.Array
) -> jax.Array:
    whole = _codes.decode(rows, part, dtype, codes).reshape(-1)
    return whole[: int(np.prod(shape))].reshape(shape)
