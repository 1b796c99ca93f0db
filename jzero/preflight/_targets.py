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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from jzero._errors import MeshError, OptionError, message

_FOLDER = importlib.resources.files("jzero") / "targets"
TARGETS = tuple(
    sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many hosts with so many devices each."""

    hosts: int
    per_host: int

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.hosts * self.per_host


@dataclasses.dataclass(frozen=True)
class LinkDomain:
    """Devices that reach each other by links of one kind.

    Attributes:
      name: of the links.
      devices: how many reach each other: 'host' for those of one host, 'any' for all there are.
      bandwidth: bytes per second and direction of each device.
      latency: seconds that one message takes.
    """

    name: str
    devices: int | str
    bandwidth: float
    latency: float

    def num_devices(self, topology: Topology) -> int:
        """How many they are, of consecutive devices."""
        if isinstance(self.devices, int):
            return self.devices
        return topology.per_host if self.devices == "host" else topology.num_devices


class HostLinks(NamedTuple):
    """A device's share of its host.

    Attributes:
      bandwidth: bytes per second each way between the device and its host.
      memory_bytes: of the host.
      memory_bandwidth: bytes per second of the host's processors.
    """

    bandwidth: float
    memory_bytes: int
    memory_bandwidth: float


class Disk(NamedTuple):
    """A device's share of its host's disks: bytes per second."""

    read: float
    write: float


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device; the files in `jzero/targets` name their sources.

    What no source says is infinite: it takes no time.

    Attributes:
      name: as its driver names it.
      memory_bytes: of one device.
      memory_bandwidth: bytes per second.
      bf16_flops: dense bfloat16 operations per second.
      f32_flops: float32 operations per second, without tensor cores.
      domains: of links, innermost first; the outermost has all devices.
      host: the device's share of its host.
      disk: its share of the host's disks.
      platform: 'cuda', 'rocm' or 'tpu'.
      xla: XLA's description of a GPU, or its name of a TPU; empty if it is not to be had.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    f32_flops: float
    domains: tuple[LinkDomain, ...]
    host: HostLinks
    disk: Disk
    platform: str
    xla: str


def find_target(who: str, name: str) -> Target:
    """The target of that name."""
    if name not in TARGETS:
        raise OptionError(message(
            who, f"target={name!r}", f"There are {', '.join(TARGETS)}.",
            "Name one of them."))  # fmt: skip
    fields = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    domains = tuple(LinkDomain(**links) for links in fields.pop("domains"))
    host, disk = HostLinks(**fields.pop("host")), Disk(**fields.pop("disk"))
    return Target(**fields, domains=domains, host=host, disk=disk)


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
            "pip install 'jzero[preflight]', and set JAX_PLATFORMS=cpu before JAX starts.",
        )) from error  # fmt: skip


@functools.cache  # Devices of two calls are not the same ones, and JAX refuses to mix them.
def _found_devices(target: Target, topology: Topology) -> list[Any]:
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.xla,
        topology=f"{topology.hosts}x1x{topology.per_host}",
    )
    return sorted(found.devices, key=lambda device: device.id)
