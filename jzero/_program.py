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

from jzero import _call, _jaxpr, _trace
from jzero._errors import StateError, StepError, describe_leaf, message
from jzero._options import Options
from jzero.sharding import _cut, _layout, _microbatch, _plan
from jzero.sharding._control import CONTROL
from jzero.sharding._frames import Frame
from jzero.sharding._interpret import Interpreter
from jzero.sharding._layout import Full, Layout, Shard
from jzero.sharding._links import Links
from jzero.sharding._needs import note_needs
from jzero.sharding._ordinary import ORDINARY, apply
from jzero.sharding._plan import Leaf, LeafPlan, Plan
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
    _check_outputs(traced, state_avals, state_tree)
    frame, out_varying = traced.frame, traced.frame.out_varying
    leaves = state_leaves(state, setting)
    links = Links(frame)
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
    _check_varying_state(plan, traced, averaged)
    globals_ = _global_avals(
        traced, flat_step, [*state_avals, *array_avals], step_axes, num_state, setting.automatic
    )
    outputs = _output_layouts(traced, globals_, num_state, setting)
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
        tuple(
            path
            for path, key in zip(
                [p for name, tree in arrays.items() for p in _call.leaf_paths(tree, name)],
                folds,
                strict=True,
            )
            if key
        ),
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
                setting.axes, sharding.shard_axes, sharding.param_axes, automatic, scope=object()
            ),
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
            _jaxpr.with_type_of(_finish(interp, atom, value, frame, layout, example), atom)
            for atom, value, layout, example in zip(
                frame.jaxpr.outvars, outs, [*layouts, *outputs], examples, strict=True
            )
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
        return ShardValue(x, leaf.layout.dim, leaf.layout.axes, leaf.path)
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
    interp: Interpreter, atom: Any, value: Value, frame: Frame, layout: Layout, example: bool
) -> Any:
    """An output in its final layout."""
    if isinstance(layout, Full):
        return interp.full(frame, atom, value)
    dim = layout.dim
    if not example:
        return interp.devices.shard(value, dim, layout.axes)
    x = interp.full(frame, atom, value)  # One entry per example: each device has its own.
    if interp.microbatches == 1:
        return x
    x = jnp.moveaxis(x, 0, dim)  # from (microbatch, ...)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _global_avals(
    traced: _trace.TracedStep, flat_step: Any, avals: list[Any], axes: dict[str, int],
    num_state: int, automatic: dict[str, int],
) -> list[tuple[int, ...]] | None:  # fmt: skip
    """Output shapes at the whole batch, asked only if some output may hold one entry per example."""
    outs = zip(traced.out_avals[num_state:], traced.frame.out_varying[num_state:], strict=True)
    if not any(axes and aval.shape for aval, axes in outs):
        return None
    return _trace.global_shapes(flat_step, avals, axes, automatic)


def _output_layouts(
    traced: _trace.TracedStep, globals_: list[tuple[int, ...]] | None, num_state: int,
    setting: Setting,
) -> list[Layout]:  # fmt: skip
    """Layouts of the outputs beside the state: averaged ones are full, per-example ones concatenated."""
    layouts: list[Layout] = []
    bad = []
    paths = _output_paths(traced.out_tree, num_state)
    for i, aval in enumerate(traced.out_avals[num_state:], num_state):
        dims = [] if globals_ is None else [
            dim for dim, (local, whole) in enumerate(zip(aval.shape, globals_[i], strict=True))
            if local != whole
        ]  # fmt: skip
        if not traced.frame.out_varying[i]:
            layouts.append(_layout.FULL)
        elif dims:
            layouts.append(Shard(dims[0], setting.axis_names))
        else:
            layouts.append(_layout.FULL)
            if not _trace.is_float(aval) and math.prod(setting.batch_axes.values()) > 1:
                bad.append(describe_leaf(paths[i - num_state], aval.shape, aval.dtype))
    if bad:
        raise StepError(message(
            WHO, [f"{leaf} differs between devices" for leaf in bad],
            "Outputs that differ between devices are averaged, and an integer has no average.",
            "Return it as a float (.astype(jnp.float32)): a count becomes the mean count per device.",
        ))  # fmt: skip
    return layouts


