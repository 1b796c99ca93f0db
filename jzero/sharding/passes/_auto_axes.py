# SPDX-License-Identifier: Apache-2.0
"""Collectives over data axes beside Auto mesh axes: each device along these moves only its own part.

Left alone, XLA would first gather over its axes what is gathered or reduced over the data axes. So such a
collective becomes a `shard_map` over XLA's axes, too, in which it moves a part::

    whole = all_gather(shard, 'data')  ->  whole = shard_map(all_gather, P(None, 'model'))(shard)

How XLA shards a value, `_auto_specs` guesses: where it is wrong, XLA moves more, and values are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jzero.ir._regions import Region
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _origins
from jzero.sharding.passes._auto_layouts import SHARED, SUMS, AutoLayouts, AutoSpec, SpecOf
from jzero.tracing import _jaxpr, _traces
from jzero.tracing._types import Eqn, Jaxpr, Primitive

_BY_PARTS = frozenset({*SHARED, "psum", "pmax", "pmin", "ppermute", "layout_constraint"})


@dataclasses.dataclass(frozen=True)
class AutoAxes:
    """The axes over which XLA shards."""

    mesh: Mesh | AbstractMesh  # all axes, those of the program too
    own: tuple[str, ...]  # the program's axes, along which collectives are
    # XLA must not shard a sum of 16 bits along these, [Note: 16 bits on CPUs].
    alone: tuple[str, ...] = ()

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return {axis: num for axis, num in self.mesh.shape.items() if axis not in self.own}


def auto_axes(jaxpr: Jaxpr, axes: AutoAxes, specs: AutoLayouts) -> Jaxpr:
    """One device's program, with collectives by parts, and constraints that name nothing but XLA's axes."""
    program = Region(jaxpr, [])
    spec_of = specs.of(program)
    once = dict[Any, _jaxpr.Traced]()

    def by_parts(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        fn = _beside(region, eqn, axes, spec_of)
        if fn is None:
            return False
        types = [(x.aval.shape, x.aval.dtype, x.aval.weak_type) for x in eqn.invars]
        key = fn.func, str(fn.args), *types
        if key not in once:
            given = [jax.ShapeDtypeStruct(*x[:2], weak_type=x[2]) for x in types]
            once[key] = _traces.trace_on(axes.mesh, fn, given, axes.own)
        traced, ins = once[key], [*map(writer.read, eqn.invars)]
        outs = writer.write(traced.jaxpr, traced.consts, ins, eqn)
        writer.names |= zip(eqn.outvars, outs, strict=True)
        return True

    inside = _traces.inside_of(axes.mesh, axes.own)
    return _traces.in_mesh(_origins.rewritten(program, by_parts), inside)


def _beside(
    region: Region, eqn: Eqn, axes: AutoAxes, spec_of: SpecOf
) -> functools.partial[jax.Array] | None:
    """The replacement of an equation, as a function of its operands; None if it stays."""
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return functools.partial(_constrained, _jaxpr.constraint_spec(eqn, [*axes.sizes]))
    if name == "axis_index":  # JAX lowers it in the mesh in which it was traced.
        return functools.partial(lax.axis_index, eqn.params["axis_name"])
    if name not in _BY_PARTS or len(eqn.invars) != 1:
        return None
    spec = spec_of(region, eqn)
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
    run = functools.partial(primitive.bind, **primitive.get_bind_params(dict(params)))
    specs = (PartitionSpec(*(dim or None for dim in spec)) for spec in (before, after))
    in_spec, out_spec = specs
    made: jax.Array = jax.shard_map(
        run, in_specs=in_spec, out_specs=out_spec, axis_names={*names}, check_vma=False
    )(x)
    return made


def _alone(eqn: Eqn, axes: AutoAxes) -> tuple[str, ...]:
    dtype = eqn.invars[0].aval.dtype
    narrow = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
    return axes.alone if narrow and eqn.primitive.name in SUMS else ()
