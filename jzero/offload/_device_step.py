# SPDX-License-Identifier: Apache-2.0
"""`DeviceStep`: leaves that are stored on the hosts are fetched, updated on the devices, and sent back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE, PINNED
from jzero.offload._listed_step import ListedStep, called
from jzero.offload._sliced import SlicedBucket
from jzero.offload.execute._executor import Executable, Section
from jzero.offload.execute._stream import free
from jzero.offload.schedule._ops import Fetch, Op, Run, Send, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Compiled, Segment
from jzero.sharding.cut._transfers import is_scalar
from jzero.sharding.plan._backend import Window, waits
from jzero.sharding.plan._plan import UpdateBucket

# [Note: a loop of small programs]
# In one program XLA's scheduler would have to keep the memory budget, and XLA merges and hoists copies of
# equal operands. A loop of programs keeps the budget on every backend. It costs a dispatch for each program,
# and the step can neither be lowered nor run under an outer `jax.jit`.


class DeviceStep(ListedStep):
    """A step as programs: forward and backward, then the buckets of the update, if there is one."""

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window):
        super().__init__(planned, shardings)
        self.cut(window, lambda var: not is_scalar(var))
        # Over Auto axes, equal programs may leave their leaves in different shardings.
        self.compiled = Compiled(share=not planned.plan.automatic)
        # The shardings of what the update finds, or puts, in pinned memory.
        self._pinned = {var: shardings[i] for var, i in self.offloaded.items()}
        for var in self.layered.sent if self.layered else ():
            place = self.grad.types[var].aval(planned.mesh).sharding
            self._pinned[var] = place.with_memory_kind(PINNED)
        new = planned.frame.jaxpr.outvars[: len(self.leaves)]
        self._unchanged = {var for var, atom in zip(self.invars, new, strict=False) if atom is var}
        # The last bucket that takes each value.
        self._last = {self.name(v): i for i, part in enumerate(self.buckets) for v in part.takes}

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`; one iteration of a `while`."""
        return jax.make_jaxpr(self.__call__)(state, arrays)

    def code_paths(self) -> str:
        return ""

    def schedule(self) -> Schedule:
        ops = (*waits(self.plan), *self._program.ops)
        return Schedule(ops, self.layered.buffers() if self.layered else ())

    @functools.cached_property
    def _program(self) -> Executable:
        here, there = (
            tuple(x for i, x in self._new.items() if self._is_pinned(i) == pinned)
            for pinned in (False, True)
        )
        return Executable((*self._gradients.ops, *self._update.ops), here, there)

    @functools.cached_property
    def _gradients(self) -> Section:
        grad = self.grad
        if self.layered is not None:
            return self.layered.section
        gives = (*map(self.name, grad.gives), *(self._new[i] for i in grad.outs))
        call = called(grad, grad.jitted)
        return Section((Run("gradients", tuple(map(self.name, grad.takes)), gives, call),))

    @functools.cached_property
    def _update(self) -> Section:
        ops = [op for index, _ in enumerate(self.buckets) for op in self._ops(index)]
        return Section(tuple(ops), self.plan.device_bytes)

    @functools.cached_property
    def _new(self) -> dict[int, Value]:
        """The name of each output: leaves that are updated in slices keep theirs."""
        parts = zip(self.buckets, self.plan.buckets, strict=True)
        sliced = [i for bucket, plan in parts if plan.parts > 1 for i in bucket.outs]
        in_place = filter(self._is_pinned, sliced)
        return self.named_outs(self.buckets) | {i: self.name(self.invars[i]) for i in in_place}

    def _is_pinned(self, out: int) -> bool:
        return out < len(self.plan.new_leaves) and self.invars[out] in self._pinned

    def _ops(self, index: int) -> Iterator[Op]:
        bucket, plan = self.buckets[index], self.plan.buckets[index]
        if plan.parts > 1:
            return SlicedBucket(self.planned, plan, self._pinned).ops(self.name, self._new)
        return self._whole(index, bucket, plan)

    def _whole(self, index: int, bucket: Segment, plan: UpdateBucket) -> Iterator[Op]:
        pinned, name = self._pinned, self.name
        fetched = [var for var in bucket.takes if var in pinned]
        freed = [v for v in fetched if self._last[name(v)] == index and v not in self._unchanged]
        back = [i for i in bucket.outs if self._is_pinned(i)]
        overwritten = [self.invars[i] for i in back]
        # Never fetched, as nothing reads them.
        freed += [var for var in overwritten if name(var) not in self._last]
        yield Fetch(
            tuple(map(name, fetched)), PINNED,
            tuple(pinned[var].with_memory_kind(DEVICE) for var in fetched),
            nbytes=plan.nbytes_at_once, frees=frozenset(map(name, freed)),
        )  # fmt: skip
        gives = (*map(name, bucket.gives), *(self._new[i] for i in bucket.outs))
        call = called(bucket, self.compiled)
        yield Run("a bucket of the update", tuple(map(name, bucket.takes)), gives, call)
        if back:
            places = tuple(pinned[var] for var in overwritten)
            yield Send(tuple(self._new[i] for i in back), PINNED, places, copies=0)

    def __call__(
        self, state: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        run = self.execution(self._program, state, arrays)
        consumed = [run.here[self.name(var)] for var in self.grad.consumes]
        self.run_gradients(run, self._gradients)
        for x in consumed if self.layered else ():  # Programs of parts donate no leaf.
            free(x)
        del consumed  # No reference outlives a bucket that consumes it.
        if self.buckets:
            run.run(self._update)
        outs = {
            i: (run.there if self._is_pinned(i) else run.here)[value]
            for i, value in self._new.items()
        }
        return self.in_order(outs, state)
