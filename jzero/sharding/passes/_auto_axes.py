# SPDX-License-Identifier: Apache-2.0
"""Collectives beside mesh axes over which XLA shards: each place along these moves its own part.

Left alone, XLA would first gather over its axes what is gathered or reduced over the data axes. So such a
collective becomes a `shard_map` over XLA's axes, too, in which it moves a part::

    whole = all_gather(shard, 'data')  ->  whole = shard_map(all_gather, P(None, 'model'))(shard)

How XLA shards a value follows from how leaves are stored, and from the step's own sharding constraints. Where
it is guessed wrong, XLA moves more, and values are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jzero.ir import _dataflow, _rules
from jzero.ir._factors import FactorDims
from jzero.ir._layout import AxisCut, Dim, Layout
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _origins
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Primitive

# For each dim, the axes over which XLA shards it; trailing dims may be missing.
AutoSpec: TypeAlias = tuple[tuple[str, ...], ...]
# For each dim, the axes over which XLA may shard it: what several operands say, or readers. Trailing dims may
# be missing.
Claims: TypeAlias = tuple[frozenset[tuple[str, ...]], ...]
_NONE: frozenset[tuple[str, ...]] = frozenset()
_SUMS = frozenset({"psum", "reduce_scatter"})
# The dims of a collective that devices share: those of two axes would interleave there.
_SHARED = {
    "all_gather": ("all_gather_dimension",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_axis", "concat_axis"),
}
_BY_PARTS = frozenset({*_SHARED, "psum", "pmax", "pmin", "ppermute", "layout_constraint"})


@dataclasses.dataclass(frozen=True)
class AutoAxes:
    """The axes over which XLA shards.

    Attributes:
      mesh: all axes, those of the program too.
      own: the program's axes, along which collectives are.
      alone: those along which XLA must not shard a sum of 16 bits: [Note: 16 bits on CPUs].
    """

    mesh: Mesh | AbstractMesh
    own: tuple[str, ...]
    alone: tuple[str, ...] = ()

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """How many places there are along each."""
        return {axis: num for axis, num in self.mesh.shape.items() if axis not in self.own}


def auto_axes(
    jaxpr: Jaxpr, axes: AutoAxes, ins: Mapping[int, AutoSpec], outs: Mapping[int, AutoSpec]
) -> Jaxpr:
    """One device's program, with collectives by parts, and constraints that name nothing but XLA's axes.

    Args:
      jaxpr: the program, with explicit collectives.
      axes: over which XLA shards.
      ins: of arguments, by number, how it shards them.
      outs: and of results.
    """
    program = Region(jaxpr, [])
    made = _claims(program, axes, [ins.get(i, ()) for i in range(len(jaxpr.invars))], False)
    read = _claims(program, axes, [outs.get(i, ()) for i in range(len(jaxpr.outvars))], True)
    once = dict[Any, _jaxpr.Traced]()

    def by_parts(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        known = [
            () if _jaxpr.is_literal(x) else found.get((region, x), ())
            for x in eqn.invars[:1]
            for found in (made, read)
        ]
        fn = _beside(eqn, axes, known)
        if fn is None:
            return False
        types = [(x.aval.shape, x.aval.dtype, x.aval.weak_type) for x in eqn.invars]
        key = fn.func, str(fn.args), *types
        if key not in once:
            given = [jax.ShapeDtypeStruct(*x[:2], weak_type=x[2]) for x in types]
            once[key] = _jaxpr.trace_on(axes.mesh, fn, given, axes.own)
        traced, ins = once[key], [*map(writer.read, eqn.invars)]
        outs = writer.write(traced.jaxpr, traced.consts, ins, eqn)
        writer.names |= zip(eqn.outvars, outs, strict=True)
        return True

    inside = _jaxpr.inside_of(axes.mesh, axes.own)
    return _jaxpr.in_mesh(_origins.rewritten(program, by_parts), inside)


def _beside(
    eqn: Eqn, axes: AutoAxes, known: Sequence[Claims]
) -> functools.partial[jax.Array] | None:
    """What an equation becomes, as a function of its operands; None if it stays.

    `known` is claimed of its one operand by those of which it is made, and by those that are made of it.
    """
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return functools.partial(_constrained, _jaxpr.constraint_spec(eqn, [*axes.sizes]))
    if name == "axis_index":  # JAX lowers it in the mesh in which it was traced.
        return functools.partial(lax.axis_index, eqn.params["axis_name"])
    if name not in _BY_PARTS or len(eqn.invars) != 1:
        return None
    # What is reduced goes to where its readers are; what is gathered comes from where it is stored.
    first = reversed(known) if name in _SUMS else known
    spec = _spec(eqn, next(filter(any, first), ()), axes.sizes)
    names = dict.fromkeys([*(axis for dim in spec for axis in dim), *_alone(eqn, axes)])
    if not names:
        return None
    after = [*spec]
    if name == "all_gather" and not eqn.params["tiled"]:
        dim = eqn.params["all_gather_dimension"]
        after += [()] * (dim - len(after))
        after.insert(dim, ())
    params = tuple(sorted(eqn.params.items()))
    return functools.partial(_in_parts, eqn.primitive, params, tuple(names), spec, tuple(after))


def _constrained(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    laid_out: jax.Array = lax.with_sharding_constraint(x, spec)
    return laid_out


def _in_parts(
    primitive: Primitive, params: Iterable[tuple[str, Any]], names: Collection[str],
    before: AutoSpec, after: AutoSpec, x: jax.Array,
) -> jax.Array:  # fmt: skip
    """An operation on the parts of `x` along the axes."""
    run = functools.partial(_jaxpr.bind_primitive, primitive, dict(params))
    specs = (PartitionSpec(*(dim or None for dim in spec)) for spec in (before, after))
    in_spec, out_spec = specs
    made: jax.Array = jax.shard_map(
        run, in_specs=in_spec, out_specs=out_spec, axis_names={*names}, check_vma=False
    )(x)
    return made


def _alone(eqn: Eqn, axes: AutoAxes) -> tuple[str, ...]:
    """The axes along which XLA must not shard this: [Note: 16 bits on CPUs]."""
    dtype = eqn.invars[0].aval.dtype
    narrow = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
    return axes.alone if narrow and eqn.primitive.name in _SUMS else ()


def _spec(eqn: Eqn, claims: Claims, sizes: Mapping[str, int]) -> AutoSpec:
    """Over which axes its operand is cut: whole where claims differ, or where the devices share a dim."""
    params, found, used = eqn.params, list[tuple[str, ...]](), set[str]()
    tiled = eqn.primitive.name != "all_gather" or params["tiled"]
    shared = [params[name] for name in _SHARED.get(eqn.primitive.name, ())] if tiled else []
    for d, claim in enumerate(claims):
        (names,) = claim if len(claim) == 1 else ((),)
        parts = math.prod(sizes[axis] for axis in names)
        free = d not in shared and used.isdisjoint(names)
        names = names if free and eqn.invars[0].aval.shape[d] % parts == 0 else ()
        used |= {*names}
        found.append(names)
    return tuple(found) if used else ()


# -- how XLA shards the values of a program ---------------------------------------------------------------


def _claims(
    program: Region, axes: AutoAxes, known: Sequence[AutoSpec], backward: bool
) -> Mapping[ValueIn, Claims]:
    """What is claimed of each value by those of which it is made; or by those that are made of it."""
    ends: Sequence[Atom] = program.jaxpr.outvars if backward else program.jaxpr.invars
    start = dict[ValueIn, Claims]()
    for atom, spec in zip(ends, known, strict=True):
        if not _jaxpr.is_literal(atom) and any(spec):
            claims = tuple(frozenset([dim]) if dim else _NONE for dim in spec)
            start[program, atom] = _join(start.get((program, atom), ()), claims)
    run = _dataflow.backward if backward else _dataflow.forward

    def step(region: Region, eqn: Eqn, given: Sequence[Claims]) -> list[Claims]:
        return _across_equation(eqn, given, axes, backward)

    def across(eqn: Eqn, edge: Edge, claims: Claims) -> Claims:
        if edge.kind is EdgeKind.PREDICATE:
            return ()
        shift = -edge.shift if backward else edge.shift
        return claims[1:] if shift < 0 else (*[_NONE] * shift, *claims) if claims else ()

    return run(program, start, step, _join, (), across)


def _join(a: Claims, b: Claims) -> Claims:
    return tuple(x | y for x, y in itertools.zip_longest(a, b, fillvalue=_NONE))


def _across_equation(
    eqn: Eqn, given: Sequence[Claims], axes: AutoAxes, backward: bool
) -> list[Claims]:
    """The claims of the results, of those of the operands; or the other way round."""
    name = eqn.primitive.name
    sources: Sequence[Atom] = eqn.outvars if backward else eqn.invars
    targets: Sequence[Atom] = eqn.invars if backward else eqn.outvars
    if name in ("optimization_barrier", "all_to_all", "ppermute"):
        return [*given]
    if name == "sharding_constraint":
        return [_constraint(eqn, given[0], [*axes.sizes])]
    if not any(map(any, given)):
        return [()] * len(targets)
    if name == "reshape":
        return [_reshaped(given[0], sources[0], targets[0], axes)]
    found = [[_NONE] * len(x.aval.shape) for x in targets]
    for factor in _rules.factors_of(eqn):
        a: FactorDims = factor.outs if backward else factor.ins
        b: FactorDims = factor.ins if backward else factor.outs
        claimed = _NONE.union(
            *(x[d] for x, d in zip(given, a, strict=True) if d is not None and d < len(x))
        )
        for dims, d in zip(found, b, strict=True):
            if d is not None:
                dims[d] = claimed
    return [tuple(dims) if any(dims) else () for dims in found]


def _constraint(eqn: Eqn, claims: Claims, names: Sequence[str]) -> Claims:
    """What a sharding constraint says of these axes, and of other dims what is claimed."""
    found = list[frozenset[tuple[str, ...]]]()
    for d, entry in enumerate(_jaxpr.constraint_spec(eqn, names)):
        if entry is PartitionSpec.UNCONSTRAINED:
            found.append(claims[d] if d < len(claims) else _NONE)
        else:
            found.append(
                frozenset([entry if isinstance(entry, tuple) else (entry,)] * (entry is not None))
            )
    return tuple(found)


def _reshaped(claims: Claims, source: Atom, target: Atom, axes: AutoAxes) -> Claims:
    """What is claimed of the dims that a reshape makes."""
    found: Claims = ()
    for d, claim in enumerate(claims):
        for names in claim:
            dims = [*map(Dim, source.aval.shape)]
            num = math.prod(axes.sizes[axis] for axis in names)
            if dims[d].size % num:
                continue
            # As one axis: only what stays together is claimed.
            dims[d] = dims[d].put(AxisCut("auto", 1))
            layout = Layout(tuple(dims), (("auto", num),)).reshapable(target.aval.shape)
            place = layout.reshape(target.aval.shape).place("auto")
            if place is not None and place[1] == 1:
                found = _join(found, (*[_NONE] * place[0], frozenset([names])))
    return found
