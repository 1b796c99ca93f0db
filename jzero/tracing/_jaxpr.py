# SPDX-License-Identifier: Apache-2.0
"""Reads and writes jaxprs and their equations, alike on all releases of JAX.

JAX 0.12 made flat trees of a scan's `num_consts` and `num_carry`, and merged `ClosedJaxpr` into `Jaxpr`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero.tracing._internals import (
    AbstractRef,
    NamedAxisEffect,
    core,
    empty2,
    extended,
    flattree,
    internal_effects,
    internal_source_info,
    name_p,
    reduce_scatter_p,
    source_info_util,
)
from jzero.tracing._types import Atom, Eqn, Jaxpr, Literal, Primitive, Var

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# Its frames are not where the user wrote an equation.
source_info_util.register_exclusion(__file__)


class Traced(NamedTuple):
    """A jaxpr with its constants; its outputs follow the tree of the traced function."""

    jaxpr: Jaxpr
    consts: list[Any]
    out_tree: Any
    out_avals: list[Any]


class ScanParts(NamedTuple):
    """A `scan` equation taken apart: body invars are consts, carry, then slices of xs."""

    body: Jaxpr
    body_consts: list[Any]
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


class WhileParts(NamedTuple):
    """A `while` equation taken apart: operands are cond consts, body consts, then the carry."""

    cond: Jaxpr
    cond_consts: list[Any]
    body: Jaxpr
    body_consts: list[Any]
    num_cond_consts: int
    num_body_consts: int


def is_literal(atom: Atom) -> TypeIs[Literal]:
    return isinstance(atom, extended.Literal)


def variables_read(eqn: Eqn) -> list[Var]:
    """The operands that are no literals, with repetitions."""
    return [atom for atom in eqn.invars if not is_literal(atom)]


def is_dropped(var: Var) -> bool:
    return isinstance(var, extended.DropVar)


def variable(atom: Atom) -> Var:
    assert not is_literal(atom), atom
    return atom


def constant(value: Any) -> Any:
    """A constant's value, free of the mesh under which it was traced."""
    if not hasattr(value, "aval") or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    traced_here = AxisType.Manual in jax.typeof(value).sharding.mesh.axis_types
    return np.asarray(value) if traced_here or not isinstance(value, jax.Array) else value


def literal(atom: Literal) -> Any:
    """A literal's value in the dtype of its type, free of the mesh."""
    value = constant(atom.val)
    return value if isinstance(value, jax.Array) else np.asarray(value, atom.aval.dtype)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """Jaxpr and constants of a jaxpr in an equation's parameters, closed or not."""
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def scan_parts(eqn: Eqn) -> ScanParts:
    params = eqn.params
    if "num_carry" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    body, consts = open_jaxpr(params["jaxpr"])
    return ScanParts(
        body, consts, num_consts, num_carry, params["length"], params["reverse"], params["unroll"]
    )


def scan_stacks(eqn: Eqn) -> list[Atom]:
    """The operands that a `scan` slices along dim 0."""
    parts = scan_parts(eqn)
    return eqn.invars[parts.num_consts + parts.num_carry :]


def scan_like(
    eqn: Eqn, body: Jaxpr, ins: Sequence[Atom], outs: Sequence[Var], num_consts: int,
    num_carry: int, length: int, reverse: bool,
) -> Eqn:  # fmt: skip
    """The `scan` equation with another body, whose constants stay."""
    effects = effects_of(body.eqns)
    params = eqn.params | dict(length=length, reverse=reverse)
    params["jaxpr"] = eqn.params["jaxpr"].replace(jaxpr=replaced(body, effects=effects))
    if "num_carry" in params:
        params |= dict(num_consts=num_consts, num_carry=num_carry)
    else:
        parts = num_consts, num_carry, len(ins) - num_consts - num_carry
        params["ft_in"] = flattree.pack(tuple(map(flattree.nones, parts)))
        params["ft_out"] = flattree.pack(
            tuple(map(flattree.nones, (num_carry, len(outs) - num_carry)))
        )
    return eqn.replace(invars=list(ins), outvars=list(outs), params=params, effects=effects)


def while_parts(eqn: Eqn) -> WhileParts:
    params = eqn.params
    return WhileParts(
        *open_jaxpr(params["cond_jaxpr"]),
        *open_jaxpr(params["body_jaxpr"]),
        params["cond_nconsts"],
        params["body_nconsts"],
    )


def cond_parts(eqn: Eqn) -> list[tuple[Jaxpr, list[Any]]]:
    """Branches of a `cond`, each with its constants; their arguments are the operands behind the index."""
    return [open_jaxpr(branch) for branch in eqn.params["branches"]]


# Primitives that only wrap a jaxpr, and the parameter that holds it. When jzero reads a step, derivatives
# have been taken, so custom rules do not matter any more.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # JAX 0.12's closed_call, as in checkpoint policies around a scan
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


