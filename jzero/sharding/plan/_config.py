# SPDX-License-Identifier: Apache-2.0
"""`StepConfig`: the user's options and the mesh, which with the shapes of a call decide on its program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
from jax.sharding import Mesh

from jzero._errors import MeshError, a_type, message
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import StageAxes
from jzero.tracing import _call, _jax_state
from jzero.tracing._axis_types import with_auto_axes

WHO = _call.WHO


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a program is built for, besides the shapes of a call."""

    options: Options  # what the user chose
    mesh: Any  # concrete or abstract
    axis_names: tuple[str, ...]  # the data axes; the mesh may have others
    # The name by which the step itself calls all of them together, if it does.
    axis_name: str | None
    # JAX's own configuration of traces, 64-bit types and the precision of products; compared only.
    tracing: tuple[Hashable, ...] = ()
    evaluates: bool = False  # the step reads its state, and returns none

    @property
    def axes(self) -> dict[str, int]:
        return {name: self.mesh.shape[name] for name in self.axis_names}

    @property
    def automatic(self) -> dict[str, int]:
        """Names and sizes of the mesh's Auto axes."""
        names = [name for name in self.mesh.axis_names if name not in self.axis_names]
        return {name: self.mesh.shape[name] for name in names}

    @property
    def stage_axes(self) -> StageAxes:
        return self.options.stage_axes(self.axes)

    @property
    def batch_axes(self) -> dict[str, int]:
        """The data axes with microbatches: devices in time, of the last axis."""
        last = self.axis_names[-1]
        return self.axes | {last: self.axes[last] * self.options.microbatches.num}

    @property
    def step_axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes behind each axis name that the step may use."""
        if self.axis_name is not None and self.axis_name not in self.axis_names:
            return {self.axis_name: self.axis_names}
        return {name: (name,) for name in self.axis_names}


def config_of(options: Options, mesh: Any, evaluates: bool = False) -> StepConfig:
    """The config of a step on this mesh, or on the current one if it is None."""
    axis_name, batch = options.axes.axis_name, options.axes.batch
    mesh, current, tracing = around(mesh, axis_name)
    if not current.empty and current.shape_tuple != mesh.shape_tuple:
        raise MeshError(message(
            WHO, f"mesh has axes {dict(mesh.shape)}, and jax.set_mesh's has {dict(current.shape)}",
            "JAX runs a program on one mesh.", "Drop mesh=, or call the step outside of "
            "the other mesh's context."))  # fmt: skip
    names = tuple(mesh.axis_names if batch is None else batch)
    if not names or len(set(names)) < len(names):
        raise MeshError(message(
            WHO, f"Axes(batch={names!r})", "ZeRO shards over these axes: one at least, each once.",
            "Correct axes, or drop it for all axes of the mesh."))  # fmt: skip
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise MeshError(message(
            WHO, f"Axes(batch=) has {unknown}, and the mesh has {tuple(mesh.axis_names)}",
            "ZeRO shards over axes of the mesh.", "Correct axes, or drop it."))  # fmt: skip
    if axis_name is not None and axis_name in names and len(names) > 1:
        raise MeshError(message(
            WHO, f"Axes(axis_name={axis_name!r}) is only one of the mesh's axes {names}",
            "A step's own axis stands for all data axes together.",
            "Use a name that the mesh does not have, or a mesh with this axis alone."))  # fmt: skip
    return StepConfig(options, mesh, names, axis_name, tracing, evaluates)


def check_mesh(mesh: Any) -> None:
    if mesh is not None and not hasattr(mesh, "axis_names"):
        raise MeshError(message(
            WHO, f"mesh is {a_type(mesh)}", "It must be a jax.sharding.Mesh.",
            "Make one with jax.make_mesh((8,), ('data',))."))  # fmt: skip


def around(mesh: Any, axis_name: str | None) -> tuple[Any, Any, tuple[Hashable, ...]]:
    """A step's mesh with Auto axes (its own, `jax.set_mesh`'s, or all devices); JAX's mesh and settings."""
    abstract, tracing = jax.sharding.get_abstract_mesh(), _jax_state.trace_settings()
    if mesh is None and abstract.empty:
        mesh = _default_mesh(axis_name or "data", tuple(jax.devices()))
    elif mesh is None:
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # Under jit there is only the abstract one, and it suffices.
            mesh = abstract
    return with_auto_axes(mesh), abstract, tracing


@functools.cache
def _default_mesh(name: str, devices: tuple[Any, ...]) -> Mesh:
    return Mesh(devices, (name,))
