"""`Checkpointer`: the steps of one training, saved and restored."""

from __future__ import annotations

import contextlib
import operator
import signal
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero import _placing
from jzero._errors import CheckpointError, JzeroError, OptionError, StateError, message
from jzero._step import ShardedTrainStep
from jzero.checkpoint import _arrays, _iterators, _stored
from jzero.checkpoint._match import leaf_names
from jzero.checkpoint._restore import restore_for
from jzero.checkpoint._stored import DATA, STATE
from jzero.sharding._plan import OTHER


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

    A thin layer over `orbax.checkpoint.CheckpointManager`. What it writes are ordinary Orbax checkpoints
    (`directory/<step>/state`), each leaf in its true shape, whatever its layout; so they can be restored at
    another stage, on another mesh, and without jzero. Unlike Orbax's own, they carry checksums: a flipped bit
    is an error. A step is complete or not there at all: it is written beside, and renamed when it is whole.

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
    2 PaddedArray(shape=(257, 3), dtype=float32, padded to (264, 3))

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

    With `HostCPU(delayed_update=True)`, a state that is to be saved is flushed first::

        if checkpointer.is_due(step, force=stop):
            state = train_step.flush(state)

    With several processes, all of them make the same calls. Saving copies the state to the host and writes it
    in the background, so the next step may consume it: at most one copy of what rests on this host and on its
    devices, and 256 MiB, or one leaf, of what is being written. Restoring reads each shard straight to its
    device (see `jzero.restore`).

    Args:
      directory: where the steps are, on a file system that all processes see; made if it is not there.
      train_step: from `shard_train_step`; decides where restored leaves go.
      max_to_keep: how many steps to keep, the latest ones; None for all.
      save_interval_steps: `save` does something for multiples of it only (and for the first step, and when
        the processes are about to be preempted).
      asynchronous: write in the background; else `save` returns when the step is complete.
    """

    def __init__(
        self,
        directory: str | Path,
        train_step: ShardedTrainStep,
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        asynchronous: bool = True,
    ):
        _check_arguments(train_step, max_to_keep, save_interval_steps)
        self._directory = epath.Path(directory).absolute()
        self._train_step = train_step
        self._watches = False
        self._last: int | None = None  # the step that was saved or restored last
        self._options = dict(
            max_to_keep=max_to_keep,
            save_interval_steps=save_interval_steps,
            enable_async_checkpointing=asynchronous,
            lightweight_initialize=True,  # A damaged step must not keep us from the others.
        )
        # Who only reads must not clean up what another process is writing.
        self._writes = False
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        with self._explained("opened"):
            return ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    **self._options, cleanup_tmp_directories=self._writes
                ),
                item_handlers={STATE: _arrays.handler(), DATA: ocp.JsonCheckpointHandler()},
            )

    def save(
        self, step: int, state: Any, data_iterator: Any = None, *, force: bool = False
    ) -> bool:
        """Saves the state after `step` steps, if it is this step's turn.

        Args:
          step: its number, larger than any saved before; the last one again is not its turn.
          state: as the step returned it; it may be passed to the next step at once.
          data_iterator: an object with `get_state()` (JSON or bytes) and `set_state(state)`, such as those of
            grain; where it stands is saved too, for every process.
          force: save whatever `save_interval_steps` says.

        Returns:
          Whether it was this step's turn.

        Raises:
          StateError: the state was consumed by a step or waits for a delayed update, or keys with dots make
            two leaves one.
          CheckpointError: writing failed, now or in the background since the last call, or there is a
            later step. What was saved before is untouched.

        At the end of a training call `wait` or `close` (or use `with`): what is still being written when
        the interpreter ends is lost.
        """
        if not self.is_due(step, force=force):
            return False
        leaves = jax.tree.leaves(state)
        _placing.check_alive(state, leaves)
        _placing.check_flushed("Checkpointer.save", state, leaves)
        _check_names(state)
        items: dict[str, Any] = {STATE: ocp.args.PyTreeSave(_as_container(state))}
        if data_iterator is not None:
            items[DATA] = ocp.args.JsonSave({"iterators": _iterators.states(data_iterator)})
        if not self._writes:
            self._writes = True
            self._manager.close()
            self._manager = self._open()
        with self._explained(f"step {step} saved"):
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata=self._notes(state),
                force=True,
            )
        self._last = step
        return True

    def is_due(self, step: int, *, force: bool = False) -> bool:
        """Whether `save` would save this step; to flush a delayed update only then.

        Raises:
          CheckpointError: there is a later step.
        """
        step, latest = _step_number(step), self._manager.latest_step()
        if step == self._last:
            return False
        if latest is not None and step <= latest:
            raise CheckpointError(message(
                "Checkpointer.save", f"step {step} is not after step {latest} of {self._directory}",
                "Steps are saved in order.", "To go back to an earlier step, remove the directories of those "
                "after it first, or save to another directory."))  # fmt: skip
        return force or self._manager.should_save(step)

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
          data_iterator: set to where the saved one stood.
          **kwargs: the step's other arguments by name.

        Raises:
          CheckpointError: there is no such step, or its leaves are not those of the state, or are damaged.
        """
        self.wait()
        steps = _stored.steps(self._directory)
        step = max(steps, default=None) if step is None else step
        if step is None or step not in steps:
            missing = "no step" if step is None else f"no step {step}"
            raise CheckpointError(message(
                "Checkpointer.restore", f"{self._directory} has {missing}",
                f"It has the steps {steps}.", "Ask latest_step() first."))  # fmt: skip
        path = self._directory / str(step)
        who = "Checkpointer.restore"
        restored = restore_for(who, path, self._train_step, state, args, kwargs)
        if data_iterator is not None:
            self._restore_iterator(step, data_iterator)
        self._last = step
        return restored

    def latest_step(self) -> int | None:
        """The number of the latest complete step; None if there is none."""
        return max(_stored.steps(self._directory), default=None)

    def preempted(self, step: int) -> bool:
        """Whether to save and end, because a process was sent SIGTERM: the same answer in all of them.

        Several processes agree on a step by JAX's preemption service. In a single one, SIGTERM does not end
        it any more after the first call (until `close`): ask after every step, in the main thread.
        """
        if jax.process_count() > 1:
            return self._manager.reached_preemption(step)
        if not self._watches:
            _sigterm.watch()
            self._watches = True
        return _sigterm.came

    def wait(self) -> None:
        """Waits until what is being written is complete.

        Raises:
          CheckpointError: writing failed.
        """
        with self._explained("written"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends its threads."""
        if self._watches:
            _sigterm.release()
        self._watches = False
        with self._explained("written"):
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _notes(self, state: Any) -> dict[str, Any]:
        """What a reader may want to know that the files do not say: roles, if a step has run."""
        plans, _ = self._train_step.leaf_plans(state)
        pairs = zip(leaf_names(state), plans, strict=True)
        return {"roles": {name: plan.role for name, plan in pairs if plan.role != OTHER}}

    def _restore_iterator(self, step: int, data_iterator: Any) -> None:
        where = f"step {step} of {self._directory}"
        if not (self._directory / str(step) / DATA).exists():
            raise CheckpointError(message(
                f"Checkpointer.restore {where}", "it was saved without a data iterator",
                "There is nothing to restore it from.", "Leave data_iterator out."))  # fmt: skip
        with self._explained(f"the data iterator of step {step} restored"):
            found = self._manager.restore(
                step, args=ocp.args.Composite(**{DATA: ocp.args.JsonRestore()})
            )
        _iterators.restore(data_iterator, found[DATA]["iterators"], where)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Errors of Orbax, tensorstore and the file system as ours, with the place."""
        try:
            yield
        except JzeroError:
            raise
        except Exception as error:
            if hasattr(self, "_manager"):
                self._manager.reload()  # It forgets complete steps when one could not be written.
            raise CheckpointError(message(
                f"Checkpointer {self._directory}", f"could not be {what}: {type(error).__name__}: {error}",
                "Steps that were complete before still are.",
                "Check the path, its permissions, and the space on its disk.")) from error  # fmt: skip


def _as_container(state: Any) -> Any:
    """Orbax saves containers; an array alone gets a name."""
    return {"state": state} if jax.tree_util.all_leaves([state]) else state


def _check_names(state: Any) -> None:
    """Orbax calls the array of `c/d` `c.d`: as that of a leaf whose name is `c.d`."""
    seen: dict[str, str] = {}
    same = []
    for name in leaf_names(state):
        key = name.replace("/", ".")
        if key in seen:
            same.append((seen[key], name))
        seen[key] = name
    if same:
        raise StateError(message(
            "Checkpointer.save", [f"the leaves {first} and {name} have one name" for first, name in same],
            "In a checkpoint, dots and slashes separate keys.", "Rename one of them."))  # fmt: skip


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise OptionError(message(
            "Checkpointer.save", f"step is {step!r}", "It counts steps.", "Pass an integer from 0 on."
        ))  # fmt: skip
    return number


def _check_arguments(train_step: Any, max_to_keep: Any, save_interval_steps: Any) -> None:
    found = []
    if not isinstance(train_step, ShardedTrainStep):
        found.append(
            f"train_step is a {type(train_step).__name__}, not what shard_train_step returns"
        )
    counts = {"max_to_keep": max_to_keep, "save_interval_steps": save_interval_steps}
    for name, value in counts.items():
        positive = isinstance(value, int) and value >= 1
        if not positive and not (name == "max_to_keep" and value is None):
            found.append(f"{name} is {value!r}, not a positive integer")
    if found:
        raise OptionError(message(
            "Checkpointer", found, "These arguments cannot be obeyed.", "Correct them.",
            things="arguments"))  # fmt: skip
