# SPDX-License-Identifier: Apache-2.0
"""The only file that touches JAX internals: reading jaxprs, binding equations, tracing with axes.

Everything that differs between JAX releases is decided here, once, so that the rest of jzero reads the
same on all of them. Seen so far: scan's `num_consts`/`num_carry` became flat trees (0.12), `ClosedJaxpr`
merged into `Jaxpr` (0.12).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import operator
import pathlib
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero._tested import lacks_of_jax
from jzero.tracing._types import Atom, Eqn, Jaxpr, Literal, Primitive, Var

# Behind each internal is the release in which its definition changed last, by JAX's history from 0.4.30 on
# and the sources of 0.11.2 and 0.12.0.1; what JAX offers in public is taken from there.
try:
    import jax._src.core as internal
    from jax import core as public
    from jax._src import (
        api,  # _post_hook_state: 0.8
        config,  # trace_context: 0.8.1
        distributed,  # global_state: not since 0.4.30
        dtypes,  # register_canonicalize_value_handler: 0.11.0
        xla_bridge,  # _backends: not since 0.4.30
    )
    from jax._src import effects as internal_effects  # ordered_effects: not since 0.4.30
    from jax._src import source_info_util as internal_source_info  # Transform, user_frames: 0.7.0
    from jax._src.ad_checkpoint import name_p  # the same in 0.10.2 to 0.12
    from jax._src.array import ArrayImpl  # 0.12
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace  # emit_eqn: 0.10.2
    from jax._src.lax.lax import empty2  # 0.8.0
    from jax._src.lax.parallel import reduce_scatter_p  # 0.4.36
    from jax._src.lib import _jax as xla  # batched_copy_array_to_devices_with_sharding: 0.10.2 only
    from jax._src.random.prng import PRNGKeyArray  # moved here in 0.10.2; 0.11.0
    from jax.experimental.hijax import AbstractRef
    from jax.extend import core as extended_core
    from jax.extend import source_info_util
    from jax.extend.random import threefry2x32_p
    from jax.interpreters import ad, batching, mlir  # register_lowering: 0.7.0
except ImportError as error:
    raise lacks_of_jax(error) from error

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# What their classes hold for jzero is in `_types.py`.
core: Any = public
extended: Any = extended_core
AxisEnv: Any = internal.AxisEnv  # 0.10.0
NamedAxisEffect: Any = internal.NamedAxisEffect  # 0.10.2


@contextlib.contextmanager
def keeps_nan_checks() -> Iterator[None]:
    """Whatever looks for NaN in programs that have run before goes on to look after it.

    Leaving `jax.debug_nans` of either value, as an eager `jax.shard_map` does with every operation, JAX no
    longer calls in this thread what a `jax.config.update` has made it call.
    """
    hook: Any = api._post_hook_state
    before = hook.get_local()
    try:
        yield
    finally:
        hook.set_local(before)


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


def trace_settings() -> tuple[Hashable, ...]:
    """What JAX's configuration says of a trace made now, as `jax.jit` asks it, without meshes and axes."""
    return _without_meshes_and_axes(config.trace_context())


