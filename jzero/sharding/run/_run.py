"""Runs a planned step: the function inside `shard_map`, and what all programs of one step share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.batch import _trace
from jzero.sharding.cut import _phases
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import Full, Layout, Shard
from jzero.sharding.plan._plan import LeafPlan
from jzero.sharding.plan._setting import Setting
from jzero.sharding.run import _collectives, _microbatches
from jzero.sharding.run._control import CONTROL
from jzero.sharding.run._interpret import Env, Interpreter
from jzero.sharding.run._ordinary import ORDINARY, apply
from jzero.sharding.run._queue import GatherQueue
from jzero.sharding.run._values import Devices, FullValue, ShardValue, Value
from jzero.tracing import _call, _jaxpr


@dataclasses.dataclass(frozen=True)
class Runner:
    """A planned step, ready to run on one device's values.

    Attributes:
      setting: stage and mesh.
      leaves: where the state rests.
      traced: the step.
      links: which of its dims are sharded.
      specs: how each argument is split.
      outputs: layouts of what the step returns beside the state.
      apart: equations that run elsewhere, when all others have run.
      handed_out: values that they read, and an equation that does.
      masks_padding: the padding of what is returned is zero; else it holds anything.
    """

    setting: Setting
    leaves: tuple[LeafPlan, ...]
    traced: _trace.TracedStep
    links: Links
    specs: tuple[P, ...]
    outputs: tuple[Layout, ...]
    apart: Collection[int] = frozenset()
    handed_out: Mapping[_jaxpr.Var, _jaxpr.Eqn | None] = dataclasses.field(default_factory=dict)
    masks_padding: bool = True

    @property
    def frame(self) -> Frame:
        """The step's root frame."""
        return self.traced.frame

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return math.prod(self.setting.axes.values())

    @functools.cached_property
    def layouts(self) -> list[Layout]:
        """Of everything that the step returns."""
        return [*(leaf.layout for leaf in self.leaves), *self.outputs]

    @functools.cached_property
    def examples(self) -> list[bool]:
        """For each output of the step, whether it has one entry per example."""
        others = [isinstance(layout, Shard) for layout in self.outputs]
        return [False] * len(self.leaves) + others

    @functools.cached_property
    def state_specs(self) -> list[P]:
        """How each leaf is split over the data axes."""
        return [_layout.partition_spec(leaf.layout) for leaf in self.leaves]

    def whole_step(self) -> Callable[..., Any]:
        """The step on whole arrays, `(state leaves, argument leaves) -> (state leaves, outputs)`."""
        grad_part = self.grad_part()

        def local_step(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            interp = self.interpreter()
            env = grad_part(interp, state, arrays)
            olds = [*state, *[None] * len(self.outputs)]
            outs = [self.out(interp, env, i, old) for i, old in enumerate(olds)]
            return outs[: len(state)], outs[len(state) :]

        out_specs = (self.state_specs, [_layout.partition_spec(layout) for layout in self.outputs])
        return self.shard_map(local_step, (self.state_specs, list(self.specs)), out_specs)

    def shard_map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`fn` of one device's values as a function of whole arrays."""
        return jax.shard_map(
            fn,
            mesh=self.setting.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
            axis_names=set(self.setting.axis_names),
        )

    def interpreter(self) -> Interpreter:
        """An interpreter at the start of a program."""
        setting, options = self.setting, self.setting.options
        automatic = {
            leaf.path: (leaf.shape, leaf.automatic) for leaf in self.leaves if leaf.automatic
        }
        devices = Devices(
            setting.axes,
            setting.sharding.shard_axes,
            setting.sharding.param_axes,
            automatic,
            GatherQueue(options.prefetch),
            scope=object(),
        )
        return Interpreter(
            self.links,
            devices,
            axis_names=setting.step_axes,
            automatic=tuple(setting.automatic),
            handlers=ORDINARY | CONTROL,
            otherwise=apply,
            reduce_once=options.reduce_once,
            microbatches=options.accumulate,
            keep_gathered=options.keep_gathered,
            reduce_dtype=options.reduce_dtype,
            handed_out=self.handed_out,
        )

    @functools.cached_property
    def cut(self) -> _phases.Cut | None:
        """The loops over the microbatches, if there are any."""
        options = self.setting.options
        if options.accumulate == 1:
            return None
        return _phases.cut(
            self.frame, self.setting.step_axes, options.accumulate, self.examples, self.apart, self.handed_out
        )  # fmt: skip

    def grad_part(self) -> Callable[..., Env]:
        """`(interpreter, state leaves, argument leaves) -> values`: all equations that are not `apart`.

        A leaf may be None if none of them reads it.
        """
        frame, options = self.frame, self.setting.options
        cut, rest = self.cut, [i for i in range(len(frame.jaxpr.eqns)) if i not in self.apart]
        cuts = [None] * len(self.leaves) + [
            _call.microbatch_dim(spec, self.setting.axes) for spec in self.specs
        ]
        dims = {v: dim for v, dim in zip(frame.jaxpr.invars, cuts, strict=True) if dim is not None}
        accumulation = _microbatches.Accumulation(
            options.accumulate,
            dims,
            options.reduce_once,
            options.accumulate_dtype,
            options.gather_once,
        )

        def run(interp: Interpreter, state: Sequence[Any], arrays: Sequence[Any]) -> Env:
            values: list[Value] = [
                placed(x, leaf) for x, leaf in zip(state, self.leaves, strict=True)
            ]
            env = interp.start(frame, [*values, *map(FullValue, arrays)])
            if cut is not None:
                _microbatches.run_phases(interp, frame, env, cut.phases, accumulation)
            else:
                interp.run_equations(frame, rest, env)
            interp.reduce_handed_out(frame, env)
            return env

        return run

    def out(self, interp: Interpreter, env: Env, index: int, old: Any) -> Any:
        """Output `index` of the step in its final layout; a leaf of the state in the place of `old`."""
        frame, example = self.frame, self.examples[index]
        atom, layout = frame.jaxpr.outvars[index], self.layouts[index]
        if example and interp.microbatches > 1:
            value: Value = FullValue(env.stacks[_jaxpr.variable(atom)])
        else:
            value = interp.read(frame, env, atom)
        x = _finish(interp, atom, value, frame, layout, example, old, self.masks_padding)
        return _jaxpr.with_type_of(x, atom)


def placed(x: Any, leaf: LeafPlan) -> Value:
    """This device's part of a leaf at rest."""
    if isinstance(leaf.layout, Shard):
        dim = leaf.layout.dim
        return ShardValue(x, dim, leaf.shape[dim], leaf.layout.axes, leaf.path)
    return FullValue(x, leaf.path)


def _finish(
    interp: Interpreter, atom: Any, value: Value, frame: Frame, layout: Layout, example: bool, old: Any,
    masks_padding: bool,
) -> Any:  # fmt: skip
    if isinstance(layout, Full):
        if old is None:
            return interp.full(frame, atom, value)
        return interp.devices.full_into(old, value, interp.dim_of(frame, atom))
    dim = layout.dim
    if not example:
        x = interp.devices.shard(value, dim, layout.axes)
        size = atom.aval.shape[dim]
        padded = interp.devices.shard_size(size, layout.axes) * interp.devices.count(layout.axes)
        if padded == size or not masks_padding:
            return x
        return _collectives.mask_padding(x, dim, size, layout.axes, 0)
    x = interp.full(frame, atom, value)  # One entry per example: each device has its own.
    if interp.microbatches == 1:
        return x
    x = jnp.moveaxis(x, 0, dim)  # from (microbatch, ...)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
