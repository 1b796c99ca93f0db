# SPDX-License-Identifier: Apache-2.0
"""Devices that are not there: what XLA must know of a GPU to compile for it, and how fast it is."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jzero._errors import MeshError, OptionError, message

_FOLDER = importlib.resources.files("jzero") / "targets"
TARGETS = tuple(
    sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))
)


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of GPU; the files in `jzero/targets` name their sources.

    Attributes:
      name: as its driver names it.
      memory_bytes: of one device.
      memory_bandwidth: bytes per second.
      bf16_flops: dense bfloat16 operations per second.
      f32_flops: float32 operations per second, without tensor cores.
      link_bandwidth: bytes per second and direction between the devices of one host.
      network_bandwidth: bytes per second and direction of one device's share of the network.
      network: the network that is meant.
      xla: XLA's description of the device.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    f32_flops: float
    link_bandwidth: float
    network_bandwidth: float
    network: str
    xla: str


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many hosts with so many devices each."""

    hosts: int
    per_host: int

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.hosts * self.per_host


def find_target(who: str, name: str) -> Target:
    """The target of that name."""
    if name not in TARGETS:
        raise OptionError(message(
            who, f"target={name!r}", f"There are {', '.join(TARGETS)}.",
            "Name one of them."))  # fmt: skip
    return Target(**tomllib.loads((_FOLDER / f"{name}.toml").read_text()))


def read_topology(who: str, text: str) -> Topology:
    """`"8x4"`: eight hosts with four devices each."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(message(
            who, f"topology={text!r}", "It is 'HOSTSxDEVICES', with the devices of one host.",
            "Write topology='8x8' for 64 devices on eight hosts."))  # fmt: skip
    return Topology(*map(int, match.groups()))


def target_mesh(
    target: str = "h200", topology: str = "1x8", axes: Mapping[str, int] | None = None
) -> jax.sharding.Mesh:
    """A mesh of GPUs that are not there: programs are compiled for it, and nothing can run.

    For whatever is to be compiled for it beside a sharded step (`preflight` makes its own).

    >>> import jax, jax.numpy as jnp, jzero
    >>> mesh = jzero.target_mesh("h200", "2x8")
    >>> rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    >>> x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=rows)
    >>> lowered = jax.jit(lambda x: x.sum(0)).lower(x)
    >>> found = jzero.preflight(lowered, target="h200", topology="2x8")
    >>> found.nbytes("all-reduce")  # what XLA's partitioner put there
    4096

    Args:
      target: 'a100-80gb', 'b200', 'h100' or 'h200'.
      topology: 'HOSTSxDEVICES', the devices of one host.
      axes: names and sizes of the mesh's axes, in the order of the devices; one axis 'data' by default.

    Raises:
      OptionError: a target or topology that does not exist.
      MeshError: `axes` do not make up the topology's devices.
      ImportError: XLA's compiler for NVIDIA GPUs is not installed.
    """
    who = "target_mesh"
    return mesh_of(who, find_target(who, target), read_topology(who, topology), axes)


def mesh_of(
    who: str, target: Target, topology: Topology, axes: Mapping[str, int] | None
) -> jax.sharding.Mesh:
    """The mesh, for `who` asks."""
    axes = {"data": topology.num_devices} if axes is None else dict(axes)
    if math.prod(axes.values()) != topology.num_devices:
        raise MeshError(message(
            who, f"axes {axes}, and {topology.hosts} hosts of {topology.per_host} devices",
            f"The axes' sizes must multiply to {topology.num_devices}.",
            "Correct one of the two."))  # fmt: skip
    devices = np.array(_devices(who, target, topology)).reshape(tuple(axes.values()))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=types)


def _devices(who: str, target: Target, topology: Topology) -> list[Any]:
    try:
        return _found_devices(target, topology)
    except (RuntimeError, NotImplementedError, KeyError, ValueError) as error:
        raise ImportError(message(
            who, f"XLA cannot compile for {target.name} here ({error})",
            "It needs XLA's compiler for NVIDIA GPUs, but no GPU; without one, JAX must be told so.",
            "pip install 'jzero[preflight]' (beside a GPU, cuda12 or cuda13 bring it, too), and set "
            "JAX_PLATFORMS=cpu before JAX starts.",
        )) from error  # fmt: skip


@functools.cache  # Devices of two calls are not the same ones, and JAX refuses to mix them.
def _found_devices(target: Target, topology: Topology) -> list[Any]:
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.xla,
        topology=f"{topology.hosts}x1x{topology.per_host}",
    )
    return sorted(found.devices, key=lambda device: device.id)
