"""`Checkpointer`: the steps of one training, saved and restored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero import _placing
from jzero._errors import CheckpointError, JzeroError, StateError, message
from jzero._step import ShardedTrainStep
from jzero.checkpoint import _arrays, _iterators
from jzero.checkpoint._match import leaf_names
from jzero.checkpoint._restore import restore
from jzero.checkpoint._stored import DATA, STATE
from jzero.sharding._plan import OTHER


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
            checkpointer.save(step, state, batches, force=stop)
            if stop:
                break

    With several processes, all of them make the same calls. Saving copies the state to the host and writes it
    in the background, so the next step may consume it: at most one copy of what rests on this host's devices,
    and 64 MiB, or one leaf, of what is being written. Restoring reads each shard straight to its device
    (see `jzero.restore`).

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
        self._directory = epath.Path(directory).absolute()
        self._train_step = train_step
        self._terminated = False
        self._old_handler: Any = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            save_interval_steps=save_interval_steps,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # A damaged step must not keep us from the others.
        )
        with self._explained("opened"):
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=options,
                item_handlers={STATE: _arrays.handler(), DATA: ocp.JsonCheckpointHandler()},
            )

    def save(
        self, step: int, state: Any, data_iterator: Any = None, *, force: bool = False
    ) -> bool:
        """Saves the state after `step` steps, if it is this step's turn.

        Args:
          step: its number, larger than any saved before.
          state: as the step returned it; it may be passed to the next step at once.
          data_iterator: an object with `get_state()` (JSON or bytes) and `set_state(state)`, such as those of
            grain; where it stands is saved too, for every process.
          force: save whatever `save_interval_steps` says.

        Returns:
          Whether it was this step's turn.

        Raises:
          StateError: the state was consumed by a step, or keys with dots make two leaves one.
          CheckpointError: writing failed, now or in the background since the last call. What was saved
            before is untouched.
        """
        if not (force or self._manager.should_save(step)):
            return False
        _placing.check_alive(state)
        _check_names(state)
        items: dict[str, Any] = {STATE: ocp.args.PyTreeSave(_as_container(state))}
        if data_iterator is not None:
            items[DATA] = ocp.args.JsonSave({"iterators": _iterators.states(data_iterator)})
        with self._explained(f"step {step} saved"):
            return self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata=self._notes(state),
                force=True,
            )

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
        steps = self._manager.all_steps()
        step = max(steps, default=None) if step is None else step
        if step is None or step not in steps:
            missing = "no step" if step is None else f"no step {step}"
            raise CheckpointError(message(
                "Checkpointer.restore", f"{self._directory} has {missing}",
                f"It has the steps {sorted(steps)}.", "Ask latest_step() first."))  # fmt: skip
        path = self._directory / str(step)
        restored = restore(
            path, self._train_step, state, *args, who="Checkpointer.restore", **kwargs
        )
        if data_iterator is not None:
            self._restore_iterator(step, data_iterator)
        return restored

    def latest_step(self) -> int | None:
        """The number of the latest complete step; None if there is none."""
        return self._manager.latest_step()

    def preempted(self, step: int) -> bool:
        """Whether to save and end, because a process was sent SIGTERM: the same answer in all of them.

        Several processes agree on a step by JAX's preemption service. In a single one, SIGTERM does not end
        it any more after the first call (until `close`): ask after every step.
        """
        if jax.process_count() > 1:
            return self._manager.reached_preemption(step)
        if self._old_handler is None:
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self._terminated

    def wait(self) -> None:
        """Waits until what is being written is complete.

        Raises:
          CheckpointError: writing failed.
        """
        with self._explained("written"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends its threads."""
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
        self._old_handler = None
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

    def _on_sigterm(self, *_: Any) -> None:
        self._terminated = True

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
    names = leaf_names(state)
    same = [
        (name, first)
        for name in names
        if (first := seen.setdefault(name.replace("/", "."), name)) != name
    ]
    if same:
        raise StateError(message(
            "Checkpointer.save", [f"the leaves {first} and {name} have one name" for name, first in same],
            "In a checkpoint, a dot in a key is what separates keys.", "Rename one of them."))  # fmt: skip
