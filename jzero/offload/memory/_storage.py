# SPDX-License-Identifier: Apache-2.0
"""`Storage`: what holds an offloaded leaf, and copies between the places of its parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory._pinned_leaf import is_pinned, view

HostBox: TypeAlias = tuple[tuple[int, int], ...]  # start and stop of a part in each dim
Parts: TypeAlias = list[tuple[HostBox, Any]]  # and its values: on the host, or a device's
ON_DEVICES = "on devices"


class HostPlacement(NamedTuple):
    """The parts of a leaf that this process keeps off the devices, and in which shape."""

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding  # of the padded shape
    devices: tuple[jax.Device, ...]  # this process's, whose parts are kept

    @property
    def nbytes(self) -> int:
        size = math.prod(self.sharding.shard_shape(self.padded_shape))
        return len(self.devices) * size * self.dtype.itemsize

    def boxes(self) -> list[HostBox]:
        found = self.sharding.addressable_devices_indices_map(self.padded_shape)
        return [box_of(found[device], self.padded_shape) for device in self.devices]


class Storage:
    """An offloaded leaf, part by part: in memory of the devices' host, or in files.

    It has the attributes of a `jax.Array` of this sharding on the devices, so whoever asks for the shape, the
    sharding or whether it was consumed need not know which of these it is.
    """

    placement: HostPlacement
    where: ClassVar[str]  # in words

    def parts(self) -> Parts:
        """Each part that this process has, once, to be read before the next step."""
        raise NotImplementedError

    def delete(self) -> None:
        raise NotImplementedError

    def is_deleted(self) -> bool:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.padded_shape

    @property
    def dtype(self) -> np.dtype:
        return self.placement.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        return self.placement.sharding

    @property
    def aval(self) -> Any:
        """Equal for storages that one program takes, as avals of arrays are."""
        return self.placement

    def block_until_ready(self) -> Self:
        return self

    def copy_to_host_async(self) -> None:
        pass

    def own_parts(self, parts: Parts) -> Parts:
        """Of its `parts`, those that no process before this one has."""
        first: dict[HostBox, int] = {}
        found = self.sharding.devices_indices_map(self.shape)
        for device in self.sharding.mesh.devices.flat:
            first.setdefault(box_of(found[device], self.shape), device.process_index)
        return [(box, x) for box, x in parts if first[box] == jax.process_index()]

    def __repr__(self) -> str:
        return described(self, self.placement.shape, self.dtype)


def consumed(x: Any) -> StateError:
    """The error for a leaf that a step has consumed."""
    return StateError(message("LeafArray", f"{x!r} was already donated", *CONSUMED))


def place_of(x: jax.Array | Storage) -> str:
    """In words, where a leaf is that is stored as `x`."""
    if isinstance(x, Storage):
        return x.where
    return "in pinned memory" if is_pinned(x) else ON_DEVICES


def described(x: jax.Array | Storage, shape: tuple[int, ...], dtype: Any, codes: Any = None) -> str:
    """The `repr` of a leaf of this shape and dtype that is stored as `x`, in `codes` or not."""
    place = place_of(x)
    said = [f"shape={shape}", f"dtype={dtype}", *([] if place == ON_DEVICES else [place])]
    if codes:
        said.append(f"{codes.blocks}")
    elif x.shape != shape:
        said.append(f"padded to {x.shape}")
    return f"LeafArray({', '.join(said)})"


@functools.cache
def keepers(mesh: Mesh, axes: tuple[str, ...]) -> tuple[jax.Device, ...]:
    """The devices whose parts this process keeps: its first at each place along `axes`."""
    found: dict[tuple[int, ...], jax.Device] = {}
    for device, place in places(mesh, axes).items():
        found.setdefault(place, device)
    return tuple(found.values())


def places(mesh: Mesh, axes: Sequence[str]) -> dict[jax.Device, tuple[int, ...]]:
    """The index along `axes` of each device of this process, in the order of the mesh."""
    dims = [mesh.axis_names.index(axis) for axis in axes]
    return {
        device: tuple(place[dim] for dim in dims)
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    }


def on_devices(
    x: jax.Array | Storage, shape: tuple[int, ...] | None = None, sharding: NamedSharding | None = None
) -> jax.Array:  # fmt: skip
    """A stored leaf as a JAX array, copied from the host; another `shape` needs all of it in this process."""
    if not isinstance(x, Storage):
        return x
    wanted, parts, placement = shape or x.shape, x.parts(), x.placement

    # Always a copy: on CPUs JAX reads NumPy's memory where it is, and elsewhere copies it later.
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        box = box_of(index, wanted)
        out = np.zeros(sizes_of(box), placement.dtype)
        copy_parts([(box, out)], parts, placement.shape)
        return out

    with jax.transfer_guard("allow"):  # JAX counts this as implicit.
        return jax.make_array_from_callback(wanted, sharding or placement.sharding, part)


def parts_of(x: Any) -> Parts:
    """Each part of a stored leaf that this process has, once."""
    if isinstance(x, Storage):
        return x.parts()
    if isinstance(x, jax.Array):
        found = {box_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        return list(found.items())
    return [(tuple((0, size) for size in x.shape), x)]


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
    """A part's values on the host, to be read; JAX keeps no copy of those from devices."""
    if is_pinned(data):
        return view(jax.block_until_ready(data))
    if isinstance(data, jax.Array):  # An array keeps its copy on the host; this one is dropped.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


def box_of(index: tuple[slice, ...] | None, shape: Sequence[int]) -> HostBox:
    assert index is not None  # Only of arrays that are no numbers, JAX says.
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def sizes_of(box: HostBox) -> list[int]:
    return [stop - start for start, stop in box]


def _within(box: HostBox, outer: HostBox) -> tuple[slice, ...]:
    """Where `box` is in an array of what is in `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