@functools.lru_cache(maxsize=64)  # Every call of a step asks: 0.5 µs in place of 7.
def _without_meshes_and_axes(context: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    return tuple([x for x in context if not isinstance(x, AbstractMesh | AxisEnv)])


def is_literal(atom: Atom) -> TypeIs[Literal]:
    """Whether `atom` is a constant written into the equation."""
    return isinstance(atom, extended.Literal)


def variables_read(eqn: Eqn) -> list[Var]:
    """What the equation reads that is no constant written into it, as often as it does."""
    return [atom for atom in eqn.invars if not is_literal(atom)]


def is_dropped(var: Var) -> bool:
    """Whether nothing reads what the equation gives there."""
    return isinstance(var, extended.DropVar)


def variable(atom: Atom) -> Var:
    """`atom`, of which is known that it is no literal."""
    assert not is_literal(atom), atom
    return atom


def constant(value: Any) -> Any:
    """A constant's value, free of the mesh under which it was traced."""
    if not hasattr(value, "aval") or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    traced_here = AxisType.Manual in jax.typeof(value).sharding.mesh.axis_types
    return np.asarray(value) if traced_here or not isinstance(value, jax.Array) else value


def literal(atom: Literal) -> Any:
    """A literal's value, in the dtype it was traced with, free of the mesh."""
    value = constant(atom.val)
    return value if isinstance(value, jax.Array) else np.asarray(value, atom.aval.dtype)


# Whether an array is a deleted one as soon as a program has donated it.
DELETES_DONATED = jax.__version_info__ >= (0, 11)


def let_go(xs: Sequence[Any]) -> None:
    """Deletes what a step has consumed, so that JAX says `Array has been deleted` to whoever uses it.

    [Note: what JAX 0.10 leaves alive] JAX 0.11 does that to arrays that it donates, and only what a view kept
    alive, wholly or on some devices, is left to delete. JAX 0.10 leaves them as they are, and the process
    crashes where a program of several devices takes one (tests/test_donate.py). To delete such an array costs
    little: what is freed then need not be freed later. But it crashes, too, where another thread reads the
    array just then: JAX reads without the interpreter's lock what it does not hold. So beside other
    threads an array is not deleted: it takes the place of one that was, and a second array, which the first
    one holds, keeps what threads may be reading (tests/test_calls.py).
    """
    if len(sys._current_frames()) > 1:
        plain = [x._base_array if isinstance(x, PRNGKeyArray) else x for x in xs]
        whole = [x for x in plain if isinstance(x, ArrayImpl) and _is_whole(x)]
        _vacate(whole)
        ids = set(map(id, whole))
        xs = [
            x for x in plain if id(x) not in ids and (DELETES_DONATED or type(x) is not ArrayImpl)
        ]
    # Every step pays for this: a loop, or a method that is looked up for each, takes longer.
    delete = (
        ArrayImpl.delete if set(map(type, xs)) == {ArrayImpl} else operator.methodcaller("delete")
    )
    collections.deque(map(delete, xs), maxlen=0)


def _is_whole(x: Any) -> bool:
    """Whether no device has deleted its part; JAX 0.11 leaves some on a part of the devices."""
    if not DELETES_DONATED:  # Of a deleted one it is None, and to ask it more ends the process.
        return x.traceback is not None
    return not x.is_deleted() and not any(shard.is_deleted() for shard in x._arrays)


def _vacate(xs: Sequence[Any]) -> None:
    """Makes deleted arrays of these, and frees nothing of what another thread reads just now."""
    if not xs:
        return
    kept = [_alike(x.sharding) for x in xs]
    copies = xla.batched_copy_array_to_devices_with_sharding(
        xs, [s._internal_device_list for s in kept], kept,
        [xla.ArrayCopySemantics.REUSE_INPUT] * len(xs))  # fmt: skip
    for x, copy_of in zip(xs, copies, strict=True):
        x._vacated = copy_of
        # Each in one go, since Ctrl-C may come behind it; JAX 0.11 refuses a deleted array here.
        if DELETES_DONATED:
            other = functools.partial(x._replace_with, _zeros(x.shape, x.dtype, x.sharding))
            collections.deque(map(operator.call, (other, x.delete)), maxlen=0)
        else:
            x._replace_with(_vacant(x.sharding, x.aval))


@functools.cache
def _alike(sharding: Sharding) -> NamedSharding:
    """Another one over the same devices: JAX returns the array itself for its own."""
    mesh = Mesh(np.array(sharding._device_assignment), ("jzero",))
    return NamedSharding(mesh, P(), memory_kind=sharding.memory_kind)


@functools.cache
def _vacant(sharding: NamedSharding, aval: Any) -> jax.Array:
    """A deleted array that says to be of this sharding and type, and never had an element."""
    x: Any = _zeros((0,) * len(sharding.spec), np.float32, sharding)
    x.delete()
    x.aval = aval
    return x


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    whole = np.broadcast_to(np.zeros((), dtype), shape)
    with jax.transfer_guard("allow"):  # Whoever forbids copies does not mean these.
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def forget_views(x: Any) -> None:
    """Has an array and its shards let go of NumPy's views that JAX 0.11 keeps, and no other release."""
    if jax.__version_info__[:2] != (0, 11):
        return
    whole = [x._fully_replicated_shard()] if x.is_fully_replicated else []
    for y in (*(shard.data for shard in x.addressable_shards), *whole, x):
        y._replace_with(view(y, y.sharding))  # Another array, of which nothing is kept yet.


def with_type_of(x: Any, atom: Atom) -> Any:
    """`x`, weakly typed if `atom` is: else a state's Python number would change type in a step."""
    if atom.aval.weak_type and not jax.typeof(x).weak_type:
        return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    return x


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """Jaxpr and constants of what an equation's parameter holds, closed or not."""
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def scan_parts(eqn: Eqn) -> ScanParts:
    """Takes a `scan` equation apart."""
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
    """What a `scan` equation slices along dim 0."""
    parts = scan_parts(eqn)
    return eqn.invars[parts.num_consts + parts.num_carry :]


def scan_like(
    eqn: Eqn, body: Jaxpr, ins: Sequence[Atom], outs: Sequence[Var], num_consts: int,
    num_carry: int, length: int, reverse: bool,
) -> Eqn:  # fmt: skip
    """A `scan` equation in the place of `eqn`, with another body, whose constants it keeps."""
    effects = effects_of(body.eqns)
    params = eqn.params | dict(length=length, reverse=reverse)
    params["jaxpr"] = eqn.params["jaxpr"].replace(jaxpr=replaced(body, effects=effects))
    if "num_carry" in params:
        params |= dict(num_consts=num_consts, num_carry=num_carry)
    else:
        trees: Any = importlib.import_module("jax._src.flattree")  # 0.11.0; JAX 0.10 has none.
        parts = num_consts, num_carry, len(ins) - num_consts - num_carry
        params["ft_in"] = trees.pack(tuple(map(trees.nones, parts)))
        params["ft_out"] = trees.pack(tuple(map(trees.nones, (num_carry, len(outs) - num_carry))))
    return eqn.replace(invars=list(ins), outvars=list(outs), params=params, effects=effects)


def while_parts(eqn: Eqn) -> WhileParts:
    """Takes a `while` equation apart."""
    params = eqn.params
    return WhileParts(
        *open_jaxpr(params["cond_jaxpr"]),
        *open_jaxpr(params["body_jaxpr"]),
        params["cond_nconsts"],
        params["body_nconsts"],
    )


def cond_parts(eqn: Eqn) -> list[tuple[Jaxpr, list[Any]]]:
    """Branches of a `cond` equation, each with its constants; operands follow the index."""
    return [open_jaxpr(branch) for branch in eqn.params["branches"]]


# Primitives that only wrap a jaxpr, and the parameter that holds it. Derivatives are already taken when
# jzero reads a step, so custom rules have no more to say.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # what JAX 0.12 calls closed_call: of checkpoint policies around a scan
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


# Primitives that hold what they compute as a jaxpr, beside what they say to compilers or to `jax.grad`.
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
    # Avals without a mesh: inside of `shard_map` they have one, and lineax compares them with some that it
    # noted when the step was traced ("pytree does not match out_structure").
    avals = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type)
        for x in eqn.invars
    ]
    traced = trace_here(functools.partial(expand, **eqn.params), *avals)
    return traced.jaxpr, traced.consts


