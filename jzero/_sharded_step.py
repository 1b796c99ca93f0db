"""`ShardedStep`: what can be asked of a step whose state lives in shards, whether it trains or evaluates."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax

from jzero._placement import Placement
from jzero.processes import _agreement
from jzero.reports._describe import Report
from jzero.segments._programs import Programs, placed_inputs
from jzero.sharding.analysis import _traffic
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.run import _microbatches


class ShardedStep(abc.ABC):
    """A step whose state lives in shards.

    Attributes:
      __wrapped__: the function it was made from.
    """

    def __init__(self, fn: Callable[..., Any], programs: Programs):
        self._programs, self._placement = programs, Placement(programs)
        functools.update_wrapper(self, fn, updated=())

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """The plan for `(state, *args)`: arrays or `ShapeDtypeStruct`s; nothing runs."""
        _agreement.check("plan")
        return self._programs.of(self._programs.bind(args, kwargs)).plan

    def describe(self, *args: Any, **kwargs: Any) -> Report:
        """What a step on `(state, *args)` keeps where and moves between devices; print it.

        Arrays or `ShapeDtypeStruct`s; nothing runs, and with an abstract mesh no device is needed.
        """
        _agreement.check("describe")
        call = self._programs.bind(args, kwargs)
        program = self._programs.of(call)
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
        call = self._programs.bind(args, kwargs)
        program = self._programs.of(call)
        return program.step.trace(*placed_inputs(call, program)).lower()

    @property
    def mesh(self) -> Any:
        """The mesh it was made for; None for whatever is current when it is called."""
        return self._programs.mesh