# Primitives that compute a jaxpr, with hints to compilers or to `jax.grad`.
ANNOTATED = frozenset({"composite", "linear_call", "xla_metadata_call"})


def call_parts(eqn: Eqn) -> tuple[Jaxpr, list[Any]] | None:
    """Jaxpr and constants that a call-like equation wraps or expands to; None for any other equation."""
    if (name := CALLS.get(eqn.primitive.name)) is not None:
        return open_jaxpr(eqn.params[name])
    if eqn.primitive.name in ANNOTATED:
        return open_jaxpr(*inner_jaxprs(eqn))
    if eqn.primitive.name == "custom_linear_solve":
        return _solver(eqn)
    expand = _expansion(eqn)
    if expand is None:
        return None
    # Avals without a mesh: lineax compares them with those that it noted when the step was traced
    # ("pytree does not match out_structure"), while inside of `shard_map` they have one.
    avals = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type)
        for x in eqn.invars
    ]
    traced = trace_here(functools.partial(expand, **eqn.params), *avals)
    return traced.jaxpr, traced.consts


def _solver(eqn: Eqn) -> tuple[Jaxpr, list[Any]]:
    """The solver of `jax.lax.custom_linear_solve`; its other jaxprs are for derivatives."""
    counts = eqn.params["const_lengths"]
    solve, consts = open_jaxpr(eqn.params["jaxprs"].solve)
    unread = [new_var(x) for x in eqn.invars]
    first, last = counts.matvec + counts.vecmat, sum(counts)
    invars = [*unread[:first], *solve.invars[: counts.solve], *unread[first + counts.solve : last],
              *solve.invars[counts.solve :]]  # fmt: skip
    info = solve.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    return replaced(solve, invars=invars, debug_info=info), consts


def _expansion(eqn: Eqn) -> Callable[..., Any] | None:
    """The function by which JAX replaces an equation when it lowers a program, if it does.

    It does so for `jnp.searchsorted` in JAX 0.12, for all primitives of `jax.experimental.hijax`, and with
    `jax_remat3` for `jax.checkpoint`. The bodies of loops are expanded by themselves.
    """
    primitive: Any = eqn.primitive
    # `lineax.linear_solve`, by itself or under `jax.vmap`, for which Equinox has a primitive.
    vmapped = eqn.params.get("prim") if primitive.name == "vprim" else None
    if (vmapped or primitive).name == "linear_solve":
        impl: Callable[..., Any] = primitive.impl
        return impl
    if primitive.name in ("cond", "scan", "while") or inner_jaxprs(eqn):
        return None
    if not primitive.is_high(*[x.aval for x in eqn.invars], **eqn.params):
        return None
    to_lojax: Callable[..., Any] = primitive.to_lojax
    return to_lojax


def branch_of_steps(eqn: Eqn) -> tuple[Jaxpr, list[Any]] | None:
    """The branch of a `cond` that only tells Mosaic kernels from all other platforms (`jnp.diagonal`)."""
    platforms = eqn.params.get("branches_platforms") or ()
    if not platforms or not set(platforms) <= {("mosaic",), None}:
        return None
    return open_jaxpr(eqn.params["branches"][platforms.index(None)])


def axes_of(eqn: Eqn) -> tuple[Any, ...]:
    """The axes of a collective; under `jax.vmap` it may reduce dims (ints), too."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def is_rematted(eqn: Eqn) -> bool:
    """Whether it is a `jax.checkpoint` in a backward pass, which recomputes."""
    return eqn.primitive.name == "remat2" and bool(eqn.params["differentiated"])


def prevents_cse(eqn: Eqn) -> bool:
    prevent_cse = eqn.params["prevent_cse"]
    return prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)


def autodiff_pass(eqn: Eqn) -> str | None:
    """'forward' or 'backward' for equations that `jax.grad` wrote, by their outermost transform."""
    for entry in eqn.source_info.name_stack.stack:
        if isinstance(entry, internal_source_info.Transform) and entry.name in ("jvp", "transpose"):
            return "forward" if entry.name == "jvp" else "backward"
    return None


def in_scope(eqn: Eqn, name: str) -> bool:
    return name in scopes(eqn)


def scopes(eqn: Eqn) -> list[str]:
    """Names of the scopes and transforms around an equation, outermost first."""
    return [entry.name for entry in eqn.source_info.name_stack.stack]


def with_scope(eqn: Eqn, name: str) -> Eqn:
    stack = source_info_util.new_name_stack(name)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def within_scope(eqn: Eqn, *names: str, outer: Eqn | None = None) -> Eqn:
    """The equation within further scopes, and within those of `outer`."""
    stack = eqn.source_info.name_stack + source_info_util.new_name_stack(*names)
    if outer is not None:
        stack = outer.source_info.name_stack + stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def users_scopes(eqn: Eqn) -> list[str]:
    stack = eqn.source_info.name_stack.stack
    found = [entry for entry in stack if not isinstance(entry, internal_source_info.Transform)]
    return [entry.name for entry in found]


def text_of(jaxpr: Jaxpr, width: int) -> str:
    """A jaxpr as JAX prints it, with the scopes of each equation as a comment."""
    printable: Any = jaxpr
    text: str = printable.pretty_print(name_stack=True, use_color=False, width=width)
    return text


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`, whose own equation differs with `jax_remat3`."""
    out: jax.Array = name_p.bind(x, name=name)
    return out


