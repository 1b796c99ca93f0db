# SPDX-License-Identifier: Apache-2.0
"""How a leaf that is read is already stored on the mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._errors import StateError, message
from jzero._memory_kinds import DEVICE, NVME
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._leaf_array import is_coded, storage_of
from jzero.sharding.plan._leaves import StoredLeaf
from jzero.tracing import _call

WHO = _call.WHO


def stored_as(leaf: Any, mesh: Any, in_files: bool = False) -> StoredLeaf | None:
    """How a leaf, an array or its shape with a sharding, lies on a mesh; None if it does not.

    A leaf in host memory has the sharding that it would have on the devices; so has one in files, unless it
    may be `in_files`.

    Raises:
      StateError: it is quantized, and stored on another mesh.
    """
    if isinstance(leaf, jax.core.Tracer):  # Under an outer jax.jit XLA decides.
        return None
    if is_coded(leaf):
        rows = stored_as(leaf.storage, mesh, in_files)
        if rows is None:
            raise StateError(message(
                WHO, f"{leaf!r} was quantized on the mesh {_sizes(leaf.storage.sharding.mesh)}, and is read "
                f"on {_sizes(mesh)}", "Each device has quantized its own shard, over the data axes.",
                "Shard the original weights on this mesh; jnp.asarray(leaf) dequantizes it."
            ))  # fmt: skip
        return rows._replace(codes=leaf.codes)
    leaf = storage_of(leaf)
    sharding, shape = getattr(leaf, "sharding", None), getattr(leaf, "shape", ())
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return None
    spec = list(sharding.spec)
    while spec and not spec[-1]:
        spec.pop()
    tier = NVME if in_files and isinstance(leaf, FileStorage) else DEVICE
    return StoredLeaf(tuple(spec), tuple(shape), tier)


def _sizes(mesh: Any) -> str:
    return f"{dict(mesh.shape)}"
