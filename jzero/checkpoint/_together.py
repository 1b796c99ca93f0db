# SPDX-License-Identifier: Apache-2.0
"""What one process does for all of them: the others wait, and fail if it fails.

Messages go through the key-value store of `jax.distributed`, so that a thread can wait for them while the
devices compute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from jzero._errors import CheckpointError, message
from jzero.tracing import _jax_state

_SLICE = 2_000  # milliseconds to wait at a time; then Ctrl-C is heard
_rounds = itertools.count()


class Round:
    """One thing that all processes do, in the same order; each of them makes a `Round`."""

    def __init__(self, who: str) -> None:
        self._who, number = who, next(_rounds)
        self._table = f"jzero/together/{number}/"
        self._store: Any = _jax_state.key_value_store() if jax.process_count() > 1 else None
        if self._store is not None and jax.process_index() == 0:  # All have left the last but one.
            self._store.key_value_delete(f"jzero/together/{number - 2}/")

    def lead(
        self, stage: str, work: Callable[[], Any], own: Callable[[], Any] = lambda: None
    ) -> Any:
        """All do their `own`, then process 0 does the work, and all return its result or fail with it."""
        if self._store is not None and jax.process_index() != 0:
            own()
            failure, found = json.loads(self._get(stage))
            if failure:
                raise failed(self._who, f"process 0 failed with {failure}")
            return found
        outcome: tuple[str, Any] = "an unknown error", None
        try:
            own()
            outcome = "", work()
            return outcome[1]
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}", None
            raise
        finally:
            if self._store is not None:
                self._set(stage, outcome)

    def report(self, stage: str, own: Any) -> list[Any]:
        """In process 0 what each brings, through JSON; the others do not wait, and get their own."""
        if (index := jax.process_index()) != 0:
            self._set(f"{stage}/{index}", own)
            return [own]
        others = range(1, jax.process_count())
        return [own, *(json.loads(self._get(f"{stage}/{other}")) for other in others)]

    def _set(self, key: str, value: Any) -> None:
        self._store.key_value_set(f"{self._table}{key}", json.dumps(value))

    def _get(self, key: str) -> str:
        while True:
            try:
                return str(self._store.blocking_key_value_get(f"{self._table}{key}", _SLICE))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise  # A process ended; JAX says which.


def failed(who: str, found: str) -> CheckpointError:
    """The error of processes in which nothing failed."""
    return CheckpointError(message(
        who, found, "What one process cannot do, none has done.",
        "Steps that were complete before still are."))  # fmt: skip
