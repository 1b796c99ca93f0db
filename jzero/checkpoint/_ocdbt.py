# SPDX-License-Identifier: Apache-2.0
"""The store of keys and values in which a checkpoint's chunks are: tensorstore's OCDBT."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import tensorstore

from jzero.checkpoint._seal import StoredLeaf

_KEY = re.compile(r"(.*)/(?:zarr\.json|c(?:/\d+)*)", re.DOTALL)


@contextlib.asynccontextmanager
async def transaction() -> AsyncIterator[tensorstore.Transaction]:
    """What is written in it is written at once, or not at all.

    tensorstore's own context waits when it is left by an error, and sometimes for ever.
    """
    made = tensorstore.Transaction(atomic=True)
    try:
        yield made
    except BaseException:
        made.abort()
        raise
    await made.commit_async()


async def check_complete(directory: Path, leaves: Mapping[str, StoredLeaf]) -> None:
    """That every chunk of every leaf is in the store of a checkpoint.

    Orbax puts together what it finds that processes wrote; a directory that it cannot list is empty to it.

    Raises:
      OSError: some are not.
    """
    store = await tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{directory}/"})
    keys = [_KEY.fullmatch(key.decode()) for key in await store.list()]
    found = Counter(match[1] for match in keys if match)
    for name, leaf in leaves.items():
        pairs = zip(leaf.shape, leaf.chunk_shape, strict=True)
        wanted = 1 + math.prod(math.ceil(size / chunk) for size, chunk in pairs)
        if found[name] != wanted:
            raise OSError(f"{name} has {found[name]} of {wanted} entries in {directory}")