def _solver(eqn: Eqn) -> tuple[Jaxpr, list[Any]]:
    """What `jax.lax.custom_linear_solve` runs: the rest of it says what its derivatives are."""
    counts = eqn.params["const_lengths"]
    solve, consts = open_jaxpr(eqn.params["jaxprs"].solve)
    unread = [new_var(x) for x in eqn.invars]
    first, last = counts.matvec + counts.vecmat, sum(counts)
    invars = [*unread[:first], *solve.invars[: counts.solve], *unread[first + counts.solve : last],
              *solve.invars[counts.solve :]]  # fmt: skip
    info = solve.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    return replaced(solve, invars=invars, debug_info=info), consts


def _expansion(eqn: Eqn) -> Callable[..., Any] | None:
    """What JAX runs in the place of an equation when it lowers a program; None if that is the equation.

    `jnp.searchsorted` has one in JAX 0.12, as have all primitives of `jax.experimental.hijax`, and with
    `jax_remat3` a `jax.checkpoint`. Loops have one where their bodies do, which are expanded one by one.
    """
    primitive: Any = eqn.primitive
    if _is_solve_of_lineax(eqn):
        impl: Callable[..., Any] = primitive.impl
        return impl
    if primitive.name in ("cond", "scan", "while") or inner_jaxprs(eqn):
        return None
    if not primitive.is_high(*[x.aval for x in eqn.invars], **eqn.params):
        return None
    to_lojax: Callable[..., Any] = primitive.to_lojax
    return to_lojax


def _is_solve_of_lineax(eqn: Eqn) -> bool:
    """Whether it is `lineax.linear_solve`, by itself or in `jax.vmap`: then Equinox has one of its own."""
    vmapped = eqn.params.get("prim") if eqn.primitive.name == "vprim" else None
    return (vmapped or eqn.primitive).name == "linear_solve"


def branch_of_steps(eqn: Eqn) -> tuple[Jaxpr, list[Any]] | None:
    """Of a branch by platform: the one of everything but Mosaic kernels, if there is no other choice.

    `jnp.diagonal` is one. Its operands stand behind the index.
    """
    platforms = eqn.params.get("branches_platforms") or ()
    if not platforms or not set(platforms) <= {("mosaic",), None}:
        return None
    return open_jaxpr(eqn.params["branches"][platforms.index(None)])


