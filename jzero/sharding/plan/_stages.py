# SPDX-License-Identifier: Apache-2.0
"""The stage table: which roles are stored sharded, and over which axes of a mesh."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._stored_layout import Automatic

PARAMETER, OPTIMIZER, OTHER = "parameter", "optimizer state", "other"


class Stage(NamedTuple):
    """One row of the stage table: which roles are stored sharded (ZeRO, section 5).

    With `reduce_once` gradients of microbatches are reduced once, after the last. From stage 2 on they are
    reduced as they are produced, so that a whole gradient never outlives its microbatch.
    """

    parameters: bool
    optimizer: bool
    reduce_once: bool


STAGES = {
    0: Stage(parameters=False, optimizer=False, reduce_once=True),
    1: Stage(parameters=False, optimizer=True, reduce_once=True),
    2: Stage(parameters=False, optimizer=True, reduce_once=False),
    3: Stage(parameters=True, optimizer=True, reduce_once=False),
}


class StateLeaf(NamedTuple):
    """What the plan must know of a state leaf; PRNG keys are not splittable.

    XLA shards it along the dims that `automatic` says, each into as many parts as `cuts` says; `uncut` is why
    not along all that its spec says.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    splittable: bool
    floating: bool
    automatic: Automatic = ()
    cuts: tuple[int, ...] = ()
    uncut: str = ""

    @property
    def parts(self) -> int:
        return math.prod(self.cuts)

    @property
    def nbytes(self) -> int:
        """Bytes on each device if no data axis shards it."""
        return math.prod(self.shape) * self.itemsize // self.parts

    @property
    def taken(self) -> set[int]:
        """Dims that are sharded over Auto axes."""
        return {dim for dim, axes in enumerate(self.automatic) if axes}


@dataclasses.dataclass(frozen=True)
class StageAxes:
    """A stage on a mesh: over which axes each role is stored; `()` is replicated."""

    axes: tuple[tuple[str, int], ...]  # names and sizes of the data axes
    param_axes: tuple[str, ...]  # over which parameters are sharded; the first of `shard_axes`
    # Over which optimizer state is sharded and gradients are reduce-scattered.
    shard_axes: tuple[str, ...]
    # Smaller leaves stay replicated; with 0, whatever can be is sharded, padded if need be.
    min_bytes: int = 0
    # A regular expression for paths of parameters that are stored replicated.
    full: str | None = None

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(dict(self.axes)[axis] for axis in axes)

    def is_small(self, leaf: StateLeaf) -> bool:
        return math.prod(leaf.shape) * leaf.itemsize < self.min_bytes

    def choose(
        self,
        leaf: StateLeaf,
        looped: Collection[int],
        left_replicated: bool,
        kept: Collection[int] = (),
    ) -> tuple[int | None, str]:
        """The dim along which a leaf is sharded, or None and the reason; unpadded if `left_replicated`.

        It is one that all look-ups keep, if the devices divide one (`sharding/analysis/_tables.py`).
        """
        num = self.count(self.shard_axes)
        if num == 1:
            return None, ""
        avoid = leaf.taken | set(looped)
        columns = {d for d in kept if leaf.shape[d] % num == 0} - avoid
        if columns and leaf.splittable and not leaf.automatic:
            avoid |= set(range(len(leaf.shape))) - columns
        dim = _stored_layout.choose_dim(leaf.shape, num, avoid) if leaf.splittable else None
        if dim is None:
            return None, _stored_layout.why_full(leaf.shape, avoid)
        if self.is_small(leaf):
            return None, f"smaller than Axes(min_shard_bytes={self.min_bytes})"
        if left_replicated and leaf.shape[dim] % num:
            return None, "it would need padding, which would save less than 1 MiB"
        return dim, ""

    def axes_of(self, leaf: StateLeaf, role: str) -> tuple[str, ...]:
        """The axes over which a leaf is stored, if it has a dim for them."""
        if role == PARAMETER and self.full is not None and re.search(self.full, leaf.path):
            return ()
        return {PARAMETER: self.param_axes, OPTIMIZER: self.shard_axes, OTHER: ()}[role]
