# SPDX-License-Identifier: Apache-2.0
"""`DeviceStep`: leaves that are stored on the hosts come to the devices, are updated there, and go back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE, PINNED
from jzero.offload._layered import NO_FILES, LayeredSegment
from jzero.offload._sliced import SlicedBucket
from jzero.offload.execute._executor import Executable, Execution, Keys, Section
from jzero.offload.execute._stream import free
from jzero.offload.schedule._ops import DeviceCall, Fetch, Op, Run, Send, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Compiled, Segment, SegmentFn, Values, Var
from jzero.segments._segmented import SegmentedStep
from jzero.sharding.cut._transfers import is_scalar
from jzero.sharding.plan._backend import Window, waits
from jzero.sharding.plan._plan import UpdateBucket

# [Note: a loop of small programs]
# In one program the scheduler would have to keep the bound on what is on the devices, and XLA merges and
# hoists copies of equal operands. A loop of programs keeps the bound on every backend. It costs a dispatch
# for each program, and the step can neither be lowered nor run under an outer `jax.jit`.


class DeviceStep:
    """A step as several programs: forward and backward, then the buckets of the update, one after the other.

    An evaluation has no buckets.

    Attributes:
      found: the forward-backward program, as the partitioner has written it.
      grad: the forward-backward program.
      buckets: the optimizer program's, in the order of the plan.
      compiled: those of whole buckets, after a step.
    """

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window):
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
        # The shardings of what is in pinned memory when the update begins, or comes to be there.
        self._pinned = {var: sharding for var, sharding, leaf in pairs if leaf.tier != DEVICE}
        self._names = dict(zip(self._invars, map(Value.of_leaf, leaves), strict=False))
        self._layered = None
        if any(leaf.is_streamed for leaf in leaves):
            gradients = [var for var in self.grad.gives if not is_scalar(var)]
            self._layered = LayeredSegment(planned, self.grad, gradients, window, self._names)
            self.grad = self._segments.grad = self._layered.as_segment()
            self._pinned |= {
                var: self.grad.types[var].aval(planned.mesh).sharding.with_memory_kind(PINNED)
                for var in gradients
            }
            given = zip(self.grad.gives, self._layered.outputs, strict=False)
            self._names |= {var: output.value for var, output in given if output}
        new = planned.frame.jaxpr.outvars[: len(leaves)]
        self._unchanged = {var for var, atom in zip(self._invars, new, strict=False) if atom is var}
        # For each value, the last bucket that takes it.
        self._last = {self._name(v): i for i, part in enumerate(self.buckets) for v in part.takes}

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`; of a `while` one iteration."""
        return jax.make_jaxpr(self.__call__)(state, arrays)

    def code_paths(self) -> str:
        """The host updates nothing."""
        return ""

    def schedule(self) -> Schedule:
        """The forward-backward program, and each bucket of the update: its leaves come, and go back."""
        ops = (*waits(self._segments.plan), *self._program.ops)
        return Schedule(ops, self._layered.buffers() if self._layered else ())

    @functools.cached_property
    def _program(self) -> Executable:
        placed = [(self._is_pinned(i), value) for i, value in self._new.items()]
        here, there = (
            tuple(x for where, x in placed if where == pinned) for pinned in (False, True)
        )
        return Executable((*self._gradients.ops, *self._update.ops), Keys(here, there))

    @functools.cached_property
    def _gradients(self) -> Section:
        """Forward and backward."""
        grad = self.grad
        if self._layered is not None:
            return self._layered.section
        gives = (*map(self._name, grad.gives), *(self._new[i] for i in grad.outs))
        call = called(grad, lambda _: grad.jitted)
        return Section((Run("gradients", tuple(map(self._name, grad.takes)), gives, call),))

    # -- the update ------------------------------------------------------------------------------------

    @functools.cached_property
    def _update(self) -> Section:
        """What runs behind the forward-backward program."""
        ops = [op for index, _ in enumerate(self.buckets) for op in self._ops(index)]
        return Section(tuple(ops), self._plan.device_bytes)

    @functools.cached_property
    def _new(self) -> dict[int, Value]:
        """By which name each output is known: leaves in slices by that of the old one."""
        found: dict[int, Value] = {}
        buckets = zip(self.buckets, self._plan.buckets, strict=True)
        parts = [(self.grad.outs, 1), *((bucket.outs, plan.parts) for bucket, plan in buckets)]
        for outs, num in parts:
            for i in outs:
                if i >= len(self._plan.new_leaves):
                    found[i] = Value.of("output", self._planned.frame.jaxpr.outvars[i].aval)
                    continue
                name = self._names[self._invars[i]]
                in_place = num > 1 and self._is_pinned(i)
                found[i] = name if in_place else dataclasses.replace(name)
        if self._layered is not None:
            outputs = self._layered.outputs[len(self.grad.gives) :]
            pairs = zip(self.grad.outs, outputs, strict=True)
            found |= {i: output.value for i, output in pairs if output}
        return found

    def _is_pinned(self, out: int) -> bool:
        """Whether an output is a leaf in pinned memory."""
        return out < len(self._plan.new_leaves) and self._invars[out] in self._pinned

    def _name(self, var: Var) -> Value:
        if var not in self._names:
            self._names[var] = Value.of_gradient(var.aval)
        return self._names[var]

    def _ops(self, index: int) -> Iterator[Op]:
        bucket, plan = self.buckets[index], self._plan.buckets[index]
        if plan.parts > 1:
            sliced = SlicedBucket(self._planned, plan, self._pinned)
            return sliced.ops(self._name, self._new)
        return self._whole(index, bucket, plan)

    def _whole(self, index: int, bucket: Segment, plan: UpdateBucket) -> Iterator[Op]:
        """The leaves of a bucket come, are updated, and go back."""
        pinned, name = self._pinned, self._name
        fetched = [var for var in bucket.takes if var in pinned]
        freed = [v for v in fetched if self._last[name(v)] == index and v not in self._unchanged]
        back = [i for i in bucket.outs if self._is_pinned(i)]
        overwritten = [self._invars[i] for i in back]
        # Nobody reads these.
        freed += [var for var in overwritten if name(var) not in self._last]
        yield Fetch(
            tuple(map(name, fetched)), PINNED,
            tuple(pinned[var].with_memory_kind(DEVICE) for var in fetched),
            nbytes=plan.nbytes_at_once, frees=frozenset(map(name, freed)),
        )  # fmt: skip
        gives = (*map(name, bucket.gives), *(self._new[i] for i in bucket.outs))
        call = called(bucket, functools.partial(self.compiled.of, bucket), waits=True)
        yield Run("a bucket of the update", tuple(map(name, bucket.takes)), gives, call)
        if back:
            places = tuple(pinned[var] for var in overwritten)
            yield Send(tuple(self._new[i] for i in back), PINNED, places, copies=0)

    # -- a step ----------------------------------------------------------------------------------------

    def __call__(
        self, state: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        values, layered = self._segments.values(state, arrays), self._layered
        place = {True: dict[Any, Any](), False: layered.here(values) if layered else {}}
        for var, x in values.items():
            place[var in self._pinned][self._name(var)] = x
        values = {var: values[var] for var in self.grad.consumes}
        run = Execution(self._program, here=place.pop(False), there=place.pop(True))
        with layered.reading(run.there) if layered else NO_FILES as files:
            run.run(self._gradients, files=files)
        for var in self.grad.consumes if layered else ():  # Programs of parts donate no leaf.
            free(values[var])
        values.clear()  # No reference outlives a bucket that consumes it.
        run.run(self._update)
        outs = {
            i: (run.there if self._is_pinned(i) else run.here)[value]
            for i, value in self._new.items()
        }
        return self._segments.in_order(outs, state)


def called(
    segment: Segment, program: Callable[[Values], SegmentFn], waits: bool = False
) -> DeviceCall:
    """A segment on what it takes: what it gives, and its outputs.

    Args:
      segment: it.
      program: what runs it on these values.
      waits: whether it is over when the first of its results is there; else nobody waits for it.
    """

    def call(arrays: Sequence[Any], _: int | None) -> Any:
        here = dict(zip(segment.takes, arrays, strict=True))
        made = segment(here, program(here))
        found = [*(here[var] for var in segment.gives), *(made[i] for i in segment.outs)]
        # All results of a program are there when one is; no later bucket consumes what this one made.
        return found, sorted(found, key=lambda x: x.size)[: int(waits)]

    return call
