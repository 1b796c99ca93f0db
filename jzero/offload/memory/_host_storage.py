# SPDX-License-Identifier: Apache-2.0
"""`HostStorage`: a leaf in the ordinary memory of the devices' host, where processors update it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jzero._errors import StateError, message
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._leaf_array import parts_for, storage_of
from jzero.offload.memory._storage import (
    HostPlacement,
    Parts,
    Storage,
    consumed,
    copy_parts,
    sizes_of,
)


class HostStorage(Storage):
    """Ordinary memory of the devices' host, which the next step overwrites.

    Attributes:
      placement: where the leaf is stored, and in which shape.
      pending: what a delayed update left to do; None if nothing. Until that is done, it cannot be read.
      num_steps: how many steps have updated it since it was placed.
    """

    where = "in host memory"

    def __init__(
        self,
        placement: HostPlacement,
        buffers: Sequence[np.ndarray],
        pending: Any = None,
        num_steps: int = 0,
    ):
        self.placement = placement
        self.pending = pending
        self.num_steps = num_steps
        self._buffers: tuple[np.ndarray, ...] | None = tuple(buffers)

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The part of each of `placement.devices`, in C order; the next step overwrites them."""
        buffers = self._buffers  # Read once: a step of another thread may consume it at any line.
        if buffers is None:
            raise consumed(self)
        return buffers

    def renewed(self, pending: Any, num_steps: int) -> HostStorage:
        """The same leaf, in the same buffers, after so many steps; this one is then deleted."""
        renewed = HostStorage(self.placement, self.buffers, pending, num_steps)
        self.delete()
        return renewed

    def delete(self) -> None:
        self._buffers = self.pending = None

    def is_deleted(self) -> bool:
        return self._buffers is None

    def parts(self) -> Parts:
        """The parts that this process has, each once; to be read before the next step.

        Raises:
          StateError: a step has consumed it, or a delayed update has not yet been done.
        """
        buffers = self.buffers
        if self.pending is not None:
            raise StateError(message(
                "LeafArray", f"{self!r} still waits for the last step's update",
                "With HostCPU(delayed_update=True) a leaf is updated while the next step runs.",
                "Call state = train_step.flush(state) first."))  # fmt: skip
        return list(dict(zip(self.placement.boxes(), buffers, strict=True)).items())


def on_host(x: Any, placement: HostPlacement) -> HostStorage:
    """A leaf on the host, copied part by part; one that is stored there already passes through untouched.

    Args:
      x: a NumPy array, a JAX array, or a `LeafArray`, also of another layout or mesh. If it spans processes,
        all of them must call this.
      placement: where it goes.
    """
    if is_stored_in(x, placement):
        storage: HostStorage = storage_of(x)
        return storage
    parts, boxes = parts_for(x, placement), placement.boxes()
    buffers = [host_empty(sizes_of(box), placement.dtype) for box in boxes]
    for box, buffer in zip(boxes, buffers, strict=True):
        if any(stop > size for (_, stop), size in zip(box, placement.shape, strict=True)):
            buffer[...] = 0
    copy_parts(list(zip(boxes, buffers, strict=True)), parts, placement.shape)
    return HostStorage(placement, buffers)


def is_stored_in(x: Any, placement: HostPlacement | None) -> bool:
    storage = storage_of(x)
    return isinstance(storage, HostStorage) and storage.placement == placement


def pending_of(x: Any) -> Any:
    """What a delayed update left to do of a leaf; None if nothing."""
    storage = storage_of(x)
    return storage.pending if isinstance(storage, HostStorage) else None
