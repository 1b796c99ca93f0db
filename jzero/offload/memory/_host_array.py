"""`HostArray`: a leaf at rest in the ordinary memory of the devices' host, where processors update it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory import _padded
from jzero.offload.memory._addresses import host_empty
from jzero.offload.memory._like_array import LikeArray
from jzero.offload.memory._padded import PaddedArray

HostBox: TypeAlias = tuple[
    tuple[int, int], ...
]  # of each dim, where a part starts and where it stops
Parts: TypeAlias = list[tuple[HostBox, Any]]  # and what is there: on the host, or a device's


class Home(NamedTuple):
    """Where a leaf rests on the host, and in which shape.

    Attributes:
      shape: the true shape.
      padded_shape: the shape at rest.
      dtype: of its elements.
      at_rest: which part of the padded shape belongs to which device.
      devices: those of this process whose parts are kept.
    """

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: np.dtype
    at_rest: NamedSharding
    devices: tuple[jax.Device, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers in this process."""
        size = math.prod(self.at_rest.shard_shape(self.padded_shape))
        return len(self.devices) * size * self.dtype.itemsize

    def boxes(self) -> list[HostBox]:
        """The part of each of `devices`."""
        found = self.at_rest.addressable_devices_indices_map(self.padded_shape)
        return [_box(found[device], self.padded_shape) for device in self.devices]


