# SPDX-License-Identifier: Apache-2.0
"""`ShardedStep`: what can be asked of a step whose state lives in shards, whether it trains or evaluates."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import STEP, OptionError, StateError, a_type, called_as, first_of, message
from jzero._placement import Placement
from jzero._step_types import Result, StepArgs
from jzero.ir._loops import MICROBATCHES
from jzero.offload.memory import _placing
from jzero.offload.memory._leaf_array import is_coded
from jzero.processes import _agreement
from jzero.reports import _printed_program
from jzero.reports._describe import Report, looped
from jzero.reports._printed_program import PrintedProgram
from jzero.segments import _partitioned
from jzero.segments._derivatives import differentiable
from jzero.segments._partitioned import Partitioned
from jzero.segments._program import Program
from jzero.segments._programs import Programs, placed_inputs
from jzero.segments._repeat import FlatCall
from jzero.sharding.analysis import _traffic, _untiled
from jzero.sharding.plan import _layout, _outputs, _trace
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.tracing import _call, _modules, _objects, _weak
from jzero.tracing._axis_types import explicit_axes, explicit_mesh, takes_explicit_axes
from jzero.tracing._returned import Like

PROGRAMS = ("trace",)  # after what `program` prints one


class ShardedStep(abc.ABC, Generic[StepArgs, Result]):
    """A step whose state lives in shards.

    Attributes:
      __wrapped__: the function it was made from.
    """

    _who: ClassVar[str] = STEP
    _bound: tuple[object, ...] = ()  # the instance of which it is a method

    def __init__(self, fn: Callable[StepArgs, Result], programs: Programs):
        self._programs, self._placement = programs, Placement(programs)
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn  # As there; checkers of types see it only here.

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
        """The arguments of a call, `self` first if it is a method."""
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
        """The arguments beside the state: `self` is one, if it is not the state."""
        signature = self._programs.signature
        is_state = next(iter(signature.parameters.parameters)) in signature.state_names
        if self._bound and is_state and not (signature.told or signature.settled):
            is_state = Like(self._bound[0]).in_structure(state)
        return args if is_state else self._given(args)

    def _leaf_plans(
        self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[LeafPlan, ...], list[NamedSharding]]:
        """Where each leaf of the state rests, by the arguments beside it if any is given."""
        beside = self._beside(state, args) if args or kwargs else ()
        return self._placement.leaf_plans(state, beside, kwargs)

    def __repr__(self) -> str:
        """The function, the stage of a train step, and the mesh."""
        programs = self._programs
        mesh = programs.known_mesh
        axes = "" if mesh is None else ", ".join(f"{k!r}: {n}" for k, n in mesh.shape.items())
        where = f"mesh ({axes})" if mesh is not None else "mesh of the first call"
        what = "" if self._who != STEP else f"stage {programs.options.stage}, "
        return f"<{type(self).__name__} of {programs.signature.name}: {what}{where}>"

    @contextlib.contextmanager
    def _asked(self, who: str) -> Iterator[None]:
        """Something is asked of the step: nothing may have gone wrong before, and errors say which step."""
        with called_as(self._who):
            _agreement.check(who)
            yield

    def _named(self, state: Any) -> Any:
        """A state, or a part of one, with the names of its arguments where it has several."""
        signature = self._programs.signature
        return signature.named(state, self._who) if signature.is_state(state) else state

    def _run_traced(self, call: FlatCall) -> tuple[Program, list[Any], list[Any]]:
        """A call under an outer `jax.jit`: its program, new leaves of the state, whole, and outputs."""
        traced = "called under an outer jax.jit, or differentiated"
        self._check_one_program(traced)
        _trace.check_outermost()
        program = self._programs.of(call.call)
        plan = program.plan
        if coded := [leaf.path for leaf in plan.leaves if leaf.codes]:
            raise OptionError(message(
                _call.WHO, f"{first_of(coded)} in codes (weight_dtype), and the step is {traced}",
                "There leaves in codes are arrays like others, decoded.",
                "Call the step itself, or drop weight_dtype and pass jnp.asarray of what is in codes."
            ))  # fmt: skip

        def placed(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            new, outs = program.step.run(_placing.pad(state, plan.leaves), arrays)
            return _placing.unpad(new, plan.leaves[: len(new)]), outs

        place = NamedSharding(self._programs.setting.mesh, PartitionSpec())
        run = differentiable(
            placed, lambda: program.as_written, program.closes_over, place, self._who
        )
        leaves = _weak.strong(call.state, program.state)
        state, arrays = _placing.as_arrays(leaves, call.arrays)
        mesh = explicit_mesh([*state, *arrays])
        if axes := explicit_axes(mesh):  # Over these JAX moves nothing by itself.
            pairs = zip(plan.leaves, program.state_shardings, strict=True)
            new = [PartitionSpec() if leaf.padding else s.spec for leaf, s in pairs]
            specs = [] if self._programs.setting.evaluates else new
            outs = [*map(_layout.partition_spec, plan.outputs)]
            run = jax.sharding.auto_axes(run, axes=axes, out_sharding=(specs, outs))
        with jax.sharding.use_abstract_mesh(mesh):
            return program, *run(state, arrays)

    def _check_one_program(self, how: str) -> None:
        if self._programs.options.offloads:
            raise OptionError(message(
                _call.WHO, f"{self._programs.options.offload}, and the step is {how}",
                "An offloaded step is a loop of programs: one alone would hold all of the state on devices.",
                "Call the step outside of jax.jit and of jax.grad, or drop offload."))  # fmt: skip

    @abc.abstractmethod
    def __call__(self, *args: StepArgs.args, **kwargs: StepArgs.kwargs) -> Result:
        """Runs it."""

    @takes_explicit_axes
    def shard(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Places a state that exists; leaves that already lie right are not copied.

        Several processes that each hold the state whole must hold the same: they compare it (by
        checksum), and each copies what its devices need.

        Args:
          state: the state, on host or devices, in any layout. NNX objects are given as a call has them,
            `shard(model, optimizer)` or with all other arguments, and are changed where they are.
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
        """Refuses arguments of a state one by one: `shard(params, opt_state)`."""
        signature = self._programs.signature
        if signature.told and not signature.found:
            signature.named(state, "shard")
            return
        places = signature.places(state, self._beside(state, args), kwargs)
        if (args or kwargs) and next(places, None) is None:
            signature.named(state, "shard")
            raise StateError(message(
                "shard", f"these are not the arguments of {signature.name}{signature.parameters}",
                "It takes the state, and then all other arguments of the step or none.",
                "Pass a state that is in several arguments as their tuple: shard((params, opt_state))."
            ))  # fmt: skip

    def _takes_objects(self, state: Any) -> bool:
        """Whether these are NNX objects that a call would change, and no state in the form of a pytree."""
        return not self._programs.signature.told and _objects.holds_objects(state)

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
        """The plan for `(state, *args)`: of each array the shape and dtype count; nothing runs."""
        with self._asked("plan"):
            return self._programs.of(self._programs.bind(self._given(args), kwargs)).plan

    @takes_explicit_axes
    def describe(self, *args: Any, **kwargs: Any) -> Report:
        """What a step on `(state, *args)` keeps where and moves between devices; print it.

        An array or a `ShapeDtypeStruct` for each leaf. Nothing runs, and with an abstract mesh no device is
        needed.
        """
        with self._asked("describe"):
            call = self._programs.bind(self._given(args), kwargs)
            program = self._programs.of(call)
            inputs = placed_inputs(call, program)
            jaxpr = jax.make_jaxpr(program.step.run)(*inputs)
        num_state = program.out_tree.num_leaves - len(program.plan.outputs)
        plan, movements = program.plan, program.movements
        written: Any = jaxpr
        if isinstance(found := program.step.found, Partitioned):
            plan, written = found.described(plan), found.for_any_devices.jaxpr
        return Report(
            plan,
            tuple(_traffic.collectives(jaxpr)),
            program.keys,
            _traffic.carried_bytes(jaxpr, MICROBATCHES),
            program.step.schedule(),
            program.step.roads(),
            movements,
            program.whole_arguments,
            tuple(_call.argument_paths(call.arrays)),
            tuple(x.size * x.dtype.itemsize for x in inputs[1]),
            tuple(_outputs.output_paths(program.out_tree, num_state)),
            _untiled.untiled(written, program.plan.exchange.tile_bytes, program.plan.stage == 3),
            {
                leaf.path: x.error
                for leaf, x in zip(plan.leaves, jax.tree.leaves(call.state), strict=True)
                if is_coded(x) and x.error is not None
            },
            () if plan.evaluates else looped(jaxpr, call.arrays, plan, movements),
            program.extra_work,
        )

    @takes_explicit_axes
    def program(self, *args: Any, after: str, **kwargs: Any) -> PrintedProgram:
        r"""The program of a step on `(state, *args)`; print it. Nothing compiles or runs.

        `after="trace"` is the step's own jaxpr, as JAX traced it: of whole arrays, `[batch, ...]`; of one
        device's, `[batch / devices, ...]`, if the step has collectives of its own. Behind each equation
        stands the line that wrote it, whether `jax.grad` made it (`forward`, `backward`), and its named
        scopes; behind each argument and result its path and its layout. `[16@data, 8]` has a dim of 16 in
        shards over `data`, and one of 8 that every device has whole; `[10+6@data]` is padded to 16.

        `after="partition"` is the program of one device, with explicit collectives; other names are those of
        passes that then put these in other places, the last one `auto_axes`, whose program runs. Of a step
        with offload it is the program that computes gradients; `describe(...).schedule` lists what else runs.

        Args:
          *args: the state and the step's other arguments, each leaf an array or a `ShapeDtypeStruct`.
          after: 'trace', 'partition', or a pass.
          **kwargs: arguments by name.

        Returns:
          A value whose `str` is the text, and whose `jaxpr` is the program.

        Raises:
          OptionError: `after` is something else; it lists what there is. Or the step is not partitioned; it
            says why.
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
        known = (*PROGRAMS, *_partitioned.PASSES)
        if after not in known:
            raise OptionError(message(
                self._who, f"program(after={after!r})", "It prints a step as it is after a part of its way.",
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
            name, jaxpr, program.plan, self._programs.setting.mesh.shape,
            dict(zip(paths, arrays, strict=True)), outputs,
        )  # fmt: skip

    @takes_explicit_axes
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """`jax.jit(...).lower` of the step for `(state, *args)`: to compile ahead, or to read."""
        with self._asked("lower"):
            self._check_one_program("lowered")
            self._placement.check_devices("lowered")
            call = self._programs.bind(self._given(args), kwargs)
            program = self._programs.of(call)
            return program.step.trace(*placed_inputs(call, program)).lower()

    @property
    def mesh(self) -> Any:
        """The mesh it was made for; None for whatever is current when it is called."""
        return self._programs.mesh
