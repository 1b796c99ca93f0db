# SPDX-License-Identifier: Apache-2.0
"""Runs a planned step on one device's values: inside `shard_map`, and as one function of whole arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero._blocks import Blocks
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.passes import _turns
from jzero.sharding.passes._one_order import in_one_order
from jzero.sharding.plan import _layout
from jzero.sharding.plan._boundary import ValuePlan
from jzero.sharding.plan._layout import Automatic, Full, RestLayout, Shard
from jzero.sharding.plan._plan import Analysis, StepPlan
from jzero.sharding.plan._trace import WRITTEN
from jzero.sharding.run import _coded, _collectives, _microbatches
from jzero.sharding.run._control import CONTROL
from jzero.sharding.run._devices import Devices
from jzero.sharding.run._interpret import Env, Interpreter
from jzero.sharding.run._ordinary import ORDINARY, apply
from jzero.sharding.run._queue import GatherQueue
from jzero.sharding.run._tiles import TILED
from jzero.sharding.run._values import FullValue, Settled, ShardValue, Value
from jzero.targets._links import members
from jzero.tracing import _jaxpr


@dataclasses.dataclass(frozen=True)
class Runner:
    """Obeys a plan: the functions of one device's values of which programs are made.

    Attributes:
      plan: of the step.
      analysis: of its jaxpr.
      mesh: on which it runs; it may be abstract.
    """

    plan: StepPlan
    analysis: Analysis
    mesh: Mesh

    @property
    def frame(self) -> Frame:
        """The step's root frame."""
        return self.analysis.frame

    @property
    def is_partitioned(self) -> bool:
        """Whether the frame is what is partitioned: the whole batch's, or one with collectives of its own."""
        analysis, plan = self.analysis, self.plan
        if not analysis.partitions:
            return False
        if analysis.whole is not None:
            return self.frame.jaxpr is analysis.whole.jaxpr
        return plan.reductions == WRITTEN

    def whole_step(self) -> Callable[..., Any]:
        """The step on whole arrays, `(state leaves, argument leaves) -> (new state leaves, outputs)`."""
        plan = self.plan

        def local_step(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            interp = self.interpreter()
            env = self.grad_part(interp, state, arrays)
            olds = [*state[:num_new], *[None] * len(plan.outputs)]
            outs = [self.out(interp, env, i, old) for i, old in enumerate(olds)]
            return outs[:num_new], outs[num_new:]

        num_new = len(plan.new_leaves)
        leaves = [_layout.partition_spec(leaf.layout) for leaf in plan.leaves]
        outputs = [_layout.partition_spec(layout) for layout in plan.outputs]
        return self.shard_map(
            local_step, (leaves, list(plan.arguments)), (leaves[:num_new], outputs)
        )

    def shard_map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`fn` of one device's values as a function of whole arrays."""
        return jax.shard_map(
            in_one_order(fn) if self.overtakes and self.plan.activations else fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
            axis_names={name for name, _ in self.plan.axes},
        )

    @property
    def balance(self) -> float:
        """Multiplications in the time in which a byte is moved among the devices."""
        group = members(self.mesh.shape, [name for name, _ in self.plan.axes])
        return _turns.balance(devices_of(self.mesh), group)

    @property
    def alone(self) -> tuple[str, ...]:
        """The mesh axes along which XLA must not shard a sum of 16 bits: [Note: 16 bits on CPUs]."""
        return self.plan.automatic if _may_be_on_cpus(self.mesh) else ()

    def interpreter(self) -> Interpreter:
        """An interpreter at the start of a program."""
        plan, stage_axes, exchange = self.plan, self.plan.stage_axes, self.plan.exchange
        automatic = {
            leaf.path: (leaf.shape, leaf.automatic) for leaf in plan.leaves if leaf.automatic
        }
        devices = Devices(
            dict(plan.axes),
            stage_axes.shard_axes,
            stage_axes.param_axes,
            automatic,
            # The loop over layers takes their reductions in, and none of them can wait for one of all layers.
            GatherQueue(
                exchange.prefetch_bytes,
                exchange.reduced_together(plan.num_devices),
                in_order=not plan.microbatches.layer_major,
            ),
            balance=self.balance,
            others={axis: self.mesh.shape[axis] for axis in plan.automatic},
            alone=self.alone,
            scope=object(),
            gather_codes=exchange.gather_codes,
            reduce_codes=dict(exchange.reduce_codes),
            coded=frozenset(leaf.path for leaf in plan.leaves if leaf.coded),
        )
        return Interpreter(
            self.analysis.links,
            devices,
            axis_names=dict(plan.step_axes),
            automatic=plan.automatic,
            handlers=ORDINARY | CONTROL | (TILED if exchange.tile_bytes is not None else {}),
            otherwise=apply,
            reduce_once=exchange.reduce_once,
            microbatches=plan.accumulate,
            keep_gathered=exchange.keep_gathered,
            reduce_dtype=exchange.reduce_dtype,
            boundary=plan.update.boundary,
            loop_bytes=exchange.loop_bytes,
            tile_bytes=exchange.tile_bytes,
            owners=self.analysis.owners,
            residuals=self.analysis.residuals,
            tables=self.analysis.tables,
            in_parts=plan.in_parts,
        )

    def grad_part(self, interp: Interpreter, state: Sequence[Any], arrays: Sequence[Any]) -> Env:
        """Runs all equations that are not the update part's, on the leaves' and arguments' local values.

        A leaf may be None if none of them reads it.
        """
        plan, frame, exchange = self.plan, self.frame, self.plan.exchange
        leaves = zip(state, frame.jaxpr.invars, plan.leaves, strict=False)
        values = [
            value_of(x, plan.boundary.of(var), leaf.coded, leaf.automatic)
            for x, var, leaf in leaves
        ]
        env = interp.start(frame, [*values, *map(FullValue, arrays)])
        if plan.microbatches.phases:
            arguments = frame.jaxpr.invars[len(state) :]
            dims = zip(arguments, plan.cut_dims, strict=True)
            accumulation = _microbatches.Accumulation(
                plan.accumulate,
                {var: dim for var, dim in dims if dim is not None},
                exchange.reduce_once,
                exchange.accumulate_dtype,
                exchange.gather_once,
            )
            _microbatches.run_phases(interp, frame, env, plan.microbatches.phases, accumulation)
        else:
            apart = plan.update.apart
            rest = [i for i in range(len(frame.jaxpr.eqns)) if i not in apart]
            interp.run_equations(frame, rest, env)
        interp.reduce_boundary(env)
        return env

    def out(
        self, interp: Interpreter, env: Env, index: int, old: Any, layout: RestLayout | None = None,
        masks_padding: bool = True,
    ) -> Any:  # fmt: skip
        """Output `index` of the step as it rests, a leaf of the state in the place of `old`.

        With a `layout`, in that one. The padding of a shard is zero, or anything if it is not masked.
        """
        frame, example = self.frame, self.plan.is_per_example(index)
        atom = frame.jaxpr.outvars[index]
        layout = self.plan.layouts[index] if layout is None else layout
        if example and interp.microbatches > 1:
            num = interp.microbatches
            value: Value = FullValue(_microbatches.of_all(interp, frame, env, atom, num))
        else:
            value = interp.read(frame, env, atom)
        codes, leaves = None, self.plan.leaves
        if old is not None and index < len(leaves):
            codes = self.plan.exchange.gather_codes if leaves[index].renewed_in_codes else None
            if isinstance(value, ShardValue):  # What an update has made has lost it.
                value = dataclasses.replace(value, name=leaves[index].path, automatic=None)
        x = _finish(interp, atom, value, layout, example, old, masks_padding, codes)
        return _jaxpr.with_type_of(x, atom)

    @property
    def overtakes(self) -> bool:
        """Whether XLA lets collectives overtake a loop, if residuals leave within a program: on CPUs."""
        return not self.plan.in_parts and _on_cpus(self.mesh)


def devices_of(mesh: Mesh) -> list[Any]:
    """Its devices; an abstract mesh stands for as many of the default platform."""
    return [*mesh.devices.flat] if isinstance(mesh, Mesh) else jax.devices()[:1] * mesh.size


def _on_cpus(mesh: Mesh) -> bool:
    """Whether programs for the mesh are XLA:CPU's; of an abstract one nobody knows."""
    return isinstance(mesh, Mesh) and bool(mesh.devices.flat[0].platform == "cpu")


def _may_be_on_cpus(mesh: Mesh) -> bool:
    """Whether they are, or may be: an abstract mesh stands for devices of the default platform, mostly."""
    return _on_cpus(mesh) if isinstance(mesh, Mesh) else jax.default_backend() == "cpu"


def value_of(
    x: Any, plan: ValuePlan, coded: bool = False, automatic: Automatic | None = None
) -> Settled:
    """An array of one device, as what the plan says it is; `coded` if codes may be gathered of it.

    A leaf is known to lie `automatic` over further axes.
    """
    if plan.codes is not None:
        axes = plan.layout.axes if isinstance(plan.layout, Shard) else ()
        return _coded.value_of(x, plan.codes, axes, plan.path)
    if isinstance(plan.layout, Shard):
        dim = plan.layout.dim
        size, axes = plan.shape[dim], plan.layout.axes
        return ShardValue(x, dim, size, axes, plan.path, coded, automatic)
    return FullValue(x, plan.path)


def _finish(
    interp: Interpreter, atom: _jaxpr.Atom, value: Value, layout: RestLayout, example: bool, old: Any,
    masks_padding: bool, codes: Blocks | None,
) -> Any:  # fmt: skip
    if isinstance(layout, Full):
        if old is None:
            return interp.devices.full(value)
        return interp.devices.full_into(old, value, codes)
    assert isinstance(layout, Shard), "only the partitioner splits several dims"
    dim = layout.dim
    if not example:
        x = interp.devices.shard_into(old, value, dim, layout.axes, codes)
        size = atom.aval.shape[dim]
        padded = interp.devices.shard_size(size, layout.axes) * interp.devices.count(layout.axes)
        if padded == size or not masks_padding:
            return x
        return _collectives.mask_padding(x, dim, size, layout.axes, 0)
    x = interp.devices.full(value)  # One entry per example: each device has its own.
    if interp.microbatches == 1:
        return x
    x = jnp.moveaxis(x, 0, dim)  # from (microbatch, ...)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
