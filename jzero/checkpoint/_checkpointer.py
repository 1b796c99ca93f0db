# SPDX-License-Identifier: Apache-2.0
"""`Checkpointer`: the steps of one training, saved and restored."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jzero._errors import CheckpointError, JzeroError, OptionError, a_type, message
from jzero._quantities import BYTES_RULE, parse_bytes
from jzero._sharded_step import ShardedStep
from jzero._version import __version__
from jzero.checkpoint import _iterators, _seal, _stored
from jzero.checkpoint._bucket_steps import steps_in
from jzero.checkpoint._lock import WHO as _SAVE
from jzero.checkpoint._match import leaf_names
from jzero.checkpoint._restore import restore_for
from jzero.checkpoint._savable import check_savable, described
from jzero.checkpoint._saver import Saver
from jzero.checkpoint._together import Round
from jzero.checkpoint._writing import SAVE_BYTES
from jzero.offload.memory import _placing, _writes
from jzero.processes import _agreement
from jzero.sharding.plan._stages import OTHER
from jzero.tracing._axis_types import takes_explicit_axes


class _Sigterm:
    """Whether SIGTERM came, while somebody watches; one handler for all of them."""

    def __init__(self) -> None:
        self.came, self._watchers = False, 0
        self._before: Any = None

    def watch(self) -> None:
        if self._watchers == 0:
            self.came, self._before = False, signal.signal(signal.SIGTERM, self._note)
        self._watchers += 1

    def release(self) -> None:
        self._watchers -= 1
        if self._watchers == 0:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: Any) -> None:
        self.came = True


_sigterm = _Sigterm()


class Checkpointer:
    """Saves the state of a sharded step, and restores it on whatever devices there are.

    What it writes are ordinary Orbax checkpoints (`directory/<step>/state`), each leaf in its true shape,
    whatever its layout; so they can be restored at another stage, on another mesh, and without jzero. Unlike
    Orbax's own, every byte is checked: a flipped bit is an error. A step is either complete or absent: it is
    written to a temporary directory, synced, and renamed with its manifest; or in a bucket, its manifest is
    uploaded last. Only then are older steps removed. One job at a time writes in a directory; any number may
    read.

    >>> import tempfile, jax, jax.numpy as jnp, jzero
    >>> def step_fn(w, batch):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean(batch @ w))(w)
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> w, batch = jnp.ones((257, 3)), jnp.ones((8, 257))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with jzero.Checkpointer(folder, train_step, max_to_keep=2) as checkpointer:
    ...         for step in range(3):
    ...             w = train_step(w, batch)
    ...             saved = checkpointer.save(step, w)
    ...     with jzero.Checkpointer(folder, train_step) as checkpointer:
    ...         print(checkpointer.latest_step(), checkpointer.restore(w))
    2 LeafArray(shape=(257, 3), dtype=float32, padded to (264, 3))

    A training that can be interrupted at any time, by SIGTERM too (preemption)::

        start = checkpointer.latest_step()
        if start is None:
            start, state = 0, train_step.init(init_fn, key)
        else:
            state = checkpointer.restore(jax.eval_shape(init_fn, key), data_iterator=batches)
        for step in range(start + 1, num_steps + 1):
            state, metrics = train_step(state, next(batches))
            stop = checkpointer.preempted(step)
            checkpointer.save(step, state, batches, force=stop or step == num_steps)
            if stop:
                break

    With `HostCPU(delayed_update=True)`, flush a state before it is saved::

        if checkpointer.is_due(step, force=stop):
            state = train_step.flush(state)

    With several processes, all of them make the same calls; if writing fails in one, all raise it, by the
    next `save` that is due, `restore`, `wait` or `close`. A single process raises it by its next call.

    Saving copies the state to the host and writes it in the background, so the next step may consume it. The
    part that does not fit into five eighths of `save_bytes` is written first, in chunks, while `save` blocks.
    Restoring reads each shard straight to its device (see `jzero.restore`).

    Args:
      directory: where the steps are: `s3://bucket/path`, `gs://bucket/path`, or on a file system that all
        processes see; created if it does not exist.
      train_step: from `shard_train_step`; decides where restored leaves go.
      max_to_keep: how many steps to keep, the latest ones; None for all.
      save_interval_steps: `save` does something for multiples of it only (and for the first step, and when
        the processes are about to be preempted).
      asynchronous: write in the background; else `save` returns when the step is complete.
      staging: for a bucket, a local directory for what this process writes of a step, until it is uploaded;
        the temporary directory by default.
      save_bytes: the most memory of the host that a save uses in addition to the state, in each process (or
        what one chunk of 16 MiB needs): a number, or a string such as "2GiB".
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        train_step: ShardedStep,
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        asynchronous: bool = True,
        staging: str | os.PathLike[str] | None = None,
        save_bytes: int | str = SAVE_BYTES,
    ):
        nbytes = _check_arguments(train_step, max_to_keep, save_interval_steps, save_bytes)
        self._steps = steps_in("Checkpointer", directory, staging)
        self._directory = self._steps.where
        with self._explained("it could not be opened"):
            self._steps.open()
        self._train_step = train_step
        self._interval, self._asynchronous = save_interval_steps, asynchronous
        self._saver = Saver(self._steps, max_to_keep, nbytes)
        self._restored: int | None = None  # the step that was restored since the last save
        # The latest step when the directory was last looked at; ... if it is to be looked at.
        self._found: int | None | types.EllipsisType = ...
        self._watches = False
        self._one_at_a_time = threading.RLock()
        # Who forgets it lets others write.
        weakref.finalize(self, self._saver.abandon)

    @takes_explicit_axes
    def save(
        self, step: int, state: Any, data_iterator: Any = None, *, force: bool = False
    ) -> bool:
        """Saves the state after `step` steps, if this step is due.

        Args:
          step: its number, larger than any saved before; the last one again is not due.
          state: as the step returned it; it may be passed to the next step at once.
          data_iterator: an object with `get_state()` (JSON or bytes) and `set_state(state)`, such as those of
            grain; its position is saved too, for every process.
          force: save whatever `save_interval_steps` says.

        Returns:
          Whether this step was due.

        Raises:
          StateError: the state was consumed by a step or has delayed gradients, leaves cannot be
            written, or keys with dots make two leaves one.
          CheckpointError: writing failed, now or in the background since the last call, in this process or
            another; there is a later step; or another job writes in this directory. What was saved before is
            untouched, and the same step can be saved again.
          ProcessError: processes have called different things, save different steps or states, or one of them
            cannot; or this one was forked.

        At the end of a training call `wait` or `close` (or use `with`): what is still being written when
        the interpreter ends is lost.
        """
        with self._one_at_a_time:
            if not self.is_due(step, force=force):
                return False
            self.wait()
            place = self._agreed(step, state, data_iterator)
            with self._explained(f"step {step} could not be saved"):
                # Orbax saves containers; an array alone gets a name.
                is_leaf = jax.tree_util.all_leaves([state])
                tree = {"state": state} if is_leaf else state
                self._saver.start(step, tree, place, self._notes(state))
            self._restored, self._found = None, ...
            if not self._asynchronous:
                self.wait()
        return True

    def is_due(self, step: int, *, force: bool = False) -> bool:
        """Whether `save` would save this step; to flush a delayed update only then.

        Raises:
          CheckpointError: there is a later step, or writing failed in the background.
        """
        _agreement.check(_SAVE)
        self._raise_failure()
        step = _step_number(_SAVE, step)
        if step in (self._saver.step, self._restored):
            return False
        latest = self._latest()
        if latest is not None and step <= latest:
            self._steps.check_is_last(step)
            self._found = ...  # Those after it were removed.
            latest = self._latest()
        due = force or latest is None or step % self._interval == 0
        return due or (jax.process_count() > 1 and _reached_preemption(step))

    @takes_explicit_axes
    def restore(
        self,
        state: Any,
        *args: Any,
        step: int | None = None,
        data_iterator: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Restores a step into the layout of `train_step`; see `jzero.restore`.

        Args:
          state: its structure, shapes and dtypes: `jax.eval_shape(init_fn, key)`.
          *args: optionally the step's other arguments, arrays or shapes.
          step: which one; the latest by default.
          data_iterator: set to the position of the saved one; by another number of processes, to the position
            that all of them had reached.
          **kwargs: the step's other arguments by name.

        Raises:
          CheckpointError: there is no such step, or its leaves are not those of the state, or are damaged; or
            another number of processes saved their data iterators, and their common position is unknown.
          ProcessError: processes want different steps, have called different things, or one of them failed.
        """
        who = "Checkpointer.restore"
        with self._one_at_a_time:
            self.wait()
            _agreement.confirm(who)
            if step is None:  # The same in all processes, whatever each of them sees.
                step = Round(who).lead("step", self.latest_step)
            path = self._whole(who, step)
            with self._alike(who, data_iterator):
                move = None if data_iterator is None else _iterators.moving(
                    data_iterator, _stored.iterators(who, path), f"step {step} of {self._directory}",
                    jax.process_index(), jax.process_count(),
                )  # fmt: skip
            restored = restore_for(who, path, self._train_step, state, args, kwargs)
            if move is not None:
                with self._alike(f"{who}, data iterator", data_iterator):
                    move()
            self._restored = step
        return restored

    def latest_step(self) -> int | None:
        """The number of the latest complete step; None if there is none.

        An incomplete step is left out, with one warning.

        Raises:
          CheckpointError: writing failed in the background.
        """
        self._raise_failure()
        self._found = found = self._steps.latest()
        return found

    def steps(self) -> list[int]:
        """The numbers of all complete steps, in order; see `latest_step`."""
        self._raise_failure()
        return self._steps.complete()

    def preempted(self, step: int) -> bool:
        """Whether to save and end, because a process was sent SIGTERM: the same answer in all of them.

        Several processes agree on a step by JAX's preemption service. In a single one, SIGTERM does not end
        it any more after the first call (until `close`): ask after every step, in the main thread.
        """
        if jax.process_count() > 1:
            return _reached_preemption(step)
        if not self._watches:
            _sigterm.watch()
            self._watches = True
        return _sigterm.came

    def wait(self) -> None:
        """Waits until what is being written is complete.

        Raises:
          CheckpointError: writing failed.
        """
        with self._one_at_a_time, self._explained("a step could not be written"):
            self._saver.wait()

    def close(self) -> None:
        """Waits, and releases the lock for other processes.

        Raises:
          CheckpointError: writing failed.
        """
        if self._watches:
            _sigterm.release()
        self._watches = False
        with self._one_at_a_time, self._explained("a step could not be written"):
            self._saver.close()

    def __repr__(self) -> str:
        return f"<Checkpointer in {self._directory} for {self._train_step!r}>"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notes(self, state: Any) -> dict[str, Any]:
        """For readers: roles, if a step has run; how the state is sharded; its commit in files, if any."""
        plans, shardings = self._train_step._placement.leaf_plans(state)
        names, mesh = leaf_names(state), shardings[0].mesh.shape if shardings else {}
        writes = zip(names, _writes.of_saved(jax.tree.leaves(state)), strict=True)
        found = {name: _writes.as_text(write) for name, write in writes if write is not None}
        pairs = zip(names, plans, strict=True)
        return {
            "roles": {name: plan.role for name, plan in pairs if plan.role != OTHER},
            "jzero": {
                "version": __version__,
                "stage": int(self._train_step._programs.options.stage),
                "axes": {str(name): size for name, size in mesh.items()},
            },
            **({"writes": found} if found else {}),
        }

    def _agreed(self, step: int, state: Any, data_iterator: Any) -> Any:
        """The state of the data iterator of this process, once all are about to save the same."""
        own, outcome, failure = None, "ready", None
        try:
            leaves = jax.tree.leaves(state)
            _placing.check_alive(state, leaves, _SAVE)
            _placing.check_flushed(_SAVE, state, leaves)
            check_savable(_SAVE, state)
            own = None if data_iterator is None else _iterators.state(data_iterator)
        except Exception as error:
            failure, outcome = error, f"{type(error).__name__}: {error}"
        try:
            _agreement.confirm(_SAVE, lambda: {
                "step": [str(step)], "outcome": [outcome], **_given(data_iterator),
                "leaves": described(state),
            })  # fmt: skip
        finally:
            if failure is not None:
                raise failure
        return own

    def _alike(self, who: str, data_iterator: Any) -> contextlib.AbstractContextManager[None]:
        """Agrees with all processes on having a data iterator; if one of them fails, all do."""
        mesh = self._train_step._programs.config.mesh
        return _agreement.alike(who, mesh, lambda: _given(data_iterator))

    def _whole(self, who: str, step: int | None) -> Path:
        try:
            if step is not None and self._steps.is_there(_step_number(who, step)):
                return self._steps.path(step)
        except _seal.Broken as error:
            path = self._directory / str(step)
            raise CheckpointError(_stored.damaged(who, path, error)) from error
        if there := self._steps.complete():
            raise CheckpointError(message(
                who, f"{self._directory} has no step {step}", f"It has the steps {there}.",
                "Ask latest_step() first."))  # fmt: skip
        raise CheckpointError(message(
            who, f"nothing was saved in {self._directory}", "It has no complete step.",
            "Where latest_step() is None, begin with train_step.init(init_fn, key); or correct the "
            "directory."))  # fmt: skip

    def _latest(self) -> int | None:
        """The step after which the next is saved: the same in all processes, even during a save."""
        if self._saver.step is not None:
            return self._saver.step
        # Every step of a training asks; `save` finds what is later.
        return self.latest_step() if self._found is ... else self._found

    def _raise_failure(self) -> None:
        """Raises what failed in the background; several processes do it in `wait`, when all know it."""
        if jax.process_count() == 1:
            with self._explained("a step could not be written"):
                self._saver.raise_failure()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns errors of Orbax, tensorstore and the file system into ours, with the place."""
        try:
            yield
        except (JzeroError, Warning):
            raise
        except Exception as error:
            raise CheckpointError(message(
                f"Checkpointer {self._directory}", f"{what}: {type(error).__name__}: {error}",
                "Steps that were complete before still are.",
                "Check the path, its permissions, and the space on its disk.")) from error  # fmt: skip


def _given(data_iterator: Any) -> dict[str, list[str]]:
    return {"data iterator": ["none" if data_iterator is None else "one"]}


def _reached_preemption(step: int) -> bool:
    """Whether all processes are to save this step, since one of them is about to end."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # The service that tells is switched off.
        return False


def _step_number(who: str, step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**31:
        raise OptionError(message(
            who, f"step is {step!r:.80}", "It counts steps.", "Pass an integer from 0 on, below 2**31."
        ))  # fmt: skip
    return number


def _check_arguments(
    train_step: Any, max_to_keep: Any, save_interval_steps: Any, save_bytes: Any
) -> int:
    """Returns `save_bytes` in bytes."""
    found, nbytes = [], parse_bytes(save_bytes)
    if not isinstance(train_step, ShardedStep):
        found.append(f"train_step is {a_type(train_step)}, not what shard_train_step returns")
    counts = {"max_to_keep": max_to_keep, "save_interval_steps": save_interval_steps}
    for name, value in counts.items():
        positive = isinstance(value, int) and value >= 1
        if not positive and not (name == "max_to_keep" and value is None):
            found.append(f"{name} is {value!r}, not a positive integer")
    if nbytes is None:
        found.append(f"save_bytes is {save_bytes!r:.80}, and not {BYTES_RULE}")
    if found or nbytes is None:
        raise OptionError(message(
            "Checkpointer", found, "These arguments cannot be obeyed.",
            "Write jzero.Checkpointer(directory, train_step, max_to_keep=3, save_interval_steps=100).",
            things="arguments"))  # fmt: skip
    return nbytes
