# SPDX-License-Identifier: Apache-2.0
"""Data iterators that other numbers of processes continue: simulated processes, and the examples they return."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest

import jzero
from jzero.checkpoint import _iterators

pytestmark = pytest.mark.one_release

NUM_EXAMPLES = 240
SMALL = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
# The iterator of a process of several, whose batches have so many examples.
Maker = Callable[[int, int, int], Any]


def order(num_epochs: int | None = None) -> Any:
    return grain.MapDataset.range(NUM_EXAMPLES).seed(3).shuffle().repeat(num_epochs)


def batched_after(index, count, size):
    return iter(order()[index::count].to_iter_dataset(SMALL).map(abs).batch(size))


def batched_before(index, count, size):
    return iter(order()[index::count].map(abs).batch(size).to_iter_dataset(SMALL))


def repeated_after(index, count, size):
    dataset = grain.MapDataset.range(NUM_EXAMPLES).seed(3).shuffle()
    return iter(dataset[index::count].repeat().batch(size).to_iter_dataset(SMALL))


def prefetched(index, count, size):
    return iter(
        grain.experimental.ThreadPrefetchIterDataset(
            order()[index::count].to_iter_dataset(SMALL).batch(size), prefetch_buffer_size=3
        )
    )


def mixed(index, count, size):
    dataset = grain.MapDataset.mix([order(), grain.MapDataset.range(-7, 0).repeat()], [0.7, 0.3])
    return iter(dataset[index::count].to_iter_dataset(SMALL).batch(size))


def loaded(index, count, size):
    return iter(
        grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, NUM_EXAMPLES, 1),
            sampler=grain.samplers.IndexSampler(NUM_EXAMPLES, shuffle=True, seed=5),
            operations=[grain.transforms.Batch(size)],
            read_options=SMALL,
            shard_options=grain.sharding.ShardOptions(index, count),
        )
    )


def elastic(index, count, size):
    shard = grain.sharding.ShardOptions(index, count)
    return iter(
        grain.experimental.ElasticIterator(order(), size * count, shard, read_options=SMALL)
    )


class Sharded:
    """No iterator of Grain's, whose state is JSON with its shard and a global position."""

    def __init__(self, index, count, size):
        self.index, self.count, self.size, self.position = index, count, size, 0

    def __next__(self):
        first = self.position + self.index
        self.position += self.count * self.size
        return np.arange(first, self.position, self.count)

    def get_state(self):
        return {
            "shard_index": self.index, "shard_count": self.count, "global_next_index": self.position,
        }  # fmt: skip

    def set_state(self, state):
        assert [state["shard_index"], state["shard_count"]] == [self.index, self.count]
        self.position = state["global_next_index"]


def start(make: Maker, count: int, size: int, saved: Any = None) -> list[Any]:
    """The iterators of so many processes, set to where others stood, if any did."""
    iterators = [make(index, count, size) for index in range(count)]
    if saved is not None:
        moves = [
            _iterators.moving(iterator, saved, "step 1", index, count)
            for index, iterator in enumerate(iterators)
        ]
        for move in moves:
            move()
    return iterators


def save(iterators: list[Any]) -> list[_iterators.Saved]:
    """As a checkpoint has it."""
    text = json.dumps([_iterators.state(iterator) for iterator in iterators])
    return [_iterators.decoded(each) for each in json.loads(text)]


def step(iterators: list[Any]) -> list[int]:
    """The examples of a global batch, in the order in which one process would have them."""
    batches = [next(iterator) for iterator in iterators]
    return [int(x) for each in zip(*batches, strict=True) for x in each]


def read(make: Maker, runs: list[tuple[int, int, int]]) -> list[list[int]]:
    """The global batches of trainings that continue each other: each of (processes, batch, steps)."""
    found, saved = [], None
    for count, size, num_steps in runs:
        iterators = start(make, count, size, saved)
        found += [step(iterators) for _ in range(num_steps)]
        saved = save(iterators)
    return found


def check(make: Maker, runs: list[tuple[int, int, int]], ordered: bool = True) -> None:
    """That they are what one process reads that is never interrupted."""
    found = read(make, runs)
    alone = start(make, 1, 3)
    wanted = iter([x for _ in range(sum(map(len, found)) // 3) for x in step(alone)])
    for batch in found:
        expected = list(itertools.islice(wanted, len(batch)))
        assert batch == expected if ordered else sorted(batch) == sorted(expected)


# The global batch stays 24; from the middle of an epoch of 240 over its end.
SAME_BATCH = [(8, 3, 3), (6, 4, 2), (4, 6, 7), (3, 8, 1), (1, 24, 5), (12, 2, 6), (8, 3, 2)]
# Each process keeps its batch.
OTHER_BATCH = [
    (8, 3, 3),
    (6, 3, 2),
    (4, 3, 7),
    (3, 3, 11),
    (1, 3, 5),
    (7, 3, 6),
    (12, 3, 4),
    (8, 3, 9),
]


MAKERS = [
    batched_after,
    batched_before,
    repeated_after,
    prefetched,
    mixed,
    loaded,
    elastic,
    Sharded,
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_global_order_goes_on(make):
    check(make, SAME_BATCH)


@pytest.mark.parametrize("make", [batched_after, prefetched, mixed, loaded, elastic, Sharded])
def test_the_global_batch_may_be_another(make):
    """Where it begins, the first example may be another process's than the first one's."""
    check(make, OTHER_BATCH, ordered=False)
