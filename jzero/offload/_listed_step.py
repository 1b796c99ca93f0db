# SPDX-License-Identifier: Apache-2.0
"""`ListedStep`: a step that runs as a list of operations, as leaves are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE
from jzero.offload._layer_schedule import Output
from jzero.offload._layered import NO_FILES, LayeredSegment
from jzero.offload.execute._executor import NOBODY, Executable, Execution, HostSide, Section
from jzero.offload.schedule._ops import DeviceCall, Value
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Compiled, Segment, SegmentFn, Var
from jzero.segments._segmented import SegmentedStep
from jzero.sharding.plan._backend import Window


class ListedStep(SegmentedStep):
    """The segments of a step, and the names that its values have in the list."""

    def __init__(self, planned: PlannedStep, shardings: Sequence[NamedSharding]):
        self.planned, self.shardings, self.leaves = planned, shardings, planned.plan.leaves
        self.builder = Builder(planned, shardings)
        super().__init__(self.builder)
        # Forward and backward, if parameters are on hosts.
        self.layered: LayeredSegment | None = None
        # The indices of leaves that are stored elsewhere than on the devices.
        self.offloaded = {
            var: i for var, i in self.leaf_of.items() if self.leaves[i].tier != DEVICE
        }
        self._names = dict(zip(self.invars, map(Value.of_leaf, self.leaves), strict=False))

    def cut(self, window: Window, sent: Callable[[Var], bool]) -> None:
        """Cuts forward and backward in parts that fit `window`, if parameters are stored on the hosts."""
        if any(leaf.is_streamed for leaf in self.leaves):
            gradients = [*filter(sent, self.grad.gives)]
            self.layered = LayeredSegment(self.planned, self.grad, gradients, window, self._names)
            self.grad = self.layered.as_segment()

    def given(self, var: Var) -> Output | None:
        """Where a value is that forward and backward give part by part; None for other values."""
        if self.layered is None or var not in self.grad.gives:
            return None
        return self.layered.outputs[self.grad.gives.index(var)]

    def name(self, var: Var) -> Value:
        """The name of a variable in the list; the name on the devices, if it is also sent to the hosts."""
        if var not in self._names:
            output = self.given(var)
            self._names[var] = output.value if output else Value.of_gradient(var.aval)
        return self._names[var]

    def named_leaves(self, indices: Iterable[int]) -> tuple[Value, ...]:
        return tuple(self._names[self.invars[i]] for i in indices)

    def named_outs(self, buckets: Iterable[Segment]) -> dict[int, Value]:
        """A new name for each output of forward and backward and of these buckets, by index."""
        outvars, num = self.planned.frame.jaxpr.outvars, len(self.planned.plan.new_leaves)
        found = {
            i: Value.of_leaf(self.leaves[i]) if i < num else Value.of("output", outvars[i].aval)
            for segment in (self.grad, *buckets) for i in segment.outs
        }  # fmt: skip
        if self.layered is not None:
            outputs = self.layered.outputs[len(self.grad.gives) :]
            pairs = zip(self.grad.outs, outputs, strict=True)
            found |= {i: output.value for i, output in pairs if output}
        return found

    def execution(
        self, program: Executable, state: Sequence[Any], arrays: Sequence[Any], host: HostSide = NOBODY
    ) -> Execution:  # fmt: skip
        """A run of the list that begins with the caller's leaves and arrays."""
        values = self.values(state, arrays)
        here: dict[Any, Any] = self.layered.here(values) if self.layered else {}
        here |= {self.name(var): x for var, x in values.items() if var not in self.offloaded}
        there: dict[Any, Any] = {self.name(var): values[var] for var in self.offloaded}
        return Execution(program, here, there, host)

    def run_gradients(self, run: Execution, gradients: Section) -> None:
        with self.layered.reading(run.there) if self.layered else NO_FILES as files:
            run.run(gradients, files=files)


def called(segment: Segment, run: SegmentFn | Compiled) -> DeviceCall:
    """A segment as a program of what it takes. Only a `Compiled` one is waited for."""
    waits = isinstance(run, Compiled)

    def call(arrays: Sequence[Any], _: int | None) -> Any:
        here = dict(zip(segment.takes, arrays, strict=True))
        made = segment(here, run.of(segment, here) if isinstance(run, Compiled) else run)
        found = [*(here[var] for var in segment.gives), *(made[i] for i in segment.outs)]
        # All results of a program arrive together; no later bucket donates the smallest one.
        return found, sorted(found, key=lambda x: x.size)[: int(waits)]

    return call