def axes_of(eqn: Eqn) -> tuple[Any, ...]:
    """The axes that a collective names, and dims, where `jax.vmap` has made it a reduction of these."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def is_rematted(eqn: Eqn) -> bool:
    """Whether the equation is a `jax.checkpoint` body of a backward pass, recomputation included."""
    return eqn.primitive.name in ("remat2", "checkpoint") and bool(eqn.params["differentiated"])


def prevents_cse(eqn: Eqn) -> bool:
    """Whether a checkpoint body asked to be kept apart from the forward pass."""
    prevent_cse = eqn.params["prevent_cse"]
    return prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)


def autodiff_pass(eqn: Eqn) -> str | None:
    """'forward' or 'backward' for equations that `jax.grad` made, None for all others.

    JAX writes its transforms on every equation's name stack; the outermost one tells the pass.
    """
    for entry in eqn.source_info.name_stack.stack:
        if isinstance(entry, internal_source_info.Transform) and entry.name in ("jvp", "transpose"):
            return "forward" if entry.name == "jvp" else "backward"
    return None


def in_scope(eqn: Eqn, name: str) -> bool:
    """Whether `eqn` was made under `jax.named_scope(name)`."""
    return name in scopes(eqn)


def scopes(eqn: Eqn) -> list[str]:
    """Names of the scopes and transforms under which `eqn` was made, the outermost first."""
    return [entry.name for entry in eqn.source_info.name_stack.stack]


def with_scope(eqn: Eqn, name: str) -> Eqn:
    """The equation, as if it had been made under `jax.named_scope(name)` and nothing else."""
    stack = source_info_util.new_name_stack(name)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def within_scope(eqn: Eqn, *names: str, outer: Eqn | None = None) -> Eqn:
    """The equation, as if it had been made under further `jax.named_scope`s, and in the body of `outer`."""
    stack = eqn.source_info.name_stack + source_info_util.new_name_stack(*names)
    if outer is not None:
        stack = outer.source_info.name_stack + stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def users_scopes(eqn: Eqn) -> list[str]:
    """Names of the `jax.named_scope`s under which `eqn` was made, the outermost first."""
    stack = eqn.source_info.name_stack.stack
    found = [entry for entry in stack if not isinstance(entry, internal_source_info.Transform)]
    return [entry.name for entry in found]


def text_of(jaxpr: Jaxpr, width: int) -> str:
    """A jaxpr as JAX prints it, with the scopes of each equation as a comment."""
    printable: Any = jaxpr
    text: str = printable.pretty_print(name_stack=True, use_color=False, width=width)
    return text


def not_the_users(path: str) -> None:
    """Lines of this file are not where the user wrote an equation: the line that called it is."""
    source_info_util.register_exclusion(path)


not_the_users(__file__)


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`, which with `jax_remat3` makes another equation than `is_named` knows."""
    out: jax.Array = name_p.bind(x, name=name)
    return out


def is_named(eqn: Eqn, name: str) -> bool:
    """Whether `named` made the equation."""
    return eqn.primitive is name_p and eqn.params["name"] == name


def has_side_effects(eqn: Eqn) -> bool:
    """Whether the equation does more than compute its outputs (prints, calls back)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def has_ordered_effects(eqn: Eqn) -> bool:
    """Whether it does so, or something in it does, in the order of the program."""
    return bool(internal_effects.ordered_effects.filter_in(eqn.effects))


def effects_of(eqns: Sequence[Eqn]) -> set[Any]:
    """What equations do more than compute their outputs, and the axes that they name."""
    return {effect for eqn in eqns for effect in eqn.effects}


def with_effects_of_programs(eqn: Eqn) -> Eqn:
    """An equation that holds other programs than before, and does what these do."""
    programs = (open_jaxpr(inner)[0] for inner in inner_jaxprs(eqn))
    return eqn.replace(effects=effects_of([e for jaxpr in programs for e in jaxpr.eqns]))


def _keep_local(params: dict[str, Any]) -> dict[str, Any]:
    # Shardings recorded while tracing name the tracing mesh; inside shard_map there is nothing to say.
    return {
        name: None if name in ("sharding", "out_sharding") else value
        for name, value in params.items()
    }


def without_sharding(eqn: Eqn) -> Eqn:
    """The equation, that says nothing of the mesh under which it was traced."""
    params = eqn.params
    if params.get("sharding") is None and params.get("out_sharding") is None:
        return eqn
    return eqn.replace(params=_keep_local(eqn.params))


def bind(eqn: Eqn, *args: Any, **overrides: Any) -> list[Any]:
    """Runs the equation on `args` with some of its parameters replaced; always returns a list."""
    params = eqn.primitive.get_bind_params(_keep_local(eqn.params) | overrides)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def constraint_spec(eqn: Eqn, axes: Sequence[str]) -> P:
    """What a `sharding_constraint` equation says of `axes`; of others, and of one device, it says nothing."""

    def keep(dim: int, entry: Any) -> Any:
        if dim in eqn.params["unconstrained_dims"]:
            return P.UNCONSTRAINED
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    spec = getattr(eqn.params["sharding"], "spec", P())
    return P(*(keep(dim, entry) for dim, entry in enumerate(spec)))


def source_of(eqn: Eqn) -> contextlib.AbstractContextManager[None]:
    """Context that gives what is bound inside it the user's line and name scopes of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)


