# SPDX-License-Identifier: Apache-2.0
"""The key-value store with a checkpoint's chunks: tensorstore's OCDBT.

Its base is, as tensorstore's JSON, a directory (`directory`), or one in a bucket (`Bucket.spec`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore

from jzero.checkpoint._chunks import Box

# Size of data files: a bucket takes each in one request, and until one is full it is in memory.
FILE_BYTES = 2**26
CACHE_BYTES = 10**8
_KEY = re.compile(r"(.*)/(?:zarr\.json|c(?:/\d+)*)", re.DOTALL)


@contextlib.asynccontextmanager
async def transaction() -> AsyncIterator[tensorstore.Transaction]:
    """Writes at once all that is written in it, or nothing."""
    # Its own context waits when it is left by an error, and sometimes for ever.
    made = tensorstore.Transaction(atomic=True)
    try:
        yield made
    except BaseException:
        made.abort()
        raise
    await made.commit_async()


def directory(path: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{path}/"}


def context(cache_bytes: int = CACHE_BYTES) -> tensorstore.Context:
    """Like Orbax's: as many files at a time, and a cache of so many bytes for nodes of the tree."""
    return tensorstore.Context({
        "file_io_concurrency": {"limit": 128}, "cache_pool#ocdbt": {"total_bytes_limit": cache_bytes},
    })  # fmt: skip


def part_of(process: int) -> str:
    """The directory of what a process writes, with the name that Orbax gives it."""
    return f"ocdbt.process_{process}"


async def merge(
    base: Mapping[str, Any],
    processes: Iterable[int],
    shared: Mapping[str, Sequence[tuple[int, Box]]],
) -> None:
    """Makes one store of those of processes; `shared` says who has which parts of a leaf's chunks."""
    one = context()  # It copies only between stores in one.
    parts = {i: {**base, "path": f"{base['path']}{part_of(i)}/"} for i in processes}
    whole = await tensorstore.KvStore.open(_store(base), context=one)
    async with transaction() as together:
        for part in parts.values():
            store = await tensorstore.KvStore.open(_store(part), context=one)
            await store.experimental_copy_range_to(whole.with_transaction(together))
    if not shared:
        return
    async with transaction() as together:  # What is copied would replace what the same one writes.
        for name, pieces in shared.items():
            spec = array_spec(base, name)
            into = await tensorstore.open(spec, open=True, context=one, transaction=together)
            metadata = into.spec().to_json()["metadata"]
            for i, box in pieces:
                piece = await tensorstore.open(
                    # A part that is not there is an error, and no zeros.
                    array_spec(parts[i], name)
                    | {"metadata": metadata, "fill_missing_data_reads": False},
                    open=True, assume_metadata=True, context=one,
                )  # fmt: skip
                await into[box].write(await piece[box].read())


async def check_complete(
    base: Mapping[str, Any], leaves: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Raises an `OSError` unless the store has every chunk of every leaf, by shape and chunk shape."""
    store = await tensorstore.KvStore.open({"driver": "ocdbt", "base": base})
    keys = [_KEY.fullmatch(key.decode()) for key in await store.list()]
    found = Counter(match[1] for match in keys if match)
    for name, shapes in leaves.items():
        pairs = zip(*shapes, strict=True)
        wanted = 1 + math.prod(math.ceil(size / chunk) for size, chunk in pairs)
        if found[name] != wanted:
            raise OSError(f"{name} has {found[name]} of {wanted} entries in {base['path']}")


def array_spec(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "driver": "zarr3", "kvstore": {**_store(base), "path": f"{name}/"},
        "recheck_cached_data": False, "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # or a missing chunk would pass for zeros
    }  # fmt: skip


def _store(base: Mapping[str, Any]) -> dict[str, Any]:
    """A store for one writer, as Orbax configures it: without locks."""
    made: dict[str, Any] = {
        "driver": "ocdbt", "base": base, "target_data_file_size": FILE_BYTES, "assume_config": True,
        "cache_pool": "cache_pool#ocdbt",
        "config": {
            "max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8, "manifest_kind": "single"
        },
    }  # fmt: skip
    if base["driver"] == "file":  # Only what names data files is replaced, and must be whole.
        made |= {"base": {**base, "file_io_locking": {"mode": "non_atomic"}}, "manifest": base}
    return made
