# SPDX-License-Identifier: Apache-2.0
"""Leaves that are left replicated because they would need padding, which would save little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TypeAlias

from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import Automatic
from jzero.sharding.plan._stages import StageAxes, StateLeaf

# Code outside of a step gathers a padded leaf to compute with it: padding must be worth that.
WORTH_PADDING = 2**20  # bytes that are saved on each device
# Leaves that are left replicated are at most this part of a device's model states.
REPLICATED_SHARE = 100

Alike: TypeAlias = tuple[bool, tuple[int, ...], Automatic]


def left_replicated(
    stage_axes: StageAxes, leaves: Sequence[StateLeaf], looped: Sequence[Collection[int]]
) -> set[int]:
    """The indices of such leaves: the smallest ones not worth padding, up to `REPLICATED_SHARE`.

    Leaves of one shape, such as a parameter and its moments, are decided together. Leaves that need padding
    only because of loops, which are unknown before a step is traced, come last and do not change the decision
    for others. With `Axes(min_shard_bytes=0)` there are none.

    Args:
      stage_axes: the stage on the mesh.
      leaves: the state's leaves.
      looped: for each leaf, the dims that loops slice.
    """
    num = stage_axes.count(stage_axes.shard_axes)
    if num == 1 or not stage_axes.min_bytes:
        return set()
    classes: defaultdict[Alike, list[int]] = defaultdict(list)
    saved: dict[Alike, int] = defaultdict(int)
    for i, (leaf, dims) in enumerate(zip(leaves, looped, strict=True)):
        saves = _padding_saves(stage_axes, leaf, leaf.taken)
        by_loops = saves is None
        saves = _padding_saves(stage_axes, leaf, leaf.taken | set(dims)) if saves is None else saves
        if saves is not None:
            key = (by_loops, leaf.shape, leaf.automatic)
            classes[key].append(i)
            saved[key] = max(saved[key], saves)
    nbytes = {key: sum(leaves[i].nbytes for i in members) for key, members in classes.items()}
    # Every device has at least its share of every leaf.
    left = sum(leaf.nbytes for leaf in leaves) // num // REPLICATED_SHARE
    out: set[int] = set()
    for key in sorted(classes, key=lambda key: (key[0], nbytes[key])):
        if saved[key] < WORTH_PADDING and nbytes[key] <= left:
            left -= nbytes[key]
            out |= set(classes[key])
    return out


def _padding_saves(stage_axes: StageAxes, leaf: StateLeaf, avoid: Collection[int]) -> int | None:
    """Bytes saved on each device; None for a leaf that needs no padding, or is not sharded at all."""
    num = stage_axes.count(stage_axes.shard_axes)
    dim = _layout.choose_dim(leaf.shape, num, avoid) if leaf.splittable else None
    if dim is None or leaf.shape[dim] % num == 0 or stage_axes.is_small(leaf):
        return None
    size = leaf.shape[dim]
    return leaf.nbytes - leaf.nbytes // size * (_layout.padded_size(size, num) // num)
