# SPDX-License-Identifier: Apache-2.0
"""`ShardedStep`: what `shard_train_step` and `shard_eval_step` return."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import (
    EVAL_STEP,
    STEP,
    OptionError,
    StateError,
    a_type,
    called_as,
    first_of,
    message,
)
from jzero._in_use import Use
from jzero._memory_kinds import HOST, NVME
from jzero._option_groups import Comm, comm_of
from jzero._placement import Placement
from jzero._policy import Memory
from jzero._step_types import AnyState, InitArgs, Result, StepArgs
from jzero.ir import _starts
from jzero.offload.memory import _placing, _writes
from jzero.offload.memory._host_storage import pending_of
from jzero.offload.memory._leaf_array import LeafArray, rows_of
from jzero.processes import _agreement
from jzero.reports import _printed_program
from jzero.reports._describe import Report, report_of
from jzero.reports._printed_program import PrintedProgram
from jzero.segments import _identity, _nan_checks, _partitioned
from jzero.segments._derivatives import differentiable
from jzero.segments._dispatch_cache import FlatCall
from jzero.segments._program import Program
from jzero.segments._programs import Programs, placed_inputs
from jzero.sharding.plan import _outputs, _stored_layout, _trace
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.tracing import _call, _jaxpr, _modules, _objects, _weak
from jzero.tracing._axis_types import explicit_axes, explicit_mesh, takes_explicit_axes
from jzero.tracing._reading import Elsewhere
from jzero.tracing._returned import Like


class ShardedStep(Generic[StepArgs, Result]):
    """A step whose state is sharded: one of training, or an evaluation.

    See `shard_train_step` and `shard_eval_step` for how it behaves.

    Attributes:
      __wrapped__: the function it was made from.
    """

    _bound: tuple[object, ...] = ()  # the instance, if it is a method

    def __init__(self, fn: Callable[StepArgs, Result], programs: Programs):
        self._programs, self._placement = programs, Placement(programs)
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn  # update_wrapper sets it, but type checkers see it only here.

    @property
    def trains(self) -> bool:
        """Whether it returns a new state; an evaluation does not."""
        return not self._programs.evaluates

    @property
    def _who(self) -> str:
        return STEP if self.trains else EVAL_STEP

    @takes_explicit_axes
    def __call__(self, *args: StepArgs.args, **kwargs: StepArgs.kwargs) -> Result:
        """Runs one step, `(state, *args) -> (state, metrics)`, or evaluates; as the function has it.

        A train step donates its state, unless `donate=False`; an evaluation consumes nothing. A state in
        another layout than the plan's is placed first (and then not consumed). Under an outer `jax.jit`
        the step is traced into it, and nothing is donated.

        Raises:
          StateError, BatchError, StepError: see the message; the state is left as it was.
          OptionError: the host has too little memory for what is offloaded, by what is available before the
            first call with arguments of these shapes; the state is left as it was.
          ProcessError: several processes are about to run different programs, or one does not come.
          FloatingPointError: with `jax_debug_nans` or `jax_debug_infs`.
        """
        if not self.trains:
            with self._asked(self._who):
                return self._evaluate(args, kwargs)
        _agreement.check(self._who)
        # At most twice, or three times if an argument was wrongly taken for a part of the state.
        while True:
            with contextlib.suppress(Elsewhere):
                return self._train(args, kwargs)

    def _train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Raises `Elsewhere` if the state is in other arguments; the next call looks for it there."""
        bound = self._programs.signature.bind(self._given(args), kwargs)
        call = FlatCall.of(bound, self._programs.config)
        donates = self._programs.options.donate
        use = Use(self._who, call.call.state, consumes=donates)
        try:
            inputs = self._placement.inputs(call)
            if inputs is None:
                program, state, outs = self._run_traced(call)
                return call.call.given(jax.tree.unflatten(program.out_tree, [*state, *outs]))
            program, state, arrays = inputs
            leaves = program.plan.leaves
            with use.running:
                use.claim(state)
                if not donates and self._programs.options.offloads:
                    state = _placing.copied(state)
                if donates:
                    state, arrays = _placing.apart(state, arrays, leaves)
                state, outs = _nan_checks.run(self._who, program.step, state, arrays, leaves)
                if donates:  # A single program returns no array that it was passed.
                    use.consumed([*state, *outs] if self._programs.options.offloads else ())
                if self._programs.options.offload.tier == NVME or _writes.are_known():
                    _writes.settle(state)
        except Exception as error:
            if (explained := use.explained(error, call.state, call.call.arrays)) is not None:
                raise explained from error
            raise
        state = self._placement.wrap(state, leaves)
        return call.call.given(jax.tree.unflatten(program.out_tree, [*state, *outs]))

    def _evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        bound = self._programs.bind(self._given(args), kwargs)
        call = FlatCall.of(bound, self._programs.config)
        use = Use(self._who, call.call.state, consumes=False)
        try:
            inputs = self._placement.inputs(call)
            if inputs is None:
                program, _, outs = self._run_traced(call)
            else:
                program, state, arrays = inputs
                unread = program.plan.unread
                read = [None if i in unread else x for i, x in enumerate(call.state)]
                with use.running:
                    use.claim(read)
                    _, outs = _nan_checks.run(
                        self._who, program.step, state, arrays, program.plan.leaves
                    )
        except Exception as error:
            if (explained := use.explained(error, call.state, call.call.arrays)) is not None:
                raise explained from error
            raise
        return call.call.given(jax.tree.unflatten(program.out_tree, outs))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Any: ...
    def __get__(self, instance: object, owner: Any = None) -> Any:
        """The step as a method of an instance, which is its argument 0."""
        if instance is None or isinstance(self.__wrapped__, staticmethod):
            return self
        bound = copy.copy(self)
        bound._bound = (*self._bound, instance)
        return bound

    def unbound(self) -> Self:
        """The step as a function."""
        function = copy.copy(self)
        function._bound = ()
        return function

    def _given(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a call; those of a method begin with `self`."""
        if not self._bound:
            return args
        first = next(iter(self._programs.signature.parameters.parameters))
        (bound,) = self._bound
        is_opaque = jax.tree_util.all_leaves([bound]) and not hasattr(bound, "dtype")
        if is_opaque and first not in self._programs.signature.static_names:
            raise OptionError(message(
                self._who, f"{first} is {a_type(bound)}, and no tree of arrays",
                "A method's self is argument 0, as for jax.jit: compiled in, or a pytree.",
                "Say static_argnums=0; positions of other arguments count from self."))  # fmt: skip
        return *self._bound, *args

    def _beside(self, state: Any, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments beside the state, `self` among them unless it is the state."""
        signature = self._programs.signature
        is_state = next(iter(signature.parameters.parameters)) in signature.state_names
        if self._bound and is_state and not (signature.declared or signature.settled):
            is_state = Like(self._bound[0]).in_structure(state)
        return args if is_state else self._given(args)

    def _leaf_plans(
        self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[LeafPlan, ...], list[NamedSharding]]:
        """Plans and shardings of the state's leaves, by the arguments beside it if there are any."""
        beside = self._beside(state, args) if args or kwargs else ()
        return self._placement.leaf_plans(state, beside, kwargs)

    def __repr__(self) -> str:
        programs = self._programs
        mesh = programs.known_mesh
        axes = "" if mesh is None else ", ".join(f"{k!r}: {n}" for k, n in mesh.shape.items())
        where = f"mesh ({axes})" if mesh is not None else "mesh of the first call"
        what = "" if self._who != STEP else f"stage {programs.options.stage}, "
        return f"<{type(self).__name__} of {programs.signature.name}: {what}{where}>"

    @contextlib.contextmanager
    def _asked(self, who: str) -> Iterator[None]:
        """Checks that no process has failed, and lets errors name this step."""
        with called_as(self._who):
            _agreement.check(who)
            yield

    def _named(self, state: Any) -> Any:
        """A state, or a part of one, with the names of its arguments if it has several."""
        signature = self._programs.signature
        return signature.named(state, self._who) if signature.is_state(state) else state

    def _run_traced(self, call: FlatCall) -> tuple[Program, list[Any], list[Any]]:
        """Runs under an outer `jax.jit`; returns the program, unpadded new leaves, and outputs."""
        traced = "called under an outer jax.jit, or differentiated"
        self._check_one_program(traced)
        _trace.check_outermost()
        program = self._programs.of(call.call)
        plan = program.plan
        if coded := [leaf.path for leaf in plan.leaves if leaf.codes]:
            raise OptionError(message(
                _call.WHO, f"{first_of(coded)} quantized (weight_dtype), and the step is {traced}",
                "There quantized leaves are ordinary arrays, dequantized.",
                "Call the step itself, or drop weight_dtype and pass jnp.asarray of the quantized leaves."
            ))  # fmt: skip

        def placed(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            new, outs = program.step.run(_placing.pad(state, plan.leaves), arrays)
            return _placing.unpad(new, plan.leaves[: len(new)]), outs

        place = NamedSharding(self._programs.config.mesh, PartitionSpec())
        run = differentiable(
            placed, lambda: program.as_written, program.closes_over, place, self._who
        )
        leaves = _weak.strong(call.state, program.state)
        state, arrays = _placing.as_arrays(leaves, call.arrays)
        mesh = explicit_mesh([*state, *arrays])
        if axes := explicit_axes(mesh):  # JAX reshards nothing over Explicit axes by itself.
            pairs = zip(plan.leaves, program.state_shardings, strict=True)
            new = [PartitionSpec() if leaf.padding else s.spec for leaf, s in pairs]
            specs = [] if self._programs.config.evaluates else new
            outs = [*map(_stored_layout.partition_spec, plan.outputs)]
            run = jax.sharding.auto_axes(run, axes=axes, out_sharding=(specs, outs))
        with jax.sharding.use_abstract_mesh(mesh):
            return program, *run(state, arrays)

    def _check_one_program(self, how: str) -> None:
        if self._programs.options.offloads:
            raise OptionError(message(
                _call.WHO, f"{self._programs.options.offload}, and the step is {how}",
                "An offloaded step is a loop of programs: one alone would hold all of the state on devices.",
                "Call the step outside of jax.jit and of jax.grad, or drop memory=."))  # fmt: skip

    @takes_explicit_axes
    def shard(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Places a state that exists; leaves that already have their layout are not copied.

        If several processes each hold the whole state, they must hold the same: they compare it (by
        checksum), and each copies the shards of its devices.

        Args:
          state: the state, on host or devices, in any layout. NNX objects are passed as in a call,
            `shard(model, optimizer)` or with all other arguments, and are changed in place.
          *args: optionally the step's other arguments, arrays or only their shapes (`ShapeDtypeStruct`); see
            `state_shardings`.
          **kwargs: the same by name. With `weight_dtype` they must be known, from here or from a call before.

        Raises:
          StateError: an earlier step has consumed it.
          OptionError: the host has too little memory for its part of it; see `init`.
          ProcessError: it differs between processes, or one does not come.
        """
        if self._takes_objects(state):
            return self._shard_objects(state, *args, **kwargs)
        arrays, static = _modules.apart_modules(state)
        if static is not None and not (args or kwargs):
            return static.whole(self.shard(arrays))
        with self._asked("shard"):
            self._check_is_state(state, args, kwargs)
            plans, shardings = self._leaf_plans(state, args, kwargs)
            leaves, tree = jax.tree.flatten(state)
            placed = self._placement.place(self._named(state), leaves, plans, shardings)
        return jax.tree.unflatten(tree, _placing.wrap(placed, plans))

    def _check_is_state(self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses `shard(params, opt_state)`: arguments of a state passed one by one."""
        signature = self._programs.signature
        if signature.declared and not signature.found:
            signature.named(state, "shard")
            return
        places = signature.places(state, self._beside(state, args), kwargs)
        if (args or kwargs) and next(places, None) is None:
            signature.named(state, "shard")
            raise StateError(message(
                "shard", f"these are not the arguments of {signature.name}{signature.parameters}",
                "Pass the state, and then all other arguments of the step or none.",
                "Pass a state that is in several arguments as their tuple: shard((params, opt_state))."
            ))  # fmt: skip

    def _takes_objects(self, state: Any) -> bool:
        """Whether the state is NNX objects that a call would change, rather than a pytree."""
        return not self._programs.signature.declared and _objects.holds_objects(state)

    def _shard_objects(self, *args: Any, **kwargs: Any) -> Any:
        with self._asked("shard"):
            named = {f"args[{i}]": x for i, x in enumerate(args)} | kwargs
            if all(map(_objects.holds_objects, named.values())):
                objects = _objects.Objects.of("shard", named)
                plans, shardings = self._placement.leaf_plans(objects.state)
            else:
                call = self._programs.bind(self._given(args), kwargs)
                assert call.objects is not None
                program, objects = self._programs.of(call), call.objects
                plans, shardings = program.plan.leaves, program.state_shardings
            leaves, tree = jax.tree.flatten(objects.state)
            placed = self._placement.place(objects.state, leaves, plans, shardings)
            objects.set(jax.tree.unflatten(tree, _placing.wrap(placed, plans)))
        return objects.values[0] if len(objects.values) == 1 else objects.values

    @takes_explicit_axes
    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """The plan for `(state, *args)`, by shapes and dtypes; nothing runs."""
        with self._asked("plan"):
            return self._programs.of(self._programs.bind(self._given(args), kwargs)).plan

    @takes_explicit_axes
    def describe(self, *args: Any, **kwargs: Any) -> Report:
        """Where a step on `(state, *args)` stores what, and what it moves between devices; print it.

        Each leaf is an array or a `ShapeDtypeStruct`. Nothing runs, and an abstract mesh needs no device.
        """
        with self._asked("describe"):
            call = self._programs.bind(self._given(args), kwargs)
            return report_of(self._programs.of(call), call)

    @takes_explicit_axes
    def program(self, *args: Any, after: str, **kwargs: Any) -> PrintedProgram:
        r"""The program of a step on `(state, *args)`; print it. Nothing compiles or runs.

        `after="trace"` is the step's own jaxpr, as JAX traced it: with global shapes, `[batch, ...]`; with
        those of one device, `[batch / devices, ...]`, if the step has collectives of its own. Each equation
        is followed by its source line, whether `jax.grad` made it (`forward`, `backward`), and its named
        scopes; each argument and result by its path and its layout. `[16@data, 8]` has a dim of 16 sharded
        over `data`, and a replicated one of 8; `[10+6@data]` is padded to 16.

        `after="partition"` is the program of one device, with explicit collectives; the other names are
        passes that then move these, the last one `auto_axes`, whose program runs. For a step with offload it
        is the program that computes gradients; `describe(...).schedule` lists the others.

        Args:
          *args: the state and the step's other arguments, each leaf an array or a `ShapeDtypeStruct`.
          after: 'trace', 'partition', or a pass.
          **kwargs: arguments by name.

        Returns:
          A value whose `str` is the text, and whose `jaxpr` is the program.

        Raises:
          OptionError: `after` is something else; the message lists the passes. Or the step is not
            partitioned; the message says why.
          JzeroError: the step, its state or its arguments are refused, as by a call.

        >>> import jax, jax.numpy as jnp, jzero
        >>> def step_fn(w, batch):
        ...     return w - 0.1 * jax.grad(lambda w: jnp.sum(batch @ w))(w)
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> train_step = jzero.shard_train_step(step_fn, mesh=mesh)
        >>> program = train_step.program(jnp.ones((64, 64)), jnp.ones((8, 64)), after="trace")
        >>> print(*str(program).splitlines()[:5], sep="\n")
        # step_fn, as traced, of the whole batch; layouts over the mesh (data: 8)
        { lambda
            a:f32[64,64]  # state  [64@data, 64]  parameter
            b:f32[8,64]   # batch  [8@data, 64]
          . let
        """
        known = ("trace", *_partitioned.PASSES)
        if after not in known:
            raise OptionError(message(
                self._who, f"program(after={after!r})", "It prints a step as it is after one of its passes.",
                f"Write after={' or '.join(map(repr, known))}."))  # fmt: skip
        with self._asked("program"):
            call = self._programs.bind(self._given(args), kwargs)
            program = self._programs.of(call)
            name, paths = self._programs.signature.name, _call.argument_paths(call.arrays)
            num_state = program.out_tree.num_leaves - len(program.plan.outputs)
            outputs = _outputs.output_paths(program.out_tree, num_state)
            if after in _partitioned.PASSES:
                found = program.step.found
                return _printed_program.as_partitioned(
                    name, after, found.programs[after], found.part, program.plan, paths, outputs
                )
            jaxpr, (_, arrays) = program.as_traced().jaxpr, placed_inputs(call, program)
        return _printed_program.as_traced(
            name, jaxpr, program.plan, self._programs.config.mesh.shape,
            dict(zip(paths, arrays, strict=True)), outputs,
        )  # fmt: skip

    @takes_explicit_axes
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """`jax.jit(...).lower` of the step for `(state, *args)`: to compile ahead of time, or to read."""
        with self._asked("lower"):
            self._check_one_program("lowered")
            self._placement.check_devices("lowered")
            call = self._programs.bind(self._given(args), kwargs)
            program = self._programs.of(call)
            return program.step.trace(*placed_inputs(call, program)).lower()

    @property
    def mesh(self) -> Any:
        """The mesh it was made for; None for the mesh that is current when it is called."""
        return self._programs.mesh

    @takes_explicit_axes
    def init(
        self, init_fn: Callable[InitArgs, AnyState], *args: InitArgs.args, **kwargs: InitArgs.kwargs
    ) -> AnyState:
        """Runs `init_fn(*args, **kwargs) -> state` so that every leaf is created in its layout.

        No device holds the whole state: the initialiser is compiled with the state's shardings as outputs.
        See `state_shardings` for the layout before the step has seen a batch. State that is stored on the
        host is created in groups of up to `device_bytes` (256 MiB with `HostCPU` and `NVMe`), each by a
        program of its own. State that `NVMe` stores in files is in the host's memory until the first step, if
        there is no plan for such a state yet (`plan`).

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
        # Trace once: each call of init_fn may create a new optimizer, and so a different tree.
        born = _objects.Born()
        with _objects.explained(_objects.INIT):
            traced = _jaxpr.trace_here(lambda: born.state(init_fn(*args, **kwargs)))
        # XLA computes each device's part only. [Note: starts in bounds]
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
                traced, places, self._programs.options.offload.fetched_bytes, filling
            )
        _writes.settle(made)
        return born.whole(jax.tree.unflatten(traced.out_tree, _placing.wrap(made, leaves)))

    @takes_explicit_axes
    def flush(self, state: AnyState) -> AnyState:
        """The state with the gradients applied that `HostCPU(delayed_update=True)` has not applied yet.

        Returns the state itself if there are none. Call it before a checkpoint is written and at the end of a
        training: a state with delayed gradients cannot be saved. The state is consumed; the step after it is
        computed without staleness, and its gradients are the next to be delayed.

        >>> import jax, jax.numpy as jnp, optax, jzero
        >>> tx = optax.sgd(0.1, momentum=0.9)
        >>> def step_fn(state, batch):
        ...     w, opt_state = state
        ...     grads = jax.grad(lambda w: jnp.mean(batch @ w))(w)
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     return optax.apply_updates(w, updates), opt_state
        >>> policy = jzero.HostCPU(delayed_update=True, delay_after=0)
        >>> train_step = jzero.shard_train_step(step_fn, memory=policy)
        >>> w, batch = jnp.ones((64, 8)), jnp.ones((8, 64))
        >>> state = train_step((w, tx.init(w)), batch)
        >>> state[0][0, 0].item(), round(train_step.flush(state)[0][0, 0].item(), 4)
        (1.0, 0.9875)

        Raises:
          StateError: a step has consumed it, or it has delayed gradients and this train_step has no
            `HostCPU`.
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
                "flush", "the state has delayed gradients, and this train_step keeps none on the host",
                "A step applies what it has computed.",
                "Call flush of the train_step that returned the state."))  # fmt: skip
        _agreement.note("flush", self._programs.config.mesh)
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
        """The state with every leaf replicated over the mesh, to evaluate, to keep or to export.

        The arrays are copies: the next step consumes the state, and none of them.
        """
        arrays, static = _modules.apart_modules(state)
        if static is not None:
            return static.whole(self.unshard(arrays))
        _agreement.check("unshard")
        config = self._programs.config
        full = NamedSharding(config.mesh, PartitionSpec())
        leaves, tree = jax.tree.flatten(state)
        named = self._named(state)
        _placing.check_alive(named, leaves, "unshard")
        _placing.check_flushed("unshard", named, leaves)
        if not all(_placing.has_sharding(x, full) for x in leaves):
            _agreement.confirm("unshard", mesh=config.mesh)  # The user may read the result at once.
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
        """A `NamedSharding` for every leaf of the state, in its structure; as Orbax needs it to restore.

        With the step's other arguments (shapes suffice), or once a step with this state has run, these
        are the plan's. Before that, roles are unknown: every leaf that can be is sharded, and the first
        step moves what its plan replicates (parameters at stages 1 and 2). With state in other memory every
        leaf is stored there until then.

        A leaf that is stored padded (`LeafArray`) has no sharding for its true shape: it is replicated
        here, and padded when `shard` or the step places it. For NNX objects, passed as in a call with all
        other arguments, the structure is the `nnx.state` of them all.
        """
        if (args or kwargs) and self._takes_objects(state):
            call = self._programs.bind(self._given((state, *args)), kwargs)
            program, state = self._programs.of(call), call.state
            plans, shardings = program.plan.leaves, program.state_shardings
        else:
            state, _ = _modules.apart_modules(state)
            plans, shardings = self._leaf_plans(state, args, kwargs)
        full = NamedSharding(self._programs.config.mesh, PartitionSpec())
        found = [full if p.padding else s for p, s in zip(plans, shardings, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), found)

    @property
    def memory(self) -> Memory:
        """Which memory holds what, as it was given."""
        return self._programs.options.offload.memory

    def on_mesh(self, mesh: Any) -> ShardedStep[StepArgs, Result]:
        """The same step, with the same options, on another mesh."""
        return self._with(self._programs.on_mesh(mesh))

    def with_comm(self, comm: Comm) -> ShardedStep[StepArgs, Result]:
        """The same step, with other gathers and reductions, as `shard_train_step(comm=)` takes them."""
        return self._with(self._programs.with_comm(comm_of(self._who, comm, not self.trains)))

    def _with(self, programs: Programs) -> ShardedStep[StepArgs, Result]:
        other = copy.copy(self)
        other._programs, other._placement = programs, Placement(programs)
        return other

    @takes_explicit_axes
    def rows(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """A state in plain arrays, for a checkpoint: the rows of quantized leaves, others as they are.

        For a state of `jax.ShapeDtypeStruct`s, with the step's other arguments, it returns the same with
        shardings: the target to restore a checkpoint of rows, without the original weights. `from_rows` makes
        a state of the restored rows. Rows belong to one number of devices. Their layout is that of the
        original weights: if these were on devices, shapes must have their shardings
        (`train_step.state_shardings`); otherwise it is the layout in which `shard` places values from the
        host.

        >>> import jax, jax.numpy as jnp, jzero
        >>> eval_step = jzero.shard_eval_step(lambda w, x: x @ w, weight_dtype=jnp.int4)
        >>> x, w = jnp.ones((8, 256)), jnp.ones((256, 256))
        >>> quantized = eval_step.shard(w, x)
        >>> saved = eval_step.rows(quantized)  # plain arrays, as for Orbax
        >>> shape = jax.ShapeDtypeStruct(w.shape, w.dtype)
        >>> eval_step.rows(shape, x).shape == saved.shape
        True
        >>> eval_step.from_rows(saved, shape, x)
        LeafArray(shape=(256, 256), dtype=float32, int4 in blocks of 128)

        Raises:
          OptionError: shapes were passed without the step's other arguments.
        """
        leaves, tree = jax.tree.flatten(state)
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return jax.tree.unflatten(tree, map(rows_of, leaves))
        with self._asked("rows"):
            plans, shardings = self._leaf_plans(state, args, kwargs)
        full = NamedSharding(self._programs.config.mesh, PartitionSpec())
        return jax.tree.unflatten(tree, [
            jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=place) if plan.codes
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=full if plan.padding else place)
            for x, plan, place in zip(leaves, plans, shardings, strict=True)
        ])  # fmt: skip

    @takes_explicit_axes
    def from_rows(self, rows: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """The state of which these are the `rows`; its rounding errors are not known any more.

        Args:
          rows: the output of `rows`, on host or devices.
          state: its shapes, in the same structure, with the shardings that `rows` describes.
          *args: the step's other arguments, or their shapes.
          **kwargs: the same by name.

        Raises:
          StateError: they are no rows of this state on this mesh.
        """
        with self._asked("from_rows"):
            plans, shardings = self._leaf_plans(state, args, kwargs)
            leaves, tree = jax.tree.flatten(rows)
            structure: Any = jax.tree.structure(state)
            if structure != tree:
                raise StateError(message(
                    "from_rows", f"{len(leaves)} leaves of rows, and {len(plans)} of the state",
                    "Rows have the structure of their state.",
                    "Pass the output of rows, and the shapes of that state."))  # fmt: skip
            bad = [
                f"{plan.path} is {getattr(x, 'dtype', type(x).__name__)}{list(jax.numpy.shape(x))}, and its "
                f"rows are uint8{list(plan.shape)}"
                for x, plan in zip(leaves, plans, strict=True)
                if plan.codes
                and (getattr(x, "dtype", None), jax.numpy.shape(x)) != ("uint8", plan.shape)
            ]
            if bad:
                raise StateError(message(
                    "from_rows", bad,
                    "Rows have one quantized format, and the shards of one number of devices.",
                    "Use the weight_dtype, the mesh and the like= with which they were made, and shapes with "
                    "the shardings of the weights if these were on devices; or shard the weights themselves.",
                    shown=4))  # fmt: skip
            coded = [
                LeafArray(x, plan.codes.shape, plan.codes) if plan.codes else x
                for x, plan in zip(leaves, plans, strict=True)
            ]
            placed = self._placement.place(
                jax.tree.unflatten(tree, coded), coded, plans, shardings, "from_rows"
            )
        return jax.tree.unflatten(tree, _placing.wrap(placed, plans))
