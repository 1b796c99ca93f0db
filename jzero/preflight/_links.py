# SPDX-License-Identifier: Apache-2.0
"""Which links a collective runs over, and how long it takes there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jzero.preflight._targets import LinkDomain, Target, Topology


def members(axes: Mapping[str, int], chosen: Sequence[str]) -> set[int]:
    """The devices that share a group over the `chosen` axes with device 0."""
    strides, stride = {}, 1
    for name, size in reversed(list(axes.items())):
        strides[name], stride = stride, stride * size
    ranges = [range(0, axes[name] * strides[name], strides[name]) for name in chosen]
    return {sum(steps) for steps in itertools.product(*ranges)}


def level_of(group: Collection[int], target: Target, topology: Topology) -> int:
    """The innermost of the target's link domains in which a group's devices reach each other."""
    sizes = [domain.num_devices(topology) for domain in target.domains]
    return next(i for i, n in enumerate(sizes) if len({device // n for device in group}) == 1)


def level_along(axes: Mapping[str, int], name: str, target: Target, topology: Topology) -> int:
    """The link domain in which neighbours along a mesh axis reach each other."""
    return level_of(members(axes, (name,)), target, topology)


def with_links(target: Target, bandwidths: Mapping[int, float]) -> Target:
    """The target with other bandwidths of some of its link domains, by their place."""
    domains = [
        dataclasses.replace(domain, bandwidth=bandwidths.get(i, domain.bandwidth))
        for i, domain in enumerate(target.domains)
    ]
    return dataclasses.replace(target, domains=tuple(domains))


class _Ring(NamedTuple):
    """A group's part in one link domain.

    Attributes:
      links: of that domain.
      parts: how many domains of the one inside it are joined to a ring.
      sharing: devices in each of these, which all send to the next part at once.
      messages: how often a ring through all devices of the group crosses such links.
    """

    links: LinkDomain
    parts: int
    sharing: int
    messages: int


def _rings(group: Collection[int], target: Target, topology: Topology) -> list[_Ring]:
    found, parts = [], len(group)
    for links in target.domains:
        size = links.num_devices(topology)
        around = len({device // size for device in group})
        found.append(_Ring(links, parts // around, len(group) // parts, parts - around))
        parts = around
    return found


def collective_seconds(
    op: str, group: Collection[int], nbytes: int, target: Target, topology: Topology
) -> float:
    """What a collective of a whole value of `nbytes` takes, with nothing else on the wire.

    One ring in each link domain, over the domains inside it and with the links of all their devices, all of
    these rings at once. Beside bytes, the messages of a ring through all devices of the group take latencies,
    one after the other, as NCCL counts its ring's.
    """
    if op == "collective-permute":
        links = target.domains[level_of(group, target, topology)]
        return links.latency + nbytes / links.bandwidth
    rings = _rings(group, target, topology)
    wire = max(
        nbytes * (ring.parts - 1) / ring.parts / (ring.sharing * ring.links.bandwidth)
        for ring in rings
    )
    waits = sum(ring.messages * ring.links.latency for ring in rings)
    return (wire + waits) * (2 if op == "all-reduce" else 1)
