# SPDX-License-Identifier: Apache-2.0
"""`restore`: a checkpoint, straight into the layout of a sharded step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jzero._errors import CheckpointError, OptionError, a_type, first_of, message, warn
from jzero._in_turn import groups
from jzero._sharded_step import ShardedStep
from jzero.checkpoint import _stored
from jzero.checkpoint._match import Leaf, Origin, leaf_names, match
from jzero.checkpoint._reading import ReadAs
from jzero.offload.memory import _available, _placing, _writes
from jzero.offload.memory._placing import Place
from jzero.processes import _agreement
from jzero.tracing import _call
from jzero.tracing._axis_types import takes_explicit_axes

_AT_ONCE = 2**27  # bytes that may be read at the same time, however small the leaves are
_TO_HOST = 2**28  # bytes that are read to pinned memory before they move to where they are stored


@takes_explicit_axes
def restore(
    path: str | Path, train_step: ShardedStep, state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Restores one checkpoint into the layout of `train_step`, whatever layout it was saved in.

    Any checkpoint of Orbax whose leaves have the state's names will do: saved by a `Checkpointer` at
    another stage, on other devices, or another mesh; or by Orbax from a state that was never sharded.
    Each device reads its shard, and never a whole leaf; at most 128 MiB, or twice the largest leaf, have
    been read and are not yet on their device. Of the state that `HostCPU` stores on the host, 256 MiB or the
    largest leaf (once for each device on which it is replicated) are in pinned memory during the transfer.
    With `jzero.master_weights` on one side only, parameters are restored from the masters, or masters from
    the parameters.

    >>> import tempfile, jax, jax.numpy as jnp, orbax.checkpoint as ocp, jzero
    >>> def step_fn(state, batch):
    ...     grads = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    ...     return {"w": state["w"] - 0.1 * grads}
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as orbax:
    ...     orbax.save(folder + "/plain", {"w": jnp.ones((64, 8))})
    ...     orbax.wait_until_finished()
    ...     state = jzero.restore(folder + "/plain", train_step, {"w": jnp.zeros((64, 8))})
    >>> state["w"].sharding.shard_shape((64, 8))
    (8, 8)

    Args:
      path: the directory of one checkpoint: `checkpoints/1000` of a `Checkpointer`.
      train_step: from `shard_train_step`.
      state: the state to restore: its structure, shapes and dtypes count, as `jax.eval_shape(init_fn, key)`
        has them.
      *args: optionally the step's other arguments (arrays or shapes): with them, parameters are stored as
        stages 1 and 2 have them from the start; see `ShardedStep.state_shardings`.
      **kwargs: the same by name.

    Returns:
      The state, placed.

    Raises:
      CheckpointError: every leaf that is missing, left over, of another shape or dtype, or damaged; or the
        state is a function.
      OptionError: the host has too little memory for its part of the state; see `ShardedStep.init`.
      ProcessError: processes have called different things, or this one was forked.
    """
    return restore_for("restore", path, train_step, state, args, kwargs)


