# SPDX-License-Identifier: Apache-2.0
"""Quantized all-gathers of parameters: quantize the shard, gather rows of bytes, dequantize.

Only what forward and backward passes read is quantized. Values that derive from parameters alone, and
matrices that an update reads whole, stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._blocks import Blocks
from jzero.ir import _dataflow, _rules
from jzero.ir._regions import Region, ValueIn, variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _origins, _quantize, _waits
from jzero.sharding.passes._auto_layouts import NO_SPECS, AutoLayouts, AutoParts
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

_Readers = frozenset[str]
_NOBODY: _Readers = frozenset()
_PASS, _OTHERS = frozenset(["a pass"]), frozenset(["others"])


def quantize_gathers(
    jaxpr: Jaxpr, blocks: Blocks, args: Collection[int], rows: Sequence[frozenset[str]],
    specs: AutoLayouts = NO_SPECS,
) -> Jaxpr:  # fmt: skip
    """Passes gather some arguments, by index in `args`, and casts and slices of these, quantized."""
    program = Region(jaxpr, [])
    found, spec_of = _origins.origins(program, rows), specs.of(program)
    readers = _readers(program, found)

    def quantize(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        if not _waits.is_gather(eqn) or _jaxpr.in_scope(eqn, _waits.QUANTIZED):
            return False
        (shard,), (out,) = eqn.invars, eqn.outvars
        ours = not _jaxpr.is_literal(shard) and found[region, shard].arg in args
        if not ours or readers.get((region, out)) != _PASS:
            return False
        dtype = shard.aval.dtype
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
            return False
        parts = specs.parts_of(spec_of(region, eqn))
        writer.names[out] = _gathered(writer, eqn, writer.read(shard), blocks, parts)
        return True

    return _origins.rewritten(program, quantize)


def _gathered(writer: JaxprWriter, eqn: Eqn, shard: Atom, blocks: Blocks, parts: AutoParts) -> Atom:
    outer, writer.source = writer.source, _jaxpr.within_scope(eqn, _waits.QUANTIZED)
    (row,) = writer.trace(_row, shard, static=(blocks, parts))
    *several, _, nbytes = row.aval.shape
    rows = _jaxpr.var_like(row.aval, (*several, eqn.params["axis_size"], nbytes))
    params = {**eqn.params, "all_gather_dimension": len(several)}
    writer.clone(parts.mark(writer.source), [row], [rows], params=params)
    dim, dtype = eqn.params["all_gather_dimension"], str(shard.aval.dtype)
    static = dim, shard.aval.shape, dtype, blocks, parts
    (found,) = writer.trace(_dequantized, rows, static=static)
    writer.source = outer
    return found


def _row(blocks: Blocks, parts: AutoParts, x: jax.Array) -> jax.Array:
    """A row of bytes for each part, `[n, d] -> [q, 1, bytes]`."""
    x = parts.split(x)
    several = x.shape[: len(parts.cuts)]
    return _quantize.quantize(x.reshape(*several, 1, -1), blocks)


def _dequantized(
    dim: int, shard: tuple[int, ...], dtype: str, blocks: Blocks, parts: AutoParts, rows: jax.Array
) -> jax.Array:
    """The rows of all devices, `[q, k, bytes] -> [n, d]`."""
    *several, num, _ = rows.shape
    nums = dict(parts.cuts)
    part = [size // nums.get(d, 1) for d, size in enumerate(shard)]
    x = _quantize.dequantize(rows, math.prod(part), dtype, blocks)
    x = jnp.moveaxis(x.reshape(*several, num, *part), len(several), len(several) + dim)
    return parts.join(x.reshape(*several, *part[:dim], -1, *part[dim + 1 :]))


# -- who reads ---------------------------------------------------------------------------------------------
def _readers(program: Region, found: _origins.Origins) -> dict[ValueIn, _Readers]:
    """The kind of readers of each value or views of it: device-varying passes, or others."""

    def of_operands(region: Region, eqn: Eqn, outs: Sequence[_Readers]) -> list[_Readers]:
        if eqn.primitive.name == "optimization_barrier":
            return [*outs]
        if any(found[region, out].differs for out in eqn.outvars):
            return [_PASS] * len(eqn.invars)
        if _waits.is_gather(eqn) or _rules.costs(eqn, *_origins.VIEWS) and not _widens(eqn):
            return [_NOBODY.union(*outs), *[_OTHERS] * (len(eqn.invars) - 1)]
        return [_OTHERS] * len(eqn.invars)

    results = variables(program.jaxpr.outvars)
    returned: dict[ValueIn, _Readers] = {(program, x): _OTHERS for x in results}
    return _dataflow.backward(program, returned, of_operands, frozenset.union, _NOBODY)


def _widens(eqn: Eqn) -> bool:
    """A cast to a wider dtype: the gather before it is exact."""
    cast = eqn.primitive.name == "convert_element_type"
    return cast and eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize


# -- stored copies --------------------------------------------------------------------------------------
class StoredCopy(NamedTuple):
    """A parameter whose copies are stored on the devices, and are renewed by how it changed."""

    arg: int  # the old one among the arguments, by index
    out: int  # the new one among the results
    axes: tuple[str, ...]  # over which the copy is sharded
    shape: tuple[int, ...]  # its global shape, without padding


def quantize_renewals(
    jaxpr: Jaxpr, blocks: Blocks, copies: Sequence[StoredCopy], sizes: Mapping[str, int],
    specs: AutoLayouts = NO_SPECS,
) -> Jaxpr:  # fmt: skip
    """One device's program that gathers, of new parameters, the difference to the old ones, quantized.

    What is rounded off is then in the next difference, if what new parameters are made of has it.
    """
    if not jaxpr.eqns:
        return jaxpr
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    writer, outs = JaxprWriter(jaxpr.eqns[0]), [*jaxpr.outvars]
    writer.eqns += jaxpr.eqns
    program = Region(jaxpr, [])
    spec_of = specs.of(program)

    def parts_of(eqn: Eqn) -> AutoParts:
        return specs.parts_of(spec_of(program, eqn))

    for copy in copies:
        gathers = [*_gathers_behind(makers, jaxpr.outvars[copy.out])]
        if gathers:
            old = jaxpr.invars[copy.arg]
            outs[copy.out] = _renewed(writer, old, gathers, copy, sizes, blocks, parts_of)
    if all(a is b for a, b in zip(outs, jaxpr.outvars, strict=True)):
        return jaxpr
    return _waits.with_equations(
        jaxpr, _rewrite.without_unread(writer.eqns, outs, lambda _: True), outs
    )


def _gathers_behind(makers: _waits.Makers, atom: Atom) -> Iterator[Eqn]:
    while not _jaxpr.is_literal(atom) and (eqn := makers.get(atom)) is not None:
        if _waits.is_gather(eqn):
            if _jaxpr.in_scope(eqn, _waits.QUANTIZED):
                return
            yield eqn
        elif eqn.primitive.name == "select_n":
            atom = eqn.invars[-1]
            continue
        elif eqn.primitive.name not in ("slice", "optimization_barrier"):
            return
        atom = eqn.invars[0]


def _renewed(
    writer: JaxprWriter, old: Var, gathers: Sequence[Eqn], copy: StoredCopy, sizes: Mapping[str, int],
    blocks: Blocks, parts_of: Callable[[Eqn], AutoParts],
) -> Atom:  # fmt: skip
    """The old parameter plus the gathered difference of the new shard to its part of it."""
    (shard,), dim = gathers[-1].invars, gathers[-1].params["all_gather_dimension"]
    over = [_jaxpr.axes_of(eqn) for eqn in gathers]
    writer.source = _jaxpr.within_scope(gathers[-1], _waits.QUANTIZED)
    index = {
        axis: writer.add(lax.axis_index_p, [], [_jaxpr.var_like(None, (), np.dtype(np.int32))],
                         axis_name=axis)[0]
        for axis in [*copy.axes, *(axis for axes in over for axis in axes)]
    }  # fmt: skip
    axes = [*copy.axes, *(axis for each in over for axis in each)]
    true = copy.shape[dim]
    static = dim, true, tuple(sizes[axis] for axis in axes), len(copy.axes)
    places = [index[axis] for axis in axes]
    (change,) = writer.trace(_difference, old, shard, *places, static=static)
    for eqn in reversed(gathers):
        change = _gathered(writer, eqn, change, blocks, parts_of(eqn))
    (new,) = writer.trace(_plus, old, change, static=(dim,))
    return new


def _difference(
    dim: int, true: int, sizes: tuple[int, ...], num: int, old: jax.Array, shard: jax.Array,
    *places: jax.Array,
) -> jax.Array:  # fmt: skip
    """`shard [n/k, d]` minus this device's part of `old [n, d]`; 0 in padding."""
    wide, size = jnp.promote_types(old.dtype, jnp.float32), shard.shape[dim]
    here = _joint(sizes[num:], places[num:])
    more = size * int(np.prod(sizes[num:])) - old.shape[dim]
    old = lax.pad(
        old, jnp.zeros((), old.dtype), [(0, more * (d == dim), 0) for d in range(old.ndim)]
    )
    part = lax.dynamic_slice_in_dim(old, here * size, size, dim)
    change = shard.astype(wide) - part.astype(wide)
    if true % int(np.prod(sizes)):
        first = _joint(sizes, places) * size
        inside = lax.broadcasted_iota(jnp.int32, change.shape, dim) + first < true
        change = jnp.where(inside, change, jnp.zeros((), wide))
    return change


def _joint(sizes: Sequence[int], places: Sequence[jax.Array]) -> jax.Array:
    at: jax.Array = jnp.int32(0)
    for size, place in zip(sizes, places, strict=True):
        at = at * jnp.int32(size) + place
    return at


def _plus(dim: int, old: jax.Array, change: jax.Array) -> jax.Array:
    change = lax.slice_in_dim(change, 0, old.shape[dim], axis=dim)
    new: jax.Array = (old.astype(change.dtype) + change).astype(old.dtype)
    return new