def _output_paths(out_tree: Any, num_state: int) -> list[str]:
    outs = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return _call.leaf_paths(outs, "output")[num_state:]


def _check_outputs(traced: _trace.TracedStep, avals: list[Any], tree: Any) -> None:
    """The step must return its state, alone or first, with every leaf's shape and dtype kept."""
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    new = outs
    if isinstance(outs, (tuple, list)) and outs and jax.tree.structure(outs[0]) == tree:
        new = outs[0]
    elif jax.tree.structure(outs) != tree:
        raise StateError(message(
            WHO, _structure_difference(outs, tree),
            "step_fn returns the new state, alone or first in a tuple, with the structure it got.",
            "Return (new_state, metrics).",
        ))  # fmt: skip
    paths = _call.leaf_paths(new, "state")
    bad = [
        f"{describe_leaf(path, old.shape, old.dtype)} became {aval.dtype}{list(aval.shape)}"
        for path, old, aval in zip(paths, avals, jax.tree.leaves(new), strict=True)
        if (old.shape, old.dtype) != (aval.shape, aval.dtype)
    ]
    if bad:
        raise StateError(message(
            WHO, bad, "A step must keep every state leaf's shape and dtype.",
            "Cast it back (.astype) before returning, or initialise it with the new dtype.",
        ))  # fmt: skip


def _structure_difference(outs: Any, tree: Any) -> str:
    first = outs[0] if isinstance(outs, (tuple, list)) and outs else outs
    old = set(_call.leaf_paths(jax.tree.unflatten(tree, range(tree.num_leaves)), "state"))
    new = set(_call.leaf_paths(first, "state"))
    if not isinstance(outs, (tuple, list)) or not (old & new):
        return f"step_fn returned {_shape_of(outs)}, and the state is a {_shape_of_tree(tree)}"
    missing, extra = sorted(old - new)[:4], sorted(new - old)[:4]
    parts = [
        f"{kind} {', '.join(paths)}"
        for kind, paths in (("missing", missing), ("new", extra))
        if paths
    ]
    return f"the state's structure changes: {'; '.join(parts) or 'its containers differ'}"


def _shape_of(tree: Any) -> str:
    kind = type(tree).__name__
    return f"a {kind} of {len(tree)}" if isinstance(tree, (tuple, list)) else f"one {kind}"


def _shape_of_tree(tree: Any) -> str:
    return f"tree of {tree.num_leaves} leaves"


def _check_varying_state(plan: Plan, traced: _trace.TracedStep, averaged: Sequence[bool]) -> None:
    """Statistics may be averaged; a parameter or an integer that differs between devices may not."""
    differing = [
        (leaf, new, aval)
        for leaf, new, aval, mean in zip(
            plan.leaves, traced.frame.jaxpr.outvars, traced.out_avals, averaged, strict=False
        )
        if mean
    ]
    integers = [
        describe_leaf(leaf.path, leaf.shape, leaf.dtype)
        for leaf, _, aval in differing
        if not _trace.is_float(aval)
    ]
    if integers:
        raise StateError(message(
            WHO, [f"the new {leaf} differs between devices" for leaf in integers],
            "The state must be the same on all devices, and an integer has no average.",
            "Compute it from the state, or from values reduced with jax.lax.psum.",
        ))  # fmt: skip
    updates = [
        describe_leaf(leaf.path, leaf.shape, leaf.dtype)
        for leaf, new, _ in differing
        if new in traced.frame.local_gradients
    ]
    if updates and traced.reductions != _trace.TYPED:
        edit = (
            "Reduce the gradients with jax.lax.pmean before the update."
            if traced.reductions == _trace.WRITTEN
            else "Take them with jax.grad or jzero.grad inside the step (not `from jax import grad`)."
        )
        raise StepError(message(
            WHO, [f"the update of {leaf} differs between devices" for leaf in updates],
            "Gradients must be reduced over the data axes before a parameter is updated.", edit,
        ))  # fmt: skip
