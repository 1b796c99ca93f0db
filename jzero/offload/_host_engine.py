# SPDX-License-Identifier: Apache-2.0
"""`HostEngine`: runs a `HostBucket` on the host's processors, and sends what it makes to the devices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero._errors import StateError
from jzero.offload._host_bucket import HostBucket
from jzero.offload.kernels._host_update import IN_ITS_MIDDLE, HostUpdate
from jzero.offload.memory._pinned_leaf import LeafMemory, pinned_zeros, view
from jzero.offload.memory._storage import places
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._leaves import LeafPlan

Slices = tuple[slice, ...]


class _Outputs(NamedTuple):
    arrays: list[jax.Array]  # in pinned memory; each device's part in its own buffer
    views: list[list[np.ndarray]]  # of each local device, that memory of each array
    sent: list[weakref.ref[jax.Array]]  # what the devices made of the last copies


class HostEngine:
    """Updates the shards of this process's devices, all in one parallel loop."""

    def __init__(
        self, bucket: HostBucket, leaves: Sequence[LeafPlan], devices: Sequence[jax.Device],
        update: HostUpdate, num_sets: int = 1,
    ):  # fmt: skip
        """Makes `num_sets` of memory for outputs, used in turn.

        Local devices beside `devices` are their replicas. Sets are one more than the steps whose copies to
        the devices may be in transfer when the next one writes.
        """
        self._bucket, self.update = bucket, update
        shards, indices = (places(bucket.mesh, axes) for axes in (bucket.shard_axes, bucket.axes))
        local = list(shards)
        self.devices = devices
        # Their places among the process's devices.
        self.at = [local.index(device) for device in devices]
        first = {shards[device]: at for device, at in zip(devices, self.at, strict=True)}
        self._like = [first[place] for place in shards.values()]
        self._indices = [[np.asarray(i, np.int32) for i in indices[device]] for device in devices]
        outs, shapes = bucket.out_avals(), bucket.out_shapes()
        self._places = [aval.sharding for aval in outs]
        self._sets = [self._outputs(outs) for _ in range(num_sets)]
        self._leaves: dict[int, LeafMemory] = {}  # As prepared.
        self._run: weakref.ref[Any] | None = None  # whose it is
        self._padding_of_outs = [
            padding_of(aval.sharding, aval.shape, shape, local)
            for aval, shape in zip(outs, shapes, strict=True)
        ]
        self._padding_of_leaves = [padding_of_leaf(x, bucket.mesh, devices) for x in leaves]

    @property
    def portions(self) -> list[list[int]]:
        """What `run` yields, each time, by output."""
        return [[self._bucket.outs[i] for i in done] for done in self.update.portions]

    def _outputs(self, avals: Sequence[jax.ShapeDtypeStruct]) -> _Outputs:
        arrays = [pinned_zeros(aval.shape, aval.dtype, aval.sharding) for aval in avals]
        # `addressable_data` has one array for all devices if they hold the same.
        views = [
            [view(x.addressable_shards[k].data) for x in arrays] for k in range(len(self._like))
        ]
        return _Outputs(arrays, views, [])

    def claim(self, run: Any) -> None:
        """Before `prepare`: it belongs to this run until that `is_over`; another one's it refuses."""
        other = self._run() if self._run is not None else None
        if run.is_nested and other not in (None, run) and not other.is_over:
            raise StateError(IN_ITS_MIDDLE)
        self._run = weakref.ref(run)

    def prepare(self, leaves: Mapping[int, LeafMemory], reads: Sequence[jax.Array | None]) -> None:
        """Does what can fail, and overwrites nothing; `leaves` in memory are by their place in the bucket.

        `reads` are in pinned memory; None for gradients that come with tiles, or by themselves.
        """
        self._leaves = {**leaves}
        shards = [[leaf.buffers[k] for leaf in leaves.values()] for k in range(len(self.at))]
        self.update.prepare(shards, self._inputs(reads))
        # The outputs that are written next must not be in use.
        self._sets = [*self._sets[1:], self._sets[0]]  # At once: an interrupt loses none.
        # Usually the devices have read these long ago.
        alive = [x for ref in self._sets[-1].sent if (x := ref()) is not None]
        jax.block_until_ready([x for x in alive if not x.is_deleted()])
        self._sets[-1].sent.clear()

    def place(self, index: int, leaf: LeafMemory) -> None:
        """After `prepare`: says where a leaf is from now on."""
        self._leaves[index] = leaf
        self.update.place(index, leaf.buffers)

    def _inputs(self, reads: Sequence[jax.Array | None]) -> list[list[Any]]:
        return [
            [*(None if x is None else x.addressable_data(k) for x in reads), *indices]
            for k, indices in zip(self.at, self._indices, strict=True)
        ]

    def run(self) -> Iterator[dict[int, jax.Array]]:
        """Updates in place; yields what a portion makes for the devices, by output, in transfer."""
        leaves, self._leaves = self._leaves, {}  # The state may be dropped after this.
        for done in self.update.run(self._memory_of_outputs()):
            yield self._send(done)
        self._complete(leaves)

    def _complete(self, leaves: Mapping[int, LeafMemory]) -> None:
        for i, leaf in leaves.items():
            leaf.complete(self._padding_of_leaves[i])

    def _memory_of_outputs(self) -> list[list[np.ndarray]]:
        return [self._sets[-1].views[k] for k in self.at]

    def _send(self, done: Sequence[int]) -> dict[int, jax.Array]:
        outputs = self._sets[-1]
        for i in done:
            for k in self.at:
                if (index := self._padding_of_outs[i][k]) is not None:
                    outputs.views[k][i][index] = 0
            for k, like in enumerate(self._like):
                if k != like:
                    np.copyto(outputs.views[k][i], outputs.views[like][i])
        places = [self._places[i] for i in done]
        with jax.profiler.TraceAnnotation("jzero: send parameters"):
            sent = jax.device_put([outputs.arrays[i] for i in done], places)
        return {self._bucket.outs[i]: x for i, x in zip(done, sent, strict=True)}

    def sent(self, arrays: Iterable[jax.Array]) -> None:
        """Notes what the devices made of a portion, whose memory is not written again before that exists."""
        self._sets[-1].sent.extend(map(weakref.ref, arrays))


def padding_of_leaf(
    leaf: LeafPlan, mesh: Mesh, devices: Sequence[jax.Device]
) -> list[Slices | None]:
    sharding = NamedSharding(mesh, _stored_layout.partition_spec(leaf.layout, leaf.automatic))
    return padding_of(sharding, leaf.padded_shape, leaf.shape, devices)


def padding_of(
    sharding: NamedSharding, padded: Sequence[int], shape: Sequence[int], devices: Sequence[jax.Device]
) -> list[Slices | None]:  # fmt: skip
    """The same for an array."""
    found: Any = sharding.addressable_devices_indices_map(tuple(padded))
    tails: list[Slices | None] = []
    for device in devices:
        index: Slices | None = None
        for dim, (part, size) in enumerate(zip(found[device], shape, strict=True)):
            start, stop, _ = part.indices(padded[dim])
            if stop > size:
                index = (slice(None),) * dim + (slice(max(size - start, 0), None),)
        tails.append(index)
    return tails
