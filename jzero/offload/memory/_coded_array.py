# SPDX-License-Identifier: Apache-2.0
"""`CodedArray`: a leaf at rest in codes of few bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory import _coding, _padded
from jzero.offload.memory._away_array import AwayArray, on_devices
from jzero.offload.memory._like_array import LikeArray
from jzero.sharding.plan._coded_form import CodedForm


class CodingError(NamedTuple):
    """What a leaf has lost in its codes, of its finite elements.

    Attributes:
      rms: the root mean square of what was rounded off, over that of the elements.
      largest: the most that was rounded off of one, over the largest element.
    """

    rms: float
    largest: float


class CodedArray(LikeArray):
    """A leaf of a state that rests in codes: of `shard_eval_step(..., weight_dtype=jnp.int8)`.

    Whoever reads it or computes with it sees a `jax.Array` of its shape and dtype: what its codes say, which
    is the leaf that was coded but for rounding. Each such use decodes it, each device its own part (a padded
    leaf is gathered, too), for as long as it lasts. An evaluation takes it as it rests, and gathers codes. A
    pickled or deep copy of it is a NumPy array.

    >>> import jax, jax.numpy as jnp, jzero
    >>> eval_step = jzero.shard_eval_step(lambda w, x: x @ w, weight_dtype=jnp.int8)
    >>> w, x = jax.random.normal(jax.random.key(0), (512, 512)), jnp.ones((8, 512))
    >>> coded = eval_step.shard(w, x)
    >>> coded
    CodedArray(shape=(512, 512), dtype=float32, int8 in blocks of 256)
    >>> w.nbytes, coded.rows.nbytes, coded.error.rms < 0.01
    (1048576, 266240, True)
    >>> bool(jnp.allclose(eval_step(coded, x), x @ jnp.asarray(coded), atol=1e-3))
    True

    Attributes:
      rows: the bytes, `uint8[..., parts, bytes]`, as they rest: a `jax.Array`, or a `jzero.NVMeArray`.
      form: what they are.
      coding: what was lost, as `_coding.encoded` returns it.
    """

    def __init__(self, rows: Any, form: CodedForm, error: Any):
        self.rows, self.form = rows, form
        self.coding = error

    @property
    def error(self) -> CodingError | None:
        """What it has lost, as it was measured when it was coded; None if it comes from a checkpoint."""
        if self.coding is None:
            return None
        lost, whole, most, largest = np.asarray(self.coding, np.float64).tolist()
        return CodingError(
            (lost / whole) ** 0.5 if whole else 0.0, most / largest if largest else 0.0
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The leaf's shape."""
        return self.form.shape

    @property
    def dtype(self) -> Any:
        """The dtype as which it is decoded."""
        return jnp.dtype(self.form.dtype)

    @property
    def at_rest(self) -> NamedSharding:
        """The sharding of the rows."""
        rows = self.rows
        at_rest: NamedSharding = rows.at_rest if isinstance(rows, AwayArray) else rows.sharding
        return at_rest

    @property
    def sharding(self) -> NamedSharding:
        """That of a plain array made of it: the parts of the devices, or whole on each if it is padded."""
        if self.form.padding:
            return NamedSharding(self.at_rest.mesh, PartitionSpec())
        return _coding.plain_sharding(self.form, self.at_rest)

    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array, with this `sharding`.

        Raises:
          StateError: it was deleted.
        """
        rows, rest = self._alive(), self.at_rest
        here = NamedSharding(rest.mesh, rest.spec)
        rows = on_devices(rows) if isinstance(rows, AwayArray) else rows
        x = _coding.decoded(jax.device_put(rows, here), self.form, here)
        return _padded.unpad(jax.device_put(x, self.sharding), self.shape)

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Always a copy."""
        return np.array(self.__jax_array__(), dtype)

    def _alive(self) -> Any:
        if self.is_deleted():
            raise StateError(message(
                "CodedArray", f"{self!r} was already donated", *CONSUMED))  # fmt: skip
        return self.rows

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (np.asarray(self),)

    def __repr__(self) -> str:
        return f"CodedArray(shape={self.shape}, dtype={self.dtype}, {self.form.blocks})"

    def delete(self) -> None:
        """Frees its memory."""
        self.rows.delete()

    def is_deleted(self) -> bool:
        """Whether it was freed."""
        return isinstance(self.rows, jax.Array) and self.rows.is_deleted()

    def block_until_ready(self) -> CodedArray:
        """Waits for the computation that makes it; `jax.block_until_ready` calls this."""
        self._alive().block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Starts the copy of the rows to the host."""
        self.rows.copy_to_host_async()


def rows_of(leaf: Any) -> Any:
    """The rows of a leaf that rests in codes; another leaf as it is."""
    return leaf.rows if isinstance(leaf, CodedArray) else leaf