def is_named(eqn: Eqn, name: str) -> bool:
    return eqn.primitive is name_p and eqn.params["name"] == name


def has_side_effects(eqn: Eqn) -> bool:
    """Whether the equation does more than compute its results (prints, callbacks)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def has_ordered_effects(eqn: Eqn) -> bool:
    return bool(internal_effects.ordered_effects.filter_in(eqn.effects))


def effects_of(eqns: Sequence[Eqn]) -> set[Any]:
    return {effect for eqn in eqns for effect in eqn.effects}


def with_effects_of_programs(eqn: Eqn) -> Eqn:
    """The equation with the effects of the programs that it holds."""
    programs = (open_jaxpr(inner)[0] for inner in inner_jaxprs(eqn))
    return eqn.replace(effects=effects_of([e for jaxpr in programs for e in jaxpr.eqns]))


def _keep_local(params: dict[str, Any]) -> dict[str, Any]:
    # Shardings name the mesh of the trace, and have no meaning inside `shard_map`.
    return {
        name: None if name in ("sharding", "out_sharding") else value
        for name, value in params.items()
    }


def without_sharding(eqn: Eqn) -> Eqn:
    """The equation without shardings of the mesh under which it was traced."""
    params = eqn.params
    if params.get("sharding") is None and params.get("out_sharding") is None:
        return eqn
    return eqn.replace(params=_keep_local(eqn.params))


def bind(eqn: Eqn, *args: Any, **overrides: Any) -> list[Any]:
    """Binds the equation's primitive to `args`, with some parameters replaced; always returns a list."""
    params = eqn.primitive.get_bind_params(_keep_local(eqn.params) | overrides)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def constraint_spec(eqn: Eqn, axes: Sequence[str]) -> P:
    """The spec of a `sharding_constraint` over `axes` alone; empty for a single device."""

    def keep(dim: int, entry: Any) -> Any:
        if dim in eqn.params["unconstrained_dims"]:
            return P.UNCONSTRAINED
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    spec = getattr(eqn.params["sharding"], "spec", P())
    return P(*(keep(dim, entry) for dim, entry in enumerate(spec)))


def source_of(eqn: Eqn) -> contextlib.AbstractContextManager[None]:
    """A context in which new equations get the line and scopes of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)


def trace_here(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fn(*args)` under the current mesh; arrays and tracers that it closes over become constants."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves, tree = jax.tree.flatten(shapes)
    return Traced(*open_jaxpr(jaxpr), tree, leaves)


def ref_equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Equations that make, read or write a mutable array (`jax.new_ref`), outside Pallas kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        if any(isinstance(atom.aval, AbstractRef) for atom in [*eqn.invars, *eqn.outvars]):
            yield eqn
        else:
            for inner in extended.jaxprs_in_params(eqn.params):
                yield from ref_equations(inner)


def new_var(like: Atom) -> Var:
    return extended.Var(like.aval)


def replaced(jaxpr: Any, **parts: Any) -> Jaxpr:
    """A jaxpr with other `parts`: `invars`, `eqns`, ..., or `constvars` and their `consts`."""
    # JAX 0.12 keeps the values of constvars in the jaxpr; earlier releases do not.
    if not hasattr(jaxpr, "with_consts"):
        parts.pop("consts", None)
    return jaxpr.replace(**parts)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    return core.eval_jaxpr(jaxpr, consts, *args)


def evaluate_one(eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    with source_of(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(dict(eqn.params)))
    return list(out) if eqn.primitive.multiple_results else [out]


def with_inner(eqn: Eqn, inner: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation with `inner(jaxpr)` in the place of each jaxpr that it holds; itself if none changes."""
    if not inner_jaxprs(eqn):
        return eqn
    changed = False

    def replace(param: Any) -> Any:
        nonlocal changed
        if isinstance(param, (tuple, list)) and any(map(_is_jaxpr, param)):
            found = map(replace, param)
            return param._make(found) if hasattr(param, "_make") else type(param)(found)
        if not _is_jaxpr(param):
            return param
        old = open_jaxpr(param)[0]
        new = inner(old)
        if new is old:
            return param
        changed = True
        return param.replace(jaxpr=new) if hasattr(param, "consts") else new

    params = {name: replace(param) for name, param in eqn.params.items()}
    return eqn.replace(params=params) if changed else eqn


