# SPDX-License-Identifier: Apache-2.0
"""Which update calls of a step are distributed, matrix by matrix, and over which axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir._layout import Layout, replicated
from jzero.ir._regions import Region
from jzero.sharding.analysis._update_subgraphs import UpdateSubgraph
from jzero.sharding.partition._values import Hint
from jzero.tracing import _rewrite
from jzero.tracing._types import Eqn, Var


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixBucket:
    """Updates of several matrices by equal equations."""

    subgraphs: tuple[UpdateSubgraph, ...]  # one for each matrix
    shared: tuple[bool, ...]  # for each value that an update reads, whether all read the same one
    update: _rewrite.Flat  # the program of one update

    @property
    def reads(self) -> list[tuple[Var, ...]]:
        """For each value that an update reads, the variables of all updates."""
        return [*zip(*(subgraph.reads for subgraph in self.subgraphs), strict=True)]

    @property
    def gives(self) -> list[tuple[Var, ...]]:
        """For each result of an update, the variables of all updates."""
        return [*zip(*(subgraph.gives for subgraph in self.subgraphs), strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixBatch:
    """The update of a batch of matrices; it runs on slices of the batch."""

    subgraph: UpdateSubgraph
    # The batch dim of each value that it reads; None for a replicated one.
    read_dims: tuple[int | None, ...]
    give_dims: tuple[int | None, ...]  # the same for each of its results

    @property
    def subgraphs(self) -> tuple[UpdateSubgraph, ...]:
        return (self.subgraph,)


UpdatesByCall = Mapping[Var, MatrixBucket | MatrixBatch]  # by the call's first result


class DistributedUpdates(NamedTuple):
    calls: UpdatesByCall
    # Matrices are sharded over these; devices along other axes have the same shards, and repeat the work.
    axes: tuple[str, ...]

    def of(self, subgraph: Region, eqn: Eqn) -> MatrixBucket | MatrixBatch | None:
        """The distributed update that a call of the step is; None if every device runs the call."""
        is_step = subgraph.around is None and bool(eqn.outvars)
        return self.calls.get(eqn.outvars[0]) if is_step else None

    def shards(self, shape: Sequence[int], dim: int | None, mesh: Mapping[str, int]) -> Layout:
        layout = replicated(shape, mesh)
        return layout if dim is None else layout.shard(dim, self.axes)

    def hints(self, mesh: Mapping[str, int]) -> dict[Var, Hint]:
        """Gradients are reduce-scattered to the shards that the all-to-all sends."""
        return {
            var: Hint(self.shards(var.aval.shape, dim, mesh), leaf=subgraph.name)
            for update in self.calls.values()
            for subgraph in update.subgraphs
            for var, dim in zip(subgraph.reads, subgraph.sharded, strict=True)
            if dim is not None
        }


NOT_DISTRIBUTED = DistributedUpdates({}, ())
