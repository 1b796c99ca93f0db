# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices, how fast they are, and by what they are linked: one file of this folder for each."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jzero._errors import OptionError, message

_FOLDER = importlib.resources.files("jzero") / "targets"
TARGETS = tuple(
    sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many hosts with so many devices each."""

    hosts: int
    per_host: int  # devices
    chips: str = ""  # of TPUs, those of a slice in each dim, '4x4'; '' for GPUs

    @property
    def num_devices(self) -> int:
        return self.hosts * self.per_host


@dataclasses.dataclass(frozen=True)
class LinkDomain:
    """Devices that reach each other by links of one kind."""

    name: str
    # How many reach each other: 'host' for those of one host, 'any' for all there are.
    devices: int | str
    bandwidth: float  # bytes per second and direction of each device
    latency: float  # seconds that one message takes
    # By NCCL's protocol LL128, where it has that: less, with less of the bandwidth.
    ll128_latency: float | None = None

    def num_devices(self, topology: Topology) -> int:
        if isinstance(self.devices, int):
            return self.devices
        return topology.per_host if self.devices == "host" else topology.num_devices


class HostLinks(NamedTuple):
    """A device's share of its host."""

    bandwidth: float  # bytes per second each way between the device and its host
    memory_bytes: int  # of the host
    memory_bandwidth: float  # bytes per second of the host's processors


class Disk(NamedTuple):
    """A device's share of its host's disks: bytes per second."""

    read: float
    write: float


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device. The files in `jzero/targets` name their sources; what none says is infinite."""

    name: str  # as its driver names it
    memory_bytes: int  # of one device
    memory_bandwidth: float  # bytes per second
    bf16_flops: float  # dense bfloat16 operations per second
    f32_flops: float  # float32 operations per second, without tensor cores
    domains: tuple[LinkDomain, ...]  # innermost first; the outermost has all devices
    host: HostLinks
    disk: Disk
    platform: str  # 'cuda', 'rocm' or 'tpu'
    xla: str  # XLA's description of a GPU, or its name of a TPU; empty if there is none


def find_target(who: str, name: str) -> Target:
    if name not in TARGETS:
        raise OptionError(message(
            who, f"target={name!r}", f"There are {', '.join(TARGETS)}.",
            "Name one of them."))  # fmt: skip
    fields = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    domains = tuple(LinkDomain(**links) for links in fields.pop("domains"))
    host, disk = HostLinks(**fields.pop("host")), Disk(**fields.pop("disk"))
    return Target(**fields, domains=domains, host=host, disk=disk)


# [Note: the device that a program is for]
# Where the order of a program depends on how fast the device is, jzero asks the file of the device's kind:
# that of the mesh, be it here or only compiled for. Of a kind without a file (a CPU, a new GPU) it takes
# DEFAULT (test_targets.py::test_a_program_is_ordered_for_the_devices_of_its_mesh).
DEFAULT = "h200"
_PER_HOST = 8


def target_of(devices: Sequence[jax.Device]) -> Target:
    """The target that these devices are; the default one if no file has their kind."""
    return _by_kind().get(devices[0].device_kind) or find_target("target_of", DEFAULT)


def topology_of(devices: Sequence[jax.Device]) -> Topology:
    """The hosts of a process's devices; of a process for each device, 8 to a host."""
    num, processes = len(devices), len({device.process_index for device in devices})
    per_host = num // processes if processes < num else min(_PER_HOST, num)
    return Topology(-(-num // per_host), per_host)


@functools.cache
def _by_kind() -> dict[str, Target]:
    targets = [find_target("target_of", name) for name in TARGETS]
    return {target.name: target for target in reversed(targets)}  # The first of two of one kind.
