# SPDX-License-Identifier: Apache-2.0
"""`AwayArray`: a leaf at rest away from the devices, and copies between the places where its parts are."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._errors import StateError, message
from jzero.offload.memory import _padded
from jzero.offload.memory._like_array import LikeArray
from jzero.offload.memory._padded import PaddedArray
from jzero.offload.memory._pinned_leaf import is_pinned, view

HostBox: TypeAlias = tuple[
    tuple[int, int], ...
]  # of each dim, where a part starts and where it stops
Parts: TypeAlias = list[tuple[HostBox, Any]]  # and what is there: on the host, or a device's


class Home(NamedTuple):
    """Which parts of a leaf this process keeps away from the devices, and in which shape.

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


class AwayArray(LikeArray):
    """A leaf of a state that rests away from the devices, part by part: in memory of their host, or in files.

    A subclass says where the parts are that this process has (`parts`), and whether a step has consumed it.

    Attributes:
      home: which parts it has, and in which shape.
    """

    home: Home

    def parts(self) -> Parts:
        """The parts that this process has, each once; to be read before the next step.

        Raises:
          StateError: they cannot be read.
        """
        raise NotImplementedError

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
    def sharding(self) -> NamedSharding:
        """That of a plain array made of it: `at_rest`, but whole on every device if it is padded."""
        padded = self.padded_shape != self.shape
        return NamedSharding(self.at_rest.mesh, PartitionSpec()) if padded else self.at_rest

    @property
    def place(self) -> Any:
        """Where it is: equal for leaves that one program takes."""
        return self.home

    def block_until_ready(self) -> Self:
        """Itself: what it has is there already."""
        return self

    def copy_to_host_async(self) -> None:
        """Nothing: it is there."""

    def own_parts(self, parts: Parts | None = None) -> Parts:
        """Of `parts`, those that no process before this one has."""
        first: dict[HostBox, int] = {}
        found = self.at_rest.devices_indices_map(self.padded_shape)
        for device in self.at_rest.mesh.devices.flat:
            first.setdefault(_box(found[device], self.padded_shape), device.process_index)
        parts = self.parts() if parts is None else parts
        return [(box, x) for box, x in parts if first[box] == jax.process_index()]

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Always a copy."""
        if not (self.is_fully_addressable or self.at_rest.is_fully_replicated):
            raise StateError(message(
                type(self).__name__, f"other processes have parts of {self!r}",
                "A process reads its own memory.",
                "Call train_step.unshard(state) on all processes, and read what that returns."))  # fmt: skip
        whole = np.empty(self.shape, self.dtype if dtype is None else dtype)
        copy_parts([(tuple((0, size) for size in self.shape), whole)], self.parts(), self.shape)
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
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}{padded})"


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


def on_devices(
    x: AwayArray, padded_shape: tuple[int, ...] | None = None, sharding: NamedSharding | None = None
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
        out = np.zeros(sizes_of(box), x.dtype)
        copy_parts([(box, out)], parts, x.shape)
        return out

    with jax.transfer_guard("allow"):  # JAX counts this as implicit.
        return jax.make_array_from_callback(shape, sharding or x.at_rest, part)


def spans_processes(x: Any) -> bool:
    """Whether other processes have parts of a leaf."""
    x = x.padded if isinstance(x, PaddedArray) else x
    return isinstance(x, jax.Array | AwayArray) and not x.is_fully_addressable


def parts_for(x: Any, home: Home) -> Parts:
    """The parts of a leaf that this process has, each once; those that `home` needs of others are brought."""
    if spans_processes(x) and not _lies_like(x, home):
        x = _padded.wrap(on_devices(x), x.shape) if isinstance(x, AwayArray) else x
        x = jax.device_put(_padded.pad(x, home.padded_shape), home.at_rest)
    if isinstance(x, AwayArray):
        return x.parts()
    x = x.padded if isinstance(x, PaddedArray) else x
    if isinstance(x, jax.Array):
        found = {_box(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        return list(found.items())
    return [(tuple((0, size) for size in x.shape), x)]


def _lies_like(x: Any, home: Home) -> bool:
    """Whether each device has the part of a leaf that belongs to it, in whatever memory."""
    if isinstance(x, AwayArray):
        return (x.padded_shape, x.at_rest) == (home.padded_shape, home.at_rest)
    x = x.padded if isinstance(x, PaddedArray) else x
    sharding = x.sharding.with_memory_kind(home.at_rest.memory_kind)
    return x.shape == home.padded_shape and sharding.is_equivalent_to(home.at_rest, x.ndim)


def copy_parts(
    into: list[tuple[HostBox, np.ndarray]], parts: Parts, shape: tuple[int, ...]
) -> None:
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
    """A part's values on the host, to be read; those of devices are kept there no longer."""
    if is_pinned(data):
        return view(jax.block_until_ready(data))
    if isinstance(
        data, jax.Array
    ):  # It keeps the copy that it makes of itself, and the user keeps it.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


def _box(index: tuple[slice, ...] | None, shape: Sequence[int]) -> HostBox:
    assert index is not None  # Only of arrays that are no numbers, JAX says.
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def sizes_of(box: HostBox) -> list[int]:
    return [stop - start for start, stop in box]


def _within(box: HostBox, outer: HostBox) -> tuple[slice, ...]:
    """Where `box` is in an array of what is in `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
