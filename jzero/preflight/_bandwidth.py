# SPDX-License-Identifier: Apache-2.0
"""What `preflight` is told of the links: bandwidths by mesh axis, as those of a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jzero._errors import MeshError, OptionError, message
from jzero._quantities import BANDWIDTH_RULE, parse_bandwidth, readable_rate
from jzero.preflight._schedule import crosses_hosts
from jzero.preflight._targets import Target, Topology


def with_bandwidth(
    who: str, target: Target, topology: Topology, axes: Mapping[str, int], bandwidth: Any
) -> Target:
    """The target, with the links of these bandwidths in place of the data sheet's.

    Neighbours along an axis are on one host, or on different ones: so a rate is of the links within hosts, or
    of the network between them.

    Raises:
      MeshError: an axis that the mesh does not have.
      OptionError: a rate that is none, or two rates of the same links.
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
    changed: dict[str, int] = {}
    for name, rate in rates.items():
        assert rate is not None
        crosses = crosses_hosts(axes, name, topology)
        links = "network_bandwidth" if crosses else "link_bandwidth"
        if changed.setdefault(links, rate) != rate:
            where = "between hosts" if crosses else "within hosts"
            raise OptionError(message(
                who, f"bandwidth[{name!r}] is {readable_rate(rate)}, and another axis {where} has "
                f"{readable_rate(changed[links])}", f"All links {where} are taken to be alike.",
                "Give both axes the rate of the slower one."))  # fmt: skip
    return with_links(target, changed)


def with_links(target: Target, changed: Mapping[str, int]) -> Target:
    """The target with another bandwidth of links, of the network, or of both."""
    return dataclasses.replace(
        target,
        link_bandwidth=changed.get("link_bandwidth", target.link_bandwidth),
        network_bandwidth=changed.get("network_bandwidth", target.network_bandwidth),
    )
