# SPDX-License-Identifier: Apache-2.0
"""Errors of the partitioner: equations that it cannot write exactly, at all or in microbatches."""

from __future__ import annotations

from jzero._errors import STEP, StepError, message
from jzero.ir._regions import Region
from jzero.tracing import _lines
from jzero.tracing._types import Eqn

_RULE = "jzero writes one device's program of a step, and knows none that computes this exactly."
_FIX = "Compute it for each row alone, or by sums over the batch."
_IN_TIME = (
    "Microbatches run one after the other: what needs the rows of all of them stands between two loops over "
    "them."
)
DROP_ACCUMULATE = (
    "Drop microbatches, move it out of there, or compute it for each row, or from sums over the batch."
)  # fmt: skip


class CannotPartitionError(StepError):
    """The partitioner has no exact program for a step."""


class NeedsAllMicrobatchesError(CannotPartitionError):
    """A loop or branch needs values of all microbatches, and cannot be opened."""


def cannot(
    why: str, eqn: Eqn | None = None, region: Region | None = None, rule: str = _RULE, fix: str = _FIX
) -> CannotPartitionError:  # fmt: skip
    return CannotPartitionError(message(STEP, f"{_at(eqn, region)}{why}", rule, fix))


def cannot_in_time(
    why: str, eqn: Eqn | None = None, region: Region | None = None, fix: str = DROP_ACCUMULATE
) -> CannotPartitionError:
    found = f"microbatches > 1, and {_at(eqn, region)}{why}"
    return CannotPartitionError(message(STEP, found, _IN_TIME, fix))


def _at(eqn: Eqn | None, region: Region | None) -> str:
    if eqn is None:
        return ""
    line = _lines.at_line(eqn) if region is None else region.at_line(eqn)
    return f"{eqn.primitive.name}{line}: "
