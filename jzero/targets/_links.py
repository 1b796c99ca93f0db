# SPDX-License-Identifier: Apache-2.0
"""Which links a collective runs over, and how long it takes there."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jzero.targets._target import LinkDomain, Target, Topology


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
    return level_of(members(axes, (name,)), target, topology)


def with_links(target: Target, bandwidths: Mapping[int, float]) -> Target:
    """The target with other bandwidths of some of its link domains, by index."""
    domains = [
        dataclasses.replace(domain, bandwidth=bandwidths.get(i, domain.bandwidth))
        for i, domain in enumerate(target.domains)
    ]
    return dataclasses.replace(target, domains=tuple(domains))


# The share of the links' bandwidth that is data; the rest are flags (NCCL, src/graph/tuning.cc, for its
# ring).
_LL128_SHARE = 0.92


class _Ring(NamedTuple):
    """A group's part in one link domain."""

    links: LinkDomain
    parts: int  # how many domains of the one inside it are joined to a ring
    sharing: int  # devices in each of these, which all send to the next part at once
    messages: int  # how often a ring through all devices of the group crosses such links
    # The most devices of the group that one of them reaches by these links and by none nearer.
    reached: int


def _rings(group: Collection[int], target: Target, topology: Topology) -> list[_Ring]:
    found, parts, nearest = [], len(group), 1
    for links in target.domains:
        size = links.num_devices(topology)
        counts = Counter(device // size for device in group).values()
        around = len(counts)
        reached = max(counts) - nearest
        found.append(_Ring(links, parts // around, len(group) // parts, parts - around, reached))
        parts, nearest = around, min(counts)
    return found


class CollectiveTime(NamedTuple):
    latency: float  # seconds in which messages wait, and other collectives may use the links
    wire: float  # seconds in which its bytes move

    @property
    def seconds(self) -> float:
        return self.latency + self.wire


def collective_time(
    op: str, group: Collection[int], nbytes: int, target: Target, topology: Topology
) -> CollectiveTime:
    """What a collective of a global value of `nbytes` takes, with nothing else on the links.

    One ring in each link domain, over the domains inside it and with the links of all their devices, all of
    these rings at once. Beside bytes, the messages of a ring through all devices of the group take latencies,
    one after the other, as NCCL counts its ring's. Like NCCL it takes the faster of two protocols.

    What an all-to-all sends to each device is for that one alone: it goes by the sender's own links. A
    permutation is between one pair of devices.
    """
    if op == "collective-permute":
        links = target.domains[level_of(group, target, topology)]
        return CollectiveTime(links.latency, nbytes / links.bandwidth)
    rings = [ring for ring in _rings(group, target, topology) if ring.parts > 1]
    times = 2 if op == "all-reduce" else 1

    def share(ring: _Ring) -> float:
        if op == "all-to-all":
            return ring.reached / len(group)
        return (ring.parts - 1) / ring.parts / ring.sharing

    wire = times * max((nbytes * share(x) / x.links.bandwidth for x in rings), default=0.0)

    def waits(latencies: Sequence[float]) -> float:
        return times * sum(
            ring.messages * latency for ring, latency in zip(rings, latencies, strict=True)
        )

    found = [CollectiveTime(waits([ring.links.latency for ring in rings]), wire)]
    ll128 = [ring.links.ll128_latency for ring in rings]
    known = [latency for latency in ll128 if latency is not None]
    if len(known) == len(rings):
        found.append(CollectiveTime(waits(known), wire / _LL128_SHARE))
    return min(found, key=lambda time: time.seconds)


class AxisTimes(NamedTuple):
    """What a collective along one mesh axis takes: integers, of which all processes find equal sums."""

    latency: int  # femtoseconds of one, whatever it moves
    ring: int  # femtoseconds of each byte that a device receives by gathers and reductions
    direct: int  # the same by exchanges and permutations, which are for one other device alone

    def of(self, kind: str, nbytes: float) -> int:
        """A collective by which so many bytes reach each device; `kind` as in `jzero.ir._layout`."""
        return (2 if kind == "reduce" else 1) * self.latency + self.wire(kind, nbytes)

    def wire(self, kind: str, nbytes: float) -> int:
        """The part in which the bytes move."""
        return round(nbytes) * (self.direct if kind in ("exchange", "permute") else self.ring)


def axis_times(
    axes: Mapping[str, int], target: Target, topology: Topology
) -> tuple[tuple[str, AxisTimes], ...]:
    """What collectives along each mesh axis of several devices take."""
    found = []
    for axis, n in axes.items():
        if n > 1:
            group, received = members(axes, (axis,)), _LARGE * (n - 1) / n

            def time(op: str, nbytes: int, group: Collection[int] = group) -> CollectiveTime:
                return collective_time(op, group, nbytes, target, topology)

            ring, direct = (time(op, _LARGE).wire / received for op in ("all-gather", "all-to-all"))
            latency = time("all-gather", 0).latency
            found.append((axis, AxisTimes(*(round(x * 1e15) for x in (latency, ring, direct)))))
    return tuple(found)


_LARGE = 2**30  # bytes of a collective whose latency is nothing beside its time
