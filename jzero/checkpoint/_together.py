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
from jzero.tracing import _jaxpr

_SLICE = 2_000  # milliseconds to wait at a time; then Ctrl-C is heard
_rounds = itertools.count()


class Round:
    """One thing that all processes do, in the same order: made by each of them, for `who` asks."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._store: Any = _jaxpr.key_value_store() if jax.process_count() > 1 else None
        number = next(_rounds)
        self._room = _room(number)
        if self._store is not None and jax.process_index() == 0:  # All have left the last but one.
            self._store.key_value_delete(_room(number - 2))

    def lead(self, stage: str, work: Callable[[], Any]) -> Any:
        """What process 0's work returns, as JSON has it; all of them wait until it is done.

        Raises:
          CheckpointError: it failed; in process 0, whatever was raised.
        """
        if self._store is None:
            return work()
        if jax.process_index() != 0:
            failure, found = json.loads(self._get(stage))
            if failure:
                raise failed(self._who, f"process 0 failed with {failure}")
            return found
        outcome: tuple[str, Any] = "an unknown error", None
        try:
            outcome = "", work()
            return outcome[1]
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}", None
            raise
        finally:
            self._store.key_value_set(f"{self._room}{stage}", json.dumps(outcome))

    def gather(self, stage: str, own: Any) -> list[Any]:
        """What each process brings, as JSON has it, in all of them."""
        self._bring(stage, own)
        return list(self.lead(stage, lambda: [own, *self._brought(stage)]))

    def report(self, stage: str, failure: BaseException | None, own: Any) -> tuple[str, list[Any]]:
        """Says how this process fared, and what it brings, as JSON has it.

        Returns:
          In process 0, once all have said it: what went wrong elsewhere, and what others bring.
        """
        self._bring(stage, ("" if failure is None else f"{type(failure).__name__}: {failure}", own))
        found = self._brought(stage)
        failed = [f"process {i} failed with {text}" for i, (text, _) in enumerate(found, 1) if text]
        return "; ".join(failed), [brought for _, brought in found]

    def _bring(self, stage: str, own: Any) -> None:
        if (index := jax.process_index()) != 0:
            self._store.key_value_set(f"{self._room}{stage}/{index}", json.dumps(own))

    def _brought(self, stage: str) -> list[Any]:
        """In process 0, once all others have brought it."""
        others = range(1, jax.process_count()) if jax.process_index() == 0 else ()
        return [json.loads(self._get(f"{stage}/{other}")) for other in others]

    def _get(self, key: str) -> str:
        while True:
            try:
                return str(self._store.blocking_key_value_get(f"{self._room}{key}", _SLICE))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise  # A process ended; JAX says which.


def failed(who: str, found: str) -> CheckpointError:
    """The error of processes in which nothing failed."""
    return CheckpointError(message(
        who, found, "What one process cannot do, none has done.",
        "Steps that were complete before still are."))  # fmt: skip


def _room(number: int) -> str:
    return f"jzero/together/{number}/"
