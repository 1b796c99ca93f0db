# SPDX-License-Identifier: Apache-2.0
"""Traces functions under a mesh, without devices, and runs or moves what was traced under another one."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jzero.tracing import _lines
from jzero.tracing._internals import (
    DynamicJaxprTrace,
    NamedAxisEffect,
    core,
    extended,
    internal,
    internal_source_info,
)
from jzero.tracing._jaxpr import (
    Traced,
    array_type,
    constant,
    effects_of,
    is_dropped,
    is_literal,
    replaced,
    scalar,
    trace_here,
    with_inner,
)
from jzero.tracing._types import Jaxpr, Var

_lines.not_the_users(__file__)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    axes: Mapping[str, int],
    automatic: Mapping[str, int],
) -> Traced:
    """Traces `fn(*args)`, `ShapeDtypeStruct`s of per-device shapes, as one device sees it along `axes`.

    `automatic` are the mesh's Auto axes, which sharding constraints may name.
    """
    with _abstract_mesh(dict(axes) | dict(automatic)) as mesh:
        return trace_on(mesh, fn, args, axes)


def trace_on(
    mesh: Any, fn: Callable[..., Any], args: Sequence[Any], axes: Collection[str]
) -> Traced:
    traced: list[Traced] = []

    def body(*local_args: Any) -> tuple[()]:
        traced.append(trace_here(fn, *local_args))
        return ()

    shard_mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=(), check_vma=False, axis_names=set(axes)
    )
    with _abstract_mesh({}):  # The caller's may have Explicit axes.
        jax.eval_shape(shard_mapped, *args)
    return traced[0]


def inside_of(mesh: Any, axes: Collection[str]) -> AbstractMesh:
    """The abstract mesh inside a `shard_map` along `axes`."""
    found: list[Any] = []

    def body() -> jax.Array:
        found.append(jax.sharding.get_abstract_mesh())
        return jnp.zeros(())

    trace_on(mesh, body, (), axes)
    mine: AbstractMesh = found[0]
    return mine


def in_mesh(jaxpr: Jaxpr, mesh: AbstractMesh) -> Jaxpr:
    """The jaxpr as if it had been traced under `mesh`, without types that name another mesh.

    JAX lowers some equations by tracing a function under their mesh, and refuses operands of another mesh.
    """
    contexts: dict[Any, Any] = {}

    def is_of_another(value: Any) -> bool:
        own = getattr(getattr(value.aval, "sharding", None), "mesh", None)
        other = own is not None and not own.empty and own != mesh
        return (
            other or is_literal(value) and hasattr(value.val, "aval") and is_of_another(value.val)
        )

    def inner(jaxpr: Jaxpr) -> Jaxpr:
        new: dict[Var, Var] = {}

        def typed(atom: Any) -> Any:
            if not is_of_another(atom):
                return atom
            aval = atom.aval
            plain = array_type(aval.shape, aval.dtype, aval.weak_type, aval.memory_space)
            if is_literal(atom):
                value = constant(atom.val)
                return extended.Literal(
                    value if aval.shape else scalar(value, aval.dtype).val, plain
                )
            if atom not in new:
                new[atom] = (extended.DropVar if is_dropped(atom) else extended.Var)(plain)
            return new[atom]

        def moved(eqn: Any) -> Any:
            if eqn.ctx.cur_abstract_mesh != mesh:
                if eqn.ctx not in contexts:
                    with eqn.ctx.manager, _abstract_mesh({}), jax.sharding.use_abstract_mesh(mesh):
                        contexts[eqn.ctx] = internal.JaxprEqnContext()
                eqn = eqn.replace(ctx=contexts[eqn.ctx])
            if any(map(is_of_another, (*eqn.invars, *eqn.outvars))):
                ins, outs = ([*map(typed, ends)] for ends in (eqn.invars, eqn.outvars))
                eqn = eqn.replace(invars=ins, outvars=outs)
            is_map = eqn.primitive.name == "shard_map"
            if is_map and eqn.params["mesh"].shape_tuple == mesh.shape_tuple:
                return eqn  # It was traced over this mesh; inside, more axes are Manual.
            return with_inner(eqn, inner)

        invars, constvars = ([*map(typed, ends)] for ends in (jaxpr.invars, jaxpr.constvars))
        eqns, outvars = [*map(moved, jaxpr.eqns)], [*map(typed, jaxpr.outvars)]
        if all(map(operator.is_, eqns, jaxpr.eqns)) and not new:
            return jaxpr
        return replaced(jaxpr, invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)

    return inner(jaxpr)


def trace_whole(
    fn: Callable[..., Any], args: Sequence[Any], automatic: Mapping[str, int]
) -> Traced:
    """Traces `fn(*args)` of whole arrays, as `jax.jit` does; see `trace` for `automatic`."""
    with _abstract_mesh(automatic):
        return trace_here(fn, *args)


@contextlib.contextmanager
def _abstract_mesh(sizes: Mapping[str, int]) -> Iterator[AbstractMesh]:
    """Makes a mesh of Auto axes current, whichever one was."""
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    # JAX does not let a mesh context change to another size, except by way of no mesh.
    nothing = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(nothing), jax.sharding.use_abstract_mesh(mesh):
        yield mesh


def shard_mapped(
    jaxpr: Jaxpr, mesh: Any, in_specs: Sequence[P], out_specs: Sequence[P],
    out_shapes: Sequence[tuple[int, ...]], axes: Collection[str],
) -> Callable[..., list[Any]]:  # fmt: skip
    """A function of whole arrays: `jax.shard_map` of one device's `jaxpr`, which has no constants.

    Under `jax.jit` the `shard_map` equation holds `jaxpr` itself, which is not traced again. Elsewhere
    (eagerly, under `jax.vmap`) it is evaluated inside of `jax.shard_map`. `out_shapes` are the global ones.
    """
    given: dict[str, Any] = dict(
        mesh=mesh, in_specs=tuple(in_specs), check_vma=False, axis_names={*axes}
    )

    def run(*args: Any) -> list[Any]:
        args = tuple([x if isinstance(x, jax.Array) else jnp.asarray(x) for x in args])
        trace = internal.trace_ctx.trace
        if not isinstance(trace, DynamicJaxprTrace):
            body = functools.partial(core.eval_jaxpr, jaxpr, ())
            found: list[Any] = jax.shard_map(body, out_specs=[*out_specs], **given)(*args)
            return found
        # JAX makes the equation's other parameters, which differ between releases.
        without_results = jax.shard_map(lambda *_: (), out_specs=(), **given)
        (eqn,) = jax.make_jaxpr(without_results)(*map(jax.typeof, args)).jaxpr.eqns
        params = {**eqn.params, "jaxpr": jaxpr, "out_specs": tuple(out_specs)}
        types = [
            core.ShapedArray(
                shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False)
            )
            for shape, atom in zip(out_shapes, jaxpr.outvars, strict=True)
        ]
        source = internal_source_info.current()
        tracers = [trace.to_jaxpr_tracer(x, source) for x in args]
        # `jax.effects_barrier` finds effects only if the outer program has them.
        acts = {x for x in effects_of(jaxpr.eqns) if not isinstance(x, NamedAxisEffect)}
        outs = trace.emit_eqn(tracers, types, eqn.primitive, params, eqn.effects | acts, source)
        return list(outs)

    return run


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constvars as its first arguments."""
    return replaced(
        jaxpr,
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),  # type: ignore[attr-defined]
    )
