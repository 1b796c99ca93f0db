# SPDX-License-Identifier: Apache-2.0
"""The position of one of Grain's iterators in the data of all processes, and back.

A pipeline whose shards are every `count`-th example of one global order (`ds[index::count]`, or a
`DataLoader` whose sampler is not sharded) has a global position: that before which all shards have returned
everything. Its datasets tell whether it is such a pipeline; what is not known here is refused by its class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

# These return as many elements as they take, in the same order, and have no state of their own.
_ELEMENTWISE = {
    "_MapDatasetIterator", "_BatchDatasetIterator", "ThreadPrefetchDatasetIterator",
    "_DataLoaderStateDatasetIterator",
}  # fmt: skip
_MAPS = {"MapMapDataset", "RandomMapMapDataset", "_WithSeedMapDataset"}
_SEEN, _FIRST_WORKER = "last_seen_indices", "0"  # of a DataLoader's state
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# Where a `DataShard` stood when it was saved: its index, count and data, and its next global index.
GrainPlace: TypeAlias = dict[str, Any]
FORM = {"index": int, "count": int, "data": str, "next": int}


class Unknown(Exception):
    """Why an iterator has no global position."""


@dataclasses.dataclass(frozen=True)
class DataShard:
    """The examples that an iterator returns of a global order: every `count`-th from `index` on."""

    index: int
    count: int
    data: str  # the datasets that decide the global order
    examples: int  # that Grain counts as one (a batch of a `MapDataset`)
    length: int  # how many times it counts one until the data end

    def place(self, state: Any) -> GrainPlace:
        if isinstance(state, bytes):
            following = int(_loader(state)[_FIRST_WORKER]) + self.count
        elif isinstance(state, dict) and state.keys() == {"next_index"}:
            following = self.index + int(state["next_index"]) * self.examples * self.count
        else:
            raise Unknown(f"its state is {state!r:.200}")
        return {"index": self.index, "count": self.count, "data": self.data, "next": following}

    def state_from(self, position: int, like: Any) -> Any:
        """The state, in the form of `like`, in which it returns its examples from a global index on."""
        step = self.examples * self.count
        if self.examples > 1 and (over := position % step):
            raise Unknown(
                f"{position} examples are consumed: with global batches of {step} that are made before "
                f"to_iter_dataset(), it would repeat {over} or skip {step - over}"
            )
        # Where shards are equally long, the last examples of the data may be of none.
        taken = min(-((self.index - position) // step), self.length)
        if isinstance(like, bytes):
            seen = _loader(like) | {_FIRST_WORKER: self.index + (taken - 1) * self.count}
            return json.dumps(json.loads(like) | {_SEEN: seen}).encode()
        return {"next_index": taken}


def position(places: list[GrainPlace], data: str) -> int:
    """The global index before which all shards have returned everything, and after it nothing."""
    count = places[0]["count"]
    check_sharded(count, places[0]["data"], len(places))
    for place in places:
        if place["data"] != data:
            raise Unknown(f"the data were {place['data']} and are {data}")
    ahead = {place["index"]: place["next"] for place in places}
    if any(place["count"] != count for place in places) or len(ahead) < count:
        raise Unknown(f"only the shards {sorted(ahead)} of {count} were read")
    first = min(ahead.values())
    alike = all(place["next"] == ahead[place["index"]] for place in places)
    if not alike or max(ahead.values()) >= first + count:
        raise Unknown(
            f"their shards are at different positions: the next examples are {[*ahead.values()]}"
        )
    return first


def check_sharded(count: int, data: str, processes: int) -> None:
    """Refuses several processes with all examples each, which need not be the same."""
    if count == 1 and processes > 1:
        raise Unknown(f"no slice [index::count] follows their {data.partition(' ')[0]}")


def is_grain(iterator: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "grain" for kind in type(iterator).__mro__)


def shard(iterator: Any) -> DataShard:
    try:
        loads = type(iterator).__name__ == "DataLoaderIterator"
        return _shard_of(_source(iterator._iterator if loads else iterator))
    except Unknown:
        raise
    # A renamed private attribute, or the user's error, must not fail a save.
    except Exception as error:
        raise Unknown(f"its pipeline is not known: {type(error).__name__}: {error}") from error


def _source(iterator: Any) -> Any:
    """The `MapDataset` of which an iterator returns every element."""
    while (name := type(iterator).__name__) != "PrefetchDatasetIterator":
        if name not in _ELEMENTWISE:
            raise Unknown(f"its pipeline has {name.lstrip('_')}")
        (iterator,) = iterator._parents
    return iterator._map_parent


def _shard_of(dataset: Any) -> DataShard:
    """For an iterator over a `MapDataset`: what follows the slice by shards must not change their order."""
    if type(dataset).__name__ == "_SamplerMapDataset":
        return _sampled(dataset)
    length, examples, repeats, data = len(dataset), 1, False, []
    while not (
        type(dataset).__name__ == "SliceMapDataset"
        and dataset._start < dataset._step
        and dataset._stop == len(dataset._parent)
    ):
        match type(dataset).__name__:
            case "BatchMapDataset":
                if repeats and len(dataset._parent) % dataset._batch_size:
                    raise Unknown("its epochs end in the middle of a batch, before repeat()")
                examples *= dataset._batch_size
            case "RepeatMapDataset":
                repeats = True
                data += _repeated(dataset)
            case name if name not in _MAPS:
                return DataShard(0, 1, _in_words([*data, *_described(dataset)]), examples, length)
        dataset = dataset._parent
    start, count, whole = dataset._start, dataset._step, dataset._parent
    if repeats and len(whole) % count:
        raise Unknown(f"repeat() follows the slice of {len(whole)} examples into {count} shards")
    return DataShard(start, count, _in_words([*data, *_described(whole)]), examples, length)


def _sampled(dataset: Any) -> DataShard:
    sampler, options = dataset._sampler, dataset._shard_options
    if type(sampler).__name__ != "IndexSampler" or sampler._shard_options.shard_count > 1:
        raise Unknown(
            "its sampler is no IndexSampler over all examples; pass shard_options to the DataLoader"
        )
    data = _in_words([repr(sampler), *_described(dataset._parent)])
    return DataShard(options.shard_index, options.shard_count, data, 1, len(dataset))


def _described(dataset: Any) -> Iterator[str]:
    """What decides the order of a dataset: a line for each of its datasets, but for `_MAPS`."""
    name = type(dataset).__name__
    if "Filter" in name or "FlatMap" in name:
        raise Unknown(f"its pipeline has {name}, after which shards are not equally long")
    if name == "RepeatMapDataset":
        yield from _repeated(dataset)
    elif name not in _MAPS:
        yield ", ".join([f"{name} of {len(dataset)}", *_settings(dataset)])
    for parent in getattr(dataset, "_parents", ()):
        yield from _described(parent)


def _in_words(lines: list[str]) -> str:
    """Short, as thousands of processes may have it in a checkpoint; a digest replaces what is cut off."""
    text = _ADDRESS.sub("", "; ".join(lines))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 200 else f"{text[:180]}... {digest}"


def _repeated(dataset: Any) -> list[str]:
    return [] if dataset._reseed_each_epoch else ["RepeatMapDataset: reseed_each_epoch=False"]


def _settings(dataset: Any) -> Iterator[str]:
    """A seed, a bound and the like, and what it reads; not what is cached, which may come later."""
    for key, value in sorted(vars(dataset).items()):
        if isinstance(getattr(type(dataset), key, None), functools.cached_property):
            continue
        if isinstance(value, bool | int | float | str):
            yield f"{key.strip('_')}={value}"
        elif key in ("_source", "_selection_map") and value is not None:
            in_memory = hasattr(value, "__array__") or isinstance(value, list | tuple)
            yield type(value).__name__ if in_memory else repr(value)


def _loader(state: bytes) -> dict[str, Any]:
    """The last global index that each worker of a DataLoader has seen, if its process is the only one."""
    try:
        found = json.loads(state)
        workers, seen = found["worker_count"], dict(found[_SEEN])
    except (ValueError, KeyError, TypeError) as error:
        raise Unknown(f"its state is not known: {error}") from error
    if workers != 0 or seen.keys() != {_FIRST_WORKER}:
        raise Unknown(f"its DataLoader has {workers} workers")
    return seen
