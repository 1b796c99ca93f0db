# SPDX-License-Identifier: Apache-2.0
"""What files of state have besides tiles: leaves that nobody updates, and whose state it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._errors import describe_leaf
from jzero._policy import NVMe
from jzero.offload.kernels import _tiles
from jzero.offload.memory import _storage
from jzero.offload.nvme._layout import TileLayout
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stored_layout import REPLICATED

# Tiles in the buffers: enough that the four reading and four writing threads of a sweep do not wait for room.
_TILES = 16
# Bytes of a tile with which a disk is as fast as it can be.
_TILE_BYTES = 2**25
_PAGE = 4096


def tile_bytes(policy: NVMe) -> int:
    return min(policy.host_bytes // _TILES // _PAGE * _PAGE, _TILE_BYTES)


def layout_to_read(
    leaves: Sequence[LeafPlan], num_slices: Sequence[int], tile_bytes: int
) -> TileLayout:
    """The layout of a file of leaves that nobody updates.

    Of each leaf that layers fetch, `num_slices` along dim 0 are read by themselves: 1 if it is fetched whole,
    0 if it is not fetched.
    """
    avals = [jax.ShapeDtypeStruct(x.shape_per_device, jnp.dtype(x.dtype)) for x in leaves]
    return _tiles.of_whole_leaves(avals, num_slices, [x.path for x in leaves], tile_bytes)


def _described(leaf: LeafPlan) -> str:
    """A leaf, with the Auto axes over which its parts are in several files."""
    spec = f" {_stored_layout.partition_spec(REPLICATED, leaf.automatic)}" * any(leaf.automatic)
    return f"{describe_leaf(leaf.path, leaf.padded_shape, leaf.dtype)}{spec}"


def identity_of(
    leaves: Sequence[LeafPlan], mesh: Any, shard_axes: tuple[str, ...]
) -> dict[str, Any]:
    """Whose state each file of this process has, by its name."""
    place_of = _storage.places(mesh, shard_axes)
    state = {
        "leaves": [*map(_described, leaves)],
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
    }
    return {
        f"shard-{i}.tiles": {**state, "place": list(place_of[device])}
        for i, device in enumerate(_storage.keepers(mesh, shard_axes))
    }
