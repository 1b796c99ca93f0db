"""Several processes: none starts what the others would not, or would start differently.

A collective that only some processes call waits for ever, and one that two call with different shapes
ends a process from within. So before processes start something together for the first time they compare
what it is, through the key-value store of `jax.distributed`, which has timeouts and needs no device.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero import _jaxpr
from jzero._errors import ProcessError, message

# What a process is about to start: lines under headings, the most telling first.
Sections = Mapping[str, Sequence[str]]
# Under this heading something differs whenever something else does.
PROGRAM = "program"
# As long as jax.distributed.initialize waits by default.
PATIENCE_SECONDS = 300.0

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in a jaxpr: every process has its own
_meetings: collections.Counter[tuple[int, ...]] = collections.Counter()


def agree(who: str, mesh: Any, sections: Callable[[], Sections]) -> None:
    """Waits until all processes of the mesh have come here, and compares what they bring.

    Returns at once where there is one process, or no `jax.distributed`.

    Args:
      who: what the user called.
      mesh: the mesh on which it runs.
      sections: what this process is about to start.

    Raises:
      ProcessError: processes bring different things, or do not come within `PATIENCE_SECONDS`.
    """
    processes, store = _processes_of(mesh), _jaxpr.key_value_store()
    if len(processes) < 2 or store is None:
        return
    room = f"jzero/{_digest(repr(processes))}/{_meetings[processes]}"
    _meetings[processes] += 1
    text = _ADDRESS.sub("", json.dumps({"call": [who], **sections()}))
    digests = _exchange(who, store, room, processes, _digest(text))
    if len(set(digests.values())) > 1:
        unlike = [[p for p in processes if digests[p] == digest]
                  for digest in dict.fromkeys(digests.values())][:2]  # fmt: skip
        texts = _texts_of(store, room, [group[0] for group in unlike], text)
        raise ProcessError(_difference(who, unlike, texts))


def checksum(x: Any) -> str:
    """Of an array's bytes; of one that spans processes its type, for no process has all of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return str(jax.typeof(x))
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    flat = np.ascontiguousarray(x).reshape(-1)
    return f"{zlib.crc32(flat.view(np.uint8).data):08x}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _named(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:4]))
    more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
    return f"process{'es' * (len(processes) > 1)} {shown}{more}"


def _processes_of(mesh: Any) -> tuple[int, ...]:
    """The processes whose devices a mesh has; an abstract mesh has none."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return ()
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _exchange(
    who: str, store: Any, room: str, processes: tuple[int, ...], digest: str
) -> dict[int, str]:
    """Every process's digest, once all have come."""
    store.key_value_set(f"{room}/digest/{jax.process_index()}", digest)
    timeout = None
    try:
        store.wait_at_barrier(room, _patience(), process_ids=processes)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise  # A process ended; JAX says which.
        timeout = error
    pairs = store.key_value_dir_get(f"{room}/digest/")
    digests = {int(key.rpartition("/")[2]): value for key, value in pairs}
    if timeout is not None:
        missing = [process for process in processes if process not in digests]
        absent = (
            f"{_named(missing)} of {len(processes)} did not come within {PATIENCE_SECONDS:.0f} s"
        )
        late = f"process {jax.process_index()} came when others had given up waiting for it"
        raise ProcessError(message(
            who, absent if missing else late,
            "All processes call init, shard and the step equally often and in one order.",
            "See what those that are missing printed last. If they only need longer, wait for them before: "
            "jax.experimental.multihost_utils.sync_global_devices('ready').",
        )) from timeout  # fmt: skip
    return {process: digests[process] for process in processes}


def _texts_of(store: Any, room: str, processes: Sequence[int], text: str) -> list[Sections]:
    """What these processes brought, whose digests differ; one of them may be this, with `text`."""
    if jax.process_index() in processes:
        packed = zlib.compress(text.encode())
        store.key_value_set_bytes(f"{room}/text/{jax.process_index()}", packed)
    texts = [
        store.blocking_key_value_get_bytes(f"{room}/text/{process}", _patience())
        for process in processes
    ]
    return [json.loads(zlib.decompress(packed)) for packed in texts]


def _patience() -> int:
    return round(1000 * PATIENCE_SECONDS)  # in milliseconds


def _difference(who: str, unlike: Sequence[Sequence[int]], texts: Sequence[Sections]) -> str:
    """The message: under each heading the first line that differs."""
    headings = dict.fromkeys([*texts[0], *texts[1]])
    found = {}
    for heading in headings:
        columns = [text.get(heading, []) for text in texts]
        for lines in itertools.zip_longest(*columns, fillvalue="nothing"):
            if lines[0] != lines[1]:
                told = [f"{line.strip():.200} on {_named(group)}"
                        for line, group in zip(lines, unlike, strict=True)]  # fmt: skip
                found[heading] = f"{heading}: {', '.join(told)}"
                break
    if len(found) > 1:
        found.pop(PROGRAM, None)
    return message(
        who, list(found.values()),
        "All processes run one program on the same shapes; only the rows of the batch are their own.",
        "Start them from the same code, configuration and versions.",
        things="comparisons of processes")  # fmt: skip
