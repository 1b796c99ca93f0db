# SPDX-License-Identifier: Apache-2.0
"""`SegmentedStep`: a step as several segments, which hand values to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero.segments._builder import Builder
from jzero.segments._segment import Values


class SegmentedStep:
    """The segments of a step, and the step as one function of them.

    Attributes:
      grad: the forward-backward program.
      buckets: of the optimizer program, as the plan has them.
      leaf_of: for each variable of a leaf of the state, its index.
      plan: with what the forward-backward program says of itself.
      found: the forward-backward program, as the partitioner has written it.
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
        """What the segments take of the caller."""
        return dict(zip(self.invars, [*state, *arrays], strict=True))

    def run(self, state: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """A step on whole arrays, segment after segment; nothing is copied to or from the host."""
        values = self.values(state, arrays)
        outs: dict[int, jax.Array] = {}
        for segment in (self.grad, *self.buckets):
            outs |= segment(values, segment.run)
        return self.in_order(outs, state)

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        """The trace of `run` as one program: what processes compare before they run it."""
        return jax.jit(self.run).trace(state, arrays)

    def in_order(
        self, outs: Mapping[int, jax.Array], state: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """New state and outputs; a leaf that no segment made keeps its value."""
        found = [outs[i] if i in outs else state[i] for i in range(self._num_outs)]
        return found[: self._num_new], found[self._num_new :]
