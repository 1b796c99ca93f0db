# SPDX-License-Identifier: Apache-2.0
"""Data iterators that other numbers of processes continue, example by example; each process is simulated."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest
from absl import flags

import jzero
from jzero.checkpoint import _grain, _iterators

NUM_EXAMPLES = 240
SMALL = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
# The iterator of a process of several, whose batches have so many examples.
Maker = Callable[[int, int, int], Any]


def order(num_epochs: int | None = None) -> Any:
    return grain.MapDataset.range(NUM_EXAMPLES).seed(3).shuffle().repeat(num_epochs)


def batched_after(index, count, size):
    own = order()[index::count].random_map(lambda x, rng: x)
    return iter(own.to_iter_dataset(SMALL).map(abs).batch(size))


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


def save(iterators: list[Any]) -> list[_iterators.SavedIterator]:
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
# What has batches before it is an iterator begins where batches do.
ANYWHERE = [batched_after, prefetched, mixed, loaded, elastic, Sharded]


@pytest.mark.parametrize("make", [*ANYWHERE, batched_before, repeated_after])
def test_the_global_order_goes_on(make):
    check(make, SAME_BATCH)


@pytest.mark.parametrize("make", ANYWHERE)
def test_the_global_batch_may_be_another(make):
    """Where it begins, the first example may be another process's than the first one's."""
    check(make, OTHER_BATCH, ordered=False)


# -- what is refused ---------------------------------------------------------------------------------


def shuffled_shards(index, count, size):
    return iter(order()[index::count].shuffle(seed=1).batch(size).to_iter_dataset(SMALL))


def whole(index, count, size):
    return iter(order().batch(size).to_iter_dataset(SMALL))


def filtered_before(index, count, size):
    dataset = order().filter(lambda x: x % 2 == 0)[index::count]
    return iter(dataset.to_iter_dataset(SMALL).batch(size))


def filtered_after(index, count, size):
    dataset = order()[index::count].to_iter_dataset(SMALL)
    return iter(dataset.filter(lambda x: x % 2 == 0).batch(size))


def read_by_workers(index, count, size):
    dataset = order()[index::count].to_iter_dataset(SMALL).batch(size)
    return iter(dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=1)))


def uneven_epochs(index, count, size):
    dataset = grain.MapDataset.range(NUM_EXAMPLES + 1)[index::count].repeat()
    return iter(dataset.batch(size).to_iter_dataset(SMALL))


def uneven_batches(index, count, size):
    dataset = grain.MapDataset.range(NUM_EXAMPLES)[index::count].batch(7 * size).repeat()
    return iter(dataset.to_iter_dataset(SMALL))


def sharded_sampler(index, count, size):
    shard = grain.sharding.ShardOptions(index, count)
    return iter(
        grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, NUM_EXAMPLES, 1),
            sampler=grain.samplers.IndexSampler(NUM_EXAMPLES, shard, shuffle=True, seed=5),
            operations=[grain.transforms.Batch(size)],
        )
    )


class Wrapped:
    """Of Grain's, and what says so is hidden."""

    def __init__(self, index, count, size):
        self.iterator = batched_before(index, count, size)
        self.get_state, self.set_state = self.iterator.get_state, self.iterator.set_state

    def __next__(self):
        return next(self.iterator)


class WrappedBytes(Wrapped):
    def __init__(self, index, count, size):
        super().__init__(index, count, size)
        self.get_state = lambda: json.dumps(self.iterator.get_state()).encode()
        self.set_state = lambda state: self.iterator.set_state(json.loads(state))


REFUSED = {
    shuffled_shards: r"no slice \[index::count\] follows their ShuffleMapDataset",
    whole: r"no slice \[index::count\] follows their ShuffleMapDataset",

    filtered_before: "its pipeline has FilterMapDataset, after which shards are not equally long",
    filtered_after: "its pipeline has FilterDatasetIterator",

    uneven_epochs: r"repeat\(\) follows the slice of 241 examples into 2 shards",
    uneven_batches: r"its epochs end in the middle of a batch, before repeat\(\)",
    sharded_sampler: "its sampler is no IndexSampler over all examples; pass shard_options to the DataLoader",
    Wrapped: "{'next_index': 1} is a position in one shard; it has no 'global_next_index'",
    WrappedBytes: "is a position in one shard; it has no 'global_next_index'",
}  # fmt: skip


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_has_no_global_position(make):
    """It goes on where it was on as many processes, and is refused on others, before anything is set."""
    iterators = start(make, 4, 2)
    for iterator in iterators:
        next(iterator)
    saved = save(iterators)
    again = start(make, 4, 2, saved)
    expected = [next(iterator).tolist() for iterator in iterators]
    assert [next(iterator).tolist() for iterator in again] == expected
    for iterator in start(make, 2, 2):
        before = iterator.get_state()
        with pytest.raises(jzero.CheckpointError, match=REFUSED[make]) as refused:
            _iterators.moving(iterator, saved, "step 1", 0, 2)
        assert "data iterators cannot go on from 4 to 2 processes: " in str(refused.value)
        assert iterator.get_state() == before