def has_line(eqn: Eqn) -> bool:
    """Whether JAX knows where the user wrote it; of what a library jits, it knows only the call."""
    return bool(source_info_util.summarize(eqn.source_info))


def with_line_of(eqn: Eqn, outer: Eqn) -> Eqn:
    """The equation; at the line of what it is in, if JAX does not know its own."""
    if has_line(eqn):
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=outer.source_info.traceback))


def written_for(jaxpr: Jaxpr, source: Eqn) -> Jaxpr:
    """The program, of which all equations stand where the user wrote that one."""

    def moved(eqn: Eqn) -> Eqn:
        inside = with_inner(eqn, lambda inner: written_for(inner, source))
        return inside.replace(source_info=source.source_info)

    return replaced(jaxpr, eqns=[*map(moved, jaxpr.eqns)])


def at_line(eqn: Eqn) -> str:
    """` at file.py:12 (train_step)`, or nothing where JAX knows no line."""
    return f" at {user_line(eqn)}" if has_line(eqn) else ""


def user_line(eqn: Eqn) -> str:
    """`summary(eqn)`; and, if that is a line of an installed package, where the user called the package."""
    called = called_at(eqn)
    return f"{summary(eqn)}, called at {called}" if called else summary(eqn)


def called_at(eqn: Eqn) -> str:
    """Of an equation of an installed package, where the user called the package; else nothing."""
    frames = [*internal_source_info.user_frames(eqn.source_info.traceback)]
    ours = [frame for frame in frames if not _is_installed(frame.file_name)]
    if not ours or ours[0] is frames[0]:
        return ""
    return f"{ours[0].file_name}:{ours[0].start_line} ({ours[0].function_name})"


def line_of_error(error: Exception) -> str:
    """The user's line behind which JAX raised an error, like `summary`; '' if there is none."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    ours = [frame for frame in frames if not _is_installed(frame.filename)]
    return f"{ours[-1].filename}:{ours[-1].lineno} ({ours[-1].name})" if ours else ""


@functools.cache
def _is_installed(file: str) -> bool:
    path = pathlib.PurePath(file)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or _JZERO in path.parents


_JZERO = pathlib.PurePath(__file__).parents[1]


def summary(eqn: Eqn) -> str:
    """`file.py:12 (train_step)`: where the user wrote what became `eqn`."""
    return source_info_util.summarize(eqn.source_info)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    axes: Mapping[str, int],
    automatic: Mapping[str, int],
) -> Traced:
    """Traces `fn(*args)` as one device of a mesh with `axes` would see it. Needs no devices.

    `args`: one `ShapeDtypeStruct` per argument, at per-device shapes.
    `axes`: mesh axis names and sizes that are bound while tracing.
    `automatic`: further axes of the mesh, which sharding constraints may name.
    """
    with _abstract_mesh(dict(axes) | dict(automatic)) as mesh:
        return trace_on(mesh, fn, args, axes)


def trace_on(
    mesh: Any, fn: Callable[..., Any], args: Sequence[Any], axes: Collection[str]
) -> Traced:
    """Traces `fn(*args)` as one device of this mesh would see it, along `axes`."""
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
    """The mesh as it is current inside of a `shard_map` along `axes`."""
    found: list[Any] = []

    def body() -> jax.Array:
        found.append(jax.sharding.get_abstract_mesh())
        return jnp.zeros(())

    trace_on(mesh, body, (), axes)
    mine: AbstractMesh = found[0]
    return mine


def in_mesh(jaxpr: Jaxpr, mesh: AbstractMesh) -> Jaxpr:
    """The jaxpr, all of whose equations were traced where that mesh was current, of values of no other mesh.

    What JAX lowers by tracing a function, it traces there, and refuses operands of another mesh.
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
            plain = _array_type(aval.shape, aval.dtype, aval.weak_type, aval.memory_space)
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
            if eqn.primitive.name == "shard_map":
                # Inside, more axes are Manual; of this mesh it was traced so.
                return (
                    eqn
                    if eqn.params["mesh"].shape_tuple == mesh.shape_tuple
                    else with_inner(eqn, inner)
                )
            return with_inner(eqn, inner)

        invars, constvars = ([*map(typed, ends)] for ends in (jaxpr.invars, jaxpr.constvars))
        eqns, outvars = [*map(moved, jaxpr.eqns)], [*map(typed, jaxpr.outvars)]
        same = all(map(operator.is_, eqns, jaxpr.eqns)) and not new
        if same:
            return jaxpr
        parts = dict(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)
        return replaced(jaxpr, **parts)

    return inner(jaxpr)


