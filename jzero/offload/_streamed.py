# SPDX-License-Identifier: Apache-2.0
"""`StreamedStep`: optimizer state is stored on the hosts and updated on the devices, bucket by bucket."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE, PINNED
from jzero.offload._layered import LayeredSegment
from jzero.offload._sliced import SlicedBucket
from jzero.offload.execute._executor import Executable, Execution, Keys
from jzero.offload.execute._stream import free
from jzero.offload.schedule._ops import DeviceCall, Fetch, Op, Run, Send, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Compiled, Segment, Values
from jzero.segments._segmented import SegmentedStep
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.cut._transfers import is_scalar
from jzero.sharding.plan._offload import Window, waits
from jzero.sharding.plan._plan import UpdateBucket
from jzero.tracing import _jaxpr

Var = _jaxpr.Var


class _Offloaded(NamedTuple):
    """Where offloaded leaves are stored.

    Attributes:
      of: each leaf's sharding, by its variable.
      kept: leaves that the new state has in the same place.
      last: for each variable, the last bucket that takes it.
    """

    of: dict[Var, NamedSharding]
    kept: set[Var]
    last: dict[Var, int]


# [Note: a loop of small programs]
# In one program the scheduler would have to keep the bound on what is on the devices, and XLA merges and
# hoists copies of equal operands. A loop of programs keeps the bound on every backend. It costs a dispatch
# for each program, and the step can neither be lowered nor run under an outer `jax.jit`.


class StreamedStep:
    """A step as several programs: the forward-backward program, and a bucket of the update after the other.

    Attributes:
      grad: the forward-backward program.
      buckets: the optimizer program's, in the order of the plan.
      compiled: those of whole buckets, after a step.
    """

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window):
        """Makes the programs.

        Args:
          planned: the step.
          shardings: where its state is stored.
          window: how many bytes of parameters that are stored away from the devices may be on each at a time.
        """
        self._planned, self._plan = planned, planned.plan
        self._invars = planned.frame.jaxpr.invars
        self._segments = SegmentedStep(Builder(planned, shardings))
        self.grad, self.buckets = self._segments.grad, self._segments.buckets
        self.run, self.trace = self._segments.run, self._segments.trace
        self.found = self._segments.found
        # Over automatic axes, equal programs may have to leave their leaves in different places.
        self.compiled = Compiled(share=not self._plan.automatic)
        leaves = self._plan.leaves
        pairs = zip(self._invars, shardings, leaves, strict=False)
        offloaded = {var: sharding for var, sharding, leaf in pairs if leaf.tier != DEVICE}
        self._layered = None
        if any(leaf.is_streamed for leaf in leaves):
            gradients = [var for var in self.grad.gives if not is_scalar(var)]
            self._layered = LayeredSegment(planned, self.grad, gradients, window)
            self.grad = self._segments.grad = self._layered.as_segment()
            offloaded |= {
                var: self.grad.types[var].aval(planned.mesh).sharding.with_memory_kind(PINNED)
                for var in gradients
            }
        new = planned.frame.jaxpr.outvars[: len(leaves)]
        kept = {var for var, atom in zip(self._invars, new, strict=False) if atom is var}
        last = {var: i for i, bucket in enumerate(self.buckets) for var in bucket.takes}
        self._offloaded = _Offloaded(offloaded, kept, last)
        self._names = dict(zip(self._invars, map(Value.of_leaf, leaves), strict=False))
        if self._layered:
            self._names |= self._layered.gradients

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`."""
        return jax.make_jaxpr(self.__call__)(state, arrays)

    def collectives(self, index: int) -> tuple[Collective, ...]:
        """What the program of a bucket moves between the devices."""
        return self.buckets[index].collectives()

    def code_paths(self) -> str:
        """The host updates nothing."""
        return ""

    def schedule(self) -> Schedule:
        """The forward-backward program, and each bucket of the update: its leaves come, and go back."""
        layered = self._layered
        grads = layered.ops if layered else (Run("gradients"),)
        ops = (*waits(self._segments.plan), *grads, *self._update.ops)
        return Schedule(ops, layered.buffers() if layered else ())

    # -- the update ------------------------------------------------------------------------------------

    @functools.cached_property
    def _update(self) -> Executable:
        """What runs behind the forward-backward program."""
        ops = [op for index, _ in enumerate(self.buckets) for op in self._ops(index)]
        placed = [(self._is_there(i), value) for i, value in self._new.items()]
        here, there = (
            tuple(x for where, x in placed if where == pinned) for pinned in (False, True)
        )
        return Executable(ops, Keys(here, there))

    @functools.cached_property
    def _new(self) -> dict[int, Value]:
        """By which name each output of the buckets is known: leaves in slices by that of the old one."""
        found: dict[int, Value] = {}
        for bucket, plan in zip(self.buckets, self._plan.buckets, strict=True):
            for i in bucket.outs:
                if i >= len(self._plan.leaves):
                    found[i] = Value.of("output", self._planned.frame.jaxpr.outvars[i].aval)
                    continue
                name = self._names[self._invars[i]]
                in_place = plan.parts > 1 and self._is_there(i)
                found[i] = name if in_place else dataclasses.replace(name)
        return found

    def _is_there(self, out: int) -> bool:
        """Whether an output is a leaf in pinned memory."""
        return out < len(self._plan.leaves) and self._invars[out] in self._offloaded.of

    def _name(self, var: Var) -> Value:
        if var not in self._names:
            self._names[var] = Value.of_gradient(var.aval)
        return self._names[var]

    def _ops(self, index: int) -> Iterator[Op]:
        bucket, plan = self.buckets[index], self._plan.buckets[index]
        if plan.parts > 1:
            sliced = SlicedBucket(self._planned, plan, self._offloaded.of)
            return sliced.ops(self._name, self._new)
        return self._whole(index, bucket, plan)

    def _whole(self, index: int, bucket: Segment, plan: UpdateBucket) -> Iterator[Op]:
        """The leaves of a bucket come, are updated, and go back."""
        offloaded, invars, name = self._offloaded, self._invars, self._name
        hosted = [var for var in bucket.takes if var in offloaded.of]
        last = [v for v in hosted if offloaded.last[v] == index and v not in offloaded.kept]
        back = [i for i in bucket.outs if self._is_there(i)]
        overwritten = [
            invars[i] for i in back if invars[i] not in offloaded.last
        ]  # nobody reads them
        yield Fetch(
            tuple(map(name, hosted)), PINNED,
            tuple(offloaded.of[var].with_memory_kind(DEVICE) for var in hosted),
            nbytes=plan.nbytes_at_once, frees=frozenset(map(name, [*last, *overwritten])),
        )  # fmt: skip
        gives = (*map(name, bucket.gives), *(self._new[i] for i in bucket.outs))
        yield Run(
            "a bucket of the update", tuple(map(name, bucket.takes)), gives, self._call(bucket)
        )
        if back:
            places = tuple(offloaded.of[invars[i]] for i in back)
            yield Send(tuple(self._new[i] for i in back), PINNED, places, copies=0)

    def _call(self, bucket: Segment) -> DeviceCall:
        def call(arrays: Sequence[Any], _: int | None) -> Any:
            here = dict(zip(bucket.takes, arrays, strict=True))
            made = bucket(here, self.compiled.of(bucket, here))
            found = [*(here[var] for var in bucket.gives), *(made[i] for i in bucket.outs)]
            # All results of a program are there when one is; no later bucket consumes what this one made.
            return found, sorted(found, key=lambda x: x.size)[:1]

        return call

    # -- a step ----------------------------------------------------------------------------------------

    def __call__(
        self, state: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        values = self._segments.values(state, arrays)
        outs = self._grad_part(values)
        place = {True: dict[Any, Any](), False: dict[Any, Any]()}
        for var, x in values.items():
            place[var in self._offloaded.of][self._name(var)] = x
        del values
        run = Execution(self._update, here=place.pop(False), there=place.pop(True))
        run.run(self._plan.device_bytes)
        for i, value in self._new.items():
            outs[i] = (run.there if self._is_there(i) else run.here)[value]
        return self._segments.in_order(outs, state)

    def _grad_part(self, values: Values) -> dict[int, jax.Array]:
        """Adds gradients to the values; returns outputs."""
        if self._layered is None:
            return self.grad(values, self.grad.jitted)
        given, outs = self._layered(values)
        for var in self.grad.consumes:
            free(values.pop(var))
        values.update(zip(self.grad.gives, given, strict=True))
        return dict(zip(self.grad.outs, outs, strict=True))
