# SPDX-License-Identifier: Apache-2.0
"""Treats Explicit mesh axes, which `jax.make_mesh` makes, as Auto.

[Note: Explicit axes] jzero plans and runs on meshes of Auto axes only. A mesh with Explicit axes is replaced
by one of the same devices with Auto axes, and without a current mesh all results are on that one, as plain
`jnp` accepts. Under `jax.set_mesh` with Explicit axes, JAX accepts only arrays with Explicit axes. So a call
takes views of its arrays on the Auto mesh, runs under that mesh, and returns views on the user's. A view
shares the memory of its array and is consumed with it. During the call, NNX objects hold the views.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jzero.tracing import _array_memory, _jax_state
from jzero.tracing._objects import Contents

F = TypeVar("F", bound=Callable[..., Any])


@functools.lru_cache(maxsize=64)
def with_auto_axes(mesh: Any) -> Any:
    """The mesh with Auto axes in the place of Explicit ones; anything else is returned as it is."""
    if AxisType.Explicit not in getattr(mesh, "axis_types", ()):
        return mesh
    types = [AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types]
    return mesh.update(axis_types=tuple(types))


def explicit_mesh(values: Iterable[Any]) -> AbstractMesh:
    """The current mesh, unless only a mesh of one of these traced values has Explicit axes: then that one."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in values)]
    return next((mesh for mesh in meshes if explicit_axes(mesh)), meshes[0])


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def takes_explicit_axes(fn: F) -> F:
    """Decorates a public function to run under a mesh of Auto axes; [Note: Explicit axes]."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        current = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in current.axis_types:
            return fn(*args, **kwargs)
        given = Contents((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in given.leaves):  # `ShardedStep._run_traced`
            return fn(*args, **kwargs)
        auto, views = with_auto_axes(current), dict[int, Any]()
        with _context(auto):
            for x in given.leaves:
                views.setdefault(id(x), _as_on(x, auto))
            before = {id(views[id(x)]): x for x in given.leaves}
            args, kwargs = given.mapped(lambda x: views.get(id(x), x))
            try:
                out = fn(*args, **kwargs)
            finally:
                _array_memory.let_go([
                    x for x in given.leaves
                    if isinstance(x, jax.Array) and (view := views[id(x)]) is not x and view.is_deleted()
                ])  # fmt: skip
                given.map_objects(
                    lambda x: before[id(x)] if id(x) in before else _as_on(x, current)
                )
            return Contents(out).mapped(lambda x: _as_on(x, current))

    return called  # type: ignore[return-value]


@contextlib.contextmanager
def _context(mesh: AbstractMesh) -> Iterator[None]:
    # JAX does not let a mesh context change its axis types, except by way of no mesh. A function that is
    # traced may close over a `LeafArray`, whose array must exist to be viewed.
    nothing = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    now = jax.ensure_compile_time_eval() if _jax_state.is_tracing() else contextlib.nullcontext()
    with now, nothing, jax.sharding.use_abstract_mesh(mesh):
        yield


def _as_on(x: Any, mesh: AbstractMesh) -> Any:
    """An array, a shape or a sharding with the axis types of `mesh`, if it is over the same axes."""
    if isinstance(x, NamedSharding):
        return _array_memory.retyped(x, mesh)
    old = getattr(x, "sharding", None)
    new = _array_memory.retyped(old, mesh)
    if new is old or (isinstance(x, jax.Array) and x.is_deleted()):
        return x  # A consumed array has no view; `fn` reports it.
    return (
        x.update(sharding=new)
        if isinstance(x, jax.ShapeDtypeStruct)
        else _array_memory.view(x, new)
    )
