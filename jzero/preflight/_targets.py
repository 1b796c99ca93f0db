# SPDX-License-Identifier: Apache-2.0
"""Meshes of devices that are not there, for which XLA compiles, and the rates of their links."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jzero._errors import MeshError, OptionError, message
from jzero._quantities import BANDWIDTH_RULE, parse_bandwidth, readable_rate
from jzero.reports._checks import is_size
from jzero.targets._links import level_along, with_links
from jzero.targets._target import Target, Topology, find_target
from jzero.tracing import _jax_state


def compiled_target(who: str, name: str) -> Target:
    """The target of that name; refuses one that nothing compiles for."""
    target = find_target(who, name)
    if target.platform == "rocm":
        raise OptionError(message(
            who, f"target={name!r}", "No compiler for it is here: XLA's for AMD GPUs is a part of JAX's ROCm "
            "plugin, and needs AMD's libraries; jzero knows the data sheet alone.",
            "Name another target, or pass its rates to estimate for a formula."))  # fmt: skip
    return target


def read_topology(who: str, target: Target, text: str) -> Topology:
    """`"8x4"`: eight hosts with four devices each; for TPUs, the chips of a slice."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text) if isinstance(text, str) else None
    sizes = [int(size) for size in match.groups()] if match else []
    if target.platform == "tpu":
        if sizes == [1, 1]:
            return Topology(1, 1, text)
        if not sizes or any(size % 2 or size > 16 for size in sizes):
            raise OptionError(message(
                who, f"topology={text!r}, and target is a {target.name}",
                "It is a slice: '1x1', or 2, 4, ... to 16 chips in each of two dims, and each host has 2x2.",
                "Write topology='4x4' for 16 chips on four hosts."))  # fmt: skip
        return Topology(math.prod(sizes) // 4, 4, text)
    if not sizes:
        raise OptionError(message(
            who, f"topology={text!r}", "It is 'HOSTSxDEVICES', with the devices of one host.",
            "Write topology='8x8' for 64 devices on eight hosts."))  # fmt: skip
    return Topology(sizes[0], sizes[1])


def target_mesh(
    target: str = "h200", topology: str = "1x8", axes: Mapping[str, int] | None = None
) -> jax.sharding.Mesh:
    """A mesh of devices that are not there: programs are compiled for it, and nothing can run.

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
      target: 'h100', 'gb200-nvl72', 'tpu-v5e' ...: a file of `jzero/targets`; the error of another lists all.
      topology: 'HOSTSxDEVICES', the devices of one host; of TPUs the chips of a slice, '4x4'.
      axes: names and sizes of the mesh's axes, in the order of the devices; one axis 'data' by default.

    Raises:
      OptionError: a target or topology that does not exist, or a target that nothing compiles for.
      MeshError: `axes` do not make up the topology's devices.
      ImportError: XLA's compiler for the target is not installed.
    """
    who = "target_mesh"
    found = compiled_target(who, target)
    return mesh_of(who, found, read_topology(who, found, topology), axes)


def mesh_of(
    who: str, target: Target, topology: Topology, axes: Mapping[str, int] | None
) -> jax.sharding.Mesh:
    axes = checked_axes(who, topology, axes)
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    # JAX orders TPUs by their coordinates in the slice.
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), types, devices=_devices(who, target, topology)
    )


def checked_axes(who: str, topology: Topology, axes: Mapping[str, int] | None) -> dict[str, int]:
    """The axes of the mesh; refuses those that do not make up the topology's devices."""
    axes = {"data": topology.num_devices} if axes is None else axes
    if not isinstance(axes, Mapping) or not all(map(is_size, axes.values())):
        raise MeshError(message(
            who, f"axes={axes!r}", "They map the names of mesh axes to their sizes, ints from 1.",
            f"Write axes={{'data': {topology.num_devices}}}."))  # fmt: skip
    axes = {name: int(size) for name, size in axes.items()}
    if math.prod(axes.values()) != topology.num_devices:
        raise MeshError(message(
            who, f"axes {axes}, and {topology.hosts} hosts of {topology.per_host} devices",
            f"The axes' sizes must multiply to {topology.num_devices}.",
            "Correct one of the two."))  # fmt: skip
    return axes


