# SPDX-License-Identifier: Apache-2.0
"""Checks that all processes start the same programs.

A collective that only some processes call waits for ever, and one that two call with different shapes
crashes a process. So before processes start something together for the first time, they compare what it is,
through the key-value store of `jax.distributed`, which has timeouts and needs no device. When they return to
something that they have run before, they compare again if that takes little of their time. In any case a
thread compares what they have called (`_watch`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero._errors import ProcessError, message
from jzero.processes import _unlike
from jzero.processes._call_log import FAILS, MEETS, CallLog
from jzero.processes._unlike import PROGRAM, Sections
from jzero.processes._watch import Peers, try_get, watch
from jzero.tracing import _jax_state

# The default timeout of jax.distributed.initialize.
PATIENCE_SECONDS = 300.0
# What a meeting takes, and the share of a training's time that later meetings of a program may take.
_MEETING_SECONDS, _MEETINGS_SHARE = 2e-3, 0.005
_VERDICT_SECONDS = 3.0
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 2e-4, 0.1

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in a jaxpr; differs between processes
_meetings: collections.Counter[tuple[int, ...]] = collections.Counter()
_last_meeting: dict[tuple[int, ...], tuple[int, float]] = {}  # its call, and when it was
_forked = False  # whether this process is a child of one that had used JAX's devices


def check(who: str) -> None:
    """Refuses a call that could never end, or that would continue after a difference was found.

    Raises:
      ProcessError: this process is a forked child, or others have called something else.
    """
    if _forked:
        raise ProcessError(message(
            who, f"process {os.getpid()} was forked from one that had already used JAX's devices",
            "A forked child has none of the threads of JAX's backends: what it asks of a device never ends.",
            "Start it with multiprocessing.get_context('spawn') or 'forkserver', or keep jzero out of it: "
            "data loaders may fork."))  # fmt: skip
    watch.check()


def _note_fork() -> None:
    global _forked
    # Forking by itself is fine: children of data loaders use no device.
    _forked = _forked or _jax_state.has_backends()


os.register_at_fork(after_in_child=_note_fork)


class Agreement(NamedTuple):
    """The name and sections that all processes have agreed on."""

    name: str  # empty if there is one process
    sections: Sections  # with a digest in place of the program


def agree(
    who: str, mesh: Any, sections: Callable[[], Sections], about: Callable[[], Sections] | None = None
) -> Agreement:  # fmt: skip
    """Waits for all processes of the mesh, and compares the `sections` that they bring.

    Returns at once if there is one process, or no `jax.distributed`. `about` is what is known before
    `sections` are built, which may take long.

    Raises:
      ProcessError: processes bring different things, or do not come within `PATIENCE_SECONDS`.
    """
    peers = _peers_of(mesh)
    if peers is None:
        return Agreement("", {})

    def bring() -> tuple[Sections, Agreement]:
        watch.look_soon()  # Building sections may take long; let others see soon what this process calls.
        found = json.loads(_ADDRESS.sub("", json.dumps({"call": [who], **sections()})))
        name = _digest(json.dumps(found))[:16]
        return found, Agreement(name, {**found, PROGRAM: [name]})

    return _meet(who, peers, {"call": [who], **(about() if about else {})}, bring)


def gather(who: str, mesh: Any, own: Any) -> list[Any]:
    """Gathers a JSON value from each process of the mesh; raises as `agree` does."""
    peers = _peers_of(mesh)
    if peers is None:
        return [own]
    # Stored beside the digests: deleted when the next meeting has begun, after all have read it.
    store, processes = _jax_state.key_value_store(), peers.processes
    key = f"jzero/{_digest(repr(processes))}/{_meetings[processes]}/brought"
    store.key_value_set(f"{key}/{jax.process_index()}", json.dumps(own))
    agree(who, mesh, dict)
    return [json.loads(store.key_value_try_get(f"{key}/{process}")) for process in processes]


@contextlib.contextmanager
def alike(who: str, mesh: Any, sections: Callable[[], Sections]) -> Iterator[None]:
    """Wraps what all processes of the mesh do by themselves: if one fails, all raise ProcessError."""
    try:
        yield
    except Exception as error:
        failure = f"failed with {type(error).__name__}: {error}"
        with contextlib.suppress(ProcessError):
            agree(who, mesh, lambda: {"call": [failure]})
        raise
    agree(who, mesh, sections)


def agree_again(who: str, mesh: Any, before: Agreement) -> None:
    """Waits until all processes of the mesh have come to call what they agreed on before."""
    peers = _peers_of(mesh)
    if peers is not None:
        _meet(who, peers, before.sections, lambda: (before.sections, before))


def goes_on(mesh: Any, name: str) -> bool:
    """Notes a call of what was agreed on before; returns False if all should agree again before it.

    They should if the call differs from the one before, and a meeting takes too little time to matter.
    """
    peers = _peers_of(mesh)
    if peers is None:
        return True
    log = peers.log
    if name != log.name and log.calls >= log.meets_from:
        return False
    log.runs(name)
    return True


def note(who: str, mesh: Any) -> None:
    """Notes a call that all processes make, and that needs no agreement."""
    peers = _peers_of(mesh)
    if peers is not None:
        peers.describe(who, {"call": [who]})
        peers.log.runs(who)


def confirm(who: str, about: Callable[[], Sections] = dict, mesh: Any = None) -> None:
    """Checks that all processes, of `jax.distributed` or of a mesh, have made the same calls so far.

    It takes a millisecond or two, and waits for those that have yet to come. What `about` says of this call
    must be the same, too.

    Raises:
      ProcessError: they have not, or do not come within `PATIENCE_SECONDS`.
    """
    check(who)
    peers = _peers_on(tuple(range(jax.process_count()))) if mesh is None else _peers_of(mesh)
    if peers is None:
        return
    log = peers.log
    sections = {
        "call": [who], "calls": [f"{log.calls} before"], PROGRAM: [f"calls {log.history}"], **about(),
    }  # fmt: skip
    call = {"call": [who]}
    _meet(who, peers, call, lambda: (sections, Agreement(who, call)))
    watch.check()


def checksum(x: Any) -> str:
    """A checksum of an array's bytes; for an array that spans processes its type, as none has all of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return str(jax.typeof(x))
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    flat = np.ascontiguousarray(x).reshape(-1)
    return f"{zlib.crc32(flat.view(np.uint8).data):08x}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _processes_of(mesh: Any) -> tuple[int, ...]:
    """The processes that have the mesh's devices; an abstract mesh has none."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return ()
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _peers_of(mesh: Any) -> Peers | None:
    """The processes of a mesh and their log; None if there is one process, or no `jax.distributed`."""
    return _peers_on(_processes_of(mesh))


def _peers_on(processes: tuple[int, ...]) -> Peers | None:
    if len(processes) < 2 or _jax_state.key_value_store() is None:
        return None
    return watch.peers(processes)


def _meet(
    who: str, peers: Peers, about: Sections, bring: Callable[[], tuple[Sections, Agreement]]
) -> Agreement:
    """Compares the sections of all processes; logs the call before, and the outcome after."""
    entry = peers.log.waits(_described(peers, {**about, PROGRAM: ["a new one"]}))
    try:
        sections, agreement = bring()
        _compare(who, peers, sections)
    except BaseException as error:
        failure = f"failed with {type(error).__name__}: {error}"
        peers.log.settle(entry, FAILS, _described(peers, {"call": [failure]}))
        raise
    peers.describe(*agreement)
    peers.log.settle(entry, MEETS, agreement.name)
    return agreement


def _described(peers: Peers, sections: Sections) -> str:
    name = _digest(json.dumps(sections))[:16]
    peers.describe(name, sections)
    return name


def _compare(who: str, peers: Peers, sections: Sections) -> None:
    """Waits for all processes, and raises if they bring different sections."""
    store, processes = _jax_state.key_value_store(), peers.processes
    table = f"jzero/{_digest(repr(processes))}"
    meeting = _meetings[processes]
    _meetings[processes] += 1
    outcome = _exchange(who, store, f"{table}/{meeting}", peers, _digest(json.dumps(sections)))
    if len(outcome["groups"]) > 1:
        unlike = outcome["groups"][:2]
        texts = _texts_of(store, f"{table}/{meeting}", [group[0] for group in unlike], sections)
        if peers.log.calls > 1:
            watch.wait(_VERDICT_SECONDS)  # It can say which call before this one differed.
            watch.check()
        raise ProcessError(_unlike.before_a_call(who, unlike, texts))
    peers.log.meets_from = outcome["meets_from"]
    if jax.process_index() == processes[0] and meeting:
        store.key_value_delete(f"{table}/{meeting - 1}")  # All processes have left it.


def _exchange(who: str, store: Any, table: str, peers: Peers, digest: str) -> dict[str, Any]:
    """The outcome of a meeting: groups of processes with equal digests, once all have come.

    The first process reads all digests, and writes the outcome.
    """
    here, processes = jax.process_index(), peers.processes
    store.key_value_set(f"{table}/digest/{here}", digest)
    end, pause = time.monotonic() + PATIENCE_SECONDS, _FIRST_POLL_SECONDS
    while True:
        outcome = try_get(store, f"{table}/outcome")
        if outcome is None and here == processes[0]:
            outcome = _written(store, table, _outcome(peers, _digests(store, table)))
        if outcome is None and time.monotonic() > end:
            missing = sorted({*processes} - _digests(store, table).keys())
            outcome = _written(store, table, {"missing": missing})
        if outcome is not None:
            break
        watch.check()
        time.sleep(pause)
        pause = min(1.5 * pause, _LAST_POLL_SECONDS)
        if pause == _LAST_POLL_SECONDS:
            watch.look_soon()
    found = json.loads(outcome)
    if "missing" in found:
        raise ProcessError(_absence(who, found["missing"], len(processes)))
    return found


def _digests(store: Any, table: str) -> dict[int, str]:
    pairs = store.key_value_dir_get(f"{table}/digest/")
    return {int(key.rpartition("/")[2]): digest for key, digest in pairs}


def _outcome(peers: Peers, digests: dict[int, str]) -> dict[str, Any] | None:
    """None while somebody is missing."""
    if len(digests) < len(peers.processes):
        return None
    groups: dict[str, list[int]] = {}
    for process in peers.processes:
        groups.setdefault(digests[process], []).append(process)
    return {"groups": list(groups.values()), "meets_from": _meets_from(peers.processes, peers.log)}


def _meets_from(processes: tuple[int, ...], log: CallLog) -> int:
    """The call from which on another meeting takes little of the time of the calls before it."""
    now = time.monotonic()
    last, _last_meeting[processes] = _last_meeting.get(processes), (log.calls, now)
    if last is None:
        return 0
    seconds_per_call = max(1e-6, (now - last[1]) / max(1, log.calls - last[0]))
    return log.calls + math.ceil(_MEETING_SECONDS / (_MEETINGS_SHARE * seconds_per_call))


def _written(store: Any, table: str, outcome: dict[str, Any] | None) -> str | None:
    """The outcome that all read: that of the process which writes first."""
    if outcome is None:
        return None
    try:
        store.key_value_set(f"{table}/outcome", json.dumps(outcome))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    return store.key_value_try_get(f"{table}/outcome")


def _absence(who: str, missing: list[int], num: int) -> str:
    here = jax.process_index()
    absent = f"{_unlike.named(missing)} of {num} did not come within {PATIENCE_SECONDS:.0f} s"
    late = f"process {here} came when others had given up waiting for it"
    return message(
        who, late if here in missing else absent,
        "All processes call init, shard and the step equally often and in one order.",
        "See what the missing ones printed last. If they only need longer, synchronize before the call: "
        "jax.experimental.multihost_utils.sync_global_devices('ready').",
    )  # fmt: skip


def _texts_of(store: Any, table: str, processes: list[int], sections: Sections) -> list[Sections]:
    """The sections of these processes, whose digests differ; this process may be one of them."""
    here = jax.process_index()
    if here in processes:
        store.key_value_set_bytes(f"{table}/text/{here}", _unlike.pack(sections))
    patience = round(1000 * PATIENCE_SECONDS)
    return [
        _unlike.unpack(store.blocking_key_value_get_bytes(f"{table}/text/{process}", patience))
        for process in processes
    ]