def restore_for(
    who: str, path: str | Path, train_step: ShardedStep, state: Any,
    args: Sequence[Any], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    _agreement.check(who)
    if not isinstance(train_step, ShardedStep):
        raise OptionError(message(
            who, f"train_step is {a_type(train_step)}", "It decides where each leaf goes.",
            "Pass what jzero.shard_train_step returned."))  # fmt: skip
    if callable(state) and jax.tree_util.all_leaves([state]):
        name = getattr(state, "__name__", "init_fn")
        raise CheckpointError(message(
            who, f"state is the function {name}", "A state is restored into its shapes.",
            f"Pass jax.eval_shape({name}, ...), with the arguments of {name}."))  # fmt: skip
    mesh = train_step._programs.config.mesh
    with _agreement.alike(who, mesh, lambda: {"checkpoint": _stored.identity(task.stored)}):
        task = _Task(who, path, train_step, state, args, kwargs)
    with _agreement.alike(who, mesh, lambda: {"call": [f"{who}, done"]}):
        restored = task.run()
    return restored


class _Task:
    def __init__(
        self, who: str, path: str | Path, train_step: ShardedStep, state: Any,
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._who, self.stored = who, _stored.find(who, path)
        placement = train_step._placement
        self._plans, shardings = placement.leaf_plans(state, args, kwargs)
        self._tree, names = jax.tree.structure(state), leaf_names(state)
        leaves = jax.tree.leaves(_call.abstract(state, "state"))
        self._leaves = dict(zip(names, leaves, strict=True))
        wanted = dict[str, Leaf]()
        for (name, leaf), plan in zip(self._leaves.items(), self._plans, strict=True):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.eval_shape(jax.random.key_data, leaf)  # as its bits are stored
            wanted[name] = Leaf(plan.path, leaf.shape, str(leaf.dtype))
        self._sources = match(who, wanted, self.stored.leaves, str(self.stored.directory))
        found = _stored.writes(who, self.stored)
        self._writes = [found.get(self._sources[name].name) for name in self._leaves]
        if not placement.programs.options.offload.resumes:
            self._warn_of_zeros()
        places = placement.places(self._plans, shardings)
        self._filling = placement.filling(self._plans, places)
        self._places = dict(zip(names, places, strict=True))
        needs = _placing.host_needs(places)
        _available.check(who, _available.shortage(needs, placement.programs.config.mesh))

    def _warn_of_zeros(self) -> None:
        """Leaves that were saved beside state in files may stand for what is there."""
        pairs = zip(self._leaves, self._writes, strict=True)
        without = [name for name, write in pairs if not write]
        if without and any(self._writes):
            warn(message(
                self._who, f"{len(without)} leaves of {self.stored.directory} may stand for state in files "
                f"that it was saved beside: {first_of(without)}",
                "They are restored as they were saved, zeros too.", "If they are zeros, restore with "
                "memory=jzero.NVMe(path, resume=True), where these files are."))  # fmt: skip

    def run(self) -> Any:
        placed: dict[str, Any] = {}
        with self._filling or contextlib.nullcontext():
            if self._filling:
                self._filling.start(self._writes)
            for group in _groups(self._sources, self._places):
                placed |= zip(group, self._read(group), strict=True)
        leaves = [placed[name] for name in self._leaves]
        if self._filling:
            _writes.settle(leaves)
        for leaf, write in zip(leaves, self._writes, strict=True) if not self._filling else ():
            _writes.note(leaf, write)
        wrapped = _placing.wrap(leaves, self._plans)
        return jax.tree.unflatten(self._tree, wrapped)

    def _read(self, group: Sequence[str]) -> list[Any]:
        places = [self._places[name] for name in group]
        if self._filling and self._filling.resumed and self._places[group[0]].placement:
            return _placing.place_state([...] * len(group), places, filling=self._filling)
        names = [self._sources[name].name for name in group]
        dtypes = [self._leaves[name].dtype for name in group]
        how = [ReadAs(x.plan.padded_shape, dtype, x.sharding)
               for x, dtype in zip(places, dtypes, strict=True)]  # fmt: skip
        at_once = max(_AT_ONCE, *(2 * plan.nbytes for plan in self._plans))
        found = _stored.read(self._who, self.stored, dict(zip(names, how, strict=True)), at_once)
        # Python numbers become arrays, and what goes on to the host is there before more is read.
        return _placing.place_state([found[name] for name in names], places, filling=self._filling)


def _groups(sources: Mapping[str, Origin], places: Mapping[str, Place]) -> Iterator[list[str]]:
    """The leaves that are read together: what stays where it is read to, others up to so many bytes."""

    def nbytes(name: str) -> int:  # one part for each device of this process, replicas or not
        place = places[name]
        return place.plan.nbytes_per_device * len(place.sharding.addressable_devices)

    for cast in (False, True):  # A master that becomes a parameter, too, is read for each.
        chosen = [name for name, source in sources.items() if source.cast == cast]
        here = [name for name in chosen if places[name].placement is None]
        there = [name for name in chosen if places[name].placement is not None]
        yield from [here] if here else []
        yield from groups(there, _TO_HOST, nbytes)
