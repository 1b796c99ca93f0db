# SPDX-License-Identifier: Apache-2.0
"""Where a data iterator stands, as JSON: of every process, in one checkpoint."""

from __future__ import annotations

import base64
import json
from typing import Any

import jax

from jzero import _json
from jzero._errors import CheckpointError, OptionError, a_type, message


def state(iterator: Any) -> dict[str, Any]:
    """`iterator.get_state()` of this process."""
    _check(iterator, "get_state")
    return _encode(iterator.get_state())


def restore(iterator: Any, saved: list[Any], where: str) -> None:
    """Sets `iterator` to where that of this process stood, among the decoded states of all.

    Raises:
      CheckpointError: there were other processes, and their iterators stood in different places.
    """
    _check(iterator, "set_state")
    if len(saved) != jax.process_count() and any(state != saved[0] for state in saved):
        raise CheckpointError(message(
            f"Checkpointer.restore {where}",
            f"{len(saved)} processes saved data iterators in different states, and there are "
            f"{jax.process_count()} processes", "Each process continues with the iterator that it saved.",
            "Use as many processes, or iterate over global batches, of which each process feeds its "
            "part."))  # fmt: skip
    own = saved[jax.process_index()] if len(saved) == jax.process_count() else saved[0]
    iterator.set_state(own)


def _check(iterator: Any, method: str) -> None:
    if not callable(getattr(iterator, method, None)):
        raise OptionError(message(
            "Checkpointer", f"data_iterator is {a_type(iterator)} without {method}()",
            "It says and is told where it stands, as grain's iterators are.",
            "Give it get_state() and set_state(state), or keep its place in the state."))  # fmt: skip


def _encode(state: Any) -> dict[str, Any]:
    """As JSON that says what it is; grain's older iterators have their state in bytes."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        same = _json.parse(json.dumps(state).encode()) == state
    except (TypeError, ValueError, _json.Malformed):
        same = False
    if not same:
        raise OptionError(message(
            "Checkpointer", f"get_state() of the data iterator is {state!r:.200}",
            "It is saved as JSON, and must come back as it was.",
            "Return bytes, or dicts with string keys, lists, strings and Python numbers."))  # fmt: skip
    return {"json": state}


def decoded(saved: dict[str, Any]) -> Any:
    """What was encoded so.

    Raises:
      ValueError: it was not.
    """
    return base64.b64decode(saved["bytes"]) if "bytes" in saved else saved["json"]
