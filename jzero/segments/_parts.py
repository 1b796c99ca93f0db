# SPDX-License-Identifier: Apache-2.0
"""Parts of a step that are programs of their own, each as the partitioner writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jzero.ir._layout import Layout
from jzero.segments._given import (
    GivenStep,
    TypedPart,
    arguments,
    axes_of,
    function_of,
    given_step,
    reduced_hint,
    stored,
)
from jzero.segments._given import results as results_of
from jzero.segments._partitioned import PASSES, Partitioned, programs_of, time_of, work_of
from jzero.segments._planned import PlannedStep
from jzero.sharding.partition._partition import DeviceInput
from jzero.sharding.partition._values import Hint
from jzero.sharding.plan._interface import ValuePlan
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Var


class PartsOfStep:
    """Writes the programs of a step's parts, of the jaxpr that is partitioned.

    Attributes:
      found: the gradients' program, once it is written.
    """

    def __init__(self, planned: PlannedStep):
        self._planned, self._plan = planned, planned.plan
        self._time = time_of(planned.plan, planned.mesh.axis_names)
        self._step = given_step(planned.plan, planned.analysis, self._time)
        self._eqns = planned.frame.jaxpr.eqns
        self._number = {var: i for i, var in enumerate(self._step.jaxpr.invars)}
        self.found: Partitioned | None = None

    def function(
        self, eqns: Sequence[int], takes: Sequence[Var], gives: Sequence[Var], outs: Sequence[int],
        types: Mapping[Var, ValuePlan], donated: Collection[int] = (), masks: bool = True,
        is_first: bool = False,
    ) -> Callable[..., list[Any]]:  # fmt: skip
        """Some equations as a function of whole arrays: `takes -> [*gives, *outs]`.

        Args:
          eqns: of the step, by index.
          takes: what they read: leaves, arguments, and values that other parts give.
          gives: values for other parts.
          outs: results of the step, by index.
          types: how lies what it takes and gives, and the leaves in whose places results are.
          donated: of `takes`, by index, what results may take the memory of.
          masks: what pads results of the step is zero; else it is anything, as in values for other parts.
          is_first: they compute the gradients, of each microbatch.

        Raises:
          CannotPartitionError: the partitioner has no exact program for them.
        """
        planned, plan, jaxpr = self._planned, self._plan, self._step.jaxpr
        time = self._time if is_first else None
        mesh, num_new = axes_of(plan, time), len(plan.new_leaves)
        results = [*gives, *(jaxpr.outvars[i] for i in outs)]
        needed, _ = _rewrite.behind([self._eqns[i] for i in eqns], results)
        stored_inputs = [*arguments(plan, self._step, mesh, time)]
        kinds = [types[jaxpr.invars[i]] if i < num_new else None for i in outs]
        layouts = [stored(types[var], mesh) for var in gives]
        layouts += [
            self._result(i, mesh) if kind is None else stored(kind, mesh)
            for i, kind in zip(outs, kinds, strict=True)
        ]
        part = TypedPart(
            self._step.cut(takes, results, needed),
            [self._number.get(var) for var in takes],
            [self._input(var, types, stored_inputs, mesh) for var in takes],
            [*[None] * len(gives), *outs],
            layouts,
            [
                *(
                    _gradient(layout, types[var])
                    for layout, var in zip(layouts, gives, strict=False)
                ),
                *(reduced_hint(plan.leaves[i], mesh) if i < num_new else None for i in outs),
            ],
            frozenset(donated),
            frozenset(range(len(gives) if masks else len(results))),
        )
        programs = programs_of(part, planned, time)
        if self._step.written is not None:
            # Its values are of the mesh in which it was traced, and layers are evaluated in that of programs.
            inside = _jaxpr.inside_of(planned.mesh, [axis for axis, _ in plan.axes])
            last = programs[PASSES[-1]]
            own = _jaxpr.in_mesh(last.jaxpr, inside)
            programs[PASSES[-1]] = dataclasses.replace(last, jaxpr=own)
        run = function_of(programs[PASSES[-1]], planned)
        if is_first:
            self.found = Partitioned(part, programs, work_of(programs, planned), run)
        return run

    def _input(
        self, var: Var, types: Mapping[Var, ValuePlan], stored_inputs: Sequence[DeviceInput],
        mesh: dict[str, int],
    ) -> DeviceInput:  # fmt: skip
        number, leaves = self._number.get(var), self._plan.leaves
        if number is None:
            return DeviceInput(stored(types[var], mesh))
        if number >= len(leaves) or types[var] is self._plan.interface.stored[var]:
            return stored_inputs[number]
        return DeviceInput(stored(types[var], mesh), name=leaves[number].path)

    def _result(self, i: int, mesh: dict[str, int]) -> Layout:
        """How a result lies that is no leaf."""
        num_new = len(self._plan.new_leaves)
        return [*results_of(self._plan, self._step, mesh)][i - num_new]


def _gradient(layout: Layout, of: ValuePlan) -> Hint | None:
    """What is said of a value that other parts take: it is the gradient of that leaf, if it is of one."""
    return Hint(layout, leaf=of.path) if of.path and layout.dims else None


def entered(planned: PlannedStep, variables: Sequence[Var]) -> Callable[..., list[Any]]:
    """`leaves -> shards`: leaves that are stored on the devices, in shards like gradients."""
    interface = planned.plan.interface
    mesh = axes_of(planned.plan, None)
    ins = [DeviceInput(stored(interface.of(var), mesh)) for var in variables]
    outs = [stored(interface.as_passed(var), mesh) for var in variables]
    none = [None] * len(variables)
    return _moved(planned, [*variables], TypedPart(_NOTHING, none, ins, none, outs))


def left(planned: PlannedStep, outs: Sequence[int]) -> Callable[..., list[Any]]:
    """`[*old leaves, *shards] -> leaves`: renewed shards like gradients, as they are stored."""
    interface, invars = planned.plan.interface, planned.frame.jaxpr.invars
    mesh, olds = axes_of(planned.plan, None), [invars[i] for i in outs]
    rest = [stored(interface.of(var), mesh) for var in olds]
    ins = [
        *map(DeviceInput, rest),
        *(DeviceInput(stored(interface.as_passed(v), mesh)) for v in olds),
    ]
    taken, donated = [*outs, *[None] * len(olds)], frozenset(range(len(olds)))
    new = [_jaxpr.new_var(var) for var in olds]
    part = TypedPart(_NOTHING, taken, ins, outs, rest, donated=donated)
    return _moved(planned, new, part, olds)


_NOTHING = GivenStep(_rewrite.Flat([], [], [], []), [], [], None)


def _moved(
    planned: PlannedStep, values: list[Var], part: TypedPart, olds: Sequence[Var] = ()
) -> Callable[..., list[Any]]:
    """Values from one layout to another; `olds` are those in whose places they are."""
    flat = _rewrite.Flat([], [*olds, *values], [*values], [])
    programs = programs_of(part._replace(step=_NOTHING._replace(jaxpr=flat)), planned)
    return function_of(programs[PASSES[-1]], planned)