class HostArray(LikeArray):
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
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return self.home.shape

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape at rest: beyond `shape` there are zeros."""
        return self.home.padded_shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.home.dtype

    @property
    def at_rest(self) -> NamedSharding:
        """Which part of the padded shape belongs to which device."""
        return self.home.at_rest

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The part of each of `home.devices`, in C order; the next step overwrites them."""
        if self._buffers is None:
            raise StateError(message(
                "HostArray", f"{self!r} was already donated", *CONSUMED))  # fmt: skip
        return self._buffers

    @property
    def sharding(self) -> NamedSharding:
        """That of a plain array made of it: `at_rest`, but whole on every device if it is padded."""
        padded = self.padded_shape != self.shape
        return NamedSharding(self.at_rest.mesh, PartitionSpec()) if padded else self.at_rest

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

    def block_until_ready(self) -> HostArray:
        """Itself: what is in its buffers is there already, and nobody waits for what is pending."""
        return self

    def copy_to_host_async(self) -> None:
        """Nothing: it is there."""

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

    def own_parts(self) -> Parts:
        """Of `parts`, those that no process before this one has."""
        first: dict[HostBox, int] = {}
        found = self.at_rest.devices_indices_map(self.padded_shape)
        for device in self.at_rest.mesh.devices.flat:
            first.setdefault(_box(found[device], self.padded_shape), device.process_index)
        return [(box, x) for box, x in self.parts() if first[box] == jax.process_index()]

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Always a copy."""
        if not (self.is_fully_addressable or self.at_rest.is_fully_replicated):
            raise StateError(message(
                "HostArray", f"other processes have parts of {self!r}", "A process reads its own memory.",
                "Call train_step.unshard(state) on all processes, and read what that returns."))  # fmt: skip
        whole = np.empty(self.shape, self.dtype if dtype is None else dtype)
        _copy([(tuple((0, size) for size in self.shape), whole)], self.parts(), self.shape)
        return whole

    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array, with this `sharding`."""
        return _padded.unpad(jax.device_put(on_devices(self), self.sharding), self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(index)):
            return self.__jax_array__()[index]
        return jnp.asarray(np.asarray(self)[index])

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __iter__(self) -> Iterator[jax.Array]:
        return map(jnp.asarray, np.asarray(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (np.asarray(self),)

    def __repr__(self) -> str:
        padded = f", padded to {self.padded_shape}" if self.padded_shape != self.shape else ""
        return f"HostArray(shape={self.shape}, dtype={self.dtype}{padded})"


@functools.cache
def keepers(mesh: Mesh, axes: tuple[str, ...]) -> tuple[jax.Device, ...]:
    """The devices whose parts this process keeps: of its own at one place along `axes`, the first."""
    found: dict[tuple[int, ...], jax.Device] = {}
    for device, place in places(mesh, axes).items():
        found.setdefault(place, device)
    return tuple(found.values())


def places(mesh: Mesh, axes: Sequence[str]) -> dict[jax.Device, tuple[int, ...]]:
    """Where each device of this process is along `axes`, in the order of the mesh."""
    dims = [mesh.axis_names.index(axis) for axis in axes]
    return {
        device: tuple(place[dim] for dim in dims)
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    }


def on_host(x: Any, home: Home) -> HostArray:
    """A leaf as a `HostArray`, copied part by part; one that rests there already passes through untouched.

    Args:
      x: a NumPy array, JAX array, `PaddedArray`, or a `HostArray` of another layout or mesh. If it spans
        processes, all of them must call this.
      home: where it goes.
    """
    if rests_in(x, home):
        return x
    parts, boxes = _parts_for(x, home), home.boxes()
    buffers = [host_empty(_sizes(box), home.dtype) for box in boxes]
    for box, buffer in zip(boxes, buffers, strict=True):
        if any(stop > size for (_, stop), size in zip(box, home.shape, strict=True)):
            buffer[...] = 0
    _copy(list(zip(boxes, buffers, strict=True)), parts, home.shape)
    return HostArray(home, buffers)


def rests_in(x: Any, home: Home | None) -> bool:
    """Whether a leaf is there already."""
    return isinstance(x, HostArray) and x.home == home


def on_devices(
    x: HostArray, padded_shape: tuple[int, ...] | None = None, sharding: NamedSharding | None = None
) -> jax.Array:
    """A leaf as a JAX array, each device's part copied from the host; replicas get one each.

    Args:
      x: the leaf.
      padded_shape: of the array; as it rests by default. Another one needs all of `x` in this process.
      sharding: the same.
    """
    shape, parts = padded_shape or x.padded_shape, x.parts()

    # Always a copy: on CPUs JAX reads NumPy's memory where it is, and elsewhere copies it later.
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        box = _box(index, shape)
        out = np.zeros(_sizes(box), x.dtype)
        _copy([(box, out)], parts, x.shape)
        return out

    return jax.make_array_from_callback(shape, sharding or x.at_rest, part)


def spans_processes(x: Any) -> bool:
    """Whether other processes have parts of a leaf."""
    x = x.padded if isinstance(x, PaddedArray) else x
    return isinstance(x, jax.Array | HostArray) and not x.is_fully_addressable


def _parts_for(x: Any, home: Home) -> Parts:
    """The parts of a leaf that this process has, each once; those that `home` needs of others are brought."""
    if spans_processes(x) and not _lies_like(x, home):
        x = _padded.wrap(on_devices(x), x.shape) if isinstance(x, HostArray) else x
        x = jax.device_put(_padded.pad(x, home.padded_shape), home.at_rest)
    if isinstance(x, HostArray):
        return x.parts()
    x = x.padded if isinstance(x, PaddedArray) else x
    if isinstance(x, jax.Array):
        found = {_box(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        return list(found.items())
    return [(tuple((0, size) for size in x.shape), x)]


def _lies_like(x: Any, home: Home) -> bool:
    """Whether each device has the part of a leaf that belongs to it, in whatever memory."""
    if isinstance(x, HostArray):
        return (x.padded_shape, x.at_rest) == (home.padded_shape, home.at_rest)
    x = x.padded if isinstance(x, PaddedArray) else x
    sharding = x.sharding.with_memory_kind(home.at_rest.memory_kind)
    return x.shape == home.padded_shape and sharding.is_equivalent_to(home.at_rest, x.ndim)


def _copy(into: list[tuple[HostBox, np.ndarray]], parts: Parts, shape: tuple[int, ...]) -> None:
    """Copies what the boxes have in common, within the true `shape`; each part is read once."""
    for box, data in parts:
        values = None
        for there, out in into:
            common = tuple(
                (max(a, c), min(b, d, size))
                for (a, b), (c, d), size in zip(box, there, shape, strict=True)
            )
            if all(start < stop for start, stop in common):
                values = _values(data) if values is None else values
                out[_within(common, there)] = values[_within(common, box)]


def _values(data: Any) -> np.ndarray:
    """A part's values on the host; those of devices are not kept there for longer than they are read."""
    if isinstance(
        data, jax.Array
    ):  # It keeps the copy that it makes of itself, and the user keeps it.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


def _box(index: tuple[slice, ...] | None, shape: Sequence[int]) -> HostBox:
    assert index is not None  # Only of arrays that are no numbers, JAX says.
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _sizes(box: HostBox) -> list[int]:
    return [stop - start for start, stop in box]


def _within(box: HostBox, outer: HostBox) -> tuple[slice, ...]:
    """Where `box` is in an array of what is in `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
