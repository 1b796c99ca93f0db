# SPDX-License-Identifier: Apache-2.0
"""Quantized gradient reductions: for each mesh axis one stage, an all-to-all of rows of bytes and a sum.

A stage splits a device's gradient into a part for each device of the axis, quantizes and exchanges the parts,
and sums the received ones in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero._blocks import Blocks
from jzero.ir import _dataflow, _rules
from jzero.ir._regions import Region, ValueIn
from jzero.ir._rules import Cost
from jzero.ir._sent import cast
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.passes import _origins, _quantize, _waits
from jzero.sharding.passes._auto_layouts import NO_SPECS, AutoLayouts, AutoParts
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

Formats = Mapping[str, Blocks | None]
# What a gradient passes through on its way to its leaf, and is still all of it.
_PLAIN = _rules.named(Cost.COPY, Cost.VIEW, Cost.CAST, Cost.PART) | _frames.COLLECTIVES | {
    "add_any", "pad", "concatenate", "dynamic_update_slice", "layout_constraint",
}  # fmt: skip
_SCOPE = re.compile(r"jzero\.(?:reduce_scatter|all_reduce)\[(.*)\]")


class QuantizedAxes(NamedTuple):
    """The mesh axes over which gradients travel."""

    # By name, the outermost first; the last one is the fastest, and carries most.
    sizes: Mapping[str, int]
    formats: Formats  # in which they travel over each; None for exact
    replicas: Collection[str] = ()  # those over which devices hold the same shards


def _leaf_of(eqn: Eqn) -> str:
    """The leaf in the scope of a reduction, as the partitioner names it; '' if none."""
    found = [_SCOPE.fullmatch(scope) for scope in _jaxpr.scopes(eqn)]
    return next((match.group(1) for match in reversed(found) if match is not None), "")


def quantize_reductions(
    jaxpr: Jaxpr, axes: QuantizedAxes, leaves: Collection[str], rows: Sequence[frozenset[str]],
    specs: AutoLayouts = NO_SPECS,
) -> Jaxpr:  # fmt: skip
    """One device's program that reduces the gradients of some leaves quantized.

    Sums of forward passes stay exact, and sums from which a pass computes anything but gradients of leaves.
    """
    program = Region(jaxpr, [])
    found, mixed = _origins.origins(program, rows), _mixed(program)
    spec_of = specs.of(program)
    sums = dict[Var, Atom]()  # what a stage has summed up, as wide as it was summed

    def quantize(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        name = eqn.primitive.name
        if name not in _origins.SUMS or len(eqn.invars) != 1:
            return False
        (x,), (out,), over = eqn.invars, eqn.outvars, _jaxpr.axes_of(eqn)
        ours = not _jaxpr.is_literal(x) and found[region, x].is_gradient
        if not ours or _jaxpr.in_scope(eqn, _waits.QUANTIZED) or _leaf_of(eqn) not in leaves:
            return False
        is_float = jnp.issubdtype(x.aval.dtype, jnp.floating)
        quantized = any(axes.formats.get(axis) for axis in over)
        if not is_float or not quantized or mixed.get((region, out)):
            return False
        stages = _Stages(writer, eqn, axes, specs.parts_of(spec_of(region, eqn)))
        if name == "reduce_scatter" and eqn.params["tiled"]:
            first = x not in sums
            terms = writer.read(x) if first else sums[_jaxpr.variable(x)]
            writer.names[out], sums[out] = stages.scattered(terms, first)
        elif name != "reduce_scatter" and set(over) <= {*axes.replicas}:
            writer.names[out] = stages.summed(writer.read(x))
        else:
            return False
        return True

    return _origins.rewritten(program, quantize)


def _mixed(program: Region) -> dict[ValueIn, bool]:
    """Values that a pass computes with, and that are not only gradients of leaves."""

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


class _Stages:
    """Writes a quantized reduction in place of an exact one, of each Auto part by itself."""

    def __init__(self, writer: JaxprWriter, eqn: Eqn, axes: QuantizedAxes, parts: AutoParts):
        self.writer, self.eqn, self.axes, self.parts = writer, eqn, axes, parts
        self.dtype = eqn.outvars[0].aval.dtype
        self.source = _jaxpr.within_scope(eqn, _waits.QUANTIZED)
        over = _jaxpr.axes_of(eqn)
        self.sizes = {axis: axes.sizes[axis] for axis in over}
        self.order = [axis for axis in reversed([*axes.sizes]) if axis in over]
        # The dim of a stage: behind those of the parts.
        self.dim = len(parts.cuts)

    def scattered(self, x: Atom, waits: bool) -> tuple[Atom, Atom]:
        """`[n, d]` of each device -> this one's `[n/k, d]` of their sum: in its dtype, and as it was summed.

        With `waits` the first stage counts among the reductions that have an order.
        """
        outer, self.writer.source = self.writer.source, self.source
        dim, left = self.dim + self.eqn.params["scatter_dimension"], [*self.sizes]
        static = self.parts, dim, (*self.sizes.values(),)
        (terms,) = self.writer.trace(_terms, x, static=static)
        for axis in self.order:
            (terms,) = self.writer.trace(_moved, terms, static=(dim + left.index(axis), self.dim))
            terms = self._stage(terms, axis, waits and len(left) == len(self.sizes))
            left.remove(axis)
        (total,) = self.writer.trace(AutoParts.join, terms, static=(self.parts,))
        (shard,) = self.writer.trace(cast, total, static=(str(self.dtype),))
        self.writer.source = outer
        return shard, total

    def summed(self, x: Atom) -> Atom:
        """`[n, d]` of each device -> their sum on all devices; axes without a format come last."""
        outer, self.writer.source = self.writer.source, self.source
        formats = self.axes.formats
        for axis in self.sizes:
            if (blocks := formats.get(axis)) is not None:
                x = self._all_reduced(x, axis, blocks)
        if exact := tuple(axis for axis in self.sizes if not formats.get(axis)):
            out = _jaxpr.var_like(x.aval)
            (x,) = self.writer.clone(
                self.source, [x], [out], params={**self.eqn.params, "axes": exact}
            )
        self.writer.source = outer
        return x

    def _stage(self, terms: Atom, axis: str, waits: bool) -> Atom:
        """`[q, k, n, d]`, a term for each device of `axis`: exchanges the terms, and sums the received."""
        blocks, num, dim = self.axes.formats.get(axis), self.sizes[axis], self.dim
        source = self.parts.mark(self.source)
        if blocks is None:
            (terms,) = self.writer.trace(cast, terms, static=(str(self.dtype),))
            shape = terms.aval.shape
            out = _jaxpr.var_like(terms.aval, (*shape[:dim], *shape[dim + 1 :]))
            params = {
                **self.eqn.params,
                "axis_name": axis,
                "axis_size": num,
                "scatter_dimension": dim,
            }
            return self.writer.clone(source, [terms], [out], params={**params, "tiled": False})[0]
        (rows,) = self.writer.trace(_rows, terms, static=(blocks, dim))
        source = _jaxpr.within_scope(source, _waits.FIRST_STAGE) if waits else source
        params = dict(
            split_axis=dim, concat_axis=dim, axis_name=axis, axis_index_groups=None, tiled=True
        )
        exchange, out = _jaxpr.PRIMITIVES["all_to_all"], _jaxpr.var_like(rows.aval)
        (rows,) = self.writer.add(exchange, [rows], [out], source, **params)
        static = terms.aval.shape[dim + 1 :], str(terms.aval.dtype), blocks
        return self.writer.trace(_total, rows, static=static)[0]

    def _all_reduced(self, x: Atom, axis: str, blocks: Blocks) -> Atom:
        num, dim = self.sizes[axis], self.dim
        (terms,) = self.writer.trace(_even, x, static=(self.parts, num))
        total = self._stage(terms, axis, waits=False)
        (row,) = self.writer.trace(_row, total, static=(blocks,))
        shape = row.aval.shape
        rows = _jaxpr.var_like(row.aval, (*shape[:dim], num, shape[-1]))
        params: dict[str, Any] = dict(
            all_gather_dimension=dim,
            axis_name=axis,
            axis_index_groups=None,
            axis_size=num,
            tiled=True,
        )
        source = self.parts.mark(self.source)
        self.writer.add(_jaxpr.PRIMITIVES["all_gather"], [row], [rows], source, **params)
        static = self.parts, x.aval.shape, str(x.aval.dtype), total.aval.shape[-1], blocks
        return self.writer.trace(_dequantized, rows, static=static)[0]


# -- traced ------------------------------------------------------------------------------------------------
def _terms(parts: AutoParts, dim: int, sizes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """`[n, d]` as `[q, k1, k2, ..., n/k, d/q]`."""
    x = parts.split(x)
    return x.reshape(*x.shape[:dim], *sizes, -1, *x.shape[dim + 1 :])


def _moved(dim: int, to: int, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, dim, to)


def _rows(blocks: Blocks, dim: int, terms: jax.Array) -> jax.Array:
    """`[q, k, n, d]` as quantized `[q, k, bytes]`."""
    return _quantize.quantize(terms.reshape(*terms.shape[: dim + 1], -1), blocks)


def _total(part: tuple[int, ...], dtype: str, blocks: Blocks, rows: jax.Array) -> jax.Array:
    """Quantized `[q, k, bytes]` as the sum of k terms, `[q, *part]`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    terms = _quantize.dequantize(rows, math.prod(part), wide, blocks)
    return jnp.sum(terms, axis=-2).reshape(*rows.shape[:-2], *part)


def _even(parts: AutoParts, num: int, x: jax.Array) -> jax.Array:
    """`[n, d]` as `[q, k, n * d / k]`, with zeros at the end."""
    x = parts.split(x)
    several = x.shape[: len(parts.cuts)]
    x = x.reshape(*several, -1)
    x = jnp.pad(x, [*[(0, 0)] * len(several), (0, -x.shape[-1] % num)])
    return x.reshape(*several, num, -1)


def _row(blocks: Blocks, x: jax.Array) -> jax.Array:
    """`[q, n]` as quantized `[q, 1, bytes]`."""
    return _quantize.quantize(x.reshape(*x.shape[:-1], 1, -1), blocks)


def _dequantized(
    parts: AutoParts, shape: tuple[int, ...], dtype: str, size: int, blocks: Blocks, rows: jax.Array
) -> jax.Array:
    """Quantized `[q, k, bytes]` as `[n, d]`."""
    several = rows.shape[:-2]
    nums = dict(parts.cuts)
    part = [size // nums.get(d, 1) for d, size in enumerate(shape)]
    values = _quantize.dequantize(rows, size, dtype, blocks).reshape(*several, -1)
    return parts.join(values[..., : math.prod(part)].reshape(*several, *part))
