# SPDX-License-Identifier: Apache-2.0
"""`Use`: one call's use of its state, refused while a step of another thread consumes it."""

from __future__ import annotations

import _thread
import itertools
import operator
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jzero._errors import CONSUMED, JzeroError, StateError, first_of, message
from jzero.offload.memory._leaf_array import is_deleted, storage_of
from jzero.tracing import _array_memory, _call

_STEPS = (
    "Step a state in one thread, and let others use what it returns; threads that train by themselves have "
    "a state each, of train_step.shard(...)."
)
_READS = (
    "Evaluate between two steps, in the thread that trains, or evaluate a copy that was made there: "
    "jax.tree.map(jnp.copy, params)."
)
# One thread claims leaves at a time; see [Note: locks and comprehensions].
_DECIDING = threading.RLock()
_claims: weakref.WeakValueDictionary[int, Use] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_DELETED = operator.methodcaller("is_deleted")
_num_consumed = 0  # calls that have begun to consume leaves


class Use:
    """One call's use of its state.

    Behaves like::

        use = Use(who, state, consumes=True)
        place the state                     # reads it
        with use.running:                   # a lock of the interpreter's own: no interrupt leaves it locked
            use.claim(leaves)               # refused if another running call consumes one of them
            run the step

    A step that consumes its state waits for evaluations that read it: JAX 0.10.2 crashes where one thread
    donates an array with which another one just starts a program. An evaluation waits for nobody.
    """

    def __init__(self, who: str, state: Any, *, consumes: bool):
        """To be made before the state is looked at; `state` is a tree, whose paths messages name."""
        self._who, self._state, self._consumes = who, state, consumes
        self.running = _thread.allocate_lock()  # held while leaves are claimed
        self._thread = _thread.get_ident()
        self._leaves: Sequence[Any] = ()
        # -1, which is never equal: calls that run already may consume leaves at any time.
        self._seen = _num_consumed if not _claims else -1

    def claim(self, leaves: Sequence[Any]) -> None:
        """Registers the leaves as used while `running` is held; None stands for a leaf that is not used.

        Raises:
          StateError: another call consumes them, or has consumed them since this one began.
        """
        global _num_consumed
        with _DECIDING:
            readers = self._others(leaves)
            if self._is_contended() and (error := self._consumed(leaves)) is not None:
                raise error
            self._leaves = leaves
            if self._consumes:
                _num_consumed += 1
                self._seen += self._seen >= 0
            _claims[next(_numbers)] = self
        for reader in readers:
            with reader.running:
                pass

    def consumed(self, kept: Iterable[Any]) -> None:
        """Deletes the claimed leaves except `kept`, after programs have donated them.

        What JAX leaves alive then differs between releases (see [Note: what JAX 0.10 leaves alive]): an array
        that NumPy views, or an array on some devices only. A program that takes such an array runs on some
        devices, which wait for the others for ever.
        """
        if _array_memory.DELETES_DONATED and all(map(_DELETED, self._leaves)):
            return  # Nearly always; deleting them again takes ten times as long.
        if ids := set(map(id, kept)):
            _array_memory.let_go([x for x in self._leaves if id(x) not in ids])
        else:
            _array_memory.let_go(self._leaves)

    def _others(self, leaves: Sequence[Any]) -> list[Use]:
        """Running calls that read some of these leaves, to wait for; refuses if a call consumes some."""
        if not _claims:
            return []
        found = []
        for other in [x for x in _claims.values() if x is not self and x.running.locked()]:
            taken = {id(storage_of(x)) for x in other._leaves if x is not None}
            common = [id(storage_of(x)) in taken for x in leaves]
            if any(common) and other._consumes:
                raise self._refused("is consuming", common, other)
            if any(common) and self._consumes:
                if other._thread == self._thread:
                    raise self._refused("is reading", common, other)
                found.append(other)
        return found

    def explained(
        self, error: Exception, leaves: Sequence[Any], arrays: Mapping[str, Any]
    ) -> StateError | None:
        """The error to raise instead of JAX's about a consumed array, which does not name the argument.

        `arrays` are the arguments beside the state, by name. None: the error is about something else.
        """
        said = str(error)
        if "were already donated" in said or not (
            "deleted" in said or "was already donated" in said
        ):
            return None  # The state's own leaves, or something else.
        dead = list(map(is_deleted, jax.tree.leaves(arrays)))
        if any(dead):
            found = _named(_call.argument_paths(arrays), dead)
            return StateError(
                message(self._who, f"an earlier step has consumed {found}", *CONSUMED)
            )
        if isinstance(error, JzeroError) or not self._is_contended():
            return None
        return self._consumed(leaves)

    def _is_contended(self) -> bool:
        """Whether another call may have consumed anything since this one began."""
        return _num_consumed != self._seen

    def _refused(self, does: str, found: Sequence[bool], other: Use) -> StateError:
        here = other._thread == self._thread
        whose = "which this call interrupts" if here else "in another thread"
        return self._error(f"a call of {other._who} {whose} {does} {self._named(found)}")

    def _consumed(self, leaves: Sequence[Any]) -> StateError | None:
        dead = list(map(is_deleted, leaves))
        if not any(dead):
            return None
        return self._error(f"a step in another thread has meanwhile consumed {self._named(dead)}")

    def _error(self, found: str) -> StateError:
        edit = _STEPS if self._consumes else _READS
        return StateError(message(self._who, found, "A step consumes its state.", edit))

    def _named(self, found: Sequence[bool]) -> str:
        return _named(_call.leaf_paths(self._state, "state"), found)


def _named(paths: Sequence[str], found: Sequence[bool]) -> str:
    named = [path for path, is_one in zip(paths, found, strict=True) if is_one]
    return f"{len(named)} of {len(paths)} leaves: {first_of(named)}"
