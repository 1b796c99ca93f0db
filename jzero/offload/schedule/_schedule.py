# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: what a step does, in order."""

from __future__ import annotations

import dataclasses

from jzero._memory_kinds import HostNeed
from jzero.offload.schedule import _text
from jzero.offload.schedule._ops import Op


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What a step does, in order; `print` it.

    Attributes:
      ops: the operations.
      buffers: memory of each device's host through which values pass, whatever is under way.
    """

    ops: tuple[Op, ...]
    buffers: tuple[HostNeed, ...] = ()

    def __str__(self) -> str:
        return _text.text(self.ops)

    def __repr__(self) -> str:
        return f"<Schedule: {len(self.ops)} operations; print it>"