def _is_jaxpr(param: Any) -> bool:
    return hasattr(param, "eqns")


def inner_jaxprs(eqn: Eqn) -> list[Any]:
    return jaxprs_in(eqn.params.values())


def jaxprs_in(params: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for param in params:  # Most are sizes and flags; this is called for each equation.
        if isinstance(param, (tuple, list)):
            if param and type(param[0]) is not int:
                found += filter(_is_jaxpr, param)
        elif param is not None and _is_jaxpr(param):
            found.append(param)
    return found


def walk(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Every equation, each followed by those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inside(eqn)


def inside(eqn: Eqn) -> Iterator[Eqn]:
    """Every equation of the programs that an equation holds."""
    for inner in inner_jaxprs(eqn):
        yield from walk(open_jaxpr(inner)[0])


def equation(
    primitive: Primitive, ins: Sequence[Atom], outs: Sequence[Var], source: Eqn, **params: Any
) -> Eqn:
    """A new equation with the line and scopes of `source`."""
    # Some releases of JAX give a product a parameter, and cannot print an equation without it.
    if primitive is lax.mul_p:
        params = _params_of_product() | params
    return extended.new_jaxpr_eqn(
        list(ins), list(outs), primitive, params, set(), source.source_info
    )


@functools.cache
def _params_of_product() -> dict[str, Any]:
    (eqn,) = trace_here(lax.mul, *[jax.ShapeDtypeStruct((), jnp.float32)] * 2).jaxpr.eqns
    return dict(eqn.params)


def result_types(primitive: Any, ins: Sequence[Atom], params: Mapping[str, Any]) -> list[Any]:
    found, _ = primitive.abstract_eval(*[atom.aval for atom in ins], **params)
    return list(found) if primitive.multiple_results else [found]


def is_on_host(aval: Any) -> bool:
    """Whether a value of this type is in pinned host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def zero_on_host(dtype: Any) -> Any:
    """An element of which XLA:GPU allocates stacks on the host without filling them, as for `lax.scan`.

    The host's processors would broadcast a zero that was copied there, and XLA warns.
    """
    return empty2(dtype, memory_space=jax.memory.Space.Host)


def changes_memory(eqn: Eqn) -> bool:
    """Whether the equation only copies a value from one memory of a device to another."""
    return eqn.primitive.name == "device_put" and len(eqn.invars) == 1 and all(
        isinstance(device, jax.memory.Space) for device in eqn.params["devices"]
    )  # fmt: skip


def puts_nowhere(eqn: Eqn) -> bool:
    """Whether it is a `device_put` without a device or to a single one, to be ignored: a step has a mesh."""
    return eqn.primitive.name == "device_put" and all(
        device is None
        or isinstance(device, jax.Device)
        or isinstance(device, SingleDeviceSharding)
        and device.memory_kind in (None, "device")
        for device in eqn.params["devices"]
    )


def scalar(value: Any, dtype: Any) -> Literal:
    array = np.asarray(value, dtype)
    # JAX 0.10.2 does not lower NumPy scalars of the small dtypes (kind "V"), but arrays of them.
    made = array if array.dtype.kind == "V" else array[()]
    literal: Literal = extended.Literal(made, core.ShapedArray((), dtype))
    return literal


def var_like(aval: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> Var:
    """A new variable with the type of `aval`, or with another shape or dtype."""
    if shape is None and dtype is None:
        return extended.Var(aval)
    shape = aval.shape if shape is None else tuple(shape)
    weak = getattr(aval, "weak_type", False) and dtype is None
    dtype = aval.dtype if dtype is None else dtype
    space = getattr(aval, "memory_space", jax.memory.Space.Device)
    return extended.Var(array_type(shape, dtype, weak, space))


@functools.lru_cache(maxsize=2**12)  # Programs have many equations, and few shapes.
def array_type(shape: tuple[int, ...], dtype: Any, weak: bool, space: Any) -> Any:
    return core.ShapedArray(shape, dtype, weak_type=weak, memory_space=space)


PRIMITIVES = {
    "psum": lax.psum_p, "pmax": lax.pmax_p, "pmin": lax.pmin_p, "all_gather": lax.all_gather_p,
    "all_to_all": lax.all_to_all_p, "psum_scatter": reduce_scatter_p,
    "ppermute": lax.ppermute_p, "axis_index": lax.axis_index_p, "cond": lax.cond_p,
}  # fmt: skip


COLLECTIVES = frozenset(PRIMITIVES.values()) - {lax.axis_index_p, lax.cond_p}
