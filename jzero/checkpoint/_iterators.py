# SPDX-License-Identifier: Apache-2.0
"""The positions of the data iterators of all processes, as JSON in one checkpoint."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from jzero import _json
from jzero._errors import CheckpointError, OptionError, a_type, message
from jzero._json import Maybe
from jzero.checkpoint import _grain

# Keys of a state in which processes may differ, and the one that says how far all of them are.
_OF_PROCESS = {"shard_index", "shard_count", "num_shards", "process_index", "process_count"}
_GLOBAL = "global_next_index"  # the key of Grain's ElasticIterator
# Of what one process saved; it has its state either as bytes or as JSON.
FORM = {"bytes": Maybe(str), "place": Maybe((_grain.FORM, str))}


class SavedIterator(NamedTuple):
    """What `get_state()` of one process returned, and its place in Grain's data, or why it has none."""

    state: Any
    place: _grain.GrainPlace | str | None


def state(iterator: Any) -> dict[str, Any]:
    _check(iterator, "get_state")
    found = iterator.get_state()
    saved = _encode(found)
    if _in_shard(iterator, found):
        try:
            saved["place"] = _grain.shard(iterator).place(found)
        except _grain.Unknown as error:
            saved["place"] = str(error)
    return saved


def moving(
    iterator: Any, saved: list[SavedIterator], where: str, process: int, processes: int
) -> Callable[[], None]:
    """A function that sets `iterator` to where all the saved ones stood."""
    _check(iterator, "set_state")
    try:
        state = _state_for(iterator, saved, process, processes)
    except _grain.Unknown as error:
        same = len(saved) == processes
        again = "Make it as it was when it was saved" if same else "Use as many processes"
        raise CheckpointError(message(
            f"Checkpointer.restore {where}",
            f"data iterators cannot go on from {len(saved)} to {processes} processes: {error}",
            "All processes must have reached one common position in the data.",
            f"{again}, or use an iterator with a global position; see \"Data on another number of "
            "processes\" in the guide to checkpoints.")) from error  # fmt: skip
    return functools.partial(iterator.set_state, state)


def _state_for(iterator: Any, saved: list[SavedIterator], process: int, processes: int) -> Any:
    own = saved[process] if len(saved) == processes else None
    if own is not None and not _is_elsewhere(iterator, own):
        return own.state  # Some say where they stand only once they have begun.
    now = iterator.get_state() if callable(getattr(iterator, "get_state", None)) else None
    if not _in_shard(iterator, now):
        return _for_all(now, [each.state for each in saved])
    shard = _grain.shard(iterator)
    _grain.check_sharded(shard.count, shard.data, processes)
    places = [each.place for each in saved if isinstance(each.place, dict)]
    if len(places) < len(saved):
        reasons = [each.place for each in saved if isinstance(each.place, str)]
        reason = [*reasons, "none was saved"][0]
        raise _grain.Unknown(f"they had no global position in the data: {reason}")
    return shard.state_from(_grain.position(places, shard.data), now)


def _in_shard(iterator: Any, state: Any) -> bool:
    """Whether it counts the examples of one process, as Grain's iterators do."""
    return _grain.is_grain(iterator) and not (isinstance(state, dict) and _GLOBAL in state)


def _is_elsewhere(iterator: Any, saved: SavedIterator) -> bool:
    """Whether what was saved for as many processes is another place in the data now."""
    if isinstance(saved.place, dict) and _grain.is_grain(iterator):
        with contextlib.suppress(_grain.Unknown):
            shard = _grain.shard(iterator)
            return shard.place(saved.state) != {**saved.place, "data": shard.data}
    return False


def _for_all(now: Any, states: list[Any]) -> Any:
    """The one state of all processes, as this one's; `now` says which shard this one has."""
    common = [_split(state)[0] for state in states]
    for process, state in enumerate(common):
        if state != common[0]:
            raise _grain.Unknown(
                f"process 0 saved {states[0]!r:.100}, process {process} {states[process]!r:.100}"
            )
    of_process = any(_split(state)[1] for state in states)
    # Somebody else's iterator may have Grain's state in its own.
    of_grain = "next_index" in repr(common[0]).replace(_GLOBAL, "")
    if of_grain or (of_process and _GLOBAL not in common[0]):
        raise _grain.Unknown(
            f"{states[0]!r:.200} is a position in one shard; it has no {_GLOBAL!r}"
        )
    return common[0] | _split(now)[1] if of_process else common[0]


def _split(state: Any) -> tuple[Any, dict[str, Any]]:
    """The parts of a state that hold for all processes, and for this one."""
    if not isinstance(state, dict):
        return state, {}
    own = {key: value for key, value in state.items() if key in _OF_PROCESS}
    return {key: value for key, value in state.items() if key not in own}, own


def _check(iterator: Any, method: str) -> None:
    if not callable(getattr(iterator, method, None)):
        raise OptionError(message(
            "Checkpointer", f"data_iterator is {a_type(iterator)} without {method}()",
            "Its position is saved and restored, as that of grain's iterators is.",
            "Give it get_state() and set_state(state), or keep its position in the state."))  # fmt: skip


def _encode(state: Any) -> dict[str, Any]:
    """As JSON that says what it is; grain's older iterators have their state in bytes."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:  # A copy: some return what they go on changing.
        copy = _json.parse(json.dumps(state).encode())
        same = copy == state
    except (TypeError, ValueError, _json.Malformed):
        same = False
    if not same:
        raise OptionError(message(
            "Checkpointer", f"get_state() of the data iterator is {state!r:.200}",
            "It is saved as JSON, and must come back as it was.",
            "Return bytes, or dicts with string keys, lists, strings and Python numbers."))  # fmt: skip
    return {"json": copy}


def decoded(saved: dict[str, Any]) -> SavedIterator:
    """The reverse of `_encode`; raises a ValueError for something else."""
    state = base64.b64decode(saved["bytes"]) if "bytes" in saved else saved["json"]
    return SavedIterator(state, saved.get("place"))
