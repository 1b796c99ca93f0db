"""Builds the program of one step for given shapes: trace, analyse, plan, and the function that runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import _call, _jaxpr, _outputs, _trace
from jzero._options import Options
from jzero.sharding import _collectives, _cut, _layout, _microbatch, _plan
from jzero.sharding._control import CONTROL
from jzero.sharding._frames import Frame
from jzero.sharding._interpret import Interpreter
from jzero.sharding._layout import Full, Layout, Shard
from jzero.sharding._links import Links
from jzero.sharding._needs import note_needs
from jzero.sharding._ordinary import ORDINARY, apply
from jzero.sharding._plan import Leaf, LeafPlan, Plan
from jzero.sharding._queue import GatherQueue
from jzero.sharding._values import Devices, FullValue, ShardValue, Value

WHO = _call.WHO


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a program is built for, besides shapes.

    Attributes:
      options: what the user chose.
      mesh: the mesh, concrete or abstract.
      axis_names: the data axes; the mesh may have others.
      axis_name: the name by which the step itself calls all of them together, if it does.
    """

    options: Options
    mesh: Any
    axis_names: tuple[str, ...]
    axis_name: str | None

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the data axes."""
        return {name: self.mesh.shape[name] for name in self.axis_names}

    @property
    def automatic(self) -> dict[str, int]:
        """Names and sizes of the mesh's other axes, over which XLA shards."""
        names = [name for name in self.mesh.axis_names if name not in self.axis_names]
        return {name: self.mesh.shape[name] for name in names}

    @property
    def sharding(self) -> _plan.Sharding:
        """Over which axes each role rests."""
        return self.options.sharding(self.axes)

    @property
    def batch_axes(self) -> dict[str, int]:
        """The data axes as the batch sees them: microbatches are devices in time, of the last axis."""
        last = self.axis_names[-1]
        return self.axes | {last: self.axes[last] * self.options.accumulate}

    @property
    def step_axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes behind each axis name that the step may use."""
        if self.axis_name is not None and self.axis_name not in self.axis_names:
            return {self.axis_name: self.axis_names}
        return {name: (name,) for name in self.axis_names}


@dataclasses.dataclass(frozen=True)
class Program:
    """One step for one set of shapes.

    Attributes:
      plan: where the state rests.
      run: the step on flat lists, `(state leaves, argument leaves) -> (state leaves, outputs)`.
      jitted: the same, compiled, the state donated.
      out_tree: structure of what the step returns; the state's leaves come first.
      state_shardings: one per leaf of the state.
      argument_shardings: one per leaf of the other arguments.
      keys: paths of the arguments taken for PRNG keys.
    """

    plan: Plan
    run: Callable[..., Any]
    jitted: Any
    out_tree: Any
    state_shardings: list[NamedSharding]
    argument_shardings: list[NamedSharding]
    keys: tuple[str, ...]


def state_leaves(state: Any, setting: Setting) -> list[Leaf]:
    """What the plan must know of an abstract state."""
    paths = _call.leaf_paths(state, "state")
    leaves = jax.tree.leaves(state)
    specs = setting.options.automatic(paths, [leaf.shape for leaf in leaves], setting.automatic)
    return [
        Leaf(
            path,
            tuple(leaf.shape),
            str(leaf.dtype),
            getattr(leaf.dtype, "itemsize", 4),
            splittable=not _call.is_key(leaf.dtype, leaf.shape),
            floating=_trace.is_float(leaf),
            automatic=spec,
            parts=math.prod(setting.automatic[axis] for axes in spec for axis in axes),
        )
        for path, leaf, spec in zip(paths, leaves, specs, strict=True)
    ]


def build(
    step_fn: Callable[..., Any], signature: _call.Signature, setting: Setting, state: Any,
    arrays: dict[str, Any], static: tuple[tuple[str, Any], ...],
) -> Program:  # fmt: skip
    """Traces the step, decides what goes where, and returns the program that does it.

    Args:
      step_fn: the user's step.
      signature: how it is called.
      setting: stage and mesh.
      state: the state's tree of `ShapeDtypeStruct`s.
      arrays: the same for every other argument, by name.
      static: the static arguments.
    """
    state_avals, state_tree = jax.tree.flatten(state)
    array_avals, arrays_tree = jax.tree.flatten(arrays)
    options = setting.options
    specs = _call.argument_specs(arrays, signature.specs, setting.batch_axes, options.accumulate)
    local = [
        _call.local_aval(aval, spec, setting.batch_axes)
        for aval, spec in zip(array_avals, specs, strict=True)
    ]
    num_state = len(state_avals)

    def flat_step(*leaves: Any) -> Any:
        return signature.call(
            step_fn,
            jax.tree.unflatten(state_tree, leaves[:num_state]),
            jax.tree.unflatten(arrays_tree, leaves[num_state:]),
            static,
        )

    folds = [
        not any(spec) and _call.is_key(aval.dtype, aval.shape)
        for aval, spec in zip(array_avals, specs, strict=True)
    ]
    step_axes = {
        name: math.prod(setting.batch_axes[axis] for axis in axes)
        for name, axes in setting.step_axes.items()
    }
    varying = [False] * num_state + [any(map(_call.spec_axes, spec)) for spec in specs]
    traced = _trace.trace_step(
        flat_step,
        [*state_avals, *local],
        varying,
        [False] * num_state + folds,
        step_axes,
        setting.axis_name is not None,
        flat=options.accumulate > 1,
        automatic=setting.automatic,
    )
    _trace.check_not_per_example(
        traced, flat_step, [*state_avals, *array_avals], varying, step_axes, setting.automatic
    )
    _outputs.check_outputs(traced, state_avals, state_tree)
    frame, out_varying = traced.frame, traced.frame.out_varying
    leaves = state_leaves(state, setting)
    links = Links(frame, setting.sharding.count(setting.sharding.shard_axes))
    note_needs(frame, len(out_varying))
    averaged = [bool(axes) for axes in out_varying[:num_state]]
    plan = Plan(
        options.stage,
        tuple(setting.axes.items()),
        traced.reductions,
        _plan.plan_leaves(leaves, setting.sharding, frame, links, averaged),
        options.accumulate,
        options.reduce_once,
    )
    _outputs.check_varying_state(plan, traced, averaged)
    globals_ = _outputs.global_shapes(
        traced, flat_step, [*state_avals, *array_avals], step_axes, num_state, setting.automatic
    )
    outputs = _outputs.output_layouts(
        traced, globals_, num_state, setting.axis_names, math.prod(setting.batch_axes.values()) == 1
    )
    run = _runner(setting, plan, traced, links, specs, outputs)
    state_shardings = shardings_of(plan.leaves, setting.mesh)
    # Else XLA would choose over the automatic axes, and the next step would move the state back.
    out_shardings: dict[str, Any] = {"out_shardings": (state_shardings, None)}
    out_shardings = out_shardings if setting.automatic else {}
    return Program(
        plan,
        run,
        jax.jit(run, donate_argnums=0, **out_shardings),
        traced.out_tree,
        state_shardings,
        [NamedSharding(setting.mesh, spec) for spec in specs],
        tuple(path for path, key in zip(_call.argument_paths(arrays), folds, strict=True) if key),
    )


def shardings_of(leaves: Sequence[LeafPlan], mesh: Any) -> list[NamedSharding]:
    """Where each leaf rests, for JAX."""
    return [
        NamedSharding(mesh, _layout.partition_spec(leaf.layout, leaf.automatic)) for leaf in leaves
    ]


def _runner(
    setting: Setting, plan: Plan, traced: _trace.TracedStep, links: Links,
    specs: Sequence[P], outputs: Sequence[Layout],
) -> Callable[..., Any]:  # fmt: skip
    """The step on whole arrays: one `shard_map` around the interpreter."""
    frame, sharding, options = traced.frame, setting.sharding, setting.options
    layouts = [leaf.layout for leaf in plan.leaves]
    state_specs = [_layout.partition_spec(layout) for layout in layouts]

    examples = [False] * len(layouts) + [isinstance(layout, Shard) for layout in outputs]
    phases = _cut.cut(frame, examples) if options.accumulate > 1 else []
    cuts = [None] * len(layouts) + [_call.microbatch_dim(spec, setting.axes) for spec in specs]
    accumulation = _microbatch.Accumulation(
        options.accumulate,
        {var: dim for var, dim in zip(frame.jaxpr.invars, cuts, strict=True) if dim is not None},
        options.reduce_once,
        options.accumulate_dtype,
        options.gather_once,
    )

    automatic = {leaf.path: (leaf.shape, leaf.automatic) for leaf in plan.leaves if leaf.automatic}

    def local_step(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        interp = Interpreter(
            links,
            Devices(
                setting.axes,
                sharding.shard_axes,
                sharding.param_axes,
                automatic,
                GatherQueue(options.prefetch),
                scope=object(),
            ),  # fmt: skip
            mean=traced.reductions == _trace.TYPED,
            axis_names=setting.step_axes,
            automatic=tuple(setting.automatic),
            handlers=ORDINARY | CONTROL,
            otherwise=apply,
            reduce_once=options.reduce_once,
            microbatches=options.accumulate,
            keep_gathered=options.keep_gathered,
            reduce_dtype=options.reduce_dtype,
        )
        values: list[Value] = [_placed(x, leaf) for x, leaf in zip(state, plan.leaves, strict=True)]
        values += [FullValue(x) for x in arrays]
        if phases:
            outs = _microbatch.run_in_microbatches(interp, frame, values, phases, accumulation)
        else:
            outs = _averaged(interp, frame, interp.run(frame, values), examples)
        finished = [
            _jaxpr.with_type_of(_finish(interp, atom, value, frame, layout, example, old), atom)
            for atom, value, layout, example, old in zip(
                frame.jaxpr.outvars,
                outs,
                [*layouts, *outputs],
                examples,
                [*state, *[None] * len(outputs)],
                strict=True,
            )  # fmt: skip
        ]
        return finished[: len(state)], finished[len(state) :]

    out_specs = (state_specs, [_layout.partition_spec(layout) for layout in outputs])
    return jax.shard_map(
        local_step,
        mesh=setting.mesh,
        in_specs=(state_specs, list(specs)),
        out_specs=out_specs,
        check_vma=False,
        axis_names=set(setting.axis_names),
    )


def _placed(x: Any, leaf: LeafPlan) -> Value:
    if isinstance(leaf.layout, Shard):
        dim = leaf.layout.dim
        return ShardValue(x, dim, leaf.shape[dim], leaf.layout.axes, leaf.path)
    return FullValue(x, leaf.path)


def _averaged(
    interp: Interpreter, frame: Frame, outs: Sequence[Value], examples: Sequence[bool]
) -> list[Value]:
    """The step's outputs; what differs between devices is averaged, except one entry per example."""
    return [
        interp.mean_of(interp.full(frame, atom, value)) if axes and not example else value
        for atom, value, axes, example in zip(
            frame.jaxpr.outvars, outs, frame.out_varying, examples, strict=True
        )
    ]


def _finish(
    interp: Interpreter, atom: Any, value: Value, frame: Frame, layout: Layout, example: bool, old: Any
) -> Any:  # fmt: skip
    """An output in its final layout; a leaf of the state in the place of the `old` one."""
    if isinstance(layout, Full):
        if old is None:
            return interp.full(frame, atom, value)
        return interp.devices.full_into(old, value, interp.dim_of(frame, atom))
    dim = layout.dim
    if not example:
        x = interp.devices.shard(value, dim, layout.axes)
        size = atom.aval.shape[dim]
        padded = interp.devices.shard_size(size, layout.axes) * interp.devices.count(layout.axes)
        return x if padded == size else _collectives.mask_padding(x, dim, size, layout.axes, 0)
    x = interp.full(frame, atom, value)  # One entry per example: each device has its own.
    if interp.microbatches == 1:
        return x
    x = jnp.moveaxis(x, 0, dim)  # from (microbatch, ...)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
