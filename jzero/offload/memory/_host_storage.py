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
    """A leaf in ordinary memory of the devices' host, which the next step overwrites."""

    where = "in host memory"

    def __init__(
        self,
        placement: HostPlacement,
        buffers: Sequence[np.ndarray],
        pending: Any = None,
        num_steps: int = 0,
    ):
        self.placement = placement
        self.pending = pending  # what a delayed update has left to do; until then it cannot be read
        self.num_steps = num_steps  # since it was placed
        self._buffers: tuple[np.ndarray, ...] | None = tuple(buffers)

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The part of each of `placement.devices`, in C order; the next step overwrites them."""
        buffers = self._buffers  # Read once: another thread's step may consume it at any line.
        if buffers is None:
            raise consumed(self)
        return buffers

    def renewed(self, pending: Any, num_steps: int) -> HostStorage:
        """The same leaf, in the same buffers, after `num_steps` steps; this one is then deleted."""
        renewed = HostStorage(self.placement, self.buffers, pending, num_steps)
        self.delete()
        return renewed

    def delete(self) -> None:
        self._buffers = self.pending = None

    def is_deleted(self) -> bool:
        return self._buffers is None

    def parts(self) -> Parts:
        """Each part that this process has, once; raises a `StateError` before a delayed update is done."""
        buffers = self.buffers
        if self.pending is not None:
            raise StateError(message(
                "LeafArray", f"{self!r} still waits for the last step's update",
                "With HostCPU(delayed_update=True) a leaf is updated while the next step runs.",
                "Call state = train_step.flush(state) first."))  # fmt: skip
        return list(dict(zip(self.placement.boxes(), buffers, strict=True)).items())


def on_host(x: Any, placement: HostPlacement) -> HostStorage:
    """A leaf on the host, copied part by part unless it is there; if it spans processes, all call this."""
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
    storage = storage_of(x)
    return storage.pending if isinstance(storage, HostStorage) else None
