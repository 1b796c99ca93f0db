# SPDX-License-Identifier: Apache-2.0
"""`FileReads`: reads parameters from files for the devices, within a memory budget of the host."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero._errors import OptionError, first_of, message
from jzero._memory_kinds import DEVICE
from jzero._quantities import readable_bytes
from jzero.offload._host_engine import padding_of
from jzero.offload.execute._stream import StreamSlot
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._pinned_pool import PinnedBuffer, PinnedPool, bytes_here
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._job_threads import Asked, Job, JobThreads
from jzero.offload.nvme._tile_layout import PAGE
from jzero.offload.schedule._ops import Value, Wanted
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _call

WHO = _call.WHO
_THREADS = 4  # keep a disk busy while each checks what it has read (experiments/infinity/disk.py)
_PIECE = 2**25  # Bytes that one thread reads at a time, so that several read one leaf.


@dataclasses.dataclass(frozen=True)
class FileSource:
    leaf: LeafPlan
    sharding: NamedSharding  # in pinned memory
    slice_sharding: NamedSharding  # of a slice along dim 0

    def shape(self, at: int | None) -> tuple[int, ...]:
        """`[n, d]`, or `[d]` of a slice."""
        return self.leaf.padded_shape[0 if at is None else 1 :]

    def place(self, at: int | None) -> NamedSharding:
        return self.sharding if at is None else self.slice_sharding

    def nbytes(self, at: int | None) -> int:
        """In this process's memory; of an abstract mesh, of one device."""
        shape, place = self.shape(at), self.place(at)
        if isinstance(place.mesh, jax.sharding.AbstractMesh):
            return int(np.prod(place.shard_shape(shape))) * self.leaf.itemsize
        return bytes_here(shape, self.leaf.dtype, place)

    @functools.cached_property
    def _padding(self) -> list[Any]:
        leaf, devices = self.leaf, self.sharding.mesh.local_devices
        return padding_of(self.sharding, leaf.padded_shape, leaf.shape, devices)

    def zero_padding(self, buffer: PinnedBuffer, at: int | None) -> None:
        """Zeros the padding in each device's part: updates leave anything there."""
        if not self.leaf.padding:
            return
        for device, index in zip(self.sharding.mesh.local_devices, self._padding, strict=True):
            if index is not None:
                buffer.views[device][index if at is None else index[1:]] = 0


