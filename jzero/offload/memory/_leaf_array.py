# SPDX-License-Identifier: Apache-2.0
"""`LeafArray`: a leaf of a state that is stored padded, in codes, in the host's memory or in files."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import StateError, message
from jzero.offload.memory import _coding, _storage
from jzero.offload.memory._storage import HostPlacement, Parts, Storage
from jzero.sharding.plan._quantized_form import QuantizedForm
from jzero.tracing import _array_memory
from jzero.tracing._axis_types import takes_explicit_axes


class CodingError(NamedTuple):
    """What a leaf has lost in its codes, of its finite elements.

    Attributes:
      rms: the root mean square of what was rounded off, over that of the elements.
      largest: the most that was rounded off of one, over the largest element.
    """

    rms: float
    largest: float


# [Note: padded leaves] Three other forms were rejected. A plain array of padded shape: padding would enter
# an evaluation unseen, as logits of rows that do not exist. Unequal shards: JAX has none. A mesh axis that
# is split, to shard over the greatest common divisor of dim and devices: with 3 devices nothing would be
# sharded.


class LeafArray(jax.Array):
    """A leaf of a state that is not stored as one of JAX's own arrays of its shape and dtype.

    It is one of these, or two at once:

    - *padded*: the devices do not divide any of its dims, as 50257 rows on 8 devices. JAX has no arrays in
      unequal shards, so such a leaf is stored with zeros at the end of one dim.
    - *in codes* of few bits: of `shard_eval_step(..., weight_dtype=jnp.int8)`.
    - *in host memory*: with `memory=jzero.HostCPU()`. Each process has the parts of its own devices, once:
      devices that are replicas of each other share one.
    - *in files*: with `memory=jzero.NVMe(path)`. They are closed when no leaf is left that is stored in them.

    Whoever reads it or computes with it sees a `jax.Array` of its true shape and dtype: `jax.jit`, `jax.grad`
    and all other transformations, operators, functions of `jnp` and `lax`, `x.at`, `device_put`, Flax's and
    Orbax's own serialization. Each such use makes a plain array, as `jnp.asarray(x)` does, for as long as it
    lasts, and nothing keeps it: a padded leaf whole on every device, any other in the shards in which it
    is stored. Codes are decoded: they say the leaf but for rounding. What is on the host or in files is not
    copied to devices for `np.asarray`, indexing and iteration, which copy it on the host.

    A sharded step takes a leaf as it is stored. A function that donates its arguments consumes the plain
    array, and never the leaf. A pickled or deep copy is a NumPy array, of one that is only padded a leaf like
    it. Where it spans processes, `jax.device_put` wants `jnp.asarray(x)`.

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step_fn(state, batch):
    ...     grad = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    ...     m = 0.9 * state["m"] + grad
    ...     return {"w": state["w"] - 0.1 * m, "m": m}
    >>> train_step = jzero.shard_train_step(step_fn, stage=3, memory=jzero.HostCPU())
    >>> state = train_step.init(lambda: {"w": jnp.ones((257, 3)), "m": jnp.zeros((257, 3))})
    >>> state = train_step(state, jnp.ones((8, 257)))
    >>> state["w"]
    LeafArray(shape=(257, 3), dtype=float32, padded to (264, 3))
    >>> state["m"]
    LeafArray(shape=(257, 3), dtype=float32, in host memory, padded to (264, 3))
    >>> jnp.asarray(state["m"]).shape, state["m"][0].shape, (2 * state["w"]).shape
    ((257, 3), (3,), (257, 3))
    >>> round(jax.jit(jnp.sum)(state["m"]).item())
    257

    Attributes:
      shape: the true shape, without padding.
      storage: what a sharded step takes: a `jax.Array` in its shards, padded or of codes; or what has the
        parts of each device in host memory or in files. It has a `shape`, a `dtype`, a `sharding` and
        `nbytes` of its own, which are those of what is stored.
      codes: how codes are the leaf; None for one that is in none.

    Raises:
      StateError: by any use: a step has consumed it; with `HostCPU(delayed_update=True)` it still waits for
        an update, which `train_step.flush(state)` does; files cannot be read, or have not what was written.
        By `np.asarray`: other processes have parts of it.
    """

    # What is asked at every call of a step costs no call of Python's.
    __slots__ = ("codes", "lost", "shape", "storage")
    storage: Any
    shape: tuple[int, ...]
    codes: QuantizedForm | None
    lost: Any

    __array_priority__ = 100  # As of JAX's own arrays: NumPy's leave operators to it.
    # `_committed`, of which JAX asks too, would make `jax.device_put` return `x` itself.
    committed = True
    weak_type = False

    def __init__(
        self,
        storage: Any,
        shape: tuple[int, ...],
        codes: QuantizedForm | None = None,
        lost: Any = None,
    ):
        """`lost` is the error of codes as `_coding.encoded` returns it."""
        self.storage, self.shape, self.codes, self.lost = storage, shape, codes, lost

    @property
    def dtype(self) -> Any:
        """The dtype of the elements; as which codes are decoded."""
        return jnp.dtype(self.codes.dtype) if self.codes else self.storage.dtype

    @property
    def sharding(self) -> Any:
        """That of a plain array made of it: as it is stored, but whole on every device if it is padded."""
        stored, codes = self.storage.sharding, self.codes
        if not isinstance(stored, NamedSharding):  # Copied to another place.
            return stored
        if codes.padding if codes else self.storage.shape != self.shape:
            return NamedSharding(stored.mesh, PartitionSpec())
        return _coding.plain_sharding(codes, stored) if codes else stored

    @property
    def where(self) -> str:
        """`"on devices"`, `"in pinned memory"`, `"in host memory"` or `"in files"`."""
        return _storage.place_of(self.storage)

    @property
    def error(self) -> CodingError | None:
        """What it has lost in its codes, as it was measured then; None if that is not known."""
        if self.lost is None:
            return None
        lost, whole, most, largest = np.asarray(self.lost, np.float64).tolist()
        return CodingError(
            (lost / whole) ** 0.5 if whole else 0.0, most / largest if largest else 0.0
        )

    @takes_explicit_axes
    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array of this shape and sharding."""
        x, codes = _storage.on_devices(self._alive()), self.codes
        if codes:
            stored = self.storage.sharding
            here = NamedSharding(stored.mesh, stored.spec)
            x = _coding.decoded(jax.device_put(x, here), codes, here)
        return unpad(jax.device_put(x, self.sharding), self.shape)

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        """A copy, but of what JAX itself keeps one."""
        x = self._alive()
        if self.codes:
            return np.array(self.__jax_array__(), dtype)
        if not (self.is_fully_addressable or x.sharding.is_fully_replicated):
            raise StateError(message(
                "LeafArray", f"other processes have parts of {self!r}",
                "A process reads its own memory.",
                "Call train_step.unshard(state) on all processes, and read what that returns."))  # fmt: skip
        if isinstance(x, jax.Array):
            whole = np.asarray(x)[tuple(map(slice, self.shape))]
            return np.array(whole, dtype) if copy else np.asarray(whole, dtype)
        whole = np.empty(self.shape, self.dtype if dtype is None else dtype)
        there = tuple((0, size) for size in self.shape)
        _storage.copy_parts([(there, whole)], x.parts(), self.shape)
        return whole

    def _alive(self) -> Any:
        if self.is_deleted():
            raise _storage.consumed(self)
        return self.storage

    def _near(self) -> Any:
        """The array to read some values of: on the host if it is there."""
        here = self.codes or isinstance(self.storage, jax.Array)
        return self.__jax_array__() if here else np.asarray(self)

    def __getitem__(self, index: Any) -> jax.Array:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(index)):
            return self.__jax_array__()[index]
        return jnp.asarray(self._near()[index])

    def __bool__(self) -> bool:
        return bool(self._near())

    def __iter__(self) -> Iterator[jax.Array]:
        return map(jnp.asarray, self._near())

    def __len__(self) -> int:
        return self.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """What to call with which arguments for a copy; pickle asks, too."""
        x = self._alive()
        if isinstance(x, jax.Array) and not self.codes:
            return LeafArray, (x, self.shape)
        return np.asarray, (np.asarray(self),)

    def __copy__(self) -> Any:
        return self.__deepcopy__({})  # Of arrays, too, it has memory of its own.

    def __deepcopy__(self, memo: Any) -> Any:
        make, args = self.__reduce__()
        return make(*copy.deepcopy(args, memo))

    def __repr__(self) -> str:
        return _storage.described(self.storage, self.shape, self.dtype, self.codes)

    def delete(self) -> None:
        """Frees its memory, or lets go of its files."""
        self.storage.delete()

    def is_deleted(self) -> bool:
        """Whether a step has consumed it, or it was deleted."""
        return is_deleted(self.storage)

    def block_until_ready(self) -> LeafArray:
        """Waits for the computation that makes it; `jax.block_until_ready` calls this."""
        self._alive().block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Starts the copy that `np.asarray` waits for."""
        self.storage.copy_to_host_async()

    @property
    def aval(self) -> Any:
        """Its type, as JAX says it."""
        return jax.typeof(self)

    @property
    def ndim(self) -> int:
        """How many dims there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements, without padding."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, without padding and as no codes."""
        return self.size * self.itemsize

    @property
    def device(self) -> Any:
        """Its sharding, as of all arrays on several devices."""
        return self.sharding

    def devices(self) -> set[jax.Device]:
        """The devices that it is for."""
        devices: set[jax.Device] = self.sharding.device_set
        return devices

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all devices that it is for are this process's."""
        return bool(self.sharding.is_fully_addressable)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether the plain array is whole on every device."""
        return bool(self.sharding.is_fully_replicated)


def _asked(name: str) -> Any:
    def ask(self: LeafArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*args, **kwargs)

    ask.__name__, ask.__doc__ = name, f"`{name}` of the plain array."
    return ask


def _read(name: str) -> property:
    return property(
        lambda self: getattr(self.__jax_array__(), name), doc=f"`{name}` of the plain array."
    )


# What arrays have that their base class does not name.
_MORE = (
    "__complex__", "__dlpack__", "__dlpack_device__", "__float__", "__index__", "__int__", "clone",
    "tobytes", "tolist",
)  # fmt: skip
for _name in _MORE:
    setattr(LeafArray, _name, _asked(_name))
for _name, _value in vars(jax.Array).items():
    if _name not in vars(LeafArray) and _name != "__numpy_dtype__":
        if isinstance(_value, property):
            setattr(LeafArray, _name, _read(_name))
        elif callable(_value):
            setattr(LeafArray, _name, _asked(_name))
_array_memory.register_array(LeafArray, LeafArray.__jax_array__)


def storage_of(x: Any) -> Any:
    """What a program takes of a leaf: its storage, or the leaf itself if it is a plain array."""
    return x.storage if isinstance(x, LeafArray) else x


def is_coded(x: Any) -> bool:
    return isinstance(x, LeafArray) and x.codes is not None


def rows_of(x: Any) -> Any:
    """The rows of a leaf that is stored in codes, as an array; another leaf as it is."""
    return wrap(x.storage, x.storage.shape) if is_coded(x) else x


def is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array | Storage) and bool(x.is_deleted())


def pad(x: Any, shape: tuple[int, ...]) -> Any:
    """A leaf as a plain array of the (padded) `shape`, where it is: on the host or on devices."""
    if isinstance(x, LeafArray):
        if isinstance(x.storage, jax.Array) and x.storage.shape == shape:
            return x.storage
        x = jnp.asarray(x)
    if np.shape(x) == shape:
        return x
    widths = [(0, new - old) for old, new in zip(np.shape(x), shape, strict=True)]
    return jnp.pad(x, widths) if isinstance(x, jax.Array) else np.pad(x, widths)


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)


def wrap(x: Any, shape: tuple[int, ...]) -> Any:
    """A stored leaf as a user gets it: the array itself, if it is one of the true `shape`."""
    return LeafArray(x, shape) if isinstance(x, Storage) or x.shape != shape else x


def spans_processes(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def parts_for(x: Any, placement: HostPlacement) -> Parts:
    """This process's parts of a leaf, each once; `placement` says which to fetch from other processes."""
    stored = storage_of(x)
    # In any memory, shards of this placement stay where they are.
    if spans_processes(x) and not (
        stored.shape == placement.padded_shape
        and stored.sharding.with_memory_kind(placement.sharding.memory_kind).is_equivalent_to(
            placement.sharding, len(stored.shape)
        )
    ):
        x = wrap(_storage.on_devices(stored), x.shape)
        stored = jax.device_put(pad(x, placement.padded_shape), placement.sharding)
    return _storage.parts_of(stored)
