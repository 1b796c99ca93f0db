# SPDX-License-Identifier: Apache-2.0
"""Options that are groups, the field that a short form sets, and how fields become groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jzero._numbers import BytesPerParam, Rates, Workload
from jzero._option_groups import Axes, Comm, Microbatches
from jzero._policy import Memory


class Group(NamedTuple):
    """The class of a group, and the field that `option=value` sets; "" if the option takes groups only."""

    kind: type[Any]
    short: str = ""


GROUPS = {
    "microbatches": Group(Microbatches, "num"),
    "memory": Group(Memory, "optimizer"),
    "comm": Group(Comm),
    "axes": Group(Axes, "batch"),
    "bytes_per_param": Group(BytesPerParam),
    "workload": Group(Workload),
    "rates": Group(Rates),
}


def grouped(options: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """`{"microbatches.num": 4, "comm.gather": "keep"}` as `{"microbatches": 4, "comm": <a Comm>}`.

    Args:
      options: by name; `option.field` is a field of a group.
      make: called as `make(Comm, gather="keep")` for each group that has no short form.
    """
    found, fields = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in options.items():
        option, _, field = name.partition(".")
        found[option] = value
        if field:
            fields.setdefault(option, {})[field] = value
    for option, given in fields.items():
        kind, short = GROUPS[option]
        if [*given] != [short]:
            first = [x.name for x in dataclasses.fields(kind) if not x.kw_only and x.name in given]
            found[option] = make(kind, *map(given.pop, first), **given)
    return found