def with_bandwidth(
    who: str, target: Target, topology: Topology, axes: Mapping[str, int], bandwidth: Any
) -> Target:
    """The target with these bandwidths in place of the data sheet's.

    Neighbours along an axis reach each other by the links of one domain, and a rate applies to these.
    """
    if bandwidth is None:
        return target
    if not isinstance(bandwidth, Mapping):
        raise OptionError(message(
            who, f"bandwidth={bandwidth!r}", "It has a rate for each of some mesh axes.",
            f"Write bandwidth={{{next(iter(axes))!r}: '100Gb/s'}}."))  # fmt: skip
    if unknown := [name for name in bandwidth if name not in axes]:
        raise MeshError(message(
            who, f"bandwidth has {unknown}, and the mesh's axes are {tuple(axes)}",
            "Each rate is that along an axis of the mesh.", "Correct bandwidth, or pass axes=."))  # fmt: skip
    rates = {name: parse_bandwidth(rate) for name, rate in bandwidth.items()}
    if bad := [f"bandwidth[{name!r}] is {bandwidth[name]!r}" for name, x in rates.items() if not x]:
        raise OptionError(message(
            who, bad, f"It is what a device sends, and receives, along an axis, {BANDWIDTH_RULE}.",
            "Correct it, or drop it for the data sheet's.", things="rates"))  # fmt: skip
    changed: dict[int, int] = {}
    for name, rate in rates.items():
        assert rate is not None
        level = level_along(axes, name, target, topology)
        if changed.setdefault(level, rate) != rate:
            links = target.domains[level].name
            raise OptionError(message(
                who, f"bandwidth[{name!r}] is {readable_rate(rate)}, and another axis over {links} has "
                f"{readable_rate(changed[level])}", f"All links of {links} are assumed to be equal.",
                "Give both axes the rate of the slower one."))  # fmt: skip
    return with_links(target, changed)


def check_lowered(
    who: str, lowered: jax.stages.Lowered, target: Target, topology: Topology
) -> None:
    """Refuses a program lowered for other devices, or another number of them."""
    devices = _jax_state.devices_of(lowered)
    kinds, num = sorted({device.device_kind for device in devices}), topology.num_devices
    if (kinds, len(devices)) != ([target.name], num):
        raise OptionError(message(
            who, f"a program lowered for {len(devices)} x {' and '.join(kinds)}",
            f"The target and its topology are {num} x {target.name}.",
            "Pass arguments with shardings on a jzero.target_mesh of the same target, topology and axes."
        ))  # fmt: skip


def _devices(who: str, target: Target, topology: Topology) -> list[Any]:
    try:
        return _found_devices(target, topology)
    except (RuntimeError, NotImplementedError, KeyError, ValueError) as error:
        tpu = target.platform == "tpu"
        kind, extra = ("TPUs", "preflight-tpu") if tpu else ("NVIDIA GPUs", "preflight")
        beside = "" if tpu else " (beside a GPU, cuda12 or cuda13 bring it, too)"
        locked = " One process at a time loads it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1."
        raise ImportError(message(
            who, f"XLA cannot compile for {target.name} here ({error})",
            f"It needs XLA's compiler for {kind}, but no {kind[:-1]}; without one, JAX must be told so."
            + locked * ("lockfile" in str(error)),
            f"pip install 'jzero[{extra}]'{beside}, and set JAX_PLATFORMS=cpu before JAX starts.",
        )) from error  # fmt: skip


@functools.cache  # Each call would create new devices, and JAX refuses to mix them.
def _found_devices(target: Target, topology: Topology) -> list[Any]:
    if target.platform == "tpu":
        name = f"{target.xla}:{topology.chips}"
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    else:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.xla,
            topology=f"{topology.hosts}x1x{topology.per_host}",
        )
    return sorted(found.devices, key=lambda device: device.id)
