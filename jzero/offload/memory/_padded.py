"""`PaddedArray`: a leaf at rest whose sharded dim the devices do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


class PaddedArray:
    """A leaf of a state whose sharded dim the devices do not divide: 50257 rows on 8 devices.

    JAX has no arrays in unequal shards, so such a leaf rests with padding at the end of one dim. Whoever
    reads it sees its true shape: `shape`, `np.asarray`, `jnp.asarray` and indexing leave the padding out,
    and `ShardedTrainStep.unshard` returns plain arrays. It is one leaf of a pytree and no JAX array:
    `jax.jit` and functions like `jnp.sum` do not take it as it is (write `jnp.asarray(x)`), so that
    padding never enters a computation unseen. A sharded step takes it, and plain arrays, too.

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step_fn(w, batch):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean(batch @ w))(w)
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> w = train_step(jnp.ones((257, 3)), jnp.ones((8, 257)))
    >>> w
    PaddedArray(shape=(257, 3), dtype=float32, padded to (264, 3))
    >>> jnp.asarray(w).shape, w[0].shape, train_step.unshard(w).shape
    ((257, 3), (3,), (257, 3))

    Attributes:
      padded: the sharded `jax.Array`, with zeros beyond `shape`.
      shape: the true shape.
    """

    def __init__(self, padded: jax.Array, shape: tuple[int, ...]):
        self.padded = padded
        self.shape = shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.padded.dtype

    @property
    def sharding(self) -> Any:
        """A sharding for its true shape: whole on every device of the mesh; see `padded.sharding`."""
        sharding = self.padded.sharding
        if not isinstance(sharding, NamedSharding):  # Copied to another place.
            return sharding
        return NamedSharding(sharding.mesh, PartitionSpec())

    @property
    def ndim(self) -> int:
        """How many dims there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements, without padding."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, without padding."""
        return self.size * self.dtype.itemsize

    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array, whole on every device of its mesh."""
        return unpad(jax.device_put(self.padded, self.sharding), self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.asarray(self.padded)[tuple(slice(size) for size in self.shape)]
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __eq__(self, other: object) -> Any:
        return self.__jax_array__() == other

    __hash__ = None  # type: ignore[assignment]  # as of arrays

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"PaddedArray has no attribute {name!r}: it is an array at rest, padded for the devices. "
            "Compute with jnp.asarray(x), or with the plain arrays of train_step.unshard(state)."
        )

    def __repr__(self) -> str:
        return f"PaddedArray(shape={self.shape}, dtype={self.dtype}, padded to {self.padded.shape})"

    def is_deleted(self) -> bool:
        """Whether a step has consumed it."""
        return self.padded.is_deleted()

    def block_until_ready(self) -> PaddedArray:
        """Waits for the computation that makes it; `jax.block_until_ready` calls this."""
        self.padded.block_until_ready()
        return self


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
