"""`shard_train_step`, the one call a user makes, and the `ShardedTrainStep` that it returns."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import OptionError, StateError, message
from jzero._memory_kinds import HOST
from jzero.offload._policy import NO_OFFLOAD
from jzero.offload.memory import _available, _placing
from jzero.offload.memory._host_array import HostArray
from jzero.offload.memory._padded import PaddedArray
from jzero.processes import _agreement
from jzero.reports._describe import Report
from jzero.segments import _identity, _program
from jzero.segments._program import Program
from jzero.segments._programs import Programs, placed_inputs
from jzero.sharding.analysis import _traffic
from jzero.sharding.plan import _leaves, _make
from jzero.sharding.plan._offload import Offload
from jzero.sharding.plan._options import MAX_GATHER_BYTES, Options, axis_tuple
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._setting import Setting, setting_of
from jzero.sharding.run import _microbatches
from jzero.tracing import _call, _jaxpr
from jzero.tracing._batch import Batch

WHO = _call.WHO


def shard_train_step(
    step_fn: Callable[..., Any] | None = None,
    *,
    stage: int = 3,
    accumulate: int = 1,
    reduce: str | None = None,
    accumulate_dtype: Any = None,
    reduce_dtype: Any = None,
    gather: str | None = None,
    prefetch_bytes: int | None = None,
    min_shard_bytes: int = 1024,
    full: str | None = None,
    param_axes: str | Sequence[str] | None = None,
    optimizer_axes: str | Sequence[str] | None = None,
    auto_specs: Mapping[str, PartitionSpec] | None = None,
    offload: Offload = NO_OFFLOAD,
    max_gather_bytes: int = MAX_GATHER_BYTES,
    mesh: Any = None,
    axis_names: str | Sequence[str] | None = None,
    axis_name: str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    in_specs: Mapping[str | int, Any] | None = None,
) -> Any:
    """Removes the redundancy of data parallelism from a train step, like ZeRO.

    The result is called like `step_fn` and trains what `jax.jit(step_fn)` trains on one device with the
    whole batch. In between, each device holds its rows of the batch and its part of the state::

        what is summed over the batch is summed over the devices, there   # gradients, losses, statistics
        gradients are reduce-scattered                                    # stage >= 1
        optimizer state and parameters are updated in shards              # stage >= 1
        parameters rest in shards, gathered once for each pass            # stage 3

    `step_fn(state, *args) -> (state, metrics)`, or the state alone. The state is any pytree of arrays:
    Flax `TrainState`, `nnx.State`, a tuple, a dataclass. Whatever the step does with its rows (losses that
    couple them, sorts, control flow on a loss, noise) means what it means on one device; outputs with rows
    come back whole, in their order. An operation along the batch that has no rule gathers the rows:
    `describe` lists it.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = optax.adam(1e-2)
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> params = jnp.ones((8, 4))
    >>> state, metrics = train_step((params, tx.init(params)), jnp.ones((8, 8)))
    >>> metrics["loss"].item()
    64.0

    Sharp edges: the state is donated, as with `jax.jit(step_fn, donate_argnums=0)`. A step that has
    collectives of its own over the data axes (`axis_name`) is taken as one device's, as `jax.pmap` would:
    it is obeyed as written, on each device's rows, and what it leaves different between devices, in the state
    or as a metric without rows, is refused. With several processes, each calls the step with its own
    rows as part of one array (`jax.make_array_from_process_local_data`); a NumPy array stands for the whole
    batch on all of them.

    Args:
      step_fn: the train step; None to use `shard_train_step(stage=...)` as a decorator.
      stage: 0 nothing is sharded (2 Psi elements of traffic per step for Psi parameters), 1 optimizer
        state, 2 also reduced gradients (both 2 Psi), 3 also parameters (3 Psi).
      accumulate: microbatches k that each device works through in a step, one after the other: the
        activations of one are alive at a time. The step itself does not change, and trains what it trains
        with the whole batch. What needs all rows before it goes on (a count, the embeddings of a contrastive
        loss, a median) runs in several loops, of which the later ones compute again what they need, or read
        what was kept (`describe` lists both). Refused are rows that are gathered inside a loop or branch of
        the step, and steps whose products would run more than four times as often (BatchNorm in every layer).
        Traffic: see `reduce` and `gather`. Memory: one more gradient, in `accumulate_dtype`, in the
        layout that `reduce` gives it.
      reduce: 'once' sums gradients up on each device and reduces them after the last microbatch: Psi
        elements per step, and a full gradient on each device. 'each' reduces those of each microbatch: k
        Psi, and a gradient in shards. Stages 0 and 1 are 'once', stage 2 is 'each', stage 3 can be either
        and is 'each' by default. It holds for a step's own loop over microbatches too.
      accumulate_dtype: in which the gradients of microbatches are summed up. By default float32 (float64
        for float64 ones): 4 bytes per element of the gradient that `reduce` keeps.
      reduce_dtype: in which gradients travel and are summed over the devices: bfloat16 halves the bytes
        of float32 gradients, float32 sums bfloat16 ones more exactly. By default as the step has them.
      gather: at stage 3, how long gathered parameters live. 'per_pass' (default): gathered for the
        forward pass, freed, and again for the backward pass: 2 Psi per microbatch, memory of one layer.
        'keep': the forward pass's copy serves the backward pass: Psi per microbatch, Psi elements alive
        in between. 'once_per_step': one gather serves all microbatches: Psi, alive throughout.
      prefetch_bytes: at stage 3, how many gathered bytes there may be on each device ahead of the matrix
        products that first use them, so that gathers hide behind compute: a loop over layers gathers for
        the next layer while it computes this one. Traffic does not change. Memory: up to these bytes,
        beside what is in use. By default 256 MiB, a layer of 128 Mi bfloat16 parameters. Larger ones are
        gathered beside the product before theirs; with 0 nothing is, and a gather waits for all products
        before its use.
      min_shard_bytes: leaves smaller than this stay full, because a collective costs more time than
        they cost memory; 0 shards whatever can be. Each costs its bytes on every device.
      full: a regular expression, searched in the paths of parameters at stage 3; those that match rest
        full and are never gathered, while their gradients and optimizer state stay in shards (as at
        stage 2). Costs their bytes on every device, saves Psi_leaf of traffic per microbatch.
      param_axes: the data axes over which parameters rest at stage 3, all by default. With
        param_axes='local' they are gathered within a node; new ones are gathered over the other axes
        of `optimizer_axes` once per step (ZeRO-3 inside a node, ZeRO-1 over all of them). Memory:
        parameters are divided by the devices of these axes only.
      optimizer_axes: the data axes over which gradients and optimizer state are sharded, all by default.
        param_axes='local', optimizer_axes='local' is hybrid sharding (HSDP, MiCS): shards within a
        node, gradients all-reduced between nodes, as shards and once per step.
      auto_specs: `{regular expression: PartitionSpec}`, how state leaves rest over mesh axes that are
        not among `axis_names` (tensor parallelism): the first expression found in a leaf's path counts,
        for moments too. ZeRO shards another dim of such a leaf. Inside the step, say it with
        `jax.lax.with_sharding_constraint(x, PartitionSpec(...))`; XLA places those collectives, and
        `describe` does not count them.
      offload: where optimizer state rests. By default, `jzero.NoOffload()`, on the devices.
        `jzero.PinnedHost(device_bytes=...)`: in the pinned memory of the devices' host; each step copies it
        to the devices and back, piece by piece, and never has more than `device_bytes` of it there.
        `jzero.HostCPU(...)`: in the host's memory, updated there by its processors; only gradients and
        parameters cross. Scalars, leaves below `min_shard_bytes`, and what is read with the batch stay. A
        step is then several programs: it cannot be called under an outer `jax.jit` or lowered. One that
        fails while it runs (out of memory, not a refused batch) may have consumed part of its state.
      max_gather_bytes: the most bytes of a value with the batch's rows that one operation may gather on
        every device. An operation that needs the rows of all devices (a sort of the batch, a callback
        without `jzero.per_example`) is exact and not free; `describe` lists each, and one above this bound
        is refused.
      mesh: a `jax.sharding.Mesh`. By default that of `jax.set_mesh`, else one axis over all devices.
      axis_names: the mesh axes to shard over, the data axes; all of the mesh's by default. Others must
        be of type Auto and stay XLA's.
      axis_name: the name by which the step itself calls the data axis, if it was written for
        `jax.pmap(..., axis_name=...)`. To such a step each microbatch is a device: with `accumulate=k` it
        trains what it would on k times as many devices.
      static_argnums: positions of arguments that are compiled in, as for `jax.jit`.
      static_argnames: their names.
      in_specs: `{argument: PartitionSpec}` (by name or position; tree prefixes allowed) for arguments
        whose rows are not along dim 0 (`P(None, 'data')`), or that shall be whole on every device (`P()`).
        It decides only costs.

    Returns:
      A `ShardedTrainStep`.

    Raises:
      OptionError: an option that cannot be obeyed.
      MeshError: a mesh or axis that does not fit (some of it when first called).

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020, sections 5 (stages) and 7 (traffic). Zhang et al.: "MiCS: Near-linear Scaling for
      Training Gigantic Model on Public Cloud", 2022, section 3 (param_axes, optimizer_axes).
    """
    chosen = Options(
        stage, accumulate, reduce, accumulate_dtype, reduce_dtype, gather, prefetch_bytes,
        min_shard_bytes, full, axis_tuple(param_axes), axis_tuple(optimizer_axes),
        _items(auto_specs), max_gather_bytes, offload=offload,
    )  # fmt: skip
    options = dict(
        options=chosen, mesh=mesh, axis_names=axis_names, axis_name=axis_name,
        static_argnums=static_argnums, static_argnames=static_argnames, in_specs=in_specs,
    )  # fmt: skip
    if step_fn is None:
        return lambda fn: ShardedTrainStep(fn, **options)
    return ShardedTrainStep(step_fn, **options)


def _items(auto_specs: Mapping[str, PartitionSpec] | None) -> tuple[tuple[str, Any], ...]:
    if not isinstance(auto_specs, Mapping | None):
        raise OptionError(message(
            WHO, f"auto_specs={auto_specs!r}", "It maps regular expressions to PartitionSpecs.",
            "Write {'regular expression': jax.P(None, 'model')}."))  # fmt: skip
    return tuple((auto_specs or {}).items())


class ShardedTrainStep:
    """A train step whose state lives in shards; see `shard_train_step` for how it behaves.

    Attributes:
      __wrapped__: the function it was made from.
    """

    def __init__(
        self, step_fn: Callable[..., Any], *, options: Options, mesh: Any,
        axis_names: str | Sequence[str] | None, axis_name: str | None,
        static_argnums: int | Sequence[int], static_argnames: str | Sequence[str],
        in_specs: Mapping[str | int, Any] | None,
    ):  # fmt: skip
        if not callable(step_fn):
            raise OptionError(message(
                WHO, f"step_fn is a {type(step_fn).__name__}", "It must be a function.",
                "Write shard_train_step(step_fn, stage=3)."))  # fmt: skip
        if isinstance(step_fn, ShardedTrainStep):
            raise OptionError(message(
                WHO, "step_fn is already a ShardedTrainStep", "A step is sharded once.",
                "Pass its __wrapped__."))  # fmt: skip
        # jit's functions have both; Equinox's are objects, and are traced like any other.
        if isinstance(step_fn, types.FunctionType) and (
            hasattr(step_fn, "lower") and not hasattr(step_fn, "trace")
        ):
            raise OptionError(message(
                WHO, "step_fn was made by jax.pmap", "jzero runs the step on all devices itself.",
                "Pass the function inside, with the axis_name= that pmap had."))  # fmt: skip
        self._step_fn = step_fn
        self._options = options
        self._mesh = mesh
        self._axis_names = axis_tuple(axis_names)
        self._axis_name = axis_name
        self._signature = _call.Signature.of(step_fn, static_argnums, static_argnames, in_specs)
        self._programs = Programs(step_fn, self._signature)
        # Of the last plans and shardings, since every step asks: hundreds of leaves take 0.7 ms.
        self._places: tuple[Any, Any, list[_placing.Place]] | None = None
        functools.update_wrapper(self, step_fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: `(state, *args) -> (state, metrics)`. The state is donated.

        A state that is not yet laid out as the plan says is placed first (and then not consumed). Under
        an outer `jax.jit` the step is traced into it, and nothing is donated.

        Raises:
          StateError, BatchError, StepError: see the message; the state is left as it was.
          ProcessError: several processes are about to run different programs, or one does not come.
        """
        _agreement.check(WHO)
        call = self._signature.bind(args, kwargs)
        state = jax.tree.leaves(call.state)
        arrays = jax.tree.leaves(call.arrays)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in [*state, *arrays]):
            self._check_one_program("called under an outer jax.jit")
            program = self._program_for(call)
            leaves = program.plan.leaves
            state, arrays = _placing.as_arrays(state, arrays)
            new_state, outs = program.step.run(
                _placing.constrain(_placing.pad(state, leaves), program.state_shardings),
                _placing.constrain(arrays, program.argument_shardings),
            )
            new_state = _placing.unpad(new_state, leaves, program.state_shardings)
        else:
            program = self._programs.agreed(call, self._setting())
            leaves = program.plan.leaves
            new_state, outs = program.step(
                self._place_state(call.state, state, leaves, program.state_shardings),
                _placing.place(
                    arrays,
                    program.argument_shardings,
                    lambda: _call.argument_paths(call.arrays),
                ),
            )
            new_state = _placing.wrap(new_state, leaves)
        return jax.tree.unflatten(program.out_tree, [*new_state, *outs])

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `init_fn(*args, **kwargs) -> state` so that every leaf is born in its layout.

        Never whole on one device: the initialiser is compiled with the state's shardings as outputs.
        See `state_shardings` for what the layout is before the step has seen a batch. What rests on the
        host is made in groups of up to `device_bytes` (256 MiB with `HostCPU`), each by a program of its
        own.

        Returns:
          The state, placed.

        Raises:
          OptionError: the host has too little memory for its part of the state, by what is available before
            (each of several processes on one host counts for itself).
          ProcessError: several processes are about to make different states, or one does not come.
        """
        _agreement.check("init")
        # Traced once: every call of init_fn may make another optimizer, and so another tree.
        traced = _jaxpr.trace_here(lambda: init_fn(*args, **kwargs))
        state = jax.tree.unflatten(traced.out_tree, traced.out_avals)
        leaves, shardings = self.leaf_plans(state)
        places = self.places(leaves, shardings)
        self._agree_on_state("init", leaves, _placing.host_bytes(places), lambda: (
            _identity.of_jaxpr(traced.jaxpr, traced.consts)
        ))  # fmt: skip
        made = _placing.born(traced, places, self._options.offload.visiting_bytes)
        return jax.tree.unflatten(traced.out_tree, _placing.wrap(made, leaves))

    def shard(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Places a state that exists; leaves that already lie right are not copied.

        Several processes that each hold the state whole must hold the same: they compare it (by
        checksum), and each copies what its devices need.

        Args:
          state: the state, on host or devices, in any layout.
          *args: optionally the step's other arguments (arrays or `ShapeDtypeStruct`s); see
            `state_shardings`.
          **kwargs: the same by name.

        Raises:
          StateError: an earlier step has consumed it.
          OptionError: the host has too little memory for its part of it; see `init`.
          ProcessError: it differs between processes, or one does not come.
        """
        _agreement.check("shard")
        plans, shardings = self.leaf_plans(state, *args, **kwargs)
        leaves, tree = jax.tree.flatten(state)
        placed = self._place_state(state, leaves, plans, shardings)
        return jax.tree.unflatten(tree, _placing.wrap(placed, plans))

    def flush(self, state: Any) -> Any:
        """The state with the gradients applied that `HostCPU(delayed_update=True)` has not applied yet.

        Without any, the state itself. Before a checkpoint is written and at the end of a training: a state
        that waits for an update cannot be read. It is consumed; the step after it is computed without
        staleness, and its gradients are the next to wait.

        >>> import jax, jax.numpy as jnp, optax, jzero
        >>> tx = optax.sgd(0.1, momentum=0.9)
        >>> def step_fn(state, batch):
        ...     w, opt_state = state
        ...     grads = jax.grad(lambda w: jnp.mean(batch @ w))(w)
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     return optax.apply_updates(w, updates), opt_state
        >>> policy = jzero.HostCPU(delayed_update=True, delay_after=0)
        >>> train_step = jzero.shard_train_step(step_fn, offload=policy)
        >>> w, batch = jnp.ones((64, 8)), jnp.ones((8, 64))
        >>> state = train_step((w, tx.init(w)), batch)
        >>> state[0][0, 0].item(), round(train_step.flush(state)[0][0, 0].item(), 4)
        (1.0, 0.9875)

        Raises:
          StateError: a step has consumed it, or it waits for gradients and this train_step has no `HostCPU`.
        """
        _agreement.check("flush")
        leaves, tree = jax.tree.flatten(state)
        _placing.check_alive(state, leaves, "flush")
        pending = next((x.pending for x in leaves if isinstance(x, HostArray) and x.pending), None)
        if pending is None:
            return state
        if self._options.offload.tier != HOST:
            raise StateError(message(
                "flush", "the state waits for gradients, and this train_step keeps none on the host",
                "A step applies what it has computed.",
                "Call flush of the train_step that returned the state."))  # fmt: skip
        _agreement.note("flush", self._setting().mesh)
        step = pending.step
        new = step.flush(self._place_state(state, leaves, step.leaves, step.shardings))
        return jax.tree.unflatten(tree, _placing.wrap(new, step.leaves))

    def unshard(self, state: Any) -> Any:
        """The state with every leaf whole on every device of the mesh, to evaluate, to keep or to export.

        In arrays of its own: the next step consumes the state, and none of them.
        """
        _agreement.check("unshard")
        setting = self._setting()
        full = NamedSharding(setting.mesh, PartitionSpec())
        leaves, tree = jax.tree.flatten(state)
        _placing.check_alive(state, leaves, "unshard")
        _placing.check_flushed("unshard", state, leaves)
        if not all(_placing.lies_right(x, full) for x in leaves):
            _agreement.confirm("unshard", mesh=setting.mesh)  # What it returns may be looked at.
        plain = [jnp.asarray(x) if isinstance(x, PaddedArray | HostArray) else x for x in leaves]
        whole = _placing.place(
            plain, [full] * len(leaves), lambda: _call.leaf_paths(state, "state")
        )
        shared = [i for i, leaf in enumerate(leaves) if whole[i] is leaf]
        copies = _placing.copied([leaves[i] for i in shared], full)
        for i, copy_of in zip(shared, copies, strict=True):
            whole[i] = copy_of
        return jax.tree.unflatten(tree, whole)

    def state_shardings(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """A `NamedSharding` for every leaf of the state, in its structure; as Orbax wants to restore.

        With the step's other arguments (shapes suffice), or once a step with this state has run, these
        are the plan's. Before that, roles are unknown: every leaf is sharded that can be, and the first
        step moves what its plan has full (parameters at stages 1 and 2). With `offload`, every leaf rests
        on the host until then.

        A leaf that is padded at rest (`PaddedArray`) has none for its true shape: it is given as full
        here, and padded when `shard` or the step places it.
        """
        plans, shardings = self.leaf_plans(state, *args, **kwargs)
        full = NamedSharding(self._setting().mesh, PartitionSpec())
        found = [full if p.padding else s for p, s in zip(plans, shardings, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), found)

    def _place_state(
        self, state: Any, leaves: Sequence[Any], plans: Sequence[_leaves.LeafPlan],
        shardings: Sequence[NamedSharding],
    ) -> list[Any]:  # fmt: skip
        """The leaves of `state` where the plan has them, padded."""
        _placing.check_alive(state, leaves)
        places = self.places(plans, shardings)
        _placing.check_flushed("shard", state, leaves, places)
        held = _placing.held_whole(leaves, shardings)
        num_bytes = _placing.host_bytes(places, leaves)
        if held or num_bytes:
            self._agree_on_state("shard", plans, num_bytes, lambda: {
                "values": [f"{plans[i].path} {_agreement.checksum(leaves[i])}" for i in held]
            })  # fmt: skip
        return _placing.place_state(leaves, places, held)

    def _agree_on_state(
        self, who: str, plans: Sequence[_leaves.LeafPlan], num_bytes: int,
        sections: Callable[[], _agreement.Sections],
    ) -> None:  # fmt: skip
        """Every process is about to make the same state, and each has `num_bytes` more for its part of it."""
        setting, shortage = self._setting(), _available.shortage(num_bytes)
        _agreement.agree(who, setting.mesh, lambda: {
            **_identity.of_state(setting, plans), "memory": [shortage or "enough"], **sections()
        })  # fmt: skip
        _available.check(who, shortage)

    def places(
        self, plans: Sequence[_leaves.LeafPlan], shardings: Sequence[NamedSharding]
    ) -> list[_placing.Place]:
        """Where each leaf of a state goes; from `leaf_plans` or a program."""
        known = self._places
        if known is None or known[0] is not plans or known[1] is not shardings:
            axes: tuple[str, ...] = ()
            if self._options.offload.tier == HOST:
                setting = self._setting()
                axes = (*setting.sharding.shard_axes, *setting.automatic)
            known = self._places = plans, shardings, _placing.places(plans, shardings, axes)
        return known[2]

    def leaf_plans(
        self, state: Any, *args: Any, **kwargs: Any
    ) -> tuple[tuple[_leaves.LeafPlan, ...], list[NamedSharding]]:
        """Where each leaf of the state rests, as far as it is known: see `state_shardings`.

        The shardings are those of leaves at rest, of the shape `LeafPlan.padded_shape`.
        """
        setting = self._setting()
        abstract = _call.abstract(state, "state")
        plans: tuple[_leaves.LeafPlan, ...] | None
        if args or kwargs:
            plans = self._program_for(self._signature.bind((state, *args), kwargs)).plan.leaves
        else:
            plans = self._programs.layout_of(abstract, setting)
        if plans is None:
            plans = _leaves.plan_from_shapes(
                _make.state_leaves(abstract, setting),
                setting.sharding,
                self._options.offload.tier,
            )
        return plans, _program.shardings_of(plans, setting.mesh)

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """The plan for `(state, *args)`: arrays or `ShapeDtypeStruct`s; nothing runs."""
        _agreement.check("plan")
        return self._program_for(self._signature.bind(args, kwargs)).plan

    def describe(self, *args: Any, **kwargs: Any) -> Report:
        """What a step on `(state, *args)` keeps where and moves between devices; print it.

        Arrays or `ShapeDtypeStruct`s; nothing runs, and with an abstract mesh no device is needed.
        """
        _agreement.check("describe")
        call = self._signature.bind(args, kwargs)
        program = self._program_for(call)
        jaxpr = jax.make_jaxpr(program.step.run)(*placed_inputs(call, program))
        return Report(
            program.plan,
            tuple(_traffic.collectives(jaxpr)),
            program.keys,
            _traffic.carried_bytes(jaxpr, _microbatches.SCOPE),
            program.step.crossings(),
            program.step.roads(),
            program.movements,
            program.whole_arguments,
        )

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """`jax.jit(...).lower` of the step for `(state, *args)`: to compile ahead, or to read."""
        _agreement.check("lower")
        self._check_one_program("lowered")
        call = self._signature.bind(args, kwargs)
        program = self._program_for(call)
        return program.step.trace(*placed_inputs(call, program)).lower()

    def _check_one_program(self, how: str) -> None:
        if self._options.offloads:
            raise OptionError(message(
                WHO, f"offload={self._options.offload}, and the step is {how}",
                "An offloaded step is a loop of programs: one alone would hold all of the state on devices.",
                "Call train_step outside of jax.jit, or drop offload."))  # fmt: skip

    @property
    def mesh(self) -> Any:
        """The mesh it was made for; None for whatever is current when it is called."""
        return self._mesh

    @property
    def current_mesh(self) -> Any:
        """The mesh that a call would run on now."""
        return self._setting().mesh

    def on_mesh(self, mesh: Any) -> ShardedTrainStep:
        """The same step, with the same options, on another mesh."""
        other = copy.copy(self)
        other._mesh, other._places = mesh, None
        other._programs = Programs(self._step_fn, self._signature)
        return other

    def batch_of(self, who: str, *args: Any, **kwargs: Any) -> Batch:
        """The shapes of a call, in which the rows of the batch can be changed; for `who` asks."""
        call = self._signature.bind(args, kwargs)
        setting = self._setting()
        specs = [sharding.spec for sharding in self._program_for(call).argument_shardings]
        dims = tuple(_call.microbatch_dim(spec, setting.axes) for spec in specs)
        parts = math.prod(setting.batch_axes.values())
        return Batch.of(who, self._signature, call, dims, parts)

    def _program_for(self, call: _call.Call) -> Program:
        return self._programs.of(call, self._setting())

    def _setting(self) -> Setting:
        return setting_of(self._options, self._mesh, self._axis_names, self._axis_name)
