# SPDX-License-Identifier: Apache-2.0
"""`SegmentedStep`: a step as several segments, which pass values to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero.segments._builder import Builder
from jzero.segments._segment import Values


class SegmentedStep:
    """The segments of a step: `grad`, the forward-backward program, and `buckets` of the optimizer program.

    `plan` is completed by `found`, the partitioned forward-backward program. `leaf_of` has the index of each
    variable that is a leaf of the state.
    """

    def __init__(self, builder: Builder):
        self.grad, self.found = builder.forward_backward()
        self.buckets, plan = builder.buckets(), builder.planned.plan
        self.plan = self.found.described(plan)
        self.invars = builder.planned.frame.jaxpr.invars
        self._num_new = len(plan.new_leaves)
        self._num_outs = len(builder.planned.frame.jaxpr.outvars)
        self.leaf_of = {var: i for i, var in enumerate(self.invars[: len(plan.leaves)])}

    def values(self, state: Sequence[Any], arrays: Sequence[Any]) -> Values:
        return dict(zip(self.invars, [*state, *arrays], strict=True))

    def run(self, state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """A step on global arrays, segment by segment, without copies to or from the host."""
        values = self.values(state, arrays)
        outs: dict[int, jax.Array] = {}
        for segment in (self.grad, *self.buckets):
            outs |= segment(values, segment.run)
        return self.in_order(outs, state)

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        """The trace of `run` as one program, which processes compare before they run it."""
        return jax.jit(self.run).trace(state, arrays)

    def in_order(
        self, outs: Mapping[int, jax.Array], state: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The new state and the outputs; a leaf that no segment computes keeps its value."""
        found = [outs[i] if i in outs else state[i] for i in range(self._num_outs)]
        return found[: self._num_new], found[self._num_new :]
