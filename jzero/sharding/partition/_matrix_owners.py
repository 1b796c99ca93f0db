# SPDX-License-Identifier: Apache-2.0
"""Which calls of a step update matrices that have owners, and over which axes these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir._layout import Layout, replicated
from jzero.ir._regions import Region
from jzero.sharding.batch._owners import OwnedGroup, OwnedStack, Owners
from jzero.sharding.partition._values import Hint
from jzero.tracing._types import Eqn, Var


class MatrixOwners(NamedTuple):
    """Who runs the updates of matrices.

    Attributes:
      calls: what owners run in the place of calls.
      axes: over which matrices are sharded; devices along others have the same shards, and do the same.
    """

    calls: Owners
    axes: tuple[str, ...]

    def of(self, region: Region, eqn: Eqn) -> OwnedGroup | OwnedStack | None:
        """What owners run in the place of a call of the step; None if it is everybody's."""
        is_step = region.around is None and bool(eqn.outvars)
        return self.calls.get(eqn.outvars[0]) if is_step else None

    def shards(self, shape: Sequence[int], dim: int | None, mesh: Mapping[str, int]) -> Layout:
        """The layout of shards along a dim, or whole."""
        layout = replicated(shape, mesh)
        if dim is not None:
            for axis in self.axes:
                layout = layout.cut(dim, axis)
        return layout

    def hints(self, mesh: Mapping[str, int]) -> dict[Var, Hint]:
        """A gradient is reduced to shards, and these go to the owner."""
        return {
            var: Hint(self.shards(var.aval.shape, dim, mesh), leaf=region.name)
            for owners in self.calls.values()
            for region in owners.regions
            for var, dim in zip(region.reads, region.sharded, strict=True)
            if dim is not None
        }


NO_OWNERS = MatrixOwners({}, ())
