# SPDX-License-Identifier: Apache-2.0
"""`ShardedTrainStep`: what `shard_train_step` returns, a step and what can be asked of it."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import OptionError, StateError, a_type, message
from jzero._in_use import Use
from jzero._memory_kinds import HOST, NVME
from jzero._placement import Placement
from jzero._policy import Policy
from jzero._sharded_step import ShardedStep
from jzero._step_types import AnyState, InitArgs, Result, StepArgs
from jzero.ir import _starts
from jzero.offload.memory import _placing, _writes
from jzero.offload.memory._host_storage import pending_of
from jzero.offload.memory._leaf_array import LeafArray
from jzero.processes import _agreement
from jzero.segments import _identity, _nan_checks
from jzero.segments._programs import Programs
from jzero.segments._repeat import FlatCall
from jzero.sharding.plan._options import Options, axis_tuple
from jzero.tracing import _call, _jaxpr, _modules, _objects
from jzero.tracing._axis_types import takes_explicit_axes
from jzero.tracing._reading import Elsewhere
from jzero.tracing._signature import Signature

WHO = _call.WHO


class ShardedTrainStep(ShardedStep[StepArgs, Result]):
    """A train step whose state lives in shards; see `shard_train_step` for how it behaves.

    Attributes:
      __wrapped__: the function it was made from.
    """

    def __init__(
        self, step_fn: Callable[StepArgs, Result], *, options: Options, mesh: Any,
        axis_names: str | Sequence[str] | None, axis_name: str | None,
        static_argnums: int | Sequence[int], static_argnames: str | Sequence[str],
        in_specs: Mapping[str | int, Any] | None,
        state_argnums: int | Sequence[int] | None, state_argnames: str | Sequence[str],
    ):  # fmt: skip
        if not callable(step_fn):
            raise OptionError(message(
                WHO, f"step_fn is {a_type(step_fn)}", "It must be a function.",
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
        signature = Signature.of(
            step_fn, static_argnums, static_argnames, in_specs, state_argnums, state_argnames
        )
        programs = Programs(step_fn, signature, options, mesh, axis_tuple(axis_names), axis_name)
        super().__init__(step_fn, programs)

    @takes_explicit_axes
    def __call__(self, *args: StepArgs.args, **kwargs: StepArgs.kwargs) -> Result:
        """Runs one step: `(state, *args) -> (state, metrics)`, or as `step_fn` has it.

        The state is donated, but for `donate=False`. A state that is not yet laid out as the plan says is
        placed first (and then not consumed). Under an outer `jax.jit` the step is traced into it, and nothing
        is donated.

        Raises:
          StateError, BatchError, StepError: see the message; the state is left as it was.
          OptionError: the host has too little memory for what is offloaded, by what is available before the
            first call with arguments of these shapes; the state is left as it was.
          ProcessError: several processes are about to run different programs, or one does not come.
          FloatingPointError: with `jax_debug_nans` or `jax_debug_infs`.
        """
        _agreement.check(WHO)
        # Twice at most, and thrice where an argument that was found is none of the state.
        while True:
            with contextlib.suppress(Elsewhere):
                return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one step.

        Raises:
          Elsewhere: its state is in other arguments; the next time it is looked for there.
        """
        bound = self._programs.signature.bind(self._given(args), kwargs)
        call = FlatCall.of(bound, self._programs.setting)
        donates = self._programs.options.donate
        use = Use(WHO, call.call.state, consumes=donates)
        try:
            inputs = self._placement.inputs(call)
            if inputs is None:
                return self._traced(call)
            program, state, arrays = inputs
            leaves = program.plan.leaves
            with use.running:
                use.claim(state)
                if not donates and self._programs.options.offloads:
                    state = _placing.copies(state)
                if donates:
                    state, arrays = _placing.apart(state, arrays, leaves)
                state, outs = _nan_checks.run(WHO, program.step, state, arrays, leaves)
                if donates:  # One program returns nothing that it was given.
                    use.consumed([*state, *outs] if self._programs.options.offloads else ())
                if self._programs.options.offload.tier == NVME or _writes.are_known():
                    _writes.settle(state)
        except Exception as error:
            if (explained := use.explained(error, call.state, call.call.arrays)) is not None:
                raise explained from error
            raise
        state = self._placement.wrap(state, leaves)
        return call.call.given(jax.tree.unflatten(program.out_tree, [*state, *outs]))

    def _traced(self, call: FlatCall) -> Any:
        """A call under an outer `jax.jit`."""
        program, state, outs = self._run_traced(call)
        return call.call.given(jax.tree.unflatten(program.out_tree, [*state, *outs]))

    @takes_explicit_axes
    def init(
        self, init_fn: Callable[InitArgs, AnyState], *args: InitArgs.args, **kwargs: InitArgs.kwargs
    ) -> AnyState:
        """Runs `init_fn(*args, **kwargs) -> state` so that every leaf is born in its layout.

        Never whole on one device: the initialiser is compiled with the state's shardings as outputs.
        See `state_shardings` for what the layout is before the step has seen a batch. What rests on the
        host is made in groups of up to `device_bytes` (256 MiB with `HostCPU` and `NVMe`), each by a program
        of its own. What `NVMe` has in files is in the host's memory until the first step, if there is no
        plan for such a state yet (`plan`).

        NNX objects are made like any state: `model, optimizer = train_step.init(create, key)`.

        Returns:
          The state, placed.

        Raises:
          StateError: `init_fn` is no function.
          OptionError: the host has too little memory for its part of the state, ordinary and pinned, by what
            is available before (each of several processes on one host counts for itself).
          ProcessError: several processes are about to make different states, or one does not come.
        """
        _agreement.check("init")
        if not callable(init_fn):
            raise StateError(message(
                "init", f"init_fn is {a_type(init_fn)}", "It is the function that makes the state.",
                "Write train_step.init(init_fn, key); a state that exists goes to "
                "train_step.shard(state)."))  # fmt: skip
        # Traced once: every call of init_fn may make another optimizer, and so another tree.
        born = _objects.Born()
        with _objects.explains_init():
            traced = _jaxpr.trace_here(lambda: born.state(init_fn(*args, **kwargs)))
        # XLA takes each device's part of what it makes. [Note: starts in bounds]
        traced = traced._replace(jaxpr=_starts.in_bounds(traced.jaxpr))
        state = jax.tree.unflatten(traced.out_tree, traced.out_avals)
        leaves, shardings = self._placement.leaf_plans(state)
        places = self._placement.places(leaves, shardings)
        self._placement.agree("init", leaves, _placing.host_needs(places), lambda: (
            _identity.of_jaxpr(traced.jaxpr, traced.consts)
        ))  # fmt: skip
        filling = self._placement.filling(leaves, places)
        with filling or contextlib.nullcontext():
            made = _placing.born(
                traced, places, self._programs.options.offload.visiting_bytes, filling
            )
        _writes.settle(made)
        return born.whole(jax.tree.unflatten(traced.out_tree, _placing.wrap(made, leaves)))

    @takes_explicit_axes
    def flush(self, state: AnyState) -> AnyState:
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
        if self._takes_objects(state):
            objects = _objects.Objects.of("flush", {"state": state})
            objects.set(self.flush(objects.state))
            return state
        arrays, static = _modules.apart_modules(state)
        if static is not None:
            return static.whole(self.flush(arrays))
        _agreement.check("flush")
        leaves, tree = jax.tree.flatten(state)
        _placing.check_alive(self._named(state), leaves, "flush")
        pending = next(filter(None, map(pending_of, leaves)), None)
        if pending is None:
            return state
        if self._programs.options.offload.tier != HOST:
            raise StateError(message(
                "flush", "the state waits for gradients, and this train_step keeps none on the host",
                "A step applies what it has computed.",
                "Call flush of the train_step that returned the state."))  # fmt: skip
        _agreement.note("flush", self._programs.setting.mesh)
        step = pending.step
        use = Use("flush", self._named(state), consumes=True)
        placed = self._placement.place(self._named(state), leaves, step.leaves, step.shardings)
        with use.running:
            use.claim(placed)
            new = step.flush(placed)
            use.consumed(new)
        return jax.tree.unflatten(tree, _placing.wrap(new, step.leaves))

    @takes_explicit_axes
    def unshard(self, state: AnyState) -> AnyState:
        """The state with every leaf whole on every device of the mesh, to evaluate, to keep or to export.

        In arrays of its own: the next step consumes the state, and none of them.
        """
        arrays, static = _modules.apart_modules(state)
        if static is not None:
            return static.whole(self.unshard(arrays))
        _agreement.check("unshard")
        setting = self._programs.setting
        full = NamedSharding(setting.mesh, PartitionSpec())
        leaves, tree = jax.tree.flatten(state)
        named = self._named(state)
        _placing.check_alive(named, leaves, "unshard")
        _placing.check_flushed("unshard", named, leaves)
        if not all(_placing.lies_right(x, full) for x in leaves):
            _agreement.confirm("unshard", mesh=setting.mesh)  # What it returns may be looked at.
        plain = [jnp.asarray(x) if isinstance(x, LeafArray) else x for x in leaves]
        whole = _placing.place(
            plain, [full] * len(leaves), lambda: _call.leaf_paths(named, "state")
        )
        shared = [i for i, leaf in enumerate(leaves) if whole[i] is leaf]
        copies = _placing.copied([leaves[i] for i in shared], full)
        for i, copy_of in zip(shared, copies, strict=True):
            whole[i] = copy_of
        return jax.tree.unflatten(tree, whole)

    @takes_explicit_axes
    def state_shardings(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """A `NamedSharding` for every leaf of the state, in its structure; as Orbax wants to restore.

        With the step's other arguments (shapes suffice), or once a step with this state has run, these
        are the plan's. Before that, roles are unknown: every leaf is sharded that can be, and the first
        step moves what its plan has full (parameters at stages 1 and 2). With `offload`, every leaf rests
        on the host until then.

        A leaf that is padded at rest (`LeafArray`) has none for its true shape: it is given as full
        here, and padded when `shard` or the step places it. Of NNX objects, given as a call has them with all
        other arguments, it is the `nnx.state` of them all.
        """
        if (args or kwargs) and self._takes_objects(state):
            call = self._programs.bind(self._given((state, *args)), kwargs)
            program, state = self._programs.of(call), call.state
            plans, shardings = program.plan.leaves, program.state_shardings
        else:
            state, _ = _modules.apart_modules(state)
            plans, shardings = self._leaf_plans(state, args, kwargs)
        full = NamedSharding(self._programs.setting.mesh, PartitionSpec())
        found = [full if p.padding else s for p, s in zip(plans, shardings, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), found)

    @property
    def offload_params(self) -> Policy:
        """Where parameters rest: `jzero.NoOffload()`, `jzero.PinnedHost(...)` or `jzero.NVMe(...)`."""
        return self._programs.options.offload.params

    def programs_to_evaluate(
        self, eval_step: Callable[..., Any], signature: Signature, changed: Mapping[str, Any]
    ) -> Programs:
        """The programs of a function that reads this step's state, with its options but what is `changed`."""
        return self._programs.to_evaluate(eval_step, signature, changed)

    def on_mesh(self, mesh: Any) -> ShardedTrainStep[StepArgs, Result]:
        """The same step, with the same options, on another mesh."""
        return self._with(self._programs.on_mesh(mesh))

    def with_wire(
        self, gather_dtype: Any = None, reduce_dtype: Any = None
    ) -> ShardedTrainStep[StepArgs, Result]:
        """The same step, with these dtypes of gathers and reductions, as `shard_train_step` takes them."""
        return self._with(self._programs.with_wire(gather_dtype, reduce_dtype))

    def _with(self, programs: Programs) -> ShardedTrainStep[StepArgs, Result]:
        other = copy.copy(self)
        other._programs, other._placement = programs, Placement(programs)
        return other
