# SPDX-License-Identifier: Apache-2.0
"""`PlannedStep`: a step, its plan and its mesh, from which programs are built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.passes import _late_gathers
from jzero.sharding.passes._one_order import in_one_order
from jzero.sharding.plan._plan import Analysis, StepPlan
from jzero.targets._links import members

# [Note: 16 bits on CPUs]
# XLA:CPU sums 16-bit floats of several devices in 32 bits, and its pass that does so ends the process
# ("Invalid binary instruction opcode copy") if the sum is over some axes of the mesh while XLA shards over
# others. So such a sum is replicated over the other axes
# (test_tensor_axes.py::test_16_bit_sums_beside_an_automatic_axis).


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    plan: StepPlan
    analysis: Analysis
    mesh: Mesh  # It may be abstract.

    @property
    def frame(self) -> Frame:
        return self.analysis.frame

    def shard_map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, also: Sequence[str] = ()
    ) -> Callable[..., Any]:
        """`jax.shard_map` of `fn` over the data axes and the axes `also`."""
        return jax.shard_map(
            in_one_order(fn) if self.overtakes and self.plan.activations else fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
            axis_names={*(name for name, _ in self.plan.axes), *also},
        )

    @property
    def balance(self) -> float:
        """Multiplications in the time of sending one byte between devices."""
        group = members(self.mesh.shape, [name for name, _ in self.plan.axes])
        return _late_gathers.balance(devices_of(self.mesh), group)

    @property
    def alone(self) -> tuple[str, ...]:
        """The mesh axes along which XLA must not shard a sum of 16 bits: [Note: 16 bits on CPUs]."""
        # An abstract mesh mostly stands for devices of the default platform.
        is_known = isinstance(self.mesh, Mesh)
        on_cpus = _on_cpus(self.mesh) if is_known else jax.default_backend() == "cpu"
        return self.plan.automatic if on_cpus else ()

    @property
    def overtakes(self) -> bool:
        """Whether XLA may run collectives before a loop that sends residuals to the host: on CPUs."""
        return not self.plan.in_parts and _on_cpus(self.mesh)


class _AbsentDevice(NamedTuple):
    device_kind: str
    process_index: int = 0


def devices_of(mesh: Mesh) -> list[Any]:
    """The devices of a mesh; for an abstract one, those that it names, or of the default platform."""
    if isinstance(mesh, Mesh):
        return [*mesh.devices.flat]
    # Any other way would start all backends, which take the devices' memory.
    named = mesh.abstract_device
    return ([_AbsentDevice(named.device_kind)] if named else jax.devices()[:1]) * mesh.size


def _on_cpus(mesh: Mesh) -> bool:
    return isinstance(mesh, Mesh) and bool(mesh.devices.flat[0].platform == "cpu")
