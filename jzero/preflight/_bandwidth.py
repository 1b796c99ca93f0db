# SPDX-License-Identifier: Apache-2.0
"""What `preflight` is told of the links: bandwidths by mesh axis, as those of a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero._errors import MeshError, OptionError, message
from jzero._quantities import BANDWIDTH_RULE, parse_bandwidth, readable_rate
from jzero.targets._links import level_along, with_links
from jzero.targets._target import Target, Topology


def with_bandwidth(
    who: str, target: Target, topology: Topology, axes: Mapping[str, int], bandwidth: Any
) -> Target:
    """The target, with these bandwidths of links instead of the data sheet's.

    Neighbours along an axis reach each other by the links of one domain, and a rate is of these.

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