def refusal(
    make: Maker, saved: list[_iterators.SavedIterator], index: int, count: int, size: int
) -> str:
    with pytest.raises(jzero.CheckpointError) as refused:
        _iterators.moving(make(index, count, size), saved, "step 1", index, count)
    return str(refused.value)


def test_workers_are_refused():
    """Each takes batches of its own from the examples of a shard."""
    flags.FLAGS.mark_as_parsed()  # as app.run does
    iterators = start(batched_after, 4, 2)
    assert "its pipeline has InterleaveDatasetIterator" in refusal(
        read_by_workers, save(iterators), 0, 2, 2
    )
    saved = save(start(read_by_workers, 4, 2))
    told = refusal(batched_after, saved, 0, 2, 2)
    assert (
        "they had no global position in the data: its pipeline has InterleaveDatasetIterator"
        in told
    )


def test_what_is_not_known_of_grain():
    """It fails no save, and is refused where the place would be needed."""

    class Lost(grain.MapDataset):
        def __len__(self):
            if broken:
                raise RuntimeError("the files are gone")
            return NUM_EXAMPLES

        def __getitem__(self, index):
            return self.slice(index) if isinstance(index, slice) else index

    broken = False
    iterators = [iter(Lost()[i::2].to_iter_dataset(SMALL).batch(2)) for i in range(2)]
    broken = True
    saved = save(iterators)
    broken = False
    told = refusal(batched_after, saved, 0, 1, 4)
    assert "its pipeline is not known: RuntimeError: the files are gone" in told
    loader = _grain.DataShard(0, 1, "", 1, 9)
    with pytest.raises(_grain.Unknown, match="its state is not known: "):
        loader.place(b'{"version": 3}')
    with pytest.raises(_grain.Unknown, match="its DataLoader has 2 workers"):
        loader.place(b'{"worker_count": 2, "last_seen_indices": {"0": 1, "1": 2}}')
    with pytest.raises(_grain.Unknown, match="its state is {'epoch': 1}"):
        loader.place({"epoch": 1})


def test_batches_of_a_map_dataset_begin_where_batches_do():
    """The examples are whole batches then; made after `to_iter_dataset()` they can begin anywhere."""
    iterators = start(batched_before, 8, 3)
    step(iterators)
    assert "24 examples are consumed: with global batches of 15" in refusal(
        batched_before, save(iterators), 0, 5, 3
    )
    assert "it would repeat 9 or skip 6" in refusal(batched_before, save(iterators), 4, 5, 3)
    again = start(batched_after, 5, 3, save(iterators))
    assert sorted(step(again)) == sorted(step(iterators)[:15])


def test_other_data():
    def other(index, count, size):
        dataset = grain.MapDataset.range(NUM_EXAMPLES).seed(4).shuffle().repeat()
        return iter(dataset[index::count].to_iter_dataset(SMALL).batch(size))

    told = refusal(other, save(start(batched_after, 4, 2)), 0, 2, 2)
    assert "the data were ShuffleMapDataset of 240, seed=" in told
    assert " and are ShuffleMapDataset of 240, seed=" in told
    told = refusal(mixed, save(start(batched_after, 4, 2)), 0, 2, 2)
    assert " and are MixedMapDataset" in told


def test_shards_in_different_places():
    iterators = start(batched_after, 4, 2)
    next(iterators[2])
    told = refusal(batched_after, save(iterators), 0, 2, 2)
    assert "their shards are at different positions: the next examples are [0, 1, 10, 3]" in told
    twins = [batched_after(index % 2, 2, 2) for index in range(4)]
    next(twins[3])
    told = refusal(batched_after, save(twins), 0, 8, 2)
    assert "their shards are at different positions" in told


