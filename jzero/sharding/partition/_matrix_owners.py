# SPDX-License-Identifier: Apache-2.0
"""Which calls of a step update matrices that have owners, and over which axes these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir._layout import Layout, replicated
from jzero.ir._regions import Region
from jzero.sharding.analysis._regions import OwnedRegion
from jzero.sharding.partition._values import Hint
from jzero.tracing import _rewrite
from jzero.tracing._types import Eqn, Var


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedGroup:
    """Updates of several matrices that compute the same.

    Attributes:
      regions: each of them.
      shared: for each value that one reads, whether all of them read that same one.
      update: the first of them.
    """

    regions: tuple[OwnedRegion, ...]
    shared: tuple[bool, ...]
    update: _rewrite.Flat

    @property
    def reads(self) -> list[tuple[Var, ...]]:
        """For each value that one reads, those of all of them."""
        return [*zip(*(region.reads for region in self.regions), strict=True)]

    @property
    def gives(self) -> list[tuple[Var, ...]]:
        """For each result of one, those of all of them."""
        return [*zip(*(region.gives for region in self.regions), strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedStack:
    """The update of a stack, of which a device may run its slices.

    Attributes:
      region: the update.
      read_dims: for each value that it reads, the dim of the stack; None for what is whole.
      give_dims: for each of its results.
    """

    region: OwnedRegion
    read_dims: tuple[int | None, ...]
    give_dims: tuple[int | None, ...]

    @property
    def regions(self) -> tuple[OwnedRegion, ...]:
        """The only one."""
        return (self.region,)


Owners = Mapping[Var, OwnedGroup | OwnedStack]  # by the first result of the call that they run


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
