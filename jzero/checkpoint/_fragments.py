# SPDX-License-Identifier: Apache-2.0
"""Chunks of which several processes have parts: each leaves its part in a file, and one writes them together.

Two processes cannot write parts of one chunk. There are such chunks only where no chunk of a decent size
divides a shard: a vector whose shards have a large prime size.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import tensorstore

from jzero.checkpoint import _ocdbt

Part: TypeAlias = tuple[tuple[slice, ...], np.ndarray]

FOLDER = "fragments"


class Fragments:
    """Parts of chunks, in files beside the leaves, until all of them are there."""

    def __init__(self) -> None:
        # Of each leaf: the array on disk, for tensorstore, and what Orbax says of it.
        self._leaves: dict[str, tuple[dict[str, Any], Any]] = {}
        self._numbers = itertools.count()

    def split_off(self, spec: dict[str, Any], info: Any, parts: Sequence[Part]) -> Iterator[Part]:
        """What this process can write of its parts of a leaf, and leaves the rest in files.

        It can write all of a chunk of which no other process has a part.
        """
        if jax.process_count() == 1:  # Its transaction puts parts of a chunk together.
            yield from parts
            return
        self._leaves[info.name] = spec, info
        chunks = spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"]
        for index, data in parts:
            inside, rest = _split(index, data, spec["metadata"]["shape"], chunks)
            for part in rest:
                self._leave(Path(info.parent_dir, FOLDER), info.name, part)
            yield from inside

    def join(self, directory: Path) -> None:
        """Writes what all processes have left of the leaves in `directory`."""
        folder = directory / FOLDER
        if folder.exists():
            asyncio.run(self._join(folder))
            shutil.rmtree(folder)

    def _leave(self, folder: Path, name: str, part: Part) -> None:
        index, data = part
        folder.mkdir(exist_ok=True)
        path = folder / f"{jax.process_index()}-{next(self._numbers)}.npz"
        # As bytes: NumPy's format knows no dtypes but its own.
        values = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        np.savez(
            path, name=name, starts=[side.start for side in index], shape=data.shape, values=values
        )

    async def _join(self, folder: Path) -> None:
        async with _ocdbt.transaction() as transaction:
            for path in sorted(folder.iterdir()):
                with np.load(path) as file:
                    spec, info = self._leaves[str(file["name"])]
                    store = await tensorstore.open(
                        spec, open=True, assume_metadata=True, context=info.ts_context,
                        transaction=transaction,
                    )  # fmt: skip
                    data = file["values"].view(store.dtype.numpy_dtype).reshape(file["shape"])
                    starts = file["starts"]
                ends = zip(starts, data.shape, strict=True)
                await store[tuple(slice(start, start + n) for start, n in ends)].write(data)


def _split(
    index: Sequence[slice], data: np.ndarray, shape: Sequence[int], chunks: Sequence[int]
) -> tuple[list[Part], list[Part]]:
    """What is in whole chunks of a part of a leaf, and the rest."""
    cuts = [
        _cuts(part, size, chunk) for part, size, chunk in zip(index, shape, chunks, strict=True)
    ]
    inside: list[Part] = []
    rest: list[Part] = []
    for box in itertools.product(*cuts):
        to = tuple(slice(start, stop) for start, stop, _ in box)
        own = tuple(
            slice(a.start - b.start, a.stop - b.start) for a, b in zip(to, index, strict=True)
        )
        (inside if all(whole for *_, whole in box) else rest).append((to, data[own]))
    return inside, rest


def _cuts(part: slice, size: int, chunk: int) -> list[tuple[int, int, bool]]:
    """A part in one dim: before its whole chunks, these (True), and after them; none that is empty."""
    start, stop = part.start, part.stop
    first = min(-(-start // chunk) * chunk, stop)
    last = stop if stop == size else max(stop // chunk * chunk, first)
    pieces = [(start, first, False), (first, last, True), (last, stop, False)]
    return [piece for piece in pieces if piece[0] < piece[1]]
