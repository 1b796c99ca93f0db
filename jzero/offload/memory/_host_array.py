# SPDX-License-Identifier: Apache-2.0
"""`HostArray`: a leaf at rest in the ordinary memory of the devices' host, where processors update it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._away_array import AwayArray, Home, Parts, copy_parts, parts_for, sizes_of


class HostArray(AwayArray):
    """A leaf of a state that rests in the memory of the devices' host: with `offload=jzero.HostCPU()`.

    Each process keeps the parts of its own devices, once: devices that are replicas of each other share one.
    Whoever reads it or computes with it sees a `jax.Array` of its true shape. `np.asarray` and indexing copy
    on the host, for the next step overwrites it in its place. All else (`jax.jit` and other transformations,
    operators, functions of `jnp` and `lax`) copies it to the devices for as long as the use lasts, as
    `jnp.asarray` does: in the shards in which it rests, or whole to each of them if it is padded. A sharded
    step takes it as it rests. A function that donates its arguments consumes the copy, and never this leaf. A
    pickled or deep copy of it is a NumPy array.

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step_fn(state, batch):
    ...     grad = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    ...     m = 0.9 * state["m"] + grad
    ...     return {"w": state["w"] - 0.1 * m, "m": m}
    >>> train_step = jzero.shard_train_step(step_fn, offload=jzero.HostCPU())
    >>> state = train_step.init(lambda: {"w": jnp.ones((257, 3)), "m": jnp.zeros((257, 3))})
    >>> state["m"]
    HostArray(shape=(257, 3), dtype=float32, padded to (264, 3))
    >>> jnp.asarray(state["m"]).shape, state["m"][0], jax.jit(jnp.sum)(state["m"])
    ((257, 3), Array([0., 0., 0.], dtype=float32), Array(0., dtype=float32))

    Attributes:
      home: where it rests, and in which shape.
      pending: what a delayed update left to do; None if nothing. Until that is done, it cannot be read.
      num_steps: how many steps have updated it since it was placed.
    """

    def __init__(
        self, home: Home, buffers: Sequence[np.ndarray], pending: Any = None, num_steps: int = 0
    ):
        self.home = home
        self.pending = pending
        self.num_steps = num_steps
        self._buffers: tuple[np.ndarray, ...] | None = tuple(buffers)

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The part of each of `home.devices`, in C order; the next step overwrites them."""
        if self._buffers is None:
            raise StateError(message(
                "HostArray", f"{self!r} was already donated", *CONSUMED))  # fmt: skip
        return self._buffers

    def renewed(self, pending: Any, num_steps: int) -> HostArray:
        """The same leaf, in the same buffers, after so many steps; this one is then deleted."""
        renewed = HostArray(self.home, self.buffers, pending, num_steps)
        self.delete()
        return renewed

    def delete(self) -> None:
        """Lets go of its buffers, and of what is pending."""
        self._buffers = self.pending = None

    def is_deleted(self) -> bool:
        """Whether a step has consumed it."""
        return self._buffers is None

    def parts(self) -> Parts:
        """The parts that this process has, each once; to be read before the next step.

        Raises:
          StateError: a step has consumed it, or a delayed update has not yet been done.
        """
        buffers = self.buffers
        if self.pending is not None:
            raise StateError(message(
                "HostArray", f"{self!r} still waits for the last step's update",
                "With HostCPU(delayed_update=True) a leaf is updated while the next step runs.",
                "Call state = train_step.flush(state) first."))  # fmt: skip
        return list(dict(zip(self.home.boxes(), buffers, strict=True)).items())


def on_host(x: Any, home: Home) -> HostArray:
    """A leaf as a `HostArray`, copied part by part; one that rests there already passes through untouched.

    Args:
      x: a NumPy array, JAX array, `PaddedArray`, or a `HostArray` of another layout or mesh. If it spans
        processes, all of them must call this.
      home: where it goes.
    """
    if rests_in(x, home):
        return x
    parts, boxes = parts_for(x, home), home.boxes()
    buffers = [host_empty(sizes_of(box), home.dtype) for box in boxes]
    for box, buffer in zip(boxes, buffers, strict=True):
        if any(stop > size for (_, stop), size in zip(box, home.shape, strict=True)):
            buffer[...] = 0
    copy_parts(list(zip(boxes, buffers, strict=True)), parts, home.shape)
    return HostArray(home, buffers)


def rests_in(x: Any, home: Home | None) -> bool:
    """Whether a leaf is there already."""
    return isinstance(x, HostArray) and x.home == home