class FileReads:
    """What a segment reads of files, through memory that one run at a time uses again and again."""

    def __init__(
        self, sources: Mapping[Value, FileSource], host_bytes: int,
        in_order: Iterable[Sequence[Wanted]], between: Iterable[Sequence[Wanted]],
    ):  # fmt: skip
        """`in_order` are reads that are issued ahead; `between` are those issued when they are needed."""
        self._sources, self._host_bytes = dict(sources), host_bytes
        self._kept = max(map(self._nbytes, between), default=0)
        each = {tuple(wanted): self._nbytes(wanted) for wanted in in_order}
        most = max(each, key=each.__getitem__, default=())
        self._needed = self._kept + each.get(most, 0)
        if self._needed > host_bytes:
            self._refuse(self._needed, most)
        self._lock = threading.RLock()
        self._buffers: list[np.ndarray] = []
        self._pool: PinnedPool | None = None

    def _refuse(self, needed: int, most: Sequence[Wanted]) -> None:
        paths = list(dict.fromkeys(self._sources[x.value].leaf.path for x in most))
        raise OptionError(message(
            WHO, f"what one part of the step reads of parameters is {needed} bytes in this process "
            f"({first_of(paths)}), and host_bytes={self._host_bytes} of Memory(params=)",
            "Between the disk and the devices it is in the host's memory, all of it.",
            f"Use NVMe(host_bytes={2 * needed}) ({readable_bytes(2 * needed)}): then one part is read while "
            f"another is copied. {needed} is the least."))  # fmt: skip

    def _nbytes(self, wanted: Iterable[Wanted]) -> int:
        return sum(self._sources[x.value].nbytes(x.at) for x in wanted)

    @contextlib.contextmanager
    def run(self, leaves: Mapping[Value, FileStorage]) -> Iterator[FileReader]:
        """One run, of these leaves; others wait for it."""
        with self._lock:
            # A signal's handler that runs a step meanwhile gets memory of its own.
            pool, buffers, self._pool = self._pool, self._buffers, None
            if pool is None:
                buffers = self._made_buffers(leaves)
                left = self._host_bytes - sum(buffer.nbytes for buffer in buffers)
                pool = PinnedPool(left)
            with JobThreads(buffers) as readers:
                run = FileReader(self._sources, leaves, pool, self._kept, readers)
                yield run
                run.end()
            # After an error nobody knows what is still copied from its memory.
            self._pool, self._buffers = pool, buffers

    def _made_buffers(self, leaves: Mapping[Value, FileStorage]) -> list[np.ndarray]:
        each = max(PAGE, *(leaf.buffer_bytes for leaf in leaves.values()))
        if self._needed + each > self._host_bytes:
            self._refuse(self._needed + each, [Wanted(value, None) for value in leaves])
        # Of what is left, half is for reading ahead.
        num = min(_THREADS, (self._host_bytes - self._needed) // (2 * each))
        return [pages(each) for _ in range(max(num, 1))]


class _Arriving(NamedTuple):
    """A slice, or a leaf, that is being read into pinned memory."""

    wanted: Wanted
    buffer: PinnedBuffer
    asked: Asked


class FileReader:
    """The reads of one run of a segment."""

    def __init__(
        self,
        sources: Mapping[Value, FileSource],
        leaves: Mapping[Value, FileStorage],
        pool: PinnedPool,
        kept: int,
        readers: JobThreads,
    ):
        self._sources, self._leaves, self._pool, self._kept = sources, leaves, pool, kept
        self._readers = readers
        self._arriving: dict[Wanted, collections.deque[_Arriving]] = {}
        # Buffers, and the arrays that are copied from them to the devices, in order.
        self._leaving: collections.deque[tuple[PinnedBuffer, Any]] = collections.deque()

    def ahead(self, slots: Iterable[StreamSlot | None]) -> Iterator[StreamSlot | None]:
        """The slots, each after its reads are issued; later ones, up to None, are read as memory allows."""
        source, more = iter(slots), True
        pulled: collections.deque[StreamSlot | None] = collections.deque()
        begun = 0  # of those that were pulled
        while True:
            self._freed()
            while more and begun == len(pulled):
                slot = next(source, _END)
                if slot is _END:
                    more = False
                    break
                pulled.append(slot)
                more = slot is not None
                begun += slot is None or self._begin(slot.reads)
            if not pulled:
                return
            slot = pulled.popleft()
            if slot is None:
                more = True
                begun = 0
                yield None
                continue
            if not begun:
                self._begin(slot.reads, waits=True)
            begun = max(begun - 1, 0)
            yield slot._replace(fetch=functools.partial(self._fetch, slot))

    def _fetch(self, slot: StreamSlot) -> Any:
        self._freed()
        return slot.fetch()

    def _begin(self, reads: Sequence[Wanted], waits: bool = False) -> bool:
        buffers: list[PinnedBuffer] = []
        for wanted in reads:
            buffer = self._room(wanted, self._kept, waits)
            if buffer is None:
                for other in buffers:
                    self._pool.give(other)
                return False
            buffers.append(buffer)
        for wanted, buffer in zip(reads, buffers, strict=True):
            arriving = self._asked(wanted, buffer)
            self._arriving.setdefault(wanted, collections.deque()).append(arriving)
        return True

    def _room(self, wanted: Wanted, kept: int, waits: bool) -> PinnedBuffer | None:
        source, at = self._sources[wanted.value], wanted.at
        shape, place = source.shape(at), source.place(at)
        while (buffer := self._pool.take(shape, source.leaf.dtype, place, kept)) is None and waits:
            assert self._leaving, "what arrives is in the way of what is needed"
            self._freed(waits=True)
        return buffer

    def _freed(self, waits: bool = False) -> None:
        """Takes back buffers that were copied to the devices; with `waits`, at least the first."""
        while self._leaving and (waits or self._leaving[0][1].is_ready()):
            buffer, array = self._leaving.popleft()
            jax.block_until_ready(array)
            self._pool.give(buffer)
            waits = False

    def end(self) -> None:
        assert not any(self._arriving.values()), "what was read is fetched"
        while self._leaving:
            self._freed(waits=True)

    def _asked(self, wanted: Wanted, buffer: PinnedBuffer) -> _Arriving:
        return _Arriving(wanted, buffer, self._readers.ask([*self._jobs(wanted, buffer)]))

    def _jobs(self, wanted: Wanted, buffer: PinnedBuffer) -> Iterator[Job]:
        leaf = self._leaves[wanted.value]
        boxes = leaf.placement.sharding.addressable_devices_indices_map(leaf.shape)
        files = {
            str(boxes[device]): k for k, device in reversed([*enumerate(leaf.placement.devices)])
        }
        alike: dict[int, list[np.ndarray]] = {}
        for device, view in buffer.views.items():
            out = view.reshape(-1).view(np.uint8)
            alike.setdefault(files[str(boxes[device])], []).append(out)
        for file, outs in alike.items():
            size = len(outs[0])
            first = 0 if wanted.at is None else wanted.at * size
            for start, stop in leaf.pieces(file, first, first + size, _PIECE):
                parts = [out[start - first : stop - first] for out in outs]
                yield functools.partial(_read, leaf, file, start, parts)

    def fetched(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Copies slices or leaves to the devices; what was not read ahead is read now."""
        arriving = [self._known(each) for each in wanted]
        for each in arriving:
            self._readers.wait(each.asked)
            # Raises if a step has consumed it meanwhile: the files may have another one.
            assert self._leaves[each.wanted.value].store
            self._sources[each.wanted.value].zero_padding(each.buffer, each.wanted.at)
        buffers = [each.buffer for each in arriving]
        places = [buffer.array.sharding.with_memory_kind(DEVICE) for buffer in buffers]
        arrays = jax.device_put([buffer.array for buffer in buffers], places)
        self._leaving.extend(zip(buffers, arrays, strict=True))
        return list(arrays)

    def _known(self, wanted: Wanted) -> _Arriving:
        if waiting := self._arriving.get(wanted):
            return waiting.popleft()
        buffer = self._room(wanted, 0, waits=True)
        assert buffer is not None
        return self._asked(wanted, buffer)


_END: Any = object()


def _read(
    leaf: FileStorage, file: int, start: int, outs: Sequence[np.ndarray], buffer: np.ndarray
) -> None:
    """Reads a piece of one device's part, and copies it to those that hold the same."""
    leaf.read_range(outs[0], file, start, buffer)
    for other in outs[1:]:
        np.copyto(other, outs[0])
