# SPDX-License-Identifier: Apache-2.0
"""`PaddedArray`: a leaf at rest whose sharded dim the devices do not divide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory._like_array import LikeArray


class PaddedArray(LikeArray):
    """A leaf of a state whose sharded dim the devices do not divide: 50257 rows on 8 devices.

    JAX has no arrays in unequal shards, so such a leaf rests with padding at the end of one dim. Whoever
    reads it or computes with it sees a `jax.Array` of its true shape, without padding: `jax.jit`, `jax.grad`
    and all other transformations, operators, functions of `jnp` and `lax`, `x.at`, `device_put`, Flax's and
    Orbax's own serialization. Each such use gathers the leaf: for as long as it lasts, every device holds it
    whole, as `jnp.asarray(x)` does. A sharded step takes it as it rests. A function that donates its
    arguments consumes the gathered array, and never this leaf. Where it spans processes, `jax.device_put`
    wants `jnp.asarray(x)`.

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step_fn(w, batch):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean(batch @ w))(w)
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> w = train_step(jnp.ones((257, 3)), jnp.ones((8, 257)))
    >>> w
    PaddedArray(shape=(257, 3), dtype=float32, padded to (264, 3))
    >>> jnp.asarray(w).shape, w[0].shape, (2 * w).shape, jax.jit(jnp.sum)(w).shape
    ((257, 3), (3,), (257, 3), ())

    Attributes:
      padded: the sharded `jax.Array`, with zeros beyond `shape`.
      shape: the true shape.
    """

    def __init__(self, padded: jax.Array, shape: tuple[int, ...]):
        self.padded = padded
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.padded.dtype

    @property
    def sharding(self) -> Any:
        """A sharding for its true shape, whole on every device of the mesh; see `padded.sharding`."""
        sharding = self.padded.sharding
        if not isinstance(sharding, NamedSharding):  # Copied to another place.
            return sharding
        return NamedSharding(sharding.mesh, PartitionSpec())

    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array, whole on every device of its mesh.

        Raises:
          StateError: a step has consumed it.
        """
        return unpad(jax.device_put(self._alive(), self.sharding), self.shape)

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        whole = np.asarray(self._alive())[tuple(slice(size) for size in self.shape)]
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def _alive(self) -> jax.Array:
        if self.is_deleted():
            raise StateError(message("PaddedArray", f"{self!r} was already donated", *CONSUMED))
        return self.padded

    def __reduce__(self) -> tuple[Any, ...]:
        return PaddedArray, (self._alive(), self.shape)

    def __repr__(self) -> str:
        return f"PaddedArray(shape={self.shape}, dtype={self.dtype}, padded to {self.padded.shape})"

    def delete(self) -> None:
        """Frees its memory."""
        self.padded.delete()

    def is_deleted(self) -> bool:
        """Whether a step has consumed it."""
        return self.padded.is_deleted()

    def block_until_ready(self) -> PaddedArray:
        """Waits for the computation that makes it; `jax.block_until_ready` calls this."""
        self._alive().block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Starts the copy that `np.asarray` waits for."""
        self.padded.copy_to_host_async()


def pad(x: Any, shape: tuple[int, ...]) -> Any:
    """A leaf as a plain array of the (padded) `shape`, where it lies: on the host or on devices."""
    if isinstance(x, PaddedArray):
        if x.padded.shape == shape:
            return x.padded
        x = jnp.asarray(x)
    if np.shape(x) == shape:
        return x
    widths = [(0, new - old) for old, new in zip(np.shape(x), shape, strict=True)]
    return jnp.pad(x, widths) if isinstance(x, jax.Array) else np.pad(x, widths)


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The plain array of the true `shape`."""
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)


def wrap(x: jax.Array, shape: tuple[int, ...]) -> jax.Array | PaddedArray:
    """What a user gets: the array itself, if it has the true `shape`."""
    return x if x.shape == shape else PaddedArray(x, shape)
