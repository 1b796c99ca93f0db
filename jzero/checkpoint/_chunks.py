# SPDX-License-Identifier: Apache-2.0
"""The chunks that a leaf is cut into on disk, and boxes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[slice, ...]

# A reader decodes whole chunks, also for a small part of one; so other layouts waste little.
MAX_BYTES = 16 * 2**20
# Smaller ones cost more to find than to read.
MIN_BYTES = 2**20


def chunk_shape(shape: Sequence[int], shard_shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunks of 1 to 16 MiB, or of a whole shard that is smaller; of whole rows, if possible.

    No chunk has parts of two shards, but where a shard has a large prime size in its only dim. `shard_shape`
    is each device's part, padding included; it is smaller than `shape` in the dims that are sharded.
    """
    shard = [max(size, 1) for size in shard_shape]
    sharded = [part < size for part, size in zip(shard_shape, shape, strict=True)]
    least = min(MIN_BYTES, math.prod(shard) * itemsize)
    large = (
        found
        for found in _aligned(shard, sharded, itemsize)
        if math.prod(found) * itemsize >= least
    )
    return next(large, None) or next(_aligned(shard, [False] * len(shard), itemsize))


def cut(box: Box, chunks: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """A part of a leaf in boxes of at most `limit` bytes, or one chunk, which end where chunks do."""
    sizes = [side.stop - side.start for side in box]
    if math.prod(sizes) * itemsize <= limit or not box:
        yield box
        return
    (first, *others), row = box, math.prod(sizes[1:]) * itemsize
    rows = max(limit // row // chunks[0], 1) * chunks[0]
    # One by one: a damaged description may claim any number of them.
    within = range((first.start // rows + 1) * rows, first.stop, rows)
    for start, stop in itertools.pairwise(itertools.chain([first.start], within, [first.stop])):
        for rest in cut(tuple(others), chunks[1:], (stop - start) * itemsize, limit):
            yield slice(start, stop), *rest


def parts_of_chunks(box: Box, shape: Sequence[int], chunks: Sequence[int]) -> list[Box]:
    """The boxes in a part of a leaf that are not whole chunks."""

    def has_all(side: slice, size: int, chunk: int) -> bool:
        return side.start % chunk == 0 and (side.stop % chunk == 0 or side.stop == size)

    def is_aligned(piece: Box) -> bool:
        return all(map(has_all, piece, shape, chunks))

    return [] if is_aligned(box) else [x for x in cut(box, chunks, 1, 1) if not is_aligned(x)]


def _aligned(
    shard: Sequence[int], sharded: Sequence[bool], itemsize: int
) -> Iterator[tuple[int, ...]]:
    """Shapes of at most 16 MiB, cut along the first dims; sharded dims into equal parts."""
    if not shard:
        yield ()
        return
    size, rest = shard[0], math.prod(shard[1:]) * itemsize
    if size * rest <= MAX_BYTES:
        yield tuple(shard)
        return
    sizes = [_cut(size, MAX_BYTES // rest, sharded[0])] if rest <= MAX_BYTES else []
    for own in dict.fromkeys([*sizes, 1, size]):
        if own * itemsize <= MAX_BYTES:
            for others in _aligned(shard[1:], sharded[1:], itemsize * own):
                yield own, *others


def _cut(size: int, most: int, must_divide: bool) -> int:
    """The largest part of a dim of at most `most`; all are equal, or all but the last."""
    if must_divide:
        small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
        return max(n for n in (*small, *(size // n for n in small)) if n <= most)
    return math.ceil(size / math.ceil(size / most))
