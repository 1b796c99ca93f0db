# SPDX-License-Identifier: Apache-2.0
"""`NVMeArray`: a leaf at rest in files, one for each device of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jzero._errors import CONSUMED, StateError, message
from jzero.offload.memory._away_array import AwayArray, Home, Parts, sizes_of
from jzero.offload.memory._nvme_store import NVMeStore, StoreSpec, TileReader


class NVMeArray(AwayArray):
    """A leaf of a state that rests in files of the devices' host: with `offload=jzero.NVMe(path)`.

    Whoever reads it or computes with it sees a `jax.Array` of its true shape, as of a `jzero.HostArray`: each
    use reads it from the files, device by device, and nothing keeps what was read. A pickled or deep copy of
    it is a NumPy array. It is there until the step after it, and its files are closed when no leaf is left
    that rests in them.

    >>> import tempfile, jax, jax.numpy as jnp, jzero
    >>> def step_fn(state, batch):
    ...     grad = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    ...     m = 0.9 * state["m"] + grad
    ...     return {"w": state["w"] - 0.1 * m, "m": m}
    >>> folder = tempfile.TemporaryDirectory()
    >>> train_step = jzero.shard_train_step(step_fn, offload=jzero.NVMe(folder.name))
    >>> state = {"w": jnp.ones((257, 3)), "m": jnp.zeros((257, 3))}
    >>> state = train_step(state, jnp.ones((8, 257)))
    >>> state["m"]
    NVMeArray(shape=(257, 3), dtype=float32, padded to (264, 3))
    >>> state["m"][0]
    Array([0.33333334, 0.33333334, 0.33333334], dtype=float32)

    Attributes:
      home: which parts of it this process has, and in which shape.
    """

    def __init__(self, home: Home, store: NVMeStore, name: str):
        """A leaf of the step that the files are about to have, or have.

        Args:
          home: which parts of it are there.
          store: the files.
          name: its name there.
        """
        self.home = home
        self._store: NVMeStore | None = store
        self._name, self._step = name, store.newest

    @property
    def store(self) -> NVMeStore:
        """The files that it is in.

        Raises:
          StateError: a step has consumed it.
        """
        if self._store is None or self._store.newest != self._step:
            raise StateError(message(
                "NVMeArray", f"{self!r} was already donated", *CONSUMED))  # fmt: skip
        return self._store

    @property
    def place(self) -> Any:
        """Which parts of it are there, and where in the files."""
        return self.home, None if self._store is None else self._store.spec.layouts

    def renewed(self) -> NVMeArray:
        """The same leaf after a step; this one is then deleted."""
        assert self._store is not None
        renewed = NVMeArray(self.home, self._store, self._name)
        self.delete()
        return renewed

    def delete(self) -> None:
        """Lets go of its files."""
        self._store = None

    def is_deleted(self) -> bool:
        """Whether a step has consumed it."""
        return self._store is None or self._store.newest != self._step

    def parts(self) -> Parts:
        """The parts that this process has, each once; each use of one reads it.

        Raises:
          StateError: a step has consumed it.
        """
        return self.parts_by(self.store.files)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for `read_range`.

        Raises:
          StateError: a step has consumed it.
        """
        return self.store.buffer_bytes(self._name)

    def pieces(self, file: int, start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Parts of about `nbytes` of bytes `start` to `stop` of a device's part, each read by itself."""
        first, last = start, start
        for place in self.store.spec.places(file, self._name, start, stop):
            end = min(stop, place.extent.start + place.extent.nbytes)
            if end - first > nbytes and last > first:
                yield first, last
                first = last
            last = end
        if last > first:
            yield first, last

    def read_range(
        self, out: np.ndarray, file: int, start: int, buffer: np.ndarray | None = None
    ) -> None:
        """Reads some bytes of one device's part, in C order, padding included; by any thread.

        Args:
          out: uint8[n], writable: what bytes `start` to `start + n` of the part go to.
          file: whose part, by its place in `home.devices`.
          start: the first byte.
          buffer: uint8[m] that starts on a page of 4096 bytes, m at least `buffer_bytes`, of this call alone
            while it lasts; memory of its own by default.

        Raises:
          StateError: a step has consumed it, or the disk fails, or has not what was written.
        """
        store = self.store
        store.read_range(out, file, self._name, start, store.files, buffer)

    def parts_by(self, reader: TileReader) -> Parts:
        """The same, read by whoever has pinned this step."""
        store, boxes = self.store, self.home.boxes()
        found = {
            box: NVMePart(store, file, self._name, tuple(sizes_of(box)), self.dtype, reader)
            for file, box in reversed([*enumerate(boxes)])
        }
        return [(box, found[box]) for box in dict.fromkeys(boxes)]


class NVMePart:
    """One device's part of a leaf: an array, as NumPy reads it.

    Attributes:
      shape: its shape.
      dtype: its dtype.
    """

    def __init__(
        self, store: NVMeStore, file: int, name: str, shape: tuple[int, ...], dtype: np.dtype,
        reader: TileReader,
    ):  # fmt: skip
        self._store, self._file, self._name, self._reader = store, file, name, reader
        self.shape, self.dtype = shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads it."""
        values = np.empty(self.shape, self.dtype)
        out = values.reshape(-1).view(np.uint8)
        if len(out):
            self._store.read_range(out, self._file, self._name, 0, self._reader)
        return values if dtype is None else values.astype(dtype, copy=False)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads some of it: the rows that it is in."""
        if not index:
            return np.asarray(self)
        rows, others = index[0], index[1:]
        values = np.empty((rows.stop - rows.start, *self.shape[1:]), self.dtype)
        out = values.reshape(-1).view(np.uint8)
        if len(out):
            start = rows.start * (len(out) // len(values))
            self._store.read_range(out, self._file, self._name, start, self._reader)
        return values[(slice(None), *others)]


def rests_in_files(x: Any, home: Home | None, spec: StoreSpec | None) -> bool:
    """Whether a leaf is in files of this kind already; of any kind, if it is None."""
    if not isinstance(x, NVMeArray):
        return False
    return x.home == home if spec is None else x.place == (home, spec.layouts)