def trace_whole(
    fn: Callable[..., Any], args: Sequence[Any], automatic: Mapping[str, int]
) -> Traced:
    """Traces `fn(*args)` as plain `jax.jit` would: whole arrays, no devices, no axes.

    `automatic` are mesh axes that sharding constraints may name.
    """
    with _abstract_mesh(automatic):
        return trace_here(fn, *args)


@contextlib.contextmanager
def _abstract_mesh(sizes: Mapping[str, int]) -> Iterator[AbstractMesh]:
    """While it is open, this mesh of automatic axes is current, whatever was."""
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    # JAX lets no mesh context change into one of another size, but into none at all.
    nothing = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(nothing), jax.sharding.use_abstract_mesh(mesh):
        yield mesh


def trace_here(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fn(*args)` where we stand; arrays that it closes over, traced ones too, become constants."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves, tree = jax.tree.flatten(shapes)
    return Traced(*open_jaxpr(jaxpr), tree, leaves)


def shard_mapped(
    jaxpr: Jaxpr, mesh: Any, in_specs: Sequence[P], out_specs: Sequence[P],
    out_shapes: Sequence[tuple[int, ...]], axes: Collection[str],
) -> Callable[..., list[Any]]:  # fmt: skip
    """A function of whole arrays that is one `shard_map` equation around one device's `jaxpr`.

    Where a call is staged, as under `jax.jit`, the equation holds `jaxpr` itself: nothing of it is traced
    again. Elsewhere (eagerly, under `jax.vmap`) it is evaluated inside of `jax.shard_map`.

    `jaxpr`: without constants.
    `out_shapes`: of the whole results.
    `axes`: the mesh axes that are its own.
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
        # JAX makes the equation's other parameters, which are not the same in all releases.
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
        # Whoever waits for effects (`jax.effects_barrier`) finds them in the program around it.
        acts = {x for x in effects_of(jaxpr.eqns) if not isinstance(x, NamedAxisEffect)}
        outs = trace.emit_eqn(tracers, types, eqn.primitive, params, eqn.effects | acts, source)
        return list(outs)

    return run


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as its first arguments."""
    return replaced(
        jaxpr,
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),  # type: ignore[attr-defined]
    )


def static_arguments(fn: Callable[..., Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that `jax.jit`, or `nnx.jit`, compiles into `fn`."""
    info = getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)
    return getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())


def ref_equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Equations that make, read or write a mutable array (`jax.new_ref`), loops and branches included.

    Those of a Pallas kernel are its own.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        if any(isinstance(atom.aval, AbstractRef) for atom in [*eqn.invars, *eqn.outvars]):
            yield eqn
        else:
            for inner in extended.jaxprs_in_params(eqn.params):
                yield from ref_equations(inner)


def new_var(like: Atom) -> Var:
    """A variable that no other jaxpr has."""
    return extended.Var(like.aval)


def replaced(jaxpr: Any, **parts: Any) -> Jaxpr:
    """A jaxpr of JAX's own with other `parts`: `invars`, `eqns`, ..., or `constvars` and their `consts`.

    From JAX 0.12 on, variables whose values are not there are arguments.
    """
    if not hasattr(jaxpr, "with_consts"):
        parts.pop("consts", None)
    return jaxpr.replace(**parts)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Runs a jaxpr."""
    return core.eval_jaxpr(jaxpr, consts, *args)


def evaluate_one(
    eqn: Eqn, args: Sequence[Any], inner: Callable[[Any], Any] = lambda jaxpr: jaxpr
) -> list[Any]:
    """Runs one equation of a jaxpr; `inner` gives what stands in the place of each jaxpr that it holds."""
    params = _with_inner(eqn.params, inner)
    params = eqn.primitive.get_bind_params(params)
    with source_of(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _with_inner(params: Mapping[str, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    """An equation's parameters, with `inner(jaxpr)` in the place of each jaxpr, closed or not."""

    def replace(param: Any) -> Any:
        if isinstance(param, (tuple, list)) and any(map(_is_jaxpr, param)):
            found = map(replace, param)
            return param._make(found) if hasattr(param, "_make") else type(param)(found)
        return inner(param) if _is_jaxpr(param) else param

    return {name: replace(param) for name, param in params.items()}


def with_inner(eqn: Eqn, inner: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation, with `inner(jaxpr)` in the place of each jaxpr that it holds; itself if all stay."""
    if not inner_jaxprs(eqn):
        return eqn
    changed = False

    def replace(param: Any) -> Any:
        nonlocal changed
        old = open_jaxpr(param)[0]
        new = inner(old)
        if new is old:
            return param
        changed = True
        return param.replace(jaxpr=new) if hasattr(param, "consts") else new

    params = _with_inner(eqn.params, replace)
    return eqn.replace(params=params) if changed else eqn


def _is_jaxpr(param: Any) -> bool:
    return hasattr(param, "eqns")


def key_value_store() -> Any:
    """What the processes of `jax.distributed` share besides devices; None if there is nothing."""
    return distributed.global_state.client


def has_backends() -> bool:
    """Whether JAX has started its backends; asked without a lock, which a forked child may never get."""
    return bool(xla_bridge._backends)


def devices_of(lowered: jax.stages.Lowered) -> list[jax.Device]:
    """The devices that a program was lowered for."""
    lowering: Any = lowered._lowering
    return list(lowering._device_list)


def inner_jaxprs(eqn: Eqn) -> list[Any]:
    """Every jaxpr in the equation's parameters."""
    found: list[Any] = []
    for param in eqn.params.values():  # Most are sizes and flags, and passes ask each equation.
        if isinstance(param, (tuple, list)):
            if param and type(param[0]) is not int:
                found += filter(_is_jaxpr, param)
        elif param is not None and _is_jaxpr(param):
            found.append(param)
    return found


def walk(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Every equation, and those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inside(eqn)


def inside(eqn: Eqn) -> Iterator[Eqn]:
    """Every equation of the programs that it holds."""
    for inner in inner_jaxprs(eqn):
        yield from walk(open_jaxpr(inner)[0])


def equation(
    primitive: Primitive, ins: Sequence[Atom], outs: Sequence[Var], source: Eqn, **params: Any
) -> Eqn:
    """A new equation, as if `source` had been it."""
    # Some releases of JAX give a product a parameter, and cannot print one without.
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
    """The types of an equation's results."""
    found, _ = primitive.abstract_eval(*[atom.aval for atom in ins], **params)
    return list(found) if primitive.multiple_results else [found]


def is_on_host(aval: Any) -> bool:
    """Whether a value of this type is in pinned memory of the host: inside a program, types say so."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def zero_on_host(dtype: Any) -> Any:
    """What `lax.scan` makes its stacks of: XLA:GPU allocates them on the host, and fills nothing.

    A zero that was copied there would be broadcast by the host's processors, so XLA warns.
    """
    return empty2(dtype, memory_space=jax.memory.Space.Host)


def changes_memory(eqn: Eqn) -> bool:
    """Whether the equation only copies a value from one memory of a device to another."""
    return eqn.primitive.name == "device_put" and len(eqn.invars) == 1 and all(
        isinstance(device, jax.memory.Space) for device in eqn.params["devices"]
    )  # fmt: skip


def puts_nowhere(eqn: Eqn) -> bool:
    """Whether it is a `device_put` to nowhere in particular, or to one device: a step runs on its mesh."""
    return eqn.primitive.name == "device_put" and all(
        device is None
        or isinstance(device, jax.Device)
        or isinstance(device, SingleDeviceSharding)
        and device.memory_kind in (None, "device")
        for device in eqn.params["devices"]
    )


def scalar(value: Any, dtype: Any) -> Literal:
    """A scalar constant, to be written into an equation."""
    array = np.asarray(value, dtype)
    # JAX 0.10.2 lowers no scalars of the small dtypes, which NumPy does not know, but arrays of them.
    made = array if array.dtype.kind == "V" else array[()]
    literal: Literal = extended.Literal(made, core.ShapedArray((), dtype))
    return literal


def var_like(aval: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> Var:
    """A new variable with the type of `aval`, but of another shape, or dtype."""
    if shape is None and dtype is None:
        return extended.Var(aval)
    shape = aval.shape if shape is None else tuple(shape)
    weak = getattr(aval, "weak_type", False) and dtype is None
    dtype = aval.dtype if dtype is None else dtype
    space = getattr(aval, "memory_space", jax.memory.Space.Device)
    return extended.Var(_array_type(shape, dtype, weak, space))


@functools.lru_cache(maxsize=2**12)  # One for each equation of a program, of few shapes.
def _array_type(shape: tuple[int, ...], dtype: Any, weak: bool, space: Any) -> Any:
    return core.ShapedArray(shape, dtype, weak_type=weak, memory_space=space)


PRIMITIVES = {
    "psum": lax.psum_p, "pmax": lax.pmax_p, "pmin": lax.pmin_p, "all_gather": lax.all_gather_p,
    "all_to_all": lax.all_to_all_p, "psum_scatter": reduce_scatter_p,
    "ppermute": lax.ppermute_p, "axis_index": lax.axis_index_p, "cond": lax.cond_p,
}  # fmt: skip


COLLECTIVES = frozenset(PRIMITIVES.values()) - {lax.axis_index_p, lax.cond_p}


def is_threefry(dtype: Any) -> bool:
    """Whether keys of this dtype give bits by counting, so that any part of them can be made alone."""
    found = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and dtype._impl.name == "threefry2x32"
    return found and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def wrapped_keys(dtype: Any, words: jax.Array) -> jax.Array:
    """The keys of this dtype that have these words."""
    return jax.random.wrap_key_data(words, impl=dtype._impl.name)


def threefry_bits(key: jax.Array, high: jax.Array, low: jax.Array, bit_width: int) -> jax.Array:
    """What `random_bits` makes at places of the flat array that are `high * 2**32 + low`."""
    first, second = jax.random.key_data(key)
    shape = jnp.shape(low)
    b1, b2 = threefry2x32_p.bind(
        jnp.broadcast_to(first, shape), jnp.broadcast_to(second, shape), high, low
    )
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return lax.shift_left(b1.astype(dtype), jnp.asarray(32, dtype)) | b2.astype(dtype)
    return (b1 ^ b2).astype(dtype)


def is_tracing() -> bool:
    """Whether what runs now is traced."""
    return not internal.trace_state_clean()  # 0.11.0


def retyped(sharding: Any, mesh: Any) -> Any:
    """A sharding over a mesh with the axes of `mesh`, with the types that they have there; else itself."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple != mesh.shape_tuple:
        return sharding
    if sharding.mesh.axis_types == mesh.axis_types:
        return sharding
    own = sharding.mesh.update(axis_types=mesh.axis_types)
    return NamedSharding(own, sharding.spec, memory_kind=sharding.memory_kind)


def view(x: Any, sharding: Any) -> Any:
    """An array's memory under a sharding that lays it out alike; itself if it is no array of JAX's own.

    Whatever consumes the one consumes both.
    """
    if isinstance(x, PRNGKeyArray):
        return PRNGKeyArray(x._impl, view(x._base_array, sharding))
    if not isinstance(x, ArrayImpl):
        return x
    parts = [shard.data for shard in x.addressable_shards]
    made = jax.make_array_from_single_device_arrays(x.shape, sharding, parts, dtype=x.dtype)
    if not x.weak_type:
        return made
    return ArrayImpl(made.aval.update(weak_type=True), sharding, parts, committed=True)


def strong_view(x: Any) -> Any:
    """A weakly typed array's memory without the weak type. Whatever consumes the one consumes both.

    An uncommitted one stays so, and is copied.
    """
    if not isinstance(x, ArrayImpl) or not x.committed:
        return jnp.asarray(x, x.dtype)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=x.dtype)


def register_array(cls: type, plain: Callable[[Any], jax.Array]) -> None:
    """Tells JAX to take `cls` for an array of its `shape`, `dtype` and `sharding`, and how to make that one.

    Then whatever traces or runs functions of arrays takes it: `jax.jit`, `grad`, `vmap`, `device_put`.
    """

    def aval(x: Any) -> Any:
        sharding = retyped(x.sharding, jax.sharding.get_abstract_mesh())
        return internal.update_aval_with_sharding(core.ShapedArray(x.shape, x.dtype), sharding)

    internal.pytype_aval_mappings[cls] = aval
    dtypes.register_canonicalize_value_handler(cls, plain)


# Scopes of what a step says of its rows (`_local.py`).
GROUPS, PER_EXAMPLE = "jzero.groups", "jzero.per_example"
_marked_rows = extended.Primitive("marked_rows")


def marked_rows(x: Any, dim: int | None, enters: bool = True) -> Any:
    """`x`, which enters or leaves a function that is promised to treat rows (along `dim`, or None) apart.

    It survives derivatives (what enters forward leaves backward), and `vmap`, which treats the elements of a
    dim of its own apart in any function.
    """
    return _marked_rows.bind(x, dim=dim, vmapped=(), enters=enters)


def _transposed_mark(ct: Any, x: Any, *, enters: bool, **dims: Any) -> list[Any]:
    return [_marked_rows.bind(ct, enters=not enters, **dims)]


def _batched_mark(
    args: Any, at: Any, *, dim: int | None, vmapped: tuple[int, ...], enters: bool
) -> tuple[Any, Any]:
    (x,), (new,) = args, at
    moved = [None if d is None else d + (d >= new) for d in (dim, *vmapped)]
    return _marked_rows.bind(x, dim=moved[0], vmapped=(new, *moved[1:]), enters=enters), new


_marked_rows.def_impl(lambda x, **_: x)
_marked_rows.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_marked_rows, _transposed_mark)
batching.primitive_batchers[_marked_rows] = _batched_mark
mlir.register_lowering(_marked_rows, lambda ctx, x, **_: [x])
