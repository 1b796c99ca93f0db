# SPDX-License-Identifier: Apache-2.0
"""What the partitioner refuses, by name."""

from __future__ import annotations

from jzero.ir._regions import Region
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn


class CannotPartitionError(Exception):
    """The partitioner has no exact program for a step. Whoever catches it has another engine."""


class NeedsAllMicrobatchesError(CannotPartitionError):
    """A loop or branch needs what all microbatches have, and was not to be opened."""


def cannot(why: str, eqn: Eqn | None = None, region: Region | None = None) -> CannotPartitionError:
    """The error that says why an equation is refused, and at which line of the user's it was written."""
    if eqn is None:
        return CannotPartitionError(why)
    line = _jaxpr.at_line(eqn) if region is None else region.at_line(eqn)
    return CannotPartitionError(f"{eqn.primitive.name}{line}: {why}")