def test_shards_that_nobody_read():
    iterators = [batched_after(index, 8, 2) for index in range(3)]
    told = refusal(batched_after, save(iterators), 0, 2, 2)
    assert "only the shards [0, 1, 2] of 8 were read" in told


def test_processes_that_read_the_same_shard():
    """Of a model that is split over processes: four shards in eight, then in six three."""
    iterators = [batched_after(index // 2, 4, 3) for index in range(8)]
    step(iterators)
    again = [batched_after(index // 2, 3, 4) for index in range(6)]
    for index, iterator in enumerate(again):
        _iterators.moving(iterator, save(iterators), "step 1", index, 6)()
    expected = step(iterators[::2])
    assert step(again[::2]) == expected
    assert step(again[1::2]) == expected


def test_as_many_processes_with_other_shards():
    """Each gets the state of its shard, not of its number."""
    iterators = start(batched_after, 3, 2)
    step(iterators)
    saved = save(iterators)[::-1]
    again = start(batched_after, 3, 2, saved)
    assert step(again) == step(iterators)


def test_as_many_processes_with_other_batches():
    """Grain counts batches here: its state says another place then, or none."""
    iterators = start(batched_before, 4, 2)
    for _ in range(3):
        step(iterators)
    again = start(batched_before, 4, 3, save(iterators))
    assert step(again) == [*step(iterators), *step(iterators)][:12]
    assert "it would repeat 4 or skip 8" in refusal(batched_before, save(iterators), 0, 4, 3)


@pytest.mark.parametrize("unlike", [0, 29])
def test_other_data_behind_much(unlike):
    """The words are cut, and what is cut off is compared all the same."""

    def many(other):
        def make(index, count, size):
            each = [
                grain.MapDataset.range(50).shuffle(seed=i + 100 * (i == other)) for i in range(30)
            ]
            return iter(grain.MapDataset.mix(each)[index::count].to_iter_dataset(SMALL).batch(size))

        return make

    saved = save(start(many(None), 4, 2))
    assert all(len(repr(each.place)) < 400 for each in saved)
    assert step(start(many(None), 2, 4, saved)) == step(start(many(None), 4, 2))
    assert "the data were MixedMapDataset" in refusal(many(unlike), saved, 0, 2, 4)


def test_the_end_of_the_data():
    """A DataLoader of six has 240 of 241 examples, one alone all of them."""

    def to_the_end(index, count, size):
        return iter(
            grain.DataLoader(
                data_source=grain.sources.RangeDataSource(0, NUM_EXAMPLES + 1, 1),
                sampler=grain.samplers.IndexSampler(NUM_EXAMPLES + 1, num_epochs=1),
                operations=[grain.transforms.Batch(size)],
                shard_options=grain.sharding.ShardOptions(index, count),
            )
        )

    alone = start(to_the_end, 1, NUM_EXAMPLES + 1)
    step(alone)
    for iterator in start(to_the_end, 6, 4, save(alone)):
        assert next(iterator, None) is None


def test_states_that_differ():
    class Place:
        def get_state(self):
            return {"step": 3}

        def set_state(self, state):
            self.state = state

    saved = [_iterators.SavedIterator({"step": step}, None) for step in (3, 3, 4)]
    told = refusal(lambda *_: Place(), saved, 0, 2, 2)
    assert "process 0 saved {'step': 3}, process 2 {'step': 4}" in told
    place = Place()
    _iterators.moving(place, saved[:2], "step 1", 0, 3)()
    assert place.state == {"step": 3}


def test_saved_before_places_were():
    """By an earlier jzero: as then on as many processes, refused on others where Grain's count a shard."""
    iterators = start(batched_after, 4, 2)
    step(iterators)
    saved = [_iterators.decoded({"json": each.get_state()}) for each in iterators]
    assert step(start(batched_after, 4, 2, saved)) == step(iterators)
    assert "they had no global position in the data: none was saved" in refusal(
        batched_after, saved, 0, 2, 4
    )
    iterators = start(elastic, 4, 2)
    step(iterators)
    saved = [_iterators.decoded({"json": each.get_state()}) for each in iterators]
    assert step(start(elastic, 2, 4, saved)) == step(iterators)
